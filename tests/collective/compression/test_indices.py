"""Indices in few bytes, and hostile ones refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame
from potluck.collective.compression import indices
from potluck.collective.compression.indices import Coding, Indices


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
    coding, data = indices.encode(places, total)
    assert data.size <= indices.largest_size(coding, places.size, total)
    assert indices.decode(coding, data, places.size, total).tolist() == places.tolist()


@pytest.mark.parametrize(
    ("step", "coding"), [(2, Coding.BITMAP), (100, Coding.BYTES), (5000, Coding.WORDS)]
)
def test_the_shortest_coding_is_taken(step: int, coding: Coding) -> None:
    """A bit for each place, a byte or two for each index."""
    total = 100_000
    places = np.arange(0, total, step, dtype=np.int64)
    found, data = indices.encode(places, total)
    assert found is coding
    assert data.size <= 2.1 * places.size


def test_one_in_a_hundred_takes_little_more_than_a_byte() -> None:
    """By chance, as gradients are."""
    places = np.flatnonzero(np.random.default_rng(0).random(1 << 20) < 0.01)
    coding, data = indices.encode(places, 1 << 20)
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
        found = indices.decode(coding, np.frombuffer(data, np.uint8), count, total)
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
        indices.decode(coding, np.array(data, np.uint8), count, 12)
