"""Sums that are exchanged compressed, where that takes more than one collective.

Each function takes a rank's values and fills ``out`` with the sum over all ranks, the same bits on
all; it returns how many bytes this rank's contribution took.  With error feedback the values lie
where the compressor keeps what is left behind; a function takes away from them what it sends, and
the rest counts when the compressor is committed.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from potluck.arrays.base import Array, BufferView
from potluck.collective.call import Call, CallSite, Purpose
from potluck.collective.group import Group
from potluck.compression import sparse
from potluck.compression.base import CompressionContext, Floats
from potluck.compression.choice import CANDIDATES, SMALL, Choice, Speed, choose, method_for
from potluck.compression.codecs import CODECS, codec_for
from potluck.compression.compressor import (
    LARGEST,
    GradientCompressor,
    TensorCompressor,
    forget_the_unreal,
)
from potluck.compression.powersgd import PowerSGD, orthonormal, product, take_away
from potluck.compression.sparse import HEAD_SIZE, Coding, Sparse, TopK
from potluck.compression.strategy import CompressionStrategy
from potluck.errors import CollectiveMismatch, MalformedFrame
from potluck.logs import get_logger
from potluck.metrics.registry import CompressionMetrics
from potluck.schedule.reduce import BFLOAT16, ReduceOp, Reducer, quiet
from potluck.schedule.task import Collective, Strategy, Task


class CompressedExchange(NamedTuple):
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
    exchange: CompressedExchange,
    values: Floats,
    compressor: GradientCompressor,
    name: str,
    out: Floats,
) -> int:
    """By all ranks' largest values: gathered with their places, and added in the order of ranks.

    If those would take more bytes than the whole vector, the vector is summed instead.
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
    exchange: CompressedExchange, values: Floats, compressor: GradientCompressor, out: Floats
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
    """Raise if a rank announces more than any vector needs; checked before memory is allocated."""
    most = HEAD_SIZE + 4 * total + sparse.largest_size(Coding.BITMAP, total, total)
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
    exchange: CompressedExchange,
    values: Floats,
    compressor: GradientCompressor,
    name: str,
    out: Floats,
) -> int:
    """By values at the same random places on all ranks."""
    method = compressor.method
    assert isinstance(method, sparse.RandomK)
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
    exchange: CompressedExchange,
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
    exchange: CompressedExchange,
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
        found = CollectiveMismatch(
            f"The seed must be the same on all ranks, but the seeds are {seeds}"
        )
        found.odd_one = _odd_one(seeds, compressor.seed)
        raise found
    _check_alike(
        tensors,
        zlib.crc32(tensor),
        lambda crc: f"name, shape, method and feedback with checksum {crc & 0xFFFFFFFF:08x}",
    )
    for rank, step in enumerate(steps):
        if not 0 <= step < LARGEST:
            raise MalformedFrame(f"Rank {rank} reports an invalid step: {step}", rank=rank)
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


# --------------------------------------------------------------------------------------------------
# How fast this machine compresses: measured once, in a few milliseconds.

COUNT = 1 << 18
"""Values to measure with: more than the nearest cache holds."""

REPEATS = 3
"""The quickest counts: noise only ever adds time."""


@lru_cache(maxsize=1)
def encoder_speeds() -> dict[CompressionStrategy, Speed]:
    """For each method that can be chosen."""
    raw = np.random.PCG64(0).random_raw(COUNT).astype(np.float32)
    values = raw / raw.max() - np.float32(0.5)
    with quiet():
        return {each: _measure(each, values) for each in CANDIDATES if each.is_lossy}


def _measure(
    strategy: CompressionStrategy, values: np.ndarray[tuple[int], np.dtype[np.float32]]
) -> Speed:
    kind = strategy.quantization
    if kind is None:
        method, turn = method_for(strategy), CompressionContext(values.shape)
        data = method.encode(values, turn)
        return Speed(
            _rate(lambda: method.encode(values, turn)),
            _rate(lambda: method.decode(data, values.size)),
        )
    codec = codec_for(kind)
    out, back = codec.packed(values), np.empty_like(values)
    return Speed(_rate(lambda: codec.encode(values, out)), _rate(lambda: codec.decode(out, back)))


def _rate(action: Callable[[], object]) -> int:
    """Bytes of float32 per second."""
    best = 1 << 62
    for _ in range(REPEATS):
        start = time.perf_counter_ns()
        action()
        best = min(best, max(1, time.perf_counter_ns() - start))
    return 4 * COUNT * 1_000_000_000 // best


# --------------------------------------------------------------------------------------------------
# What ``compression="auto"`` means for a group: chosen by each rank, agreed among all.
#
# Each rank proposes what pays on the links as they were measured, with the speed of its own
# encoder; of the proposals the gentlest is taken.  The ranks ask each other once in a while, at the
# same call on all of them; in between they go by what they agreed on.

LASTING = 50
"""Calls for which an agreement holds; as long as a plan at least."""

UNKNOWN = -1
"""The proposal of a rank that knows nothing of the links yet."""

Key: TypeAlias = tuple[int, int, bool, bool]
"""How many values, how many bytes each, whether with error feedback, and whether aggressive."""

_logger = get_logger(__name__)


@dataclass(slots=True)
class _AgreedMethod:
    choice: Choice
    left: int


class AgreedMethods:
    """The agreements of one group; the same on all its ranks."""

    def __init__(self) -> None:
        self._epoch = -1
        self._agreements: dict[Key, _AgreedMethod] = {}
        self._told: set[CompressionStrategy] = set()

    @classmethod
    def of(cls, group: Group) -> AgreedMethods:
        """The choices of a group: always the same ones."""
        found = vars(group).setdefault("_choices", cls())
        assert isinstance(found, cls)
        return found

    @property
    def made(self) -> list[Choice]:
        """What was agreed on, with reasons; the latest last."""
        return [agreement.choice for agreement in list(self._agreements.values())]

    def settle(self, group: Group, exchange: CompressedExchange, key: Key) -> CompressionStrategy:
        """Agree on how to compress a tensor; every rank calls this at the same time."""
        count, itemsize, has_feedback, aggressive = key
        if itemsize * count < SMALL:
            return CompressionStrategy.NONE
        if self._epoch != group.epoch:  # others may have lost what was agreed
            self._epoch = group.epoch
            self._agreements.clear()

        def proposal() -> Choice:
            speeds = encoder_speeds()
            return choose(
                *(group.links, count, speeds),
                has_feedback=has_feedback,
                aggressive=aggressive,
                itemsize=itemsize,
            )

        return self.agreed(exchange, key, proposal)

    def agreed(
        self, exchange: CompressedExchange, key: Key, proposal: Callable[[], Choice]
    ) -> CompressionStrategy:
        """What was agreed on not long ago, or is now."""
        known = self._agreements.get(key)
        if known is not None and known.left:
            known.left -= 1
            return known.choice.strategy
        mine = proposal()
        number = CANDIDATES.index(mine.strategy) if mine.is_known else UNKNOWN
        gentlest = min(_checked(exchange.gather(np.array([number], np.int64)).tolist()))
        if gentlest == UNKNOWN:
            return CompressionStrategy.NONE  # this call finds out about the links
        chosen = mine
        if mine.strategy != CANDIDATES[gentlest]:
            preferred = CANDIDATES[gentlest]
            reason = f"{preferred}, because another rank prefers it; here: {mine.reason}"
            chosen = replace(mine, strategy=preferred, reason=reason)
        has_changed = known is not None and known.choice.strategy != chosen.strategy
        if has_changed or chosen.strategy not in self._told:  # once, not for each size
            self._told.add(chosen.strategy)
            _logger.info("Compression: %s", chosen.reason)
        self._agreements.pop(key, None)  # the latest last
        self._agreements[key] = _AgreedMethod(chosen, LASTING)
        return chosen.strategy


def _checked(proposals: list[int]) -> list[int]:
    """Numbers that others sent."""
    for rank, number in enumerate(proposals):
        if not UNKNOWN <= number < len(CANDIDATES):
            raise MalformedFrame(
                f"Rank {rank} proposes an unknown compression: {number}", rank=rank
            )
    return proposals


# --------------------------------------------------------------------------------------------------
# One all-reduce with compression, from the moment its turn has come.
#
# Whatever it needs of the compressor's memory is read and written in its turn, so operations on the
# same tensor that are started one after the other find what they would find if each was waited for.

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
    place: CallSite
    reads: BufferView
    into: BufferView
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
        exchange = CompressedExchange(self.world_size, run, Purpose.AUTO_COMPRESSION)
        return compressor.by(AgreedMethods.of(self.group).settle(self.group, exchange, key))

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
        exchange = CompressedExchange(self.world_size, run, _PURPOSES[method])
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
