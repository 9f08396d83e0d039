"""Buckets: many small arrays travel as few large ones.

An operation costs a round trip however little it carries.  So small arrays of one type are packed
together, in order; a large one travels by itself and is not copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.collective.reduce import Dtype

__all__ = ["Bucket", "packed"]

LARGE = 256 << 10
"""Bytes from which on an array travels by itself: copying it would cost more than its latency."""

FULL = 4 << 20
"""Bytes of a bucket that takes no more: the next one is packed while this one is on its way."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Arrays of one type that travel together, by their places in the order of all."""

    dtype: Dtype
    places: tuple[int, ...]
    count: int
    """Elements of all of them."""


def packed(arrays: Sequence[tuple[Dtype, int]]) -> list[Bucket]:
    """Put arrays of given types and numbers of elements into buckets.

    The same arrays give the same buckets everywhere.

    >>> import numpy as np
    >>> single, long = np.dtype("float32"), np.dtype("int64")
    >>> [each.places for each in packed([(single, 3), (long, 1), (single, 1 << 20), (single, 4)])]
    [(0, 3), (1,), (2,)]
    """
    buckets: list[tuple[Dtype, list[int], list[int]]] = []
    filling: dict[Dtype, int] = {}
    for place, (dtype, count) in enumerate(arrays):
        if count * dtype.itemsize >= LARGE:
            buckets.append((dtype, [place], [count]))
            continue
        number = filling.get(dtype)
        if number is None or (sum(buckets[number][2]) + count) * dtype.itemsize > FULL:
            number = filling[dtype] = len(buckets)
            buckets.append((dtype, [], []))
        buckets[number][1].append(place)
        buckets[number][2].append(count)
    return [Bucket(dtype, tuple(places), sum(counts)) for dtype, places, counts in buckets]
