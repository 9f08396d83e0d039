"""DistributedBackend: a backend that also has collectives."""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias, TypeVar, overload

import numpy as np

from potluck._time import Countdown, read_timeout
from potluck._types import Seconds
from potluck._values import decode, encode
from potluck.arrays.adapters import as_buffer
from potluck.arrays.base import Access, Array, BufferView
from potluck.arrays.trees import is_tree
from potluck.backend.base import Backend, check_whole
from potluck.collective import call as collective_call
from potluck.collective.call import CallSite, Op, Purpose, Request, StrategyName, Work, part_of
from potluck.collective.compressed import COMPRESSIBLE, AgreedMethods, CompressedReduction
from potluck.collective.group import Group, MessageNote
from potluck.collective.p2p import AS_THEY_ARE, MessageErrors, Transfer
from potluck.collective.trees import Tree, broadcast_request, reduction_request
from potluck.compression.choice import Choice
from potluck.compression.compressor import GradientCompressor, TensorCompressor
from potluck.compression.strategy import CompressionStrategy, QuantizationType
from potluck.errors import DistributedError, InvalidRank, MalformedFrame, UnsupportedOperation
from potluck.metrics.instruments import LONG
from potluck.metrics.registry import OPERATIONS, DistributedMetrics
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import (
    AllReduceStrategy,
    BroadcastStrategy,
    Collective,
    ReduceStrategy,
    Strategy,
    Task,
)
from potluck.trace.recorder import log_of

if TYPE_CHECKING:
    from types import TracebackType

    from potluck.collective.call import Call
    from potluck.metrics.instruments import OperationMetrics
    from potluck.trace.recorder import GroupLog


# --------------------------------------------------------------------------------------------------
# Counting collectives: what a call that has ended leaves in the metrics.

Result = TypeVar("Result")


def count(metrics: DistributedMetrics, call: Call, began: float) -> None:
    """A call ended well.  This is on the way of many: it takes no lock."""
    metrics.journal.append((call.task.collective, monotonic() - began, size_of(call)))
    if len(metrics.journal) > LONG:
        metrics.count_journal()


class _Counted(threading.local):
    """The error that this thread has counted last; forgotten when its next call begins."""

    error = 0


_counted = _Counted()


def count_failure(
    metrics: DistributedMetrics, call: Call, began: float, error: BaseException
) -> None:
    """A call failed."""
    metrics.count_journal()  # what went well before was no second try
    entry: OperationMetrics = getattr(metrics, call.task.collective.value)
    entry.note(monotonic() - began, size_of(call), type(error).__name__)
    metrics.tell(f"{call.task.collective.value} failed: {_in_words(error)}")
    _counted.error = id(error)


def count_refusal(metrics: DistributedMetrics, name: str, error: BaseException) -> None:
    """A call raised; counts it unless that was done when it failed."""
    if _counted.error != id(error):
        metrics.count_journal()
        entry: OperationMetrics = getattr(metrics, name)
        entry.note(0.0, 0, type(error).__name__)
        metrics.tell(f"{name} failed: {_in_words(error)}")
        _counted.error = id(error)


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, DistributedError) else f"{type(error).__name__}: {error}"


def counted(
    metrics: DistributedMetrics, call: Call, work: Work[Result], began: float
) -> Work[Result]:
    """Count something that was started when it has ended, well or not."""

    def end() -> None:
        error = work.exception()
        if error is None:
            count(metrics, call, began)
        else:
            count_failure(metrics, call, began, error)

    work.add_done_callback(end)
    return work


def size_of(call: Call) -> int:
    """Bytes of what this rank gives or gets, whichever is more."""
    return max(call.source.nbytes, call.target.nbytes)


Compression: TypeAlias = (
    TensorCompressor | GradientCompressor | CompressionStrategy | QuantizationType | str | None
)
"""A method by name, or with a memory of what it left behind."""

_FORGETFUL = frozenset({"onebit", "topk", "random", "powersgd"})
"""Methods that lose most of a step, and are of no use without a memory."""


def read_compression(
    compression: TensorCompressor
    | GradientCompressor
    | CompressionStrategy
    | QuantizationType
    | str,
) -> TensorCompressor:
    """What a caller asks for."""
    if isinstance(compression, TensorCompressor):
        return compression
    if isinstance(compression, GradientCompressor):
        return compression.tensor("")
    strategy = CompressionStrategy.of(compression)
    if strategy.method in _FORGETFUL:
        raise UnsupportedOperation(
            f"{strategy.method} must keep the values that it leaves out for the next step",
            hint=f"Pass the same compression=GradientCompressor({str(strategy)!r}) to every call.",
        )
    return GradientCompressor(strategy, error_feedback=False).tensor("")


def _check(
    reads: BufferView, reducer: Reducer, strategy: Strategy | None, wanted: CompressionStrategy
) -> None:
    if not wanted.is_lossy:
        return
    if reads.flat.dtype not in COMPRESSIBLE:
        names = ", ".join(dtype.name for dtype in COMPRESSIBLE)
        raise UnsupportedOperation(
            f"Compression with {wanted} supports {names}, not {reads.flat.dtype}",
            hint="Convert the array to float32, or omit compression=.",
        )
    if reducer.op not in {ReduceOp.SUM, ReduceOp.MEAN}:
        raise UnsupportedOperation(
            f"Compression with {wanted} supports sum and mean, not {reducer.op.value}",
            hint="Omit compression=.",
        )
    if strategy is not None and strategy.algorithm not in {None, "direct"}:
        raise UnsupportedOperation(
            f"The strategy {strategy.algorithm} does not support compression",
            hint="Omit strategy=.",
        )


A = TypeVar("A")


def _none() -> None:
    return None


_BARRIER = Reducer.of(ReduceOp.BIT_OR, np.uint8)  # as the group's own, so that the two can meet

MAX_OBJECT_BYTES = 16 << 20
"""What one object may take, written down; larger things are arrays."""

FAILED = -1
"""Instead of a length: there is no object."""


class CallScope:
    """Around one call of a program: where it runs, and what its errors become.

    This one only counts calls that raise before they begin, where calls are counted.
    """

    __slots__ = ("_metrics", "_name")

    def __init__(self, metrics: DistributedMetrics | None = None, name: str = "") -> None:
        self._metrics = metrics
        self._name = name
        _counted.error = 0

    def __enter__(self) -> object:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None and self._metrics is not None and self._name in OPERATIONS:
            count_refusal(self._metrics, self._name, error)

    @property
    def message_errors(self) -> MessageErrors:
        """Decides what a message ends with that was started in this call."""
        return AS_THEY_ARE


PLAIN = CallScope()
"""The scope of calls that are neither counted nor part of a view."""


class DistributedBackend(Backend):
    """The interface of everything that has collectives.

    A backend that derives from this has them all at once: they run on the messages that it moves.
    :class:`DistributedContext` lifts any other backend to this interface.

    Every collective is called by all ranks, in the same order.  It waits for its result, unless
    ``async_op=True`` is passed: then it returns a :class:`Work` at once, and the arrays belong to
    that until it is done.  Those of objects always wait.

    >>> from potluck import DistributedContext, SimulatedBackend
    >>> with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
    ...     isinstance(context, DistributedBackend), context.all_reduce(2.0, "mean")
    (True, 2.0)
    """

    _metrics: DistributedMetrics | None = None
    """Where they are counted, if they are."""

    def call_metrics(self) -> DistributedMetrics | None:
        """Where they are counted, if they are."""
        return self._metrics

    @property
    def group(self) -> Group:
        """Who runs the collectives."""
        return Group.of(self)

    @property
    def _place(self) -> CallSite:
        return CallSite(self.rank, self.world_size)

    def _scope(self, name: str, timeout: Seconds | None) -> CallScope:
        """What is around every call of a program; the one place where errors are translated."""
        del timeout
        return PLAIN if self._metrics is None else CallScope(self._metrics, name)

    def _follow(self, work: Work[Result], timeout: Seconds | None) -> Work[Result]:
        """Something was started by a call, and continues after it."""
        del timeout
        return work

    def _check_rank_of(self, root: int) -> int:
        rank = check_whole(root, "root")
        if not 0 <= rank < self.world_size:
            raise InvalidRank(rank, self.world_size)
        return rank

    def _launch(
        self, request: Request[Result], timeout: Seconds | None, *, async_op: bool
    ) -> Result | Work[Result]:
        """Run a request, or start it; and count it, where that is wanted."""
        group, metrics = self.group, self._metrics
        if async_op and timeout is not None:
            msg = "timeout= cannot be combined with async_op: pass it to wait(timeout)"
            raise ValueError(msg)
        if timeout is None and group.config is not None:
            timeout = group.config.timeout
        if metrics is None:
            if async_op:
                return self._follow(group.start(*request, timeout), timeout)
            group.run(request.call, timeout)
            return request.finish()
        call, began = request.call, monotonic()
        try:  # all of it here: every frame more costs as much as counting itself
            if async_op:
                work = self._follow(group.start(*request, timeout), timeout)
                return counted(metrics, call, work, began)
            group.run(call, timeout)
            outcome = request.finish()
        except BaseException as error:
            count_failure(metrics, call, began, error)
            raise
        nbytes = call.source.nbytes if call.source is call.target else size_of(call)
        metrics.journal.append((call.task.collective, monotonic() - began, nbytes))
        if len(metrics.journal) > LONG:
            metrics.count_journal()
        return outcome

    def _tell_all(self, mine: Array, purpose: Purpose, timeout: Seconds | None) -> Array:
        """What every rank has to say, in rank order, before it can do what it was called for."""
        task = self._place.blocks(Collective.ALL_GATHER, [mine.size] * self.world_size, 1)
        told = np.empty(task.total, mine.dtype)
        self._launch(collective_call.part_of(purpose, task, mine, told), timeout, async_op=False)
        return told

    @overload
    def gather_records(
        self, mine: Array, timeout: Seconds | None = ..., *, async_op: Literal[False] = ...
    ) -> Array: ...

    @overload
    def gather_records(self, mine: Array, *, async_op: Literal[True]) -> Work[Array]: ...

    def gather_records(
        self, mine: Array, timeout: Seconds | None = None, *, async_op: bool = False
    ) -> Array | Work[Array]:
        """What each rank brings to a step, straight from it; for :mod:`potluck.training`."""
        with self._scope("gather_records", timeout):
            task = self._place.blocks(Collective.ALL_GATHER, [mine.size] * self.world_size, 1)
            told = np.empty(task.total, mine.dtype)
            call = collective_call.part_of(Purpose.RECORDS, task, mine, told).call
            return self._launch(Request(call, lambda: told), timeout, async_op=async_op)

    # -- compressed sums -------------------------------------------------------------------------

    @property
    def compression_choices(self) -> list[Choice]:
        """What ``"auto"`` stands for in this group at present, with reasons; the latest last.

        There is one for each size of arrays; those below 256 KiB are left as they are.
        """
        return AgreedMethods.of(self.group).made

    def _reduce_compressed(
        self,
        memory: tuple[BufferView, BufferView],
        reducer: Reducer,
        tensor: TensorCompressor,
        *,
        strategy: Strategy | None,
        timeout: Seconds | None,
        async_op: bool,
    ) -> Any:
        """Reduce the first buffer into the second."""
        reads, into = memory
        _check(reads, reducer, strategy, tensor.compressor.strategy)
        # The group as it is now: that of a cluster may be another when the turn comes.
        metrics = self._metrics
        made = CompressedReduction(
            *(self.group, self._place, reads, into, reducer, tensor),
            strategy=strategy,
            counts=None if metrics is None else metrics.compression,
        )
        return self._launch(Request(made.call(), into.commit), timeout, async_op=async_op)

    # -- reductions: ``op`` is a name such as ``"sum"``, or a :class:`ReduceOp` ------------------

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
        with self._scope("all_reduce", timeout):
            chosen = collective_call.read_strategy(AllReduceStrategy, strategy)
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
            reads = as_buffer(array, Access.UPDATE if out is None else Access.READ, dtype)
            reducer = collective_call.reducer_for(op, reads)
            into = (
                reads
                if out is None
                else collective_call.output(out, array, reads.shape, reads, dtype)
            )
            if compression is not None:
                return self._reduce_compressed(  # type: ignore[no-any-return] # the user's own kind
                    (reads, into),
                    reducer,
                    read_compression(compression),
                    strategy=chosen,
                    timeout=timeout,
                    async_op=async_op,
                )
            place, memory = self._place, (reads.flat, into.flat)
            task = place.whole(Collective.ALL_REDUCE, reads.flat.size)
            made: Request[A] = collective_call.request(
                place, task, memory, into.commit, reducer=reducer, strategy=chosen
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
        with self._scope("reduce", timeout):
            chosen = collective_call.read_strategy(ReduceStrategy, strategy)
            is_root = self._check_rank_of(root) == self.rank
            reads = as_buffer(
                array, Access.UPDATE if is_root and out is None else Access.READ, dtype
            )
            reducer = collective_call.reducer_for(op, reads)
            task = self._place.whole(Collective.REDUCE, reads.flat.size, root)
            into = reads
            if is_root and out is not None:
                into = collective_call.output(out, array, reads.shape, reads, dtype)
            made: Request[A | None] = collective_call.request(
                self._place,
                task,
                (reads.flat, into.flat if is_root else collective_call.nothing(reads.flat.dtype)),
                into.commit if is_root else _none,
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
        with self._scope("reduce_scatter", timeout):
            reads = as_buffer(array, Access.READ, dtype)
            reducer = collective_call.reducer_for(op, reads)
            rows, row = collective_call.rows_of(reads)
            shares = collective_call.rows_for(rows, self.world_size) if counts is None else counts
            task = self._place.blocks(Collective.REDUCE_SCATTER, shares, row)
            collective_call.check_size("array", reads, task.total)
            shape = collective_call.shape_with(shares[self.rank], reads)
            into = collective_call.output(out, array, shape, reads, dtype)
            made: Request[A] = collective_call.request(
                self._place, task, (reads.flat, into.flat), into.commit, reducer=reducer
            )
            return self._launch(made, timeout, async_op=async_op)

    # -- moves: rows are cells of the first dimension; ``counts`` are in rows --------------------

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
        with self._scope("broadcast", timeout):
            chosen = collective_call.read_strategy(BroadcastStrategy, strategy)
            is_root = self._check_rank_of(root) == self.rank
            if is_tree(array):
                whole: Request[A] = broadcast_request(
                    self._place, self.peer_name, array, root, chosen
                )
                return self._launch(whole, timeout, async_op=async_op)
            buffer = as_buffer(array, Access.READ if is_root else Access.UPDATE)
            task = self._place.whole(Collective.BROADCAST, buffer.flat.size, root)
            source = buffer.flat if is_root else collective_call.nothing(buffer.flat.dtype)
            made: Request[A] = collective_call.request(
                self._place, task, (source, buffer.flat), buffer.commit, strategy=chosen
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
        with self._scope("all_gather", timeout):
            reads = as_buffer(array, Access.READ)
            shares, timeout = self._shares(reads, counts, Purpose.ALL_GATHER_COUNTS, timeout)
            task = self._blocks(Collective.ALL_GATHER, reads, shares)
            shape = collective_call.shape_with(sum(shares), reads)
            into = collective_call.output(out, array, shape, reads)
            made: Request[A] = collective_call.request(
                self._place, task, (reads.flat, into.flat), into.commit
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
        with self._scope("gather", timeout):
            is_root = self._check_rank_of(root) == self.rank
            reads = as_buffer(array, Access.READ)
            shares, timeout = self._shares(reads, counts, Purpose.GATHER_COUNTS, timeout)
            task = self._blocks(Collective.GATHER, reads, shares, root)
            into = None
            if is_root:
                shape = collective_call.shape_with(sum(shares), reads)
                into = collective_call.output(out, array, shape, reads)
            made: Request[A | None] = collective_call.request(
                self._place,
                task,
                (
                    reads.flat,
                    collective_call.nothing(reads.flat.dtype) if into is None else into.flat,
                ),
                _none if into is None else into.commit,
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
        with self._scope("scatter", timeout):
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
            msg = f"Rank {root} is the root: it must pass the array to scatter"
            raise TypeError(msg)
        reads = as_buffer(array, Access.READ)
        rows, row = collective_call.rows_of(reads)
        shares = collective_call.rows_for(rows, self.world_size) if counts is None else counts
        if counts is None and rows % self.world_size:
            msg = (
                f"{rows} rows cannot be divided evenly among {self.world_size} ranks: pass counts="
            )
            raise ValueError(msg)
        task = self._place.blocks(Collective.SCATTER, shares, row, root)
        collective_call.check_size("array", reads, task.total)
        into = collective_call.output(
            out, array, collective_call.shape_with(shares[root], reads), reads
        )
        return collective_call.request(self._place, task, (reads.flat, into.flat), into.commit)

    def _scatter_into(self, out: A | None, root: int, counts: Sequence[int] | None) -> Request[A]:
        if out is None:
            msg = f"Rank {self.rank} must pass out=, the array that receives what rank {root} sends"
            raise TypeError(msg)
        into = as_buffer(out, Access.WRITE)
        rows, row = collective_call.rows_of(into)
        shares = [rows] * self.world_size if counts is None else counts
        task = self._place.blocks(Collective.SCATTER, shares, row, root)
        collective_call.check_size("out", into, task.counts[self.rank])
        memory = collective_call.nothing(into.flat.dtype), into.flat
        return collective_call.request(self._place, task, memory, into.commit)

    def _shares(
        self,
        reads: BufferView,
        counts: Sequence[int] | Literal["ask"] | None,
        purpose: Purpose,
        timeout: Seconds | None,
    ) -> tuple[Sequence[int], Seconds | None]:
        """How many rows each rank has, and how much time is left."""
        mine, _ = collective_call.rows_of(reads)
        if counts is None:
            return [mine] * self.world_size, timeout
        if not isinstance(counts, str):
            return counts, timeout
        if counts != "ask":
            msg = f"counts must be 'ask' or a number of rows for each rank, got {counts!r}"
            raise ValueError(msg)
        countdown = Countdown(timeout)
        told = self._tell_all(np.array([mine], np.int64), purpose, timeout)
        return told.tolist(), countdown.left

    def _blocks(
        self, collective: Collective, reads: BufferView, shares: Sequence[int], root: int = 0
    ) -> Task:
        task = self._place.blocks(collective, shares, collective_call.rows_of(reads)[1], root)
        collective_call.check_size("array", reads, task.counts[self.rank])
        return task

    # -- exchanges and barriers ------------------------------------------------------------------

    @overload
    def all_to_all(
        self,
        array: A,
        *,
        send_counts: Sequence[int] | None = ...,
        counts: Sequence[Sequence[int]] | None = ...,
        out: A | None = ...,
        timeout: Seconds | None = ...,
        async_op: Literal[False] = ...,
    ) -> A: ...

    @overload
    def all_to_all(
        self,
        array: A,
        *,
        send_counts: Sequence[int] | None = ...,
        counts: Sequence[Sequence[int]] | None = ...,
        out: A | None = ...,
        async_op: Literal[True],
    ) -> Work[A]: ...

    def all_to_all(
        self,
        array: A,
        *,
        send_counts: Sequence[int] | None = None,
        counts: Sequence[Sequence[int]] | None = None,
        out: A | None = None,
        timeout: Seconds | None = None,
        async_op: bool = False,
    ) -> A | Work[A]:
        """Give each rank its rows of every rank's array, one after the other in rank order.

        Unless told otherwise all ranks have equally many rows and divide them evenly, the first
        parts one row longer where that does not come out.  ``send_counts`` says how many rows this
        rank has for each; the ranks then tell each other first.  ``counts`` says it for all: row
        *i* of it is what rank *i* sends.
        """
        with self._scope("all_to_all", timeout):
            reads = as_buffer(array, Access.READ)
            rows, row = collective_call.rows_of(reads)
            countdown = Countdown(timeout)
            matrix = self._matrix(rows, send_counts, counts, timeout)
            task = Task.exchange([[operator.index(each) * row for each in line] for line in matrix])
            collective_call.check_size("array", reads, sum(task.sends(self.rank)))
            shape = collective_call.shape_with(sum(line[self.rank] for line in matrix), reads)
            into = collective_call.output(out, array, shape, reads)
            made: Request[A] = collective_call.request(
                self._place, task, (reads.flat, into.flat), into.commit
            )
            return self._launch(made, countdown.left, async_op=async_op)

    def _matrix(
        self,
        rows: int,
        send_counts: Sequence[int] | None,
        counts: Sequence[Sequence[int]] | None,
        timeout: Seconds | None,
    ) -> Sequence[Sequence[int]]:
        size = self.world_size
        if send_counts is not None and counts is not None:
            msg = "Pass either counts or send_counts, which is this rank's row of counts"
            raise TypeError(msg)
        if counts is None and send_counts is None:
            return [collective_call.rows_for(rows, size)] * size
        if counts is not None:
            if len(counts) != size or any(len(line) != size for line in counts):
                msg = f"counts must have {size} rows of {size} numbers"
                raise ValueError(msg)
            return counts
        assert send_counts is not None
        mine = np.array([operator.index(each) for each in send_counts], np.int64)
        if mine.shape != (size,) or (mine < 0).any():
            msg = f"send_counts must have {size} non-negative numbers, got {send_counts!r}"
            raise ValueError(msg)
        told = self._tell_all(mine, Purpose.ALL_TO_ALL_COUNTS, timeout)
        lines: list[list[int]] = told.reshape(size, size).tolist()
        return lines

    @overload
    def barrier(self, timeout: Seconds | None = ..., *, async_op: Literal[False] = ...) -> None: ...

    @overload
    def barrier(self, *, async_op: Literal[True]) -> Work[None]: ...

    def barrier(
        self, timeout: Seconds | None = None, *, async_op: bool = False
    ) -> Work[None] | None:
        """Return when every rank has called this, and so all earlier collectives have been."""
        with self._scope("barrier", timeout):
            cell = np.zeros(1, np.uint8)
            task = self._place.whole(Collective.BARRIER, 1)
            made: Request[None] = collective_call.request(
                self._place, task, (cell, cell), _none, reducer=_BARRIER
            )
            return self._launch(made, timeout, async_op=async_op)

    # -- objects ---------------------------------------------------------------------------------
    #
    # None, numbers (integers of any size), str, bytes, dates and times, and lists, tuples, dicts
    # and sets of them: encoded, never pickled.  Lengths travel first and are compared with a limit
    # before anything is allocated.  A rank whose object cannot be encoded says so with its length,
    # so that the others need not wait for it.

    def broadcast_object(
        self,
        value: Any = None,
        root: int = 0,
        *,
        limit: int = MAX_OBJECT_BYTES,
        timeout: Seconds | None = None,
    ) -> Any:
        """The root's object, on every rank; the others' ``value`` is ignored."""
        with self._scope("broadcast_object", timeout):
            is_root = self._check_rank_of(root) == self.rank
            errand = self._errand(Purpose.BROADCAST_OBJECT, timeout)
            parcel = _PackedObjects.of([value] if is_root else [], limit)
            length = np.array(parcel.lengths or [0], np.int64)
            errand.broadcast(length, root)
            (count,) = parcel.check(length.tolist(), limit, [root])
            raw = parcel.raw if is_root else np.empty(count, np.uint8)
            errand.broadcast(raw, root)
            return _decode(raw, root)

    def all_gather_object(
        self, value: Any, *, limit: int = MAX_OBJECT_BYTES, timeout: Seconds | None = None
    ) -> list[Any]:
        """Every rank's object, in rank order, on every rank."""
        with self._scope("all_gather_object", timeout):
            errand = self._errand(Purpose.ALL_GATHER_OBJECT, timeout)
            parcel, lengths = self._tell_lengths(value, limit, errand)
            raw = np.empty(sum(lengths), np.uint8)
            errand.move(Collective.ALL_GATHER, lengths, 0, parcel.raw, raw)
            return _open(raw, lengths)

    def gather_object(
        self,
        value: Any,
        root: int = 0,
        *,
        limit: int = MAX_OBJECT_BYTES,
        timeout: Seconds | None = None,
    ) -> list[Any] | None:
        """Every rank's object, in rank order, at the root; None on the others."""
        with self._scope("gather_object", timeout):
            is_root = self._check_rank_of(root) == self.rank
            errand = self._errand(Purpose.GATHER_OBJECT, timeout)
            parcel, lengths = self._tell_lengths(value, limit, errand)
            raw = np.empty(sum(lengths), np.uint8) if is_root else None
            errand.move(Collective.GATHER, lengths, root, parcel.raw, raw)
            return None if raw is None else _open(raw, lengths)

    def scatter_object(
        self,
        values: Sequence[Any] | None = None,
        root: int = 0,
        *,
        limit: int = MAX_OBJECT_BYTES,
        timeout: Seconds | None = None,
    ) -> Any:
        """The object that the root has for this rank; only the root passes ``values``."""
        with self._scope("scatter_object", timeout):
            is_root = self._check_rank_of(root) == self.rank
            errand = self._errand(Purpose.SCATTER_OBJECT, timeout)
            parcel = (
                self._parcel_for_all(values, root, limit)
                if is_root
                else _PackedObjects.of([], limit)
            )
            told = np.array(parcel.lengths or [0] * self.world_size, np.int64)
            errand.broadcast(told, root)
            lengths = parcel.check(told.tolist(), limit, [root] * self.world_size)
            out = np.empty(lengths[self.rank], np.uint8)
            raw = parcel.raw if is_root else None
            errand.move(Collective.SCATTER, lengths, root, raw, out)
            return _decode(out, root)

    def _parcel_for_all(
        self, values: Sequence[Any] | None, root: int, limit: int
    ) -> _PackedObjects:
        """One object for each rank; if there are not, all of them must hear of it."""
        count = len(values) if isinstance(values, Sequence) else None
        if count == self.world_size and values is not None:
            return _PackedObjects.of(values, limit)
        got = f"not {count}" if count is not None else f"not {values!r:.50}"
        msg = f"Rank {root} is the root: it must pass {self.world_size} objects, {got}"
        return _PackedObjects([], ValueError(msg), self.world_size)

    def _tell_lengths(
        self, value: Any, limit: int, errand: _CombinedCall
    ) -> tuple[_PackedObjects, list[int]]:
        parcel = _PackedObjects.of([value], limit)
        told = self._tell_all(
            np.array(parcel.lengths, np.int64), errand.purpose, errand.countdown.left
        )
        return parcel, parcel.check(told.tolist(), limit, range(self.world_size))

    def _errand(self, purpose: Purpose, timeout: Seconds | None) -> _CombinedCall:
        def run(request: Request[None], seconds: float | None) -> None:
            self._launch(request, seconds, async_op=False)

        return _CombinedCall(self._place, purpose, Countdown(timeout), run)

    # -- messages --------------------------------------------------------------------------------

    @property
    def _messages(self) -> GroupLog:
        """The flight recorder's log of messages."""
        return log_of(self)

    def send(self, data: Any, dst: int, *, tag: int = 0, timeout: Seconds | None = None) -> None:
        """Send an array to rank ``dst``; return when it may be changed again."""
        with self._scope("send", timeout):
            data = as_buffer(data, Access.READ).flat.view("u1")
            limit = read_timeout(self._limit(timeout))
            with MessageNote(self._messages, "send", dst, tag, data.nbytes):
                self.post_send(data, dst, tag=tag).finish_within(limit)

    def recv(self, into: Any, src: int, *, tag: int = 0, timeout: Seconds | None = None) -> None:
        """Receive from rank ``src`` into an array, which has the exact size of what was sent."""
        with self._scope("recv", timeout):
            view = as_buffer(into, Access.WRITE)
            data = view.flat.view("u1")
            limit = read_timeout(self._limit(timeout))
            with MessageNote(self._messages, "recv", src, tag, data.nbytes):
                self.post_recv_into(data, src, tag=tag).finish_within(limit)
            view.commit()

    def isend(self, data: A, dst: int, *, tag: int = 0) -> Transfer[A]:
        """Start sending; the array must not change until the work is done."""
        scope = self._scope("isend", None)
        with scope:
            view = as_buffer(data, Access.READ).flat.view("u1")
            operation = self.post_send(view, dst, tag=tag)
            note = MessageNote(self._messages, "send", dst, tag, view.nbytes)
            return Transfer(operation, self.progress, lambda: data, note.end, scope.message_errors)

    def irecv(self, into: A, src: int, *, tag: int = 0) -> Transfer[A]:
        """Start receiving into an array; it must not be used until the work is done."""
        scope = self._scope("irecv", None)
        with scope:
            view = as_buffer(into, Access.WRITE)
            data = view.flat.view("u1")
            operation = self.post_recv_into(data, src, tag=tag)
            note = MessageNote(self._messages, "recv", src, tag, data.nbytes)
            return Transfer(operation, self.progress, view.commit, note.end, scope.message_errors)

    def sendrecv(
        self,
        data: Any,
        dst: int,
        into: Any,
        src: int,
        *,
        tag: int = 0,
        timeout: Seconds | None = None,
    ) -> None:
        """Send to one rank while receiving from another, or from the same."""
        with self._scope("sendrecv", timeout):
            sending = self.isend(data, dst, tag=tag)
            try:
                self.recv(into, src, tag=tag, timeout=timeout)
                sending.wait(self._limit(timeout))
            except BaseException:
                sending.cancel()
                raise


class _CombinedCall(NamedTuple):
    """The collectives that one call is made of, and the time that they have together."""

    place: CallSite
    purpose: Purpose
    countdown: Countdown
    run: Callable[[Request[None], float | None], None]

    def broadcast(self, array: Array, root: int) -> None:
        """The root's array, into that of every other rank."""
        task = self.place.whole(Collective.BROADCAST, array.size, root)
        self._do(task, array if self.place.rank == root else None, array)

    def move(
        self,
        collective: Collective,
        counts: Sequence[int],
        root: int,
        source: Array | None,
        target: Array | None,
    ) -> None:
        """Move blocks of ``counts`` elements from where they are to where they belong."""
        self._do(self.place.blocks(collective, counts, 1, root), source, target)

    def _do(self, task: Task, source: Array | None, target: Array | None) -> None:
        self.run(part_of(self.purpose, task, source, target), self.countdown.left)


class _PackedObjects:
    """Objects of this rank, written down, or the reason why they cannot be."""

    def __init__(self, parts: list[bytes], error: Exception | None, count: int) -> None:
        self.error = error
        self.raw: Array = np.frombuffer(b"".join(parts), np.uint8)
        self.lengths = [len(part) for part in parts] if error is None else [FAILED] * count

    @classmethod
    def of(cls, values: Sequence[Any], limit: int) -> _PackedObjects:
        """Write objects down; what goes wrong is kept until everybody has been told."""
        try:
            parts = [encode(value) for value in values]
            for part in parts:
                if len(part) > limit:
                    msg = f"An object of {len(part)} bytes is larger than the limit of {limit}"
                    raise ValueError(msg)
        except (TypeError, ValueError, RecursionError) as error:
            return cls([], error, len(values))
        return cls(parts, None, len(values))

    def check(self, lengths: list[int], limit: int, senders: Sequence[int]) -> list[int]:
        """Check lengths that peers sent; raise if an object is missing or too large."""
        if self.error is not None:
            raise self.error
        for length, sender in zip(lengths, senders, strict=True):
            if length == FAILED:
                raise DistributedError(
                    f"Rank {sender} cannot send its object; the error on that rank says why",
                    rank=sender,
                )
            if not 0 <= length <= limit:
                raise MalformedFrame(
                    f"Rank {sender} announced an object of {length} bytes; the limit is {limit}",
                    rank=sender,
                    expected=limit,
                    got=length,
                )
        return lengths


def _open(raw: Array, lengths: Sequence[int]) -> list[Any]:
    ends = accumulate(lengths, initial=0)
    spans = enumerate(pairwise(ends))
    return [_decode(raw[start:stop], rank) for rank, (start, stop) in spans]


def _decode(raw: Array, sender: int) -> Any:
    try:
        return decode(raw.data)
    except MalformedFrame as error:
        raise MalformedFrame(
            f"Rank {sender} sent an object that cannot be decoded",
            rank=sender,
            cause=error.cause or error.message,
        ) from None
