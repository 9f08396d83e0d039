"""A state as one stream of bytes in chunks, each with its hash."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from potluck.arrays.base import Array, read_dtype
from potluck.backend.base import read_view
from potluck.errors import MalformedFrame
from potluck.training import trees

__all__ = ["CHUNK", "Chunks", "Layout", "chunk_digest"]

CHUNK = 1 << 20
"""Bytes that are compared and sent as one."""

MAX_STATE = 1 << 40
"""Bytes of a state; what claims to be larger is a mistake."""

_DIGEST = 16


def chunk_digest(data: bytes | bytearray | memoryview) -> bytes:
    """The hash of a chunk."""
    return hashlib.blake2b(data, digest_size=_DIGEST).digest()


class Layout(NamedTuple):
    """Which arrays make up the stream, in this order, and the tree they belong to."""

    shape: bytes
    arrays: tuple[tuple[str, str, tuple[int, ...]], ...]
    """Name, type and shape."""

    @classmethod
    def checked(cls, value: Any) -> Layout:
        """From what another member sent; nothing is allocated before it adds up."""
        try:
            shape, rows = value
            layout = cls(
                bytes(shape),
                tuple((str(n), str(read_dtype(t)), tuple(map(int, s))) for n, t, s in rows),
            )
        except (TypeError, ValueError) as error:
            raise MalformedFrame("The layout of a state makes no sense", cause=str(error)) from None
        if any(side < 0 for _, _, sides in layout.arrays for side in sides):
            raise MalformedFrame("The layout of a state has a negative size")
        if layout.nbytes > MAX_STATE:
            raise MalformedFrame(f"A state of {layout.nbytes} bytes; {MAX_STATE} are allowed")
        return layout

    @property
    def nbytes(self) -> int:
        """Bytes of the stream."""
        return sum(math.prod(sides) * np.dtype(kind).itemsize for _, kind, sides in self.arrays)

    def parts(self, stream: bytearray) -> dict[str, Array]:
        """The arrays that a stream holds; they share its memory."""
        arrays, place = {}, 0
        for name, kind, sides in self.arrays:
            dtype, count = np.dtype(kind), math.prod(sides)
            size = count * dtype.itemsize
            octets = np.frombuffer(stream, np.uint8, size, place) if size else np.empty(0, "u1")
            if place % dtype.alignment:
                octets = octets.copy()
            arrays[name] = octets.view(dtype).reshape(sides)
            place += size
        return arrays


class Chunks:
    """The chunks of a state that is here."""

    def __init__(self, tree: Any) -> None:
        shape, arrays = trees.written(tree)
        flats: Mapping[str, Array] = {name: trees.flat_array(arrays[name]) for name in arrays}
        rows = [
            (name, str(flats[name].dtype), tuple(int(side) for side in arrays[name].shape))
            for name in sorted(arrays)
        ]
        self.layout = Layout(shape, tuple(rows))
        self._views: list[memoryview] = [
            read_view(flats[name].view(np.uint8)) for name, _, _ in rows
        ]
        self.nbytes = sum(map(len, self._views))
        count = -(-self.nbytes // CHUNK)
        self.digests = [chunk_digest(self.read(number)) for number in range(count)]

    @property
    def digest(self) -> bytes:
        """The hash of everything: tree, types, shapes and values."""
        text = repr(self.layout).encode()
        return chunk_digest(b"".join([chunk_digest(text), *self.digests]))

    def read(self, number: int) -> bytes:
        """One chunk."""
        start, stop = number * CHUNK, min(self.nbytes, (number + 1) * CHUNK)
        pieces, place = [], 0
        for view in self._views:
            low, high = max(start - place, 0), min(stop - place, len(view))
            if low < high:
                pieces.append(view[low:high])
            place += len(view)
            if place >= stop:
                break
        return b"".join(pieces)


def size_of(number: int, nbytes: int) -> int:
    """Bytes of one chunk of a stream.

    >>> size_of(1, CHUNK + 5)
    5
    """
    return min(CHUNK, nbytes - number * CHUNK)


def sizes(numbers: Sequence[int], nbytes: int) -> int:
    """Bytes of several."""
    return sum(size_of(number, nbytes) for number in numbers)
