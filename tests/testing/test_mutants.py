"""Each mutant is caught by a seed that the core itself survives."""

from __future__ import annotations

import pytest

from potluck.core.cluster_evidence import Evidence
from potluck.testing import mutants
from potluck.testing.mutants import MUTANTS, Mutant, first_seed, main, planted


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: str(mutant.name))
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    """By the seed that is known for it."""
    found = first_seed(mutant, [mutant.known_seed])
    assert found is not None
    assert found[1].startswith("Violation: ")


def test_a_mutant_is_taken_out_again() -> None:
    """What it replaced is what it was, also where something was inherited."""
    before = Evidence.__dict__["_is_proof"]
    with planted(MUTANTS[3]):
        assert Evidence.__dict__["_is_proof"] is not before
    assert Evidence.__dict__["_is_proof"] is before

    class Heir(Evidence):
        pass

    heir = Mutant("heir", "", lambda patch: patch.setattr(Heir, "_is_proof", None), 0)
    with planted(heir):
        assert Heir._is_proof is None
    assert "_is_proof" not in vars(Heir)


def test_the_command_names_seeds_and_survivors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails if one is not caught."""
    harmless = Mutant("harmless", "It changes nothing.", lambda _: None, 0)
    monkeypatch.setattr(mutants, "MUTANTS", (MUTANTS[0], harmless))
    seed = str(MUTANTS[0].known_seed)
    assert main(["--seeds", "1", "--first", seed]) == 1
    told = capsys.readouterr().out
    assert "founds alone (" in told
    assert f"caught by seed {seed}: Violation" in told
    assert "NOT caught by 1 seeds" in told
