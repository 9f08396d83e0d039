"""Buckets: small arrays of one type together, large ones by themselves."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from potluck.collective.buckets import FULL, LARGE, packed

FLOAT, BYTE = np.dtype("float32"), np.dtype("uint8")


def test_a_thousand_small_arrays_are_one_bucket() -> None:
    """Of each type."""
    buckets = packed([(FLOAT, 10)] * 1000 + [(BYTE, 3)] * 1000)
    assert [(each.dtype, len(each.places), each.count) for each in buckets] == [
        (FLOAT, 1000, 10_000),
        (BYTE, 1000, 3000),
    ]


def test_a_full_bucket_takes_no_more() -> None:
    """Then the next one is begun; none is empty."""
    size = LARGE - 1
    buckets = packed([(BYTE, size)] * (2 * FULL // size + 1))
    assert len(buckets) == 3
    assert all(0 < each.count <= FULL for each in buckets)


ARRAYS = some.lists(
    some.tuples(some.sampled_from([FLOAT, BYTE]), some.integers(0, LARGE + LARGE // 2)), max_size=60
)


@given(ARRAYS)
def test_every_array_is_in_one_bucket_of_its_type(arrays: list[tuple[np.dtype, int]]) -> None:
    """In order; a large one is alone."""
    buckets = packed(arrays)
    assert sorted(place for each in buckets for place in each.places) == list(range(len(arrays)))
    for bucket in buckets:
        assert list(bucket.places) == sorted(bucket.places)
        assert {arrays[place][0] for place in bucket.places} == {bucket.dtype}
        assert bucket.count == sum(arrays[place][1] for place in bucket.places)
        is_large = any(arrays[place][1] * bucket.dtype.itemsize >= LARGE for place in bucket.places)
        assert not is_large or len(bucket.places) == 1
