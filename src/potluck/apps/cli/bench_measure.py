"""What ``potluck bench`` measures; every rank of the cluster does the same at the same time.

All decisions follow from what the ranks have told each other, so no rank waits for an operation
that another has left out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from potluck import _time as potluck__time
from potluck._types import LinkMatrix
from potluck.cluster import topology as cluster_topology
from potluck.cluster.bandwidth import ProbeLimits
from potluck.compression.base import CompressionContext, Floats
from potluck.compression.choice import METHODS, Speed, choose, method_for
from potluck.compression.strategy import CompressionStrategy
from potluck.membership.topology import LinkSource
from potluck.schedule import planner as schedule_planner
from potluck.schedule.cost import SECOND
from potluck.schedule.planner import Planner
from potluck.schedule.reduce import quiet
from potluck.schedule.task import AllReduceStrategy, Collective, Strategy, Task

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from potluck.cluster.cluster import Cluster
    from potluck.collective.context import DistributedContext


AGREEING = 1 << 18
"""Elements of a first operation, in which the ranks find out about their links and machines."""

ITEM = 4
"""Bytes of a float32."""


@dataclass(frozen=True, slots=True)
class BenchDuration:
    """How long to measure."""

    sizes: tuple[int, ...] = (4 << 10, 64 << 10, 1 << 20, 16 << 20)
    """Bytes of the arrays that are reduced."""
    probe: ProbeLimits = field(default_factory=ProbeLimits)
    seconds: float = 0.4
    """For one algorithm and size."""
    most: float = 2.0
    """Seconds; what should take longer once is not measured."""

    @classmethod
    def quick(cls) -> BenchDuration:
        """To see roughly how things are."""
        probe = ProbeLimits(seconds=0.15, max_bytes=1 << 23)
        return cls((4 << 10, 1 << 20), probe, seconds=0.1, most=0.5)


class LinkMeasurements(msgspec.Struct):
    """What one rank has measured."""

    name: str
    up: dict[int, int] = {}
    """Bytes per second to each other rank."""
    down: dict[int, int] = {}
    """Bytes per second from each other rank."""
    latency: dict[int, int] = {}
    """Nanoseconds, one way."""
    machine: int = -1
    """The lowest rank on its machine; -1 if that is not known."""
    air: int = 0
    """The number of its radio, among those of the group; 0 on a cable."""


@dataclass(frozen=True, slots=True)
class Case:
    """One algorithm on one size."""

    nbytes: int
    algorithm: str
    predicted: int
    """Nanoseconds."""
    measured: int | None
    """Nanoseconds, of the slowest rank; None if it would have taken too long."""


def measure_links(cluster: Cluster, name: str, effort: BenchDuration) -> list[LinkMeasurements]:
    """Rates and latencies between all ranks, as each of them found them; the map has them too."""
    cluster.all_reduce(np.zeros(AGREEING, np.float32))  # so large that ranks look at their links
    agreed, rank = cluster.group.links, cluster.rank
    mine = LinkMeasurements(
        name=name,
        machine=agreed.machines[rank] if agreed.machines else -1,
        air=agreed.air[rank] if agreed.air else 0,
    )
    probed = cluster_topology.measure_links(
        cluster.backend,
        cluster.topology,
        cluster.wait_until_active(),
        limits=effort.probe,
        source=LinkSource.BENCH,
    )
    for other, found in probed.items():
        mine.up[other], mine.down[other], mine.latency[other] = found.up, found.down, found.latency
    told = cluster.all_gather_object(msgspec.to_builtins(mine, str_keys=True))
    return [msgspec.convert(each, LinkMeasurements, strict=False) for each in told]


def matrix_of(links: list[LinkMeasurements]) -> LinkMatrix:
    """The same as the planner wants it: what each rank can send and receive at all.

    What ranks of one machine tell each other shows nothing of its cable.
    """
    size, machines = len(links), tuple(each.machine for each in links)
    if len(set(machines)) == 1 or -1 in machines:
        away = [{*range(size)} for _ in links]
    else:
        away = [{there for there in range(size) if machines[there] != here} for here in machines]

    def best(rates: Iterable[dict[int, int]]) -> tuple[int, ...]:
        return tuple(
            max((rate for there, rate in each.items() if there in far), default=0)
            for far, each in zip(away, rates, strict=True)
        )

    return LinkMatrix(
        best(each.up for each in links),
        best(each.down for each in links),
        tuple(
            tuple(min(links[here].latency.get(there, 0), (1 << 32) - 1) for there in range(size))
            for here in range(size)
        ),
        machines=() if -1 in machines else machines,
        air=tuple(each.air for each in links) if any(each.air for each in links) else (),
    )


def measure_cases(
    context: DistributedContext,
    links: LinkMatrix,
    effort: BenchDuration,
    advance: Callable[[str], None] = lambda _: None,
) -> list[Case]:
    """Every algorithm on every size: what it should take, and what it takes."""
    planner, cases = Planner(links), []
    for nbytes in effort.sizes:
        task = Task.whole(Collective.ALL_REDUCE, context.world_size, nbytes // ITEM)
        for algorithm in schedule_planner.possible(Collective.ALL_REDUCE, planner.network):
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


# --------------------------------------------------------------------------------------------------
# What compression would give on some links: for each method bytes, speed, time and error.
#
# Measured on random values, which nothing can foresee: real gradients lose less.  What is lost in
# one step comes again in the next where a compressor remembers it.

SIDE, QUICK_SIDE = 1024, 512
"""A square matrix, as most layers are."""

REPEATS = 3
"""The quickest counts: noise only ever adds time."""


class MethodMeasurement(msgspec.Struct):
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
class MethodEstimate:
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


def measure_method(strategy: CompressionStrategy, *, quick: bool) -> MethodMeasurement:
    """On this machine."""
    side = QUICK_SIDE if quick else SIDE
    values: Floats = np.random.default_rng(1).standard_normal(side * side, np.float32)
    method, turn = method_for(strategy), CompressionContext((side, side), seed=1, has_feedback=True)
    with quiet():
        data = method.encode(values, turn)
        back = method.decode(data, values.size)
        error = float(np.linalg.norm(values - back) / np.linalg.norm(values))
        encode = _rate(lambda: method.encode(values, turn), values.nbytes)
        decode = _rate(lambda: method.decode(data, values.size), values.nbytes)
    return MethodMeasurement(str(strategy), data.nbytes / values.nbytes, encode, decode, error)


def _rate(action: Callable[[], object], nbytes: int) -> int:
    best = 1 << 62
    for _ in range(REPEATS):
        began = time.perf_counter_ns()
        action()
        best = min(best, max(1, time.perf_counter_ns() - began))
    return nbytes * SECOND // best


def slowest(told: Iterable[Iterable[Any]]) -> list[MethodMeasurement]:
    """Of what all machines measured, for each method the slowest: the others wait for it."""
    tables = [[msgspec.convert(each, MethodMeasurement) for each in table] for table in told]
    return [
        MethodMeasurement(
            each[0].name,
            max(one.ratio for one in each),
            min(one.encode for one in each),
            min(one.decode for one in each),
            max(one.error for one in each),
        )
        for each in zip(*tables, strict=True)
    ]


def prospects(
    links: LinkMatrix, measured: Iterable[MethodMeasurement], nbytes: int
) -> list[MethodEstimate]:
    """For each method the time of an all-reduce of this many bytes."""
    planner = Planner(links)
    return [
        MethodEstimate(
            each.name,
            int(nbytes * each.ratio),
            each.encode,
            each.decode,
            _price(planner, each, nbytes),
            each.error,
        )
        for each in measured
    ]


def _price(planner: Planner, method: MethodMeasurement, nbytes: int) -> int:
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


def speeds(measured: Iterable[MethodMeasurement]) -> Mapping[CompressionStrategy, Speed]:
    """As the automatic choice wants them."""
    return {
        strategy: Speed(each.encode, each.decode)
        for each in measured
        if (strategy := CompressionStrategy.named(each.name)).is_lossy
    }


# --------------------------------------------------------------------------------------------------
# The results of ``potluck bench``: as facts for a program, and as tables for a person.

NOTABLE = 1.25
"""How much slower what is taken must be than the fastest for a word about it."""

GRADIENT = 16 << 20
"""Bytes of the gradient for which compression is judged: four million parameters."""


@dataclass(frozen=True, slots=True)
class Results:
    """Everything that was measured; the same on all ranks."""

    links: Sequence[LinkMeasurements]
    cases: Sequence[Case]
    methods: Sequence[MethodMeasurement]
    agreed: LinkMatrix | None = None
    """The links by which the group makes its plans; None stands for those that were measured."""

    def facts(self) -> dict[str, Any]:
        """For a program."""
        matrix = matrix_of(list(self.links))
        return {
            "nodes": [each.name for each in self.links],
            "links": [
                {
                    "from": here,
                    "to": there,
                    "bytes_per_second": links.up.get(there, 0),
                    "latency_ns": links.latency.get(there, 0),
                }
                for here, links in enumerate(self.links)
                for there in sorted(links.latency)
            ],
            "all_reduce": list(self._sizes()),
            "compression": {
                "gradient_bytes": GRADIENT,
                "methods": [asdict(each) for each in prospects(matrix, self.methods, GRADIENT)],
                "choice": self._choice(),
            },
        }

    def _sizes(self) -> Iterator[dict[str, Any]]:
        planner = Planner(matrix_of(list(self.links)))
        for nbytes in dict.fromkeys(case.nbytes for case in self.cases):
            mine = [case for case in self.cases if case.nbytes == nbytes]
            measured = [case for case in mine if case.measured is not None]
            fastest = min(measured, key=lambda case: case.measured or 0, default=None)
            plan = planner.plan(Task.whole(Collective.ALL_REDUCE, len(self.links), nbytes // 4))
            yield {
                "bytes": nbytes,
                "algorithms": [
                    {
                        "name": case.algorithm,
                        "predicted_ns": case.predicted,
                        "measured_ns": case.measured,
                    }
                    for case in mine
                ],
                "fastest": None if fastest is None else fastest.algorithm,
                "planned": plan.algorithm,
                "strategy": str(plan.strategy),
                "reason": plan.reason,
                "compared": dict(plan.compared),
            }

    def explain(self) -> Iterator[str]:
        """For each size which plan runs, why, and what it was compared with."""
        planner = Planner(self.agreed or matrix_of(list(self.links)))
        machines = planner.network.known_machines
        count = len(set(machines))
        where = "on one machine" if count == 1 else f"on {count} machines"
        where = where if machines else "on machines that are not known"
        yield f"Plans of all-reduces among {len(self.links)} ranks {where}"
        for nbytes in dict.fromkeys(case.nbytes for case in self.cases):
            plan = planner.plan(Task.whole(Collective.ALL_REDUCE, len(self.links), nbytes // ITEM))
            yield f"{potluck__time.size(nbytes)}: {plan.strategy}"
            yield f"  because {plan.reason}"
            others = ", ".join(
                f"{name} {potluck__time.duration(price)}" for name, price in plan.compared
            )
            yield f"  compared: {others}"
        yield (
            'strategy="…" pins one of these for a call, CollectiveConfig(local_all_reduce=…) for a '
            "group; CollectiveConfig(two_levels=False) leaves out those with a slash, "
            "measure_links=False the survey they rest on."
        )

    def _choice(self) -> str:
        """What ``compression="auto"`` would take, as a sentence."""
        matrix = matrix_of(list(self.links))
        return choose(matrix, GRADIENT // 4, speeds(self.methods), has_feedback=True).reason

    def print(self, console: Console) -> None:
        """For a person."""
        from rich.text import Text

        console.print(Text("Links, measured (from row to column)", "bold"))
        console.print(self._link_table())
        console.print(Text("\nAll-reduce, measured", "bold"))
        console.print(self._case_table("measured_ns", "fastest"))
        console.print(Text("\nAll-reduce, estimated from the links", "bold"))
        console.print(self._case_table("predicted_ns", "planned"))
        for remark in self._remarks():
            console.print(Text(remark))
        title = f"\nCompression of a gradient of {potluck__time.size(GRADIENT)} on these links"
        console.print(Text(title, "bold"))
        console.print(self._method_table())
        console.print(Text("~ is estimated from the links and the speeds; the rest is measured."))
        console.print(Text(f'compression="auto" takes {self._choice()}', "bold green"))

    def _remarks(self) -> Iterator[str]:
        """Where Potluck, which uses estimates, takes another algorithm than measurements say."""
        for size in self._sizes():
            times = {each["name"]: each["measured_ns"] for each in size["algorithms"]}
            best, taken = times.get(size["fastest"]), times.get(size["planned"])
            if best and taken and taken > NOTABLE * best:
                yield (
                    f"{potluck__time.size(size['bytes'])}: Potluck takes {size['planned']}, by its "
                    f"estimate; measured, {size['fastest']} took {best / taken:.0%} of that time."
                )

    def _link_table(self) -> Table:
        table = _table("", *(f"to {rank}" for rank in range(len(self.links))))
        for here, links in enumerate(self.links):
            cells = [
                "–"
                if there == here
                else f"{potluck__time.speed(links.up.get(there, 0))}, "
                f"{potluck__time.duration(links.latency.get(there, 0))}"
                for there in range(len(self.links))
            ]
            table.add_row(f"{here} {links.name}", *cells)
        return table

    def _case_table(self, figure: str, best: str) -> Table:
        """Of each size a figure of every algorithm, and which of them is the best by it."""
        sizes = list(self._sizes())
        names = [each["name"] for each in sizes[0]["algorithms"]] if sizes else []
        table = _table("bytes", *names, best)
        for size in sizes:
            cells = [_time(each[figure]) for each in size["algorithms"]]
            table.add_row(potluck__time.size(size["bytes"]), *cells, size[best] or "")
        return table

    def _method_table(self) -> Table:
        table = _table(
            "method", "bytes", "encodes", "decodes", "lost a step", "~ all-reduce", "~ gain"
        )
        found = prospects(matrix_of(list(self.links)), self.methods, GRADIENT)
        plain = found[0].predicted
        for each in found:
            table.add_row(*_cells(each, plain))
        return table


def _cells(each: MethodEstimate, plain: int) -> tuple[str, ...]:
    is_plain = each.nbytes == GRADIENT
    return (
        each.name,
        potluck__time.size(each.nbytes),
        "" if is_plain else potluck__time.speed(each.encode),
        "" if is_plain else potluck__time.speed(each.decode),
        f"{each.error:.2%}",
        potluck__time.duration(each.predicted),
        "" if is_plain else f"{plain / max(1, each.predicted):.2g}×",
    )


def _time(nanoseconds: int | None) -> str:
    return "not measured" if nanoseconds is None else potluck__time.duration(nanoseconds)


def _table(*titles: str) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, padding=(0, 2, 0, 0), show_edge=False)
    for number, title in enumerate(titles):
        table.add_column(title, justify="right" if number else "left")
    return table
