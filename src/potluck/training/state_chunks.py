"""A state as one stream of bytes in chunks, each with its hash."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np

from potluck.arrays.base import Array, read_dtype
from potluck.backend.base import read_view
from potluck.errors import MalformedFrame
from potluck.training import trees

__all__ = ["CHUNK", "DIGEST", "Chunks", "Layout", "chunk_digest", "state_digest"]

CHUNK = 1 << 20
"""Bytes that are compared and sent as one."""

MAX_STATE = 1 << 40
"""Bytes of a state; what claims to be larger is a mistake."""

DIGEST = 16
"""Bytes of a hash."""

_DIMENSIONS = 64  # of an array; numpy and PyTorch have no more
_LARGEST_ITEM = 1 << 10  # bytes of one element

Side = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
"""Elements of an array along one dimension."""


def chunk_digest(data: bytes | bytearray | memoryview) -> bytes:
    """The hash of a chunk."""
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


def state_digest(layout: Layout, digests: Sequence[bytes]) -> bytes:
    """The hash of a state, from its layout and the hashes of its chunks."""
    return chunk_digest(b"".join([chunk_digest(repr(layout).encode()), *digests]))


def _check_dtype(name: str, kind: str) -> None:
    try:
        dtype = read_dtype(kind)
    except (TypeError, ValueError, SyntaxError) as error:
        raise MalformedFrame(f"The array {name[:100]!r} has no known type: {error}") from None
    is_plain = dtype.subdtype is None and dtype.names is None and dtype.itemsize <= _LARGEST_ITEM
    if str(dtype) != kind or not is_plain:
        raise MalformedFrame(f"The array {name[:100]!r} has elements of the type {kind[:40]!r}")


class Layout(NamedTuple):
    """Which arrays make up the stream, in this order, and the tree they belong to."""

    shape: bytes
    arrays: tuple[tuple[str, str, tuple[Side, ...]], ...]
    """Name, type and shape."""

    def check(self, limit: int = MAX_STATE) -> None:
        """Raise :class:`~potluck.MalformedFrame` unless it adds up; nothing is allocated before.

        ``limit`` is in bytes.
        """
        for name, kind, sides in self.arrays:
            _check_dtype(name, kind)
            if len(sides) > _DIMENSIONS:
                raise MalformedFrame(f"The array {name[:100]!r} has {len(sides)} dimensions")
        names = [name for name, _, _ in self.arrays]
        if names != sorted(set(names)):
            raise MalformedFrame("The arrays of a state are not in order, or one is there twice")
        if self.nbytes > limit:
            raise MalformedFrame(
                f"A state of {self.nbytes} bytes, where at most {limit} are plausible",
                expected=limit,
                got=self.nbytes,
            )
        trees.check(self.shape, names)

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
        return state_digest(self.layout, self.digests)

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
