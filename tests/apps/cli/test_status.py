"""``potluck status``: what an observer sees, for people and for programs."""

from __future__ import annotations

import json
import signal

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from potluck.apps.cli.main import app
from potluck.apps.cli.status_facts import is_whole, jobs_of
from potluck.net.namespace import NetworkNamespace
from potluck.runtime.auto_config import AutoDiscoveryConfig
from potluck.runtime.control_reports import HealthLine, MemberLine, Report
from potluck.runtime.observing import Observer
from support.clusters import clusters, new_job
from support.command import on_screen, started
from support.threads import PATIENCE


def report(letter: str, rank: int, *, sees: str = "healthy", size: int = 2) -> Report:
    """Of a member of a view of two."""
    other = "b" if letter == "a" else "a"
    return Report(
        node=letter * 32,
        incarnation=1,
        name=letter,
        job="train.py",
        state="active",
        epoch=3,
        rank=rank,
        members=[MemberLine(each * 32, 1, each) for each in "ab"[:size]],
        peers=[HealthLine(other * 32, 1, other, sees, f"{other} is {sees}", 0.001)],
    )


def test_the_worst_that_anybody_says_of_a_node_counts() -> None:
    """With its reason; what a node says of itself is its state."""
    (job,) = jobs_of([report("a", 0, sees="suspect"), report("b", 1)])
    assert [(node.name, node.rank, node.health) for node in job.nodes] == [
        ("a", 0, "healthy"),
        ("b", 1, "suspect"),
    ]
    assert job.nodes[1].reason == "b is suspect"
    assert job.sentence == '"train.py": view 3 of 2 nodes, led by a, active'


def test_a_member_that_does_not_answer_is_shown_as_silent() -> None:
    """The others name it, so it is known."""
    reports = [report("a", 0, sees="dead")]
    assert not is_whole(reports)
    assert is_whole([*reports, report("b", 1)])
    (job,) = jobs_of(reports)
    assert job.nodes[1].as_dict()["state"] == "silent"
    assert job.nodes[1].health == "dead"


def test_who_has_not_heard_of_the_next_view_does_not_speak_for_the_job() -> None:
    """A cut cable leaves it with the larger view, which is over."""
    behind, ahead = report("a", 0), replace(report("b", 0, size=1), epoch=4)
    (job,) = jobs_of([behind, ahead])
    assert job.authority is ahead
    assert "view 4 of 1 node" in job.sentence


def test_jobs_are_told_apart_and_launchers_left_out() -> None:
    """A launcher waits; it works on nothing yet."""
    waiting = Report(node="c" * 32, incarnation=1, role="launcher", job="train.py")
    other = Report(node="d" * 32, incarnation=1, job="other.py", state="joining", reason="alone")
    found = jobs_of([report("a", 0), report("b", 1), waiting, other])
    assert [each.job for each in found] == ["other.py", "train.py"]
    assert found[0].sentence == '"other.py": no view yet (alone)'
    assert len(found[1].nodes) == 2


def test_status_shows_a_running_cluster_without_changing_it() -> None:
    """Nodes, ranks, leader, epoch, health and links; the same view before and after."""
    job = new_job()
    with clusters(2, job) as nodes:
        before = nodes[0].view
        result = CliRunner().invoke(app, ["status", "--json", "--job", job])
        assert result.exit_code == 0, result.stderr
        (found,) = json.loads(result.stdout)["jobs"]
        assert before is not None
        assert (found["epoch"], found["lineage"]) == (before.epoch, before.lineage)
        assert [node["rank"] for node in found["nodes"]] == [0, 1]
        assert {node["state"] for node in found["nodes"]} == {"active"}
        assert found["leader"] == nodes[0].process.node
        assert len(found["links"]) == 2
        assert all(node["figures"]["views.epoch"] == before.epoch for node in found["nodes"])
        shown = CliRunner().invoke(app, ["status", "--job", job]).stdout
        assert f'"{job}": view {before.epoch} of 2 nodes' in shown
        assert nodes[0].view == before


def test_where_nobody_works_the_exit_code_says_so() -> None:
    """And the text says what to do."""
    result = CliRunner().invoke(app, ["status", "--job", new_job(), "--wait", "0.3"])
    assert result.exit_code == 3
    assert "Nobody in" in result.stdout
    assert "potluck doctor" in result.stdout


@pytest.mark.parametrize("command", ["status", "doctor", "dashboard"])
def test_looking_at_a_namespace_that_is_not_there_creates_none(command: str) -> None:
    """A name that was mistyped is an error in words, and leaves no secret behind."""
    result = CliRunner().invoke(app, [command, "--namespace", "mistyped"])
    assert result.exit_code == 1
    assert "This machine knows no namespace 'mistyped'" in result.stderr
    assert "mistyped" not in NetworkNamespace.stored()


def test_who_waits_for_others_is_shown() -> None:
    """Whoever looks while `potluck run` waits does not read that nobody is there."""
    job = new_job()
    config = AutoDiscoveryConfig(job=job, multicast=False, known=False)
    with Observer(config, job=job, facts={"script": job}) as launcher:
        result = CliRunner().invoke(app, ["status", "--job", job, "--json"])
        assert result.exit_code == 0, result.output
        facts = json.loads(result.stdout)
        assert facts["jobs"] == []
        assert [each["state"] for each in facts["waiting"]] == ["waiting"]
        words = CliRunner().invoke(app, ["status", "--job", job]).stdout
        assert f'"{job}": {launcher.card.name} at ' in words
        assert "waits in `potluck run`" in words


def test_watching_tells_every_change_until_it_is_interrupted() -> None:
    """One line of JSON when somebody comes and when he goes; Ctrl-C is its proper end."""
    job = new_job()
    with started("status", "--watch", "--json", "--wait", "0.1", "--job", job) as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["jobs"] == []
        with clusters(1, job):
            while '"rank":0' not in (line := process.stdout.readline()):
                assert line
            (found,) = json.loads(line)["jobs"]
            assert (found["job"], found["epoch"]) == (job, 1)
        while json.loads(process.stdout.readline())["jobs"]:  # he is gone
            pass
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE) == 0


def test_watching_in_a_terminal_redraws_in_place() -> None:
    """And says how one ends it."""
    job = new_job()
    with on_screen("status", "--watch", "--wait", "0.1", "--job", job) as screen:
        screen.read_until("Ctrl-C ends this.")
        with clusters(1, job):
            screen.read_until("view 1 of 1 node")
        screen.type("\x03")
        assert screen.read_to_end() == 0
