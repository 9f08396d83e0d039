"""Reductions: how two pieces become one, for each operation and type.

=========  ================================================================================
integers   sum and product wrap around as in C; min, max; bitwise; logical (gives 0 or 1)
bool       sum and max are "or", product and min are "and"; xor; no mean
floats     sum, mean, product, min, max; NaN wins in all of them
16 bit     float16 and bfloat16: sum, mean and product are accumulated in float32 and rounded once
complex    sum, mean, product; there is no order, hence no min and max
=========  ================================================================================

The mean of integers is refused unless the caller says how it is rounded (``truncate``): rounding
it silently would be a trap.  Whatever else makes no sense is refused as well, with the reason.

Operands are combined in the order given, so the same operands give the same bits.  (Two NaNs with
different payloads give a NaN whose payload is the processor's choice; it is the same on ranks of
one processor family.)
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np
import numpy.typing as npt

from potluck.errors import UnsupportedOperation

Array: TypeAlias = npt.NDArray[Any]
Dtype: TypeAlias = "np.dtype[Any]"

BFLOAT16: Dtype = np.dtype(ml_dtypes.bfloat16)


class ReduceOp(Enum):
    """How values of the ranks become one.

    >>> ReduceOp("mean") is ReduceOp.MEAN
    True
    """

    SUM = "sum"
    MEAN = "mean"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BIT_AND = "bit_and"
    BIT_OR = "bit_or"
    BIT_XOR = "bit_xor"
    AND = "and"
    """Logical: 1 where all are non-zero."""
    OR = "or"
    """Logical: 1 where any is non-zero."""

    @classmethod
    def named(cls, op: ReduceOp | str) -> ReduceOp:
        """A reduction by its name, by the name another library has for it, or the one given.

        >>> ReduceOp.named("avg"), ReduceOp.named(ReduceOp.MAX)
        (<ReduceOp.MEAN: 'mean'>, <ReduceOp.MAX: 'max'>)
        """
        if isinstance(op, cls):
            return op
        name = str(op).lower().rpartition(".")[2]  # torch.distributed has RedOpType.SUM
        try:
            return cls(_ALIASES.get(name, name))
        except ValueError:
            names = ", ".join(each.value for each in cls)
            msg = f"{op!r} is not a reduction: use one of {names}"
            raise ValueError(msg) from None


# As other libraries call them.
_ALIASES = {
    "add": "sum",
    "avg": "mean",
    "average": "mean",
    "prod": "product",
    "mul": "product",
    "band": "bit_and",
    "bor": "bit_or",
    "bxor": "bit_xor",
    "land": "and",
    "lor": "or",
}


_Op = ReduceOp
_UFUNCS: dict[ReduceOp, np.ufunc] = {
    _Op.SUM: np.add,
    _Op.MEAN: np.add,
    _Op.MIN: np.minimum,
    _Op.MAX: np.maximum,
    _Op.PRODUCT: np.multiply,
    _Op.BIT_AND: np.bitwise_and,
    _Op.BIT_OR: np.bitwise_or,
    _Op.BIT_XOR: np.bitwise_xor,
    _Op.AND: np.logical_and,
    _Op.OR: np.logical_or,
}
_ROUNDED = frozenset({_Op.SUM, _Op.MEAN, _Op.PRODUCT})
_BITS = frozenset({_Op.BIT_AND, _Op.BIT_OR, _Op.BIT_XOR, _Op.AND, _Op.OR})
_ORDERED = frozenset({_Op.SUM, _Op.PRODUCT, _Op.MIN, _Op.MAX})
_ALLOWED = {
    "integer": _ORDERED | _BITS,
    "bool": _ORDERED | _BITS,
    "float": _ORDERED | {_Op.MEAN},
    "complex": _ROUNDED,
}
_REASONS = {
    "integer": "A mean of integers would have to be rounded: use sum, or floats.",
    "bool": "A mean of truth values is none: use sum on integers, or floats.",
    "float": "Bits and truth belong to integers and bool.",
    "complex": "Complex numbers have no order, and bits belong to integers.",
}
_FAMILIES: dict[Dtype, str] = {
    **{np.dtype(name): "integer" for name in ("int8", "int16", "int32", "int64")},
    **{np.dtype(name): "integer" for name in ("uint8", "uint16", "uint32", "uint64")},
    np.dtype("bool"): "bool",
    np.dtype("float16"): "float",
    BFLOAT16: "float",
    np.dtype("float32"): "float",
    np.dtype("float64"): "float",
    np.dtype("complex64"): "complex",
    np.dtype("complex128"): "complex",
}
_WIDE = {np.dtype("float16"): np.dtype("float32"), BFLOAT16: np.dtype("float32")}

DTYPES = tuple(_FAMILIES)
"""The types that can be reduced, in the byte order of this machine."""


def quiet() -> AbstractContextManager[None]:
    """A context in which overflow and NaN pass without a warning; wrap an operation in it once."""
    return np.errstate(all="ignore")


@dataclass(frozen=True)
class Reducer:
    """One operation on one type; made once per collective, then used for every piece.

    All methods work within the arrays given to them: nothing larger than numpy's own small
    conversion buffer is allocated.

    >>> reducer = Reducer.of(ReduceOp.MEAN, np.dtype("float32"))
    >>> total, arrived = np.array([1, 2], "f4"), np.array([3, 5], "f4")
    >>> reducer.combine(total, arrived, total)
    >>> reducer.finish(total, total, world_size=2)
    >>> total.tolist()
    [2.0, 3.5]
    """

    op: ReduceOp
    dtype: Dtype
    wide: Dtype
    """The type of partial values; another than ``dtype`` only for 16-bit floats."""
    is_wide: bool = field(init=False, compare=False)
    """Whether partial values have another type than the array."""
    ufunc: np.ufunc = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Look up once what every piece needs."""
        object.__setattr__(self, "is_wide", self.wide != self.dtype)
        object.__setattr__(self, "ufunc", _UFUNCS[self.op])

    @classmethod
    def of(cls, op: ReduceOp, dtype: npt.DTypeLike, *, truncate: bool = False) -> Reducer:
        """The reducer for a type; raises ``UnsupportedOperation`` where it makes no sense.

        With ``truncate`` integers have a mean too: their sum, which wraps around, is divided and
        rounded towards zero.
        """
        dtype = np.dtype(dtype)
        family = _FAMILIES.get(dtype)
        if family is None:
            names = ", ".join(each.name for each in DTYPES)
            raise UnsupportedOperation(
                f"Arrays of type {dtype} cannot be reduced", hint=f"These can: {names}."
            )
        is_truncated = truncate and op is ReduceOp.MEAN and family == "integer"
        if op not in _ALLOWED[family] and not is_truncated:
            raise UnsupportedOperation(
                f"{op.value} is not defined for {dtype.name}", hint=_REASONS[family]
            )
        wide = _WIDE.get(dtype, dtype) if op in _ROUNDED else dtype
        return cls(op, dtype, wide)

    def combine(self, first: Array, second: Array, out: Array) -> None:
        """Two operands become one partial value; ``out``, of type ``wide``, may be either of them.

        An operand is of either type.
        """
        if self.is_wide:  # or else numpy would add two 16-bit numbers as such, and widen their sum
            self.ufunc(first, second, out=out, dtype=self.wide)
        else:
            self.ufunc(first, second, out=out)

    def fold(
        self, operands: Sequence[Array], out: Array, *, own_at: int = 0, spare: Array | None = None
    ) -> None:
        """All operands, from left to right, become one partial value in ``out``.

        ``out`` may be the memory of operand number ``own_at``, or share none with the operands.  In
        the former case what comes before that one is added up in ``spare``, or in the first operand
        if there is none.  (Partial values that are wider never share memory with an operand.)
        """
        total = operands[0]
        before = total if spare is None else spare
        if self.is_wide:
            own_at = 0
        if len(operands) == 1:
            np.copyto(out, total)
        for index, operand in enumerate(operands[1:], start=1):
            target = before if index < own_at else out
            self.combine(total, operand, target)
            total = target

    def finish(self, partial: Array, out: Array, *, world_size: int) -> None:
        """The last partial value becomes the result: divided if it is a mean, rounded if wide.

        ``out`` may be ``partial``, which may be used up otherwise.
        """
        if self.op is not ReduceOp.MEAN:
            if out is not partial:
                np.copyto(out, partial, casting="same_kind")
        elif self.is_wide:
            np.divide(partial, world_size, out=partial)
            np.copyto(out, partial, casting="same_kind")
        elif self.dtype.kind in "iu":
            _divide_truncated(partial, out, world_size)
        else:
            np.divide(partial, world_size, out=out)


_PIECE = 1 << 13
"""Integers that are divided at once: their quotients need room of their own."""


def _divide_truncated(partial: Array, out: Array, divisor: int) -> None:
    """Divide integers and round towards zero, as C does."""
    wide = np.uint64 if partial.dtype.kind == "u" else np.int64  # small types may not hold divisor
    by = wide(divisor)
    for start in range(0, partial.size, _PIECE):
        piece = partial[start : start + _PIECE].astype(wide, copy=False)
        whole = piece - np.fmod(piece, by)
        np.copyto(out[start : start + _PIECE], whole // by, casting="same_kind")
