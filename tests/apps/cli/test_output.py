"""What a command shows fits its reader: a terminal, a pipe, a simple terminal, a program."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console
from rich.text import Text

from potluck.apps.cli.output import (
    Display,
    JsonDisplay,
    LiveDisplay,
    PlainDisplay,
    open_display,
    sparkline,
)


class Kettle:
    """Something to show."""

    def __init__(self, degrees: int) -> None:
        self.degrees = degrees

    def draw(self) -> Text:
        """For a terminal."""
        return Text(f"drawn at {self.degrees}")

    def line(self) -> str:
        """For a pipe."""
        return f"{self.degrees} degrees" if self.degrees else ""

    def facts(self) -> dict[str, int]:
        """For a program."""
        return {"degrees": self.degrees}


def make_console(*, terminal: bool, dumb: bool = False, **variables: str) -> Console:
    """A console of 80 columns that writes to memory."""
    given = {"TERM": "dumb" if dumb else "xterm", **variables}
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, _environ=given)


def written(to: Console) -> str:
    """What it was given."""
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


@pytest.mark.parametrize(
    ("to", "quiet", "kind"),
    [
        (make_console(terminal=True), False, LiveDisplay),
        (make_console(terminal=False), False, PlainDisplay),
        (make_console(terminal=True, dumb=True), False, PlainDisplay),
        (make_console(terminal=True), True, Display),
    ],
)
def test_the_output_fits_the_reader(to: Console, quiet: bool, kind: type) -> None:
    """What is said is text: no part of it is taken for a colour or disappears."""
    with open_display(to, quiet=quiet) as display:
        assert type(display) is kind
        display.say("Soup at [::1]:29500 [red]is[/red] ready.", grave=True, seconds=1.5)
        display.show(Kettle(90))
    assert ("Soup at [::1]:29500 [red]is[/red] ready." in written(to)) is not quiet
    assert ("90" in written(to)) is not quiet


def test_a_pipe_gets_a_line_for_each_change() -> None:
    """And none for a picture without a line, or one that is shown again."""
    to = make_console(terminal=False)
    with open_display(to, prefix="potluck: ") as display:
        for degrees in (0, 20, 20, 30):
            display.show(Kettle(degrees))
        display.say("Done.", seconds=2.5)
    assert written(to).splitlines() == [
        "potluck: 20 degrees",
        "potluck: 30 degrees",
        "potluck:   2.50 s  Done.",
    ]


def test_lines_come_no_more_often_than_wanted() -> None:
    """The first one too comes after that time."""
    to = make_console(terminal=False)
    with open_display(to, every=3600.0) as display:
        display.show(Kettle(20))
    assert written(to) == ""


def test_a_program_gets_an_object_for_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    """Sentences are notes or errors; all of it goes where the console does."""
    with open_display(Console(stderr=True), json=True) as display:
        assert isinstance(display, JsonDisplay)
        for degrees in (20, 20, 30):
            display.show(Kettle(degrees))
        display.say("Nearly there.")
        display.say("It boils over.", grave=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert [json.loads(line) for line in err.splitlines()] == [
        {"degrees": 20},
        {"degrees": 30},
        {"note": "Nearly there."},
        {"error": "It boils over."},
    ]


def test_a_sentence_may_have_facts_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    """Everybody else gets the sentence."""
    facts = {"event": "paired"}
    with open_display(Console(), json=True) as display:
        display.say("laptop has joined.", facts=facts)
    assert json.loads(capsys.readouterr().out) == facts
    to = make_console(terminal=False)
    with open_display(to) as display:
        display.say("laptop has joined.", facts=facts)
    assert written(to) == "laptop has joined.\n"


def test_no_color_means_no_colour() -> None:
    """The picture is the same, only plain."""
    to = make_console(terminal=True, NO_COLOR="1")
    with open_display(to) as display:
        display.say("sage is killed.", grave=True, seconds=1.0)
        display.show(Kettle(90))
    assert "killed" in written(to)
    assert not any(f"\x1b[{colour}m" in written(to) for colour in range(30, 38))
    assert ";3" not in written(to)


def test_a_curve_keeps_its_ends() -> None:
    """A long one is thinned out, not cut off; one that has just begun is short."""
    falling = [(step, 1.0 - step / 1000) for step in range(1, 1001)]
    curve = sparkline(falling, 1000, 0.0, 1.0, width=48)
    assert len(curve) == 49
    assert (curve[0], curve[-1]) == ("█", "▁")
    assert sparkline([], 10, 0.0, 1.0) == ""
    assert sparkline([(1, 2.0)], 1000, 2.0, 2.0) == "▁"
