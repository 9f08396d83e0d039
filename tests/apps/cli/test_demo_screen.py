"""What the demo draws, as text."""

import io

import pytest
from rich.console import Console

from potluck.apps.cli.demo_members import Standing
from potluck.apps.cli.demo_messages import Progress
from potluck.apps.cli.demo_screen import (
    LiveScreen,
    PlainScreen,
    SilentScreen,
    open_screen,
    picture,
    sparkline,
)


def progress(**changes: float) -> Progress:
    """Large but possible figures."""
    facts: dict[str, float] = {
        "step": 12_345,
        "loss": 0.2,
        "own_loss": 0.25,
        "sent": 98_765_432_100,
        "messages": 1_000_000,
        "message_rate": 123_456.0,
        "byte_rate": 2.5e9,
    }
    return Progress(**facts | changes)  # type: ignore[arg-type]


MEMBERS = [
    Standing(0, 4_194_303, "training", progress()),
    Standing(1, 4_194_304, "killed", progress(step=99)),
    Standing(2, 4_194_305, "joining"),
]


def console(*, terminal: bool, dumb: bool = False) -> Console:
    """A console of 80 columns that writes to memory."""
    variables = {"TERM": "dumb" if dumb else "xterm"}
    return Console(file=io.StringIO(), width=80, force_terminal=terminal, _environ=variables)


def written(to: Console) -> str:
    """What it was given."""
    assert isinstance(to.file, io.StringIO)
    return to.file.getvalue()


def test_the_table_fits_a_small_terminal() -> None:
    """Large figures included, no line is wrapped or cut at 80 columns."""
    to = console(terminal=False)
    to.print(picture(MEMBERS, [(1, 0.8), (2, 0.2)]))
    lines = written(to).splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in written(to)
    (training,) = [line for line in lines if "training" in line]
    assert training.split() == [
        *("0", "4194303", "training", "12,345", "0.2500", "98.8", "GB", "123,456", "2.5", "GB/s"),
    ]
    (killed,) = [line for line in lines if "killed" in line]
    assert killed.split()[-2:] == ["–", "–"]  # nothing moves there any more
    assert lines[-1].strip() == "loss of all  █▁  0.2000"


def test_before_the_first_news_there_is_a_table_too() -> None:
    """Nothing is known yet, and nothing breaks."""
    to = console(terminal=False)
    to.print(picture([Standing(0, 1)], []))
    assert "starting" in written(to)


@pytest.mark.parametrize(
    ("values", "curve"), [([], ""), ([1.0], "▁"), ([2.0, 2.0], "▁▁"), ([0.0, 7.0], "▁█")]
)
def test_a_curve_is_drawn_from_few_values(values: list[float], curve: str) -> None:
    """Nothing, one value, or no difference between them."""
    assert sparkline(values) == curve


def test_a_long_curve_keeps_its_ends() -> None:
    """It is thinned out, not cut off."""
    curve = sparkline([float(1000 - index) for index in range(1000)], width=10)
    assert len(curve) == 10
    assert (curve[0], curve[-1]) == ("█", "▁")


@pytest.mark.parametrize(
    ("to", "silent", "kind"),
    [
        (console(terminal=True), False, LiveScreen),
        (console(terminal=False), False, PlainScreen),
        (console(terminal=True, dumb=True), False, PlainScreen),
        (console(terminal=True), True, SilentScreen),
    ],
)
def test_the_screen_fits_the_reader(to: Console, silent: bool, kind: type) -> None:
    """A terminal, a pipe, a simple terminal, a machine."""
    with open_screen(to, silent=silent) as screen:
        assert isinstance(screen, kind)
        screen.say("Soup at [::1]:29500 [red]is[/red] ready.")
        screen.show(MEMBERS, [(1, 0.5)])
    # What an error says is text: no part of it is taken for a colour or vanishes.
    assert ("Soup at [::1]:29500 [red]is[/red] ready." in written(to)) is not silent
