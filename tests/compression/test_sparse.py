"""Indices in few bytes, and hostile ones refused."""

import contextlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame
from potluck.compression import sparse
from potluck.compression.base import CompressionContext, Floats
from potluck.compression.sparse import (
    EXACT,
    RUN,
    SAMPLED,
    Coding,
    Indices,
    RandomK,
    Sparse,
    count_for,
    top_k,
)
from support.allocations import allocating_at_most
from support.gradients import normal, vectors


@st.composite
def some_indices(draw: st.DrawFn) -> tuple[Indices, int]:
    """Places among many or few, dense or sparse."""
    total = draw(st.sampled_from([0, 1, 7, 8, 300, 5000, 200_000]))
    chosen = draw(st.sets(st.integers(0, total - 1), max_size=40)) if total else set()
    return np.array(sorted(chosen), np.int64), total


@given(some_indices())
def test_what_was_written_is_read(case: tuple[Indices, int]) -> None:
    """In any of the three codings."""
    places, total = case
    coding, data = sparse.encode(places, total)
    assert data.size <= sparse.largest_size(coding, places.size, total)
    assert sparse.decode(coding, data, places.size, total).tolist() == places.tolist()


@pytest.mark.parametrize(
    ("step", "coding"), [(2, Coding.BITMAP), (100, Coding.BYTES), (5000, Coding.WORDS)]
)
def test_the_shortest_coding_is_taken(step: int, coding: Coding) -> None:
    """A bit for each place, a byte or two for each index."""
    total = 100_000
    places = np.arange(0, total, step, dtype=np.int64)
    found, data = sparse.encode(places, total)
    assert found is coding
    assert data.size <= 2.1 * places.size


def test_one_in_a_hundred_takes_little_more_than_a_byte() -> None:
    """By chance, as gradients are."""
    places = np.flatnonzero(np.random.default_rng(0).random(1 << 20) < 0.01)
    coding, data = sparse.encode(places, 1 << 20)
    assert coding is Coding.BYTES
    assert data.size <= 1.1 * places.size


@given(
    coding=st.sampled_from(Coding),
    data=st.binary(max_size=80),
    count=st.integers(0, 100),
    total=st.integers(0, 700),
)
def test_any_bytes_are_valid_indices_or_refused(
    coding: Coding, data: bytes, count: int, total: int
) -> None:
    """Fuzzing ends in as many ascending indices as promised, all within, or in one error."""
    try:
        found = sparse.decode(coding, np.frombuffer(data, np.uint8), count, total)
    except MalformedFrame:
        return
    assert found.size == count
    assert (np.diff(found) > 0).all()
    assert not count or (found[0] >= 0 and found[-1] < total)


@pytest.mark.parametrize(
    ("coding", "data", "count", "words"),
    [
        (Coding.BITMAP, [0, 128], 1, "names places that do not exist"),
        (Coding.BITMAP, [0], 1, "A bitmap of 12 places in 1 bytes"),
        (Coding.BYTES, [255], 1, "nothing comes"),
        (Coding.BYTES, [12], 1, "1 indices below 12 are due, not 1, the last of them 12"),
        (Coding.BYTES, [1, 1], 1, "too many"),
        (Coding.BYTES, [], 1, "1 indices below 12 are due, not 0"),
        (Coding.WORDS, [1], 1, "2 bytes each in 1 bytes"),
    ],
)
def test_what_is_wrong_is_said(coding: Coding, data: list[int], count: int, words: str) -> None:
    """Each mistake in its own words."""
    with pytest.raises(MalformedFrame, match=words):
        sparse.decode(coding, np.array(data, np.uint8), count, 12)


# --------------------------------------------------------------------------------------------------
# random-k: the same places on all ranks, and right on average.


@given(total=st.integers(1, 5000), part=st.floats(0.001, 1.0), seed=st.integers(0, 2**64 - 1))
def test_places_ascend_and_lie_within(total: int, part: float, seed: int) -> None:
    """One in each stretch."""
    count = max(1, int(total * part))
    places = sparse.draw(total, count, seed)
    assert places.size == count
    assert (np.diff(places) > 0).all()
    assert 0 <= places[0] <= places[-1] < total
    assert sparse.lengths(total, count).sum() == total


def test_a_seed_means_the_same_places_for_ever() -> None:
    """These are on the wire between machines with different versions of everything."""
    assert sparse.draw(1000, 4, seed=7).tolist() == sparse.draw(1000, 4, seed=7).tolist()
    assert sparse.seed_for(1, 2, "w") == sparse.seed_for(1, 2, "w") != sparse.seed_for(1, 3, "w")


def test_without_feedback_it_is_right_on_average() -> None:
    """The mean over many seeds is the gradient."""
    values = normal(64) + 2
    method = RandomK(0.25)
    total = np.zeros(64)
    for seed in range(3000):
        total += method.decode(method.encode(values, CompressionContext((64,), seed)), 64)
    np.testing.assert_allclose(total / 3000, values, rtol=0.25)
    assert abs(total.sum() / 3000 / values.sum() - 1) < 0.01


def test_with_feedback_it_is_not_scaled() -> None:
    """What was drawn is the value itself: the rest comes later."""
    values = normal(64)
    method = RandomK(0.25)
    found = method.decode(
        method.encode(values, CompressionContext((64,), 1, has_feedback=True)), 64
    )
    assert set(found[found != 0].tolist()) <= set(values.tolist())
    assert np.count_nonzero(found) == 16


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("has_feedback", [False, True])
def test_what_is_no_number_is_not_hidden(bad: float, *, has_feedback: bool) -> None:
    """Even where nothing is drawn: the step is spoiled, and shows it."""
    for place in range(64):
        values = normal(64)
        values[place] = bad
        method = RandomK(0.1)
        found = method.decode(method.encode(values, CompressionContext((64,), 1, has_feedback)), 64)
        assert np.isnan(found).any()


def test_large_numbers_are_numbers() -> None:
    """Their sum may overflow, they do not."""
    values = np.full(64, 3e38, np.float32)
    with np.errstate(over="ignore"):
        drawn = RandomK(0.5).drawn(values, CompressionContext((64,), 1, has_feedback=True))
    assert (drawn == values[:32]).all()


@given(st.binary(max_size=90), st.integers(0, 50))
def test_any_bytes_are_unpacked_or_refused_randomk(data: bytes, total: int) -> None:
    """Fuzzing."""
    with contextlib.suppress(MalformedFrame):
        assert sparse.unpack(np.frombuffer(data, np.uint8), total).dense().size == total


def test_more_values_than_places_are_refused() -> None:
    """Before they are drawn."""
    with pytest.raises(MalformedFrame, match="5 of 4 values"):
        sparse.unpack(sparse.pack(normal(5), seed=1), 4)


# --------------------------------------------------------------------------------------------------
# Sparse values: as bytes and as sums.


def test_values_come_back_at_their_places() -> None:
    """Bit by bit."""
    sparse = top_k(normal(5000), 0.1)
    found = Sparse.unpack(sparse.pack(), 5000)
    assert (found.indices == sparse.indices).all()
    assert found.values.tobytes() == sparse.values.tobytes()
    assert (found.dense()[found.indices] == found.values).all()


def test_they_add_up() -> None:
    """Like the vectors they stand for."""
    first, second = top_k(normal(500, seed=1), 0.1), top_k(normal(500, seed=2), 0.1)
    total = np.zeros(500, np.float32)
    first.add_to(total)
    second.add_to(total)
    assert (total == first.dense() + second.dense()).all()


def test_a_count_that_does_not_fit_is_refused() -> None:
    """Before anything is allocated for it."""
    data = top_k(normal(500), 0.1).pack()
    data[:8].view(np.uint64)[0] = 1 << 24  # so much could be had
    with allocating_at_most(1 << 16), pytest.raises(MalformedFrame, match="of 500 values"):
        Sparse.unpack(data, 500)


@given(st.binary(max_size=120), st.integers(0, 300))
def test_any_bytes_are_unpacked_or_refused(data: bytes, total: int) -> None:
    """Fuzzing."""
    try:
        found = Sparse.unpack(np.frombuffer(data, np.uint8), total)
    except MalformedFrame:
        return
    assert found.dense().size == total


@given(st.data())
def test_a_changed_byte_is_noticed_or_harmless(data: st.DataObject) -> None:
    """Bytes that were once right are the better attack."""
    packed = top_k(normal(300), 0.2).pack()
    place = data.draw(st.integers(0, packed.size - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    try:
        found = Sparse.unpack(packed, 300)
    except MalformedFrame:
        return
    assert found.indices.size == found.values.size <= 300
    assert not found.indices.size or found.indices[-1] < 300


def test_a_coding_that_is_not_known_is_refused() -> None:
    """There are three."""
    data = top_k(normal(500), 0.1).pack()
    data[16] = 3
    with pytest.raises(MalformedFrame, match="not known: 3"):
        Sparse.unpack(data, 500)


# --------------------------------------------------------------------------------------------------
# top-k: exact for few values, by a sample for many.


@given(values=vectors(finite=False))
def test_no_value_left_behind_is_larger_than_one_kept(values: Floats) -> None:
    """NaN counts as the largest; zeros are not worth a place."""
    kept = top_k(values, 0.2)
    sizes = np.where(np.isnan(values), np.inf, np.abs(values))
    left = np.delete(sizes, kept.indices)
    assert kept.indices.size == min(count_for(values.size, 0.2), np.count_nonzero(sizes))
    assert not left.size or not kept.indices.size or left.max() <= sizes[kept.indices].min()
    assert kept.values.tobytes() == values[kept.indices].tobytes()


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_a_sample_finds_about_as_many_and_nearly_the_same(ratio: float) -> None:
    """Never more than asked, at least nine in ten, and all of them truly large."""
    values = normal(40 * EXACT)
    wanted = count_for(values.size, ratio)
    found = top_k(values, ratio)
    assert 0.9 * wanted <= found.indices.size <= wanted
    border = np.partition(np.abs(values), values.size - wanted)[values.size - wanted]
    assert np.abs(found.values).min() >= 0.9 * border


@pytest.mark.parametrize("shape", ["zeros", "one", "steps", "tail"])
def test_odd_distributions_are_sorted_out_exactly(shape: str) -> None:
    """Where a sample says nothing about the whole."""
    values = np.zeros(3 * EXACT, np.float32)
    match shape:
        case "one":
            values[12345] = -2.0
        case "steps":
            values[:] = 1.0
        case "tail":
            values[-100:] = 5.0
    found = top_k(values, 0.01)
    most = count_for(values.size, 0.01)
    assert found.indices.size == min(most, np.count_nonzero(values))
    assert (np.abs(found.values) == np.abs(values).max()).all()


def test_layers_of_different_size_are_no_trap() -> None:
    """Where large values lie together, as in a bucket of several tensors, or ascend."""
    for values in (
        np.concatenate([normal(EXACT) * np.float32(10.0**-power) for power in range(6)]),
        np.arange(5 * EXACT, dtype=np.float32),
        -np.arange(5 * EXACT, dtype=np.float32)[::-1].copy(),
    ):
        wanted = count_for(values.size, 0.01)
        found = top_k(values, 0.01)
        border = np.partition(np.abs(values), values.size - wanted)[values.size - wanted]
        assert 0.9 * wanted <= found.indices.size <= wanted
        assert np.abs(found.values).min() >= border


def test_a_sample_that_misleads_is_not_believed() -> None:
    """All of it lies among the largest values: so all are sorted out."""
    seed, total = 3, 4 * EXACT
    raw = np.random.PCG64(seed).random_raw(SAMPLED // RUN)
    values = normal(total)
    runs = values.reshape(-1, RUN)
    runs[(raw % np.uint64(len(runs))).astype(np.int64)] *= 1000
    found = top_k(values, 0.5, seed)
    assert found.indices.size == total // 2


def test_what_is_no_number_is_always_kept() -> None:
    """In a large tensor too."""
    values = normal(3 * EXACT)
    values[[77, 150_000]] = [np.nan, np.inf]
    assert {77, 150_000} <= set(top_k(values, 0.01).indices.tolist())


def test_the_same_seed_finds_the_same() -> None:
    """There is no other chance in it."""
    values = normal(3 * EXACT)
    assert (top_k(values, 0.01, 5).indices == top_k(values, 0.01, 5).indices).all()
