"""``potluck status``: which clusters are there, who is in them, and how everybody is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.options import Json, Namespace

if TYPE_CHECKING:
    from rich.table import Table

    from potluck.apps.cli.status_facts import JobStatus
    from potluck.runtime.control_reports import Report
    from potluck.runtime.observing import Observer

__all__ = ["EXAMPLES", "EXIT_CODES", "status"]

EXAMPLES = """\
potluck status                     every job of the namespace this machine uses
potluck status --job train.py      one of them
potluck status --json | jq .jobs   the same for a program
"""

EXIT_CODES = (
    "Exit codes: 0 somebody is there, 1 failed (the reason is on stderr), 2 wrong usage, "
    "3 nobody is there, 130 interrupted."
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
    json: Json = False,
) -> None:
    """Show who works together, who leads, and how every machine and link is.

    Looks on without taking part: no cluster changes because somebody looks at it.
    """
    from potluck.apps.cli.status_facts import jobs_of, waiting_of
    from potluck.runtime.auto_config import AutoDiscoveryConfig
    from potluck.runtime.observing import Observer

    config = AutoDiscoveryConfig(job=job or "status", namespace=namespace, peers=tuple(peer or ()))
    with Observer(config, job=job) as observer:
        reports = _look(observer, wait)
        troubles, sources = observer.troubles, observer.discovery_status
        name = observer.namespace.name
    found, waiting = jobs_of(reports), waiting_of(reports)
    if json:
        import msgspec

        facts = {
            "namespace": name,
            "jobs": [each.as_dict() for each in found],
            "waiting": waiting,
            "unreachable": troubles,
            "discovery": sources,
        }
        typer.echo(msgspec.json.encode(facts).decode())
    else:
        _print(name, job, found, troubles, waiting)
    if not found and not waiting:
        raise typer.Exit(NOBODY)


def _look(observer: Observer, wait: float) -> list[Report]:
    """Wait until everybody has answered of whom anybody knows, and nobody new comes."""
    import time

    from potluck.apps.cli.status_facts import is_whole

    deadline = time.monotonic() + wait
    count, since = 0, time.monotonic()
    while time.monotonic() < deadline:
        reports = observer.reports
        if len(reports) != count:
            count, since = len(reports), time.monotonic()
        if count and is_whole(reports) and time.monotonic() - since >= QUIET:
            break
        time.sleep(0.05)
    return observer.reports


def _print(
    namespace: str,
    job: str | None,
    found: list[JobStatus],
    troubles: dict[str, str],
    waiting: list[dict[str, Any]],
) -> None:
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    if not found and not waiting:
        what = "anything" if job is None else f'"{job}"'
        console.print(Text(f'Nobody in "{namespace}" works on {what}, as far as can be seen here.'))
        console.print(
            Text("Start something with `potluck run`; `potluck doctor` looks for reasons.")
        )
    for one in found:
        console.print(Text(f"\n{namespace}, {one.sentence}\n", "bold"), soft_wrap=True)
        console.print(_table(one))
        for node in one.nodes:
            if node.reason and node.health != "healthy":
                console.print(Text(f"{node.name} is {node.health}: {node.reason}", "yellow"))
    for each in waiting:
        place = f"{each['name']} at {each['address']}"
        console.print(Text(f'"{each["job"]}": {place} waits in `potluck run` for the others.'))
    for who, why in troubles.items():
        console.print(Text(f"\n{who} was seen but could not be reached: {why}", "yellow"))


def _table(job: JobStatus) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for title in ("rank", "name", "id", "address", "state", "health", "links"):
        table.add_column(title)
    colours = {"healthy": "green", "degraded": "yellow", "suspect": "yellow", "dead": "red"}
    for node in job.nodes:
        told = node.report
        cells = (
            "–" if node.rank is None else str(node.rank),
            node.name,
            f"{node.node[:8]}/{node.incarnation}",
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
