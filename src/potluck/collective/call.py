"""A call: one collective on one rank, as the executor sees it."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from potluck._future import Future, Result
from potluck.arrays.adapters import allocate, as_buffer
from potluck.arrays.base import Access, BufferView, Dtype
from potluck.arrays.base import Array as BaseArray
from potluck.errors import Timeout
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import Collective, Strategy, Task

if TYPE_CHECKING:
    from potluck.compression.strategy import QuantizationType
    from potluck.schedule.reduce import Array


Routine: TypeAlias = "Callable[[Callable[[Call], None]], None]"
"""Does several calls one after the other, by the function that it is given."""


class Purpose(IntEnum):
    """What a collective is part of, so that it is not mistaken for one that looks the same."""

    OWN = 0
    """Part of nothing else: the user called it directly."""
    MEASURE_LINKS = 1
    AGREE_ON_LINKS = 2
    BROADCAST_OBJECT = 3
    ALL_GATHER_OBJECT = 4
    GATHER_OBJECT = 5
    SCATTER_OBJECT = 6
    ALL_GATHER_COUNTS = 7
    GATHER_COUNTS = 8
    ALL_TO_ALL_COUNTS = 9
    AUTO_COMPRESSION = 10
    TOP_K = 11
    RANDOM_K = 12
    POWER_SGD = 13
    ALL_REDUCE_TREE = 14
    BROADCAST_TREE = 15
    RECORDS = 16
    """What each member of a training brings to a step."""


@dataclass(slots=True, eq=False)  # frozen, it would take five times as long to make
class Call:
    """What to do, and the memory to do it on.  Treat it as immutable.

    ``source`` has the elements of ``task.input(rank)`` and is only read; ``target`` those of
    ``task.output(rank)``.  Both are one-dimensional, contiguous and of one type.  Where the task
    may work in place they may be the same memory, each cell at the same coordinate.
    """

    task: Task
    source: Array
    target: Array
    reducer: Reducer | None = None
    """None unless the collective reduces."""
    strategy: Strategy | None = None
    """None leaves the choice to the configuration, and then to the planner."""
    codec: QuantizationType | None = None
    """The number format in which values travel; only for a sum or mean of float32 by all."""
    residual: Array | None = None
    """Where to write what the format leaves out, if it is wanted."""
    routine: Routine | None = None
    """What is done instead, in one turn; this call then only says what comes of it."""
    purpose: Purpose = Purpose.OWN


# --------------------------------------------------------------------------------------------------
# Requests: what a user's call means in the numbers and the memory of a collective.
#
# Arrays are divided along their first dimension, in *rows*; a single number is one row.  All checks
# that a rank can make alone are made here, before anything moves.

Op: TypeAlias = ReduceOp | str
StrategyName: TypeAlias = Strategy | str | None
Kind = TypeVar("Kind", bound=Strategy)


class Request(NamedTuple, Generic[Result]):
    """A call, and what remains to be done after it has succeeded."""

    call: Call
    finish: Callable[[], Result]

    @property
    def nbytes(self) -> int:
        """How many bytes the larger of input and output has on this rank."""
        return max(self.call.source.nbytes, self.call.target.nbytes)


class CallSite(NamedTuple):
    """Where a call is made: which rank of how many."""

    rank: int
    world_size: int

    def whole(self, collective: Collective, count: int, root: int = 0) -> Task:
        """A task on a vector that all ranks have."""
        return _whole(collective, self.world_size, count, root)

    def blocks(self, collective: Collective, rows: Sequence[int], row: int, root: int = 0) -> Task:
        """A task on one block per rank: ``rows`` of ``row`` elements each."""
        if len(rows) != self.world_size:
            msg = f"counts must have one entry for each of {self.world_size} ranks, got {len(rows)}"
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


def reducer_for(op: Op, buffer: BufferView, *, truncate: bool = False) -> Reducer:
    """How the elements of this array become one; raises where that makes no sense.

    With ``truncate`` integers have a mean, rounded towards zero.
    """
    if buffer.is_raw:
        msg = "Raw bytes have no element type: pass dtype=, such as dtype='float32'"
        raise TypeError(msg)
    if type(op).__hash__ is None:  # a list, for instance
        read_op(op)
    return _reducer(op, buffer.flat.dtype, truncate=truncate)


# -- rows ------------------------------------------------------------------------------------------


def rows_of(buffer: BufferView) -> tuple[int, int]:
    """How many rows an array has, and how many elements a row has."""
    return (buffer.shape[0], prod(buffer.shape[1:])) if buffer.shape else (1, 1)


def rows_for(rows: int, world_size: int) -> list[int]:
    """Divide rows among the ranks into parts that differ by at most one, larger ones first.

    >>> rows_for(7, 3), rows_for(1, 2)
    ([3, 2, 2], [1, 0])
    """
    size, rest = divmod(rows, world_size)
    return [size + (rank < rest) for rank in range(world_size)]


def shape_with(rows: int, buffer: BufferView) -> tuple[int, ...]:
    """The shape of an array with other rows than this one."""
    return (rows, *buffer.shape[1:])


# -- memory ----------------------------------------------------------------------------------------


def nothing(dtype: Dtype) -> BaseArray:
    """No elements: for the side of a call that a rank does not have."""
    return np.empty(0, dtype)


def output(
    out: Any, like: Any, shape: Sequence[int], reads: BufferView, dtype: Any = None
) -> BufferView:
    """Where a result goes: into ``out``, or into a new array of the kind of ``like``."""
    if out is None:
        return allocate(like, shape, dtype)
    buffer = as_buffer(out, Access.WRITE, dtype)
    check_size("out", buffer, prod(shape))
    check_type("out", buffer, reads.flat.dtype)
    return buffer


def check_size(name: str, buffer: BufferView, count: int) -> None:
    """Refuse an array that has another number of elements than it must."""
    if buffer.flat.size != count:
        msg = f"Wrong number of elements in {name}: expected {count}, got {buffer.flat.size}"
        raise ValueError(msg)


def check_type(name: str, buffer: BufferView, dtype: Dtype) -> None:
    """Refuse an array of another type."""
    if buffer.flat.dtype != dtype:
        msg = f"{name} must have the type of the array, {dtype}, but has {buffer.flat.dtype}"
        raise TypeError(msg)


def request(
    place: CallSite,
    task: Task,
    memory: tuple[BaseArray, BaseArray],
    finish: Callable[[], Result],
    *,
    reducer: Reducer | None = None,
    strategy: Strategy | None = None,
) -> Request[Result]:
    """Put a call together; input and output may overlap in any way."""
    source, target = memory
    is_in_place = source is target and task.in_place
    if not is_in_place and not _fit_together(task, place.rank, source, target):
        source = source.copy()
    return Request(Call(task, source, target, reducer, strategy), finish)


def part_of(
    purpose: Purpose, task: Task, source: BaseArray | None, target: BaseArray | None
) -> Request[None]:
    """A collective that is part of what the user called; None where this rank has nothing."""
    some = source if source is not None else target
    none = nothing(np.dtype(np.uint8) if some is None else some.dtype)
    memory = none if source is None else source, none if target is None else target
    return Request(Call(task, *memory, purpose=purpose), _no_result)


def _no_result() -> None:
    return None


def _fit_together(task: Task, rank: int, source: BaseArray, target: BaseArray) -> bool:
    """Whether no cell is shared, or each only with the one of the same coordinate."""
    if not np.may_share_memory(source, target):  # exact for contiguous vectors
        return True
    here = source.ctypes.data - task.input(rank).start * source.itemsize
    there = target.ctypes.data - task.output(rank).start * target.itemsize
    return task.in_place and here == there


# --------------------------------------------------------------------------------------------------
# Jobs: calls of a group that wait for their turn.

Turn: TypeAlias = tuple[int, float, float | None]
"""The number of a call, when it was made, and when it must be done."""


@dataclass(slots=True)
class QueuedCall:
    """A call, its place among those of its group, and who waits for it."""

    number: int
    """Counted from the group's beginning, on all ranks alike."""
    call: Call | None
    """None once the caller has it back."""
    limit: float | None
    """Seconds; None for as long as it takes."""
    finish: Callable[[], Any] | None
    work: Work[Any]
    asked: float | None = None
    """When it was called, if the limit counts from there: unless, from when its turn comes."""
    error: BaseException | None = None
    """Why its caller stopped waiting for it."""

    def begin(self) -> Turn:
        """Its turn, now."""
        asked = time.monotonic() if self.asked is None else self.asked
        return self.number, asked, None if self.limit is None else asked + self.limit

    def withdraw(self, error: BaseException) -> None:
        """Its caller has given up and takes its memory back; it fails when its turn comes."""
        self.error, self.call, self.finish = error, None, None


# --------------------------------------------------------------------------------------------------
# Work: a collective that was started and will be done.


class Work(Future[Result]):
    """Something in progress.  Until it is done, its arrays belong to it.

    Wait for it, ask whether it is done, or await it from a coroutine; any number of threads may.

    >>> from potluck import DistributedContext, SimulatedBackend
    >>> with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
    ...     work = context.all_reduce(2.5, async_op=True)
    ...     work.wait(), work.done
    (2.5, True)
    """

    def __init__(
        self,
        describe: Callable[[], str] = lambda: "The operation",
        help_with: Callable[[Work[Any]], None] | None = None,
    ) -> None:
        super().__init__()
        self._describe = describe
        self._help = help_with
        self.make_late: Callable[[float], Timeout | None] | None = None
        """May say more than that it was not done in time."""

    def describe(self) -> str:
        """What it is, as the subject of a sentence."""
        return self._describe()

    def drive(self, limit: float | None) -> bool:
        """Do it, if this is the thread that has to; else sleep."""
        if self._help is not None:
            self._help(self)  # this may be the very thread that has to do it
        return super().drive(limit)

    def timeout_error(self, seconds: float) -> Timeout:
        """The error of a wait that took too long."""
        error = None if self.make_late is None else self.make_late(seconds)
        return error or super().timeout_error(seconds)

    def succeed(self, result: Result) -> None:
        """End with a result, unless it has ended."""
        self.finish_first(None, result)

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it has ended."""
        self.finish_first(error, None)
