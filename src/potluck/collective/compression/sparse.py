"""Sparse values: some of many, with their places; how they travel and how they add up."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from potluck.collective.compression import indices as places
from potluck.collective.compression.base import Floats, Octets, take_front
from potluck.collective.compression.indices import Coding, Indices
from potluck.errors import MalformedFrame

__all__ = ["HEAD_SIZE", "Sparse"]

_HEAD = struct.Struct("<QQB7x")  # values, bytes of the indices, their coding
HEAD_SIZE = _HEAD.size


@dataclass(frozen=True, slots=True)
class Sparse:
    """Values at ascending places of a vector that is zero elsewhere."""

    total: int
    """Length of the vector."""
    indices: Indices
    values: Floats

    def pack(self) -> Octets:
        """As bytes."""
        coding, coded = places.encode(self.indices, self.total)
        head = np.frombuffer(_HEAD.pack(self.values.size, coded.size, coding), np.uint8)
        return np.concatenate((head, self.values.view(np.uint8), coded))

    @classmethod
    def unpack(cls, data: Octets, total: int) -> Sparse:
        """From bytes that somebody sent, for a vector of ``total``."""
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
            places.decode(Coding(number), coded, count, total),
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
