"""``potluck continue``: what a person reads and answers, and what a program gets."""

from __future__ import annotations

import json
import re
import signal

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from potluck.apps.cli import status
from potluck.apps.cli.main import app
from potluck.apps.cli.status_facts import is_whole, jobs_of, waiting_for
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.cluster.observer import Observer
from potluck.cluster.reports import HealthLine, MemberLine, MissingLine, StatusReport
from potluck.errors import BackendUnavailable
from potluck.identity.namespace import NetworkNamespace
from support.clusters import clusters, new_job
from support.command import on_screen, started
from support.threads import PATIENCE


def continue_report(
    letter: str = "a", job: str = "train.py", *missing: tuple[str, float]
) -> StatusReport:
    """Of a process in a view of three, which waits for these."""
    return StatusReport(
        node=letter * 32,
        incarnation=1,
        name=letter,
        job=job,
        state="paused" if missing else "active",
        reason="no quorum" if missing else "",
        lineage="f" * 32,
        epoch=3,
        members=[MemberLine(each * 32, 1, each) for each in "abc"],
        missing=[MissingLine(who * 32, 1, who, silence) for who, silence in missing],
    )


BOTH = (("b", 75.0), ("c", 400.0))


class Stage:
    """What is seen around, and which jobs were asked to continue."""

    def __init__(self) -> None:
        self.reports: list[StatusReport] = []
        self.asked: list[str] = []
        self.is_obeyed = True

    def ask(self, job: str) -> None:
        """Those who wait continue."""
        self.asked.append(job)
        if self.is_obeyed:
            alone = [MemberLine("a" * 32, 1, "a")]
            self.reports = [
                replace(each, state="active", missing=[], members=alone) for each in self.reports
            ]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    """Reports as a test says, in place of those of the network."""
    made = Stage()
    monkeypatch.setattr(status, "look_around", lambda *_: made.reports)
    monkeypatch.setattr(Observer, "reports", property(lambda _: made.reports))
    monkeypatch.setattr(Observer, "ask_to_continue", lambda _, job: made.ask(job))
    monkeypatch.setattr(status, "STARTS_WITHIN", 0.2)
    return made


def run(*arguments: str, answer: str | None = None) -> Result:
    """Run the command; with an answer as in a terminal."""
    return CliRunner().invoke(app, ["continue", *arguments], input=answer)


def test_a_job_continues_when_a_person_agrees_beforehand(stage: Stage) -> None:
    """Only those who wait for machines are meant."""
    stage.reports = [continue_report("a", "train.py", *BOTH), continue_report("d", "other.py")]
    result = run("--yes")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "train.py continues with a.\n"
    assert stage.asked == ["train.py"]


def test_the_question_says_who_is_missing_since_when_and_what_it_costs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No means no; yes means yes."""
    monkeypatch.setattr("potluck.apps.cli.membership.can_ask", lambda: True)
    stage.reports = [continue_report("a", "train.py", *BOTH)]
    refused = run(answer="n\n")
    assert refused.exit_code == 1
    assert stage.asked == []
    text = refused.stderr
    assert "train.py: a waits for b (silent for 75 s) and c (silent for 7 min)." in text
    assert "Continue only if they are switched off." in text
    assert "what was done here from now on is discarded" in text
    assert "Continue train.py now, without waiting? [y/N]" in text
    assert run(answer="y\n").exit_code == 0
    assert stage.asked == ["train.py"]


def test_a_training_that_waits_for_its_state_continues_although_the_cluster_works(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The price is another one: the steps of the machine that is away are discarded."""
    monkeypatch.setattr("potluck.apps.cli.membership.can_ask", lambda: True)
    waiting = replace(continue_report("a", "train.py", ("b", 75.0)), state="active")
    stage.reports, stage.is_obeyed = [waiting], False
    refused = run(answer="n\n")
    assert "Only it may have the last steps of the training." in refused.stderr
    assert "these steps are discarded when the machine comes back" in refused.stderr
    assert "did not continue within" in run("--yes").stderr, "it still waits"
    stage.is_obeyed = True
    assert run("--yes").exit_code == 0


def test_a_missing_machine_that_can_be_reached_from_here_is_named(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not switched off: the cable between the two is to be looked at."""
    monkeypatch.setattr("potluck.apps.cli.membership.can_ask", lambda: True)
    stage.reports = [continue_report("a", "train.py", *BOTH), continue_report("b", "train.py")]
    assert "Not switched off: b can be reached from this machine." in run(answer="n\n").stderr


def test_where_nobody_can_be_asked_nothing_happens(stage: Stage) -> None:
    """A script has to say --yes."""
    stage.reports = [continue_report("a", "train.py", *BOTH)]
    result = run("--json")
    assert result.exit_code == 1
    assert "--yes" in result.stderr
    assert stage.asked == []


def test_of_several_jobs_that_wait_one_must_be_chosen(stage: Stage) -> None:
    """The error has the command."""
    stage.reports = [continue_report("a", "train.py", *BOTH), continue_report("d", "my job", *BOTH)]
    result = run("--yes")
    assert result.exit_code == 1
    assert "2 jobs wait for machines: my job, train.py" in result.stderr
    assert "potluck continue --job 'my job'" in result.stderr
    assert stage.asked == []
    assert run("--yes", "--job", "my job").exit_code == 0
    assert stage.asked == ["my job"]


def test_nothing_to_continue_has_an_exit_code_of_its_own(stage: Stage) -> None:
    """And says what is there instead."""
    nobody = run("--yes", "--job", "x.py")
    assert nobody.exit_code == 3
    assert 'Nothing to continue: no process of "x.py" was found' in nobody.stdout
    assert "no job was found" in run().stdout
    stage.reports = [continue_report("a")]
    at_work = run("--json")
    assert at_work.exit_code == 3
    told = json.loads(at_work.stdout)
    assert (told["job"], told["continued"]) == (None, False)
    assert '"train.py": view 3 of 3 nodes, led by a, active' in told["reason"]


def test_programs_get_the_members(stage: Stage) -> None:
    """As one line of JSON."""
    stage.reports = [continue_report("a", "train.py", *BOTH)]
    told = json.loads(run("--yes", "--json").stdout)
    assert told == {"job": "train.py", "continued": True, "members": ["a"]}


def test_a_job_that_does_not_continue_is_an_error(stage: Stage) -> None:
    """With where to look."""
    stage.reports, stage.is_obeyed = [continue_report("a", "train.py", *BOTH)], False
    result = run("--yes")
    assert result.exit_code == 1
    assert "train.py did not continue within" in result.stderr
    assert "potluck status" in result.stderr


@pytest.mark.parametrize("arguments", [["--wait", "soon"], ["train.py"], ["--jobs", "x"]])
def test_wrong_usage_is_told(arguments: list[str]) -> None:
    """With the exit code of wrong usage."""
    assert run(*arguments).exit_code == 2


def test_ctrl_c_ends_the_search_at_once() -> None:
    """As everywhere."""
    with on_screen("continue", "--job", new_job(), "--wait", "60") as screen:
        screen.read_until("Looking around")
        screen.type("\x03")
        assert screen.read_to_end() == 130
    assert "Interrupted." in screen.text


def test_a_running_cluster_is_left_alone() -> None:
    """With real processes to look at: there is nothing to continue."""
    job = new_job()
    with clusters(2, job) as nodes:
        before = nodes[0].view
        result = run("--yes", "--job", job)
        assert result.exit_code == 3
        assert "view" in result.stdout
        assert nodes[0].view == before


def test_status_says_who_waits_for_whom_since_when_and_the_command() -> None:
    """For people and for programs; whoever heard a machine last decides since when."""
    reports = [continue_report("a", "my job", *BOTH), continue_report("d", "my job", ("b", 60.0))]
    (job,) = jobs_of(reports)
    (told,) = [each for each in job.remarks if each.startswith("a and d wait for")]
    assert re.fullmatch(
        r"a and d wait for b \(silent since \d\d:\d\d\) and c \(silent since \d\d:\d\d\)\.", told
    )
    assert "If they are switched off, continue with: potluck continue --job 'my job'" in job.remarks
    missing = [{"name": "b", "silent_for": 60.0}, {"name": "c", "silent_for": 400.0}]
    assert job.as_dict()["waiting"] == {"here": ["a", "d"], "missing": missing}
    (calm,) = jobs_of([continue_report("a")])
    assert calm.as_dict()["waiting"] is None
    assert not [each for each in calm.remarks if "potluck continue" in each]


def test_sentences_suit_one_and_many() -> None:
    """One machine that is missing, and for how long."""
    one = waiting_for([continue_report("a", "x", ("b", 9000.0))])
    assert one is not None
    assert one.sentence == "a waits for b (silent for 2 h)."
    assert one.advice == "If it is switched off, continue with: potluck continue --job x"


def test_several_jobs_are_an_error_of_the_library() -> None:
    """So the guard tells it in words."""
    with pytest.raises(BackendUnavailable):
        status._waiting([continue_report("a", "x", *BOTH), continue_report("a", "y", *BOTH)], None)


# --------------------------------------------------------------------------------------------------
# ``potluck status``: what an observer sees, for people and for programs.


def report(letter: str, rank: int, *, sees: str = "healthy", size: int = 2) -> StatusReport:
    """Of a member of a view of two."""
    other = "b" if letter == "a" else "a"
    return StatusReport(
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
    waiting = StatusReport(node="c" * 32, incarnation=1, role="launcher", job="train.py")
    other = StatusReport(
        node="d" * 32, incarnation=1, job="other.py", state="joining", reason="alone"
    )
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
    job = new_job()
    result = CliRunner().invoke(app, ["status", "--job", job, "--wait", "0.3"])
    assert result.exit_code == 3
    assert f'No job "{job}" is running in ' in result.stdout
    assert "potluck doctor" in result.stdout


@pytest.mark.parametrize("command", ["status", "doctor", "dashboard"])
def test_looking_at_a_namespace_that_is_not_there_creates_none(command: str) -> None:
    """A name that was mistyped is an error in words, and leaves no secret behind."""
    result = CliRunner().invoke(app, [command, "--namespace", "mistyped"])
    assert result.exit_code == 1
    assert "This machine is not in a group named 'mistyped'" in result.stderr
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
