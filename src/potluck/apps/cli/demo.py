"""``potluck demo``: several processes train one model, one of them is killed, the rest go on."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Annotated, NoReturn

import typer

from potluck.apps.cli.options import Json

__all__ = ["EXAMPLES", "demo"]

EXAMPLES = """\
potluck demo                       four ranks, about twelve seconds
potluck demo --ranks 8 --kill 0    rank 0 may go as well: it is nothing special
potluck demo --json | jq .noticed  how fast the others noticed
"""


def demo(
    *,
    ranks: Annotated[int, typer.Option(min=2, max=64, help="How many processes.")] = 4,
    seconds: Annotated[float, typer.Option(min=0.2, max=3600, help="Time spent training.")] = 10.0,
    kill: Annotated[
        int | None,
        typer.Option(min=0, help="Which rank is killed half-way.", show_default="the last"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Data and first parameters follow from it.")] = 0,
    json: Json = False,
) -> None:
    """Train a small model on several processes of this machine, and kill one on the way.

    The ranks talk over TCP, as they would between machines.  The survivors notice the loss, form a
    new group and finish the training.  Needs neither torch nor a second machine.
    """
    victim = ranks - 1 if kill is None else kill
    if victim >= ranks:
        raise typer.BadParameter(f"there are only ranks 0 to {ranks - 1}", param_hint="--kill")
    from rich.console import Console
    from rich.text import Text

    from potluck.apps.cli.demo_director import Director, Settings
    from potluck.apps.cli.demo_screen import open_screen

    signal.signal(signal.SIGTERM, _end)
    console = Console()
    settings = Settings(ranks, seconds, victim, seed)
    with open_screen(console, silent=json) as screen, Director(settings, screen) as director:
        report = director.run()
    if json:
        typer.echo(report.to_json())
    else:
        console.print()
        for sentence in report.sentences():
            console.print(Text(sentence), soft_wrap=not console.is_terminal)
    if not report.is_identical:
        raise typer.Exit(1)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """Let a polite request to end unwind the stack, so that no process is left."""
    raise SystemExit(128 + number)
