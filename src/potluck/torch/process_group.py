"""The process group that PyTorch calls ``potluck``: every collective and every message.

:class:`ProcessGroup` turns the calls of ``torch.distributed`` into requests of a
:class:`~potluck.collective.context.DistributedContext`.  PyTorch passes lists of tensors, and
collectives work on vectors: :class:`TensorBundle` makes one of the other.  ``init_process_group``
and ``new_group`` call :func:`create`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist

from potluck.arrays.adapters import as_buffer
from potluck.arrays.base import Access, BufferView
from potluck.backend.base import Backend
from potluck.backend.simulated import SimulatedBackend
from potluck.backend.sub import SubBackend
from potluck.cluster.metrics_endpoint import process_metrics
from potluck.cluster.presence import attend
from potluck.collective import call
from potluck.collective.call import CallSite, Request, Work
from potluck.collective.collectives import count, count_failure, counted
from potluck.collective.context import DistributedContext
from potluck.collective.p2p import AnySource, AnyTransfer, ProgressThread, Transfer
from potluck.errors import Timeout, UnsupportedOperation
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import Collective, Task
from potluck.torch.store import Options, form, register_scheme, store_below
from potluck.torch.work import (
    AllWork,
    PotluckWork,
    StorageHold,
    in_their_words,
    seconds,
    untraced_methods,
)

NAME = "potluck"
"""The name of the backend in ``init_process_group``."""

CPU = torch.device("cpu")

RECENT = 64
"""Works that are kept although no Python code refers to them.

``DistributedDataParallel.join`` passes the work of a count to C++ and drops it.  C++ waits for it
in the backward pass, for ever if the Python object has been freed by then.
"""

SMALL = 64
"""The most elements of the tensors of a work that is kept: a count has one."""

Tensors: TypeAlias = list[torch.Tensor]

_BARRIER = Reducer.of(ReduceOp.BIT_OR, np.uint8)


class ProfilerRecord:
    """An operation in PyTorch's profiler, from its start to its end on another thread.

    The profiler treats an operation that ends on another thread as asynchronous.  So the thread
    that runs the operation calls :meth:`finish`, and ``wait`` waits for :attr:`ended`.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._handle = torch.autograd._record_function_with_args_enter(  # type: ignore[attr-defined] # noqa: SLF001
            name, *tensors
        )
        self.ended: Work[None] = Work()

    def finish(self) -> None:
        """Record the end of the operation."""
        if not self.ended.done:
            torch.autograd._record_function_with_args_exit(self._handle)  # type: ignore[attr-defined] # noqa: SLF001
            self.ended.succeed(None)


class WatchedMessage:
    """A message for the progress thread: its profiler record ends when the message does."""

    def __init__(self, work: Work[object], entry: ProfilerRecord) -> None:
        self._work = work
        self._entry = entry

    @property
    def done(self) -> bool:
        """Whether the message has been sent or received."""
        if self._work.done:
            self._entry.finish()
        return self._entry.ended.done


def record(name: str, tensors: Sequence[torch.Tensor]) -> ProfilerRecord | None:
    """Show an operation in the profiler, if it runs; costs next to nothing if it does not."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # noqa: SLF001
        return ProfilerRecord(name, tensors)
    return None


Named: TypeAlias = tuple[str, torch.Tensor]
"""A tensor, and its name in errors."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements are contiguous in the memory of the CPU."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def counts_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """The number of elements of each tensor."""
    return [tensor.numel() for tensor in tensors]


def even_counts(whole: Named, part: Named, size: int) -> list[int]:
    """The number of elements of each of ``size`` ranks, in a tensor that holds a part of each."""
    (whole_name, all_parts), (part_name, one) = whole, part
    if all_parts.numel() != one.numel() * size:
        msg = (
            f"The {whole_name} of {all_parts.numel()} elements must be {size} times as large as "
            f"the {part_name} of {one.numel()}: one part for each rank"
        )
        raise ValueError(msg)
    return [one.numel()] * size


def check_some(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse an empty list of tensors."""
    if not tensors:
        msg = "The operation needs at least one tensor"
        raise ValueError(msg)


def check_pairs(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse lists that are empty or differ in length."""
    check_some(inputs)
    if len(outputs) != len(inputs):
        msg = f"Each input needs an output, got {len(inputs)} inputs and {len(outputs)} outputs"
        raise ValueError(msg)


def is_uniform(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all tensors have the same dtype."""
    return all(tensor.dtype is tensors[0].dtype for tensor in tensors)


MOVED = (
    "The storage of a tensor was moved while an operation used it, so the result is lost: "
    "call wait() on the work before you resize or share the storage"
)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """The address and the size of a tensor's storage."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class TensorBundle:
    """Tensors of one dtype as one vector: their own memory if it is one contiguous piece.

    Otherwise the vector is a temporary copy, and :meth:`commit` copies the result back.

    >>> parts = [torch.ones(2), torch.zeros(1, 2)]
    >>> bundle = TensorBundle(parts, Access.UPDATE)
    >>> bundle.vector += 1
    >>> bundle.commit(); parts
    [tensor([2., 2.]), tensor([[1., 1.]])]
    """

    def __init__(self, tensors: Sequence[torch.Tensor], access: Access) -> None:
        self._tensors = [tensor.detach() for tensor in tensors]
        self._access = access
        _check(tensors)
        whole = _side_by_side(self._tensors)
        self.is_copy = whole is None
        if whole is None:
            first = tensors[0]
            count = sum(counts_of(tensors))
            whole = torch.empty(count, dtype=first.dtype, device="cpu")
            if access.reads:
                for part, tensor in zip(self._parts(whole), self._tensors, strict=True):
                    part.copy_(tensor)
        self.vector = whole
        self._memory = _memory_of(whole)

    def _parts(self, whole: torch.Tensor) -> list[torch.Tensor]:
        parts = whole.split(counts_of(self._tensors))  # type: ignore[no-untyped-call]
        return [part.view(tensor.shape) for part, tensor in zip(parts, self._tensors, strict=True)]

    def commit(self) -> None:
        """Write the result to the tensors."""
        if _memory_of(self.vector) != self._memory:
            raise RuntimeError(MOVED)
        if not self._access.writes:
            return
        if self.is_copy:
            for part, tensor in zip(self._parts(self.vector), self._tensors, strict=True):
                with torch.inference_mode(tensor.is_inference()):
                    tensor.copy_(part)
        else:
            for tensor in self._tensors:
                if not tensor.is_inference():
                    torch.autograd.graph.increment_version(tensor)


def _check(tensors: Sequence[torch.Tensor]) -> None:
    check_some(tensors)
    kinds = {tensor.dtype for tensor in tensors}
    if len(kinds) > 1:
        names = ", ".join(sorted(map(str, kinds)))
        msg = f"All tensors of an operation must have the same dtype, got {names}"
        raise TypeError(msg)
    if any(tensor.layout is not torch.strided for tensor in tensors):
        msg = "Only all_reduce accepts sparse tensors. Pass tensor.to_dense()"
        raise TypeError(msg)


def _side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A vector over the memory of all tensors, if that is one contiguous piece."""
    filled = [tensor for tensor in tensors if tensor.numel()]  # the others have no address
    first = (filled or tensors)[0]
    if not is_dense(first):
        return None
    if len(filled) <= 1:
        return first.view(-1)
    storage = first.untyped_storage().data_ptr()
    place = first.data_ptr()
    for tensor in filled:
        if (
            not is_dense(tensor)
            or tensor.data_ptr() != place
            or tensor.untyped_storage().data_ptr() != storage
        ):
            return None
        place += tensor.numel() * tensor.element_size()
    return first.as_strided((sum(counts_of(tensors)),), (1,))


_KINDS: Any = dist.ReduceOp.RedOpType
_SAME = {
    _KINDS.SUM: ReduceOp.SUM,
    _KINDS.AVG: ReduceOp.MEAN,
    _KINDS.PRODUCT: ReduceOp.PRODUCT,
    _KINDS.MIN: ReduceOp.MIN,
    _KINDS.MAX: ReduceOp.MAX,
    _KINDS.BAND: ReduceOp.BIT_AND,
    _KINDS.BOR: ReduceOp.BIT_OR,
    _KINDS.BXOR: ReduceOp.BIT_XOR,
    _KINDS.PREMUL_SUM: ReduceOp.SUM,
}


class Reduction(NamedTuple):
    """A reduction, with an optional factor."""

    op: ReduceOp
    factor: float | torch.Tensor | None = None
    """Every rank multiplies its values by this first."""


def read_reduction(op: Any) -> Reduction:
    """The reduction that stands for one of PyTorch's.

    >>> read_reduction(dist.ReduceOp.AVG).op
    <ReduceOp.MEAN: 'mean'>
    """
    kind, factor = op, None
    if isinstance(op, dist.ReduceOp) and not isinstance(op, _KINDS):  # which passes for one too
        kind, factor = cast("Any", op).__getstate__()
    ours = _SAME.get(kind)
    if ours is None:
        raise UnsupportedOperation(f"The backend {NAME!r} does not support the reduction {op!r}")
    return Reduction(ours, factor)


def sum_sparse(context: DistributedContext, tensor: torch.Tensor, op: ReduceOp) -> None:
    """Replace a sparse tensor by the sum over all ranks, coalesced.

    The ranks exchange their indices and values, and each adds them up in the order of ranks.
    """
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedOperation(
            f"Tensors of the layout {tensor.layout} cannot be summed",
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


class CallOptions(NamedTuple):
    """Options of an operation, from an options object of PyTorch or from arguments."""

    op: Any = dist.ReduceOp.SUM
    root: int = 0
    limit: float | None = None
    """Seconds; None is the group's own limit."""
    is_async: bool = True


def read_options(
    opts: Any, op: Any = None, root: Any = None, timeout: timedelta | float | None = None
) -> CallOptions:
    """The options of an operation; an argument overrides the options object."""
    given = opts is not None
    return CallOptions(
        getattr(opts, "reduceOp", dist.ReduceOp.SUM) if op is None else op,
        int(getattr(opts, "rootRank", 0) if root is None else root),
        seconds(getattr(opts, "timeout", None) if timeout is None else timeout),
        bool(getattr(opts, "asyncOp", True)) if given else True,
    )


def as_list(tensors: Any) -> list[torch.Tensor]:
    """A tensor, or a list of them, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def nothing() -> None:
    """Do nothing when an operation ends."""


def both(first: Callable[[], object], second: Callable[[], Any]) -> Callable[[], Any]:
    """Call both in order; return what the second returns."""

    def finish() -> Any:
        first()
        return second()

    return finish


def _flattened(lists: Any) -> Tensors:
    """The list of tensors; PyTorch passes it alone, or as the only item of another list."""
    if lists and not isinstance(lists[0], torch.Tensor):
        return list(lists[0])
    return list(lists)


@untraced_methods
class ProcessGroup(dist.ProcessGroup):
    """One rank of a group, as ``torch.distributed`` expects it, on a backend of Potluck."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, backend: Backend, timeout: timedelta | None, group_id: str = "") -> None:
        super().__init__(backend.rank, backend.world_size)  # type: ignore[call-arg]
        self._metrics = process_metrics()
        self._context = DistributedContext.with_metrics(backend, self._metrics)
        self._place = CallSite(backend.rank, backend.world_size)
        self._progress = ProgressThread(backend.progress)
        self._receives = AnySource(backend)
        self._name = group_id
        self._description = "undefined"
        self._coalesced: list[dist.Work] | None = None
        self._sequence = 0
        self._recent: deque[dist.Work] = deque(maxlen=RECENT)
        self._stores: list[Any] = []
        if timeout is not None:
            self.set_timeout(timeout)

    # -- names --------------------------------------------------------------------------------

    @property
    def context(self) -> DistributedContext:
        """The context of the same ranks."""
        return self._context

    def getBackendName(self) -> str:  # noqa: N802 - C++ asks for it by this name
        """The name of the backend."""
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name by which C++ finds this group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """The name by which C++ finds this group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set a description for logs."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """The description."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != CPU.type:
            msg = f"The backend {NAME!r} supports CPU tensors only, got {device.type!r}"
            raise RuntimeError(msg)
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: every rank counts its own operations."""

    def __repr__(self) -> str:
        """The name and the rank."""
        place = f"rank {self._place.rank} of {self._place.world_size}"
        return f"<{type(self).__name__} {self._name!r}, {place}>"

    # -- limits and endings ---------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later operations; zero means no timeout."""
        self._context.timeout = seconds(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """Fail every operation in progress, here and on the other ranks."""
        self._context.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Leave the group; may be called twice."""
        self._progress.close()
        self._recent.clear()
        stores, self._stores = self._stores, []
        for store in stores:
            store.close()
        self._context.close()
        for store in stores:
            store.leave()

    def keep(self, store: Any) -> None:
        """Close a store together with this group."""
        self._stores.append(store)

    # -- operations -----------------------------------------------------------------------------

    def _launch(
        self,
        name: str,
        request: Request[Any],
        outputs: Sequence[torch.Tensor],
        options: CallOptions,
        shown: Sequence[torch.Tensor] | None = None,
        *,
        reads: Sequence[torch.Tensor] = (),
    ) -> dist.Work:
        """Start an operation, or run it now if the caller waits for it anyway.

        The profiler shows the shapes of ``shown``, by default those of the outputs.  ``reads`` are
        further tensors that the operation uses.
        """
        self._sequence += 1
        group, metrics = self._context.group, self._metrics
        call, began = request.call, monotonic()
        entry = record(f"{NAME}:{name}", outputs if shown is None else shown)
        work: Work[Any]
        if entry is not None or options.is_async or self._coalesced is not None:
            hold = StorageHold([*outputs, *(shown or ()), *reads])
            end = hold.release if entry is None else both(entry.finish, hold.release)
            work = group.start(call, both(end, request.finish), options.limit)
            work.add_done_callback(end)  # where it has failed
            counted(metrics, call, work, began)
        else:
            work = Work()
            try:
                group.run(call, options.limit)
                outcome = request.finish()
            except BaseException as error:
                count_failure(metrics, call, began, error)
                if isinstance(error, Timeout):
                    raise in_their_words(error) from None
                raise
            work.succeed(outcome)
            count(metrics, call, began)
        made = PotluckWork(work, outputs)
        if options.is_async and sum(each.numel() for each in outputs) <= SMALL:
            self._recent.append(made)
        return self._joined(made)

    def _joined(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _start_coalescing(self, device: torch.device) -> None:
        del device
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        del device
        works, self._coalesced = self._coalesced or [], None
        return AllWork(works)

    def _one_by_one(
        self,
        operation: Callable[[torch.Tensor, torch.Tensor, Any], dist.Work],
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        opts: Any,
    ) -> dist.Work:
        """Run an operation on each pair, if they cannot be sent as one vector."""
        pairs = zip(outputs, inputs, strict=True)
        return AllWork([operation(output, source, opts) for output, source in pairs])

    def _as_buffer(self, tensors: Sequence[torch.Tensor], access: Access) -> BufferView:
        """Tensors as one numpy vector."""
        bundle = TensorBundle(tensors, access)
        view = as_buffer(bundle.vector, Access.READ)
        return view._replace(commit=bundle.commit)

    def _check_lengths(self, name: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self._place.world_size:
            size = self._place.world_size
            msg = f"{name} needs one tensor for each of the {size} ranks, not {len(tensors)}"
            raise ValueError(msg)

    # -- values become one: all-reduce, reduce, reduce-scatter -------------------------------------

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
        options = read_options(opts, op, timeout=timeout)
        if listed[0].layout is not torch.strided:
            return self._allreduce_sparse(listed, options)
        view, reducer = self._reduced(listed, options.op, Access.UPDATE)
        task = self._place.whole(Collective.ALL_REDUCE, view.flat.size)
        request = call.request(
            self._place, task, (view.flat, view.flat), view.commit, reducer=reducer
        )
        return self._launch("all_reduce", request, listed, options)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """The same for several tensors at once."""
        if any(tensor.layout is not torch.strided for tensor in tensors):
            msg = "Sparse tensors are summed one by one: use all_reduce"
            raise TypeError(msg)
        return self.allreduce(tensors, opts)

    def allreduce_sparse(self, tensors: list[torch.Tensor], opts: Any = None) -> dist.Work:
        """The same for sparse tensors."""
        return self.allreduce(tensors, opts)

    def _allreduce_sparse(self, tensors: list[torch.Tensor], options: CallOptions) -> dist.Work:
        """Sum one tensor after the other; the work is done when this returns."""
        work: Work[None] = Work()
        for tensor in tensors:
            sum_sparse(self._context, tensor, read_reduction(options.op).op)
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
        options = read_options(opts, op, root, timeout)
        is_root = self._context._check_rank_of(options.root) == self._place.rank  # noqa: SLF001
        access = Access.UPDATE if is_root else Access.READ
        view, reducer = self._reduced(listed, options.op, access)
        task = self._place.whole(Collective.REDUCE, view.flat.size, options.root)
        target = view.flat if is_root else call.nothing(view.flat.dtype)
        request = call.request(self._place, task, (view.flat, target), view.commit, reducer=reducer)
        return self._launch("reduce", request, listed, options)

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
        options = read_options(opts, op, timeout=timeout)
        return self._scatter_reduced(into, listed, counts_of(listed), options, "reduce_scatter")

    def reduce_scatter_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """The same with the entries one after the other in one tensor."""
        return self._scatter_reduced(
            [output], [source], self._even(output, source), read_options(opts)
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
        return self._scatter_reduced(outputs, [joined], counts, read_options(opts))

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
        options: CallOptions,
        name: str = "reduce_scatter_tensor",
    ) -> dist.Work:
        reads, reducer = self._reduced(inputs, options.op, Access.READ)
        into = self._as_buffer(outputs, Access.WRITE)
        call.check_type("The output", into, reads.flat.dtype)
        task = self._place.blocks(Collective.REDUCE_SCATTER, counts, 1)
        call.check_size("The output", into, counts[self._place.rank])
        request = call.request(
            self._place, task, (reads.flat, into.flat), into.commit, reducer=reducer
        )
        return self._launch(name, request, outputs, options, reads=inputs)

    def _reduced(
        self, tensors: list[torch.Tensor], op: Any, access: Access
    ) -> tuple[BufferView, Reducer]:
        """The tensors as one vector, with the factor applied, and the reducer."""
        kind, factor = read_reduction(op)
        if factor is not None:
            scaled = [tensor.detach() * factor for tensor in tensors]
            if access.writes:
                for tensor, each in zip(tensors, scaled, strict=True):
                    tensor.detach().copy_(each)
            else:
                tensors = scaled
        view = self._as_buffer(tensors, access)
        # NCCL truncates the mean of integers, and programs rely on it.
        return view, call.reducer_for(kind, view, truncate=True)

    # -- values move: broadcast, all-gather, gather, scatter ---------------------------------------

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
        options = read_options(opts, root=root, timeout=timeout)
        is_root = self._context._check_rank_of(options.root) == self._place.rank  # noqa: SLF001
        view = self._as_buffer(listed, Access.READ if is_root else Access.WRITE)
        task = self._place.whole(Collective.BROADCAST, view.flat.size, options.root)
        source = view.flat if is_root else call.nothing(view.flat.dtype)
        request = call.request(self._place, task, (source, view.flat), view.commit)
        return self._launch("broadcast", request, listed, options)

    def allgather(  # type: ignore[override]
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Give every rank all ranks' tensors, which may be of different sizes."""
        (source,) = as_list(inputs)
        into = _flattened(outputs)
        self._check_lengths("all_gather", into)
        return self._gather_all(
            into, [source], counts_of(into), read_options(opts, timeout=timeout)
        )

    def allgather_coalesced(
        self, output_lists: list[Tensors], input_list: Tensors, opts: Any = None
    ) -> dist.Work:
        """The same for several tensors at once: each rank has a list for all of them."""
        self._check_lengths("all_gather_coalesced", output_lists)
        into = [tensor for each in output_lists for tensor in each]
        counts = [sum(counts_of(each)) for each in output_lists]
        return self._gather_all(into, list(input_list), counts, read_options(opts))

    def all_gather_single(
        self, output: torch.Tensor, source: torch.Tensor, opts: Any = None
    ) -> dist.Work:
        """The same with all ranks' tensors one after the other in one."""
        counts, options = self._shares(output, source), read_options(opts)
        return self._gather_all([output], [source], counts, options, name="all_gather_into_tensor")

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
        return self._gather_all(into, list(inputs), counts, read_options(opts), results=outputs)

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
        options: CallOptions,
        *,
        results: Tensors | None = None,
        name: str = "all_gather",
    ) -> dist.Work:
        reads, into = self._as_buffer(inputs, Access.READ), self._as_buffer(outputs, Access.WRITE)
        call.check_type("The output", into, reads.flat.dtype)
        task = self._place.blocks(Collective.ALL_GATHER, counts, 1)
        call.check_size("The input", reads, counts[self._place.rank])
        call.check_size("The output", into, sum(counts))
        request = call.request(self._place, task, (reads.flat, into.flat), into.commit)
        filled = outputs if results is None else results
        return self._launch(name, request, filled, options, inputs)

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
        options = read_options(opts, root=root, timeout=timeout)
        (source,) = as_list(inputs)
        reads = self._as_buffer([source], Access.READ)
        if self._context._check_rank_of(options.root) != self._place.rank:  # noqa: SLF001
            counts = [source.numel()] * self._place.world_size
            task = self._place.blocks(Collective.GATHER, counts, 1, options.root)
            memory = reads.flat, call.nothing(reads.flat.dtype)
            made = call.request(self._place, task, memory, reads.commit)
            return self._launch("gather", made, [], options, [source])
        into_list = _flattened(outputs)
        self._check_lengths("gather", into_list)
        into = self._as_buffer(into_list, Access.WRITE)
        call.check_type("The output", into, reads.flat.dtype)
        task = self._place.blocks(Collective.GATHER, counts_of(into_list), 1, options.root)
        made = call.request(self._place, task, (reads.flat, into.flat), into.commit)
        return self._launch("gather", made, into_list, options, [source])

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
        options = read_options(opts, root=root, timeout=timeout)
        (output,) = listed = as_list(outputs)
        into = self._as_buffer([output], Access.WRITE)
        if self._context._check_rank_of(options.root) != self._place.rank:  # noqa: SLF001
            counts = [output.numel()] * self._place.world_size
            parts, source = listed, call.nothing(into.flat.dtype)
        else:
            parts = _flattened(inputs)
            self._check_lengths("scatter", parts)
            reads = self._as_buffer(parts, Access.READ)
            call.check_type("The output", into, reads.flat.dtype)
            counts, source = counts_of(parts), reads.flat
        task = self._place.blocks(Collective.SCATTER, counts, 1, options.root)
        call.check_size("The output", into, counts[self._place.rank])
        request = call.request(self._place, task, (source, into.flat), into.commit)
        return self._launch("scatter", request, listed, options, parts)

    # -- every rank has something for every other: all-to-all, barrier -----------------------------

    def alltoall(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> dist.Work:
        """Give each rank its entry of every rank's list."""
        self._check_lengths("all_to_all", inputs)
        self._check_lengths("all_to_all", outputs)
        return self._exchange(list(outputs), list(inputs), counts_of(inputs), read_options(opts))

    def alltoall_base(  # type: ignore[override] # one signature for all of PyTorch's
        self,
        output: torch.Tensor,
        source: torch.Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        """Give each rank its rows of every rank's tensor; without sizes, equal shares."""
        options = read_options(opts, timeout=timeout)
        if output_split_sizes or input_split_sizes:
            sends = self._split(source, input_split_sizes)
            self._split(output, output_split_sizes)
            return self._exchange([output], [source], sends, options)
        sends = self._split(source, ())
        return self._exchange([output], [source], sends, options, is_even=True)

    all_to_all_single = alltoall_base  # type: ignore[assignment] # as later versions call it

    def _split(self, tensor: torch.Tensor, sizes: Sequence[int]) -> list[int]:
        """How many elements each rank's part has."""
        world = self._place.world_size
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes:
            if rows % world:
                msg = f"{rows} rows cannot be split evenly over {world} ranks. Pass the split sizes"
                raise ValueError(msg)
            return [tensor.numel() // world] * world
        self._check_lengths("all_to_all_single", sizes)
        if sum(sizes) != rows:
            msg = f"The split sizes add up to {sum(sizes)} rows, but the tensor has {rows}"
            raise ValueError(msg)
        row = tensor.numel() // rows if rows else 0
        return [int(size) * row for size in sizes]

    def _exchange(
        self,
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        sends: list[int],
        options: CallOptions,
        *,
        is_even: bool = False,
    ) -> dist.Work:
        reads, into = self._as_buffer(inputs, Access.READ), self._as_buffer(outputs, Access.WRITE)
        call.check_type("The output", into, reads.flat.dtype)
        world = self._place.world_size
        if is_even:
            matrix = [sends] * world
        else:  # the ranks exchange their sizes first, and wait for that
            told = self._context.all_gather(np.array(sends, np.int64), timeout=options.limit)
            matrix = told.reshape(world, world).tolist()
        task = Task.exchange(matrix)
        call.check_size("The output", into, sum(line[self._place.rank] for line in matrix))
        request = call.request(self._place, task, (reads.flat, into.flat), into.commit)
        return self._launch("all_to_all", request, outputs, options, inputs)

    def barrier(  # type: ignore[override]
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Return a work that is done when every rank has called this."""
        cell = np.zeros(1, np.uint8)
        task = self._place.whole(Collective.BARRIER, 1)
        request = call.request(self._place, task, (cell, cell), nothing, reducer=_BARRIER)
        return self._launch("barrier", request, [], read_options(opts, timeout=timeout))

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002 - PyTorch's own signature
    ) -> None:
        """Wait for all ranks; the error after a timeout names the ranks that are missing."""
        del wait_all_ranks  # the error always names all of them
        limit = read_options(None, timeout=timeout).limit
        self._context.backend.barrier(limit)

    # -- messages ----------------------------------------------------------------------------------

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Start sending; the tensor must not change until the work is done."""
        (tensor,) = tensors
        entry = record(f"{NAME}:send", [tensor])
        hold, view = StorageHold([tensor]), self._as_buffer([tensor], Access.READ)
        operation = self._context.post_send(view.flat.view("u1"), dst, tag=tag)
        transfer = Transfer(operation, self._context.progress, both(hold.release, view.commit))
        return self._started(transfer, tensor, entry, hold)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Start receiving from a rank; the tensor must not be used until the work is done."""
        (tensor,) = tensors
        entry = record(f"{NAME}:recv", [tensor])
        hold = StorageHold([tensor])
        view = self._as_buffer(
            [tensor], Access.UPDATE
        )  # a shorter message leaves the rest as it is
        operation = self._receives.post(view.flat.view("u1"), src, tag)
        transfer = Transfer(operation, self._context.progress, both(hold.release, view.commit))
        return self._started(transfer, tensor, entry, hold, lambda: src)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> dist.Work:
        """Start receiving from the first rank that sends."""
        (tensor,) = tensors
        entry = record(f"{NAME}:recvAnySource", [tensor])
        hold, view = StorageHold([tensor]), self._as_buffer([tensor], Access.UPDATE)
        finish = both(hold.release, view.commit)
        transfer = AnyTransfer(self._receives, view.flat.view("u1"), tag, finish)
        return self._started(transfer, tensor, entry, hold, lambda: transfer.source)

    def _started(
        self,
        transfer: Work[Any],
        tensor: torch.Tensor,
        entry: ProfilerRecord | None,
        hold: StorageHold,
        source: Callable[[], int] | None = None,
    ) -> dist.Work:
        transfer.add_done_callback(hold.release)  # where it has failed
        if entry is not None:
            self._progress.carry(WatchedMessage(transfer, entry))
        elif not transfer.done:
            self._progress.carry(transfer)
        work = PotluckWork(
            transfer,
            [tensor],
            limit=self._context.timeout,
            source=source,
            after=None if entry is None else entry.ended,
        )
        return self._joined(work)


def create(opts: Any, pg_options: Any = None) -> ProcessGroup:
    """Make a group; PyTorch calls this in ``init_process_group`` and ``new_group``."""
    backend = _backend_for(opts, Options.read(pg_options))
    if isinstance(backend, SimulatedBackend):  # one rank; other backends are attended when formed
        attend(backend)
    group = ProcessGroup(backend, opts.timeout, opts.group_id)
    store = store_below(opts.store)
    if store is not None and store.backend is backend:
        group.keep(store)
    return group


def _backend_for(opts: Any, options: Options) -> Backend:
    """A subgroup of the group that exists already, or a new group."""
    members = list(opts.global_ranks_in_group)
    world = dist.group.WORLD
    if members and isinstance(world, ProcessGroup):
        return SubBackend(world.context.innermost, members, name=opts.group_id, in_order=True)
    store = store_below(opts.store)
    if store is not None:  # the ranks are connected already
        return SubBackend(store.backend, members, in_order=True) if members else store.backend
    timeout: timedelta = opts.timeout
    return form(opts.store, opts.group_rank, opts.group_size, timeout, options)


def register() -> None:
    """Register the backend with PyTorch; may be called more than once."""
    register_scheme()
    if NAME.upper() not in dist.Backend._plugins:  # noqa: SLF001 - there is no other way to ask
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
