"""What a caller asks for: a method of compression, and how far it goes."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import ClassVar, Self

__all__ = ["CompressionStrategy", "QuantizationType"]


class QuantizationType(Enum):
    """A number format with fewer bits for every value."""

    FP16 = "float16"
    BF16 = "bfloat16"
    INT8 = "int8"
    """Eight bits, with a scale for each block of values."""
    ONE_BIT = "onebit"
    """The sign alone, with a scale for each block of values."""


@dataclass(frozen=True, slots=True)
class CompressionStrategy:
    """A method by name, with its one parameter if it has one.

    >>> CompressionStrategy.named("topk:0.05")
    CompressionStrategy.top_k(0.05)
    >>> CompressionStrategy.quantize("int8") == CompressionStrategy.INT8
    True
    """

    method: str = "none"
    parameter: float = 0.0
    """What top-k and random keep, as a part of all; the rank of PowerSGD."""

    AUTO: ClassVar[CompressionStrategy]
    """Whatever pays on the links of the group; where there is none, int8."""
    NONE: ClassVar[CompressionStrategy]
    FLOAT16: ClassVar[CompressionStrategy]
    BFLOAT16: ClassVar[CompressionStrategy]
    INT8: ClassVar[CompressionStrategy]
    ONE_BIT: ClassVar[CompressionStrategy]

    @classmethod
    def quantize(cls, kind: QuantizationType | str) -> Self:
        """Every value in fewer bits."""
        return cls(QuantizationType(kind).value)

    @classmethod
    def top_k(cls, ratio: float = 0.01) -> Self:
        """Only the values of largest magnitude: ``ratio`` of them."""
        return cls("topk", _part(ratio))

    @classmethod
    def random(cls, probability: float = 0.01) -> Self:
        """Values drawn by a seed that all ranks share, each with this probability."""
        return cls("random", _part(probability))

    @classmethod
    def power_sgd(cls, rank: int = 4) -> Self:
        """Matrices as the product of two thin ones, with ``rank`` columns."""
        if not 1 <= rank <= LARGEST_RANK:
            msg = f"A rank is a whole number from 1 to {LARGEST_RANK}, not {rank!r}"
            raise ValueError(msg)
        return cls("powersgd", float(rank))

    @classmethod
    def named(cls, text: str) -> Self:
        """The strategy that a text names: ``int8``, ``topk:0.01``, ``powersgd:4`` and so on."""
        name, colon, number = text.strip().lower().replace("_", "").replace("-", "").partition(":")
        name = _ALIASES.get(name, name)
        if name in _PLAIN and not colon:
            return cls(name)
        try:
            match name:
                case "topk":
                    return cls.top_k(float(number)) if colon else cls.top_k()
                case "random":
                    return cls.random(float(number)) if colon else cls.random()
                case "powersgd":
                    return cls.power_sgd(int(number)) if colon else cls.power_sgd()
        except ValueError as error:
            msg = f"{text!r} is no compression: {error}"
            raise ValueError(msg) from None
        msg = f"{text!r} is no compression; there are {', '.join(_PLAIN)}, {_OTHERS}"
        raise ValueError(msg)

    @property
    def concrete(self) -> CompressionStrategy:
        """The same, or what is done where nothing says what would pay."""
        return CompressionStrategy.INT8 if self.method == "auto" else self

    @property
    def is_lossy(self) -> bool:
        """Whether something is left behind."""
        return self.method != "none"

    @property
    def quantization(self) -> QuantizationType | None:
        """The number format, if that is what this is."""
        return _QUANTIZED.get(self.method)

    def __str__(self) -> str:
        """The text that names it."""
        if not self.parameter:
            return self.method
        return f"{self.method}:{self.parameter:g}"

    def __repr__(self) -> str:
        """The expression that makes it."""
        name = type(self).__name__
        match self.method:
            case "topk":
                return f"{name}.top_k({self.parameter})"
            case "random":
                return f"{name}.random({self.parameter})"
            case "powersgd":
                return f"{name}.power_sgd({int(self.parameter)})"
        return f"{name}.{_CONSTANTS[self.method]}"


LARGEST_RANK = 1024

_CONSTANTS = {
    "auto": "AUTO",
    "none": "NONE",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "int8": "INT8",
    "onebit": "ONE_BIT",
}
_PLAIN = tuple(_CONSTANTS)
_OTHERS = "topk:RATIO, random:PROBABILITY, powersgd:RANK"
_QUANTIZED = {kind.value: kind for kind in QuantizationType}
_ALIASES = {"fp16": "float16", "bf16": "bfloat16", "1bit": "onebit", "randomk": "random"}

for _method, _name in _CONSTANTS.items():
    setattr(CompressionStrategy, _name, CompressionStrategy(_method))


def _part(ratio: float) -> float:
    if not (isfinite(ratio) and 0 < ratio <= 1):
        msg = f"A part of all values is more than 0 and at most 1, not {ratio!r}"
        raise ValueError(msg)
    return float(ratio)
