"""The codecs, by the number format that asks for them and by the number they have on the wire."""

from __future__ import annotations

from potluck.collective.compression.base import Codec
from potluck.collective.compression.bfloat16 import BFloat16
from potluck.collective.compression.float16 import Float16
from potluck.collective.compression.int8 import Int8
from potluck.collective.compression.onebit import OneBit
from potluck.collective.compression.strategy import QuantizationType

__all__ = ["CODECS", "NAMES", "codec_for"]

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
