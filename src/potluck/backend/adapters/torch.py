"""TorchBackend: the ranks of a PyTorch process group, whatever engine it runs on.

Gloo, NCCL, UCC, MPI: a process group sends and receives tensors.  Neither can wait for a message of
unknown size, nor for one of several peers, so every message is preceded by its size, and each peer
has two threads, which sleep in the engine.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import itertools
import time
import weakref
from collections.abc import Iterator
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from potluck._process import ForkSafeLock
from potluck.backend.adapters.base import CHUNK, EngineBackend, EngineEndpoint, is_special
from potluck.errors import BackendUnavailable, DistributedError, PeerLost, Timeout
from potluck.schedule.reduce import ReduceOp

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch
    import torch.distributed as dist


END = -1
"""Instead of a size: nothing more follows."""

FIRST_TAG = 0x504F  # of those that other users of the group are unlikely to use; 31 bits are left

_TYPES = frozenset(("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64"))
"""Those that every engine can add up."""

_OPERATIONS = {"sum": "SUM", "mean": "SUM", "product": "PRODUCT", "min": "MIN", "max": "MAX"}

_LOST = (RuntimeError, DistributedError)
"""What a process group raises when a peer is gone: engines of PyTorch's own, and ours."""

_PATIENCE = dt.timedelta(days=365)
"""A link may have nothing to say for long; the group's own limit would take that for a loss."""

_counts: weakref.WeakKeyDictionary[Any, itertools.count[int]] = weakref.WeakKeyDictionary()
_counting = ForkSafeLock()


class TorchBackend(EngineBackend):
    """The ranks of ``process_group``, the default one unless given.

    Every rank of the group makes one, in the same order if there are several.  ``device`` is where
    tensors must be for this group: the processor, or the current accelerator if the group's engine
    knows no other.  Closing leaves the process group open.

    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> with TorchBackend() as backend:
    ...     backend.rank, backend.world_size
    (0, 1)
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        torch = _load()
        group = process_group if process_group is not None else _default_group()
        self._group = group
        self.engine = _name_of(group)
        self._device = torch.device(device) if device is not None else _device_of(group)
        with _counting:
            number = next(_counts.setdefault(group, itertools.count()))
        self._tag = FIRST_TAG + number
        super().__init__(group.rank(), group.size())
        for terminal in self._terminals.values():
            self._start(partial(self._send_all, terminal), "engine-out")
            self._start(partial(self._receive_all, terminal), "engine-in")

    @property
    def device(self) -> torch.device:
        """Where this group wants its tensors."""
        return self._device

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The group below."""
        return self._group

    def as_nccl_backend(self) -> TorchBackend | None:
        """This backend if its tensors travel by NCCL; None with Gloo and every other engine."""
        return self if _engine_on(self.engine, self._device.type) == "nccl" else None

    # -- messages ------------------------------------------------------------------------------

    def _send_all(self, terminal: EngineEndpoint) -> None:
        """Send what the mesh writes, until it ends."""
        import torch

        try:
            while chunk := terminal.take():
                self._send(terminal.peer, len(chunk))
                payload = torch.frombuffer(chunk, dtype=torch.uint8).to(self._device)
                self._group.send([payload], terminal.peer, self._tag).wait(_PATIENCE)
            self._send(terminal.peer, END)
        except _LOST:
            terminal.close()  # the engine has lost it

    def _send(self, peer: int, size: int) -> None:
        import torch

        head = torch.tensor([size], dtype=torch.int64, device=self._device)
        self._group.send([head], peer, self._tag).wait(_PATIENCE)

    def _receive_all(self, terminal: EngineEndpoint) -> None:
        """Give the mesh what comes in, until the peer or the mesh ends."""
        import torch

        head = torch.zeros(1, dtype=torch.int64, device=self._device)
        room = torch.empty(CHUNK, dtype=torch.uint8, device=self._device)
        try:
            while True:
                self._group.recv([head], terminal.peer, self._tag).wait(_PATIENCE)
                size = int(head[0])
                if not 0 < size <= CHUNK:
                    break
                self._group.recv([room[:size]], terminal.peer, self._tag).wait(_PATIENCE)
                terminal.put(memoryview(room[:size].cpu().numpy()))  # type: ignore[arg-type]
        except _LOST:
            terminal.close()
        else:
            (terminal.finish if size == END else terminal.close)()

    # -- what the engine does itself -----------------------------------------------------------

    def all_reduce_by_engine(
        self, array: npt.NDArray[np.generic], op: ReduceOp | str, timeout: float | None
    ) -> bool:
        """Combine in place, if the engine knows the type and the operation."""
        name = ReduceOp.named(op).value
        if array.dtype.name not in _TYPES or is_special(array.dtype, name):
            return False
        with self._on_device(array) as tensor:
            return self.all_reduce_tensor(tensor, name, timeout)

    def all_reduce_tensor(
        self, tensor: torch.Tensor, op: ReduceOp | str, timeout: float | None
    ) -> bool:
        """Combine a tensor where it is; False if the engine cannot."""
        import torch.distributed as dist

        name = ReduceOp.named(op).value
        if name not in _OPERATIONS:
            return False
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(getattr(dist.ReduceOp, _OPERATIONS[name]))
        self._await(self._group.allreduce([tensor], options), timeout, "all-reduce")
        if name == "mean":
            tensor /= self.world_size
        return True

    def broadcast_by_engine(
        self, array: npt.NDArray[np.generic], root: int, timeout: float | None
    ) -> bool:
        """Bring the root's values to all ranks, in place."""
        if array.dtype.name not in _TYPES:
            return False
        with self._on_device(array) as tensor:
            return self.broadcast_tensor(tensor, root, timeout)

    def broadcast_tensor(self, tensor: torch.Tensor, root: int, timeout: float | None) -> bool:
        """Bring the root's tensor to all ranks, where it is."""
        import torch.distributed as dist

        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        self._await(self._group.broadcast([tensor], options), timeout, "broadcast")
        return True

    @contextlib.contextmanager
    def _on_device(self, array: npt.NDArray[np.generic]) -> Iterator[torch.Tensor]:
        """An array as a tensor where the group wants it; its new content is brought back."""
        here = _as_tensor(array)
        tensor = here.to(self._device)
        yield tensor
        if tensor is not here:
            here.copy_(tensor)

    def _await(self, work: dist.Work, timeout: float | None, what: str) -> None:
        started = time.monotonic()
        limit = dt.timedelta(0) if timeout is None else dt.timedelta(seconds=timeout)
        try:
            work.wait(limit)
        except RuntimeError as error:
            raise self._failure(error, timeout, started, what) from None

    def _failure(
        self, error: RuntimeError, timeout: float | None, started: float, what: str
    ) -> DistributedError:
        if timeout is not None and time.monotonic() - started >= timeout:
            return Timeout(
                f"The {what} by {self.engine} on rank {self.rank} took more than {timeout:g} s",
                seconds=timeout,
            )
        return PeerLost(
            f"The {what} by {self.engine} failed on rank {self.rank}",
            cause=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="Another rank may have ended: check the output of the other ranks.",
        )


def _load() -> ModuleType:
    try:
        import torch.distributed
    except ImportError as error:
        raise BackendUnavailable(
            "PyTorch is not installed", cause=str(error), hint="Run pip install 'potluck[torch]'."
        ) from None
    if not torch.distributed.is_available():
        raise BackendUnavailable("This build of PyTorch has no torch.distributed")
    return torch


def _default_group() -> dist.ProcessGroup:
    import torch.distributed as dist

    if not dist.is_initialized():
        raise BackendUnavailable(
            "PyTorch has no process group yet",
            hint="Call torch.distributed.init_process_group first, or pass a group.",
        )
    group = dist.group.WORLD
    assert group is not None
    return group


def _name_of(group: dist.ProcessGroup) -> str:
    import torch.distributed as dist

    try:
        return str(dist.get_backend(group))
    except (ValueError, RuntimeError):  # made by hand, not registered
        return str(group.name())


def _engine_on(names: str, device: str) -> str:
    """The engine of a device where there are several, such as ``cpu:gloo,cuda:nccl``.

    >>> _engine_on("cpu:gloo,cuda:nccl", "cpu"), _engine_on("nccl", "cuda")
    ('gloo', 'nccl')
    """
    pairs = dict(part.split(":", 1) for part in names.split(",") if ":" in part)
    return pairs.get(device, names).strip().lower()


def _device_of(group: dist.ProcessGroup) -> torch.device:
    """Where the group wants its tensors: on the processor, if it takes them there."""
    import torch

    kinds = {device.type for device in group._device_types}  # noqa: SLF001 - there is no other way
    if "cpu" in kinds or not kinds:
        return torch.device("cpu")
    kind = min(kinds)
    return torch.device(kind, torch.accelerator.current_device_index())


def _as_tensor(array: npt.NDArray[np.generic]) -> torch.Tensor:
    """The same memory as a tensor; numpy's bfloat16 is strange to PyTorch."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
