"""Which compression pays: whole numbers in, a choice and its reason out.

A method costs what its bytes take on the links and what this machine needs to encode and decode,
one after the other: in truth they overlap, so compression is never taken for a gain that is not
there.  Of those that cost about as much as the cheapest, the gentlest is taken.

Only methods that lose little of a step are taken, unless the caller wants it otherwise: what is
left to later steps can change what a model learns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from potluck import _time
from potluck._types import LinkMatrix
from potluck.compression.base import Method, Quantised
from potluck.compression.codecs import CODECS, Float32
from potluck.compression.powersgd import PowerSGD
from potluck.compression.sparse import RandomK, TopK, count_for
from potluck.compression.strategy import CompressionStrategy
from potluck.schedule.cost import SECOND
from potluck.schedule.planner import Planner
from potluck.schedule.task import Collective, Strategy, Task

CANDIDATES = (
    CompressionStrategy.NONE,
    CompressionStrategy.BFLOAT16,
    CompressionStrategy.INT8,
    CompressionStrategy.top_k(0.01),
)
"""What there is to choose from, the gentlest first.

Number formats lose less than 2 % of a step, whatever the gradients are (relative, in the L2 norm).
Top-k of a hundredth leaves up to 96 % to later steps: it is taken on request only.
"""

SMALL = 1 << 18
"""Bytes below which nothing is gained: not the bytes take the time, but their way."""

FAST = 400_000_000
"""Bytes per second from which not the links are the limit but the machines."""

ALIKE = 95
"""Per cent of the best speed that a gentler method must reach."""

INDEXED = 6
"""Bytes of a value with its index, at most, of those that top-k keeps."""


@dataclass(frozen=True, slots=True)
class Speed:
    """How fast a machine compresses, in bytes of float32 per second."""

    encode: int
    decode: int


@dataclass(frozen=True, slots=True)
class Choice:
    """What to do, and why."""

    strategy: CompressionStrategy
    reason: str
    is_known: bool = True
    """False while the links are not measured."""


def choose(
    links: LinkMatrix,
    count: int,
    speeds: Mapping[CompressionStrategy, Speed],
    *,
    has_feedback: bool = False,
    aggressive: bool = False,
    itemsize: int = 4,
) -> Choice:
    """The compression for an all-reduce of this many values.

    Top-k is taken if ``aggressive``, and only with error feedback.  ``itemsize`` is the bytes that
    a value takes as it is.

    >>> speeds = {each: Speed(2_000_000_000, 4_000_000_000) for each in CANDIDATES[1:]}
    >>> links = LinkMatrix.uniform(4, rate=125_000_000, latency=100_000)
    >>> print(choose(links, 1 << 24, speeds).reason)
    int8, because 67.1 MB take about 290 ms that way and 805 ms as they are, at 125 MB/s
    """
    none = CompressionStrategy.NONE
    slowest = min((*links.up, *links.down))
    size = _time.size(itemsize * count)
    if itemsize * count < SMALL or links.size == 1:
        return Choice(none, f"none, because {size} are soon sent")
    if not slowest:
        return Choice(none, "none, because the links are not measured yet", is_known=False)
    if slowest >= FAST:
        return Choice(none, f"none, as always on links of {_time.speed(FAST)} or more")
    planner = Planner(links)
    prices = {
        each: _price(planner, each, count, speeds.get(each), itemsize)
        for each in CANDIDATES
        if each == none or (each in speeds and _is_fit(each, itemsize, has_feedback=has_feedback))
    }
    chosen = _gentlest({each: prices[each] for each in prices if aggressive or _is_gentle(each)})
    reason = f"none, because {size} take {_time.duration(prices[none])} either way"
    if chosen != none:
        reason = (
            f"{chosen}, because {size} take about {_time.duration(prices[chosen])} that way and "
            f"{_time.duration(prices[none])} as they are, at {_time.speed(slowest)}"
        )
    faster = _gentlest(prices)
    if faster != chosen:
        reason += (
            f"; {faster} would take {_time.duration(prices[faster])} but leaves most of each step "
            "to later ones, so only auto:aggressive takes it"
        )
    return Choice(chosen, reason)


def _gentlest(prices: Mapping[CompressionStrategy, int]) -> CompressionStrategy:
    """Of those that cost about as much as the cheapest; the prices are in the order of harm."""
    lowest = min(prices.values())
    return next(each for each in prices if prices[each] * ALIKE <= lowest * 100)


def _is_gentle(strategy: CompressionStrategy) -> bool:
    """Whether a step loses little."""
    return not strategy.is_lossy or strategy.quantization is not None


def _is_fit(strategy: CompressionStrategy, itemsize: int, *, has_feedback: bool) -> bool:
    """Whether a method can be of use: forgetful ones need a memory, others fewer bytes."""
    if strategy.quantization is None:
        return has_feedback
    return CODECS[strategy.quantization].size(1 << 10) < itemsize << 10


def _price(
    planner: Planner, strategy: CompressionStrategy, count: int, speed: Speed | None, itemsize: int
) -> int:
    """Nanoseconds of an all-reduce."""
    ranks = planner.network.size
    if speed is None:
        task = Task.whole(Collective.ALL_REDUCE, ranks, count)
        return planner.plan(task, itemsize=itemsize, wide=4).price
    kind = strategy.quantization
    encoding = 4 * count * SECOND // max(1, speed.encode)
    if kind is None:
        kept = count_for(count, strategy.parameter) * INDEXED // 4
        task = Task.blocks(Collective.ALL_GATHER, (kept,) * ranks)
        return planner.plan(task).price + encoding
    words = -(-CODECS[kind].size(count) // 4)
    task = Task.whole(Collective.ALL_REDUCE, ranks, words)
    decoded = 4 * count * (2 * ranks - 1) // ranks  # contributions to the own share, then results
    decoding = decoded * SECOND // max(1, speed.decode)
    return planner.plan(task, strategy=Strategy("direct")).price + encoding + decoding


# --------------------------------------------------------------------------------------------------
# The methods, by the strategies that ask for them.

METHODS = ("none", "float16", "bfloat16", "int8", "onebit", "topk", "random", "powersgd")
"""In the order of the numbers that they have in a file or on the wire."""

_MAKERS: dict[str, Callable[[float], Method]] = {
    "topk": TopK,
    "random": RandomK,
    "powersgd": lambda rank: PowerSGD(int(rank)),
}


def method_for(strategy: CompressionStrategy) -> Method:
    """A new method, with scratch memory of its own."""
    strategy = strategy.concrete
    kind = strategy.quantization
    if kind is not None:
        return Quantised(CODECS[kind])
    maker = _MAKERS.get(strategy.method)
    return maker(strategy.parameter) if maker else Quantised(Float32)
