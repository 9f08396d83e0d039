"""Indices, compactly: the places of some values among many, in about a byte each.

They ascend, so what is written is the gap before each: as a digit in base 255 or 65535, where the
digit beyond the last one (all bits set) means "that many more, and still no value".  Where the
values are dense, a bit for each place takes less.  The encoder takes the shortest.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from potluck.collective.compression.base import Octets
from potluck.errors import MalformedFrame

__all__ = ["Coding", "Indices", "decode", "encode", "largest_size"]

Indices: TypeAlias = npt.NDArray[np.int64]


class Coding(IntEnum):
    """How indices are written."""

    BITMAP = 0
    BYTES = 1
    WORDS = 2


def _digit(coding: Coding) -> np.dtype[Any]:
    return np.dtype(np.uint8 if coding is Coding.BYTES else "<u2")


def encode(indices: Indices, total: int) -> tuple[Coding, Octets]:
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


def _bitmap(indices: Indices, total: int) -> Octets:
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


def decode(coding: Coding, data: Octets, count: int, total: int) -> Indices:
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


def _from_bitmap(data: Octets, total: int) -> Indices:
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
