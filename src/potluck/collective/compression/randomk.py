"""random-k: values at places that follow from a seed which all ranks share, so no index travels.

The vector is cut into as many stretches as values are kept, and one place is drawn in each.  Scaled
by the length of its stretch, what is kept is right on average; with error feedback it is not
scaled, because what was left behind comes again.
"""

from __future__ import annotations

import struct
import zlib

import numpy as np

from potluck.collective.compression.base import Floats, Method, Octets, Turn, take_front
from potluck.collective.compression.indices import Indices
from potluck.collective.compression.sparse import Sparse
from potluck.collective.compression.topk import count_for
from potluck.errors import MalformedFrame

__all__ = ["RandomK", "draw", "lengths", "pack", "seed_for", "unpack"]

_HEAD = struct.Struct("<QQ")  # seed, values


class RandomK(Method):
    """Values that were drawn, with the seed that says where they are."""

    def __init__(self, probability: float) -> None:
        self._probability = probability

    def encode(self, values: Floats, turn: Turn) -> Octets:
        """The seed and the values."""
        return pack(self.drawn(values, turn), turn.seed)

    def places(self, total: int, turn: Turn) -> Indices:
        """The places of this turn."""
        return draw(total, count_for(total, self._probability), turn.seed)

    def drawn(self, values: Floats, turn: Turn) -> Floats:
        """The values of this turn; none of them is a number unless all values are."""
        kept = values[self.places(values.size, turn)]
        if not np.isfinite(values.sum()) and not np.isfinite(values).all():  # the sum is quicker
            kept.fill(np.nan)
        elif not turn.has_feedback:
            kept *= lengths(values.size, kept.size)
        return kept

    def decode(self, data: Octets, total: int) -> Floats:
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


def pack(values: Floats, seed: int) -> Octets:
    """What was drawn, as bytes."""
    head = np.frombuffer(_HEAD.pack(seed, values.size), np.uint8)
    return np.concatenate((head, values.view(np.uint8)))


def unpack(data: Octets, total: int) -> Sparse:
    """From bytes that somebody sent, for a vector of ``total``."""
    head, rest = take_front(data, _HEAD.size, "The head of random values")
    seed, count = _HEAD.unpack(head.tobytes())
    if count > total or 4 * count != rest.size or (total and not count):
        raise MalformedFrame(f"{count} of {total} values in {rest.size} bytes")
    return Sparse(total, draw(total, count, seed), rest.copy().view(np.float32))
