"""The planner: which algorithm, in which order, with which shares, in which pieces.

It prices every candidate on the links of the group and takes the cheapest.  All of it is
whole-number arithmetic on what the ranks have told each other, so equal inputs give equal plans on
every machine. A plan says in words why it is what it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from potluck.collective import order, registry, shares, wording
from potluck.collective.costs import SECOND, Costs, Host, Network
from potluck.collective.estimates import ESTIMATES
from potluck.collective.pricing import price
from potluck.collective.strategies import Strategy
from potluck.collective.task import Collective, Layout, Task
from potluck.vocabulary import LinkMatrix

__all__ = ["GAIN", "PATIENCE", "Plan", "Planner", "keeps", "piece_for"]

ARITIES = (2, 4)
"""Trees to try."""

ALIKE = 3
"""Per cent within which two prices count as equal; the model is not more exact than that."""

FEW = 16
"""Up to so many ranks all talk to all; beyond, other ways are preferred where they cost alike."""

GAIN = 20
"""Per cent by which another plan must be better to replace one in use."""

PATIENCE = 50
"""Operations that a plan stays in use at least."""

SMALLEST_PIECE, LARGEST_PIECE = 1 << 16, 1 << 19
"""Bytes.  Below, Python's work on a piece outweighs the piece; above, it leaves the cache."""

SHORTEST = 550_000
"""Nanoseconds that a piece should take on a fast link: many times what its handling takes."""

STAGING = 1 << 22
"""Bytes that all staged pieces of a rank may take together."""

FILL = 600_000
"""Nanoseconds that a piece may take on the wire; longer, and pipelines fill too slowly."""

FILLED = 256
"""Pieces of a vector that is so long that filling the pipeline counts no more."""

CABLE = 250_000_000
"""Bytes per second up to which a link, and not the machine at its end, is taken to be the limit.

There a ring is preferred to other ways that cost the same: one stream fills a cable more evenly
than many that compete.  Beyond, it is the other way round: fewer hops are less work.
"""


@dataclass(frozen=True, slots=True)
class Plan:
    """How one collective is done; equal on all ranks."""

    collective: Collective
    algorithm: str
    order: tuple[int, ...]
    shares: tuple[int, ...]
    arity: int
    piece: int
    """Bytes."""
    price: int
    """Nanoseconds it should take."""
    reason: str

    def layout(self, itemsize: int) -> Layout:
        """The knobs, for elements of so many bytes; partial sums count if they are wider."""
        return Layout(self.order, self.shares, self.arity, max(1, self.piece // itemsize))

    @property
    def identity(self) -> int:
        """A number that tells plans apart which would not fit together."""
        parts = (self.collective.value, self.algorithm, self.order, self.shares, self.arity)
        return zlib.crc32(repr((*parts, self.piece)).encode())


def keeps(current: int, best: int, operations: int) -> bool:
    """Whether a plan stays in use: it is young, or hardly dearer than the best.

    ``current`` and ``best`` are prices on the links as they are now, ``operations`` says how many
    were done with the current plan.

    >>> keeps(current=100, best=81, operations=1000), keeps(current=100, best=80, operations=50)
    (True, False)
    """
    return operations < PATIENCE or best * 100 > current * (100 - GAIN)


def piece_for(nbytes: int, network: Network) -> int:
    """Bytes of a piece: a power of two.

    Eight or more of them for each rank's part, so that work overlaps, unless that makes them too
    short for a fast link; about a millisecond each on the usual link; and not more for all ranks
    together than the staging allows.

    >>> network = Network(LinkMatrix.uniform(4, rate=125_000_000, latency=100_000))
    >>> piece_for(1 << 28, network), piece_for(1 << 20, network)
    (524288, 65536)
    """
    usual = usual_rate(network)
    most = min(
        max(nbytes // (8 * network.size), usual * SHORTEST // SECOND),
        max(nbytes // FILLED, usual * FILL // SECOND),
        STAGING // max(1, network.size - 1),
        LARGEST_PIECE,
    )
    return max(SMALLEST_PIECE, 1 << max(0, most.bit_length() - 1))


def usual_rate(network: Network) -> int:
    """The median of all rates, in bytes per second."""
    rates = sorted((*network.up, *network.down))
    return rates[len(rates) // 2]


Candidate: TypeAlias = tuple[int, str, Layout]
"""A price, an algorithm and its layout."""


class Planner:
    """Plans for one group on the links as they were measured.

    >>> fast, slow = 125_000_000, 25_000_000
    >>> even = LinkMatrix.uniform(4, rate=fast, latency=100_000)
    >>> links = LinkMatrix((fast, fast, fast, slow), (fast, fast, fast, slow), even.latency)
    >>> plan = Planner(links).plan(Task.whole(Collective.ALL_REDUCE, world_size=4, count=4 << 20))
    >>> plan.algorithm, plan.shares
    ('direct', (1, 1, 1, 0))
    """

    def __init__(self, links: LinkMatrix, host: Host | None = None) -> None:
        self.network = Network(links)
        self.host = host or Host()

    def plan(
        self,
        task: Task,
        *,
        itemsize: int = 4,
        wide: int | None = None,
        strategy: Strategy | None = None,
    ) -> Plan:
        """The cheapest plan, among those that follow ``strategy`` if one is given.

        ``wide`` is the size of an element of a partial sum, if that differs.
        """
        if task.world_size != self.network.size:
            msg = f"Links among {self.network.size} ranks, but a task for {task.world_size}"
            raise ValueError(msg)
        nbytes = task.total * itemsize
        costs = Costs(
            self.network, itemsize, wide or itemsize, piece_for(nbytes, self.network), self.host
        )
        priced = [
            (self._price(name, task, layout, costs), name, layout)
            for name, layout in self._candidates(task, costs, strategy)
        ]
        lowest = min(candidate[0] for candidate in priced)
        chosen = next(each for each in priced if each[0] * 100 <= lowest * (100 + ALIKE))
        best, name, layout = chosen
        reason = self._reason(task, nbytes, chosen, priced)
        return Plan(
            task.collective,
            name,
            layout.order,
            layout.shares,
            layout.arity,
            costs.piece,
            best,
            reason,
        )

    def reprice(self, plan: Plan, task: Task, *, itemsize: int = 4, wide: int | None = None) -> int:
        """What a plan that was made for other links costs on these."""
        costs = Costs(self.network, itemsize, wide or itemsize, plan.piece, self.host)
        return self._price(plan.algorithm, task, plan.layout(costs.wide), costs)

    def _price(self, name: str, task: Task, layout: Layout, costs: Costs) -> int:
        estimate = ESTIMATES.get((name, task.collective))
        if estimate is not None:
            return estimate(task, layout, costs) if task.world_size > 1 else 0
        return price(registry.schedule(name, task, layout), costs)

    def _names(self, task: Task, wanted: Strategy) -> list[str]:
        """The algorithms to price, those first that are preferred where they cost the same."""
        if wanted.algorithm is not None:
            registry.find(wanted.algorithm).schedule(task)  # refuses what it does not offer
            return [wanted.algorithm]
        names = [each.name for each in registry.offering(task.collective)]
        if usual_rate(self.network) <= CABLE:
            names.sort(key=lambda name: name != "ring")  # to the front
        if task.world_size > FEW:
            names.sort(key=lambda name: name == "direct")  # to the end
        return names

    def _candidates(
        self, task: Task, costs: Costs, strategy: Strategy | None
    ) -> Iterator[tuple[str, Layout]]:
        plain = Layout.plain(task.world_size, piece=max(1, costs.piece // costs.wide))
        wanted = strategy or Strategy()
        for name in self._names(task, wanted):
            match name:
                case "ring":
                    yield name, replace(plain, order=self.ring)
                case "direct":
                    yield name, replace(plain, shares=self._shares(task))
                case "tree":
                    for arity in ARITIES if wanted.arity is None else (wanted.arity,):
                        yield name, replace(plain, order=self.by_rate, arity=arity)
                case "central":
                    for sequence in dict.fromkeys((self.by_rate, self.by_latency)):
                        yield name, replace(plain, order=sequence)
                case _:
                    yield name, plain

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """The order in which the way round all ranks is shortest."""
        return order.shortest(Costs(self.network, host=self.host).hops(0))

    @cached_property
    def by_rate(self) -> tuple[int, ...]:
        """The ranks with the best links first: they can afford to serve others."""
        rates = self.network.rates
        return tuple(sorted(range(self.network.size), key=lambda rank: (-rates[rank], rank)))

    @cached_property
    def by_latency(self) -> tuple[int, ...]:
        """The ranks first that nobody is far from."""
        hops = Costs(self.network, host=self.host).hops(0)
        far = np.maximum(hops.max(axis=0), hops.max(axis=1)).tolist()
        return tuple(sorted(range(self.network.size), key=lambda rank: (far[rank], rank)))

    def _shares(self, task: Task) -> tuple[int, ...]:
        match task.collective:
            case Collective.REDUCE:
                return shares.besides(task.root, self.network.down)
            case Collective.BROADCAST:
                return shares.besides(task.root, self.network.up)
        return shares.of_all_reduce(self.network.rates)

    def _reason(self, task: Task, nbytes: int, chosen: Candidate, priced: list[Candidate]) -> str:
        best, name, layout = chosen
        idea = registry.find(name).idea
        text = f"{name} ({idea}) for {wording.size(nbytes)} takes about {wording.time(best)}"
        if name == "direct" and len(set(layout.shares)) > 1 and not task.collective.has_blocks:
            text += f" with shares {wording.ratio(layout.shares)}"
        rates = self.network.rates
        if 2 * min(rates) <= max(rates):
            slow = rates.index(min(rates))
            text += (
                f"; rank {slow} has the slowest link, "
                f"{wording.speed(min(rates))} of at most {wording.speed(max(rates))}"
            )
        others = [each[:2] for each in priced if each[1] != name]
        if not others:
            return f"{text}; there is no other way"
        dearer, other = min(others)
        return f"{text}; {other} would take {wording.time(dearer)}"
