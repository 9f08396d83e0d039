"""The codecs, by the number format that asks for them and by the number they have on the wire."""

from __future__ import annotations

from typing import Any, ClassVar

import ml_dtypes
import numpy as np

from potluck.compression.base import CHUNK, NAN_SCALE, ByteArray, Codec, Floats, read_scales
from potluck.compression.strategy import QuantizationType
from potluck.errors import MalformedFrame

# --------------------------------------------------------------------------------------------------
# What float16 and bfloat16 share: a cast to a type of 16 bits that saturates.


class SixteenBit(Codec):
    """Two bytes for each value, rounded to the nearest."""

    dtype: ClassVar[np.dtype[Any]]
    largest: ClassVar[float]
    """The largest finite number of the type."""

    def __init__(self) -> None:
        self._scratch = np.empty(CHUNK, np.float32)

    @classmethod
    def size(cls, count: int) -> int:
        """Bytes that ``count`` values take."""
        return 2 * count

    def encode(self, values: Floats, out: ByteArray) -> None:
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

    def _decode(self, data: ByteArray, out: Floats) -> None:
        np.copyto(out, data.view(self.dtype))


# --------------------------------------------------------------------------------------------------
# float16: eleven significant bits, from 6e-8 to 65504.


class Float16(SixteenBit):
    """Two bytes for each value; exact to 1 part in 2048 within its small range."""

    name = "float16"
    number = 2
    dtype = np.dtype(np.float16)
    largest = 65504.0


# --------------------------------------------------------------------------------------------------
# bfloat16: eight significant bits, in the range of float32.


class BFloat16(SixteenBit):
    """Two bytes for each value; exact to 1 part in 256, however large or small."""

    name = "bfloat16"
    number = 3
    dtype = np.dtype(ml_dtypes.bfloat16)
    largest = 255 * 2.0**120


# --------------------------------------------------------------------------------------------------
# int8: whole numbers from −127 to 127 and a scale for each block, the block's largest / 127.
#
# A piece is the scales of all its blocks, then one byte for each value.  Rounded to the nearest,
# the error of a value is at most half a scale.  Rounded by chance (a value between two numbers
# becomes the nearer one more often) it is up to a whole scale, but zero on average.

BLOCK = 32
"""Values under one scale: the fewer, the smaller the error; these cost 12.5 % more bytes.

A value is off by 0.29 scales on average, so whatever the values are, they lose at most
0.29 / 127 * sqrt(32) = 1.3 % of their length, and a sum whose result is encoded again 1.8 %.
"""

STEPS = 127

MAGNITUDE = np.int32(0x7FFFFFFF)
"""All bits of a float32 but its sign."""

SMALLEST = 2.0**-118
"""A block whose largest magnitude is below this becomes zero: its scale would be denormal."""

LARGEST_SCALE = float(np.nextafter(np.finfo(np.float32).max / np.float32(STEPS), np.float32(0)))
"""The largest scale: 127 times it is still finite."""

LARGEST = LARGEST_SCALE * 126
"""Below this no scale has to be made smaller."""


class Int8(Codec):
    """A byte for each value.  With a ``seed`` it is rounded by chance, without bias."""

    name = "int8"
    number = 4

    def __init__(self, seed: int | None = None) -> None:
        self._scratch = np.empty(CHUNK, np.float32)
        self._dice = None if seed is None else np.random.Generator(np.random.PCG64(seed))

    @classmethod
    def size(cls, count: int) -> int:
        """Bytes that ``count`` values take."""
        return count + 4 * -(-count // BLOCK)

    def encode(self, values: Floats, out: ByteArray) -> None:
        """Write the scales, then the values in units of them."""
        self._encode_all(values, out, None)

    def encode_leaving(self, values: Floats, out: ByteArray, left: Floats) -> bool:
        """The same, and by how much each value is off, while it is in the cache."""
        return self._encode_all(values, out, left)

    def _encode_all(self, values: Floats, out: ByteArray, left: Floats | None) -> bool:
        blocks = -(-values.size // BLOCK)
        scales = out[: 4 * blocks].view(np.float32)
        codes = out[4 * blocks :].view(np.int8)
        whole = values.size // BLOCK * BLOCK
        is_finite = True
        for start in range(0, whole, CHUNK):
            stop = min(start + CHUNK, whole)
            is_finite &= self._encode(
                values[start:stop].reshape(-1, BLOCK),
                codes[start:stop].reshape(-1, BLOCK),
                scales[start // BLOCK : stop // BLOCK],
                None if left is None else left[start:stop].reshape(-1, BLOCK),
            )
        if whole < values.size:
            rest = None if left is None else left[None, whole:]
            is_finite &= self._encode(values[None, whole:], codes[None, whole:], scales[-1:], rest)
        return is_finite

    def _encode(
        self,
        values: Floats,
        codes: np.ndarray[tuple[int, ...], np.dtype[np.int8]],
        scales: Floats,
        left: Floats | None,
    ) -> bool:
        """Some blocks; whether they are all usual ones."""
        scratch = self._scratch[: values.size].reshape(values.shape)
        bits = scratch.view(np.int32)
        np.bitwise_and(values.view(np.int32), MAGNITUDE, out=bits)
        tops = bits.max(axis=1).view(np.float32)  # they have the same order, and NaN above all
        factors = np.float32(STEPS) / tops
        np.divide(tops, np.float32(STEPS), out=scales)
        is_odd = None
        if not (tops.min() >= SMALLEST and tops.max() <= LARGEST):
            np.minimum(scales, np.float32(LARGEST_SCALE), out=scales)
            is_odd = ~((tops >= SMALLEST) & (tops < np.inf))
            is_zero = tops < SMALLEST
            scales[is_zero] = factors[is_zero] = 0.0
            scales.view(np.uint32)[is_odd & ~is_zero] = NAN_SCALE
        _spread(factors, scratch)
        np.multiply(values, scratch, out=scratch)
        self._round(scratch)
        np.copyto(codes, scratch, casting="unsafe")
        if is_odd is not None:
            codes[is_odd] = 0
        if left is not None:  # what a decoder will make of it, and what is missing then
            _spread(scales, left)
            np.multiply(scratch if is_odd is None else codes, left, out=left)
            np.subtract(values, left, out=left)
        return is_odd is None

    def _round(self, scaled: Floats) -> None:
        if self._dice is None:
            np.rint(scaled, out=scaled)
        else:
            scaled += self._dice.random(scaled.shape, np.float32)
            np.floor(scaled, out=scaled)
            np.minimum(scaled, STEPS, out=scaled)

    def _decode(self, data: ByteArray, out: Floats) -> None:
        blocks = -(-out.size // BLOCK)
        scales = read_scales(data[: 4 * blocks], LARGEST_SCALE, self.name)
        codes = data[4 * blocks :].view(np.int8)
        if codes.size and codes.min() < -STEPS:
            raise MalformedFrame("A value of int8 is −128, which no encoder writes")
        for start in range(0, out.size, CHUNK):
            stop = min(start + CHUNK, out.size)
            part, values = out[start:stop], self._scratch[: stop - start]
            np.copyto(values, codes[start:stop])
            whole = part.size // BLOCK * BLOCK
            first = start // BLOCK
            _spread(scales[first : first + whole // BLOCK], part[:whole].reshape(-1, BLOCK))
            part[whole:] = scales[-1]
            np.multiply(values, part, out=part)


def _spread(scales: Floats, rows: Floats) -> None:
    """Write each scale to every place of its row.

    Multiplying by what lies there is quicker than having numpy repeat a number on the way.
    """
    np.copyto(rows, scales[:, None])


# --------------------------------------------------------------------------------------------------
# onebit: the sign of each value, and for each block the mean magnitude as their common size.
#
# A piece is the scales of all its blocks, then a bit for each value, 1 for negative, the first in
# the lowest bit of the first byte; bits of the last byte that stand for nothing are zero.

ONEBIT_BLOCK = 1024
"""Values under one scale."""

ONEBIT_LARGEST_SCALE = float(np.finfo(np.float32).max)


class OneBit(Codec):
    """A bit for each value.  Without error feedback, too coarse to train with."""

    name = "onebit"
    number = 5

    def __init__(self) -> None:
        self._scratch = np.empty(CHUNK, np.float32)

    @classmethod
    def size(cls, count: int) -> int:
        """Bytes that ``count`` values take."""
        return -(-count // 8) + 4 * -(-count // ONEBIT_BLOCK)

    def encode(self, values: Floats, out: ByteArray) -> None:
        """Write the scales, then the signs."""
        blocks = -(-values.size // ONEBIT_BLOCK)
        scales, bits = out[: 4 * blocks].view(np.float32), out[4 * blocks :]
        whole = values.size // ONEBIT_BLOCK * ONEBIT_BLOCK
        for start in range(0, whole, CHUNK):
            stop = min(start + CHUNK, whole)
            part = values[start:stop].reshape(-1, ONEBIT_BLOCK)
            self._scale(part, scales[start // ONEBIT_BLOCK : stop // ONEBIT_BLOCK])
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
            np.minimum(scales, np.float32(ONEBIT_LARGEST_SCALE), out=scales)
            scales.view(np.uint32)[~is_real] = NAN_SCALE

    def _decode(self, data: ByteArray, out: Floats) -> None:
        blocks = -(-out.size // ONEBIT_BLOCK)
        scales = read_scales(data[: 4 * blocks], ONEBIT_LARGEST_SCALE, self.name)
        bits = data[4 * blocks :]
        spare = -out.size % 8
        if spare and bits[-1] >> (8 - spare):
            raise MalformedFrame("Bits of onebit that stand for nothing are not zero")
        whole = out.size // ONEBIT_BLOCK * ONEBIT_BLOCK
        for start in range(0, whole, CHUNK):
            stop = min(start + CHUNK, whole)
            _onebit_spread(
                bits[start // 8 : stop // 8],
                scales[start // ONEBIT_BLOCK : stop // ONEBIT_BLOCK, None],
                out[start:stop].reshape(-1, ONEBIT_BLOCK),
            )
        if whole < out.size:
            _onebit_spread(bits[whole // 8 :], scales[-1:, None], out[None, whole:])


def _onebit_spread(bits: ByteArray, scales: Floats, out: Floats) -> None:
    signs = np.unpackbits(bits, count=out.size, bitorder="little").view(np.int8)
    signs *= -2
    signs += 1
    np.multiply(signs.reshape(out.shape), scales, out=out)


# --------------------------------------------------------------------------------------------------

CODECS: dict[QuantizationType, type[Codec]] = {
    QuantizationType.FP16: Float16,
    QuantizationType.BF16: BFloat16,
    QuantizationType.INT8: Int8,
    QuantizationType.ONE_BIT: OneBit,
}

NAMES = {codec.number: codec.name for codec in CODECS.values()}
"""What the numbers of codecs mean."""


def codec_for(kind: QuantizationType) -> Codec:
    """A new codec, with scratch memory of its own.

    >>> codec_for(QuantizationType.INT8).size(1000)
    1128
    """
    return CODECS[kind]()


# --------------------------------------------------------------------------------------------------
# None: float32 as it is.


class Float32(Codec):
    """Four bytes for each value; nothing is lost."""

    name = "none"
    number = 1

    @classmethod
    def size(cls, count: int) -> int:
        """Bytes that ``count`` values take."""
        return 4 * count

    def encode(self, values: Floats, out: ByteArray) -> None:
        """Copy."""
        np.copyto(out.view(np.float32), values)

    def _decode(self, data: ByteArray, out: Floats) -> None:
        np.copyto(out, data.view(np.float32))
