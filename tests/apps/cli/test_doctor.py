"""``potluck doctor``: what it says to people and programs, and how it exits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from potluck._types import NodeId
from potluck.apps.cli.main import app
from potluck.doctor import look
from potluck.doctor.facts import DoctorFacts, ProbeAttempt, ProbeOutcome, Target
from potluck.identity.node import short_name
from potluck.net.addresses import Address, Interface

OTHER = NodeId("b" * 32)
MET = Target(
    "desk", "given", (ProbeAttempt(Address("10.0.0.2", 1), ProbeOutcome.MET, node=OTHER),), OTHER
)

ALONE = DoctorFacts(
    node=NodeId("a" * 32),
    namespace="home",
    tag="t" * 26,
    interfaces=(Interface("eth0", ("10.0.0.1",)),),
    mdns="listening on 10.0.0.1",
    mdns_works=True,
    heard_self=True,
    seconds=3.0,
)


def doctor(
    monkeypatch: pytest.MonkeyPatch, home: Path, scene: DoctorFacts, *arguments: str
) -> tuple[Result, list[str]]:
    """Run the command where it sees this; what it says, and whom it was told to try."""
    asked: list[str] = []

    def see(_namespace: object, peers: Sequence[str], *, seconds: float) -> DoctorFacts:
        asked.extend(peers)
        return replace(scene, seconds=seconds)

    monkeypatch.setattr(look, "look_around", see)
    environment = {"POTLUCK_HOME": str(home), "POTLUCK_NAMESPACE": None, "NO_COLOR": "1"}
    return CliRunner().invoke(app, ["doctor", *arguments], env=environment), asked


def test_a_clean_bill_names_whom_it_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """So that one sees that something was checked."""
    heard = replace(ALONE, heard_self=True, targets=(replace(MET, origin="heard"),))
    result, _ = doctor(monkeypatch, tmp_path, heard)
    assert result.exit_code == 0
    assert result.stdout == (
        "Nothing is wrong with this machine (10.0.0.1). "
        f'Members of "home" that were met: {short_name(OTHER)}.\n'
    )


def test_a_note_is_no_illness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nobody else was there; that is said, and the exit code is 0."""
    result, _ = doctor(monkeypatch, tmp_path, ALONE, "--seconds", "2")
    assert result.exit_code == 0
    assert "Note: No other machine was found" in result.stdout
    assert "within 2 s" in result.stdout
    assert "What to do: Run `potluck doctor` on the other machine" in result.stdout


def test_a_problem_is_told_with_evidence_and_advice(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And has an exit code of its own."""
    result, _ = doctor(monkeypatch, tmp_path, replace(ALONE, heard_self=False, targets=(MET,)))
    assert result.exit_code == 3
    assert "Problem: A firewall on this machine blocks multicast DNS" in result.stdout
    assert "did not come back to it" in result.stdout
    assert "Allow UDP port 5353" in result.stdout
    assert result.stdout.endswith("1 problem found.\n")
    assert not any(line.endswith(" ") for line in result.stdout.splitlines())


def test_a_program_gets_one_object(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With everything that a person gets."""
    scene = replace(ALONE, heard_self=False, targets=(MET,))
    result, asked = doctor(
        monkeypatch, tmp_path, scene, "--json", "--peer", "10.0.0.2:1,desk", "--peer", "lap:2"
    )
    assert result.exit_code == 3
    assert asked == ["10.0.0.2:1", "desk", "lap:2"]
    facts = json.loads(result.stdout)
    assert facts["healthy"] is False
    assert facts["met"] == [OTHER]
    assert facts["addresses"] == ["10.0.0.1"]
    (finding,) = facts["findings"]
    assert set(finding) == {"check", "severity", "cause", "evidence", "fix"}
    assert (finding["check"], finding["severity"]) == ("multicast", "problem")


def test_what_is_no_address_is_wrong_usage(tmp_path: Path) -> None:
    """Told before anything is looked at."""
    environment = {"POTLUCK_HOME": str(tmp_path), "POTLUCK_NAMESPACE": None, "NO_COLOR": "1"}
    result = CliRunner().invoke(app, ["doctor", "--peer", "desk:port"], env=environment)
    assert result.exit_code == 2
    assert "is not an address" in result.stderr
