"""What float16 and bfloat16 share: a cast to a type of 16 bits that saturates."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from potluck.collective.compression.base import CHUNK, Codec, Floats, Octets

__all__ = ["Sixteen"]


class Sixteen(Codec):
    """Two bytes for each value, rounded to the nearest."""

    dtype: ClassVar[np.dtype[Any]]
    largest: ClassVar[float]
    """The largest finite number of the type."""

    def __init__(self) -> None:
        self._scratch = np.empty(CHUNK, np.float32)

    @classmethod
    def size(cls, count: int) -> int:
        """Bytes for so many values."""
        return 2 * count

    def encode(self, values: Floats, out: Octets) -> None:
        """Round; what is finite stays finite."""
        halves = out.view(self.dtype)
        for start in range(0, values.size, CHUNK):
            part = values[start : start + CHUNK]
            scratch = self._scratch[: part.size]
            np.abs(part, out=scratch)
            if not scratch.max() <= self.largest:  # some are larger, infinite or NaN
                np.clip(part, -self.largest, self.largest, out=scratch)
                np.copyto(scratch, part, where=~np.isfinite(part))
                part = scratch
            np.copyto(halves[start : start + CHUNK], part, casting="unsafe")

    def _decode(self, data: Octets, out: Floats) -> None:
        np.copyto(out, data.view(self.dtype))
