"""``potluck continue``: continue a job that waits for machines, without them."""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from potluck.apps.cli.options import Json, Namespace, Yes
from potluck.apps.cli.progress import working
from potluck.errors import BackendUnavailable, Timeout

if TYPE_CHECKING:
    from potluck.runtime.control_reports import Report
    from potluck.runtime.observing import Observer

__all__ = ["EXAMPLES", "EXIT_CODES", "continue_job"]

EXAMPLES = """\
potluck continue                    the only job that waits; asks before it does anything
potluck continue --job train.py     one of several
potluck continue --yes              without a question
"""

EXIT_CODES = (
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
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="Try this address too; may be given several times."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.1, max=60, help="Search for at most this many seconds.")
    ] = 3.0,
    yes: Yes = False,
    json: Json = False,
) -> None:
    """Continue a job without the machines that it waits for.

    A job waits when machines of its last view are silent: they may be switched off, or cut off and
    still at work.  Use this when you know that they are off.  If they were at work after all, their
    work counts when the two sides meet, and the work of this side is discarded.  A training also
    waits when a machine that is away may be the only one that has its state.  It then continues
    with the state that is here, and the steps of that machine are discarded.
    """
    from potluck.apps.cli.circle import confirm, known_name
    from potluck.apps.cli.status import look_around
    from potluck.apps.cli.status_facts import list_names
    from potluck.runtime.auto_config import AutoDiscoveryConfig
    from potluck.runtime.observing import Observer

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


def _waiting(reports: list[Report], job: str | None) -> list[Report]:
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


def _why_nothing(namespace: str, reports: list[Report], job: str | None) -> str:
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


def _situation(waiting: list[Report], reports: list[Report]) -> list[str]:
    """What a person should know before the answer."""
    from potluck.apps.cli.status_facts import list_names, waiting_for

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


def _continued(observer: Observer, waiting: list[Report]) -> Report:
    """The report of a process that has continued."""
    keys = {each.key for each in waiting}

    def at_work(reports: list[Report]) -> list[Report]:
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
    import msgspec

    typer.echo(msgspec.json.encode(facts).decode() if json else text)
