"""What a caller asks for: a method of compression, and how far it goes."""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from enum import Enum
from math import isfinite
from typing import ClassVar, Self


class QuantizationType(Enum):
    """A number format with fewer bits for every value.

    >>> QuantizationType("int8")
    <QuantizationType.INT8: 'int8'>
    """

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
    """Whatever pays on the links of the group and loses little; where there is none, int8."""
    AUTO_AGGRESSIVE: ClassVar[CompressionStrategy]
    """The same, also where most of a step is left to the next ones."""
    NONE: ClassVar[CompressionStrategy]
    FLOAT16: ClassVar[CompressionStrategy]
    BFLOAT16: ClassVar[CompressionStrategy]
    INT8: ClassVar[CompressionStrategy]
    ONE_BIT: ClassVar[CompressionStrategy]

    def __post_init__(self) -> None:
        """Refuse what no method can do."""
        match self.method:
            case "topk" | "random":
                _check_part(self.parameter)
            case "powersgd":
                _check_rank(self.parameter)
            case _ if self.method not in _CONSTANTS:
                raise _unknown(self.method)
            case _ if self.parameter:
                msg = f"{self.method} takes no number, but was given {self.parameter!r}"
                raise ValueError(msg)

    @classmethod
    def of(cls, wanted: CompressionStrategy | QuantizationType | str) -> CompressionStrategy:
        """The strategy that a caller means: one, a number format, or a text that names one."""
        if isinstance(wanted, CompressionStrategy):
            return wanted
        if isinstance(wanted, QuantizationType):
            return cls(wanted.value)
        if isinstance(wanted, str):
            return cls.named(wanted)
        msg = (
            "A compression is a name such as 'int8' or 'topk:0.01', a CompressionStrategy or a "
            f"GradientCompressor, not {wanted!r}"
        )
        raise TypeError(msg)

    @classmethod
    def quantize(cls, kind: QuantizationType | str) -> CompressionStrategy:
        """Every value in fewer bits."""
        found = cls.of(kind)
        if found.quantization is None:
            msg = f"{kind!r} is not a number format: use one of {', '.join(_QUANTIZED)}"
            raise ValueError(msg)
        return found

    @classmethod
    def top_k(cls, ratio: float = 0.01) -> Self:
        """Only the values of largest magnitude: ``ratio`` of them."""
        return cls("topk", float(ratio))

    @classmethod
    def random(cls, probability: float = 0.01) -> Self:
        """Values drawn by a seed that all ranks share, each with this probability."""
        return cls("random", float(probability))

    @classmethod
    def power_sgd(cls, rank: int = 4) -> Self:
        """Matrices as the product of two thin ones, with ``rank`` columns."""
        return cls("powersgd", float(rank))

    @classmethod
    def named(cls, text: str) -> Self:
        """The strategy that a text names: ``int8``, ``topk:0.01``, ``powersgd:4`` and so on."""
        whole = "".join(text.lower().split())
        if whole in _CONSTANTS:
            return cls(whole)
        name, colon, number = whole.partition(":")
        name = name.replace("_", "").replace("-", "")
        name = _ALIASES.get(name, name)
        if name not in _METHODS:
            raise _unknown(text, name)
        try:
            return cls(name, float(number) if colon else _USUAL.get(name, 0.0))
        except ValueError as error:
            msg = f"{text!r} is not a valid compression: {error}"
            raise ValueError(msg) from None

    @property
    def is_auto(self) -> bool:
        """Whether the group chooses."""
        return self in {CompressionStrategy.AUTO, CompressionStrategy.AUTO_AGGRESSIVE}

    @property
    def concrete(self) -> CompressionStrategy:
        """The same, or what is done where nothing says what would pay."""
        return CompressionStrategy.INT8 if self.is_auto else self

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
        short = f"{self.parameter:g}"
        return f"{self.method}:{short if float(short) == self.parameter else repr(self.parameter)}"

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
    "auto:aggressive": "AUTO_AGGRESSIVE",
    "none": "NONE",
    "float16": "FLOAT16",
    "bfloat16": "BFLOAT16",
    "int8": "INT8",
    "onebit": "ONE_BIT",
}
_USUAL = {"topk": 0.01, "random": 0.01, "powersgd": 4.0}
"""Methods with a number, and the one they have unless told otherwise."""

_METHODS = (*_CONSTANTS, *_USUAL)
_WRITTEN = (*_CONSTANTS, "topk:RATIO", "random:PROBABILITY", "powersgd:RANK")
_QUANTIZED = {kind.value: kind for kind in QuantizationType}
_ALIASES = {
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "1bit": "onebit",
    "randomk": "random",
}


def _unknown(text: str, name: str | None = None) -> ValueError:
    near = difflib.get_close_matches(name or text, (*_METHODS, *_ALIASES), 1)
    meant = f" Did you mean {_ALIASES.get(near[0], near[0])!r}?" if near else ""
    return ValueError(f"Unknown compression {text!r}.{meant} Use one of {', '.join(_WRITTEN)}")


def _check_part(ratio: float) -> None:
    if not (isfinite(ratio) and 0 < ratio <= 1):
        msg = f"the ratio must be greater than 0 and at most 1, got {ratio!r}"
        raise ValueError(msg)


def _check_rank(rank: float) -> None:
    if not (1 <= rank <= LARGEST_RANK and rank == int(rank)):
        msg = f"the rank must be an integer from 1 to {LARGEST_RANK}, got {rank:g}"
        raise ValueError(msg)


CompressionStrategy.AUTO = CompressionStrategy("auto")
CompressionStrategy.AUTO_AGGRESSIVE = CompressionStrategy("auto:aggressive")
CompressionStrategy.NONE = CompressionStrategy("none")
CompressionStrategy.FLOAT16 = CompressionStrategy("float16")
CompressionStrategy.BFLOAT16 = CompressionStrategy("bfloat16")
CompressionStrategy.INT8 = CompressionStrategy("int8")
CompressionStrategy.ONE_BIT = CompressionStrategy("onebit")
