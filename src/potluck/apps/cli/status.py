"""``potluck status``: which jobs run, on which machines, and how each of them is."""

from __future__ import annotations

import contextlib
import time
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Any

import typer

from potluck.apps.cli.common import Json, Namespace, OneJob, Peer, Wait, Yes
from potluck.apps.cli.output import (
    console,
    list_names,
    open_display,
    print_json,
    print_line,
    table,
    working,
)
from potluck.errors import BackendUnavailable, Timeout

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from potluck.apps.cli.status_facts import JobStatus
    from potluck.cluster.observer import Observer
    from potluck.cluster.reports import StatusReport


EXAMPLES = """\
potluck status                     every job of the group this machine uses
potluck status --job train.py      one of them
potluck status --watch             again whenever something changes, until Ctrl-C
potluck status --json | jq .jobs   the same for a program; with --watch one line for each change
"""

EXIT_CODES = (
    "Exit codes: 0 a job runs (or --watch was ended by Ctrl-C), 1 failed (the reason is on "
    "stderr), 2 wrong usage, 3 no job runs, 130 interrupted."
)

NO_JOB = 3

PAUSE = 0.25
"""Seconds between two looks of --watch."""

QUIET = 0.6
"""Seconds without a new process after which all seem to be known."""


def status(
    *,
    job: OneJob = None,
    namespace: Namespace = None,
    peer: Peer = None,
    wait: Wait = 3.0,
    watch: Annotated[
        bool, typer.Option("--watch", help="Keep showing changes until Ctrl-C.")
    ] = False,
    json: Json = False,
) -> None:
    """Show which machines work together, which one leads, and how each machine and link is.

    Only looks: no job changes because of it.
    """
    from potluck.apps.cli.membership import known_name
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.observer import Observer

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
        print_json(facts)
    else:
        to = console()
        for each in _drawn(found, facts["story"]):
            print_line(to, each)
    if not found and not facts["waiting"]:
        raise typer.Exit(NO_JOB)


def _see(observer: Observer, job: str | None) -> tuple[list[JobStatus], dict[str, Any]]:
    """What is known now: the jobs, and everything as a program gets it."""
    from potluck.apps.cli.status_facts import jobs_of, story_of, waiting_of

    reports, troubles, differing = observer.reports, observer.troubles, observer.differing
    journals = observer.history.journals
    figures = {key: journal.figures for key, journal in journals.items()}
    found, waiting = jobs_of(reports), waiting_of(reports)
    name = observer.namespace.name
    return found, {
        "namespace": name,
        "jobs": [each.as_dict(figures) for each in found],
        "waiting": waiting,
        "unreachable": troubles,
        "other_versions": differing,
        "discovery": observer.discovery_status,
        "story": story_of(
            name,
            job,
            found,
            waiting,
            troubles,
            observer.foreigners,
            has_network=observer.has_network,
            differing=differing.values(),
        ),
    }


def _watch(observer: Observer, job: str | None, *, json: bool) -> None:
    """Show the same again whenever something changes, until Ctrl-C."""
    last: object = None
    with contextlib.suppress(KeyboardInterrupt), open_display(console(), json=json) as display:
        while True:
            found, facts = _see(observer, job)
            # Not the times of links, which never rest.
            nodes = [
                [each[fact] for fact in ("id", "rank", "state", "health")]
                for one in facts["jobs"]
                for each in one["nodes"]
            ]
            seen = facts["story"], nodes
            if display.is_live or seen != last:
                last = seen
                display.show(_Sight(found, facts))
            time.sleep(PAUSE)


class _Sight:
    """What is seen at a moment, for a display."""

    def __init__(self, found: list[JobStatus], facts: dict[str, Any]) -> None:
        self._found, self._facts = found, facts

    def draw(self) -> RenderableType:
        from rich.console import Group
        from rich.text import Text

        hint = Text("\nCtrl-C ends this.", "dim")
        return Group(*_drawn(self._found, self._facts["story"]), hint)

    def line(self) -> RenderableType:
        from rich.console import Group
        from rich.rule import Rule

        moment = Rule(time.strftime("%H:%M:%S"), align="left", characters="-")
        return Group(moment, *_drawn(self._found, self._facts["story"]))

    def facts(self) -> dict[str, Any]:
        return self._facts


def look_around(observer: Observer, wait: float) -> list[StatusReport]:
    """Wait until every known process has answered, and no new one comes."""
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
    from rich.text import Text

    from potluck._types import NodeId, ProcessId
    from potluck._version import THIS_BUILD, mixed
    from potluck.apps.cli.status_facts import builds_of

    builds = builds_of(job.reports)
    is_mixed = bool(mixed({**builds, "here": THIS_BUILD}))
    columns = ["rank", "name", "id", "address", "state", "health", "links"]
    drawn = table([*columns, *["version"] * is_mixed])
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
            *[str(told.build or "") if told else ""] * is_mixed,
        )
        drawn.add_row(*(Text(cell, colours.get(cell, "")) for cell in cells))
    return drawn


def _links(report: StatusReport) -> str:
    """Round trips to the others and rates to other machines, each from the best to the worst."""
    from potluck import _time as potluck__time

    trips = sorted(line.round_trip * 1e3 for line in report.peers if line.round_trip is not None)
    links = [line.link for line in report.peers if line.link is not None]
    rates = sorted((link.up for link in links if link.up and not link.is_local), reverse=True)
    facts = [
        _range([f"{trip:.1f}" for trip in trips], " ms"),
        _range([potluck__time.speed(rate) for rate in rates]),
        "Wi-Fi" if report.medium is not None and report.medium.kind == "wireless" else "",
    ]
    return ", ".join(filter(None, facts))


def _range(figures: list[str], unit: str = "") -> str:
    """The first and the last, once if they are the same."""
    if not figures:
        return ""
    ends = dict.fromkeys((figures[0], figures[-1]))
    return " to ".join(ends) + unit


# --------------------------------------------------------------------------------------------------
# ``potluck continue``: continue a job that waits for machines, without them.

CONTINUE_EXAMPLES = """\
potluck continue                    the only job that waits; asks before it does anything
potluck continue --job train.py     one of several
potluck continue --yes              without a question
"""

CONTINUE_EXIT_CODES = (
    "Exit codes: 0 the job continues, 1 failed (the reason is on stderr), 2 wrong usage, 3 no job "
    "waits for machines, 130 interrupted."
)

NOTHING_WAITS = 3

STARTS_WITHIN = 15.0
"""Seconds in which those who are here agree to continue."""


def continue_job(
    *,
    job: Annotated[
        str | None,
        typer.Option(help="Continue this job.", show_default="the only one that waits"),
    ] = None,
    namespace: Namespace = None,
    peer: Peer = None,
    wait: Wait = 3.0,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Continue a job without the machines that it waits for.

    A job waits when machines of its last view are silent: they may be switched off, or cut off and
    still at work.  Use this when you know that they are off.  If they are at work when the two
    sides meet, their work counts, and the work of this side is discarded.  If they wait too, they
    join this side, and steps that only they have are discarded.  A training also waits when a
    machine that is away may be the only one that has its state.  It then continues with the state
    that is here, and the steps of that machine are discarded.
    """
    from potluck.apps.cli.membership import confirm, known_name
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.cluster.observer import Observer

    config = AutoDiscoveryConfig(
        job=job or "continue", namespace=known_name(namespace), peers=tuple(peer or ())
    )
    with Observer(config, job=job) as observer:
        with working(f"Looking around for up to {wait:g} s", silent=json):
            reports = look_around(observer, wait)
        waiting = _waiting(reports, job)
        if not waiting:
            why = _why_nothing(observer.namespace.name, reports, job)
            _say({"job": job, "continued": False, "reason": why}, why, json=json)
            raise typer.Exit(NOTHING_WAITS)
        name = waiting[0].job
        if not yes:
            for line in _situation(waiting, reports):
                typer.echo(line, err=True)
        confirm(f"Continue {name} now, without waiting?", yes=yes)
        observer.ask_to_continue(name)
        with working(f"Waiting up to {STARTS_WITHIN:g} s for {name} to continue", silent=json):
            after = _continued(observer, waiting)
    members = [each.name or each.node[:8] for each in after.members]
    text = f"{name} continues with {list_names(members)}."
    _say({"job": name, "continued": True, "members": members}, text, json=json)


def _waiting(reports: list[StatusReport], job: str | None) -> list[StatusReport]:
    """Processes of the one job that waits for missing machines."""
    found = [
        each
        for each in reports
        if each.role == "member" and each.missing and job in {None, each.job}
    ]
    jobs = sorted({each.job for each in found})
    if len(jobs) > 1:
        raise BackendUnavailable(
            f"{len(jobs)} jobs wait for machines: {', '.join(jobs)}",
            hint=f"Choose one: potluck continue --job {quote(jobs[0])}",
        )
    return found


def _why_nothing(namespace: str, reports: list[StatusReport], job: str | None) -> str:
    """Why there is nothing to continue."""
    from potluck.apps.cli.status_facts import jobs_of

    found = [each for each in jobs_of(reports) if job in {None, each.job}]
    if found:
        return f"Nothing to continue: {'; '.join(each.sentence for each in found)}."
    what = "no job" if job is None else f'no process of "{job}"'
    return (
        f'Nothing to continue: {what} was found in "{namespace}". '
        "`potluck doctor` looks for reasons."
    )


def _situation(waiting: list[StatusReport], reports: list[StatusReport]) -> list[str]:
    """What a person should know before the answer."""
    from potluck.apps.cli.status_facts import waiting_for

    found = waiting_for(waiting)
    assert found is not None
    missing = {(line.node, line.incarnation) for each in waiting for line in each.missing}
    here = sorted(each.name or each.node[:8] for each in reports if each.key in missing)
    lines = [f"{found.job}: {found.sentence}"]
    if here:
        lines.append(f"Not switched off: {list_names(here)} can be reached from this machine.")
    are, one = ("they are", "one of them") if len(missing) > 1 else ("it is", "it")
    if all(each.state == "active" for each in waiting):
        lines.append(
            f"Only {one} may have the last steps of the training. If you continue without waiting, "
            "these steps are discarded when the machine comes back."
        )
        return lines
    lines.append(
        f"Continue only if {are} switched off. If {one} is still at work, its work counts: "
        "when the two sides meet, what was done here from now on is discarded."
    )
    return lines


def _continued(observer: Observer, waiting: list[StatusReport]) -> StatusReport:
    """The report of a process that has continued."""
    keys = {each.key for each in waiting}

    def at_work(reports: list[StatusReport]) -> list[StatusReport]:
        return [
            each
            for each in reports
            if each.key in keys and each.state == "active" and not each.missing
        ]

    try:
        reports = observer.wait_until(lambda each: bool(at_work(each)), STARTS_WITHIN)
    except Timeout:
        raise BackendUnavailable(
            f"{waiting[0].job} did not continue within {STARTS_WITHIN:g} s",
            hint="`potluck status` shows what it waits for.",
        ) from None
    return at_work(reports)[0]


def _say(facts: dict[str, object], text: str, *, json: bool) -> None:
    if json:
        print_json(facts)
    else:
        typer.echo(text)
