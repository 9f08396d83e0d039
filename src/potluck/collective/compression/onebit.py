"""onebit: the sign of each value, and for each block the mean magnitude as their common size.

A piece is the scales of all its blocks, then a bit for each value, 1 for negative, the first in the
lowest bit of the first byte; bits of the last byte that stand for nothing are zero.
"""

from __future__ import annotations

import numpy as np

from potluck.collective.compression.base import CHUNK, NAN_SCALE, Codec, Floats, Octets, read_scales
from potluck.errors import MalformedFrame

__all__ = ["BLOCK", "OneBit"]

BLOCK = 1024
"""Values under one scale."""

LARGEST_SCALE = float(np.finfo(np.float32).max)


class OneBit(Codec):
    """A bit for each value.  Without error feedback, too coarse to train with."""

    name = "onebit"
    number = 5

    def __init__(self) -> None:
        self._scratch = np.empty(CHUNK, np.float32)

    @classmethod
    def size(cls, count: int) -> int:
        """Bytes for so many values."""
        return -(-count // 8) + 4 * -(-count // BLOCK)

    def encode(self, values: Floats, out: Octets) -> None:
        """Write the scales, then the signs."""
        blocks = -(-values.size // BLOCK)
        scales, bits = out[: 4 * blocks].view(np.float32), out[4 * blocks :]
        whole = values.size // BLOCK * BLOCK
        for start in range(0, whole, CHUNK):
            stop = min(start + CHUNK, whole)
            part = values[start:stop].reshape(-1, BLOCK)
            self._scale(part, scales[start // BLOCK : stop // BLOCK])
            bits[start // 8 : stop // 8] = np.packbits(values[start:stop] < 0, bitorder="little")
        if whole < values.size:
            self._scale(values[None, whole:], scales[-1:])
            bits[whole // 8 :] = np.packbits(values[whole:] < 0, bitorder="little")

    def _scale(self, values: Floats, scales: Floats) -> None:
        scratch = self._scratch[: values.size].reshape(values.shape)
        np.abs(values, out=scratch)
        np.divide(scratch, np.float32(values.shape[1]), out=scratch)  # so that no sum overflows
        scratch.sum(axis=1, out=scales)
        if not np.isfinite(scales).all():
            is_real = np.isfinite(scratch).all(axis=1)
            np.minimum(scales, np.float32(LARGEST_SCALE), out=scales)
            scales.view(np.uint32)[~is_real] = NAN_SCALE

    def _decode(self, data: Octets, out: Floats) -> None:
        blocks = -(-out.size // BLOCK)
        scales = read_scales(data[: 4 * blocks], LARGEST_SCALE, self.name)
        bits = data[4 * blocks :]
        spare = -out.size % 8
        if spare and bits[-1] >> (8 - spare):
            raise MalformedFrame("Bits of onebit that stand for nothing are not zero")
        whole = out.size // BLOCK * BLOCK
        for start in range(0, whole, CHUNK):
            stop = min(start + CHUNK, whole)
            _spread(
                bits[start // 8 : stop // 8],
                scales[start // BLOCK : stop // BLOCK, None],
                out[start:stop].reshape(-1, BLOCK),
            )
        if whole < out.size:
            _spread(bits[whole // 8 :], scales[-1:, None], out[None, whole:])


def _spread(bits: Octets, scales: Floats, out: Floats) -> None:
    signs = np.unpackbits(bits, count=out.size, bitorder="little").view(np.int8)
    signs *= -2
    signs += 1
    np.multiply(signs.reshape(out.shape), scales, out=out)
