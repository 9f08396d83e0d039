"""How commands show what happens: live in a terminal, as lines elsewhere, as JSON for programs.

A command opens a :class:`Display` once, says sentences, and shows a :class:`Picture` as often as it
likes.  Each kind of display takes from the picture what fits: a drawing, a line, or facts.
"""

from __future__ import annotations

import codecs
import io
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

WIDE = 160
"""Columns of a table that does not go to a terminal."""

REDRAW = 0.1
"""Seconds between two drawings of a live picture."""

GRAVE = "bold red"
"""The style of a sentence about a failure."""


@dataclass(frozen=True)
class Sentence:
    """Something that is said once."""

    text: str | Text
    style: str = ""
    is_grave: bool = False
    """Whether it is about a failure."""
    seconds: float | None = None
    """When it happened, after the beginning."""
    facts: Any = None
    """The same for programs; without them they get the text."""


class Picture(Protocol):
    """What a command shows while it works.  Each form is made only where it is wanted."""

    def draw(self) -> RenderableType:
        """For a terminal, where it is drawn in place."""

    def line(self) -> RenderableType:
        """For files and pipes, in one line or a few; empty for nothing."""

    def facts(self) -> Any:
        """For programs; None for nothing."""


class Display:
    """Shows nothing; the other kinds are below."""

    is_live = False
    """Whether what is shown takes the place of what was shown before."""

    def say(
        self,
        text: str | Text,
        *,
        style: str = "",
        grave: bool = False,
        seconds: float | None = None,
        facts: Any = None,
    ) -> None:
        """Say something once; ``grave`` if it is a failure, ``seconds`` after the beginning."""
        self.tell(Sentence(text, GRAVE if grave else style, grave, seconds, facts))

    def tell(self, sentence: Sentence) -> None:
        """Say something once."""

    def show(self, picture: Picture) -> None:
        """Show how things are now; may be called often."""

    def finish(self) -> None:
        """Show how things were last, if that was put off."""


class LiveDisplay(Display):
    """For a terminal: sentences scroll, and the picture stays below them."""

    is_live = True

    def __init__(self, live: Live) -> None:
        self._live = live
        self._shown_at = 0.0
        self._skipped: Picture | None = None

    def tell(self, sentence: Sentence) -> None:
        """Print it above the picture."""
        self._live.console.print(timed(sentence))
        self._shown_at = 0.0  # what has changed is drawn at once

    def show(self, picture: Picture) -> None:
        """Draw it, unless that was done a moment ago."""
        if time.monotonic() - self._shown_at >= REDRAW:
            self._draw(picture)
        else:
            self._skipped = picture

    def finish(self) -> None:
        """Draw the last picture, if it was skipped."""
        if self._skipped is not None:
            self._draw(self._skipped)

    def _draw(self, picture: Picture) -> None:
        self._shown_at, self._skipped = time.monotonic(), None
        self._live.update(picture.draw(), refresh=True)


class PlainDisplay(Display):
    """For files, pipes and simple terminals: a line for each sentence and for each change."""

    def __init__(self, to: Console, *, prefix: str = "", every: float = 0.0) -> None:
        self._console = to
        self._prefix, self._every = prefix, every
        self._last: RenderableType = ""
        self._shown_at = time.monotonic()

    def tell(self, sentence: Sentence) -> None:
        """Print a line."""
        clock = "" if sentence.seconds is None else f"{sentence.seconds:6.2f} s  "
        print_line(self._console, f"{self._prefix}{clock}{sentence.text}")

    def show(self, picture: Picture) -> None:
        """Print its line if that is another one, and the last is old enough."""
        now = time.monotonic()
        if self._every and now - self._shown_at < self._every:
            return
        line = picture.line()
        if line and line != self._last:
            self._last, self._shown_at = line, now
            print_line(self._console, f"{self._prefix}{line}" if isinstance(line, str) else line)


class JsonDisplay(Display):
    """For programs: a JSON object in a line for each sentence and for each change."""

    def __init__(self, *, stderr: bool = False) -> None:
        self._stderr = stderr
        self._last: Any = None

    def tell(self, sentence: Sentence) -> None:
        """Print its facts, or it as an error or a note."""
        note = {"error" if sentence.is_grave else "note": str(sentence.text)}
        print_json(sentence.facts or note, stderr=self._stderr)

    def show(self, picture: Picture) -> None:
        """Print the facts if they have changed."""
        facts = picture.facts()
        if facts is not None and facts != self._last:
            self._last = facts
            print_json(facts, stderr=self._stderr)


@contextmanager
def open_display(
    to: Console,
    *,
    json: bool = False,
    quiet: bool = False,
    prefix: str = "",
    every: float = 0.0,
    transient: bool = False,
    moving: bool = False,
) -> Iterator[Display]:
    """The display that fits the reader.

    A plain line begins with ``prefix``; lines of pictures are ``every`` seconds apart.  A
    ``transient`` picture disappears at the end, a ``moving`` one is drawn anew all the time.
    """
    if quiet:
        yield Display()
    elif json:
        yield JsonDisplay(stderr=to.stderr)
    elif is_live(to):
        from rich.live import Live

        with Live(
            console=to, auto_refresh=moving, refresh_per_second=1 / REDRAW, transient=transient
        ) as live:
            display = LiveDisplay(live)
            yield display
            display.finish()
    else:
        yield PlainDisplay(to, prefix=prefix, every=every)


def working(words: str, *, silent: bool = False) -> AbstractContextManager[object]:
    """Show these words and a moving sign on stderr while a block runs, to a person only."""
    to = console(stderr=True)
    return nullcontext() if silent or not is_live(to) else to.status(words)


# --------------------------------------------------------------------------------------------------
# What displays are made of.


def console(*, stderr: bool = False, wide: int = WIDE) -> Console:
    """The terminal; for a file or a pipe, wide enough that no cell of a table is cut."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made.width = wide
    return made


def is_live(to: Console) -> bool:
    """Whether a picture can be drawn in place."""
    return to.is_terminal and not to.is_dumb_terminal


def print_json(facts: Any, *, stderr: bool = False) -> None:
    """One JSON object in a line, at once."""
    import msgspec
    import typer

    typer.echo(msgspec.json.encode(facts).decode(), err=stderr)


def print_line(to: Console, line: RenderableType, style: str = "") -> None:
    """Print what a terminal breaks between words, and a file keeps in one line."""
    from rich.text import Text

    to.print(Text(line, style) if isinstance(line, str) else line, soft_wrap=not to.is_terminal)


def table(left: Sequence[str], right: Sequence[str] = (), *, gap: int = 2) -> Table:
    """An empty table with columns of words, then columns of figures."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, padding=(0, gap, 0, 0), show_edge=False)
    for title in left:
        made.add_column(title)
    for title in right:
        made.add_column(title, justify="right")
    return made


def timed(sentence: Sentence) -> RenderableType:
    """A sentence, with the time on the left of all its lines."""
    from rich.table import Table
    from rich.text import Text

    text = sentence.text
    text = Text(text, sentence.style) if isinstance(text, str) else text
    if sentence.seconds is None:
        return text
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(Text(f"{sentence.seconds:6.2f} s", "dim"), text)
    return line


def list_names(names: Sequence[str]) -> str:
    """Several names in a sentence.

    >>> list_names(["desk", "laptop", "attic"])
    'desk, laptop and attic'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def size(count: float) -> str:
    """Bytes for people.

    >>> size(800_000), size(98_765_432_100)
    ('0.8 MB', '98.8 GB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"  # noqa: PLR2004


BARS = "▁▂▃▄▅▆▇█"


def sparkline(
    points: Sequence[tuple[int, float]], last: int, low: float, high: float, *, width: int = 24
) -> str:
    """Values by step as a line of text, on a scale that several lines can share.

    >>> sparkline([(1, 4.0), (25, 2.0), (50, 0.0)], last=100, low=0.0, high=4.0, width=48)
    '████████████▅▅▅▅▅▅▅▅▅▅▅▅▁'
    """
    scale = len(BARS) / (high - low) if high > low else 0.0
    columns = {
        column_of(step, last, width): BARS[min(int((value - low) * scale), len(BARS) - 1)]
        for step, value in points
    }
    line, bar = "", next(iter(columns.values()), "")
    for column in range(max(columns, default=-1) + 1):
        bar = columns.get(column, bar)
        line += bar
    return line


def column_of(step: int, last: int, width: int) -> int:
    """Where a step is on a line of that width."""
    return min(width, step * width // max(1, last))


PLAIN_SIGNS = {**dict(zip(BARS, " .:-=+*#", strict=True)), "–": "-", "·": "|", "✕": "x", "↑": "^"}
"""What replaces a character that the terminal's encoding lacks."""


def replace_missing_signs(stream: object) -> None:
    """Let a stream replace what its encoding lacks, instead of failing."""
    codecs.register_error("potluck.plain", _plain)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="potluck.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)  # it is registered for encoding alone
    missing = error.object[error.start : error.end]
    return "".join(PLAIN_SIGNS.get(sign, "?") for sign in missing), error.end
