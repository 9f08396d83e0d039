"""Takes ``demo.svg`` from a real run of ``potluck demo``: what a terminal shows at its end."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console, RenderableType
from rich.text import Text

from potluck.apps.cli.demo import problems, summary
from potluck.apps.cli.demo_story import Demo
from potluck.apps.cli.output import Display, Picture, Sentence, timed

PICTURE = Path(__file__).with_name("demo.svg")
COLUMNS = 96
FONTS = "ui-monospace, Menlo, Consolas, monospace"
"""Fonts of the reader's own: the picture loads nothing from elsewhere."""


class Recorder(Display):
    """Records the demo; of the pictures only the last one is kept."""

    def __init__(self) -> None:
        self.console = Console(
            record=True, width=COLUMNS, force_terminal=True, file=io.StringIO(), highlight=False
        )
        self.last: RenderableType = ""

    def tell(self, sentence: Sentence) -> None:
        """Record an event."""
        print(f"{sentence.seconds or 0:6.2f} s  {sentence.text}")
        self.console.print(timed(sentence))

    def show(self, picture: Picture) -> None:
        """Keep the picture."""
        self.last = picture.draw()


def main() -> int:
    """Run the demo and write the picture; 1 if the demo failed."""
    recorder = Recorder()
    console = recorder.console
    console.print(Text("$ potluck demo", "bold"))
    facts = Demo(recorder, kill=2).run()
    console.print(recorder.last)
    console.print()
    for sentence in summary(facts):
        console.print(Text(sentence))
    drawn = console.export_svg(title="potluck demo")
    drawn = re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL)
    drawn = re.sub(r"<!--.*?-->", "", drawn).replace("Fira Code, monospace", FONTS)
    PICTURE.write_text(drawn, encoding="utf-8")
    return 1 if problems(facts) else 0


if __name__ == "__main__":
    sys.exit(main())
