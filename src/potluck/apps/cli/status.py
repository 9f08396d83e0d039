"""``potluck status``: which clusters are there, who is in them, and how everybody is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.options import Json, Namespace
from potluck.apps.cli.progress import working

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

    from potluck.apps.cli.status_facts import JobStatus
    from potluck.runtime.control_reports import Report
    from potluck.runtime.observing import Observer

__all__ = ["EXAMPLES", "EXIT_CODES", "look_around", "status"]

EXAMPLES = """\
potluck status                     every job of the namespace this machine uses
potluck status --job train.py      one of them
potluck status --watch             again whenever something changes, until Ctrl-C
potluck status --json | jq .jobs   the same for a program; with --watch one line for each change
"""

EXIT_CODES = (
    "Exit codes: 0 somebody is there (or --watch was ended by Ctrl-C), 1 failed (the reason is on "
    "stderr), 2 wrong usage, 3 nobody is there, 130 interrupted."
)

NOBODY = 3

QUIET = 0.6
"""Seconds without anybody new after which everybody seems to be known."""

WIDE = 160
"""Columns where there is no terminal to fit into: nothing is cut off in a file."""


def status(
    *,
    job: Annotated[
        str | None,
        typer.Option(help="Look at this job alone.", show_default="every job"),
    ] = None,
    namespace: Namespace = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Try this address too; may be given several times."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.1, max=60, help="Look for at most so many seconds.")
    ] = 3.0,
    watch: Annotated[
        bool, typer.Option("--watch", help="Go on until Ctrl-C, whatever happens meanwhile.")
    ] = False,
    json: Json = False,
) -> None:
    """Show who works together, who leads, and how every machine and link is.

    Looks on without taking part: no cluster changes because somebody looks at it.
    """
    from potluck.apps.cli.circle import known_name
    from potluck.runtime.auto_config import AutoDiscoveryConfig
    from potluck.runtime.observing import Observer

    config = AutoDiscoveryConfig(
        job=job or "status", namespace=known_name(namespace), peers=tuple(peer or ())
    )
    with Observer(config, job=job, journals=True) as observer:
        with working(f"Looking around for up to {wait:g} s", silent=json):
            look_around(observer, wait)
        if watch:
            _watch(observer, job, json=json)
            return
        found, facts = _see(observer, job)
    if json:
        _print_json(facts)
    else:
        console = _console()
        for each in _drawn(found, facts["story"]):
            console.print(each, soft_wrap=not console.is_terminal)
    if not found and not facts["waiting"]:
        raise typer.Exit(NOBODY)


def _see(observer: Observer, job: str | None) -> tuple[list[JobStatus], dict[str, Any]]:
    """What is known now: the jobs, and everything as a program gets it."""
    from potluck.apps.cli.status_facts import jobs_of, story_of, waiting_of

    reports, troubles = observer.reports, observer.troubles
    journals = observer.chronicle.journals
    figures = {key: journal.figures for key, journal in journals.items()}
    found, waiting = jobs_of(reports), waiting_of(reports)
    name = observer.namespace.name
    return found, {
        "namespace": name,
        "jobs": [each.as_dict(figures) for each in found],
        "waiting": waiting,
        "unreachable": troubles,
        "discovery": observer.discovery_status,
        "story": story_of(name, job, found, waiting, troubles, observer.foreigners),
    }


def _watch(observer: Observer, job: str | None, *, json: bool) -> None:
    from potluck.apps.cli.status_watch import watch

    latest: dict[str, Any] = {}

    def look() -> tuple[Any, list[RenderableType]]:
        found, facts = _see(observer, job)
        latest.update(facts)
        # Not the times of links, which never rest.
        nodes = [
            [each[fact] for fact in ("id", "rank", "state", "health")]
            for one in facts["jobs"]
            for each in one["nodes"]
        ]
        return (facts["story"], nodes), _drawn(found, facts["story"])

    watch(_console(), look, (lambda _: _print_json(latest)) if json else None)


def _print_json(facts: dict[str, Any]) -> None:
    import sys

    import msgspec

    typer.echo(msgspec.json.encode(facts).decode())
    sys.stdout.flush()


def _console() -> Console:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


def look_around(observer: Observer, wait: float) -> list[Report]:
    """Wait until everybody has answered of whom anybody knows, and nobody new comes."""
    import time

    from potluck.apps.cli.status_facts import is_whole

    deadline, news = time.monotonic() + wait, observer.news
    count, since = 0, time.monotonic()
    while (now := time.monotonic()) < deadline:
        reports = observer.reports
        if len(reports) != count:
            count, since = len(reports), now
        quiet_at = since + QUIET if count and is_whole(reports) else deadline
        if now >= quiet_at:
            break
        news = observer.wait_for_news(news, min(quiet_at, deadline) - now)
    return observer.reports


def _drawn(found: list[JobStatus], story: list[list[str]]) -> list[RenderableType]:
    from rich.text import Text

    drawn: list[RenderableType] = []
    for number, paragraph in enumerate(story):
        one = found[number] if number < len(found) else None
        if one is not None:
            drawn += [Text(f"\n{paragraph[0]}\n", "bold"), _table(one)]
        for sentence in paragraph[one is not None :]:
            style = "yellow" if one is not None and not sentence.startswith("View ") else ""
            drawn.append(Text(sentence, style))
    return drawn


def _table(job: JobStatus) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from potluck.vocabulary import NodeId, ProcessId

    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for title in ("rank", "name", "id", "address", "state", "health", "links"):
        table.add_column(title)
    colours = {"healthy": "green", "degraded": "yellow", "suspect": "yellow", "dead": "red"}
    for node in job.nodes:
        told = node.report
        cells = (
            "–" if node.rank is None else str(node.rank),
            node.name,
            str(ProcessId(NodeId(node.node), node.incarnation)),
            f"{told.host}:{told.port}" if told else "",
            told.state if told else "silent",
            node.health,
            _links(told) if told else "",
        )
        table.add_row(*(Text(cell, colours.get(cell, "")) for cell in cells))
    return table


def _links(report: Report) -> str:
    """The round trips to the others, shortest to longest."""
    trips = sorted(line.round_trip * 1e3 for line in report.peers if line.round_trip is not None)
    if not trips:
        return ""
    first, last = f"{trips[0]:.1f}", f"{trips[-1]:.1f}"
    return f"{first} ms" if first == last else f"{first} to {last} ms"
