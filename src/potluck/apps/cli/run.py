"""``potluck run``: waits for the other machines, compares notes, and runs a script."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.apps.cli.options import Namespace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from potluck.apps.cli.run_gathering import Gathering
    from potluck.apps.cli.run_screen import Screen
    from potluck.runtime.observing import Observer

__all__ = ["EXAMPLES", "EXIT_CODES", "SETTINGS", "run"]

EXAMPLES = """\
potluck run train.py --epochs 3         on each machine; begins when all of the circle are there
potluck run --nodes 2 train.py          begins when two are there; others may come later
potluck run --per-node 4 train.py       four workers on this machine
potluck run --resume train.py           go on after a power cut from what was saved last
potluck run --serve train.py            and show it in a browser meanwhile
potluck run --peer desk:52416 train.py  where machines do not find each other by themselves
"""

EXIT_CODES = (
    "Exit codes: the script's own (of several workers that of the one that failed first); 1 failed "
    "before it began (the reason is on stderr), 2 wrong usage, 3 not enough machines came in time, "
    "128 + n ended by signal n."
)

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""What follows the script is the script's."""

TOO_FEW = 3

AGREEMENT = 5.0
"""Seconds to agree on ranks once all are ready; without that, potluck.join() agrees on them."""

MOST_WORKERS = 1024

PAUSE = 0.25
"""Seconds between two looks at who is here, if nobody reports before."""


def run(
    script: Annotated[Path, typer.Argument(help="The Python script to run.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Handed to the script.", show_default=False),
    ] = None,
    *,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="How many machines must be there.", show_default="all of the namespace"
        ),
    ] = None,
    per_node: Annotated[
        int, typer.Option(min=1, max=MOST_WORKERS, help="How many workers to start here.")
    ] = 1,
    job: Annotated[
        str | None,
        typer.Option(
            envvar="POTLUCK_JOB",
            help="Only those with the same job meet.",
            show_default="the script's name",
        ),
    ] = None,
    namespace: Namespace = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Try this address too; may be given several times."),
    ] = None,
    timeout: Annotated[
        float | None,
        typer.Option(min=0, help="Give up after so many seconds.", show_default="never"),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Begin even if the scripts differ.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on from the last good checkpoint, if there is one."),
    ] = False,
    fresh_start: Annotated[
        bool,
        typer.Option("--fresh-start", help="With --resume: begin anew if all are damaged."),
    ] = False,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Where elastic trainings save that name no folder.",
            show_default=False,
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Show the run in a browser, on this machine.")
    ] = False,
    serve_at: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="The same at this address, with a token."),
    ] = None,
    json: Annotated[
        bool, typer.Option("--json", help="Tell who is here as lines of JSON on stderr.")
    ] = False,
) -> None:
    """Run a script on several machines together: type this on each of them.

    Waits until enough machines are there, shows who is here and who is missing, and says who
    differs in script, arguments or versions.  Inside the script, potluck.join() then finds the same
    machines; the variables of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR ...) are set.
    """
    from potluck.apps.cli.dashboard_serving import serving
    from potluck.apps.cli.run_child import (
        child_environments,
        facts_of,
        run_scripts,
        saving_environment,
    )
    from potluck.apps.cli.run_gathering import Gathering
    from potluck.apps.cli.run_screen import open_screen
    from potluck.apps.cli.run_workers import dump_signal_ignored
    from potluck.runtime.auto_config import AutoDiscoveryConfig
    from potluck.runtime.observing import STARTING, STOPPING, Observer
    from potluck.runtime.observing_window import find_web_server

    if not script.is_file():
        raise typer.BadParameter(f"{script} is no file", param_hint="SCRIPT")
    given = list(arguments or [])
    name = job or script.name
    place = serve_at or ("127.0.0.1" if serve else None)
    if place is not None:
        find_web_server()  # before anybody waits
    facts = facts_of(script, given, per_node)
    config = AutoDiscoveryConfig(job=name, namespace=namespace, peers=tuple(peer or ()))
    with (
        dump_signal_ignored(),
        Observer(config, job=name, facts=facts) as observer,
        open_screen(json=json) as screen,
    ):
        expected = _roster(observer)
        wanted = nodes or max(len(expected), 1)
        if nodes is None and len(expected) <= 1:
            name_of = observer.namespace.name
            screen.say(f'No other machine is paired in "{name_of}", so this one runs alone.')
            screen.say("`potluck pair` adds machines; --nodes N waits for N in any case.")
        gathering = Gathering(observer.own_report(), wanted, expected)
        _wait(observer, gathering, screen, timeout, wants_all=nodes is None)
        may_begin = _check(gathering, screen) or anyway
        roll = "" if gathering.crew is None else gathering.crew.roll
        observer.tell(STARTING if may_begin else STOPPING, roll=roll)
        if not may_begin:
            screen.say("Copy the same script to all machines, or begin with --anyway.", grave=True)
            raise typer.Exit(1)
        saving = saving_environment(resume=resume, fresh_start=fresh_start, folder=checkpoints)
        environments = [
            {**each, **saving}
            for each in child_environments(observer, gathering, config.peers, facts)
        ]
    with dump_signal_ignored(), serving(config, name, place, json=json):
        code = run_scripts([str(script), *given], environments)
    raise typer.Exit(code)


def _roster(observer: Observer) -> Mapping[str, str]:
    """The machines that belong to the namespace, by id."""
    roster = observer.port.members.roster
    if roster is None:
        return {}
    return {member.node_id: member.name for member in roster.members}


def _wait(
    observer: Observer,
    gathering: Gathering,
    screen: Screen,
    timeout: float | None,
    *,
    wants_all: bool,
) -> None:
    import time

    deadline = None if timeout is None else time.monotonic() + timeout
    news = observer.news
    agree_by: float | None = None
    while True:
        if wants_all:  # the others may know of machines that were paired elsewhere
            gathering.expect(_roster(observer))
        gathering.look([*observer.parted, *observer.reports])
        gathering.hosts |= observer.hosts
        state = "ready" if gathering.is_complete else "waiting"
        roll = gathering.say(state)
        observer.tell(state, roll=roll)
        screen.show(gathering)
        if not gathering.may_start:
            agree_by = None
        else:
            agree_by = agree_by or time.monotonic() + AGREEMENT
            if gathering.crew is not None or not roll or time.monotonic() >= agree_by:
                return
        if deadline is not None and time.monotonic() >= deadline:
            _give_up(observer, gathering, screen, timeout or 0.0)
        news = observer.wait_for_news(news, PAUSE)


def _give_up(observer: Observer, gathering: Gathering, screen: Screen, seconds: float) -> None:
    screen.say(f"Gave up after {seconds:g} s: {gathering.status_line()}.", grave=True)
    for who, why in list(observer.troubles.items())[:5]:
        screen.say(f"{who} was seen but could not be reached: {why}", grave=True)
    screen.say("Is `potluck run` typed on the others too? `potluck doctor` looks for reasons.")
    raise typer.Exit(TOO_FEW)


def _check(gathering: Gathering, screen: Screen) -> bool:
    """Say in what the machines differ; whether they may begin like that."""
    found = gathering.differences
    for difference in found:
        screen.say(f"{difference}.", grave=difference.is_grave)
    return not any(each.is_grave for each in found)
