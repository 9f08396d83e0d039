"""``potluck continue``: what a person reads and answers, and what a program gets."""

from __future__ import annotations

import json
import re

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner, Result

from potluck.apps.cli import continue_job, status
from potluck.apps.cli.main import app
from potluck.apps.cli.status_facts import jobs_of, list_names, waiting_for
from potluck.errors import BackendUnavailable
from potluck.runtime.control_reports import MemberLine, MissingLine, Report
from potluck.runtime.observing import Observer
from support.clusters import clusters, new_job
from support.command import on_screen


def report(letter: str = "a", job: str = "train.py", *missing: tuple[str, float]) -> Report:
    """Of a process in a view of three, which waits for these."""
    return Report(
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
        self.reports: list[Report] = []
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
    monkeypatch.setattr(continue_job, "STARTS_WITHIN", 0.2)
    return made


def run(*arguments: str, answer: str | None = None) -> Result:
    """Run the command; with an answer as in a terminal."""
    return CliRunner().invoke(app, ["continue", *arguments], input=answer)


def test_a_job_continues_when_a_person_agrees_beforehand(stage: Stage) -> None:
    """Only those who wait for machines are meant."""
    stage.reports = [report("a", "train.py", *BOTH), report("d", "other.py")]
    result = run("--yes")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == "train.py continues with a.\n"
    assert stage.asked == ["train.py"]


def test_the_question_says_who_is_missing_since_when_and_what_it_costs(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No means no; yes means yes."""
    monkeypatch.setattr("potluck.apps.cli.circle.can_ask", lambda: True)
    stage.reports = [report("a", "train.py", *BOTH)]
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
    monkeypatch.setattr("potluck.apps.cli.circle.can_ask", lambda: True)
    waiting = replace(report("a", "train.py", ("b", 75.0)), state="active")
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
    monkeypatch.setattr("potluck.apps.cli.circle.can_ask", lambda: True)
    stage.reports = [report("a", "train.py", *BOTH), report("b", "train.py")]
    assert "Not switched off: b can be reached from this machine." in run(answer="n\n").stderr


def test_where_nobody_can_be_asked_nothing_happens(stage: Stage) -> None:
    """A script has to say --yes."""
    stage.reports = [report("a", "train.py", *BOTH)]
    result = run("--json")
    assert result.exit_code == 1
    assert "--yes" in result.stderr
    assert stage.asked == []


def test_of_several_jobs_that_wait_one_must_be_chosen(stage: Stage) -> None:
    """The error has the command."""
    stage.reports = [report("a", "train.py", *BOTH), report("d", "my job", *BOTH)]
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
    stage.reports = [report("a")]
    at_work = run("--json")
    assert at_work.exit_code == 3
    told = json.loads(at_work.stdout)
    assert (told["job"], told["continued"]) == (None, False)
    assert '"train.py": view 3 of 3 nodes, led by a, active' in told["reason"]


def test_programs_get_the_members(stage: Stage) -> None:
    """As one line of JSON."""
    stage.reports = [report("a", "train.py", *BOTH)]
    told = json.loads(run("--yes", "--json").stdout)
    assert told == {"job": "train.py", "continued": True, "members": ["a"]}


def test_a_job_that_does_not_continue_is_an_error(stage: Stage) -> None:
    """With where to look."""
    stage.reports, stage.is_obeyed = [report("a", "train.py", *BOTH)], False
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
    reports = [report("a", "my job", *BOTH), report("d", "my job", ("b", 60.0))]
    (job,) = jobs_of(reports)
    (told,) = [each for each in job.remarks if each.startswith("a and d wait for")]
    assert re.fullmatch(
        r"a and d wait for b \(silent since \d\d:\d\d\) and c \(silent since \d\d:\d\d\)\.", told
    )
    assert "If they are switched off, continue with: potluck continue --job 'my job'" in job.remarks
    missing = [{"name": "b", "silent_for": 60.0}, {"name": "c", "silent_for": 400.0}]
    assert job.as_dict()["waiting"] == {"here": ["a", "d"], "missing": missing}
    (calm,) = jobs_of([report("a")])
    assert calm.as_dict()["waiting"] is None
    assert not [each for each in calm.remarks if "potluck continue" in each]


def test_sentences_suit_one_and_many() -> None:
    """One machine that is missing, and for how long."""
    one = waiting_for([report("a", "x", ("b", 9000.0))])
    assert one is not None
    assert one.sentence == "a waits for b (silent for 2 h)."
    assert one.advice == "If it is switched off, continue with: potluck continue --job x"
    assert list_names(["a", "b", "c"]) == "a, b and c"


def test_several_jobs_are_an_error_of_the_library() -> None:
    """So the guard tells it in words."""
    with pytest.raises(BackendUnavailable):
        continue_job._waiting([report("a", "x", *BOTH), report("a", "y", *BOTH)], None)
