"""The frame of the process group: who we are in it, how operations start, and how it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from potluck.arrays.base import Access, Lease
from potluck.arrays.lending import lend
from potluck.errors import Timeout
from potluck.runtime.context import DistributedContext
from potluck.runtime.counting import count, count_failure, counted
from potluck.runtime.courier import Courier
from potluck.runtime.metrics_endpoint import process_metrics
from potluck.runtime.requests import Place, Request
from potluck.runtime.work import Work
from potluck.training.holding import Hold
from potluck.training.profiling import record
from potluck.training.tensors import Bundle
from potluck.training.work import AllWork, PotluckWork, in_their_words, seconds

if TYPE_CHECKING:
    from potluck.backend.base import Backend

__all__ = ["NAME", "GroupBase", "Terms", "both", "read_terms"]

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
