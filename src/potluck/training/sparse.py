"""Sums of sparse tensors: the ranks exchange indices and values, and each adds them up."""

from __future__ import annotations

import torch

from potluck.collective.reduce import ReduceOp
from potluck.errors import UnsupportedOperation
from potluck.runtime.context import DistributedContext

__all__ = ["sum_sparse"]


def sum_sparse(context: DistributedContext, tensor: torch.Tensor, op: ReduceOp) -> None:
    """Replace a sparse tensor by the sum over all ranks, which is coalesced; in order of ranks."""
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedOperation(
            f"Tensors in the layout {tensor.layout} cannot be summed",
            hint="Use the sparse COO layout, or tensor.to_dense().",
        )
    if op is not ReduceOp.SUM:
        raise UnsupportedOperation(
            f"Sparse tensors can be summed, not reduced by {op.value}",
            hint="Use ReduceOp.SUM, or tensor.to_dense().",
        )
    mine = tensor.detach().coalesce()
    shape = torch.tensor([tensor.sparse_dim(), tensor.dense_dim(), *tensor.shape])
    lowest, highest = shape.clone(), shape.clone()
    context.all_reduce(lowest, "min")
    context.all_reduce(highest, "max")
    if not torch.equal(lowest, highest):
        msg = f"The ranks have sparse tensors of different shapes; this one is {mine.shape}"
        raise ValueError(msg)
    # One entry is one row: its indices are a column, its values may have dimensions of their own.
    indices = context.all_gather(mine.indices().t().contiguous(), counts="ask")
    values = context.all_gather(mine.values().contiguous(), counts="ask")
    total = torch.sparse_coo_tensor(indices.t(), values, mine.shape, check_invariants=True)
    with torch.no_grad():  # a detached sparse tensor would have indices and values of its own
        tensor.copy_(total.coalesce())
