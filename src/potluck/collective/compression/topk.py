"""top-k: the values of largest magnitude, exactly, or by a threshold found in a sample.

Values that are no numbers count as the largest of all, so that they are never hidden; of equal
magnitudes the earlier places win.  Zeros are not kept.
"""

from __future__ import annotations

import numpy as np

from potluck.collective.compression.base import CHUNK, Floats, Method, Octets, Turn
from potluck.collective.compression.indices import Indices
from potluck.collective.compression.sparse import Sparse

__all__ = ["EXACT", "TopK", "count_for", "top_k"]

EXACT = 1 << 16
"""Up to so many values they are sorted out exactly."""

SMALLEST = np.float32(2.0**-149)
"""The smallest number above zero."""

RUN = 16
"""Neighbours that are sampled together: those of a cache line."""

SAMPLED = 1 << 14
"""Values in a sample."""

GENEROUS = 125
"""Per cent of the wanted number that a threshold aims at, so that it seldom finds too few."""

ENOUGH = 90
"""Per cent of the wanted number that must be found, or else all are sorted out exactly."""


class TopK(Method):
    """The largest values and where they are."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio

    def encode(self, values: Floats, turn: Turn) -> Octets:
        """Places and values."""
        return self.select(values, turn).pack()

    def select(self, values: Floats, turn: Turn) -> Sparse:
        """The largest of some values."""
        return top_k(values, self._ratio, turn.seed)

    def decode(self, data: Octets, total: int) -> Floats:
        """Zero where nothing was kept."""
        return Sparse.unpack(data, total).dense()


def count_for(total: int, ratio: float) -> int:
    """How many values to keep: at least one if there are any.

    >>> count_for(1000, 0.0155), count_for(5, 0.01), count_for(0, 0.5)
    (15, 1, 0)
    """
    return min(total, max(1, int(total * ratio)))


def top_k(values: Floats, ratio: float, seed: int = 0) -> Sparse:
    """The largest of some values; for many, about as many as asked, by a sample."""
    count = count_for(values.size, ratio)
    if values.size <= EXACT:
        found = _largest(values, np.arange(values.size), count)
    else:
        border = _threshold(values, count, seed)
        found = _above(values, count, border)
        if found.size * 100 < count * ENOUGH and border > SMALLEST:
            found = _above(values, count, SMALLEST)
    return Sparse(values.size, found, values[found])


def _magnitudes(values: Floats) -> Floats:
    """Their sizes; NaN counts as infinite."""
    sizes = np.abs(values)
    return np.nan_to_num(sizes, copy=False, nan=np.inf, posinf=np.inf)


def _largest(values: Floats, places: Indices, count: int) -> Indices:
    """Of the values at some places the ``count`` largest, in the order of their places."""
    sizes = _magnitudes(values[places])
    if count < places.size:
        border = np.partition(sizes, places.size - count)[places.size - count]
        above = np.flatnonzero(sizes > border)
        level = np.flatnonzero(sizes == border)[: count - above.size]
        chosen = np.sort(np.concatenate((above, level)))
    else:
        chosen = np.arange(places.size)
    return places[chosen[sizes[chosen] > 0]]


def _above(values: Floats, count: int, border: np.float32) -> Indices:
    """Of all values that are not below ``border`` the ``count`` largest."""
    found: list[Indices] = []
    held = 0
    scratch, is_above = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.bool_)
    for start in range(0, values.size, CHUNK):
        part = values[start : start + CHUNK]
        sizes, flags = scratch[: part.size], is_above[: part.size]
        np.abs(part, out=sizes)
        np.less(sizes, border, out=flags)  # false for NaN, which is wanted
        np.logical_not(flags, out=flags)
        here = np.flatnonzero(flags)
        here += start
        found.append(here)
        held += here.size
        if held > 2 * count + CHUNK:  # what is not among the largest so far never will be
            found = [_largest(values, np.concatenate(found), count)]
            held = found[0].size
            smallest = _magnitudes(values[found[0]]).min()
            border = np.nextafter(smallest, np.float32(np.inf))  # of equal ones the earlier win
    places = np.concatenate(found)
    return _largest(values, places, count) if held > count else places


def _threshold(values: Floats, count: int, seed: int) -> np.float32:
    """The magnitude above which a few more values lie than are wanted, judged by a sample."""
    runs = values.size // RUN
    raw = np.random.PCG64(seed).random_raw(SAMPLED // RUN)
    starts = (raw % np.uint64(runs)).astype(np.int64)
    sample = _magnitudes(values[: runs * RUN].reshape(runs, RUN)[starts]).reshape(-1)
    above = min(sample.size, max(1, sample.size * count * GENEROUS // (100 * values.size)))
    return max(SMALLEST, np.partition(sample, sample.size - above)[sample.size - above])
