"""A hook for DistributedDataParallel with which gradients travel compressed.

Annotations here are no texts (there is no ``from __future__ import annotations``):
DistributedDataParallel compares them with types when a hook is registered.
"""

import hashlib
import weakref
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from potluck.collective.call import Work
from potluck.collective.context import DistributedContext
from potluck.compression.compressor import GradientCompressor
from potluck.compression.powersgd import matrix_shape
from potluck.compression.strategy import CompressionStrategy
from potluck.torch.process_group import ProcessGroup
from potluck.torch.work import future_of, untraced_methods

Tensors = list[torch.Tensor]
Future = torch.futures.Future[torch.Tensor]

_ARRAYS = ("residuals", "kept")
"""What a compressor's state has of arrays, by name."""


@untraced_methods
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
        self._parameters = _Register()
        self._names: dict[int, str] = {}
        """The bucket that holds a parameter, by the parameter's number."""

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
        """Buckets are cut anew after the first step: what an earlier cut left is forgotten.

        A bucket is what it holds: another order of the same parameters is another bucket.
        """
        numbers = self._parameters.numbers(bucket.parameters())
        order = hashlib.blake2b(array("Q", numbers).tobytes(), digest_size=8).hexdigest()
        name = f"bucket {bucket.index()} of {bucket.buffer().numel()}, order {order}"
        if self._names.get(numbers[0]) != name:
            for before in {self._names.get(number) for number in numbers} - {None, name}:
                self.compressor.residuals.pop(str(before), None)
                self.compressor.kept.pop(str(before), None)
            self._names |= dict.fromkeys(numbers, name)
        return name

    def _average_matrices(
        self, context: DistributedContext, bucket: GradBucket, rank: int
    ) -> Future:
        """Each gradient is a matrix of its own; those that would not become smaller go together."""
        plain: Tensors = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        works: list[Work[torch.Tensor]] = []
        numbers = self._parameters.numbers(bucket.parameters())
        for number, gradient in zip(numbers, bucket.gradients(), strict=True):
            if matrix_shape(gradient.shape, rank) is None:
                plain.append(gradient)
                continue
            values = gradient if gradient.dtype is torch.float32 else gradient.float()
            copies.append((values, gradient))
            tensor = self.compressor.tensor(f"gradient {number} of {tuple(gradient.shape)}")
            works.append(context.all_reduce(values, "mean", compression=tensor, async_op=True))
        joined = torch.cat([gradient.reshape(-1) for gradient in plain]) if plain else None
        if joined is not None:
            works.append(context.all_reduce(joined, "mean", async_op=True))
        buffer = bucket.buffer()

        def finish() -> torch.Tensor:
            for work in works:  # the last is done, so all are; one that failed says so here
                work.result()
            for values, gradient in copies:
                _brought_home(values, gradient)
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
        """What was left behind so far, to be saved with a checkpoint: numbers, texts, tensors."""
        state = self.compressor.state_dict()
        for kind in _ARRAYS:
            state[kind] = {name: torch.from_numpy(each) for name, each in state[kind].items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from what was saved.

        A new DistributedDataParallel cuts its first buckets otherwise than those that were saved,
        which are needed from its second step on; matrices are needed, and found, at once.
        """
        loaded = dict(state)
        for kind in _ARRAYS:
            if isinstance(saved := loaded.get(kind), Mapping):
                loaded[kind] = {name: _as_array(each) for name, each in saved.items()}
        self.compressor.load_state_dict(loaded)
        self._names.clear()  # whatever was saved is to stay until it is needed


class _Register:
    """Parameters by number, in the order of their first appearance.

    That is the same on all ranks and, for the same model, in every run: buckets are filled in the
    same order.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._count = 0

    def numbers(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """The numbers of some parameters; new ones get the next."""
        return [self._number(each) for each in parameters]

    def _number(self, parameter: torch.Tensor) -> int:
        entry = self._known.get(id(parameter))
        if entry is None or entry[0]() is not parameter:  # of one that is gone
            entry = weakref.ref(parameter), self._count
            self._known[id(parameter)] = entry
            self._count += 1
        return entry[1]


def compress_hook(
    compression: str | CompressionStrategy | GradientCompressor = "auto",
    *,
    process_group: dist.ProcessGroup | None = None,
) -> CompressHook:
    """A hook that averages gradients in fewer bytes, and adds what is lost to the next step.

    ``compression`` is a name (``"int8"``, ``"bfloat16"``, ``"topk:0.01"``, ``"powersgd:4"`` ...),
    ``"auto"`` for whatever pays on the links and loses less than 2 % of a step,
    ``"auto:aggressive"`` for whatever pays, or a :class:`~potluck.GradientCompressor`.

    Register it with ``model.register_comm_hook(None, compress_hook("int8"))``.
    """
    if not isinstance(compression, GradientCompressor):
        compression = GradientCompressor(compression)
    return CompressHook(compression, process_group)


def _brought_home(values: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    return buffer if values is buffer else buffer.copy_(values)


def _as_array(saved: Any) -> Any:
    """What was saved as a tensor, for those who know arrays; anything else is theirs to judge."""
    return saved.detach().cpu().numpy() if isinstance(saved, torch.Tensor) else saved
