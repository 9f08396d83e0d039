"""A configuration that could not work is refused in words."""

from __future__ import annotations

from datetime import timedelta
from math import inf
from typing import Any

import pytest

from potluck.membership.events import ClusterConfig, ElectionConfig, ElectionRole, ElectionState


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"min_nodes": 0}, "between 1 and"),
        ({"min_nodes": 257}, "between 1 and 256"),
        ({"min_nodes": 1.5}, "must be an integer, got 1.5"),
        ({"quorum": "most"}, '"majority" or "any"'),
        ({"solo_delay": -1.0}, "number of seconds"),
        ({"solo_delay": inf}, "number of seconds"),
    ],
)
def test_a_cluster_that_could_not_work_is_refused(wrong: dict[str, Any], words: str) -> None:
    """The message says what is wanted and what was given."""
    with pytest.raises((TypeError, ValueError), match=words):
        ClusterConfig(**wrong)


def test_the_bounds_themselves_can_work() -> None:
    """One node and the most there may be; no delay at all."""
    assert ClusterConfig(min_nodes=256).min_nodes == 256
    assert ClusterConfig(min_nodes=1, solo_delay=0).solo_delay == 0
    assert ElectionConfig(connection_delay=0).connection_delay == 0


def test_the_defaults_are_those_of_the_documentation() -> None:
    """One node is enough, after a second alone; elections are called at once."""
    config, election = ClusterConfig(), ElectionConfig()
    assert (config.min_nodes, config.quorum, config.solo_delay) == (1, "majority", 1.0)
    assert (election.election_timeout, election.connection_delay) == (0.3, 0.1)
    assert election.auto_elect_on_peer_loss


def test_times_may_be_given_as_timedelta() -> None:
    """They are seconds from there on."""
    election = ElectionConfig(
        election_timeout=timedelta(seconds=2),  # type: ignore[arg-type]
        connection_delay=timedelta(milliseconds=50),  # type: ignore[arg-type]
    )
    assert (election.election_timeout, election.connection_delay) == (2.0, 0.05)


@pytest.mark.parametrize(
    "wrong", [{"election_timeout": 0.0}, {"election_timeout": inf}, {"connection_delay": -0.1}]
)
def test_an_election_that_could_not_work_is_refused(wrong: dict[str, Any]) -> None:
    """Times must be positive."""
    with pytest.raises(ValueError, match="An election needs"):
        ElectionConfig(**wrong)


def test_the_state_of_an_election_is_a_sentence() -> None:
    """Role, epoch and term, and the reason."""
    state = ElectionState(ElectionRole.LEADING, "f" * 32, 3, 1, None, "2 of 3 voted for us")
    assert str(state) == "leading in term 3.1: 2 of 3 voted for us"
