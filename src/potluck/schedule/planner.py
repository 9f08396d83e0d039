"""The planner: which algorithm, in which order, with which shares, in which pieces.

It prices every candidate on the links of the group and takes the cheapest.  All of it is
whole-number arithmetic on what the ranks have told each other, so equal inputs give equal plans on
every machine. A plan says in words why it is what it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import gcd
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from potluck import _time
from potluck._types import LinkMatrix
from potluck.errors import UnsupportedOperation
from potluck.schedule.algorithms.central import CENTRAL
from potluck.schedule.algorithms.direct import DIRECT
from potluck.schedule.algorithms.doubling import DOUBLING
from potluck.schedule.algorithms.ring import RING
from potluck.schedule.algorithms.tree import TREE
from potluck.schedule.cost import ESTIMATES, SECOND, Costs, Host, Network, price
from potluck.schedule.schedule import Algorithm, Schedule
from potluck.schedule.task import AlgorithmSettings, Collective, Strategy, Task

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


# --------------------------------------------------------------------------------------------------
# The algorithms there are.  A new one is one file that declares it, and its name in this list.

# Those that come first are preferred where they cost the same.
ALGORITHMS = {each.name: each for each in (DIRECT, DOUBLING, RING, TREE, CENTRAL)}


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
    ['doubling', 'tree', 'central']
    """
    return [each for each in ALGORITHMS.values() if collective in each.offers]


def schedule(algorithm: str, task: Task, layout: AlgorithmSettings | None = None) -> Schedule:
    """The schedule of a task by the algorithm of this name."""
    return find(algorithm).schedule(task, layout)


# --------------------------------------------------------------------------------------------------

ARITIES = (2, 4)
"""Trees to try."""

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

WITHIN_MACHINE = 2
"""How many times as long pieces are within a machine: they are copied in memory, faster than Python
can handle them, and delay no other transfer."""

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

    def layout(self, itemsize: int) -> AlgorithmSettings:
        """The settings, for elements of this many bytes; partial sums count if they are wider."""
        return AlgorithmSettings(
            self.order, self.shares, self.arity, max(1, self.piece // itemsize)
        )

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


def piece_for(nbytes: int, network: Network, *, within_machine: bool = False) -> int:
    """Bytes of a piece: a power of two.

    Eight or more of them for each rank's part, so that work overlaps, unless that makes them too
    short for a fast link; about a millisecond each on the usual link; and not more for all ranks
    together than the staging allows.

    >>> network = Network(LinkMatrix.uniform(4, rate=125_000_000, latency=100_000))
    >>> piece_for(1 << 28, network), piece_for(1 << 20, network)
    (524288, 65536)
    >>> fast = Network(LinkMatrix.uniform(4, rate=1_000_000_000, latency=10_000))
    >>> piece_for(1 << 24, fast), piece_for(1 << 24, fast, within_machine=True)
    (524288, 1048576)
    """
    times = WITHIN_MACHINE if within_machine else 1
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
        self, links: LinkMatrix, host: Host | None = None, *, within_machine: bool = False
    ) -> None:
        self.network = Network(links)
        self.host = host or Host()
        self._within_machine = within_machine

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
        piece = piece_for(nbytes, self.network, within_machine=self._within_machine)
        costs = Costs(self.network, itemsize, wide or itemsize, piece, self.host)
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

    def _price(self, name: str, task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
        estimate = ESTIMATES.get((name, task.collective))
        if estimate is not None:
            return estimate(task, layout, costs) if task.world_size > 1 else 0
        return price(schedule(name, task, layout), costs)

    def _names(self, task: Task, wanted: Strategy) -> list[str]:
        """The algorithms to price, those first that are preferred where they cost the same."""
        if wanted.algorithm is not None:
            find(wanted.algorithm).schedule(task)  # refuses what it does not offer
            return [wanted.algorithm]
        names = [each.name for each in offering(task.collective)]
        if usual_rate(self.network) <= CABLE:
            names.sort(key=lambda name: name != "ring")  # to the front
        if task.world_size > FEW:
            names.sort(key=lambda name: name == "direct")  # to the end
        return names

    def _candidates(
        self, task: Task, costs: Costs, strategy: Strategy | None
    ) -> Iterator[tuple[str, AlgorithmSettings]]:
        plain = AlgorithmSettings.plain(task.world_size, piece=max(1, costs.piece // costs.wide))
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
        return shortest(Costs(self.network, host=self.host).hops(0))

    @cached_property
    def by_rate(self) -> tuple[int, ...]:
        """The ranks with the best links first: they can afford to serve others."""
        rates = self.network.rates
        return tuple(sorted(range(self.network.size), key=lambda rank: (-rates[rank], rank)))

    @cached_property
    def by_latency(self) -> tuple[int, ...]:
        """The ranks with the shortest ways to all others first."""
        hops = Costs(self.network, host=self.host).hops(0)
        far = np.maximum(hops.max(axis=0), hops.max(axis=1)).tolist()
        return tuple(sorted(range(self.network.size), key=lambda rank: (far[rank], rank)))

    def _shares(self, task: Task) -> tuple[int, ...]:
        match task.collective:
            case Collective.REDUCE:
                return besides(task.root, self._off_air(task.root, self.network.down))
            case Collective.BROADCAST:
                return besides(task.root, self._off_air(task.root, self.network.up))
        return of_all_reduce(self.network.rates)

    def _off_air(self, root: int, rates: Sequence[int]) -> Sequence[int]:
        """The rates of those who may pass on shares: not over a radio if others can."""
        air = self.network.air
        has_cable = any(not number for rank, number in enumerate(air) if rank != root)
        if not has_cable:
            return rates
        return [0 if number else rate for rate, number in zip(rates, air, strict=True)]

    def _reason(self, task: Task, nbytes: int, chosen: Candidate, priced: list[Candidate]) -> str:
        best, name, layout = chosen
        idea = find(name).idea
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
