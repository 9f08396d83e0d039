"""Compressing: an all-reduce whose values travel in fewer bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np

from potluck.arrays.base import Array, Lease
from potluck.collective.compression.codecs import codec_for
from potluck.collective.compression.compressor import GradientCompressor, TensorCompressor
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.collective.reduce import ReduceOp, Reducer, quiet
from potluck.collective.strategies import Strategy
from potluck.collective.task import Collective
from potluck.errors import MalformedFrame, UnsupportedOperation
from potluck.runtime.call import Call
from potluck.runtime.choices import Choices
from potluck.runtime.compressed import Exchange, low_rank_sum, random_sum, sparse_sum
from potluck.runtime.launching import Launching
from potluck.runtime.requests import Request

__all__ = ["Compressing", "Compression", "read_compression"]

Compression: TypeAlias = TensorCompressor | GradientCompressor | CompressionStrategy | str | None
"""A method by name, or with a memory of what it left behind."""

_FORGETFUL = frozenset({"random", "powersgd"})
"""Methods that are of no use without a memory."""


def read_compression(
    compression: TensorCompressor | GradientCompressor | CompressionStrategy | str,
) -> TensorCompressor:
    """What a caller asks for."""
    if isinstance(compression, TensorCompressor):
        return compression
    if isinstance(compression, GradientCompressor):
        return compression.tensor("")
    strategy = compression
    if isinstance(strategy, str):
        strategy = CompressionStrategy.named(strategy)
    if strategy.method in _FORGETFUL:
        raise UnsupportedOperation(
            f"{strategy.method} needs a memory from one step to the next",
            hint=f"Pass compression=GradientCompressor({str(strategy)!r}), the same every time.",
        )
    return GradientCompressor(strategy, error_feedback=False).tensor("")


class Compressing(Launching):
    """How compressed sums are made."""

    def _reduce_compressed(
        self,
        memory: tuple[Lease, Lease],
        reducer: Reducer,
        tensor: TensorCompressor,
        *,
        strategy: Strategy | None,
        timeout: float | None,
        async_op: bool,
    ) -> Any:
        """Reduce what the first lease lends into the second."""
        reads, into = memory
        _check(reads, reducer, strategy, tensor.compressor.strategy)
        may_take_several = tensor.compressor.error_feedback and not async_op
        compressor, name = tensor = self._settled(
            tensor, reads.flat.size, timeout, has_feedback=may_take_several
        )
        if self.world_size == 1 or not compressor.strategy.is_lossy:
            return self._launch(self._plain(memory, reducer, tensor), timeout, async_op=async_op)
        if compressor.strategy.quantization is not None:
            return self._launch(
                self._quantised(memory, reducer, tensor), timeout, async_op=async_op
            )
        if async_op:
            raise UnsupportedOperation(
                f"{compressor.strategy.method} takes several collectives and cannot be left alone",
                hint="Wait for it, or use a number format such as int8.",
            )
        self._several(memory, tensor, timeout)
        if reducer.op is ReduceOp.MEAN:
            np.divide(into.flat, np.float32(self.world_size), out=into.flat)
        compressor.succeed(name)
        return into.give_back()

    def _settled(
        self, tensor: TensorCompressor, count: int, timeout: float | None, *, has_feedback: bool
    ) -> TensorCompressor:
        """The same, with a choice where the caller left it open."""
        compressor, name = tensor
        if compressor.strategy != CompressionStrategy.AUTO or self.world_size == 1:
            return tensor
        group, exchange = self.group, self._exchange(timeout)
        chosen = Choices.of(group).settle(group, exchange, count, has_feedback=has_feedback)
        return compressor.by(chosen).tensor(name)

    def _exchange(self, timeout: float | None) -> Exchange:
        def run(call: Call) -> None:
            self._launch(Request(call, _nothing), timeout, async_op=False)

        return Exchange(self.world_size, run)

    def _plain(
        self, memory: tuple[Lease, Lease], reducer: Reducer, tensor: TensorCompressor
    ) -> Request[Any]:
        """All of it, with what was left behind before."""
        (reads, into), (compressor, name) = memory, tensor
        source = compressor.compensated(reads.flat, name, into.flat)

        def finish() -> Any:
            if compressor.error_feedback:
                compressor.residuals.room(name, into.flat.size)[:] = 0.0
            compressor.succeed(name)
            return into.give_back()

        return Request(self._call(source, into, reducer), finish)

    def _call(self, source: Array, into: Lease, reducer: Reducer) -> Call:
        if source is not into.flat and np.may_share_memory(source, into.flat):
            source = source.copy()
        task = self._place.whole(Collective.ALL_REDUCE, source.size)
        return Call(task, source, into.flat, reducer)

    def _quantised(
        self, memory: tuple[Lease, Lease], reducer: Reducer, tensor: TensorCompressor
    ) -> Request[Any]:
        """One collective with a codec."""
        (reads, into), (compressor, name) = memory, tensor
        kind = compressor.strategy.quantization
        assert kind is not None
        source, residual = reads.flat, None
        if compressor.error_feedback:
            source = compressor.compensated(source, name, into.flat)
            residual = compressor.residuals.room(name, source.size)
        compressor.note(source.nbytes, codec_for(kind).size(source.size))

        def finish() -> Any:
            compressor.succeed(name)
            return into.give_back()

        call = self._call(source, into, reducer)
        return Request(replace(call, codec=kind, residual=residual), finish)

    def _several(
        self, memory: tuple[Lease, Lease], tensor: TensorCompressor, timeout: float | None
    ) -> None:
        """Several collectives, one after the other."""
        (reads, into), (compressor, name) = memory, tensor
        exchange = self._exchange(timeout)
        try:
            with quiet():
                values = compressor.staged(reads.flat, name)
                match compressor.strategy.method:
                    case "topk":
                        sparse_sum(exchange, values, compressor, name, into.flat)
                    case "random":
                        random_sum(exchange, values, compressor, name, into.flat)
                    case _:
                        out, shape = into.flat, reads.shape
                        low_rank_sum(exchange, values, compressor, name, out, shape=shape)
        except MalformedFrame as error:
            self.group.abort(str(error))  # the others would wait for our next call
            raise


def _check(
    reads: Lease, reducer: Reducer, strategy: Strategy | None, wanted: CompressionStrategy
) -> None:
    if not wanted.is_lossy:
        return
    if reads.flat.dtype != np.float32:
        raise UnsupportedOperation(
            f"Compression by {wanted} is for float32, not {reads.flat.dtype}",
            hint="Convert the array, or leave compression= out.",
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


def _nothing() -> None:
    """Nothing remains to be done."""
