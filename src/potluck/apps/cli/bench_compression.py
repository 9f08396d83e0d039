"""What compression would give on some links: for each method bytes, speed, time and error.

Measured on random values, which nothing can foresee: real gradients lose less.  What is lost in one
step comes again in the next where a compressor remembers it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from potluck.collective.compression.base import Floats, Turn
from potluck.collective.compression.choice import Speed
from potluck.collective.compression.registry import METHODS, method_for
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.collective.costs import SECOND
from potluck.collective.planner import Planner
from potluck.collective.reduce import quiet
from potluck.collective.strategies import Strategy
from potluck.collective.task import Collective, Task
from potluck.vocabulary import LinkMatrix

__all__ = ["Method", "Prospect", "measure_method", "methods", "prospects", "slowest", "speeds"]

SIDE, QUICK_SIDE = 1024, 512
"""A square matrix, as most layers are."""

REPEATS = 3
"""The quickest counts: noise only ever adds time."""


class Method(msgspec.Struct):
    """What one machine measured of one method."""

    name: str
    ratio: float
    """Bytes that travel, as a share of those of float32."""
    encode: int
    decode: int
    """Bytes of float32 per second."""
    error: float
    """What one step loses, as a share of the values' size."""


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a method would give for a gradient of some size on some links."""

    name: str
    nbytes: int
    """That each rank would send into the all-reduce."""
    encode: int
    decode: int
    predicted: int
    """Nanoseconds of the all-reduce, encoding included."""
    error: float


def methods() -> list[CompressionStrategy]:
    """All there are, with their usual parameters; none first."""
    return [CompressionStrategy.named(name) for name in METHODS]


def measure_method(strategy: CompressionStrategy, *, quick: bool) -> Method:
    """On this machine."""
    side = QUICK_SIDE if quick else SIDE
    values: Floats = np.random.default_rng(1).standard_normal(side * side, np.float32)
    method, turn = method_for(strategy), Turn((side, side), seed=1, has_feedback=True)
    with quiet():
        data = method.encode(values, turn)
        back = method.decode(data, values.size)
        error = float(np.linalg.norm(values - back) / np.linalg.norm(values))
        encode = _rate(lambda: method.encode(values, turn), values.nbytes)
        decode = _rate(lambda: method.decode(data, values.size), values.nbytes)
    return Method(str(strategy), data.nbytes / values.nbytes, encode, decode, error)


def _rate(action: Callable[[], object], nbytes: int) -> int:
    best = 1 << 62
    for _ in range(REPEATS):
        began = time.perf_counter_ns()
        action()
        best = min(best, max(1, time.perf_counter_ns() - began))
    return nbytes * SECOND // best


def slowest(told: Iterable[Iterable[Any]]) -> list[Method]:
    """Of what all machines measured, for each method the slowest: the others wait for it."""
    tables = [[msgspec.convert(each, Method) for each in table] for table in told]
    return [
        Method(
            each[0].name,
            max(one.ratio for one in each),
            min(one.encode for one in each),
            min(one.decode for one in each),
            max(one.error for one in each),
        )
        for each in zip(*tables, strict=True)
    ]


def prospects(links: LinkMatrix, measured: Iterable[Method], nbytes: int) -> list[Prospect]:
    """For each method what an all-reduce of so many bytes would take."""
    planner = Planner(links)
    return [
        Prospect(
            each.name,
            int(nbytes * each.ratio),
            each.encode,
            each.decode,
            _price(planner, each, nbytes),
            each.error,
        )
        for each in measured
    ]


def _price(planner: Planner, method: Method, nbytes: int) -> int:
    """Nanoseconds.  Coding and sending are added up: in truth they overlap."""
    ranks = planner.network.size
    strategy = CompressionStrategy.named(method.name)
    if not strategy.is_lossy:
        return planner.plan(Task.whole(Collective.ALL_REDUCE, ranks, nbytes // 4)).price
    words = max(1, int(nbytes * method.ratio) // 4)
    encoding = nbytes * SECOND // max(1, method.encode)
    decoding = nbytes * SECOND // max(1, method.decode)
    if strategy.quantization is not None:
        # Every rank decodes the contributions to its share, and then the results of the others.
        task = Task.whole(Collective.ALL_REDUCE, ranks, words)
        sending = planner.plan(task, strategy=Strategy("direct")).price
        return sending + encoding + decoding * (2 * ranks - 1) // ranks
    if strategy.method == "topk":  # everybody's choice is another: all of them travel
        task = Task.blocks(Collective.ALL_GATHER, (words,) * ranks)
        return planner.plan(task).price + encoding + decoding * ranks
    task = Task.whole(Collective.ALL_REDUCE, ranks, words)
    return planner.plan(task).price + encoding + decoding


def speeds(measured: Iterable[Method]) -> Mapping[CompressionStrategy, Speed]:
    """As the automatic choice wants them."""
    return {
        strategy: Speed(each.encode, each.decode)
        for each in measured
        if (strategy := CompressionStrategy.named(each.name)).is_lossy
    }
