"""``potluck run``: waits for the other machines, compares notes, and runs a script."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.apps.cli.common import Namespace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from potluck.apps.cli.launcher import Gathering
    from potluck.apps.cli.run_child import Lookout, Screen
    from potluck.apps.cli.run_places import Company
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.observer import Observer


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
    "before it began (the reason is on stderr), 2 wrong usage, 3 ended by --timeout, "
    "128 + n ended by signal n."
)

SETTINGS = {"allow_interspersed_args": False, "ignore_unknown_options": True}
"""What follows the script is the script's."""

TOO_LATE = 3

AGREEMENT = 5.0
"""Seconds to agree on ranks once all are ready; without that, potluck.join() agrees on them."""

MOST_WORKERS = 1024

PAUSE = 0.25
"""Seconds between two looks at who is here, if no machine reports before."""


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
    from potluck.apps.cli.run_child import facts_of, saving_environment
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.observer import find_web_server

    began = monotonic()
    if not script.is_file():
        raise typer.BadParameter(f"there is no file {script}", param_hint="SCRIPT")
    place = serve_at or ("127.0.0.1" if serve else None)
    if place is not None:
        find_web_server()  # before anybody waits
    given = list(arguments or [])
    order = _Order(
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
class _Order:
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

    def _gather(self, job: str) -> tuple[Company, list[str], dict[str, str], list[dict[str, str]]]:
        """Wait until all are here; who they are, and what the script is told."""
        from potluck.apps.cli.launcher import Gathering
        from potluck.apps.cli.run_child import Lookout, child_environments, company_of, open_screen
        from potluck.cluster.observer import STARTING, STOPPING, Observer

        with ExitStack() as stack:
            observer = stack.enter_context(Observer(self.config, job=job, facts=self.facts))
            screen = stack.enter_context(open_screen(json=self.json))
            expected = _roster(observer)
            if self.nodes is None and len(expected) <= 1:
                name = observer.namespace.name
                screen.say(f'No other machine is paired in "{name}", so this one runs alone.')
                screen.say("`potluck pair` adds machines; --nodes N waits for N in any case.")
            wanted = self.nodes or max(len(expected), 1)
            gathering = Gathering(observer.own_report(), wanted, expected)
            lookout = Lookout(self.config, stack)
            wait = _Wait(observer, gathering, screen, lookout, self.began, self.timeout)
            wait.run(wants_all=self.nodes is None)
            may_begin = _check(gathering, screen) or self.anyway
            roll = "" if gathering.crew is None else gathering.crew.roll
            observer.tell(STARTING if may_begin else STOPPING, roll=roll)
            if not may_begin:
                screen.say("Copy the same script to all machines, or use --anyway.", grave=True)
                raise typer.Exit(1)
            made = child_environments(observer, gathering, self.config.peers, self.facts)
            environments = [{**each, **self.saving} for each in made]
            return *company_of(gathering, json=self.json), environments


def _roster(observer: Observer) -> Mapping[str, str]:
    """The machines that belong to the namespace, by id."""
    roster = observer.port.members.roster
    if roster is None:
        return {}
    return {member.node_id: member.name for member in roster.members}


class _Wait:
    """Waits until all who are wanted are here, and says why they are not."""

    def __init__(
        self,
        observer: Observer,
        gathering: Gathering,
        screen: Screen,
        lookout: Lookout,
        began: float,
        timeout: float | None,
    ) -> None:
        self._observer = observer
        self._gathering = gathering
        self._screen = screen
        self._lookout = lookout
        self._began = began
        self._timeout = timeout
        self._said: set[str] = set()

    def run(self, *, wants_all: bool) -> None:
        """Return when the run may begin; ends the command after --timeout."""
        observer, gathering = self._observer, self._gathering
        news = observer.news
        agree_by: float | None = None
        while True:
            if wants_all:  # the others may know of machines that were paired elsewhere
                gathering.expect(_roster(observer))
            gathering.look([*observer.parted, *observer.reports])
            gathering.hosts |= observer.hosts
            waited = monotonic() - self._began
            state, facts = gathering.say(_age())
            observer.tell(state, **facts)
            self._screen.show(gathering)
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
            if sentence not in self._said:
                self._said.add(sentence)
                self._screen.say(sentence)

    def _give_up(self, seconds: float) -> None:
        line = self._gathering.status_line()
        self._screen.say(f"Gave up after {seconds:g} s: {line}.", grave=True)
        self._explain()
        if not self._said:
            command = _command(self._gathering)
            self._screen.say(f"Is `{command}` typed on the others? `potluck doctor` finds reasons.")
        raise typer.Exit(TOO_LATE)


def _age() -> float:
    """Seconds since the command was typed: Python may have taken long to begin."""
    import time

    import psutil

    return max(0.0, time.time() - psutil.Process().create_time())


def _command(gathering: Gathering) -> str:
    from potluck.apps.cli.run_child import command_for

    mine = gathering.here[0]
    return command_for(mine.job, mine.facts.get("script", ""))


def _check(gathering: Gathering, screen: Screen) -> bool:
    """Say in what the machines differ; whether they may begin like that."""
    found = gathering.differences
    for difference in found:
        screen.say(f"{difference}.", grave=difference.is_grave)
    return not any(each.is_grave for each in found)
