"""Collectives in which values only move: broadcast, gather, scatter, all-gather, all-to-all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar, overload

import numpy as np

from potluck.arrays.base import Access, Lease
from potluck.arrays.lending import lend
from potluck.arrays.trees import is_tree
from potluck.collective.strategies import BroadcastStrategy
from potluck.collective.task import Collective, Task
from potluck.runtime import requests
from potluck.runtime.call import Purpose
from potluck.runtime.launching import Launching
from potluck.runtime.limits import Countdown
from potluck.runtime.requests import Request, StrategyName
from potluck.runtime.tree_requests import broadcast_request
from potluck.runtime.work import Work
from potluck.vocabulary import Seconds

__all__ = ["Moving"]

A = TypeVar("A")


class Moving(Launching):
    """What a group can move.  Rows are cells of the first dimension; ``counts`` are in rows."""

    @overload
    def broadcast(
        self,
        array: A,
        root: int = ...,
        *,
        strategy: StrategyName = ...,
        timeout: Seconds | None = ...,
        async_op: Literal[False] = ...,
    ) -> A: ...

    @overload
    def broadcast(
        self, array: A, root: int = ..., *, strategy: StrategyName = ..., async_op: Literal[True]
    ) -> Work[A]: ...

    def broadcast(
        self,
        array: A,
        root: int = 0,
        *,
        strategy: StrategyName = None,
        timeout: Seconds | None = None,
        async_op: bool = False,
    ) -> A | Work[A]:
        """Give every rank the array of one, in place; or all arrays of a dict, a list or a tuple.

        Returns the array: the same object, or a new one where that kind cannot be changed.
        """
        chosen = requests.read_strategy(BroadcastStrategy, strategy)
        is_root = self._check_rank_of(root) == self.rank
        if is_tree(array):
            whole: Request[A] = broadcast_request(self._place, self.peer_name, array, root, chosen)
            return self._launch(whole, timeout, async_op=async_op)
        lease = lend(array, Access.READ if is_root else Access.UPDATE)
        task = self._place.whole(Collective.BROADCAST, lease.flat.size, root)
        source = lease.flat if is_root else requests.nothing(lease.flat.dtype)
        made: Request[A] = requests.request(
            self._place, task, (source, lease.flat), lease.give_back, strategy=chosen
        )
        return self._launch(made, timeout, async_op=async_op)

    @overload
    def all_gather(
        self,
        array: A,
        *,
        counts: Sequence[int] | Literal["ask"] | None = ...,
        out: A | None = ...,
        timeout: Seconds | None = ...,
        async_op: Literal[False] = ...,
    ) -> A: ...

    @overload
    def all_gather(
        self,
        array: A,
        *,
        counts: Sequence[int] | Literal["ask"] | None = ...,
        out: A | None = ...,
        async_op: Literal[True],
    ) -> Work[A]: ...

    def all_gather(
        self,
        array: A,
        *,
        counts: Sequence[int] | Literal["ask"] | None = None,
        out: A | None = None,
        timeout: Seconds | None = None,
        async_op: bool = False,
    ) -> A | Work[A]:
        """Give every rank all ranks' arrays, one after the other along the first dimension.

        ``counts`` says how many rows each rank has, if they differ; with ``"ask"`` the ranks tell
        each other first.
        """
        reads = lend(array, Access.READ)
        shares, timeout = self._shares(reads, counts, Purpose.ALL_GATHER_COUNTS, timeout)
        task = self._blocks(Collective.ALL_GATHER, reads, shares)
        shape = requests.shape_with(sum(shares), reads)
        into = requests.output(out, array, shape, reads)
        made: Request[A] = requests.request(
            self._place, task, (reads.flat, into.flat), into.give_back
        )
        return self._launch(made, timeout, async_op=async_op)

    @overload
    def gather(
        self,
        array: A,
        root: int = ...,
        *,
        counts: Sequence[int] | Literal["ask"] | None = ...,
        out: A | None = ...,
        timeout: Seconds | None = ...,
        async_op: Literal[False] = ...,
    ) -> A | None: ...

    @overload
    def gather(
        self,
        array: A,
        root: int = ...,
        *,
        counts: Sequence[int] | Literal["ask"] | None = ...,
        out: A | None = ...,
        async_op: Literal[True],
    ) -> Work[A | None]: ...

    def gather(
        self,
        array: A,
        root: int = 0,
        *,
        counts: Sequence[int] | Literal["ask"] | None = None,
        out: A | None = None,
        timeout: Seconds | None = None,
        async_op: bool = False,
    ) -> A | Work[A | None] | None:
        """Give one rank all ranks' arrays, one after the other; the others get None.

        ``counts`` is as for :meth:`all_gather`; ``out`` counts at the root only.
        """
        is_root = self._check_rank_of(root) == self.rank
        reads = lend(array, Access.READ)
        shares, timeout = self._shares(reads, counts, Purpose.GATHER_COUNTS, timeout)
        task = self._blocks(Collective.GATHER, reads, shares, root)
        into = None
        if is_root:
            shape = requests.shape_with(sum(shares), reads)
            into = requests.output(out, array, shape, reads)
        made: Request[A | None] = requests.request(
            self._place,
            task,
            (reads.flat, requests.nothing(reads.flat.dtype) if into is None else into.flat),
            _none if into is None else into.give_back,
        )
        return self._launch(made, timeout, async_op=async_op)

    @overload
    def scatter(
        self,
        array: A | None = ...,
        root: int = ...,
        *,
        counts: Sequence[int] | None = ...,
        out: A | None = ...,
        timeout: Seconds | None = ...,
        async_op: Literal[False] = ...,
    ) -> A: ...

    @overload
    def scatter(
        self,
        array: A | None = ...,
        root: int = ...,
        *,
        counts: Sequence[int] | None = ...,
        out: A | None = ...,
        async_op: Literal[True],
    ) -> Work[A]: ...

    def scatter(
        self,
        array: A | None = None,
        root: int = 0,
        *,
        counts: Sequence[int] | None = None,
        out: A | None = None,
        timeout: Seconds | None = None,
        async_op: bool = False,
    ) -> A | Work[A]:
        """Give each rank its rows of one rank's array.

        Only the root passes ``array``; the others pass ``out``, which says how much they expect.
        ``counts`` says how many rows each rank gets, if they differ, and is passed by all.
        """
        is_root = self._check_rank_of(root) == self.rank
        made: Request[A] = (
            self._scatter_from(array, root, counts, out)
            if is_root
            else self._scatter_into(out, root, counts)
        )
        return self._launch(made, timeout, async_op=async_op)

    def _scatter_from(
        self, array: A | None, root: int, counts: Sequence[int] | None, out: A | None
    ) -> Request[A]:
        if array is None:
            msg = f"Rank {root} is the root: it must pass the array that is to be scattered"
            raise TypeError(msg)
        reads = lend(array, Access.READ)
        rows, row = requests.rows_of(reads)
        shares = requests.rows_for(rows, self.world_size) if counts is None else counts
        if counts is None and rows % self.world_size:
            msg = f"{rows} rows are not the same for {self.world_size} ranks: pass counts= on all"
            raise ValueError(msg)
        task = self._place.blocks(Collective.SCATTER, shares, row, root)
        requests.check_size("array", reads, task.total)
        into = requests.output(out, array, requests.shape_with(shares[root], reads), reads)
        return requests.request(self._place, task, (reads.flat, into.flat), into.give_back)

    def _scatter_into(self, out: A | None, root: int, counts: Sequence[int] | None) -> Request[A]:
        if out is None:
            msg = f"Rank {self.rank} must pass out=, the array that takes what rank {root} sends"
            raise TypeError(msg)
        into = lend(out, Access.WRITE)
        rows, row = requests.rows_of(into)
        shares = [rows] * self.world_size if counts is None else counts
        task = self._place.blocks(Collective.SCATTER, shares, row, root)
        requests.check_size("out", into, task.counts[self.rank])
        memory = requests.nothing(into.flat.dtype), into.flat
        return requests.request(self._place, task, memory, into.give_back)

    def _shares(
        self,
        reads: Lease,
        counts: Sequence[int] | Literal["ask"] | None,
        purpose: Purpose,
        timeout: Seconds | None,
    ) -> tuple[Sequence[int], Seconds | None]:
        """How many rows each rank has, and how much time is left."""
        mine, _ = requests.rows_of(reads)
        if counts is None:
            return [mine] * self.world_size, timeout
        if not isinstance(counts, str):
            return counts, timeout
        if counts != "ask":
            msg = f"counts is 'ask', or a number of rows for each rank, not {counts!r}"
            raise ValueError(msg)
        countdown = Countdown(timeout)
        told = self._tell_all(np.array([mine], np.int64), purpose, timeout)
        return told.tolist(), countdown.left

    def _blocks(
        self, collective: Collective, reads: Lease, shares: Sequence[int], root: int = 0
    ) -> Task:
        task = self._place.blocks(collective, shares, requests.rows_of(reads)[1], root)
        requests.check_size("array", reads, task.counts[self.rank])
        return task


def _none() -> None:
    return None
