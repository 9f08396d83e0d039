"""Who is here for a run: counting, comparing, and beginning together."""

from __future__ import annotations

import msgspec

from potluck.apps.cli.run_gathering import Gathering, differences, labels
from potluck.runtime.control_reports import Report

FACTS = {
    "script_sha256": "aa11",
    "arguments": "--epochs 3",
    "python": "3.12.1",
    "potluck": "0.1.0",
    "numpy": "2.1.0",
}


def report(name: str, state: str = "waiting", *, role: str = "launcher", **facts: str) -> Report:
    """What a machine says."""
    return Report(
        node=name[0] * 32,
        incarnation=1 if role == "launcher" else 2,
        name=name,
        role=role,
        state=state,
        facts={**FACTS, **facts},
    )


def gathering(wanted: int = 3) -> Gathering:
    """Of the machine "desk" in a circle of three."""
    expected = {"d" * 32: "desk", "l" * 32: "laptop", "a" * 32: "attic"}
    return Gathering(report("desk"), wanted, expected)


def test_who_is_here_and_who_is_missing_is_said_in_one_line() -> None:
    """The line names everybody, ourselves first."""
    one = gathering()
    assert one.status_line() == "1 of 3 is here: desk; missing: attic, laptop"
    one.look([report("laptop")])
    assert one.status_line() == "2 of 3 are here: desk, laptop; missing: attic"
    one.look([report("laptop"), report("attic")])
    assert one.status_line() == "3 of 3 are here: desk, attic, laptop"
    assert one.is_complete


def test_nobody_begins_before_everybody_knows_that_all_are_here() -> None:
    """Whoever begins ends its launcher, and the others would wait for it."""
    one = gathering(2)
    one.look([report("laptop", "waiting")])
    assert one.is_complete
    assert not one.may_start
    one.look([report("laptop", "ready")])
    assert one.may_start


def test_a_launcher_that_has_begun_counts_until_its_script_is_seen() -> None:
    """Between the two there is nobody who could answer."""
    one = gathering(2)
    one.look([report("laptop", "starting")])
    one.look([])
    assert one.may_start
    one.look([report("laptop", "joining", role="member")])
    assert len(one.here) == 2


def test_a_machine_that_comes_late_joins_those_who_run() -> None:
    """Scripts that run count like launchers that are ready; observers do not count."""
    one = gathering(3)
    one.look([report("laptop", "active", role="member"), report("xray", role="observer")])
    assert not one.is_complete
    one.look([report(name, "active", role="member") for name in ("laptop", "attic")])
    assert one.may_start


def test_who_differs_is_named_with_what_it_has() -> None:
    """The majority comes first; only different scripts keep a run from beginning."""
    found = differences(
        [
            report("desk"),
            report("attic"),
            report("laptop", script_sha256="bb22", numpy="1.26.0"),
        ]
    )
    assert [str(each) for each in found] == [
        "The script on laptop differs from the one on attic, desk",
        "The version of numpy is not the same everywhere (attic, desk: 2.1.0; laptop: 1.26.0)",
    ]
    assert [each.is_grave for each in found] == [True, False]
    assert differences([report("desk"), report("attic")]) == []


def test_several_processes_of_one_machine_can_be_told_apart() -> None:
    """Three terminals have one name; the port says which is meant, also of who differs."""
    here = [
        msgspec.structs.replace(report("desk"), incarnation=number, port=52415 + number)
        for number in (1, 2)
    ]
    here.append(msgspec.structs.replace(report("laptop", arguments=""), port=52416))
    assert list(labels(here).values()) == ["desk:52416", "desk:52417", "laptop"]
    (found,) = differences(here)
    assert str(found) == (
        "The arguments are not the same everywhere "
        "(desk:52416, desk:52417: --epochs 3; laptop: none)"
    )


def test_who_works_on_another_job_is_not_here() -> None:
    """An address that is remembered or given may lead to it; it counts neither way."""
    one = gathering(2)
    one.look([msgspec.structs.replace(report("laptop", script_sha256="cc33"), job="other.py")])
    assert one.status_line() == "1 of 2 is here: desk; missing: attic, laptop"
    assert one.differences == []


def test_a_machine_that_is_heard_of_later_is_waited_for_too() -> None:
    """It was paired with another one, whose roster we get when we meet."""
    one = Gathering(report("desk"), 2, {"d" * 32: "desk", "l" * 32: "laptop"})
    one.look([report("laptop", "ready")])
    assert one.may_start
    one.expect({"d" * 32: "desk", "l" * 32: "laptop", "a" * 32: "attic"})
    assert not one.may_start
    assert one.status_line() == "2 of 3 are here: desk, laptop; missing: attic"
