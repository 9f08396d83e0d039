"""The sampler: each sample once per epoch, whatever becomes of the members."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.training.sampler import (
    MAX_PIECES,
    ElasticSampler,
    Intervals,
    divided,
    overlap,
    subtract,
    take,
    total,
    union,
)

sets = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=8)
chances = st.integers(0, 2**32).map(random.Random)


def numbers(intervals: object) -> set[int]:
    """The set for which intervals stand."""
    assert isinstance(intervals, list | tuple)
    return {number for start, stop in intervals for number in range(start, stop)}


@given(sets, sets)
@example([(0, 1), (3, 5), (4, 6), (8, 9)], [(4, 5)])
def test_intervals_are_sets(these: list[tuple[int, int]], those: list[tuple[int, int]]) -> None:
    """Union, difference, overlap and size are those of the numbers themselves."""
    first, second = numbers(these), numbers(those)
    assert numbers(union(these, those)) == first | second
    assert numbers(subtract(these, those)) == first - second
    assert numbers(overlap(these, those)) == first & second
    assert total(union(these)) == len(first)
    for made in (union(these), subtract(these, those), overlap(these, those)):
        assert all(start < stop for start, stop in made)
        assert all(left[1] < right[0] for left, right in itertools.pairwise(made))


@given(sets, st.integers(0, 60), st.integers(1, 5))
@example([(2, 4), (6, 9), (11, 12)], 4, 5)
@example([(1, 2), (3, 4), (5, 6)], 3, 2)
@example([(2, 4)], 0, 1)
def test_taking_leaves_the_rest(pool: list[tuple[int, int]], count: int, pieces: int) -> None:
    """What is taken and what is left are the pool; never more pieces or numbers than asked for."""
    ordered = union(pool)
    taken, rest = take(ordered, count, pieces)
    assert numbers(taken) | numbers(rest) == numbers(ordered)
    assert total(taken) + total(rest) == total(ordered)
    assert len(taken) <= pieces
    assert total(taken) <= count
    assert total(taken) == min(count, total(ordered)) or len(taken) == pieces
    assert all(start < stop for start, stop in (*taken, *rest))


@given(st.integers(1, 100), st.integers(0, 5), st.integers(0, 3))
def test_the_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    """Every sample stands at one position; another epoch or seed has another order."""
    sampler = ElasticSampler(size, seed=seed)
    sampler.epoch = epoch
    order = sampler.indices([(0, size)])
    assert sorted(order.tolist()) == list(range(size))
    assert np.array_equal(order, sampler.indices([(0, size // 2), (size // 2, size)]))
    if size > 20:
        other = ElasticSampler(size, seed=seed + 1)
        other.epoch = epoch
        assert not np.array_equal(order, other.indices([(0, size)]))
        sampler.epoch += 1
        assert not np.array_equal(order, sampler.indices([(0, size)]))


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "order"),
    [
        (1, 1, 0, [0]),
        (2, 2, 0, [1, 0]),
        (3, 4, 2, [1, 2, 0]),
        (4, 0, 3, [0, 3, 2, 1]),
        (5, 1, 1, [0, 1, 3, 4, 2]),
        (9, -1, 2, [3, 1, 0, 7, 4, 2, 6, 8, 5]),
        (16, 3, 0, [8, 7, 15, 6, 9, 14, 13, 2, 12, 3, 0, 4, 11, 10, 1, 5]),
        (17, 2**70 + 3, 1, [13, 0, 14, 2, 15, 6, 9, 16, 12, 5, 10, 7, 1, 11, 4, 8, 3]),
    ],
)
def test_the_order_is_the_same_in_every_version(
    size: int, seed: int, epoch: int, order: list[int]
) -> None:
    """A training that continues from an older checkpoint sees no sample twice."""
    sampler = ElasticSampler(size, seed=seed)
    sampler.epoch = epoch
    assert sampler.indices([(0, size)]).tolist() == order


def test_a_large_order_takes_no_memory() -> None:
    """A thousand samples of a trillion are found at once, each at a place of its own."""
    sampler = ElasticSampler(10**12, seed=3)
    found = sampler.indices([(10**11, 10**11 + 1000)])
    assert len(set(found.tolist())) == 1000
    assert np.ptp(found) > 10**11  # from everywhere


@given(st.integers(1, 60), chances)
def test_each_sample_counts_once_whoever_comes_and_goes(size: int, chance: random.Random) -> None:
    """Members with shares of any size die before the commit, others go on, one reads it anew."""
    sampler = ElasticSampler(size, seed=chance.randrange(9))
    seen: Counter[tuple[int, int]] = Counter()
    in_hand: list[Intervals] = []  # of members who have computed and wait for a repeated step
    while sampler.epoch < 2:
        epoch, members = sampler.epoch, chance.randint(1, 5)
        counts = [chance.randint(0, 9) for _ in range(members)]
        counts[0] += 1
        reserved = [piece for share in in_hand for piece in share]
        shares = sampler.assign(counts, reserved) + in_hand
        assert all(len(share) <= MAX_PIECES for share in shares)
        survivors = [share for share in shares if chance.random() < 0.7]
        if chance.random() < 0.3:  # the step did not come to its end
            in_hand = survivors
            continue
        counted = [index for share in survivors for index in sampler.indices(share).tolist()]
        sampler.commit(survivors)
        in_hand = []
        seen.update((epoch, index) for index in counted)
        if chance.random() < 0.2:
            state = sampler.state_dict()
            sampler = ElasticSampler(size)
            sampler.load_state_dict(state)
    expected = {(epoch, index): 1 for epoch in range(2) for index in range(size)}
    assert dict(seen) == expected


def test_uneven_weights_get_uneven_shares() -> None:
    """Shares have the sizes asked for; the last step of an epoch divides what is left alike."""
    sampler = ElasticSampler(20, shuffle=False)
    assert [total(share) for share in sampler.assign([4, 4, 1])] == [4, 4, 1]
    sampler.commit([[(0, 15)]])
    assert [total(share) for share in sampler.assign([4, 4, 1])] == [2, 2, 1]
    assert [total(share) for share in sampler.assign([4, 4, 1], [(15, 20)])] == [0, 0, 0]


@given(st.integers(0, 1000), st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_a_division_is_whole_and_fair(amount: int, weights: list[int]) -> None:
    """Nothing is lost, and nobody is a whole sample away from the exact part."""
    parts = divided(amount, weights)
    whole = sum(weights)
    assert sum(parts) == (amount if whole else 0)
    if whole:
        exact = [amount * weight / whole for weight in weights]
        assert all(abs(part - one) < 1 for part, one in zip(parts, exact, strict=True))


def test_nothing_counts_twice() -> None:
    """A commit of what has counted, or of one sample for two members, changes nothing."""
    sampler = ElasticSampler(10)
    sampler.commit([[(0, 3)]])
    for shares in ([[(2, 4)]], [[(4, 6)], [(5, 7)]]):
        with pytest.raises(ValueError, match="would count twice"):
            sampler.commit(shares)
    with pytest.raises(ValueError, match="no samples at"):
        sampler.commit([[(9, 12)]])
    assert sampler.committed == ((0, 3),)
    assert repr(sampler) == "<ElasticSampler, epoch 0, 3 of 10 samples>"


def test_what_makes_no_sense_is_refused() -> None:
    """No samples, negative shares, positions outside, and states of other data."""
    with pytest.raises(ValueError, match="at least one sample"):
        ElasticSampler(0)
    sampler = ElasticSampler(10)
    with pytest.raises(ValueError, match="negative"):
        sampler.assign([2, -1])
    with pytest.raises(ValueError, match="beyond the 10 samples"):
        sampler.indices([(5, 11)])
    with pytest.raises(ValueError, match="Saved for 11 samples, but there are 10"):
        sampler.load_state_dict(ElasticSampler(11).state_dict())
    with pytest.raises(ValueError, match="beyond the 10 samples"):
        sampler.load_state_dict({**sampler.state_dict(), "committed": [[0, 11]]})


def test_samples_are_counted_over_epochs() -> None:
    """Those of this epoch come on top of the complete ones."""
    sampler = ElasticSampler(10, shuffle=False)
    for shares, counted, remaining in (([((0, 4),)], 4, 6), ([((4, 10),)], 10, 10)):
        sampler.commit(shares)
        assert (sampler.counted, sampler.remaining) == (counted, remaining)
    sampler.commit([((1, 2), (5, 8))])
    assert (sampler.epoch, sampler.counted, sampler.remaining) == (1, 14, 6)
    assert repr(sampler) == "<ElasticSampler, epoch 1, 4 of 10 samples>"
