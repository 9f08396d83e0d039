"""Takes ``demo.svg`` from a real run of ``potluck demo``: what a terminal shows at its end."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console, Group
from rich.text import Text

from potluck.apps.cli.demo_story import Crew, Scene, Settings, Story, event, picture

PICTURE = Path(__file__).with_name("demo.svg")
COLUMNS = 96
FONTS = "ui-monospace, Menlo, Consolas, monospace"
"""Of the reader's own: a picture loads nothing from elsewhere."""


class Photographer:
    """Watches the demo, and keeps what it sees."""

    def __init__(self) -> None:
        self.console = Console(
            record=True, width=COLUMNS, force_terminal=True, file=io.StringIO(), highlight=False
        )
        self.last: Group | None = None

    def say(self, seconds: float, sentence: str, *, grave: bool = False) -> None:
        """An event."""
        print(f"{seconds:6.2f} s  {sentence}")
        self.console.print(event(seconds, sentence, grave=grave))

    def show(self, scene: Scene) -> None:
        """The picture below them; only the last one stays."""
        if scene.progress is not None:
            self.last = picture(scene)


def main() -> int:
    """Run the demo and write the picture; says whether the story held."""
    photographer = Photographer()
    console = photographer.console
    console.print(Text("$ potluck demo", "bold"))
    with Crew(Settings(kill=2), photographer) as crew:
        report = Story(crew).run()
    console.print(photographer.last or "")
    console.print()
    for sentence in report.sentences():
        console.print(Text(sentence))
    drawn = console.export_svg(title="potluck demo")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<!--.*?-->", "", drawn).replace("Fira Code, monospace", FONTS)
    PICTURE.write_text(drawn, encoding="utf-8")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
