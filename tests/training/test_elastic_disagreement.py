"""Members of a training that make different calls: most of them decide who is at fault."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import potluck
from potluck import Cluster, CollectiveMismatch, NoQuorum, PeerLost
from potluck.training.elastic_ground import Ground
from support.clusters import clusters
from support.threads import PATIENCE, together

LIMIT = 10.0  # seconds; one that is cut off waits for so long


def outcome(cluster: Cluster, count: int, *, trains: bool) -> BaseException | None:
    """What a sum of so many values ends with, as a user calls it or as a trainer does."""
    try:
        if not trains:
            cluster.all_reduce(np.ones(count), timeout=PATIENCE)
            return None
        with Ground(cluster).stand(LIMIT):
            cluster.all_reduce(np.ones(count), timeout=LIMIT)
    except potluck.DistributedError as error:
        return error
    return None


def outcomes(nodes: list[Cluster], *counts: int, trains: bool) -> list[BaseException | None]:
    """The same of all nodes at once."""
    return together(
        *(partial(outcome, *each, trains=trains) for each in zip(nodes, counts, strict=True))
    )


def test_a_user_whose_ranks_disagree_gets_the_error_on_all_of_them() -> None:
    """No member is removed: a mistake in a program must be seen."""
    with clusters(3) as nodes:
        assert outcomes(nodes, 3, 3, 3, trains=True) == [None] * 3
        for error in outcomes(nodes, 3, 3, 4, trains=False):
            assert isinstance(error, CollectiveMismatch)
        assert outcomes(nodes, 3, 3, 3, trains=False) == [None] * 3


@pytest.mark.parametrize("odd", [0, 2])
def test_in_a_training_the_odd_one_is_removed(odd: int) -> None:
    """It gets the error itself, unless it is cut off sooner; the others are told who and why."""
    with clusters(3) as nodes:
        counts = [3, 3, 3]
        counts[odd] = 4
        found = outcomes(nodes, *counts, trains=True)
        assert isinstance(found[odd], CollectiveMismatch | NoQuorum)
        others = [node for rank, node in enumerate(nodes) if rank != odd]
        for error in found[:odd] + found[odd + 1 :]:
            assert isinstance(error, PeerLost)
            assert error.rank == odd
            assert f"Rank {odd} made another call than most members" in str(error)
            assert "4 elements) where all_reduce(sum, float64, 3 elements) was due" in str(error)
        assert outcomes(others, 3, 3, trains=True) == [None] * 2


def test_of_two_members_both_get_the_error_that_names_both_sides() -> None:
    """Neither is in the majority, so neither is removed."""
    with clusters(2) as nodes:
        for error in outcomes(nodes, 3, 4, trains=True):
            assert isinstance(error, CollectiveMismatch)
            assert "3 elements" in str(error)
            assert "4 elements" in str(error)
        assert outcomes(nodes, 3, 3, trains=True) == [None] * 2
