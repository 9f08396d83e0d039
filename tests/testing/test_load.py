"""Slow processors alone change no view: a group under constant load stays as it is."""

from __future__ import annotations

import pytest

from potluck.testing.load import GROUPS, LOAD, endure, main


@pytest.mark.parametrize("size", [4, 8])
def test_a_busy_group_keeps_its_view(size: int) -> None:
    """The short form: with nearly 70 % of each processor taken by heartbeats, for a minute more."""
    outcome = endure(size, seconds=60.0)
    assert 0.5 < outcome.load <= LOAD
    assert (outcome.views, outcome.paused) == (0, 0)


@pytest.mark.soak
@pytest.mark.parametrize("size", GROUPS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_busy_group_keeps_its_view_for_long(size: int, seed: int) -> None:
    """For ten minutes after the first."""
    outcome = endure(size, seed=seed)
    assert (outcome.views, outcome.paused) == (0, 0)


def test_the_command_finds_a_group_that_cannot_keep_up(capsys: pytest.CaptureFixture[str]) -> None:
    """With more work than there is time for, members pause, and the command says so."""
    assert main(["--groups", "8", "--load", "1.3", "--seconds", "10"]) == 1
    assert "not at work at the end" in capsys.readouterr().out
