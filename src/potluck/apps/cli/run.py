"""``potluck run``: waits for the other machines, compares notes, and runs a script."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.apps.cli.common import Namespace, Peer
from potluck.apps.cli.output import console, open_display

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from potluck.apps.cli.launcher import LauncherWait
    from potluck.apps.cli.output import Display
    from potluck.apps.cli.run_child import JobWatcher
    from potluck.apps.cli.run_places import Participants
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.observer import Observer


EXAMPLES = """\
potluck run train.py --epochs 3         on each machine; begins when all of the group are there
potluck run --nodes 2 train.py          begins when two are there; others may come later
potluck run --per-node 4 train.py       four workers on this machine
potluck run --resume train.py           resume from the last checkpoint, e.g. after a power cut
potluck run --serve train.py            and show it in a browser meanwhile
potluck run --peer desk:52416 train.py  where machines do not find each other by themselves
"""

EXIT_CODES = (
    "Exit codes: the script's own (of several workers that of the one that failed first); 1 failed "
    "before it began (the reason is on stderr), 2 wrong usage, 3 ended by --timeout, "
    "128 + n ended by signal n."
)

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""What follows the script is the script's."""

WRONG_USAGE, TOO_LATE = 2, 3

COPIES = "Each machine needs its own copy."

AGREEMENT = 5.0
"""Seconds to agree on ranks once all are ready; without that, potluck.join() agrees on them."""

MOST_WORKERS = 1024

PAUSE = 0.25
"""Seconds between two looks at who is here, if no machine reports before."""


def run(
    script: Annotated[Path, typer.Argument(help="The Python script to run.", show_default=False)],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(help="Arguments of the script.", show_default=False),
    ] = None,
    *,
    nodes: Annotated[
        int | None,
        typer.Option(
            min=1, help="Number of machines to wait for.", show_default="all of the group"
        ),
    ] = None,
    per_node: Annotated[
        int, typer.Option(min=1, max=MOST_WORKERS, help="How many workers to start here.")
    ] = 1,
    job: Annotated[
        str | None,
        typer.Option(
            envvar="POTLUCK_JOB",
            help="Job name; machines with the same name train together.",
            show_default="the script's name",
        ),
    ] = None,
    namespace: Namespace = None,
    peer: Peer = None,
    timeout: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="SECONDS",
            help="End the whole command after this time, the script included.",
            show_default="never",
        ),
    ] = None,
    anyway: Annotated[
        bool, typer.Option("--anyway", help="Begin even if the scripts differ.")
    ] = False,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Resume from the last good checkpoint, if there is one."),
    ] = False,
    fresh_start: Annotated[
        bool,
        typer.Option("--fresh-start", help="With --resume: begin anew if all are damaged."),
    ] = False,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Default checkpoint folder for elastic training.",
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
        bool, typer.Option("--json", help="Print progress as JSON lines on stderr.")
    ] = False,
) -> None:
    """Run a script on several machines together: type this on each of them.

    Waits until enough machines are there, shows who is here and who is missing, and says who
    differs in script, arguments or versions.  Inside the script, potluck.join() then finds the same
    machines; the variables of torchrun (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR ...) are set.
    """
    from potluck.apps.cli.run_child import facts_of, saving_environment
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.observer import find_web_server

    began = monotonic()
    if not script.is_file():
        what = "a folder, not a script" if script.is_dir() else ""
        typer.echo(
            f"{script} is {what}." if what else f"There is no file {script} here. {COPIES}",
            err=True,
        )
        raise typer.Exit(WRONG_USAGE)
    place = serve_at or ("127.0.0.1" if serve else None)
    if place is not None:
        find_web_server()  # before anybody waits
    given = list(arguments or [])
    order = _RunOptions(
        command=[str(script), *given],
        config=AutoDiscoveryConfig(
            job=job or script.name, namespace=namespace, peers=tuple(peer or ())
        ),
        facts=facts_of(script, given, per_node),
        saving=saving_environment(resume=resume, fresh_start=fresh_start, folder=checkpoints),
        nodes=nodes,
        began=began,
        timeout=timeout,
        anyway=anyway,
        json=json,
    )
    raise typer.Exit(order.carry_out(place))


@dataclass(frozen=True, kw_only=True)
class _RunOptions:
    """What a person has typed."""

    command: Sequence[str]
    config: AutoDiscoveryConfig
    facts: Mapping[str, str]
    saving: Mapping[str, str]
    nodes: int | None
    began: float
    timeout: float | None
    anyway: bool
    json: bool

    def carry_out(self, place: str | None) -> int:
        """Wait for the others and run the script, with a dashboard at a place; its exit code."""
        from potluck.apps.cli.dashboard import serving
        from potluck.apps.cli.launcher import dump_signal_ignored, run_workers
        from potluck.apps.cli.run_places import COMPANY, open_company

        job = self.config.job_name
        with dump_signal_ignored():
            company, places, told, environments = self._gather(job)
            quiet = replace(self.config, peers=places)
            with (
                open_company(company, quiet, told, port=int(self.facts[COMPANY])),
                serving(self.config, job, place, json=self.json),
            ):
                return run_workers(
                    self.command,
                    environments,
                    company,
                    deadline=inf if self.timeout is None else self.began + self.timeout,
                    patience=self.timeout or 0.0,
                )

    def _gather(
        self, job: str
    ) -> tuple[Participants, list[str], dict[str, str], list[dict[str, str]]]:
        """Wait until all are here; who they are, and what the script is told."""
        from potluck.apps.cli.launcher import LauncherWait
        from potluck.apps.cli.run_child import (
            JobWatcher,
            child_environments,
            company_of,
            first_words,
        )
        from potluck.cluster.observer import STARTING, STOPPING, Observer

        with ExitStack() as stack:
            observer = stack.enter_context(Observer(self.config, job=job, facts=self.facts))
            # All of it is on standard error: standard output is the script's.
            to = console(stderr=True)
            display = stack.enter_context(open_display(to, json=self.json, prefix="potluck: "))
            expected = _roster(observer)
            wanted = self.nodes or max(len(expected), 1)
            for sentence in first_words(expected, self.nodes):
                display.say(sentence)
            gathering = LauncherWait(observer.own_report(), wanted, expected)
            lookout = JobWatcher(observer, self.config, stack)
            wait = _Wait(observer, gathering, display, lookout, self.began, self.timeout)
            wait.run(wants_all=self.nodes is None)
            may_begin = _check(gathering, display) or self.anyway
            roll = "" if gathering.crew is None else gathering.crew.roll
            observer.tell(STARTING if may_begin else STOPPING, roll=roll)
            if not may_begin:
                display.say("Copy the same script to all machines, or use --anyway.", grave=True)
                raise typer.Exit(1)
            made = child_environments(observer, gathering, self.config.peers, self.facts)
            environments = [{**each, **self.saving} for each in made]
            return *company_of(gathering, json=self.json), environments


def _roster(observer: Observer) -> Mapping[str, str]:
    """The machines of the group, by id."""
    roster = observer.port.members.roster
    if roster is None:
        return {}
    return {member.node_id: member.name for member in roster.members}


class _Wait:
    """Waits until all who are wanted are here, and says why they are not."""

    def __init__(
        self,
        observer: Observer,
        gathering: LauncherWait,
        display: Display,
        lookout: JobWatcher,
        began: float,
        timeout: float | None,
    ) -> None:
        self._observer = observer
        self._gathering = gathering
        self._display = display
        self._lookout = lookout
        self._began = began
        self._timeout = timeout
        self._said: set[str] = set()

    def run(self, *, wants_all: bool) -> None:
        """Return when the run may begin; ends the command after --timeout."""
        from potluck.apps.cli.run_child import WaitPicture

        observer, gathering = self._observer, self._gathering
        news = observer.news
        agree_by: float | None = None
        while True:
            # Machines may be paired meanwhile, here or elsewhere.
            gathering.expect(_roster(observer), wants_all=wants_all)
            gathering.look([*observer.parted, *observer.reports])
            gathering.hosts |= observer.hosts
            waited = monotonic() - self._began
            state, facts = gathering.say(_age())
            observer.tell(state, **facts)
            self._display.show(WaitPicture(gathering))
            if not gathering.may_start:
                agree_by = None
            else:
                agree_by = agree_by or monotonic() + AGREEMENT
                roll = facts["roll"]
                if gathering.crew is not None or not roll or monotonic() >= agree_by:
                    return
            if self._timeout is not None and waited >= self._timeout:
                self._give_up(self._timeout)
            self._explain()
            news = observer.wait_for_news(news, PAUSE)

    def _explain(self) -> None:
        """Say why it waits: each reason once."""
        gathering = self._gathering
        if gathering.is_complete:
            return
        found = [f"{each}." for each in gathering.differences if each.is_grave]
        for sentence in [*found, *self._lookout.look(gathering, _command(gathering))]:
            self._say_once(sentence)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._said:
            self._said.add(sentence)
            self._display.say(sentence)

    def _give_up(self, seconds: float) -> None:
        line = self._gathering.status_line()
        self._display.say(f"Gave up after {seconds:g} s: {line}.", grave=True)
        self._explain()
        if not self._said:
            command = _command(self._gathering)
            self._display.say(
                f"Does `{command}` run on the others? If it does, `potluck doctor` finds out why "
                "they do not meet."
            )
        raise typer.Exit(TOO_LATE)


def _age() -> float:
    """Seconds since the command was typed: Python may have taken long to begin."""
    import time

    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())


def _command(gathering: LauncherWait) -> str:
    from potluck.apps.cli.run_child import command_for

    mine = gathering.here[0]
    return command_for(mine.job, mine.facts.get("script", ""))


def _check(gathering: LauncherWait, display: Display) -> bool:
    """Say in what the machines differ; whether they may begin like that."""
    found = gathering.differences
    for difference in found:
        display.say(f"{difference}.", grave=difference.is_grave)
    return not any(each.is_grave for each in found)
