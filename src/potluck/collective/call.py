"""A call: one collective on one rank, as the executor sees it."""

from __future__ import annotations

import contextlib
import copy
import operator
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeVar, cast

import numpy as np

from potluck._time import read_timeout
from potluck._types import Seconds
from potluck.arrays.adapters import allocate, lend
from potluck.arrays.base import Access, Dtype, Lease
from potluck.arrays.base import Array as BaseArray
from potluck.errors import DistributedError, Timeout
from potluck.logs import get_logger
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import Collective, Strategy, Task

if TYPE_CHECKING:
    from potluck.compression.strategy import QuantizationType
    from potluck.schedule.reduce import Array


Routine: TypeAlias = "Callable[[Callable[[Call], None]], None]"
"""Does several calls one after the other, by the function that it is given."""


class Purpose(IntEnum):
    """What a collective is part of: nobody may take one for another that looks the same."""

    OWN = 0
    """Of nothing else: somebody called it by its name."""
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
    """What to do, and the memory to do it on.  Nobody changes one.

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
    """Where what that format leaves behind is written, if somebody wants it."""
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


def nothing(dtype: Dtype) -> BaseArray:
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
    memory: tuple[BaseArray, BaseArray],
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
    if source is target and task.in_place:
        return True
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
class Job:
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
    """Why nobody waits for it any more."""

    def begin(self) -> Turn:
        """Its turn, now."""
        asked = time.monotonic() if self.asked is None else self.asked
        return self.number, asked, None if self.limit is None else asked + self.limit

    def withdraw(self, error: BaseException) -> None:
        """Its caller has given up and takes its memory back; it fails when its turn comes."""
        self.error, self.call, self.finish = error, None, None


# --------------------------------------------------------------------------------------------------
# Work: a collective that was started and will be done.

logger = get_logger(__name__)


class Work(Generic[Result]):
    """Something under way.  Until it is done, its arrays belong to it.

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
        self._ended = threading.Event()
        self._describe = describe
        self._help = help_with
        self._result: Result | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self.make_late: Callable[[float], Timeout | None] | None = None
        """May say more than that it was not done in time."""

    def __str__(self) -> str:
        """What it is, as the subject of a sentence."""
        return self._describe()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: Seconds | None = None) -> Result:
        """Return the result when there is one, or raise what went wrong.

        After a :class:`~potluck.errors.Timeout` the work goes on and still owns its arrays: wait
        again.
        """
        limit = read_timeout(timeout)
        if self._help is not None:
            self._help(self)  # this may be the very thread that has to do it
        if not self._ended.wait(limit):
            raise self._late(limit or 0.0)
        return self.result()

    def _late(self, seconds: float) -> Timeout:
        error = None if self.make_late is None else self.make_late(seconds)
        text = f"{self._describe()} was not done within {seconds:g} s"
        return error or Timeout(text, seconds=seconds)

    def ends_within(self, deadline: float | None) -> bool:
        """Wait until it ends (True), well or not, or a moment has come (False)."""
        return self._ended.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))

    def result(self) -> Result:
        """The result, or what went wrong; raises :class:`Timeout` when it is not done yet."""
        if not self.done:
            raise Timeout(f"{self._describe()} is not done yet", seconds=0.0)
        if self._error is not None:
            raise _fresh(self._error)
        return cast("Result", self._result)

    def exception(self) -> BaseException | None:
        """What went wrong, or None; raises :class:`Timeout` when it is not done yet."""
        if not self.done:
            raise Timeout(f"{self._describe()} is not done yet", seconds=0.0)
        return self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` when it has ended, on the thread that ended it; now if it has."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def succeed(self, result: Result) -> None:
        """End well, unless it has ended."""
        self._end(result, None)

    def fail(self, error: BaseException) -> None:
        """End with what went wrong, unless it has ended."""
        self._end(None, error)

    def become_forked(self, error: BaseException) -> None:
        """In a forked child: nobody does it here; locks that others held are nobody's."""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._error, self._callbacks = error, []
        self._ended.set()

    def _end(self, result: Result | None, error: BaseException | None) -> None:
        with self._lock:
            if self._ended.is_set():
                return
            self._result, self._error = result, error
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                # It belongs to somebody else: whoever does the works goes on with the next one.
                logger.exception("A callback of %s failed", self._describe())

    def __await__(self) -> Generator[Any, None, Result]:
        """Wait without blocking the event loop."""
        # Whoever awaits runs an event loop, so it is there; this library brings none.
        loop = sys.modules["asyncio"].get_running_loop()
        future = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # nobody waits in a loop that is closed
                loop.call_soon_threadsafe(wake)

        self.add_done_callback(tell)
        yield from future.__await__()
        return self.result()


def _fresh(error: BaseException) -> BaseException:
    """A copy for each who asks: tracebacks would pile up on one."""
    return copy.copy(error) if isinstance(error, DistributedError) else error
