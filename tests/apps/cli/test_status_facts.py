"""What the doctor says of jobs: it complains when they stand still, in the words of status."""

from __future__ import annotations

import pytest

from potluck.apps.cli import doctor
from potluck.apps.cli.doctor import findings_of, look_at_jobs
from potluck.apps.cli.status_facts import jobs_of, story_of
from potluck.cluster.reports import HealthLine, MemberLine, StatusReport
from potluck.doctor.facts import Severity
from support.clusters import clusters

MEMBERS = [MemberLine("a" * 32, 1, "desk"), MemberLine("b" * 32, 1, "attic")]


def report(letter: str, state: str = "active", **facts: object) -> StatusReport:
    """What a member says."""
    return StatusReport(
        node=letter * 32,
        incarnation=1,
        name={"a": "desk", "b": "attic"}[letter],
        job="train.py",
        state=state,
        epoch=1,
        members=MEMBERS,
        **facts,  # type: ignore[arg-type]
    )


def test_a_job_that_works_is_told_of_and_no_finding() -> None:
    """Seen as an observer sees it."""
    with clusters(2, job="doctor-jobs"):
        jobs, story = look_at_jobs(None, ())
    assert [job.job for job in jobs] == ["doctor-jobs"]
    assert "view 1 of 2 nodes" in story[0][0]
    assert findings_of(jobs) == []


def test_where_nobody_works_nothing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor has said already who is missing."""
    monkeypatch.setattr(doctor, "LOOKING", 0.3)
    assert look_at_jobs(None, ()) == ([], [])


def test_a_job_that_pauses_is_a_problem() -> None:
    """With its own reason."""
    paused = [report("a", "paused", reason="attic is silent"), report("b")]
    (finding,) = findings_of(jobs_of([paused[0]]))
    assert finding.severity is Severity.PROBLEM
    assert "attic is silent" in finding.cause
    assert "attic does not answer." in finding.evidence


def test_a_member_that_is_not_well_is_a_note() -> None:
    """In the words of those who watch it."""
    line = HealthLine("b" * 32, 1, "attic", "suspect", "nothing was heard for 0.6 s")
    (finding,) = findings_of(jobs_of([report("a", peers=[line]), report("b")]))
    assert finding.severity is Severity.NOTE
    assert finding.evidence == ("attic is suspect: nothing was heard for 0.6 s",)


def test_without_a_network_nothing_is_said_of_machines_that_cannot_be_seen() -> None:
    """Nor what to do without them: they are at work, and this one is cut off."""
    (job,) = jobs_of([report("a", "paused", reason="waiting for attic")])
    assert job.remarks
    headline, rest = story_of(
        "home", None, [job], [], {"attic": "No route to host"}, has_network=False
    )
    assert headline == [f"home, {job.headline}"]
    assert "waiting" not in job.headline
    assert rest == [
        "This machine is not connected to a network: plug in the cable, or join the Wi-Fi."
    ]
