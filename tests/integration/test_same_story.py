"""``potluck status``, ``potluck doctor`` and the dashboard tell one story, word for word."""

from __future__ import annotations

import json
import re
import signal

from typer.testing import CliRunner

from potluck.apps.cli.doctor import findings_of, look_at_jobs
from potluck.apps.cli.main import app
from potluck.doctor.facts import Severity
from support.cluster_programs import Crowd
from support.clusters import new_job
from support.ranks import Ranks
from support.threads import eventually
from support.web import ask, dashboard


def told_by_status(job: str) -> list[list[str]]:
    """The paragraphs of the command."""
    result = CliRunner().invoke(app, ["status", "--json", "--wait", "1", "--job", job])
    assert result.exit_code == 0, result.output
    story: list[list[str]] = json.loads(result.stdout)["story"]
    return story


def test_after_a_node_was_killed_all_three_say_the_same(ranks: Ranks) -> None:
    """The view without it, and why; nothing is wrong with the others, so the doctor is content."""
    job = new_job()
    crowd = Crowd(ranks, job)
    nodes = crowd.start(2, 2)
    found = crowd.views(nodes, 2)
    with dashboard(job) as served:
        found[1].kill()
        crowd.views([found[0]], 1)

        def one_story() -> bool:
            _, doctor = look_at_jobs(None, ())
            picture = ask(served.port, "/api/picture").json()
            return bool(told_by_status(job) == doctor == picture["story"])

        eventually(one_story)
        jobs, story = look_at_jobs(None, ())
    assert re.search(r'": view 2 of 1 node, led by .*, active$', story[0][0])
    assert re.match(r"View 2: without .* dead", story[0][1])
    assert [each for each in findings_of(jobs) if each.severity is Severity.PROBLEM] == []
    crowd.stop([found[0]])


def test_while_a_node_is_cut_off_all_three_say_why_nothing_moves(ranks: Ranks) -> None:
    """Half of a cluster of two may be the other side of a cut cable: it pauses, and says so."""
    job = new_job()
    crowd = Crowd(ranks, job)
    nodes = crowd.start(2, 2)
    found = crowd.views(nodes, 2)
    with dashboard(job) as served:
        found[0].send_signal(signal.SIGSTOP)  # silent, as behind a cut cable
        try:

            def one_story() -> bool:
                jobs, doctor = look_at_jobs(None, ())
                picture = ask(served.port, "/api/picture").json()
                is_paused = [job.authority.state for job in jobs] == ["paused"]
                return is_paused and bool(told_by_status(job) == doctor == picture["story"])

            eventually(one_story)
            jobs, story = look_at_jobs(None, ())
        finally:
            found[0].send_signal(signal.SIGCONT)
    (finding,) = findings_of(jobs)
    assert finding.severity is Severity.PROBLEM
    assert story[0][0].endswith(finding.cause)
    assert finding.cause.startswith(f'"{job}": view 1 of 2 nodes')
    crowd.stop(list(crowd.views(nodes, 2).values()))
