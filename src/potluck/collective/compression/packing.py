"""A compressed gradient: its bytes, and what they stand for."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod

import numpy as np

from potluck.collective.compression.base import Octets, take_front
from potluck.collective.compression.registry import METHODS
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.errors import MalformedFrame

__all__ = ["MOST_VALUES", "CompressedGradient"]

MOST_VALUES = 1 << 28
"""Values that a compressed gradient may stand for unless the reader says otherwise: 1 GiB."""

MOST_DIMENSIONS = 64  # as in numpy

_HEAD = struct.Struct("<2sBBB3xd")  # magic, version, method, dimensions, parameter
_MAGIC = b"PG"
_VERSION = 1


@dataclass(frozen=True, slots=True, eq=False)
class CompressedGradient:
    """What :meth:`GradientCompressor.compress` makes.

    >>> import numpy
    >>> from potluck import GradientCompressor
    >>> packed = GradientCompressor("float16").compress(numpy.ones(1000, numpy.float32))
    >>> packed.original_size, packed.compressed_bytes, packed.compression_ratio
    (1000, 2000, 2.0)
    """

    strategy: CompressionStrategy
    shape: tuple[int, ...]
    data: Octets

    @property
    def original_size(self) -> int:
        """How many values it stands for."""
        return prod(self.shape)

    @property
    def compressed_bytes(self) -> int:
        """How many bytes the values take."""
        return int(self.data.size)

    @property
    def compression_ratio(self) -> float:
        """Bytes as float32 for each byte here; 1 for nothing at all."""
        before = 4 * self.original_size
        return before / self.compressed_bytes if before and self.data.size else 1.0

    def to_bytes(self) -> bytes:
        """Everything, for a file or a message."""
        number, dimensions = METHODS.index(self.strategy.method), len(self.shape)
        head = _HEAD.pack(_MAGIC, _VERSION, number, dimensions, self.strategy.parameter)
        return head + struct.pack(f"<{dimensions}Q", *self.shape) + self.data.tobytes()

    @classmethod
    def from_bytes(
        cls, data: bytes | bytearray | memoryview, *, most_values: int = MOST_VALUES
    ) -> CompressedGradient:
        """Read what :meth:`to_bytes` wrote; raises ``MalformedFrame`` for anything else."""
        octets = np.frombuffer(data, np.uint8)
        head, rest = take_front(octets, _HEAD.size, "The head of a compressed gradient")
        magic, version, number, dimensions, parameter = _HEAD.unpack(head.tobytes())
        if magic != _MAGIC or version != _VERSION:
            raise MalformedFrame(f"These bytes are no compressed gradient: {magic!r} {version}")
        if number >= len(METHODS) or dimensions > MOST_DIMENSIONS:
            raise MalformedFrame(f"Method {number} with {dimensions} dimensions is not known")
        sides, rest = take_front(rest, 8 * dimensions, "The shape of a compressed gradient")
        shape = struct.unpack(f"<{dimensions}Q", sides.tobytes())
        if prod(side or 1 for side in shape) > most_values:
            raise MalformedFrame(f"The shape {shape} has more than {most_values} values")
        return cls(_strategy(METHODS[number], parameter), shape, rest)


def _strategy(method: str, parameter: float) -> CompressionStrategy:
    try:
        return CompressionStrategy(method, parameter)  # never "auto"
    except ValueError as error:
        raise MalformedFrame(f"No encoder writes {method}:{parameter}", cause=error) from None
