"""None: float32 as it is."""

from __future__ import annotations

import numpy as np

from potluck.collective.compression.base import Codec, Floats, Octets

__all__ = ["Plain"]


class Plain(Codec):
    """Four bytes for each value; nothing is lost."""

    name = "none"
    number = 1

    @classmethod
    def size(cls, count: int) -> int:
        """Bytes for so many values."""
        return 4 * count

    def encode(self, values: Floats, out: Octets) -> None:
        """Copy."""
        np.copyto(out.view(np.float32), values)

    def _decode(self, data: Octets, out: Floats) -> None:
        np.copyto(out, data.view(np.float32))
