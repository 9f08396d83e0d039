"""Tensors on a device: through the engine that knows the device, or through the host's memory."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

import torch

from potluck._types import Seconds, in_seconds
from potluck.backend.adapters.hybrid import HybridBackend
from potluck.backend.adapters.torch import TorchBackend
from potluck.collective.context import DistributedContext, Lifted

if TYPE_CHECKING:
    from potluck.backend.base import Backend


def gpu_allreduce(
    tensor: torch.Tensor, backend: Backend, op: str = "sum", *, timeout: Seconds | None = None
) -> torch.Tensor:
    """Combine the ranks' tensors in place, where they are if the engine below can.

    ``backend`` is any backend or context.  Without an engine for the tensor's device it goes
    through the host's memory, and a warning says so once.
    """
    engine = _engine_for(tensor, backend)
    if engine is None or not engine.all_reduce_tensor(tensor, op, in_seconds(timeout)):
        _warn(tensor.device)
        _context(backend).all_reduce(tensor, op, timeout=timeout)
    return tensor


def gpu_broadcast(
    tensor: torch.Tensor, backend: Backend, root: int = 0, *, timeout: Seconds | None = None
) -> torch.Tensor:
    """Bring the root's tensor to all ranks, in place, as :func:`gpu_allreduce` does."""
    engine = _engine_for(tensor, backend)
    if engine is None or not engine.broadcast_tensor(tensor, root, in_seconds(timeout)):
        _warn(tensor.device)
        _context(backend).broadcast(tensor, root, timeout=timeout)
    return tensor


def _engine_for(tensor: torch.Tensor, backend: Backend) -> TorchBackend | None:
    """The engine that takes the tensor where it is."""
    below = getattr(backend, "innermost", backend)
    engine = below.engine if isinstance(below, HybridBackend) else below
    if not isinstance(engine, TorchBackend) or engine.device.type != tensor.device.type:
        return None
    return engine if tensor.is_contiguous() else None


def _context(backend: Backend) -> Lifted:
    return backend if isinstance(backend, Lifted) else DistributedContext(backend)


def _warn(device: torch.device) -> None:
    if device.type != "cpu":
        _warn_once(device.type)


@functools.cache
def _warn_once(kind: str) -> None:
    warnings.warn(
        f"Tensors on {kind} travel through the host's memory: no engine below takes them there. "
        "TorchBackend or HybridBackend over NCCL would.",
        stacklevel=4,
    )
