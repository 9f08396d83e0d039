"""Operations of the process group in which every rank has something for every other."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from potluck.arrays.base import Access
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.task import Collective, Task
from potluck.runtime import requests
from potluck.training.process_group_base import GroupBase, Terms, nothing, read_terms
from potluck.training.tensors import counts_of
from potluck.training.untraced import untraced_methods

__all__ = ["ExchangingGroup"]

_BARRIER = Reducer.of(ReduceOp.BIT_OR, np.uint8)


@untraced_methods
class ExchangingGroup(GroupBase):
    """All-to-all in all its forms, and barriers."""

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Give each rank its entry of every rank's list."""
        self._check_lengths("all_to_all", inputs)
        self._check_lengths("all_to_all", outputs)
        return self._exchange(list(outputs), list(inputs), counts_of(inputs), read_terms(opts))

    def alltoall_base(  # type: ignore[override] # one signature for all of PyTorch's
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Give each rank its rows of every rank's tensor; without sizes all get as many."""
        terms = read_terms(opts, timeout=timeout)
        if output_split_sizes or input_split_sizes:
            sends = self._split(source, input_split_sizes)
            self._split(output, output_split_sizes)
            return self._exchange([output], [source], sends, terms)
        sends = self._split(source, ())
        return self._exchange([output], [source], sends, terms, is_even=True)

    all_to_all_single = alltoall_base  # type: ignore[assignment] # as later versions call it

    def _split(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """How many elements each rank's part has."""
        world = self._place.world_size
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % world:
                msg = f"{rows} rows are not the same for {world} ranks: pass the sizes of the parts"
                raise ValueError(msg)
            return [tensor.numel() // world] * world
        self._check_lengths("all_to_all_single", sizes)
        if sum(sizes) != rows:
            msg = f"The parts have {sum(sizes)} rows, but the tensor has {rows}"
            raise ValueError(msg)
        row = tensor.numel() // rows if rows else 0
        return [int(size) * row for size in sizes]

    def _exchange(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        sends: list[int],
        terms: Terms,
        *,
        is_even: bool = False,
    ) -> dist.Work:
        reads, into = self._lend(inputs, Access.READ), self._lend(outputs, Access.WRITE)
        requests.check_type("The output", into, reads.flat.dtype)
        world = self._place.world_size
        if is_even:
            matrix = [sends] * world
        else:  # the ranks tell each other, which is waited for
            told = self._context.all_gather(np.array(sends, np.int64), timeout=terms.limit)
            matrix = told.reshape(world, world).tolist()
        task = Task.exchange(matrix)
        requests.check_size("The output", into, sum(line[self._place.rank] for line in matrix))
        request = requests.request(self._place, task, (reads.flat, into.flat), into.give_back)
        return self._launch("all_to_all", request, outputs, terms, inputs)

    def barrier(  # type: ignore[override]
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Be done when every rank has called this."""
        cell = np.zeros(1, np.uint8)
        task = self._place.whole(Collective.BARRIER, 1)
        request = requests.request(self._place, task, (cell, cell), nothing, reducer=_BARRIER)
        return self._launch("barrier", request, [], read_terms(opts, timeout=timeout))

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002 - PyTorch's own signature
    ) -> None:
        """Wait for all ranks; those that do not come in time are named, on every rank that did."""
        del wait_all_ranks  # all of them are named, always
        limit = read_terms(None, timeout=timeout).limit
        self._context.backend.barrier(limit)
