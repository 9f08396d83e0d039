"""``potluck demo``: nodes find each other and train; one is killed, and comes back."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from potluck.apps.cli.common import Json

if TYPE_CHECKING:
    from potluck.apps.cli.demo_story import Report, Settings


EXAMPLES = """\
potluck demo                       three nodes, less than a minute
potluck demo --nodes 5 --kill 0    rank 0, the leader, may go as well: it is nothing special
potluck demo --json | jq .noticed  how fast the others noticed
"""

EXIT_CODES = (
    "Exit codes: 0 everything went as it should, 1 it did not (the reason is on stderr), "
    "2 wrong usage, 130 interrupted."
)

MOST = 16
"""Nodes: more of them on one machine would only show how busy it is."""


def demo(
    *,
    nodes: Annotated[int, typer.Option(min=2, max=MOST, help="How many nodes.")] = 3,
    steps: Annotated[
        int, typer.Option(min=4, max=100_000, help="Train for at least so many steps.")
    ] = 240,
    kill: Annotated[
        int | None,
        typer.Option(min=0, help="Which rank is killed on the way.", show_default="the last"),
    ] = None,
    no_kill: Annotated[bool, typer.Option("--no-kill", help="Kill nobody.")] = False,
    multicast: Annotated[
        bool, typer.Option(help="Find each other by multicast DNS, or by addresses given.")
    ] = True,
    seconds: Annotated[
        float, typer.Option(min=1, max=3600, help="Give up after so many seconds.")
    ] = 110.0,
    seed: Annotated[int, typer.Option(min=0, help="Data and first parameters follow from it.")] = 0,
    json: Json = False,
) -> None:
    """Watch a small cluster on this machine lose a node in the middle of training, and get it back.

    Nodes in processes of their own find each other, train one model and average gradients over
    encrypted connections, as they would between machines.  One is killed; the others notice, agree
    to go on, and let it in again.  Then the same training runs undisturbed, to compare.  Nothing of
    yours is touched.  Needs neither torch nor a second machine.
    """
    from potluck.apps.cli.demo_story import Settings

    victim = nodes - 1 if kill is None else kill
    if victim >= nodes:
        raise typer.BadParameter(f"there are only ranks 0 to {nodes - 1}", param_hint="--kill")
    settings = Settings(
        nodes=nodes,
        steps=steps,
        seed=seed,
        kill=None if no_kill else victim,
        seconds=seconds,
        multicast=multicast,
    )
    report = _play(settings, silent=json)
    if json:
        typer.echo(report.to_json())
    else:
        _sum_up(report)
    if report.problems:
        typer.echo(f"potluck: The story did not hold: {'; '.join(report.problems)}.", err=True)
        raise typer.Exit(1)


def _play(settings: Settings, *, silent: bool) -> Report:
    from rich.console import Console

    from potluck.apps.cli.demo_story import (
        ENDINGS,
        Crew,
        NodeFailed,
        Story,
        open_screen,
        speak_plainly,
    )

    for name in ENDINGS[1:]:  # Python itself makes an exception of Ctrl-C
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), _end)
    speak_plainly(sys.stdout)
    try:
        with open_screen(Console(), silent=silent) as screen, Crew(settings, screen) as crew:
            return Story(crew).run()
    except NodeFailed as error:
        if error.trace:
            typer.echo(error.trace.rstrip(), err=True)
        raise


def _sum_up(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console()
    console.print()
    for sentence in report.sentences():
        console.print(Text(sentence), soft_wrap=not console.is_terminal)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """Let a polite request to end unwind the stack, so that no process is left."""
    raise SystemExit(128 + number)
