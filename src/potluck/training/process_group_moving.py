"""Operations of the process group in which values only move."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from potluck.arrays.base import Access
from potluck.collective.task import Collective
from potluck.runtime import requests
from potluck.training.process_group_base import GroupBase, Terms, as_list, read_terms
from potluck.training.tensors import check_pairs, counts_of, even_counts, is_uniform
from potluck.training.untraced import untraced_methods

__all__ = ["MovingGroup"]

Tensors = list[torch.Tensor]


@untraced_methods
class MovingGroup(GroupBase):
    """Broadcast, all-gather, gather and scatter, in all their forms."""

    def broadcast(  # type: ignore[override] # one signature for all of PyTorch's
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give every rank the tensors of one, in place."""
        listed = as_list(tensors)
        if isinstance(opts, int):
            opts, root = None, opts
        terms = read_terms(opts, root=root, timeout=timeout)
        is_root = self._context._check_rank_of(terms.root) == self._place.rank  # noqa: SLF001
        lease = self._lend(listed, Access.READ if is_root else Access.WRITE)
        task = self._place.whole(Collective.BROADCAST, lease.flat.size, terms.root)
        source = lease.flat if is_root else requests.nothing(lease.flat.dtype)
        request = requests.request(self._place, task, (source, lease.flat), lease.give_back)
        return self._launch("broadcast", request, listed, terms)

    # -- all-gather --------------------------------------------------------------------------------

    def allgather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Give every rank all ranks' tensors, which may be of different sizes."""
        (source,) = as_list(inputs)
        into = _flattened(outputs)
        self._check_lengths("all_gather", into)
        return self._gather_all(into, [source], counts_of(into), read_terms(opts, timeout=timeout))

    def allgather_coalesced(
        self, output_lists: list[Tensors], input_list: Tensors, opts: Any = None
    ) -> dist.Work:
        """The same for several tensors at once: each rank has a list for all of them."""
        self._check_lengths("all_gather_coalesced", output_lists)
        into = [tensor for each in output_lists for tensor in each]
        counts = [sum(counts_of(each)) for each in output_lists]
        return self._gather_all(into, list(input_list), counts, read_terms(opts))

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """The same with all ranks' tensors one after the other in one."""
        counts, terms = self._shares(output, source), read_terms(opts)
        return self._gather_all([output], [source], counts, terms, name="all_gather_into_tensor")

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """The same for several tensors at once."""
        check_pairs(outputs, inputs)
        if not (is_uniform(inputs) and all(map(torch.Tensor.is_contiguous, outputs))):
            return self._one_by_one(self.all_gather_single, outputs, inputs, opts)
        size = self._place.world_size
        counts = [sum(each) for each in zip(*map(self._shares, outputs, inputs), strict=True)]
        # In the order of ranks first: what one rank brings lies side by side.
        parts = [tensor.detach().view(-1).tensor_split(size) for tensor in outputs]
        into = [part[rank] for rank in range(size) for part in parts]
        return self._gather_all(into, list(inputs), counts, read_terms(opts), results=outputs)

    # As earlier versions of PyTorch call them.
    _allgather_base = all_gather_single  # type: ignore[assignment]
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]

    def _shares(self, output: torch.Tensor, source: torch.Tensor) -> list[int]:
        return even_counts(("output", output), ("input", source), self._place.world_size)

    def _gather_all(
        self,
        outputs: Tensors,
        inputs: Tensors,
        counts: list[int],
        terms: Terms,
        *,
        results: Tensors | None = None,
        name: str = "all_gather",
    ) -> dist.Work:
        reads, into = self._lend(inputs, Access.READ), self._lend(outputs, Access.WRITE)
        requests.check_type("The output", into, reads.flat.dtype)
        task = self._place.blocks(Collective.ALL_GATHER, counts, 1)
        requests.check_size("The input", reads, counts[self._place.rank])
        requests.check_size("The output", into, sum(counts))
        request = requests.request(self._place, task, (reads.flat, into.flat), into.give_back)
        filled = outputs if results is None else results
        return self._launch(name, request, filled, terms, inputs)

    # -- one to all and back -----------------------------------------------------------------------

    def gather(  # type: ignore[override]
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give one rank all ranks' tensors."""
        if isinstance(opts, int):
            opts, root = None, opts
        terms = read_terms(opts, root=root, timeout=timeout)
        (source,) = as_list(inputs)
        reads = self._lend([source], Access.READ)
        if self._context._check_rank_of(terms.root) != self._place.rank:  # noqa: SLF001
            counts = [source.numel()] * self._place.world_size
            task = self._place.blocks(Collective.GATHER, counts, 1, terms.root)
            memory = reads.flat, requests.nothing(reads.flat.dtype)
            made = requests.request(self._place, task, memory, reads.give_back)
            return self._launch("gather", made, [], terms, [source])
        into_list = _flattened(outputs)
        self._check_lengths("gather", into_list)
        into = self._lend(into_list, Access.WRITE)
        requests.check_type("The output", into, reads.flat.dtype)
        task = self._place.blocks(Collective.GATHER, counts_of(into_list), 1, terms.root)
        made = requests.request(self._place, task, (reads.flat, into.flat), into.give_back)
        return self._launch("gather", made, into_list, terms, [source])

    def scatter(  # type: ignore[override]
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> dist.Work:
        """Give each rank its entry of one rank's list."""
        if isinstance(opts, int):
            opts, root = None, opts
        terms = read_terms(opts, root=root, timeout=timeout)
        (output,) = listed = as_list(outputs)
        into = self._lend([output], Access.WRITE)
        if self._context._check_rank_of(terms.root) != self._place.rank:  # noqa: SLF001
            counts = [output.numel()] * self._place.world_size
            parts, source = listed, requests.nothing(into.flat.dtype)
        else:
            parts = _flattened(inputs)
            self._check_lengths("scatter", parts)
            reads = self._lend(parts, Access.READ)
            requests.check_type("The output", into, reads.flat.dtype)
            counts, source = counts_of(parts), reads.flat
        task = self._place.blocks(Collective.SCATTER, counts, 1, terms.root)
        requests.check_size("The output", into, counts[self._place.rank])
        request = requests.request(self._place, task, (source, into.flat), into.give_back)
        return self._launch("scatter", request, listed, terms, parts)


def _flattened(lists: Any) -> Tensors:
    """PyTorch passes a list, or a list with one list in it."""
    if lists and not isinstance(lists[0], torch.Tensor):
        return list(lists[0])
    return list(lists)
