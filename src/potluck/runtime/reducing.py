"""Collectives in which values become one: all-reduce, reduce, reduce-scatter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, overload

from potluck.arrays.base import Access
from potluck.arrays.lending import lend
from potluck.arrays.trees import is_tree
from potluck.collective.strategies import AllReduceStrategy, ReduceStrategy
from potluck.collective.task import Collective
from potluck.runtime import requests
from potluck.runtime.compressing import Compressing, Compression, read_compression
from potluck.runtime.requests import Op, Request, StrategyName
from potluck.runtime.tree_calls import Tree
from potluck.runtime.tree_requests import reduction_request
from potluck.runtime.work import Work
from potluck.vocabulary import Seconds

__all__ = ["Reducing"]

A = TypeVar("A")


class Reducing(Compressing):
    """What a group can reduce.  ``op`` is a name such as ``"sum"``, or a :class:`ReduceOp`."""

    @overload
    def all_reduce(
        self,
        array: A,
        op: Op = ...,
        *,
        out: A | None = ...,
        dtype: Any = ...,
        strategy: StrategyName = ...,
        compression: Compression = ...,
        timeout: Seconds | None = ...,
        async_op: Literal[False] = ...,
    ) -> A: ...

    @overload
    def all_reduce(
        self,
        array: A,
        op: Op = ...,
        *,
        out: A | None = ...,
        dtype: Any = ...,
        strategy: StrategyName = ...,
        compression: Compression = ...,
        async_op: Literal[True],
    ) -> Work[A]: ...

    def all_reduce(
        self,
        array: A,
        op: Op = "sum",
        *,
        out: A | None = None,
        dtype: Any = None,
        strategy: StrategyName = None,
        compression: Compression = None,
        timeout: Seconds | None = None,
        async_op: bool = False,
    ) -> A | Work[A]:
        """Give every rank the reduction of all ranks' arrays, in place or in ``out``.

        All ranks get the same bits.  Returns the array with the result: the same object, or a new
        one where that kind cannot be changed (numbers, arrays of JAX).  With ``compression`` values
        travel in fewer bytes: a name such as ``"int8"`` or ``"auto"``, or a
        :class:`GradientCompressor`, which remembers what was left behind.

        Also of a tree: a dict, a list or a tuple of arrays and numbers, nested as you like.
        """
        chosen = requests.read_strategy(AllReduceStrategy, strategy)
        if is_tree(array):
            if out is not None:
                msg = "out= is for a single array: the arrays of a tree are changed in place"
                raise TypeError(msg)
            compressor = None if compression is None else read_compression(compression)
            whole: Request[A] = reduction_request(
                self.group,
                self._place,
                self.peer_name,
                Tree(array, Access.UPDATE, dtype),
                op,
                strategy=chosen,
                tensor=compressor,
            )
            return self._launch(whole, timeout, async_op=async_op)
        reads = lend(array, Access.UPDATE if out is None else Access.READ, dtype)
        reducer = requests.reducer_for(op, reads)
        into = reads if out is None else requests.output(out, array, reads.shape, reads, dtype)
        if compression is not None:
            return self._reduce_compressed(  # type: ignore[no-any-return] # the user's own kind
                (reads, into),
                reducer,
                read_compression(compression),
                strategy=chosen,
                timeout=timeout,
                async_op=async_op,
            )
        task = self._place.whole(Collective.ALL_REDUCE, reads.flat.size)
        memory = reads.flat, into.flat
        made: Request[A] = requests.request(
            self._place, task, memory, into.give_back, reducer=reducer, strategy=chosen
        )
        return self._launch(made, timeout, async_op=async_op)

    @overload
    def reduce(
        self,
        array: A,
        root: int = ...,
        op: Op = ...,
        *,
        out: A | None = ...,
        dtype: Any = ...,
        strategy: StrategyName = ...,
        timeout: Seconds | None = ...,
        async_op: Literal[False] = ...,
    ) -> A | None: ...

    @overload
    def reduce(
        self,
        array: A,
        root: int = ...,
        op: Op = ...,
        *,
        out: A | None = ...,
        dtype: Any = ...,
        strategy: StrategyName = ...,
        async_op: Literal[True],
    ) -> Work[A | None]: ...

    def reduce(
        self,
        array: A,
        root: int = 0,
        op: Op = "sum",
        *,
        out: A | None = None,
        dtype: Any = None,
        strategy: StrategyName = None,
        timeout: Seconds | None = None,
        async_op: bool = False,
    ) -> A | Work[A | None] | None:
        """Give one rank the reduction of all ranks' arrays, in place or in its ``out``.

        Returns the array there, and None on the other ranks, whose arrays stay as they are.
        """
        chosen = requests.read_strategy(ReduceStrategy, strategy)
        is_root = self._check_rank_of(root) == self.rank
        reads = lend(array, Access.UPDATE if is_root and out is None else Access.READ, dtype)
        reducer = requests.reducer_for(op, reads)
        task = self._place.whole(Collective.REDUCE, reads.flat.size, root)
        into = reads
        if is_root and out is not None:
            into = requests.output(out, array, reads.shape, reads, dtype)
        made: Request[A | None] = requests.request(
            self._place,
            task,
            (reads.flat, into.flat if is_root else requests.nothing(reads.flat.dtype)),
            into.give_back if is_root else _none,
            reducer=reducer,
            strategy=chosen,
        )
        return self._launch(made, timeout, async_op=async_op)

    @overload
    def reduce_scatter(
        self,
        array: A,
        op: Op = ...,
        *,
        counts: Sequence[int] | None = ...,
        out: A | None = ...,
        dtype: Any = ...,
        timeout: Seconds | None = ...,
        async_op: Literal[False] = ...,
    ) -> A: ...

    @overload
    def reduce_scatter(
        self,
        array: A,
        op: Op = ...,
        *,
        counts: Sequence[int] | None = ...,
        out: A | None = ...,
        dtype: Any = ...,
        async_op: Literal[True],
    ) -> Work[A]: ...

    def reduce_scatter(
        self,
        array: A,
        op: Op = "sum",
        *,
        counts: Sequence[int] | None = None,
        out: A | None = None,
        dtype: Any = None,
        timeout: Seconds | None = None,
        async_op: bool = False,
    ) -> A | Work[A]:
        """Reduce all ranks' arrays and give each rank its own rows of the result.

        ``counts`` says how many rows each rank gets; unless given, as many as the others, the first
        ones one more where that does not come out even.
        """
        reads = lend(array, Access.READ, dtype)
        reducer = requests.reducer_for(op, reads)
        rows, row = requests.rows_of(reads)
        shares = requests.rows_for(rows, self.world_size) if counts is None else counts
        task = self._place.blocks(Collective.REDUCE_SCATTER, shares, row)
        requests.check_size("array", reads, task.total)
        shape = requests.shape_with(shares[self.rank], reads)
        into = requests.output(out, array, shape, reads, dtype)
        made: Request[A] = requests.request(
            self._place, task, (reads.flat, into.flat), into.give_back, reducer=reducer
        )
        return self._launch(made, timeout, async_op=async_op)


def _none() -> None:
    return None
