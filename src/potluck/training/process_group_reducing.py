"""Operations of the process group in which values become one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from potluck.arrays.base import Access, Lease
from potluck.collective.reduce import Reducer
from potluck.collective.task import Collective
from potluck.runtime import requests
from potluck.runtime.work import Work
from potluck.training.process_group_base import GroupBase, Terms, as_list, read_terms
from potluck.training.reductions import read_reduction
from potluck.training.sparse import sum_sparse
from potluck.training.tensors import (
    check_pairs,
    check_some,
    counts_of,
    even_counts,
    is_uniform,
)
from potluck.training.untraced import untraced_methods
from potluck.training.work import PotluckWork

__all__ = ["ReducingGroup"]


@untraced_methods
class ReducingGroup(GroupBase):
    """All-reduce, reduce and reduce-scatter, in all their forms."""

    def allreduce(  # type: ignore[override] # one signature for all of PyTorch's
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        """Give every rank the reduction of all ranks' tensors, in place."""
        listed = as_list(tensors)
        check_some(listed)
        if opts is not None and not hasattr(opts, "reduceOp"):
            opts, op = None, opts
        terms = read_terms(opts, op, timeout=timeout)
        if listed[0].layout is not torch.strided:
            return self._allreduce_sparse(listed, terms)
        lease, reducer = self._reduced(listed, terms.op, Access.UPDATE)
        task = self._place.whole(Collective.ALL_REDUCE, lease.flat.size)
        request = requests.request(
            self._place, task, (lease.flat, lease.flat), lease.give_back, reducer=reducer
        )
        return self._launch("all_reduce", request, listed, terms)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """The same for several tensors at once."""
        if any(tensor.layout is not torch.strided for tensor in tensors):
            msg = "Sparse tensors are summed one by one: use all_reduce"
            raise TypeError(msg)
        return self.allreduce(tensors, opts)

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """The same for sparse tensors."""
        return self.allreduce(tensors, opts)

    def _allreduce_sparse(self, tensors: list[torch.Tensor], terms: Terms) -> dist.Work:
        """Several collectives one after the other, so it has ended when this returns."""
        work: Work[None] = Work()
        for tensor in tensors:
            sum_sparse(self._context, tensor, read_reduction(terms.op).op)
        work.succeed(None)
        self._sequence += 1
        return self._joined(PotluckWork(work, tensors))

    def reduce(  # type: ignore[override]
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give one rank the reduction of all ranks' tensors, in place."""
        listed = as_list(tensors)
        if isinstance(opts, int):
            opts, root = None, opts
        terms = read_terms(opts, op, root, timeout)
        is_root = self._context._check_rank_of(terms.root) == self._place.rank  # noqa: SLF001
        access = Access.UPDATE if is_root else Access.READ
        lease, reducer = self._reduced(listed, terms.op, access)
        task = self._place.whole(Collective.REDUCE, lease.flat.size, terms.root)
        target = lease.flat if is_root else requests.nothing(lease.flat.dtype)
        request = requests.request(
            self._place, task, (lease.flat, target), lease.give_back, reducer=reducer
        )
        return self._launch("reduce", request, listed, terms)

    def reduce_scatter(  # type: ignore[override]
        self,
        output: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> dist.Work:
        """Reduce all ranks' lists, and give each rank its own entry."""
        into = as_list(output)
        listed = list(inputs) if isinstance(inputs[0], torch.Tensor) else list(inputs[0])
        if opts is not None and not hasattr(opts, "reduceOp"):
            opts, op = None, opts
        self._check_lengths("reduce_scatter", listed)
        terms = read_terms(opts, op, timeout=timeout)
        return self._scatter_reduced(into, listed, counts_of(listed), terms, "reduce_scatter")

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """The same with the entries one after the other in one tensor."""
        return self._scatter_reduced(
            [output], [source], self._even(output, source), read_terms(opts)
        )

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """The same for several tensors at once."""
        check_pairs(outputs, inputs)
        if not is_uniform(inputs):
            return self._one_by_one(self.reduce_scatter_single, outputs, inputs, opts)
        counts = [
            sum(each)
            for each in zip(*map(self._even, outputs, inputs), strict=True)  # one row per rank
        ]
        parts = [tensor.detach().reshape(len(counts), -1) for tensor in inputs]
        joined = torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]
        return self._scatter_reduced(outputs, [joined], counts, read_terms(opts))

    # As earlier versions of PyTorch call them.
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]

    def _even(self, output: torch.Tensor, source: torch.Tensor) -> list[int]:
        return even_counts(("input", source), ("output", output), self._place.world_size)

    def _scatter_reduced(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        counts: list[int],
        terms: Terms,
        name: str = "reduce_scatter_tensor",
    ) -> dist.Work:
        reads, reducer = self._reduced(inputs, terms.op, Access.READ)
        into = self._lend(outputs, Access.WRITE)
        requests.check_type("The output", into, reads.flat.dtype)
        task = self._place.blocks(Collective.REDUCE_SCATTER, counts, 1)
        requests.check_size("The output", into, counts[self._place.rank])
        request = requests.request(
            self._place, task, (reads.flat, into.flat), into.give_back, reducer=reducer
        )
        return self._launch(name, request, outputs, terms, reads=inputs)

    def _reduced(
        self, tensors: list[torch.Tensor], op: Any, access: Access
    ) -> tuple[Lease, Reducer]:
        """The tensors as one vector, ready to be reduced."""
        kind, factor = read_reduction(op)
        if factor is not None:
            scaled = [tensor.detach() * factor for tensor in tensors]
            if access.writes:
                for tensor, each in zip(tensors, scaled, strict=True):
                    tensor.detach().copy_(each)
            else:
                tensors = scaled
        lease = self._lend(tensors, access)
        # NCCL, whose words these are, truncates the mean of integers; programs count on it.
        return lease, requests.reducer_for(kind, lease, truncate=True)
