"""Compressing: an all-reduce whose values travel in fewer bytes."""

from __future__ import annotations

from typing import Any, TypeAlias

from potluck.arrays.base import Lease
from potluck.collective.compression.choice import Choice
from potluck.collective.compression.compressor import GradientCompressor, TensorCompressor
from potluck.collective.compression.strategy import CompressionStrategy, QuantizationType
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.strategies import Strategy
from potluck.errors import UnsupportedOperation
from potluck.metrics import DistributedMetrics
from potluck.runtime.choices import Choices
from potluck.runtime.compressed_reduction import COMPRESSIBLE, CompressedReduction
from potluck.runtime.launching import Launching
from potluck.runtime.requests import Request
from potluck.vocabulary import Seconds

__all__ = ["Compressing", "Compression", "read_compression"]

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
            f"{strategy.method} needs a memory from one step to the next: it leaves most behind",
            hint=f"Pass compression=GradientCompressor({str(strategy)!r}), the same every time.",
        )
    return GradientCompressor(strategy, error_feedback=False).tensor("")


class Compressing(Launching):
    """How compressed sums are made."""

    @property
    def compression_choices(self) -> list[Choice]:
        """What ``"auto"`` stands for in this group at present, with reasons; the latest last.

        There is one for each size of arrays; those below 256 KiB are left as they are.
        """
        return Choices.of(self.group).made

    def _reduce_compressed(
        self,
        memory: tuple[Lease, Lease],
        reducer: Reducer,
        tensor: TensorCompressor,
        *,
        strategy: Strategy | None,
        timeout: Seconds | None,
        async_op: bool,
    ) -> Any:
        """Reduce what the first lease lends into the second."""
        reads, into = memory
        _check(reads, reducer, strategy, tensor.compressor.strategy)
        # The group as it is now: that of a cluster may be another when the turn comes.
        metrics: DistributedMetrics | None = getattr(self, "metrics", None)
        made = CompressedReduction(
            *(self.group, self._place, reads, into, reducer, tensor),
            strategy=strategy,
            counts=None if metrics is None else metrics.compression,
        )
        return self._launch(Request(made.call(), into.give_back), timeout, async_op=async_op)


def _check(
    reads: Lease, reducer: Reducer, strategy: Strategy | None, wanted: CompressionStrategy
) -> None:
    if not wanted.is_lossy:
        return
    if reads.flat.dtype not in COMPRESSIBLE:
        names = ", ".join(dtype.name for dtype in COMPRESSIBLE)
        raise UnsupportedOperation(
            f"Compression by {wanted} is for {names}, not {reads.flat.dtype}",
            hint="Convert the array to float32, or leave compression= out.",
        )
    if reducer.op not in {ReduceOp.SUM, ReduceOp.MEAN}:
        raise UnsupportedOperation(
            f"Compression by {wanted} is for sums and means, not {reducer.op.value}",
            hint="Leave compression= out.",
        )
    if strategy is not None and strategy.algorithm not in {None, "direct"}:
        raise UnsupportedOperation(
            f"Compressed values are not exchanged by {strategy.algorithm}",
            hint="Leave strategy= out.",
        )
