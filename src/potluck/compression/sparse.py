"""Sparse values: some of many, with their places; how they travel and how they add up."""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from potluck.compression.base import (
    CHUNK,
    ByteArray,
    CompressionContext,
    Floats,
    Method,
    take_front,
)
from potluck.errors import MalformedFrame

# --------------------------------------------------------------------------------------------------
# Indices, compactly: the places of some values among many, in about a byte each.
#
# They ascend, so what is written is the gap before each: as a digit in base 255 or 65535, where the
# digit beyond the last one (all bits set) means "that many more, and still no value".  Where the
# values are dense, a bit for each place takes less.  The encoder takes the shortest.

Indices: TypeAlias = npt.NDArray[np.int64]


class Coding(IntEnum):
    """How indices are written."""

    BITMAP = 0
    BYTES = 1
    WORDS = 2


def _digit(coding: Coding) -> np.dtype[Any]:
    return np.dtype(np.uint8 if coding is Coding.BYTES else "<u2")


def encode(indices: Indices, total: int) -> tuple[Coding, ByteArray]:
    """The indices of some of ``total`` values; they ascend and differ."""
    gaps = np.diff(indices, prepend=-1) - 1
    sizes = {Coding.BITMAP: -(-total // 8)}
    for coding in (Coding.BYTES, Coding.WORDS):
        more = np.iinfo(_digit(coding)).max
        skips = int((gaps // more).sum()) if gaps.size else 0
        sizes[coding] = _digit(coding).itemsize * (skips + gaps.size)
    best = min(sizes, key=lambda coding: (sizes[coding], coding))
    if best is Coding.BITMAP:
        return best, _bitmap(indices, total)
    return best, _digits(gaps, _digit(best)).view(np.uint8)


def _bitmap(indices: Indices, total: int) -> ByteArray:
    places = np.zeros(total, np.bool_)
    places[indices] = True
    return np.packbits(places, bitorder="little")


def _digits(gaps: Indices, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    more = np.iinfo(dtype).max
    skips, rest = np.divmod(gaps, more)
    ends = np.cumsum(skips + 1) - 1
    digits = np.full(int(ends[-1]) + 1 if ends.size else 0, more, dtype)
    digits[ends] = rest
    return digits


def largest_size(coding: Coding, count: int, total: int) -> int:
    """Bytes that ``count`` indices of ``total`` values take at most."""
    if coding is Coding.BITMAP:
        return -(-total // 8)
    digit = _digit(coding)
    return digit.itemsize * (count + total // int(np.iinfo(digit).max))


def decode(coding: Coding, data: ByteArray, count: int, total: int) -> Indices:
    """The indices again: ``count`` of them, ascending, each below ``total``."""
    if data.size > largest_size(coding, count, total):
        raise MalformedFrame(f"{data.size} bytes are too many for {count} indices of {total}")
    if coding is Coding.BITMAP:
        indices = _from_bitmap(data, total)
    else:
        digit = _digit(coding)
        if data.size % digit.itemsize:
            raise MalformedFrame(f"Indices of {digit.itemsize} bytes each in {data.size} bytes")
        indices = _from_digits(data.view(digit))
    if indices.size != count or (count and indices[-1] >= total):
        last = f", the last of them {indices[-1]}" if indices.size else ""
        raise MalformedFrame(f"{count} indices below {total} are due, not {indices.size}{last}")
    return indices


def _from_bitmap(data: ByteArray, total: int) -> Indices:
    if data.size != -(-total // 8):
        raise MalformedFrame(f"A bitmap of {total} places in {data.size} bytes")
    spare = -total % 8
    if spare and data[-1] >> (8 - spare):
        raise MalformedFrame("A bitmap names places that do not exist")
    return np.flatnonzero(np.unpackbits(data, count=total, bitorder="little"))


def _from_digits(digits: npt.NDArray[Any]) -> Indices:
    more = np.iinfo(digits.dtype).max
    if digits.size and digits[-1] == more:
        raise MalformedFrame("Indices end with a gap behind which nothing comes")
    ends = np.flatnonzero(digits != more)
    indices: Indices = np.cumsum(digits, dtype=np.int64)[ends]
    indices += np.arange(ends.size)
    return indices


# --------------------------------------------------------------------------------------------------

_HEAD = struct.Struct("<QQB7x")  # values, bytes of the indices, their coding
HEAD_SIZE = _HEAD.size


@dataclass(frozen=True, slots=True)
class Sparse:
    """Values at ascending places of a vector that is zero elsewhere."""

    total: int
    """Length of the vector."""
    indices: Indices
    values: Floats

    def pack(self) -> ByteArray:
        """As bytes."""
        coding, coded = encode(self.indices, self.total)
        head = np.frombuffer(_HEAD.pack(self.values.size, coded.size, coding), np.uint8)
        return np.concatenate((head, self.values.view(np.uint8), coded))

    @classmethod
    def unpack(cls, data: ByteArray, total: int) -> Sparse:
        """From received bytes, for a vector of ``total``."""
        head, rest = take_front(data, _HEAD.size, "The head of sparse values")
        count, size, number = _HEAD.unpack(head.tobytes())
        if number not in Coding.__members__.values():
            raise MalformedFrame(f"Indices are coded in a way that is not known: {number}")
        if count > total or 4 * count + size != rest.size:
            raise MalformedFrame(
                f"{count} of {total} values and {size} bytes of indices in {rest.size} bytes"
            )
        values, coded = take_front(rest, 4 * count, "Sparse values")
        return cls(
            total,
            decode(Coding(number), coded, count, total),
            values.copy().view(np.float32),
        )

    def add_to(self, vector: Floats) -> None:
        """Add the values where they belong."""
        vector[self.indices] += self.values

    def dense(self) -> Floats:
        """The vector."""
        vector = np.zeros(self.total, np.float32)
        vector[self.indices] = self.values
        return vector


# --------------------------------------------------------------------------------------------------
# top-k: the values of largest magnitude, exactly, or by a threshold found in a sample.
#
# Values that are no numbers count as the largest of all, so that they are never hidden; of equal
# magnitudes the earlier places win.  Zeros are not kept.

EXACT = 1 << 16
"""Up to this many values they are selected exactly."""

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

    def encode(self, values: Floats, turn: CompressionContext) -> ByteArray:
        """Places and values."""
        return self.select(values, turn).pack()

    def select(self, values: Floats, turn: CompressionContext) -> Sparse:
        """The largest of some values."""
        return top_k(values, self._ratio, turn.seed)

    def decode(self, data: ByteArray, total: int) -> Floats:
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


# --------------------------------------------------------------------------------------------------
# random-k: values at places that follow from a seed which all ranks share, so no index travels.
#
# The vector is cut into as many stretches as values are kept, and one place is drawn in each.
# Scaled by the length of its stretch, what is kept is right on average; with error feedback it is
# not scaled, because what was left behind comes again.

_RANDOMK_HEAD = struct.Struct("<QQ")  # seed, values


class RandomK(Method):
    """Values that were drawn, with the seed that says where they are."""

    def __init__(self, probability: float) -> None:
        self._probability = probability

    def encode(self, values: Floats, turn: CompressionContext) -> ByteArray:
        """The seed and the values."""
        return pack(self.drawn(values, turn), turn.seed)

    def places(self, total: int, turn: CompressionContext) -> Indices:
        """The places of this turn."""
        return draw(total, count_for(total, self._probability), turn.seed)

    def drawn(self, values: Floats, turn: CompressionContext) -> Floats:
        """The values of this turn; none of them is a number unless all values are."""
        kept = values[self.places(values.size, turn)]
        if not np.isfinite(values.sum()) and not np.isfinite(values).all():  # the sum is quicker
            kept.fill(np.nan)
        elif not turn.has_feedback:
            kept *= lengths(values.size, kept.size)
        return kept

    def decode(self, data: ByteArray, total: int) -> Floats:
        """Zero where nothing was drawn."""
        return unpack(data, total).dense()


def seed_for(seed: int, step: int, name: str) -> int:
    """The seed of one tensor in one step; the same on every machine."""
    return zlib.crc32(f"{seed} {step} {name}".encode()) << 32 | zlib.crc32(name.encode())


def draw(total: int, count: int, seed: int) -> Indices:
    """A place in each of ``count`` stretches of ``total`` values; they ascend.

    >>> draw(10, 10, seed=7).tolist()
    [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """
    starts = _starts(total, count)
    raw = np.random.PCG64(seed).random_raw(count) >> np.uint64(32)  # the same in every numpy
    sizes = np.diff(starts).astype(np.uint64)
    return starts[:-1] + ((raw * sizes) >> np.uint64(32)).astype(np.int64)


def lengths(total: int, count: int) -> Floats:
    """How long the stretches are: what makes a value that was drawn right on average."""
    return np.diff(_starts(total, count)).astype(np.float32)


def _starts(total: int, count: int) -> Indices:
    return np.arange(count + 1, dtype=np.int64) * total // max(1, count)


def pack(values: Floats, seed: int) -> ByteArray:
    """What was drawn, as bytes."""
    head = np.frombuffer(_RANDOMK_HEAD.pack(seed, values.size), np.uint8)
    return np.concatenate((head, values.view(np.uint8)))


def unpack(data: ByteArray, total: int) -> Sparse:
    """From received bytes, for a vector of ``total``."""
    head, rest = take_front(data, _RANDOMK_HEAD.size, "The head of random values")
    seed, count = _RANDOMK_HEAD.unpack(head.tobytes())
    if count > total or 4 * count != rest.size or (total and not count):
        raise MalformedFrame(f"{count} of {total} values in {rest.size} bytes")
    return Sparse(total, draw(total, count, seed), rest.copy().view(np.float32))
