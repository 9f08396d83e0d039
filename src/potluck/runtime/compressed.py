"""Sums that are exchanged compressed, where that takes more than one collective.

Each function takes a rank's values and fills ``out`` with the sum over all ranks, the same bits on
all; it returns how many bytes this rank's contribution took.  With error feedback the values lie
where the compressor keeps what is left behind; a function takes away from them what it sends, and
the rest counts when the compressor is committed.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.collective.compression import indices, randomk
from potluck.collective.compression.base import Floats
from potluck.collective.compression.compressor import LARGEST, GradientCompressor
from potluck.collective.compression.feedback import forget_the_unreal
from potluck.collective.compression.indices import Coding
from potluck.collective.compression.powersgd import PowerSGD, orthonormal, product, take_away
from potluck.collective.compression.sparse import HEAD_SIZE, Sparse
from potluck.collective.compression.topk import TopK
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.task import Collective, Task
from potluck.errors import CollectiveMismatch, MalformedFrame
from potluck.runtime.call import Call, Purpose

__all__ = ["Exchange", "low_rank_sum", "random_sum", "sparse_sum"]


class Exchange(NamedTuple):
    """Who takes part, and how a collective is run."""

    world_size: int
    run: Callable[[Call], None]
    purpose: Purpose = Purpose.OWN

    def gather(self, mine: npt.NDArray[Any], counts: Sequence[int] | None = None) -> Any:
        """All ranks' vectors, one after the other."""
        lengths = (mine.size,) * self.world_size if counts is None else tuple(counts)
        target = np.empty(sum(lengths), mine.dtype)
        task = Task.blocks(Collective.ALL_GATHER, lengths)
        self.run(Call(task, mine, target, purpose=self.purpose))
        return target

    def add_up(self, vector: Floats) -> Floats:
        """The sum of all ranks' vectors, in place."""
        task = Task.whole(Collective.ALL_REDUCE, self.world_size, vector.size)
        reducer = Reducer.of(ReduceOp.SUM, vector.dtype)
        self.run(Call(task, vector, vector, reducer, purpose=self.purpose))
        return vector


def sparse_sum(
    exchange: Exchange, values: Floats, compressor: GradientCompressor, name: str, out: Floats
) -> int:
    """By all ranks' largest values: gathered with their places, and added in the order of ranks.

    Where they are so many that the whole vector would be less, that is summed instead.
    """
    method = compressor.method
    assert isinstance(method, TopK)
    mine = method.select(values, compressor.turn(values.shape, name))
    packed = mine.pack()
    told = exchange.gather(np.array([packed.size, values.size], np.int64)).reshape(-1, 2)
    sizes, totals = told.T.tolist()
    _check_alike(totals, values.size, lambda total: f"{total} values")
    if sum(sizes) >= _dense_bytes(values.size):
        return _plain_sum(exchange, values, compressor, out)
    _check_sizes(sizes, values.size)
    gathered = exchange.gather(packed, sizes)
    if compressor.error_feedback:
        values[mine.indices] = 0.0
        if not np.isfinite(mine.values).all():  # otherwise no others are left behind either
            forget_the_unreal(values)
    out[:] = 0.0
    start = 0
    for rank, size in enumerate(sizes):
        _unpack(gathered[start : start + size], values.size, rank).add_to(out)
        start += size
    return int(packed.size)


def _plain_sum(
    exchange: Exchange, values: Floats, compressor: GradientCompressor, out: Floats
) -> int:
    """Everything, and nothing is left behind."""
    np.copyto(out, values)
    exchange.add_up(out)
    if compressor.error_feedback:
        values[:] = 0.0
    return values.nbytes


def _dense_bytes(count: int) -> int:
    """What a rank sends and receives for each other rank when the whole vector is summed."""
    return 2 * 4 * count


def _check_sizes(sizes: Sequence[int], total: int) -> None:
    """Nobody needs more than this for a vector; checked before it is allocated."""
    most = HEAD_SIZE + 4 * total + indices.largest_size(Coding.BITMAP, total, total)
    for rank, size in enumerate(sizes):
        if not HEAD_SIZE <= size <= most:
            raise MalformedFrame(
                f"Rank {rank} announces {size} bytes for some of {total} values",
                rank=rank,
                expected=most,
                got=size,
            )


def _unpack(data: npt.NDArray[np.uint8], total: int, rank: int) -> Sparse:
    try:
        return Sparse.unpack(data, total)
    except MalformedFrame as error:
        raise MalformedFrame(
            f"Rank {rank} sent sparse values that cannot be decoded", rank=rank, cause=error
        ) from None


def random_sum(
    exchange: Exchange, values: Floats, compressor: GradientCompressor, name: str, out: Floats
) -> int:
    """By values at the same random places on all ranks."""
    method = compressor.method
    assert isinstance(method, randomk.RandomK)
    _agree(exchange, compressor, name, values.shape, b"")
    turn = compressor.turn(values.shape, name)
    places = method.places(values.size, turn)
    drawn = method.drawn(values, turn)
    if compressor.error_feedback:
        values[places] = 0.0
        forget_the_unreal(values)
    exchange.add_up(drawn)
    out[:] = 0.0
    out[places] = drawn
    return drawn.nbytes


def low_rank_sum(
    exchange: Exchange,
    values: Floats,
    compressor: GradientCompressor,
    name: str,
    out: Floats,
    *,
    shape: tuple[int, ...],
) -> int:
    """By two thin matrices; a tensor for which that would not be less is summed as it is."""
    method = compressor.method
    assert isinstance(method, PowerSGD)
    kept = compressor.kept.get(name)
    known = b"" if kept is None else kept.tobytes()
    have_the_same = _agree(exchange, compressor, name, shape, known)
    turn = compressor.turn(shape, name)
    if not have_the_same:
        turn.kept = None  # somebody is new here: all begin again from the seed
    begun = method.start(turn)
    if begun is None:
        return _plain_sum(exchange, values, compressor, out)
    sides, q = begun
    matrix = values.reshape(sides)
    p = orthonormal(exchange.add_up((matrix @ q).reshape(-1)).reshape(sides[0], -1))
    mine = np.ascontiguousarray(matrix.T @ p)
    turn.kept = exchange.add_up(mine.copy().reshape(-1)).reshape(mine.shape)
    compressor.keep(turn, name)
    product(p, turn.kept, out=out.reshape(sides))
    if compressor.error_feedback:
        take_away(matrix, p, mine)
        forget_the_unreal(values)
    return p.nbytes + mine.nbytes


def _agree(
    exchange: Exchange,
    compressor: GradientCompressor,
    name: str,
    shape: tuple[int, ...],
    kept: bytes,
) -> bool:
    """Be in the same step on all ranks; whether all have kept the same."""
    tensor = f"{compressor.strategy} {compressor.error_feedback} {shape} {name}".encode()
    mine = np.array(
        [compressor.seed, compressor.step, zlib.crc32(tensor), zlib.crc32(kept)], np.int64
    )
    told = exchange.gather(mine).reshape(exchange.world_size, -1)
    seeds, steps, tensors, hashes = told.T.tolist()
    if len(set(seeds)) > 1:
        found = CollectiveMismatch(f"A seed must be the same on all ranks, but theirs are {seeds}")
        found.odd_one = _odd_one(seeds, compressor.seed)
        raise found
    _check_alike(
        tensors,
        zlib.crc32(tensor),
        lambda crc: f"name, shape, method and feedback with check sum {crc & 0xFFFFFFFF:08x}",
    )
    for rank, step in enumerate(steps):
        if not 0 <= step < LARGEST:
            raise MalformedFrame(f"Rank {rank} says it is in step {step}", rank=rank)
    compressor.step = max(steps)
    return len(set(hashes)) == 1


def _odd_one(told: Sequence[int], mine: int) -> int | None:
    """A rank that says something else than most ranks do, of which this is one."""
    is_most = 2 * sum(number == mine for number in told) > len(told)
    odd = [rank for rank, number in enumerate(told) if number != mine]
    return odd[0] if odd and is_most else None


def _check_alike(told: Sequence[int], mine: int, describe: Callable[[int], str]) -> None:
    """All ranks mean the same."""
    for rank, number in enumerate(told):
        if number != told[0]:
            found = CollectiveMismatch(
                "Ranks compress different tensors",
                rank=rank,
                expected=told[0],
                got=number,
                cause=f"rank 0 has {describe(told[0])}, rank {rank} {describe(number)}",
                hint="All ranks must make the same calls in the same order.",
            )
            found.odd_one = _odd_one(told, mine)
            raise found
