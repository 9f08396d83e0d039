"""One all-reduce with compression, from the moment its turn has come.

Whatever it needs of the compressor's memory is read and written in its turn, so operations on the
same tensor that are started one after the other find what they would find if each was waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from potluck.arrays.base import Array, Lease
from potluck.collective.compression.base import Floats
from potluck.collective.compression.codecs import CODECS
from potluck.collective.compression.compressor import GradientCompressor, TensorCompressor
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.collective.reduce import BFLOAT16, ReduceOp, Reducer, quiet
from potluck.collective.strategies import Strategy
from potluck.collective.task import Collective, Task
from potluck.metrics.sections import CompressionMetrics
from potluck.runtime.call import Call, Purpose
from potluck.runtime.choices import Choices
from potluck.runtime.compressed import Exchange, low_rank_sum, random_sum, sparse_sum
from potluck.runtime.group import Group
from potluck.runtime.requests import Place

__all__ = ["COMPRESSIBLE", "CompressedReduction"]

FLOAT32 = np.dtype(np.float32)

COMPRESSIBLE = (FLOAT32, np.dtype(np.float16), BFLOAT16)
"""What can be compressed; the 16-bit types are worked on as float32."""

NOTHING: Floats = np.empty(0, np.float32)
"""What is left behind where everything was sent."""

_PURPOSES = {"topk": Purpose.TOP_K, "random": Purpose.RANDOM_K, "powersgd": Purpose.POWER_SGD}

Run: TypeAlias = Callable[[Call], None]


@dataclass(frozen=True, slots=True)
class CompressedReduction:
    """What shall be reduced, where the result goes, and how it travels."""

    group: Group
    place: Place
    reads: Lease
    into: Lease
    reducer: Reducer
    tensor: TensorCompressor

    strategy: Strategy | None = None
    """How values that are not compressed travel, if the caller says so."""
    counts: CompressionMetrics | None = None
    """Where it is counted."""

    def call(self) -> Call:
        """What a group is to do."""
        source, target = self.reads.flat, self.into.flat
        return Call(self._task(source.size), source, target, self.reducer, routine=self)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.place.world_size

    def _task(self, count: int) -> Task:
        return self.place.whole(Collective.ALL_REDUCE, count)

    def _sum(self, source: Array, target: Array) -> Call:
        if source is not target and np.may_share_memory(source, target):
            source = source.copy()
        reducer = Reducer.of(self.reducer.op, source.dtype)
        return Call(self._task(source.size), source, target, reducer)

    def __call__(self, run: Run) -> None:
        """Do it, by a function that runs a collective."""
        compressor, name = self.tensor
        try:
            with quiet():
                compressor = self._settled(run)
                self._reduce(run, compressor)
        except BaseException:
            compressor.fail(name)
            raise
        compressor.succeed(name)

    def _settled(self, run: Run) -> GradientCompressor:
        """The compressor, with a choice where the caller left it open."""
        compressor, _ = self.tensor
        if not compressor.strategy.is_auto or self.world_size == 1:
            return compressor
        flat = self.reads.flat
        aggressive = compressor.strategy == CompressionStrategy.AUTO_AGGRESSIVE
        key = (flat.size, flat.itemsize, compressor.error_feedback, aggressive)
        exchange = Exchange(self.world_size, run, Purpose.AUTO_COMPRESSION)
        return compressor.by(Choices.of(self.group).settle(self.group, exchange, key))

    def _reduce(self, run: Run, compressor: GradientCompressor) -> None:
        is_plain = not compressor.strategy.is_lossy or self.world_size == 1
        source, target = self.reads.flat, self.into.flat
        if is_plain and not compressor.has_residual(self.tensor.name):
            run(replace(self._sum(source, target), strategy=self.strategy))
            self._note(compressor, source.nbytes)
            return
        if source.dtype != FLOAT32:
            source = target = source.astype(np.float32)
        if is_plain:
            sent = self._everything(run, compressor, source, target)
        elif compressor.strategy.quantization is not None:
            sent = self._quantised(run, compressor, source, target)
        else:
            sent = self._several(run, compressor, source, target)
        if target is not self.into.flat:
            np.copyto(self.into.flat, target, casting="unsafe")
        self._note(compressor, sent)

    def _note(self, compressor: GradientCompressor, sent: int) -> None:
        raw = self.reads.flat.nbytes
        compressor.note(raw, sent)
        if self.counts is not None:
            self.counts.note(raw, sent)

    def _everything(
        self, run: Run, compressor: GradientCompressor, source: Floats, target: Floats
    ) -> int:
        """Uncompressed, with what was left behind before."""
        run(self._sum(compressor.compensated(source, self.tensor.name, target), target))
        compressor.residuals[self.tensor.name] = NOTHING
        return source.nbytes

    def _quantised(
        self, run: Run, compressor: GradientCompressor, source: Floats, target: Floats
    ) -> int:
        """One collective with a codec."""
        kind, name = compressor.strategy.quantization, self.tensor.name
        assert kind is not None
        residual = None
        if compressor.error_feedback:
            source = compressor.compensated(source, name, target)
            residual = compressor.residuals.room(name, source.size)
        run(replace(self._sum(source, target), codec=kind, residual=residual))
        return CODECS[kind].size(source.size)

    def _several(
        self, run: Run, compressor: GradientCompressor, source: Floats, target: Floats
    ) -> int:
        """Several collectives, one after the other."""
        name, method = self.tensor.name, compressor.strategy.method
        exchange = Exchange(self.world_size, run, _PURPOSES[method])
        values = compressor.staged(source, name)
        match method:
            case "topk":
                sent = sparse_sum(exchange, values, compressor, name, target)
            case "random":
                sent = random_sum(exchange, values, compressor, name, target)
            case _:
                shape = self.reads.shape
                sent = low_rank_sum(exchange, values, compressor, name, target, shape=shape)
        if self.reducer.op is ReduceOp.MEAN:
            np.divide(target, np.float32(self.world_size), out=target)
        return sent
