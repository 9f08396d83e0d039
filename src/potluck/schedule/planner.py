"""The planner: which algorithm, in which order, with which shares, in which pieces.

It prices every candidate on the links of the group and takes the cheapest.  All of it is
whole-number arithmetic on what the ranks have told each other, so equal inputs give equal plans on
every machine. A plan says in words why it is what it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from math import gcd
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from potluck import _time
from potluck._types import LinkMatrix, settle_seconds
from potluck.errors import InvalidWorldSize, UnsupportedOperation
from potluck.schedule.algorithms.central import CENTRAL
from potluck.schedule.algorithms.direct import DIRECT
from potluck.schedule.algorithms.doubling import DOUBLING
from potluck.schedule.algorithms.levels import AMONG, LEVELS, WITHIN
from potluck.schedule.algorithms.ring import RING
from potluck.schedule.algorithms.tree import TREE
from potluck.schedule.cost import ESTIMATES, SECOND, Costs, Host, Network, price
from potluck.schedule.schedule import Algorithm, Schedule
from potluck.schedule.task import (
    AlgorithmSettings,
    AllReduceStrategy,
    BroadcastStrategy,
    Collective,
    Levels,
    ReduceStrategy,
    Strategy,
    Task,
)

# --------------------------------------------------------------------------------------------------
# Order: in which sequence ranks stand round a ring, so that the way round is short.
#
# Up to 12 ranks the best order is found exactly (dynamic programming over subsets, Held and Karp).
# Beyond that nearest-neighbour tours are improved, up to 64 ranks, by moving and by reversing
# stretches of them (Or-opt and 2-opt) until nothing helps any more; larger rings keep the first
# tour.  All numbers are whole and ties are broken alike: every machine finds the same order, and
# that of the ranks themselves unless another is better.

EXACT = 12
"""Up to this many ranks the order is optimal; the effort doubles with each further rank."""

IMPROVED = 64
"""Up to this many ranks the order is improved until no small change helps."""

STARTS = 4
"""From how many ranks a tour is tried."""

LONGEST_MOVE = 3
"""How many ranks in a row are tried elsewhere at once."""

Tour: TypeAlias = tuple[int, ...]
Distances: TypeAlias = Sequence[Sequence[int]]
"""From each (row) to each (column); there and back may differ."""


def length(tour: Tour, distances: Distances) -> int:
    """The way round.

    >>> length((0, 2, 1), [[0, 1, 2], [3, 0, 4], [5, 6, 0]])
    11
    """
    return sum(distances[a][b] for a, b in pairwise((*tour, tour[0])))


def shortest(table: npt.NDArray[np.int64]) -> Tour:
    """The best order that can be found in reasonable time; it begins with rank 0."""
    size = len(table)
    distances = table.tolist()
    if size <= EXACT:
        found = [exact(distances)]
    elif size <= IMPROVED:
        starts = range(0, size, size // STARTS)
        found = [improved(nearest(table, start), distances) for start in starts]
    else:
        found = [nearest(table)]
    return min([tuple(range(size)), *found], key=lambda tour: length(tour, distances))


def exact(distances: Distances) -> Tour:
    """The shortest way round, beyond doubt.

    >>> exact([[0, 1, 9, 9], [9, 0, 9, 1], [1, 9, 0, 9], [9, 9, 1, 0]])
    (0, 1, 3, 2)
    """
    others = len(distances) - 1
    if others == 0:
        return (0,)
    # best[seen][last]: the shortest way from rank 0 through the ranks in ``seen`` to ``last``, and
    # the rank before it.  Rank r is bit r - 1 of ``seen``.
    best: list[dict[int, tuple[int, int]]] = [{} for _ in range(1 << others)]
    for last in range(1, others + 1):
        best[1 << last - 1][last] = (distances[0][last], 0)
    for seen in range(1, 1 << others):
        left = [rank for rank in range(1, others + 1) if not seen >> rank - 1 & 1]
        for last, (way, _) in best[seen].items():
            row = distances[last]
            for new in left:
                known = best[seen | 1 << new - 1]
                if new not in known or way + row[new] < known[new][0]:
                    known[new] = (way + row[new], last)
    seen = (1 << others) - 1
    ends = best[seen]
    last = min(ends, key=lambda end: (ends[end][0] + distances[end][0], end))
    backwards = []
    while last:
        backwards.append(last)
        seen, last = seen ^ 1 << last - 1, best[seen][last][1]
    return (0, *reversed(backwards))


def nearest(table: npt.NDArray[np.int64], start: int = 0) -> Tour:
    """From the start always on to the nearest that is left."""
    far = np.iinfo(np.int64).max
    left = table.copy()
    tour = [start]
    for _ in range(len(table) - 1):
        left[:, tour[-1]] = far
        tour.append(int(left[tour[-1]].argmin()))
    return tuple(tour)


def improved(tour: Tour, distances: Distances) -> Tour:
    """Change the tour for the better as long as a small change does it."""
    better: Tour | None = tour
    while better is not None:
        tour = better
        better = _move(tour, distances) or _turn(tour, distances)
    start = tour.index(0)
    return tour[start:] + tour[:start]


def _move(tour: Tour, distances: Distances) -> Tour | None:
    """A shorter tour with a few ranks in a row elsewhere."""
    size = len(tour)
    for start in range(size):
        ring = tour[start:] + tour[:start]
        head, before = ring[0], ring[-1]
        for taken in range(1, min(LONGEST_MOVE, size - 2) + 1):
            tail, rest = ring[taken - 1], ring[taken:]
            gain = distances[before][head] + distances[tail][rest[0]] - distances[before][rest[0]]
            for place, (a, b) in enumerate(pairwise(rest), start=1):
                if distances[a][head] + distances[tail][b] - distances[a][b] < gain:
                    return rest[:place] + ring[:taken] + rest[place:]
    return None


def _turn(tour: Tour, distances: Distances) -> Tour | None:
    """A shorter tour with a stretch of it reversed."""
    there = [0, *accumulate(distances[a][b] for a, b in pairwise(tour))]
    back = [0, *accumulate(distances[b][a] for a, b in pairwise(tour))]
    ring = (*tour, tour[0])
    for first in range(1, len(tour) - 1):
        before = distances[ring[first - 1]]
        for last in range(first + 1, len(tour)):
            after = ring[last + 1]
            inside = back[last] - back[first] - (there[last] - there[first])
            ends = before[ring[last]] + distances[ring[first]][after]
            if inside + ends < before[ring[first]] + distances[ring[last]][after]:
                return tour[:first] + tour[first : last + 1][::-1] + tour[last + 1 :]
    return None


# --------------------------------------------------------------------------------------------------
# Shares: who owns how much of the vector in the direct form, so that no link is the last alone.
#
# An owner of a share *s* of a vector of one moves, both out and in, its own contribution and the
# results of others (1 − s) and the contributions and results of its share ((N − 1)·s): together
# 1 + (N − 2)·s.  The time of all is shortest when 1 + (N − 2)·s is proportional to the rate for
# all who own anything, and those own nothing whose link is busy with their own contribution anyway.

STEPS = 64
"""Shares are multiples of the largest divided by this: finer than any measurement is."""


def rounded(weights: Sequence[int]) -> tuple[int, ...]:
    """The same proportions in small numbers.

    >>> rounded([1000, 990, 502, 0])
    (64, 63, 32, 0)
    >>> rounded([7, 7, 7])
    (1, 1, 1)
    """
    most = max(weights)
    steps = [(2 * STEPS * weight + most) // (2 * most) for weight in weights]
    common = gcd(*steps)
    return tuple(step // common for step in steps)


def of_all_reduce(rates: Sequence[int]) -> tuple[int, ...]:
    """The shares of an all-reduce, given the slower direction of each rank's link.

    >>> of_all_reduce([125, 125, 125, 25]), of_all_reduce([125, 125, 125, 100])
    ((1, 1, 1, 0), (64, 64, 64, 29))
    """
    size = len(rates)
    if size <= 2:  # noqa: PLR2004 - with two, both move the whole vector whatever the shares
        return (1,) * size
    among = sorted(rates, reverse=True)
    # With k owners of the rates r: 1 + (N − 2)·s = r·(N − 2 + k) / Σr, and s must not be negative.
    owners = max(
        count
        for count in range(1, size + 1)
        if among[count - 1] * (size - 2 + count) >= sum(among[:count])
    )
    whole = sum(among[:owners])
    return rounded([max(0, rate * (size - 2 + owners) - whole) for rate in rates])


def besides(root: int, rates: Sequence[int]) -> tuple[int, ...]:
    """The shares of all but ``root``, which has to move every result (or share) in any case.

    For a reduction the rates are those on the way in, for a broadcast those on the way out.

    >>> besides(0, [100, 100, 50])
    (0, 2, 1)
    """
    if len(rates) <= 2:  # noqa: PLR2004 - nobody is left to share with
        return tuple(int(rank == root) for rank in range(len(rates)))
    return rounded([0 if rank == root else rate for rank, rate in enumerate(rates)])


def off_air(root: int, rates: Sequence[int], air: Sequence[int]) -> Sequence[int]:
    """The rates of those who may pass on shares: not over a radio, if others than the root can.

    >>> off_air(0, [100, 100, 50], air=[0, 0, 1])
    [100, 100, 0]
    """
    if all(number for rank, number in enumerate(air) if rank != root):
        return rates
    return [0 if number else rate for rate, number in zip(rates, air, strict=True)]


# --------------------------------------------------------------------------------------------------
# The algorithms there are.  A new one is one file that declares it, and its name in this list.

# Those that come first are preferred where they cost the same.
ALGORITHMS = {each.name: each for each in (DIRECT, DOUBLING, RING, LEVELS, TREE, CENTRAL)}


def find(name: str) -> Algorithm:
    """The algorithm of this name.

    >>> find("ring").idea
    'each rank hears its left neighbour and tells its right one'
    """
    if name not in ALGORITHMS:
        raise UnsupportedOperation(
            f"No algorithm is called {name!r}", hint=f"There are {', '.join(ALGORITHMS)}."
        )
    return ALGORITHMS[name]


def offering(collective: Collective) -> list[Algorithm]:
    """The algorithms that can do this.

    >>> [each.name for each in offering(Collective.BARRIER)]
    ['doubling', 'levels', 'tree', 'central']
    """
    return [each for each in ALGORITHMS.values() if collective in each.offers]


def possible(collective: Collective, network: Network) -> list[Algorithm]:
    """Those that make a difference on these links: two levels need machines of several ranks."""
    found = offering(collective)
    return found if network.is_two_level else [each for each in found if each is not LEVELS]


def schedule(algorithm: str, task: Task, layout: AlgorithmSettings | None = None) -> Schedule:
    """The schedule of a task by the algorithm of this name."""
    return find(algorithm).schedule(task, layout)


def refusals(what: str, local: Strategy, among: Strategy) -> Iterator[str]:
    """Why two strategies cannot be those of two levels, if so; ``what`` is to be done.

    >>> list(refusals("all_reduce", Strategy("ring"), Strategy("doubling")))
    []
    """
    if local.algorithm == "doubling":
        yield (
            f"local_{what} must be another than doubling, by which every rank of a machine has its "
            "sum, though one share crosses the cable: use DIRECT, RING, TREE or CENTRALIZED"
        )
    if what != "all_reduce":
        if local.algorithm == "direct":
            yield (
                f"local_{what} must be another than direct: for one root, one rank of a machine "
                "stands for it, which is CENTRALIZED"
            )
        if what == "reduce" and among.algorithm == "direct":
            yield (
                "global_reduce must be another than direct: shares of machines would be added up "
                "far from the root, use RING, TREE or CENTRALIZED"
            )


# --------------------------------------------------------------------------------------------------

ARITIES = (2, 4)
"""Trees to try."""

WITHIN_MACHINES = ("direct", "central")
"""What is tried among the ranks of a machine: all own a part of what crosses the cable, or one."""

ALIKE = 3
"""Per cent within which two prices count as equal; the model is not more exact than that."""

FEW = 16
"""Up to this many ranks all may talk to all; beyond, an equally fast other way is preferred."""

GAIN = 20
"""Per cent by which another plan must be better to replace one in use."""

PATIENCE = 50
"""Operations that a plan stays in use at least."""

SMALLEST_PIECE, LARGEST_PIECE = 1 << 16, 1 << 19
"""Bytes.  Below, Python's work on a piece outweighs the piece; above, it leaves the cache."""

IN_MEMORY = 2
"""How many times as long pieces are in shared memory: they are copied faster than Python can handle
them, and delay no other transfer."""

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
    levels: Levels | None = None
    compared: tuple[tuple[str, int], ...] = ()
    """What it was compared with: strategies as text, and their prices; itself among them."""

    @property
    def strategy(self) -> AllReduceStrategy:
        """What asks for this plan."""
        return _strategy(self.algorithm, self.arity, self.levels)

    def layout(self, itemsize: int) -> AlgorithmSettings:
        """The settings, for elements of this many bytes; partial sums count if they are wider."""
        return AlgorithmSettings(
            self.order, self.shares, self.arity, max(1, self.piece // itemsize), self.levels
        )

    @property
    def identity(self) -> int:
        """A number that tells plans apart which would not fit together."""
        parts = (self.collective.value, self.algorithm, self.order, self.shares, self.arity)
        levels = () if self.levels is None else (self.levels,)
        return zlib.crc32(repr((*parts, self.piece, *levels)).encode())


def _strategy(algorithm: str, arity: int, levels: Levels | None) -> AllReduceStrategy:
    def named(name: str, children: int) -> AllReduceStrategy:
        return AllReduceStrategy(name, children if name == "tree" else None)

    if levels is None:
        return named(algorithm, arity)
    return AllReduceStrategy.two_level(
        named(levels.within, arity), named(levels.among, levels.arity)
    )


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
    >>> fast = LinkMatrix.uniform(4, rate=1_000_000_000, latency=10_000)
    >>> near = replace(fast, machines=(0, 0, 0, 0), in_memory=True)
    >>> piece_for(1 << 24, Network(fast)), piece_for(1 << 24, Network(near))
    (524288, 1048576)
    """
    times = IN_MEMORY if network.is_in_memory else 1
    usual = usual_rate(network) * times
    most = min(
        max(nbytes // (8 * network.size), usual * SHORTEST // SECOND),
        max(nbytes // FILLED, usual * FILL // SECOND),
        STAGING // max(1, network.size - 1),
        LARGEST_PIECE * times,
    )
    return max(SMALLEST_PIECE, 1 << max(0, most.bit_length() - 1))


def usual_rate(network: Network) -> int:
    """The median of all rates, in bytes per second."""
    rates = sorted((*network.up, *network.down))
    return rates[len(rates) // 2]


Candidate: TypeAlias = tuple[int, str, AlgorithmSettings]
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

    def __init__(
        self,
        links: LinkMatrix,
        host: Host | None = None,
        *,
        config: CollectiveConfig | None = None,
    ) -> None:
        told = () if config is None else config.machines(links.size)
        self.network = Network(replace(links, machines=told) if told else links)
        self.host = host or Host()
        self._config = config

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
        wanted = self._settled(self._wanted(task, nbytes, strategy), task)
        priced = [
            (self._price(name, task, layout, costs), name, layout)
            for name, layout in self._candidates(task, costs, wanted)
        ]
        if not priced:
            raise UnsupportedOperation(
                f"No {task.collective.value} is possible as {wanted}",
                hint=f"Within machines there are {', '.join(WITHIN)}; among them, as far as they "
                f"offer it, {', '.join(AMONG)}.",
            )
        lowest = min(candidate[0] for candidate in priced)
        chosen = next(each for each in priced if each[0] * 100 <= lowest * (100 + ALIKE))
        best, name, layout = chosen
        return Plan(
            task.collective,
            name,
            layout.order,
            layout.shares,
            layout.arity,
            costs.piece,
            best,
            self._reason(task, nbytes, chosen, priced),
            layout.levels,
            _compared(priced),
        )

    def _wanted(self, task: Task, nbytes: int, strategy: Strategy | None) -> Strategy:
        """What the call asks for, or else the configuration; nothing leaves it to prices."""
        config = self._config
        if config is None:
            return strategy or Strategy()
        if strategy is not None:
            return strategy.with_arity(config.tree_arity)
        return config.strategy_of(task.collective, self.network.known_machines, nbytes)

    def _settled(self, wanted: Strategy, task: Task) -> Strategy:
        """What that means on these machines: two levels need several, of several ranks."""
        if wanted.algorithm == LEVELS.name:
            wanted = Strategy.two_level()
        if wanted.among is None:
            return wanted
        for refusal in refusals(task.collective.value, wanted.within, wanted.among):
            raise UnsupportedOperation(f"These are not two levels: {refusal}")
        if self.network.is_two_level:
            return wanted
        return wanted.within if self.network.is_one_machine else wanted.among

    def reprice(self, plan: Plan, task: Task, *, itemsize: int = 4, wide: int | None = None) -> int:
        """What a plan that was made for other links costs on these."""
        costs = Costs(self.network, itemsize, wide or itemsize, plan.piece, self.host)
        return self._price(plan.algorithm, task, plan.layout(costs.wide), costs)

    def _price(self, name: str, task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
        estimate = ESTIMATES.get((name, task.collective))
        if estimate is not None:
            return estimate(task, layout, costs) if task.world_size > 1 else 0
        return price(schedule(name, task, layout), costs)

    def _names(self, task: Task, wanted: Strategy) -> list[str]:
        """The algorithms to price, those first that are preferred where they cost the same."""
        if wanted.among is not None:
            wanted = Strategy(LEVELS.name)
        if wanted.algorithm is not None:
            find(wanted.algorithm).schedule(task)  # refuses what it does not offer
            return [wanted.algorithm]
        names = [each.name for each in possible(task.collective, self.network)]
        if self._config is not None and not self._config.two_levels:
            names = [name for name in names if name != LEVELS.name]
        names = self._preferred(names)
        if task.world_size > FEW:
            names.sort(key=lambda name: name == "direct")  # to the end
        return names

    def _preferred(self, names: list[str]) -> list[str]:
        """Those that are preferred at the same price first: a ring, where cables are the limit."""
        if usual_rate(self.network) > CABLE:
            return names
        return sorted(names, key=lambda name: name != "ring")

    def _candidates(
        self, task: Task, costs: Costs, wanted: Strategy
    ) -> Iterator[tuple[str, AlgorithmSettings]]:
        plain = AlgorithmSettings.plain(task.world_size, piece=max(1, costs.piece // costs.wide))
        for name in self._names(task, wanted):
            match name:
                case "ring":
                    yield name, replace(plain, order=self.ring)
                case "direct":
                    yield name, replace(plain, shares=self._shares(task))
                case "tree":
                    for arity in self._arities(wanted, task.total * costs.itemsize):
                        yield name, replace(plain, order=self.by_rate, arity=arity)
                case "central":
                    for sequence in dict.fromkeys((self.by_rate, self.by_latency)):
                        yield name, replace(plain, order=sequence)
                case "levels":
                    for layout in self._levels(task, plain, wanted):
                        yield name, layout
                case _:
                    yield name, replace(plain, order=self.by_machine)

    def _arities(self, wanted: Strategy, nbytes: int) -> tuple[int, ...]:
        """Children that nodes of a tree may have.

        A chain takes many hops, each of which needs a processor.  So it is tried for long vectors
        only, and only where the hops within a machine are short.
        """
        if wanted.arity is not None:
            return (wanted.arity,)
        is_long = nbytes > SMALLEST_PIECE
        return (1, *ARITIES) if self.network.is_two_level and is_long else ARITIES

    def _levels(
        self, task: Task, plain: AlgorithmSettings, wanted: Strategy
    ) -> Iterator[AlgorithmSettings]:
        """Each way within machines with each way among them."""
        within, among = wanted.within, wanted.among or Strategy()
        has_root, machines = task.collective.has_root, self.network.machines
        inner = [within.algorithm] if within.algorithm else list(WITHIN_MACHINES)
        outer = [among.algorithm] if among.algorithm else self._preferred(list(AMONG))
        for first, second in product(inner, outer):
            if second not in AMONG or task.collective not in AMONG[second].offers:
                continue
            if first not in WITHIN:
                continue
            if any(refusals(task.collective.value, Strategy(first), Strategy(second))):
                continue
            if has_root and first == "direct":
                continue
            shares = self._shares_of_machines(task) if second == "direct" else ()
            arities = ARITIES if second == "tree" else (2,)
            for arity in arities if among.arity is None else (among.arity,):
                levels = Levels(machines, first, second, shares, arity)
                own = 2 if within.arity is None else within.arity
                yield replace(plain, order=self.ring, arity=own, levels=levels)

    def _shares_of_machines(self, task: Task) -> tuple[int, ...]:
        """How much of the vector each machine owns, in the order of the ring."""
        network = self.network
        places = list(dict.fromkeys(network.machines[rank] for rank in self.ring))
        if task.collective is not Collective.BROADCAST:
            return of_all_reduce([network.rates[place] for place in places])
        root = places.index(network.machines[task.root])
        up, air = ([of[place] for place in places] for of in (network.up, network.air))
        return besides(root, off_air(root, up, air))

    @cached_property
    def ring(self) -> tuple[int, ...]:
        """The order in which the way round all ranks is shortest; no machine is left twice."""
        if not self.network.is_two_level:
            return shortest(Costs(self.network, host=self.host).hops(0))
        tour = shortest(Costs(self.network.among_machines, host=self.host).hops(0))
        cables = list(self.network.cables.values())
        return tuple(rank for machine in tour for rank in cables[machine])

    @property
    def by_machine(self) -> tuple[int, ...]:
        """The ranks in their own order, but for those of a machine, who stand together."""
        return self.ring if self.network.is_two_level else tuple(range(self.network.size))

    @cached_property
    def by_rate(self) -> tuple[int, ...]:
        """The ranks with the best links first: they can afford to serve others.

        Those of a machine stand together.
        """
        rates, machines = self.network.rates, self.network.machines
        size = range(self.network.size)
        return tuple(sorted(size, key=lambda rank: (-rates[rank], machines[rank], rank)))

    @cached_property
    def by_latency(self) -> tuple[int, ...]:
        """The ranks with the shortest ways to all others first."""
        hops = Costs(self.network, host=self.host).hops(0)
        far = np.maximum(hops.max(axis=0), hops.max(axis=1)).tolist()
        return tuple(sorted(range(self.network.size), key=lambda rank: (far[rank], rank)))

    def _shares(self, task: Task) -> tuple[int, ...]:
        network = self.network
        parts = [len(network.cables[machine]) for machine in network.machines]

        def each(rates: Sequence[int]) -> list[int]:
            return [rate // part for rate, part in zip(rates, parts, strict=True)]

        match task.collective:
            case Collective.REDUCE:
                return besides(task.root, each(off_air(task.root, network.down, network.air)))
            case Collective.BROADCAST:
                return besides(task.root, each(off_air(task.root, network.up, network.air)))
        return of_all_reduce(each(network.rates))

    def _reason(self, task: Task, nbytes: int, chosen: Candidate, priced: list[Candidate]) -> str:
        best, name, layout = chosen
        idea = find(name).idea
        if layout.levels is not None:
            count = len(set(layout.levels.machines))
            idea += f": {layout.levels.within} on each of {count}, {layout.levels.among} among them"
        text = f"{name} ({idea}) for {_time.size(nbytes)} takes about {_time.duration(best)}"
        if name == "direct" and len(set(layout.shares)) > 1 and not task.collective.has_blocks:
            text += f" with shares {_time.ratio(layout.shares)}"
        rates = self.network.rates
        if any(self.network.air):
            on_air = ", ".join(str(rank) for rank, air in enumerate(self.network.air) if air)
            text += f"; on Wi-Fi, where all share the air: rank {on_air}"
        elif 2 * min(rates) <= max(rates):
            slow = rates.index(min(rates))
            text += (
                f"; rank {slow} has the slowest link, "
                f"{_time.speed(min(rates))} of at most {_time.speed(max(rates))}"
            )
        others = [each[:2] for each in priced if each[1] != name]
        if not others:
            return f"{text}; there is no other way"
        dearer, other = min(others)
        return f"{text}; {other} would take {_time.duration(dearer)}"


def _compared(priced: list[Candidate]) -> tuple[tuple[str, int], ...]:
    """The best price of each strategy, lowest first."""
    found: dict[str, int] = {}
    for cost, name, layout in priced:
        strategy = str(_strategy(name, layout.arity, layout.levels))
        found[strategy] = min(cost, found.get(strategy, cost))
    return tuple(sorted(found.items(), key=lambda each: each[1]))


# --------------------------------------------------------------------------------------------------
# CollectiveConfig: which strategies a group uses, for callers who want a say in it.


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """Which strategies a group uses; left alone, the planner decides from measured links.

    *Local* strategies hold among the ranks of a machine, *global* ones among machines.  Without a
    global one there is one level: the local one holds among all ranks.  Where all ranks are on one
    machine the local one holds, where each is on its own the global one.

    >>> config = CollectiveConfig.multi_node(num_nodes=2, num_devices=3)
    >>> config.machines(6), str(config.select_all_reduce(1 << 24, world_size=6))
    ((0, 0, 0, 3, 3, 3), 'direct/ring')
    """

    num_devices: int = 1
    """Ranks on each node."""
    local_all_reduce: AllReduceStrategy = AllReduceStrategy.AUTO
    local_reduce: ReduceStrategy = ReduceStrategy.AUTO
    local_broadcast: BroadcastStrategy = BroadcastStrategy.AUTO
    num_nodes: int | None = None
    """Nodes, if there are several; the first ``num_devices`` ranks are on the first, and so on.
    Unless given, the ranks find out themselves which of them share a machine."""
    global_all_reduce: AllReduceStrategy | None = None
    global_reduce: ReduceStrategy | None = None
    global_broadcast: BroadcastStrategy | None = None
    tree_threshold_bytes: int | None = None
    """An all-reduce of fewer bytes uses a tree, if its strategy is left open; None leaves that to
    the planner too."""
    tree_arity: int = 2
    """Children of a node, for trees that do not say."""
    two_levels: bool = True
    """Whether the planner may let machines add up first, and send one share each; False leaves
    plans that treat all ranks alike, though in an order that fits machines."""
    measure_links: bool = True
    """Whether ranks survey their links before the first large operation.  Without that all links
    count as alike, and machines are known only where ``num_nodes`` says them.  (Probes in quiet
    moments are another thing: ``AutoDiscoveryConfig.probes``.)"""
    timeout: float | None = None
    """Seconds until a collective gives up; unless given, the limit of the backend."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        settle_seconds(self)
        self.validate()

    @classmethod
    def single_node(cls, num_devices: int = 1) -> CollectiveConfig:
        """All ranks on one machine."""
        return cls(num_devices=num_devices).validate()

    @classmethod
    def multi_node(cls, num_nodes: int, num_devices: int = 1) -> CollectiveConfig:
        """Several machines with equally many ranks each."""
        return cls(
            num_devices=num_devices,
            num_nodes=num_nodes,
            global_all_reduce=AllReduceStrategy.AUTO,
            global_reduce=ReduceStrategy.AUTO,
            global_broadcast=BroadcastStrategy.AUTO,
        ).validate()

    def validate(self) -> CollectiveConfig:
        """Raise if this makes no sense; itself otherwise."""
        for name, least in _LEAST.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                _check_number(name, getattr(self, name), least)
        for field in fields(self):
            scope, _, what = field.name.partition("_")
            if what in _KINDS and scope in {"local", "global"}:
                self._check_strategy(field.name, _KINDS[what])
        for name in ("two_levels", "measure_links"):
            if not isinstance(getattr(self, name), bool):
                msg = f"{name} must be True or False, not {getattr(self, name)!r}"
                raise TypeError(msg)
        _check_timeout(self.timeout)
        return self

    def _check_strategy(self, name: str, kind: type[Strategy]) -> None:
        given = getattr(self, name)
        scope, _, what = name.partition("_")
        if scope == "global" and given is None:
            return
        if not isinstance(given, kind):
            known = f"{kind.__name__}, such as {kind.__name__}.AUTO"
            msg = f"{name} must be one of {known}, not {given!r}"
            raise TypeError(msg)
        both = getattr(self, f"global_{what}")
        if given.among is not None and both is not None:
            msg = f"{name} must be of one level, {given!r} has two and global_{what} is set as well"
            raise ValueError(msg)
        if scope == "local" and given.among is None and both is not None:
            if not self.two_levels and not (given.is_auto and both.is_auto):
                msg = f"two_levels must be True beside local_{what} and global_{what}"
                raise ValueError(msg)
            for refusal in refusals(what, given, both):
                raise ValueError(refusal)

    def machines(self, world_size: int) -> tuple[int, ...]:
        """For each rank the lowest rank of its machine, as ``num_nodes`` and ``num_devices`` say.

        Empty if they say nothing, or describe a group of another size: this one may be a subgroup,
        or a cluster that has lost a machine.
        """
        if (self.num_nodes or 1) * self.num_devices != world_size:
            return ()
        if self.num_nodes is None and self.num_devices == 1:
            return ()
        return tuple(rank - rank % self.num_devices for rank in range(world_size))

    def check_world_size(self, world_size: int) -> None:
        """Raise if ``num_nodes`` and ``num_devices`` do not make up a group of this size."""
        told = (self.num_nodes or 1) * self.num_devices
        if told > 1 and told != world_size:
            raise InvalidWorldSize(
                world_size,
                hint=f"The configuration says {self.num_nodes or 1} nodes with {self.num_devices} "
                f"ranks each, {told} in all. Leave both out, and ranks find their machines.",
            )

    def strategy_of(
        self, collective: Collective, machines: tuple[int, ...], nbytes: int
    ) -> Strategy:
        """What is asked for among ranks on these machines (see :meth:`machines`)."""
        match collective:
            case Collective.ALL_REDUCE:
                chosen = _chosen(self.local_all_reduce, self.global_all_reduce, machines)
                if chosen.is_auto and nbytes < (self.tree_threshold_bytes or 0):
                    chosen = AllReduceStrategy.TREE
            case Collective.REDUCE:
                chosen = _chosen(self.local_reduce, self.global_reduce, machines)
            case Collective.BROADCAST:
                chosen = _chosen(self.local_broadcast, self.global_broadcast, machines)
            case _:
                return Strategy()
        return chosen.with_arity(self.tree_arity)

    def select_all_reduce(
        self, nbytes: int, world_size: int, links: LinkMatrix | None = None
    ) -> AllReduceStrategy:
        """The strategy of a vector of this many bytes of float32: what would really run.

        That depends on the links; without them, on what is assumed until they are measured.  A
        group shows its own as ``group.links``.

        >>> CollectiveConfig(tree_threshold_bytes=1 << 20).select_all_reduce(4096, world_size=4)
        AllReduceStrategy.tree(2)
        >>> CollectiveConfig().select_all_reduce(4096, world_size=4)
        AllReduceStrategy.DOUBLING
        """
        if links is None:
            links = LinkMatrix.uniform(world_size, rate=0, latency=0)
        task = Task.whole(Collective.ALL_REDUCE, world_size, -(-nbytes // 4))
        return Planner(links, config=self).plan(task).strategy


def _chosen(local: Strategy, among: Strategy | None, machines: tuple[int, ...]) -> Strategy:
    several = len(set(machines))
    if among is None or several == 1:
        return local
    if several in {0, len(machines)}:
        return among
    if local.is_auto and among.is_auto:
        return local
    return Strategy.two_level(local, among)


_KINDS: dict[str, type[Strategy]] = {
    "all_reduce": AllReduceStrategy,
    "reduce": ReduceStrategy,
    "broadcast": BroadcastStrategy,
}


_LEAST = {"num_devices": 1, "num_nodes": 1, "tree_threshold_bytes": 0, "tree_arity": 1}
_OPTIONAL = {"num_nodes", "tree_threshold_bytes"}


def _check_timeout(timeout: object) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        msg = f"timeout must be a number of seconds or None, not {timeout!r}"
        raise TypeError(msg)
    if not timeout > 0:
        msg = f"timeout must be more than zero seconds, not {timeout}"
        raise ValueError(msg)


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{name} must be a whole number, not {value!r}"
        raise TypeError(msg)
    if value >= least:
        return
    if name in {"num_devices", "num_nodes"}:
        raise InvalidWorldSize(value, hint=f"{name} must be {least} or more.")
    msg = f"{name} must be {least} or more, not {value}"
    raise ValueError(msg)
