"""What a script uses is found without running it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from potluck.apps.cli.launcher import LauncherWait
from potluck.apps.cli.run_child import facts_of, first_words, imports, reasons
from potluck.cluster.reports import StatusReport
from potluck.net.dial import REFUSED


@pytest.mark.parametrize(
    ("script", "is_used"),
    [
        ("import torch", True),
        ("def later():\n    from torch.nn import Linear", True),
        ("import potluck.torch", True),
        ("from potluck import torch", True),
        ("import torchvision_of_mine", False),
        ("import potluck, numpy", False),
        ("print('import torch')", False),
        ("from .model import Net", True),
        ("import model", True),
        ("import package.part", True),
        ("import other", False),
        ("this is no Python", True),
    ],
)
def test_a_script_uses_what_it_imports(tmp_path: Path, script: str, *, is_used: bool) -> None:
    """Itself, in a function, or by modules that lie beside it."""
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "model.py").write_text("import torch, train")
    (tmp_path / "other.py").write_text("import other, train.nothing")
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "part.py").write_text("import torch.nn")
    assert imports(tmp_path / "train.py", "torch") is is_used


def test_versions_of_pytorch_are_no_concern_of_a_script_without_it(tmp_path: Path) -> None:
    """Machines with and without PyTorch say the same."""
    script = tmp_path / "train.py"
    script.write_text("import numpy")
    assert facts_of(script, [])["torch"] == ""
    script.write_text("import torch")
    assert facts_of(script, [])["torch"]


# --------------------------------------------------------------------------------------------------
# Why a run waits: one sentence for each reason, with what to type.

COMMAND = "potluck run train.py"


def report(
    name: str, job: str = "train.py", *, role: str = "launcher", script: str = ""
) -> StatusReport:
    """What a machine says."""
    facts = {"script": script or job}
    return StatusReport(
        node=name[0] * 32, incarnation=1, name=name, role=role, job=job, facts=facts
    )


def waiting(
    names: str = "desk laptop attic",
    reports: Sequence[StatusReport] = (),
    strangers: Mapping[str, str] | None = None,
    troubles: Mapping[str, str] | None = None,
    wanted: int = 3,
) -> list[str]:
    """The reasons of desk, in a group of these machines."""
    expected = {name[0] * 32: name for name in names.split()}
    gathering = LauncherWait(report("desk"), wanted, expected)
    gathering.look(reports)
    return list(reasons(gathering, reports, strangers or {}, troubles or {}, COMMAND))


def test_machines_on_which_nothing_runs_are_named_in_one_line() -> None:
    """With what to type there."""
    (reason,) = waiting()
    assert reason.startswith(
        "train.py does not run on attic and laptop yet: type `potluck run train.py` there."
    )


def test_a_machine_with_another_job_is_named_with_both_ways_out() -> None:
    """Whether it waits or runs, and however its job is called."""
    waits, runs = waiting(
        reports=[
            report("laptop", "other.py"),
            report("attic", "night", role="member", script="big.py"),
        ]
    )
    assert waits == (
        "laptop waits to run other.py, not train.py: "
        "type `potluck run train.py` there, or `potluck run other.py` here."
    )
    assert runs == (
        "attic runs night, not train.py: "
        "type `potluck run train.py` there, or `potluck run --job night big.py` here."
    )


def test_another_job_on_a_machine_that_is_here_is_no_reason() -> None:
    """One machine may take part in two jobs; observers take part in none."""
    found = waiting(
        "desk laptop",
        [report("laptop"), report("laptop", "other.py"), report("x", "x.py", role="observer")],
        wanted=3,
    )
    assert not any("other.py" in each or "x.py" in each for each in found)


def test_a_machine_that_is_not_paired_is_told_from_none_at_all() -> None:
    """Both times it is a matter of `potluck pair`."""
    heard = {"o" * 32: "olive-ibis at 10.0.0.3:52416"}
    (stranger,) = waiting("desk", strangers=heard, wanted=2)
    assert stranger == (
        "olive-ibis at 10.0.0.3:52416 runs Potluck, but is not paired with this machine. "
        "To pair them, run `potluck pair` here, and the command that it shows on the other machine."
    )
    (_, few) = waiting("desk laptop", wanted=3)
    assert few.startswith("This run waits for 3 machines, and 1 is paired with this one. To pair")


def test_a_machine_that_is_not_paired_hears_at_once_what_that_means_for_the_run() -> None:
    """Where machines are paired, or nobody knows who may come, there is no such line."""
    (alone,) = first_words({"d" * 32: "desk"}, None)
    assert alone == (
        "This machine is not paired with any other, so the script runs on it alone; "
        "`potluck pair` adds a machine."
    )
    (waits,) = first_words({"d" * 32: "desk"}, 2)
    assert waits.startswith("This machine is not paired with any other. To pair them, run")
    assert list(first_words({"d" * 32: "desk", "l" * 32: "laptop"}, None)) == []
    assert list(first_words({}, 2)) == []


def test_of_a_machine_that_runs_something_from_before_it_was_paired_one_thing_is_said() -> None:
    """Not that it is not paired, nor that nothing runs there, nor an error of TLS."""
    (said,) = waiting(
        "desk attic",
        strangers={"a" * 32: "olive-ibis at 10.0.0.3:52416"},
        troubles={"attic": "it belongs to another group"},
        wanted=2,
    )
    assert said == (
        "attic runs something since before it was paired: stop that there, and start it again."
    )


def test_a_machine_that_cannot_be_reached_is_told_from_one_that_runs_nothing() -> None:
    """With the reason."""
    seen, silent = waiting(troubles={"attic": "No route to host"})
    assert seen == "attic was seen but could not be reached: No route to host"
    assert silent.startswith("train.py does not run on laptop yet")


def test_a_machine_that_refuses_runs_nothing_yet() -> None:
    """It is on: what to type there is the better answer than an error of the network."""
    both = f"None of its addresses answered: 10.0.0.2:1: {REFUSED}; [fe80::1%eth0]:1: {REFUSED}"
    (said,) = waiting(troubles={"attic": both})
    assert said.startswith("train.py does not run on attic and laptop yet: type")


def test_once_all_are_here_there_is_nothing_to_say() -> None:
    """Whatever else is in sight."""
    assert waiting(reports=[report("laptop")], strangers={"o" * 32: "olive"}, wanted=2) == []
