"""The order round a ring: optimal for few ranks, near it for many, the same everywhere."""

import itertools
import random

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.collective.order import EXACT, exact, improved, length, nearest, shortest


def table(size: int, seed: int, *, symmetric: bool = True) -> npt.NDArray[np.int64]:
    """Distances between points of a plane; or there and back may differ."""
    chance = np.random.default_rng(seed)
    points = chance.random((size, 2))
    apart = np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2)) * 1e6
    extra = 0 if symmetric else chance.random((size, size)) * 3e5
    found: npt.NDArray[np.int64] = (apart + extra).astype(np.int64)
    np.fill_diagonal(found, 0)
    return found


def sites(size: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Ranks at several sites, shuffled: near within one, far between two."""
    home = [rank % count for rank in range(size)]
    random.Random(seed).shuffle(home)
    where = np.array(home)
    found = np.where(where[:, None] == where, 100, 10_000)
    np.fill_diagonal(found, 0)
    return found


@given(st.integers(1, 6), st.integers(0, 10**6), st.booleans())
def test_few_ranks_are_ordered_beyond_doubt(size: int, seed: int, symmetric: bool) -> None:
    """As good as the best of all permutations."""
    distances = table(size, seed, symmetric=symmetric).tolist()
    best = min(length((0, *rest), distances) for rest in itertools.permutations(range(1, size)))
    found = exact(distances)
    assert sorted(found) == list(range(size))
    assert length(found, distances) == best


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("symmetric", [True, False])
def test_improving_comes_close_to_the_best(seed: int, symmetric: bool) -> None:
    """Within a tenth, for as many ranks as can be checked."""
    found = table(EXACT, seed, symmetric=symmetric)
    distances = found.tolist()
    better = improved(nearest(found), distances)
    best = length(exact(distances), distances)
    assert best <= length(better, distances) <= 1.1 * best
    assert better[0] == 0


@pytest.mark.parametrize("size", [4, 12, 30, 64])
def test_each_site_is_visited_once(size: int) -> None:
    """Whoever is near stands together: only as many long hops as there are sites."""
    found = sites(size, count=4 if size > 4 else 2, seed=size)
    tour = shortest(found)
    assert sorted(tour) == list(range(size))
    apart = 4 if size > 4 else 2
    assert length(tour, found.tolist()) == apart * 10_000 + (size - apart) * 100


def test_many_ranks_are_better_off_than_by_number() -> None:
    """64 points of a plane: the tour is less than a third of that in the order of ranks."""
    found = table(64, seed=5)
    distances = found.tolist()
    assert length(shortest(found), distances) < length(tuple(range(64)), distances) / 3
    assert length(shortest(found), distances) <= length(nearest(found), distances)


def test_64_ranks_come_close_to_an_optimum_that_is_known() -> None:
    """Points of a circle in their order; those of a chessboard within a twentieth."""
    chance = np.random.default_rng(3)
    angles = chance.permutation(64) * (2 * np.pi / 64)
    squares = np.array(list(itertools.product(range(8), repeat=2)), float)
    layouts = {
        64 * 2 * np.sin(np.pi / 64): np.stack([np.cos(angles), np.sin(angles)], axis=1),
        64.0: chance.permutation(squares),  # every step goes to the next square
    }
    for optimum, points in layouts.items():
        apart = np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=2)) * 1e6
        found = apart.astype(np.int64)
        assert length(shortest(found), found.tolist()) <= 1.05 * optimum * 1e6


def test_a_thousand_ranks_are_ordered_too() -> None:
    """From neighbour to neighbour."""
    found = sites(1000, count=10, seed=1)
    tour = shortest(found)
    assert sorted(tour) == list(range(1000))
    assert length(tour, found.tolist()) == 10 * 10_000 + 990 * 100


@pytest.mark.parametrize("size", [1, 2, 3, 12, 13, 64, 65])
def test_without_a_reason_ranks_keep_their_order(size: int) -> None:
    """All distances are equal."""
    even = np.full((size, size), 5) - 5 * np.eye(size, dtype=np.int64)
    assert shortest(even) == tuple(range(size))
