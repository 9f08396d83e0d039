"""What a codec is: float32 values as fewer bytes, how many follows from how many values.

Values that cannot be represented
=================================

=================  ============================================================================
NaN or infinite    never hidden: a codec with a scale turns the whole block into NaN, the 16-bit
                   formats keep it as it is
too large          becomes the largest value that the format has
too small          becomes zero
nothing at all     no bytes
=================  ============================================================================

What comes from outside is checked before it is used: a decoder raises ``MalformedFrame`` or fills
the array it was given, and allocates nothing that depends on the bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from potluck.arrays.adapters import as_buffer
from potluck.arrays.base import Access
from potluck.errors import MalformedFrame
from potluck.schedule.reduce import BFLOAT16, quiet

Floats: TypeAlias = npt.NDArray[np.float32]
ByteArray: TypeAlias = npt.NDArray[np.uint8]

CHUNK = 1 << 16
"""Values that are worked on at a time: 256 KiB stay in the cache from one pass to the next."""

NAN_SCALE = np.array([0x7FC00000], np.uint32)
"""The one NaN that a scale may be: the block held a value that is not a number."""


class Codec(ABC):
    """One way to write float32 values.  It has scratch memory of its own: one for each thread."""

    name: ClassVar[str]
    number: ClassVar[int]
    """What tells it from the others on the wire; never zero."""

    @classmethod
    @abstractmethod
    def size(cls, count: int) -> int:
        """Bytes that ``count`` values take."""

    @abstractmethod
    def encode(self, values: Floats, out: ByteArray) -> None:
        """Write values into exactly ``size(len(values))`` bytes; within ``quiet()``."""

    def encode_leaving(self, values: Floats, out: ByteArray, left: Floats) -> bool:
        """The same, and write to ``left`` by how much each value is off; whether that is finite.

        False means that it was not looked at.
        """
        self.encode(values, out)
        self.decode(out, left)
        np.subtract(values, left, out=left)
        return False

    @abstractmethod
    def _decode(self, data: ByteArray, out: Floats) -> None:
        """Read them back; the length has been checked."""

    def decode(self, data: ByteArray, out: Floats) -> None:
        """Fill ``out`` with the values; the same bits on every machine."""
        self.check(data, out.size)
        self._decode(data, out)

    def check(self, data: ByteArray, count: int) -> None:
        """Refuse bytes of another length than ``count`` values have."""
        expected = self.size(count)
        if data.size != expected:
            raise MalformedFrame(
                f"{count} values as {self.name} take {expected} bytes, not {data.size}",
                expected=expected,
                got=int(data.size),
            )

    def packed(self, values: Floats) -> ByteArray:
        """The same in new memory."""
        out = np.empty(self.size(values.size), np.uint8)
        with quiet():
            self.encode(values, out)
        return out


@dataclass(slots=True)
class CompressionContext:
    """One tensor in one step: what a method may want to know besides the values."""

    shape: tuple[int, ...]
    seed: int = 0
    """Of this tensor in this step; the same on all ranks."""
    has_feedback: bool = False
    """Whether what is left behind comes again."""
    kept: Floats | None = None
    """What the method kept from the last step, and what it wants to keep for the next."""


class Method(ABC):
    """One way to compress a tensor as a whole; what it makes may be of any size."""

    @abstractmethod
    def encode(self, values: Floats, turn: CompressionContext) -> ByteArray:
        """Some bytes that stand for the values."""

    @abstractmethod
    def decode(self, data: ByteArray, total: int) -> Floats:
        """The ``total`` values that received bytes stand for; allocates no more than these."""


class Quantised(Method):
    """A codec as a method."""

    def __init__(self, make: Callable[[], Codec]) -> None:
        self._make = make

    @cached_property
    def _codec(self) -> Codec:
        """Made when first used: its scratch memory is more than many a gradient."""
        return self._make()

    def encode(self, values: Floats, turn: CompressionContext) -> ByteArray:  # noqa: ARG002 - others need it
        """All values, one after the other."""
        return self._codec.packed(values)

    def decode(self, data: ByteArray, total: int) -> Floats:
        """All values again."""
        self._codec.check(data, total)  # before anything is allocated
        values = np.empty(total, np.float32)
        self._codec.decode(data, values)
        return values


def read_scales(data: ByteArray, largest: float, name: str) -> Floats:
    """The scales at the front of a piece: numbers from 0 to ``largest``, or the one NaN."""
    scales: Floats = data.view(np.float32)
    bits = data.view(np.uint32)  # of numbers that are not negative, these have the same order
    most = np.float32(largest).view(np.uint32)
    if bits.size and bits.max() > most:
        is_bad = (bits > most) & (bits != NAN_SCALE)
        if is_bad.any():
            bad = scales[is_bad.argmax()]
            raise MalformedFrame(f"A scale of {name} is {bad}, which no encoder writes")
    return scales


def take_front(data: ByteArray, size: int, what: str) -> tuple[ByteArray, ByteArray]:
    """Cut some bytes off the front; there must be as many."""
    if data.size < size:
        raise MalformedFrame(
            f"{what} takes {size} bytes, but {data.size} are left",
            expected=size,
            got=int(data.size),
        )
    return data[:size], data[size:]


def flat_floats(gradient: Any) -> tuple[tuple[int, ...], Floats]:
    """The shape of an array of any library, and its values in one row as float32."""
    if isinstance(gradient, list | tuple):
        gradient = np.asarray(gradient)
    buffer = as_buffer(gradient, Access.READ)
    dtype = buffer.flat.dtype
    if buffer.is_raw or (dtype.kind not in "fiu" and dtype != BFLOAT16):
        found = "raw bytes" if buffer.is_raw else dtype
        msg = f"A gradient is made of real numbers, not of {found}: convert it to float32"
        raise TypeError(msg)
    with quiet():
        return buffer.shape, buffer.flat.astype(np.float32, copy=False)
