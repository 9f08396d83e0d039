"""What ``potluck bench`` measures; every rank of the cluster does the same at the same time.

All decisions follow from what the ranks have told each other, so nobody waits for an operation that
another has left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from potluck.collective import registry
from potluck.collective.planner import Planner
from potluck.collective.strategies import AllReduceStrategy
from potluck.collective.task import Collective, Task
from potluck.runtime.bandwidth import ProbeLimits, pairings, probe_links
from potluck.vocabulary import LinkMatrix

if TYPE_CHECKING:
    from potluck.runtime.context import DistributedContext

__all__ = ["Case", "Effort", "Links", "measure_cases", "measure_links"]

PINGS = 8
"""Bytes of a message whose way is timed."""

ITEM = 4
"""Bytes of a float32."""


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure."""

    sizes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
    """Bytes of the arrays that are reduced."""
    probe: ProbeLimits = field(default_factory=ProbeLimits)
    pings: int = 60
    seconds: float = 0.4
    """For one algorithm and size."""
    most: float = 2.0
    """Seconds; what should take longer once is not measured."""

    @classmethod
    def quick(cls) -> Effort:
        """To see roughly how things are."""
        probe = ProbeLimits(seconds=0.15, octets=1 << 23)
        return cls((4 << 10, 1 << 20), probe, pings=15, seconds=0.1, most=0.5)


class Links(msgspec.Struct):
    """What one rank has measured."""

    name: str
    up: dict[int, int] = {}
    """Bytes per second to each other rank."""
    down: dict[int, int] = {}
    """Bytes per second from each other rank."""
    latency: dict[int, int] = {}
    """Nanoseconds, one way."""


@dataclass(frozen=True, slots=True)
class Case:
    """One algorithm on one size."""

    nbytes: int
    algorithm: str
    predicted: int
    """Nanoseconds."""
    measured: int | None
    """Nanoseconds, of the slowest rank; None if it would have taken too long."""


def measure_links(context: DistributedContext, name: str, effort: Effort) -> list[Links]:
    """Rates and latencies between all ranks, as each of them found them."""
    mine = Links(name=name)
    for rank, found in probe_links(context.backend, limits=effort.probe).items():
        mine.up[rank], mine.down[rank] = found.up, found.down
    for partner in pairings(context.rank, context.world_size):
        context.barrier()
        if partner is not None:
            mine.latency[partner] = _ping(context, partner, effort.pings)
    told = context.all_gather_object(msgspec.to_builtins(mine, str_keys=True))
    return [msgspec.convert(each, Links, strict=False) for each in told]


def _ping(context: DistributedContext, partner: int, count: int) -> int:
    """Nanoseconds of a short message, one way: half of the usual way there and back."""
    ball, trips = np.zeros(PINGS, np.uint8), []
    for _ in range(count):
        began = time.perf_counter_ns()
        if context.rank < partner:
            context.send(ball, partner)
            context.recv(ball, partner)
        else:
            context.recv(ball, partner)
            context.send(ball, partner)
        trips.append(time.perf_counter_ns() - began)
    return int(statistics.median(trips)) // 2


def matrix_of(links: list[Links]) -> LinkMatrix:
    """The same as the planner wants it: what each rank can send and receive at all."""
    size = len(links)
    return LinkMatrix(
        tuple(max(each.up.values(), default=0) for each in links),
        tuple(max(each.down.values(), default=0) for each in links),
        tuple(
            tuple(min(links[here].latency.get(there, 0), (1 << 32) - 1) for there in range(size))
            for here in range(size)
        ),
    )


def measure_cases(
    context: DistributedContext,
    links: LinkMatrix,
    effort: Effort,
    advance: Callable[[str], None] = lambda _: None,
) -> list[Case]:
    """Every algorithm on every size: what it should take, and what it takes."""
    planner, cases = Planner(links), []
    for nbytes in effort.sizes:
        task = Task.whole(Collective.ALL_REDUCE, context.world_size, nbytes // ITEM)
        for algorithm in registry.offering(Collective.ALL_REDUCE):
            strategy = AllReduceStrategy(algorithm.name)
            predicted = planner.plan(task, strategy=strategy).price
            advance(f"{algorithm.name} on {nbytes >> 10} KiB")
            measured = None
            if predicted <= effort.most * 1e9:
                measured = _measure(context, strategy, nbytes, effort.seconds)
            cases.append(Case(nbytes, algorithm.name, predicted, measured))
    return cases


def _measure(
    context: DistributedContext, strategy: AllReduceStrategy, nbytes: int, seconds: float
) -> int:
    """Nanoseconds on the slowest rank: the median of as many as fit into the time."""
    array = np.zeros(nbytes // ITEM, np.float32)
    context.all_reduce(array, strategy=strategy)  # connections are opened, links surveyed
    first = _timed(context, array, strategy, 1)
    told: list[Any] = context.all_gather_object(first)
    count = int(max(2, min(200, seconds * 1e9 // max(1, *told))))
    found = _timed(context, array, strategy, count)
    return max(int(each) for each in context.all_gather_object(found))


def _timed(
    context: DistributedContext,
    array: np.ndarray[tuple[int], np.dtype[np.float32]],
    strategy: AllReduceStrategy,
    count: int,
) -> int:
    taken = []
    context.barrier()
    for _ in range(count):
        began = time.perf_counter_ns()
        context.all_reduce(array, strategy=strategy)
        taken.append(time.perf_counter_ns() - began)
    return int(statistics.median(taken))
