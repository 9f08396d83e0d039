"""What ``potluck doctor`` says of jobs that run: the sentences of ``potluck status``."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from potluck.apps.cli.status_facts import JobStatus, is_whole, jobs_of, story_of, waiting_of
from potluck.errors import Timeout
from potluck.runtime.auto_config import AutoDiscoveryConfig
from potluck.runtime.control_reports import Report
from potluck.runtime.diagnosis import Finding, Severity
from potluck.runtime.observing import Observer

__all__ = ["findings_of", "look_at_jobs"]

LOOKING = 2.0
"""Seconds after which those who have not answered are silent."""


def look_at_jobs(
    namespace: str | None, peers: Sequence[str]
) -> tuple[list[JobStatus], list[list[str]]]:
    """The jobs of a namespace, and everything in sentences; none if nobody works on anything."""
    config = AutoDiscoveryConfig(job="doctor", namespace=namespace, peers=tuple(peers))
    # With journals it knows, as the others who look on, who is gone and so refuses.
    with Observer(config, journals=True) as observer:
        try:
            reports = observer.wait_until(
                lambda reports: _is_complete(reports, observer.chronicle.journals), LOOKING
            )
        except Timeout:
            reports = observer.reports
        found, waiting = jobs_of(reports), waiting_of(reports)
        if not found and not waiting:
            return [], []
        story = story_of(observer.namespace.name, None, found, waiting, observer.troubles)
    return found, story


def _is_complete(reports: list[Report], journals: Collection[tuple[str, int]]) -> bool:
    members = {each.key for each in reports if each.role == "member"}
    return bool(reports) and is_whole(reports) and members.issubset(journals)


def findings_of(jobs: Iterable[JobStatus]) -> list[Finding]:
    """Jobs that stand still, and members of whom the others say that they are not well."""
    return [
        Finding(
            check="jobs",
            cause=job.sentence,
            evidence=tuple(job.remarks) or (job.authority.reason,),
            fix="It goes on by itself when those it misses are back, or are known to be gone: see "
            "whether they are on and reachable. `potluck status --watch` shows it.",
            severity=Severity.PROBLEM if job.authority.state != "active" else Severity.NOTE,
        )
        for job in jobs
        if job.authority.state != "active" or any(_is_ill(job))
    ]


def _is_ill(job: JobStatus) -> Iterable[bool]:
    return (node.report is None or node.health in {"suspect", "dead"} for node in job.nodes)
