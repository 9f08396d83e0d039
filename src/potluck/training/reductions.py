"""PyTorch's reductions as ours."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from potluck.collective.reduce import ReduceOp
from potluck.errors import UnsupportedOperation

__all__ = ["Reduction", "read_reduction"]

_KINDS: Any = dist.ReduceOp.RedOpType
_SAME = {
    _KINDS.SUM: ReduceOp.SUM,
    _KINDS.AVG: ReduceOp.MEAN,
    _KINDS.PRODUCT: ReduceOp.PRODUCT,
    _KINDS.MIN: ReduceOp.MIN,
    _KINDS.MAX: ReduceOp.MAX,
    _KINDS.BAND: ReduceOp.BIT_AND,
    _KINDS.BOR: ReduceOp.BIT_OR,
    _KINDS.BXOR: ReduceOp.BIT_XOR,
    _KINDS.PREMUL_SUM: ReduceOp.SUM,
}


class Reduction(NamedTuple):
    """How values of the ranks become one."""

    op: ReduceOp
    factor: float | torch.Tensor | None = None
    """What every rank multiplies its values by first."""


def read_reduction(op: Any) -> Reduction:
    """What one of PyTorch's reductions means.

    >>> read_reduction(dist.ReduceOp.AVG).op
    <ReduceOp.MEAN: 'mean'>
    """
    kind, factor = op, None
    if isinstance(op, dist.ReduceOp) and not isinstance(op, _KINDS):  # which passes for one too
        kind, factor = cast("Any", op).__getstate__()
    ours = _SAME.get(kind)
    if ours is None:
        raise UnsupportedOperation(f"{op!r} is no reduction that this backend knows")
    return Reduction(ours, factor)
