"""A hook for DistributedDataParallel with which gradients travel compressed.

Annotations here are no texts (there is no ``from __future__ import annotations``):
DistributedDataParallel compares them with types when a hook is registered.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from potluck.collective.compression.compressor import GradientCompressor
from potluck.collective.compression.powersgd import matrix_shape
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.runtime.context import DistributedContext
from potluck.runtime.work import Work
from potluck.training.process_group import ProcessGroup
from potluck.training.work import future_of

__all__ = ["CompressHook", "compress_hook"]

Tensors = list[torch.Tensor]
Future = torch.futures.Future[torch.Tensor]


class CompressHook:
    """Averages the gradients of a bucket in fewer bytes; see :func:`compress_hook`."""

    def __init__(
        self, compressor: GradientCompressor, process_group: dist.ProcessGroup | None = None
    ) -> None:
        # DistributedDataParallel logs what functions are called.
        self.__name__ = self.__qualname__ = "compress_hook"
        self.compressor = compressor
        """What was left behind so far."""
        self._group = process_group
        self._names: dict[int, str] = {}

    def __call__(self, state: object, bucket: GradBucket) -> Future:
        """Average one bucket."""
        del state
        context, strategy = self._context(), self.compressor.strategy
        if strategy.method == "powersgd":
            return self._average_matrices(context, bucket, int(strategy.parameter))
        buffer = bucket.buffer()
        name = self._name(bucket)
        values = buffer if buffer.dtype is torch.float32 else buffer.float()
        compression = self.compressor.tensor(name)
        work = context.all_reduce(values, "mean", compression=compression, async_op=True)
        return future_of(work, lambda: _brought_home(values, buffer))

    def _name(self, bucket: GradBucket) -> str:
        """Buckets are cut anew after the first step: what an earlier cut left is forgotten."""
        index = bucket.index()
        name = f"bucket {index} of {bucket.buffer().numel()}"
        before = self._names.get(index)
        if before != name:
            if before is not None:
                self.compressor.residuals.pop(before, None)
                self.compressor.kept.pop(before, None)
            self._names[index] = name
        return name

    def _average_matrices(
        self, context: DistributedContext, bucket: GradBucket, rank: int
    ) -> Future:
        """Each gradient is a matrix of its own; those that would not become smaller go together."""
        plain: Tensors = []
        works: list[Work[torch.Tensor]] = []
        for place, gradient in enumerate(bucket.gradients()):
            if matrix_shape(gradient.shape, rank) is None or gradient.dtype is not torch.float32:
                plain.append(gradient)
                continue
            name = f"bucket {bucket.index()}, gradient {place} of {tuple(gradient.shape)}"
            tensor = self.compressor.tensor(name)
            works.append(context.all_reduce(gradient, "mean", compression=tensor, async_op=True))
        joined = torch.cat([gradient.reshape(-1) for gradient in plain]) if plain else None
        if joined is not None:
            works.append(context.all_reduce(joined, "mean", async_op=True))
        buffer = bucket.buffer()

        def finish() -> torch.Tensor:
            for work in works:  # the last is done, so all are; one that failed says so here
                work.result()
            if joined is not None:
                parts = torch.split(joined, [gradient.numel() for gradient in plain])
                for gradient, part in zip(plain, parts, strict=True):
                    gradient.copy_(part.view(gradient.shape))
            return buffer

        return future_of(works[-1], finish)

    def _context(self) -> DistributedContext:
        group = dist.group.WORLD if self._group is None else self._group
        if not isinstance(group, ProcessGroup):
            msg = (
                "compress_hook needs a process group of the backend 'potluck', not of "
                f"{dist.get_backend(group)!r}: pass it as process_group="
            )
            raise TypeError(msg)
        return group.context

    def state_dict(self) -> dict[str, Any]:
        """What was left behind so far, to be saved with a checkpoint."""
        return {**self.compressor.state_dict(), "names": dict(self._names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved."""
        kept = dict(state)
        self._names = dict(kept.pop("names"))
        self.compressor.load_state_dict(kept)


def compress_hook(
    compression: str | CompressionStrategy | GradientCompressor = "auto",
    *,
    process_group: dist.ProcessGroup | None = None,
) -> CompressHook:
    """A hook that averages gradients in fewer bytes, and adds what is lost to the next step.

    ``compression`` is a name (``"int8"``, ``"bfloat16"``, ``"topk:0.01"``, ``"powersgd:4"`` ...),
    ``"auto"`` for whatever pays on the links, or a :class:`~potluck.GradientCompressor`.

    Register it with ``model.register_comm_hook(None, compress_hook("int8"))``.
    """
    if not isinstance(compression, GradientCompressor):
        compression = GradientCompressor(compression)
    return CompressHook(compression, process_group)


def _brought_home(values: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return buffer if values is buffer else buffer.copy_(values)
