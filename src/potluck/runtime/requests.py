"""Requests: what a user's call means in the numbers and the memory of a collective.

Arrays are divided along their first dimension, in *rows*; a single number is one row.  All checks
that a rank can make alone are made here, before anything moves.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from potluck.arrays.base import Access, Array, Dtype, Lease
from potluck.arrays.lending import allocate, lend
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.strategies import Strategy
from potluck.collective.task import Collective, Task
from potluck.runtime.call import Call, Purpose

__all__ = ["Op", "Place", "Request", "StrategyName", "read_op", "read_strategy", "rows_for"]

Op: TypeAlias = ReduceOp | str
StrategyName: TypeAlias = Strategy | str | None
Result = TypeVar("Result")
Kind = TypeVar("Kind", bound=Strategy)


class Request(NamedTuple, Generic[Result]):
    """A call, and what remains to be done after it has succeeded."""

    call: Call
    finish: Callable[[], Result]

    @property
    def nbytes(self) -> int:
        """How many bytes the larger of input and output has on this rank."""
        return max(self.call.source.nbytes, self.call.target.nbytes)


class Place(NamedTuple):
    """Where a call is made: which rank of how many."""

    rank: int
    world_size: int

    def whole(self, collective: Collective, count: int, root: int = 0) -> Task:
        """A task on a vector that all ranks have."""
        return _whole(collective, self.world_size, count, root)

    def blocks(self, collective: Collective, rows: Sequence[int], row: int, root: int = 0) -> Task:
        """A task on blocks of so many rows of so many elements."""
        if len(rows) != self.world_size:
            msg = f"{self.world_size} ranks need as many counts, not {len(rows)}"
            raise ValueError(msg)
        return Task.blocks(collective, [operator.index(each) * row for each in rows], root)


@lru_cache(maxsize=1024)
def _whole(collective: Collective, world_size: int, count: int, root: int) -> Task:
    return Task.whole(collective, world_size, count, root)


# -- what users write ------------------------------------------------------------------------------


def read_op(op: Op) -> ReduceOp:
    """A reduction by its name, or as PyTorch calls it.

    >>> read_op("avg"), read_op(ReduceOp.MAX)
    (<ReduceOp.MEAN: 'mean'>, <ReduceOp.MAX: 'max'>)
    """
    return ReduceOp.named(op)


def read_strategy(kind: type[Kind], strategy: StrategyName) -> Strategy | None:
    """A strategy by its name, or the one given."""
    if strategy is None or isinstance(strategy, Strategy):
        return strategy
    if not isinstance(strategy, str):
        msg = f"strategy= takes a name such as 'ring' or one of {kind.__name__}, not {strategy!r}"
        raise TypeError(msg)
    return kind.named(strategy)


@lru_cache(maxsize=256)
def _reducer(op: Op, dtype: Dtype, *, truncate: bool) -> Reducer:
    return Reducer.of(read_op(op), dtype, truncate=truncate)


def reducer_for(op: Op, lease: Lease, *, truncate: bool = False) -> Reducer:
    """How the elements of this array become one; raises where that makes no sense.

    With ``truncate`` integers have a mean, rounded towards zero.
    """
    if lease.is_raw:
        msg = "Raw bytes do not say which numbers they are: pass dtype=, such as dtype='float32'"
        raise TypeError(msg)
    if type(op).__hash__ is None:  # a list, for instance
        read_op(op)
    return _reducer(op, lease.flat.dtype, truncate=truncate)


# -- rows ------------------------------------------------------------------------------------------


def rows_of(lease: Lease) -> tuple[int, int]:
    """How many rows an array has, and how many elements a row has."""
    return (lease.shape[0], prod(lease.shape[1:])) if lease.shape else (1, 1)


def rows_for(rows: int, world_size: int) -> list[int]:
    """Cut so many rows into parts that differ by at most one, larger ones first.

    >>> rows_for(7, 3), rows_for(1, 2)
    ([3, 2, 2], [1, 0])
    """
    size, rest = divmod(rows, world_size)
    return [size + (rank < rest) for rank in range(world_size)]


def shape_with(rows: int, lease: Lease) -> tuple[int, ...]:
    """The shape of an array with other rows than this one."""
    return (rows, *lease.shape[1:])


# -- memory ----------------------------------------------------------------------------------------


def nothing(dtype: Dtype) -> Array:
    """No elements: for the side of a call that a rank does not have."""
    return np.empty(0, dtype)


def output(out: Any, like: Any, shape: Sequence[int], reads: Lease, dtype: Any = None) -> Lease:
    """Where a result goes: into ``out``, or into a new array of the kind of ``like``."""
    if out is None:
        return allocate(like, shape, dtype)
    lease = lend(out, Access.WRITE, dtype)
    check_size("out", lease, prod(shape))
    check_type("out", lease, reads.flat.dtype)
    return lease


def check_size(name: str, lease: Lease, count: int) -> None:
    """Refuse an array that has another number of elements than it must."""
    if lease.flat.size != count:
        msg = f"{name} has {lease.flat.size} elements, but {count} belong there"
        raise ValueError(msg)


def check_type(name: str, lease: Lease, dtype: Dtype) -> None:
    """Refuse an array of another type."""
    if lease.flat.dtype != dtype:
        msg = f"{name} holds {lease.flat.dtype}, but the array {dtype}: both must be of one type"
        raise TypeError(msg)


def request(
    place: Place,
    task: Task,
    memory: tuple[Array, Array],
    finish: Callable[[], Result],
    *,
    reducer: Reducer | None = None,
    strategy: Strategy | None = None,
) -> Request[Result]:
    """Put a call together; input and output may overlap in any way."""
    source, target = memory
    if not _fit_together(task, place.rank, source, target):
        source = source.copy()
    return Request(Call(task, source, target, reducer, strategy), finish)


def part_of(
    purpose: Purpose, task: Task, source: Array | None, target: Array | None
) -> Request[None]:
    """A collective that is part of what the user called; None where this rank has nothing."""
    some = source if source is not None else target
    none = nothing(np.dtype(np.uint8) if some is None else some.dtype)
    memory = none if source is None else source, none if target is None else target
    return Request(Call(task, *memory, purpose=purpose), _no_result)


def _no_result() -> None:
    return None


def _fit_together(task: Task, rank: int, source: Array, target: Array) -> bool:
    """Whether no cell is shared, or each only with the one of the same coordinate."""
    if source is target and task.in_place:
        return True
    if not np.may_share_memory(source, target):  # exact for contiguous vectors
        return True
    here = source.ctypes.data - task.input(rank).start * source.itemsize
    there = target.ctypes.data - task.output(rank).start * target.itemsize
    return task.in_place and here == there
