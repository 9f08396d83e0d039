"""The process group that PyTorch calls ``potluck``: every collective, every message."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
import torch.distributed as dist

from potluck.arrays.adapters import lend
from potluck.arrays.base import Access, Lease
from potluck.backend.base import Backend
from potluck.backend.simulated import SimulatedBackend
from potluck.backend.sub import SubBackend
from potluck.cluster.metrics_endpoint import process_metrics
from potluck.cluster.presence import attend
from potluck.collective import call
from potluck.collective.call import Place, Request, Work
from potluck.collective.collectives import count, count_failure, counted
from potluck.collective.context import DistributedContext
from potluck.collective.p2p import AnySource, AnyTransfer, Courier, Transfer
from potluck.errors import Timeout, UnsupportedOperation
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import Collective, Task
from potluck.torch.store import Options, form, register_scheme, store_below
from potluck.torch.work import AllWork, Hold, PotluckWork, in_their_words, seconds, untraced_methods

# --------------------------------------------------------------------------------------------------
# Names and shapes of operations in PyTorch's profiler; costs next to nothing while none runs.


class Record:
    """An operation in a profile, from its start to its end on another thread.

    The profiler takes for asynchronous what ends elsewhere; so whoever carries the operation out
    calls :meth:`finish`, and whoever waits for it waits for that.
    """

    def __init__(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        self._handle = torch.autograd._record_function_with_args_enter(  # type: ignore[attr-defined] # noqa: SLF001
            name, *tensors
        )
        self.ended: Work[None] = Work()

    def finish(self) -> None:
        """The operation has ended."""
        if not self.ended.done:
            torch.autograd._record_function_with_args_exit(self._handle)  # type: ignore[attr-defined] # noqa: SLF001
            self.ended.succeed(None)


class Watched:
    """An errand for the courier: the record of a message ends with it."""

    def __init__(self, work: Work[object], entry: Record) -> None:
        self._work = work
        self._entry = entry

    @property
    def done(self) -> bool:
        """Whether the message has moved."""
        if self._work.done:
            self._entry.finish()
        return self._entry.ended.done


def record(name: str, tensors: Sequence[torch.Tensor]) -> Record | None:
    """Show an operation in the profile that is being taken, if one is."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined] # noqa: SLF001
        return Record(name, tensors)
    return None


# --------------------------------------------------------------------------------------------------
# Several tensors as one vector: collectives know vectors, PyTorch knows lists of tensors.

Named: TypeAlias = tuple[str, torch.Tensor]
"""A tensor, and what its caller calls it."""


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor's elements lie one after the other in the host's memory."""
    return (
        tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def counts_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How many elements each has."""
    return [tensor.numel() for tensor in tensors]


def even_counts(whole: Named, part: Named, size: int) -> list[int]:
    """How many elements each of ``size`` ranks has in a tensor that holds a part of each."""
    (whole_name, all_parts), (part_name, one) = whole, part
    if all_parts.numel() != one.numel() * size:
        msg = (
            f"The {whole_name} of {all_parts.numel()} elements must be {size} times as large as "
            f"the {part_name} of {one.numel()}: one part for each rank"
        )
        raise ValueError(msg)
    return [one.numel()] * size


def check_some(tensors: Sequence[torch.Tensor]) -> None:
    """Refuse an operation on nothing."""
    if not tensors:
        msg = "An operation on tensors needs at least one"
        raise ValueError(msg)


def check_pairs(outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
    """Refuse lists of which one has more than the other, or nothing."""
    check_some(inputs)
    if len(outputs) != len(inputs):
        msg = f"Each input needs an output: there are {len(inputs)} and {len(outputs)}"
        raise ValueError(msg)


def is_uniform(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all are of one type."""
    return all(tensor.dtype is tensors[0].dtype for tensor in tensors)


MOVED = (
    "The storage of a tensor was moved while an operation used it, so the result is lost: "
    "call wait() on the work before you resize or share the storage"
)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's storage lies, and how large it is."""
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


class Bundle:
    """Tensors of one type as one vector: their own memory where they lie side by side.

    Otherwise a temporary vector stands in for them, and :meth:`give_back` copies it to them.

    >>> parts = [torch.ones(2), torch.zeros(1, 2)]
    >>> bundle = Bundle(parts, Access.UPDATE)
    >>> bundle.vector += 1
    >>> bundle.give_back(); parts
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

    def give_back(self) -> None:
        """Bring the result to where it belongs."""
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
        msg = f"Tensors of one operation must be of one type, not of {names}"
        raise TypeError(msg)
    if any(tensor.layout is not torch.strided for tensor in tensors):
        msg = "Sparse tensors can only be summed by all_reduce: pass tensor.to_dense()"
        raise TypeError(msg)


def _side_by_side(tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One vector over the memory of all, where that is one piece."""
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


# --------------------------------------------------------------------------------------------------
# The frame of the process group: who we are in it, how operations start, and how it ends.

NAME = "potluck"
"""What users write in ``init_process_group``."""

CPU = torch.device("cpu")

RECENT = 64
"""Works that are kept although no Python code has them any more.

``DistributedDataParallel.join`` hands the work of a count to C++ and drops it; C++ waits for it in
the backward pass, for ever if the Python object is gone by then.
"""

SMALL = 64
"""Elements of the tensors of a work that is kept: a count has one."""


class Terms(NamedTuple):
    """What a caller wants of an operation, whichever way it was said."""

    op: Any = dist.ReduceOp.SUM
    root: int = 0
    limit: float | None = None
    """Seconds; None is the group's own limit."""
    is_async: bool = True


def read_terms(
    opts: Any, op: Any = None, root: Any = None, timeout: timedelta | float | None = None
) -> Terms:
    """Terms from an options object of PyTorch, or from arguments."""
    given = opts is not None
    return Terms(
        getattr(opts, "reduceOp", dist.ReduceOp.SUM) if op is None else op,
        int(getattr(opts, "rootRank", 0) if root is None else root),
        seconds(getattr(opts, "timeout", None) if timeout is None else timeout),
        bool(getattr(opts, "asyncOp", True)) if given else True,
    )


class GroupBase(dist.ProcessGroup):
    """A process group of PyTorch on a backend of ours."""

    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False

    def __init__(self, backend: Backend, timeout: timedelta | None, group_id: str = "") -> None:
        super().__init__(backend.rank, backend.world_size)  # type: ignore[call-arg]
        self._metrics = process_metrics()
        self._context = DistributedContext.with_metrics(backend, self._metrics)
        self._place = Place(backend.rank, backend.world_size)
        self._courier = Courier(backend.progress)
        self._name = group_id
        self._description = "undefined"
        self._coalesced: list[dist.Work] | None = None
        self._sequence = 0
        self._recent: deque[dist.Work] = deque(maxlen=RECENT)
        self._stores: list[Any] = []
        if timeout is not None:
            self.set_timeout(timeout)

    # -- names -----------------------------------------------------------------------------------

    @property
    def context(self) -> DistributedContext:
        """The same ranks as Potluck sees them."""
        return self._context

    def getBackendName(self) -> str:  # noqa: N802 - C++ asks for it by this name
        """What users call it."""
        return NAME

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Take the name by which C++ finds this group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """That name."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Take a description, for people."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """That description."""
        return self._description

    @property
    def _device_types(self) -> list[torch.device]:
        return [CPU]

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != CPU.type:
            msg = f"The backend {NAME} moves tensors of the CPU, not of {device.type}"
            raise RuntimeError(msg)
        return self

    def _get_sequence_number_for_group(self) -> int:
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Ranks agree on it by counting: nothing to be exchanged."""

    def __repr__(self) -> str:
        """Who this is, for people."""
        place = f"rank {self._place.rank} of {self._place.world_size}"
        return f"<{type(self).__name__} {self._name!r}, {place}>"

    # -- limits and endings ------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Let operations from now on end with an error after this time; zero means never."""
        self._context.timeout = seconds(timeout)

    _set_default_timeout = set_timeout

    def abort(self) -> None:
        """End every operation under way with an error, here and on the other ranks."""
        self._context.abort("the process group was aborted")

    def shutdown(self) -> None:
        """Leave the group; may be called twice."""
        self._courier.close()
        self._recent.clear()
        stores, self._stores = self._stores, []
        for store in stores:
            store.close()
        self._context.close()
        for store in stores:
            store.leave()

    def keep(self, store: Any) -> None:
        """Have a store closed with this group."""
        self._stores.append(store)

    # -- operations --------------------------------------------------------------------------------

    def _launch(
        self,
        name: str,
        request: Request[Any],
        outputs: Sequence[torch.Tensor],
        terms: Terms,
        shown: Sequence[torch.Tensor] | None = None,
        *,
        reads: Sequence[torch.Tensor] = (),
    ) -> dist.Work:
        """Start an operation, or do it at once if the caller waits for it anyway.

        ``shown`` are the tensors whose shapes a profile names, if not those of the outputs;
        ``reads`` are others that it uses.
        """
        self._sequence += 1
        group, metrics = self._context.group, self._metrics
        call, began = request.call, monotonic()
        entry = record(f"{NAME}:{name}", outputs if shown is None else shown)
        work: Work[Any]
        if entry is not None or terms.is_async or self._coalesced is not None:
            hold = Hold([*outputs, *(shown or ()), *reads])
            end = hold.release if entry is None else both(entry.finish, hold.release)
            work = group.start(call, both(end, request.finish), terms.limit)
            work.add_done_callback(end)  # where it has failed
            counted(metrics, call, work, began)
        else:
            work = Work()
            try:
                group.run(call, terms.limit)
                outcome = request.finish()
            except BaseException as error:
                count_failure(metrics, call, began, error)
                if isinstance(error, Timeout):
                    raise in_their_words(error) from None
                raise
            work.succeed(outcome)
            count(metrics, call, began)
        made = PotluckWork(work, outputs)
        if terms.is_async and sum(each.numel() for each in outputs) <= SMALL:
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
        """The same operation on each, where they cannot travel as one vector."""
        pairs = zip(outputs, inputs, strict=True)
        return AllWork([operation(output, source, opts) for output, source in pairs])

    def _lend(self, tensors: Sequence[torch.Tensor], access: Access) -> Lease:
        """Some tensors as one vector of numpy."""
        bundle = Bundle(tensors, access)
        lease = lend(bundle.vector, Access.READ)
        return lease._replace(give_back=bundle.give_back)

    def _check_lengths(self, name: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != self._place.world_size:
            size = self._place.world_size
            msg = f"{name} needs one tensor for each of the {size} ranks, not {len(tensors)}"
            raise ValueError(msg)


def as_list(tensors: Any) -> list[torch.Tensor]:
    """A tensor, or a list of them, as a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def nothing() -> None:
    """Nothing remains to be done."""


def both(first: Callable[[], object], second: Callable[[], Any]) -> Callable[[], Any]:
    """One after the other; what the second returns."""

    def finish() -> Any:
        first()
        return second()

    return finish


# --------------------------------------------------------------------------------------------------
# Operations of the process group in which every rank has something for every other.

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
        call.check_type("The output", into, reads.flat.dtype)
        world = self._place.world_size
        if is_even:
            matrix = [sends] * world
        else:  # the ranks tell each other, which is waited for
            told = self._context.all_gather(np.array(sends, np.int64), timeout=terms.limit)
            matrix = told.reshape(world, world).tolist()
        task = Task.exchange(matrix)
        call.check_size("The output", into, sum(line[self._place.rank] for line in matrix))
        request = call.request(self._place, task, (reads.flat, into.flat), into.give_back)
        return self._launch("all_to_all", request, outputs, terms, inputs)

    def barrier(  # type: ignore[override]
        self, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Be done when every rank has called this."""
        cell = np.zeros(1, np.uint8)
        task = self._place.whole(Collective.BARRIER, 1)
        request = call.request(self._place, task, (cell, cell), nothing, reducer=_BARRIER)
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


# --------------------------------------------------------------------------------------------------
# Messages of the process group: from one rank to another, or from whoever sends first.


@untraced_methods
class MessagingGroup(GroupBase):
    """Sends and receives; all of them are under way when they return."""

    def __init__(self, backend: Any, timeout: timedelta | None, group_id: str = "") -> None:
        super().__init__(backend, timeout, group_id)
        self._receives = AnySource(backend)

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> dist.Work:
        """Start sending; the tensor must not change until the work is done."""
        (tensor,) = tensors
        entry = record(f"{NAME}:send", [tensor])
        hold, lease = Hold([tensor]), self._lend([tensor], Access.READ)
        operation = self._context.post_send(lease.flat.view("u1"), dst, tag=tag)
        transfer = Transfer(operation, self._context.progress, both(hold.release, lease.give_back))
        return self._under_way(transfer, tensor, entry, hold)

    def recv(self, tensors: Sequence[torch.Tensor], src: int, tag: int = 0) -> dist.Work:
        """Start receiving from a rank; the tensor must not be used until the work is done."""
        (tensor,) = tensors
        entry = record(f"{NAME}:recv", [tensor])
        hold = Hold([tensor])
        lease = self._lend([tensor], Access.UPDATE)  # a shorter message leaves the rest as it is
        operation = self._receives.post(lease.flat.view("u1"), src, tag)
        transfer = Transfer(operation, self._context.progress, both(hold.release, lease.give_back))
        return self._under_way(transfer, tensor, entry, hold, lambda: src)

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> dist.Work:
        """Start receiving from whoever sends first."""
        (tensor,) = tensors
        entry = record(f"{NAME}:recvAnySource", [tensor])
        hold, lease = Hold([tensor]), self._lend([tensor], Access.UPDATE)
        finish = both(hold.release, lease.give_back)
        transfer = AnyTransfer(self._receives, lease.flat.view("u1"), tag, finish)
        return self._under_way(transfer, tensor, entry, hold, lambda: transfer.source)

    def _under_way(
        self,
        transfer: Work[Any],
        tensor: torch.Tensor,
        entry: Record | None,
        hold: Hold,
        source: Callable[[], int] | None = None,
    ) -> dist.Work:
        transfer.add_done_callback(hold.release)  # where it has failed
        if entry is not None:
            self._courier.carry(Watched(transfer, entry))
        elif not transfer.done:
            self._courier.carry(transfer)
        work = PotluckWork(
            transfer,
            [tensor],
            limit=self._context.timeout,
            source=source,
            after=None if entry is None else entry.ended,
        )
        return self._joined(work)


# --------------------------------------------------------------------------------------------------
# Operations of the process group in which values only move.

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
        source = lease.flat if is_root else call.nothing(lease.flat.dtype)
        request = call.request(self._place, task, (source, lease.flat), lease.give_back)
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
        call.check_type("The output", into, reads.flat.dtype)
        task = self._place.blocks(Collective.ALL_GATHER, counts, 1)
        call.check_size("The input", reads, counts[self._place.rank])
        call.check_size("The output", into, sum(counts))
        request = call.request(self._place, task, (reads.flat, into.flat), into.give_back)
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
            memory = reads.flat, call.nothing(reads.flat.dtype)
            made = call.request(self._place, task, memory, reads.give_back)
            return self._launch("gather", made, [], terms, [source])
        into_list = _flattened(outputs)
        self._check_lengths("gather", into_list)
        into = self._lend(into_list, Access.WRITE)
        call.check_type("The output", into, reads.flat.dtype)
        task = self._place.blocks(Collective.GATHER, counts_of(into_list), 1, terms.root)
        made = call.request(self._place, task, (reads.flat, into.flat), into.give_back)
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
            parts, source = listed, call.nothing(into.flat.dtype)
        else:
            parts = _flattened(inputs)
            self._check_lengths("scatter", parts)
            reads = self._lend(parts, Access.READ)
            call.check_type("The output", into, reads.flat.dtype)
            counts, source = counts_of(parts), reads.flat
        task = self._place.blocks(Collective.SCATTER, counts, 1, terms.root)
        call.check_size("The output", into, counts[self._place.rank])
        request = call.request(self._place, task, (source, into.flat), into.give_back)
        return self._launch("scatter", request, listed, terms, parts)


def _flattened(lists: Any) -> Tensors:
    """PyTorch passes a list, or a list with one list in it."""
    if lists and not isinstance(lists[0], torch.Tensor):
        return list(lists[0])
    return list(lists)


# --------------------------------------------------------------------------------------------------
# PyTorch's reductions as ours.

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
    """How values of the ranks become one."""

    op: ReduceOp
    factor: float | torch.Tensor | None = None
    """What every rank multiplies its values by first."""


def read_reduction(op: Any) -> Reduction:
    """What one of PyTorch's reductions means.

    >>> read_reduction(dist.ReduceOp.AVG).op
    <ReduceOp.MEAN: 'mean'>
    """
    kind, factor = op, None
    if isinstance(op, dist.ReduceOp) and not isinstance(op, _KINDS):  # which passes for one too
        kind, factor = cast("Any", op).__getstate__()
    ours = _SAME.get(kind)
    if ours is None:
        raise UnsupportedOperation(f"{op!r} is no reduction that this backend knows")
    return Reduction(ours, factor)


# --------------------------------------------------------------------------------------------------
# Sums of sparse tensors: the ranks exchange indices and values, and each adds them up.


def sum_sparse(context: DistributedContext, tensor: torch.Tensor, op: ReduceOp) -> None:
    """Replace a sparse tensor by the sum over all ranks, which is coalesced; in order of ranks."""
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedOperation(
            f"Tensors in the layout {tensor.layout} cannot be summed",
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


# --------------------------------------------------------------------------------------------------
# Operations of the process group in which values become one.


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
        request = call.request(
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
        target = lease.flat if is_root else call.nothing(lease.flat.dtype)
        request = call.request(
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
        call.check_type("The output", into, reads.flat.dtype)
        task = self._place.blocks(Collective.REDUCE_SCATTER, counts, 1)
        call.check_size("The output", into, counts[self._place.rank])
        request = call.request(
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
        return lease, call.reducer_for(kind, lease, truncate=True)


# --------------------------------------------------------------------------------------------------


class ProcessGroup(ReducingGroup, MovingGroup, ExchangingGroup, MessagingGroup):
    """One rank of a group, as ``torch.distributed`` wants it."""


def create(opts: Any, pg_options: Any = None) -> ProcessGroup:
    """Make the group that PyTorch asks for; called by ``init_process_group`` and ``new_group``."""
    backend = _backend_for(opts, Options.read(pg_options))
    if isinstance(backend, SimulatedBackend):  # alone: the others are attended when they form
        attend(backend)
    group = ProcessGroup(backend, opts.timeout, opts.group_id)
    store = store_below(opts.store)
    if store is not None and store.backend is backend:
        group.keep(store)
    return group


def _backend_for(opts: Any, options: Options) -> Backend:
    """A part of the group that is there already, or a group of its own."""
    members = list(opts.global_ranks_in_group)
    world = dist.group.WORLD
    if members and isinstance(world, ProcessGroup):
        return SubBackend(world.context.innermost, members, name=opts.group_id, in_order=True)
    store = store_below(opts.store)
    if store is not None:  # they have met already
        return SubBackend(store.backend, members, in_order=True) if members else store.backend
    timeout: timedelta = opts.timeout
    return form(opts.store, opts.group_rank, opts.group_size, timeout, options)


def register() -> None:
    """Make the name known to PyTorch; once is enough, twice does no harm."""
    register_scheme()
    if NAME.upper() not in dist.Backend._plugins:  # noqa: SLF001 - there is no other way to ask
        dist.Backend.register_backend(NAME, create, extended_api=True, devices=["cpu"])
