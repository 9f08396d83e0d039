"""Costs: what moving bytes takes, in whole nanoseconds, so that every rank computes the same.

The model is alpha-beta: a piece takes a latency that depends on the pair, and time for its bytes
that depends on the slower of the sender's up link and the receiver's down link.  To that comes
what the machines themselves need for each piece (a system call and some Python on either side) and
for adding it.  Links that are not measured yet count like the median of those that are.

Where it is known which ranks share a machine, those of one machine share its cable; what they tell
each other does not cross it.  Machines that share a radio send and receive one after the other:
what each of them moves takes time from all, so a byte between two of them counts twice.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from potluck._types import LinkMatrix
from potluck.schedule.algorithms.central import owned_by
from potluck.schedule.algorithms.levels import AMONG, TwoLevels
from potluck.schedule.algorithms.tree import TreeShape
from potluck.schedule.schedule import Form, Program, Schedule, ScheduleStep
from potluck.schedule.task import AlgorithmSettings, Collective, Span, Task, split

DEFAULT_RATE = 125_000_000
"""Bytes per second to assume when nothing at all is known: Ethernet with 1 Gbit/s."""

DEFAULT_LATENCY = 100_000
"""Nanoseconds to assume when nothing at all is known: a switch, and two kernels."""

SECOND = 1_000_000_000

NEAR = 1_000_000_000
"""Bytes per second between two ranks of a machine, each way, beside others that do the same."""

Table: TypeAlias = npt.NDArray[np.int64]
"""A number for each pair, from row to column."""


@dataclass(frozen=True, slots=True)
class Host:
    """What the machines need; the same numbers on all ranks."""

    piece: int = 12_000
    """Nanoseconds to send or to receive one piece, however short."""
    reduce_rate: int = 4_000_000_000
    """Bytes per second that are added to others."""


def completed(links: LinkMatrix) -> LinkMatrix:
    """The same links, with the median of the known in place of what is not known.

    >>> links = completed(LinkMatrix((8, 0), (0, 0), ((0, 5), (0, 0))))
    >>> links.up, links.latency
    ((8, 8), ((0, 5), (5, 0)))
    """
    size = range(links.size)
    if all(links.up) and all(links.down) and not any(row.count(0) > 1 for row in links.latency):
        return links
    rate = _median((*links.up, *links.down), DEFAULT_RATE)
    ups, downs = _median(links.up, rate), _median(links.down, rate)
    pairs = (links.latency[a][b] for a in size for b in size if a != b)
    usual = _median(pairs, DEFAULT_LATENCY)
    return replace(
        links,
        up=tuple(up or ups for up in links.up),
        down=tuple(down or downs for down in links.down),
        latency=tuple(
            tuple(
                0 if a == b else links.latency[a][b] or links.latency[b][a] or usual for b in size
            )
            for a in size
        ),
    )


def _median(numbers: Iterable[int], otherwise: int) -> int:
    known = sorted(number for number in numbers if number)
    return known[len(known) // 2] if known else otherwise


class Network:
    """The links of a group, complete and ready for arithmetic; made once for many plans."""

    def __init__(self, links: LinkMatrix) -> None:
        links = completed(links)
        self.size = links.size
        ranks = tuple(range(self.size))
        machines = links.machines or ranks
        self.known_machines = links.machines
        self.is_one_machine = bool(links.machines) and not any(machines)
        self.is_in_memory = links.in_memory
        self.is_two_level = 1 < len(set(machines)) < self.size
        # All on one machine have no cable to share, and each on its own has one for itself.
        self.machines = machines if self.is_two_level else ranks
        self.cables: dict[int, list[int]] = {}
        for rank, machine in enumerate(self.machines):
            self.cables.setdefault(machine, []).append(rank)
        # A cable carries at least what it carried for any of its ranks.
        self.up = self._best(links.up)
        self.down = self._best(links.down)
        self.latency = links.latency
        self._slower = np.minimum.outer(np.array(self.up, np.int64), np.array(self.down, np.int64))
        self._latency = np.array(links.latency, np.int64)
        self.near = self._near()
        """Which pairs share a machine; no rank does with itself."""
        self._slower[self.near] = NEAR
        self.air = self._air(links.air)
        """By which radio the machine of each rank is reached, by number; 0 for a cable."""

    def _best(self, rates: Sequence[int]) -> tuple[int, ...]:
        best = {
            machine: max(rates[rank] for rank in ranks) for machine, ranks in self.cables.items()
        }
        return tuple(best[machine] for machine in self.machines)

    def _near(self) -> npt.NDArray[np.bool_]:
        machines = np.array(self.machines)
        near: npt.NDArray[np.bool_] = machines[:, None] == machines[None, :]
        np.fill_diagonal(near, val=False)
        return near

    def _air(self, air: Sequence[int]) -> tuple[int, ...]:
        if not air or self.is_one_machine:  # whose ranks send nothing over its radio
            return (0,) * self.size
        return tuple(air[machine] for machine in self.machines)

    @property
    def rates(self) -> list[int]:
        """Of each rank's machine the slower direction; its part of the air, if it is on a radio."""
        on_air = Counter(self.air[machine] for machine in self.cables)
        return [
            up * down // ((up + down) * on_air[air]) if air else min(up, down)
            for up, down, air in zip(self.up, self.down, self.air, strict=True)
        ]

    def times(self, size: int) -> Table:
        """Nanoseconds for this many bytes between each pair; the diagonal means nothing."""
        table: Table = self._latency + size * SECOND // self._slower
        return table

    def is_near(self, source: int, target: int) -> bool:
        """Whether what one rank sends to another crosses no cable."""
        return self.machines[source] == self.machines[target]

    @cached_property
    def among_machines(self) -> Network:
        """The same with one rank for each machine, in the order of their lowest ranks."""
        heads = [ranks[0] for ranks in self.cables.values()]
        pairs = [
            [
                0 if here is there else min(self.latency[a][b] for a in here for b in there)
                for there in self.cables.values()
            ]
            for here in self.cables.values()
        ]
        return Network(
            LinkMatrix(
                tuple(self.up[rank] for rank in heads),
                tuple(self.down[rank] for rank in heads),
                tuple(map(tuple, pairs)),
                air=tuple(self.air[rank] for rank in heads),
            )
        )


@dataclass(frozen=True, slots=True)
class Costs:
    """Prices for one group and one type of element."""

    network: Network
    itemsize: int = 4
    wide: int = 4
    """Bytes of an element of a partial sum."""
    piece: int = 1 << 18
    """Bytes that are moved and reduced at a time."""
    host: Host = Host()

    def pieces(self, size: int) -> int:
        """How many pieces this many bytes make."""
        return -(-size // self.piece)

    def up(self, rank: int, size: int) -> int:
        """Time for bytes on a rank's cable, out."""
        return size * SECOND // self.network.up[rank]

    def down(self, rank: int, size: int) -> int:
        """Time for bytes on a rank's cable, in."""
        return size * SECOND // self.network.down[rank]

    def flow(self, source: int, target: int, size: int) -> int:
        """Time for bytes between two ranks that have nothing else to do."""
        if self.network.is_near(source, target):
            return size * SECOND // NEAR
        return size * SECOND // min(self.network.up[source], self.network.down[target])

    def hop(self, source: int, target: int, size: int) -> int:
        """Time until the first piece of this many bytes has arrived from another rank."""
        fill = self.flow(source, target, min(size, self.piece))
        return self.network.latency[source][target] + fill + 2 * self.host.piece

    def hops(self, size: int) -> Table:
        """What :meth:`hop` says for every pair, row by row; the diagonal is zero."""
        table: Table = self.network.times(min(size, self.piece)) + 2 * self.host.piece
        np.fill_diagonal(table, 0)
        return table

    def adding(self, size: int) -> int:
        """Time to add this many bytes to others."""
        return size * SECOND // self.host.reduce_rate


# --------------------------------------------------------------------------------------------------
# Pricing: how long a schedule takes on given links, without running it.
#
# Each rank's list is walked from top to bottom.  Of every step two moments are kept: when the first
# piece of its value is there and when the last is; a step that forwards can begin at the former and
# cannot end before the latter, which is what pipelining means.  Streams are used in order.  What
# streams share (the ways out and in of a rank, its processor) bounds the end of all work on it.


class SpanTransfer(NamedTuple):
    """One span on its way from one rank to another, in nanoseconds from the start."""

    source: int
    target: int
    start: int
    stop: int
    form: Form
    leaves: int
    """When its first piece leaves."""
    arrives: int
    """When its last piece has arrived."""


@dataclass(frozen=True)
class Timeline:
    """Who is busy when."""

    duration: int
    transfers: tuple[SpanTransfer, ...]


class Moments(NamedTuple):
    """When the first and when the last piece of something is there."""

    first: int
    last: int


class SharedResource:
    """Something that all streams of a rank share: it is never faster than its work allows."""

    def __init__(self) -> None:
        self._begin: int | None = None
        self._work = 0

    def serve(self, begin: int, work: int) -> int:
        """Add work that can begin at a moment; the earliest end of all work so far."""
        self._begin = begin if self._begin is None else min(self._begin, begin)
        self._work += work
        return self._begin + self._work


class Walk:
    """One walk over a schedule."""

    def __init__(self, schedule: Schedule, costs: Costs) -> None:
        self.costs = costs
        size = schedule.task.world_size
        # A cable is shared by the ranks of its machine; within one, each has its own ways.
        self._up: defaultdict[tuple[bool, int], SharedResource] = defaultdict(SharedResource)
        self._down: defaultdict[tuple[bool, int], SharedResource] = defaultdict(SharedResource)
        self._processor = [SharedResource() for _ in range(size)]
        self._radios: defaultdict[int, SharedResource] = defaultdict(SharedResource)
        self._free: defaultdict[tuple[int, int], int] = defaultdict(int)
        self._wires: defaultdict[tuple[int, int], deque[Moments]] = defaultdict(deque)
        self.end = 0
        self.transfers: list[SpanTransfer] = []
        walkers = [self._perform(program) for program in schedule.programs]
        while walkers:
            walkers = [walker for walker in walkers if next(walker, None) is not None]

    def _perform(self, program: Program) -> Iterator[int]:
        """Walk one rank's list; whenever it waits for another, that one's number."""
        rank, steps = program.rank, program.steps
        values: list[Moments] = []
        for step in steps:
            first = last = 0
            for peer in step.sources:
                while not self._wires[peer, rank]:
                    yield peer
                arrival = self._wires[peer, rank].popleft()
                first, last = max(first, arrival.first), max(last, arrival.last)
            for index in step.reads:
                earlier = values[index]
                last = max(last, earlier.last)
                if steps[index].start <= step.start:
                    begun = steps[index].start == step.start
                    first = max(first, earlier.first if begun else earlier.last)
            value = self._value(rank, step, Moments(first, max(first, last)))
            values.append(value)
            self.end = max(self.end, value.last)
            for place, peer in enumerate(step.to):
                self._send(rank, peer, step, value, place)

    def _value(self, rank: int, step: ScheduleStep, ready: Moments) -> Moments:
        """When the value is there, given when its operands are."""
        costs = self.costs
        size = step.length * costs.itemsize
        ends = len(step.sources) + len(step.to)
        adding = costs.adding(size) * (step.operands - 1)
        work = costs.pieces(size) * costs.host.piece * ends + adding
        tail = costs.host.piece * max(0, len(step.sources) - 1) + adding // costs.pieces(size)
        end = self._processor[rank].serve(ready.first, work)
        return Moments(ready.first + tail, max(ready.last + tail, end))

    def _send(self, rank: int, peer: int, step: ScheduleStep, value: Moments, place: int) -> None:
        """Put a value on its way; it is number ``place`` of those that go out at the same time."""
        costs, machines = self.costs, self.costs.network.machines
        size = step.length * (costs.wide if step.gives is Form.PARTIAL else costs.itemsize)
        is_near = costs.network.is_near(rank, peer)
        out = costs.flow(rank, peer, size) if is_near else costs.up(rank, size)
        into = costs.flow(rank, peer, size) if is_near else costs.down(peer, size)
        short = min(size, costs.piece)
        first = costs.flow(rank, peer, short)
        turn = place * (costs.host.piece + (first if is_near else costs.up(rank, short)))
        leaves = max(value.first + turn, self._free[rank, peer])
        left = max(value.last, leaves + costs.flow(rank, peer, size))
        source, target = (rank, peer) if is_near else (machines[rank], machines[peer])
        left = max(left, self._up[is_near, source].serve(leaves, out))
        for end, time in () if is_near else ((rank, out), (peer, into)):
            if costs.network.air[end]:
                left = max(left, self._radios[costs.network.air[end]].serve(leaves, time))
        self._free[rank, peer] = left
        hop = costs.hop(rank, peer, size)
        last = max(left, self._down[is_near, target].serve(leaves, into)) + hop - first
        self._wires[rank, peer].append(Moments(leaves + hop, last))
        self.end = max(self.end, last)
        self.transfers.append(
            SpanTransfer(rank, peer, step.start, step.stop, step.gives, leaves, last)
        )


def timeline(schedule: Schedule, costs: Costs) -> Timeline:
    """When which span is on its way."""
    walk = Walk(schedule, costs)
    return Timeline(walk.end, tuple(walk.transfers))


def price(schedule: Schedule, costs: Costs) -> int:
    """How many nanoseconds the schedule takes.

    >>> from potluck.schedule import planner as registry
    >>> from potluck.schedule.cost import Network
    >>> from potluck.schedule.task import Collective, Task
    >>> from potluck._types import LinkMatrix
    >>> network = Network(LinkMatrix.uniform(4, rate=125_000_000, latency=100_000))
    >>> ring = registry.schedule("ring", Task.whole(Collective.ALL_REDUCE, 4, count=4 << 20))
    >>> price(ring, Costs(network)) // 1_000_000  # milliseconds; no way is shorter than 201
    201
    """
    return Walk(schedule, costs).end


# --------------------------------------------------------------------------------------------------
# Loads: what each rank moves and does, and the least time that takes.


@dataclass(frozen=True)
class Load:
    """What each rank moves and does."""

    up: Sequence[int]
    """Bytes out, over the cable."""
    down: Sequence[int]
    """Bytes in, over the cable."""
    pieces: Sequence[int]
    """Pieces out and in."""
    added: Sequence[int]
    """Bytes added to others."""
    near: Sequence[int] = ()
    """Bytes out or in, whichever is more, that stay within the machine."""

    @classmethod
    def of(
        cls,
        costs: Costs,
        flows: Iterable[tuple[int, int, int]],
        pieces: Sequence[int],
        added: Sequence[int],
    ) -> Load:
        """The load of bytes from one rank to another, told as (source, target, bytes)."""
        size, is_near = costs.network.size, costs.network.is_near
        up, down, out, into = ([0] * size for _ in range(4))
        for source, target, count in flows:
            near = is_near(source, target)
            (out if near else up)[source] += count
            (into if near else down)[target] += count
        return cls(up, down, pieces, added, tuple(map(max, out, into)))

    def bound(self, costs: Costs) -> int:
        """No schedule with this load is faster, however well it overlaps."""
        airtime: defaultdict[int, int] = defaultdict(int)
        longest = max(self.near, default=0) * SECOND // NEAR
        for machine, ranks in costs.network.cables.items():
            up = costs.up(machine, sum(self.up[rank] for rank in ranks))
            down = costs.down(machine, sum(self.down[rank] for rank in ranks))
            longest = max(longest, up, down)
            if costs.network.air[machine]:
                airtime[costs.network.air[machine]] += up + down
        work = (
            pieces * costs.host.piece + costs.adding(added)
            for pieces, added in zip(self.pieces, self.added, strict=True)
        )
        return max(longest, *airtime.values(), *work)


# --------------------------------------------------------------------------------------------------
# Estimates for recursive doubling: round by round, for each place of the order.


def _powers(below: int) -> list[int]:
    """1, 2, 4 … as long as they are below."""
    return [1 << exponent for exponent in range((below - 1).bit_length())]


def _heard(costs: Costs, ready: list[int], order: Sequence[int], partners: list[int]) -> list[int]:
    """When each place has heard from its partner, given when each was ready to tell."""
    return [
        max(ready[place], ready[partner] + costs.hop(order[partner], order[place], 0))
        for place, partner in enumerate(partners)
    ]


def doubling_all_reduce(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """Whole vectors between partners; guests tell their host before, and hear from it after."""
    order, size = layout.order, task.world_size
    core = 1 << (size.bit_length() - 1)
    nbytes = task.total * costs.wide
    hosts = range(size - core)
    ready = [0] * core
    for place in hosts:
        ready[place] = costs.hop(order[place + core], order[place], 0)
    for distance in _powers(core):
        ready = _heard(costs, ready, order, [place ^ distance for place in range(core)])
    ends = [costs.hop(order[place], order[place + core], 0) + ready[place] for place in hosts]
    messages = [0] * size
    for place, rank in enumerate(order):
        messages[rank] = 1 if place >= core else len(_powers(core)) + (place in hosts)
    moved = [nbytes * count for count in messages]
    pieces = [2 * costs.pieces(nbytes) * count for count in messages]
    idle = [0] * size
    pairs = [(place, place ^ distance) for distance in _powers(core) for place in range(core)]
    pairs += [both for place in hosts for both in ((place, place + core), (place + core, place))]
    flows = [(order[here], order[there], nbytes) for here, there in pairs]
    # The hops already count the work on one piece each; with many, the processor may be the limit.
    path = max([*ready, *ends]) + Load.of(costs, flows, idle, idle).bound(costs)
    return max(path, Load.of(costs, flows, pieces, moved).bound(costs))


def doubling_barrier(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """Round by round, once the way round."""
    size = task.world_size
    ready = [0] * size
    for distance in _powers(size):
        partners = [(place - distance) % size for place in range(size)]
        ready = _heard(costs, ready, layout.order, partners)
    return max(ready)


def doubling_all_gather(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """Each round passes on all that is known, as soon as the round before is over."""
    size, order = task.world_size, layout.order
    ready = [0] * size  # by place: when all is there that the next round passes on
    flows: list[tuple[int, int, int]] = []
    for distance in _powers(size):
        part = task.total * costs.itemsize * min(distance, size - distance) // size
        pairs = [(order[place - distance], order[place]) for place in range(size)]
        ready = [
            max(now, ready[place - distance] + costs.flow(*pair, part) + costs.hop(*pair, 0))
            for place, (now, pair) in enumerate(zip(ready, pairs, strict=True))
        ]
        flows += [(*pair, part) for pair in pairs]
    idle = [0] * size
    return max(*ready, Load.of(costs, flows, idle, idle).bound(costs))


# --------------------------------------------------------------------------------------------------
# Estimates: the price of a schedule in closed form, where walking it would take long.
#
# Some algorithms have about N² transfers: for a thousand ranks too many to look at.
# But what bounds them is known: the bytes that each rank moves, and the way of a single piece.  An
# algorithm without an estimate is priced by walking its schedule (``pricing``).

Estimate: TypeAlias = Callable[[Task, AlgorithmSettings, Costs], int]
"""Nanoseconds for a task among two ranks or more."""


# --- ring ---


def _ring_time(
    task: Task,
    layout: AlgorithmSettings,
    costs: Costs,
    blocks: Sequence[int],
    *,
    sums: int,
    results: int,
) -> int:
    """Blocks go round, ``sums`` times as partial sums and ``results`` times as results."""
    size, order = task.world_size, layout.order
    hops_of_block = (sums + results) * (size - 1)
    rounds = sums * costs.wide + results * costs.itemsize
    # The first hop of a block carries one rank's own numbers, not a partial sum.
    first = sums * (costs.wide - costs.itemsize) * sum(blocks) // size
    moved = sum(blocks) * (size - 1) // size
    pieces = sum(costs.pieces(block * costs.itemsize) for block in blocks)
    ring = [*order, order[0]]
    load = Load.of(
        costs,
        [(*pair, moved * rounds - first) for pair in pairwise(ring)],
        pieces=(2 * pieces * hops_of_block // size,) * size,
        added=(sums * moved * costs.itemsize,) * size,
    )
    longest = max(blocks) * costs.itemsize
    trip = sum(costs.hop(*pair, longest) for pair in pairwise(ring)) * hops_of_block // size
    idle = max(costs.hop(*pair, 0) for pair in pairwise(ring))
    return max(load.bound(costs) + idle, trip)


def ring_all_reduce(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """Twice round: as sums, then as results."""
    blocks = [span.length for span in split(Span(0, task.total), (1,) * task.world_size)]
    return _ring_time(task, layout, costs, blocks, sums=1, results=1)


def ring_reduce_scatter(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """Once round as sums."""
    return _ring_time(task, layout, costs, task.counts, sums=1, results=0)


def ring_all_gather(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """Once round as results."""
    return _ring_time(task, layout, costs, task.counts, sums=0, results=1)


# --- direct ---

Stage: TypeAlias = tuple[Sequence[int], Sequence[int]]
"""Ranks that send, each to all of the ranks that receive."""


def _straight(costs: Costs, moved: Table, stages: Sequence[Stage], *, adds: bool) -> int:
    """Everybody sends straight to others: elements from each (row) to each, and who to whom."""
    np.fill_diagonal(moved, 0)
    messages = np.zeros((len(moved), 2), np.int64)
    for senders, receivers in stages:
        messages[list(senders), 0] += len(receivers) - np.isin(senders, receivers)
        messages[list(receivers), 1] += len(senders) - np.isin(receivers, senders)
    nbytes = moved * costs.itemsize
    total = int(nbytes.sum())
    if not total:
        return 0
    part = -(-total // int(messages[:, 0].sum()))
    got = nbytes.sum(axis=0)
    within = np.where(costs.network.near, nbytes, 0)
    nbytes -= within
    load = Load(
        up=nbytes.sum(axis=1).tolist(),
        down=nbytes.sum(axis=0).tolist(),
        pieces=(messages.sum(axis=1) * costs.pieces(part)).tolist(),
        added=(got * adds).tolist(),
        near=np.maximum(within.sum(axis=0), within.sum(axis=1)).tolist(),
    )
    idle = max(int(costs.hops(0)[np.ix_(*stage)].max()) for stage in stages)
    return max(load.bound(costs) + idle, _path(costs, part, stages))


def _path(costs: Costs, part: int, stages: Sequence[Stage]) -> int:
    """The time of one message of ``part`` bytes through all stages."""
    hops = costs.hops(part)
    part = min(part, costs.piece)
    turn = np.array([costs.host.piece + costs.up(rank, part) for rank in range(len(hops))])
    ready = np.zeros(len(hops), np.int64)
    for senders, receivers in stages:
        # A rank turns to one receiver after the other, and looks at one sender after the other.
        others = len(receivers) - np.isin(senders, receivers) - 1
        leaves = ready[list(senders)] + turn[list(senders)] * others
        arrives = (leaves[:, None] + hops[np.ix_(senders, receivers)]).max(axis=0)
        ready[list(receivers)] = arrives + costs.host.piece * (len(senders) - 1)
    return int(ready.max())


def _lengths(task: Task, layout: AlgorithmSettings) -> Table:
    spans = split(Span(0, task.total), layout.shares)
    return np.array([span.length for span in spans], np.int64)


def _table(size: int) -> Table:
    return np.zeros((size, size), np.int64)


def direct_all_reduce(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """Contributions to the owners, results to all."""
    own = _lengths(task, layout)
    moved = _table(task.world_size) + own  # from everybody to each owner
    moved += moved.T.copy()
    everybody, owners = range(task.world_size), _owners(own)
    return _straight(costs, moved, [(everybody, owners), (owners, everybody)], adds=True)


def direct_reduce(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """Contributions to the owners, results to the root."""
    own, root = _lengths(task, layout), task.root
    moved = _table(task.world_size) + own
    moved[:, root] += own
    everybody, owners = range(task.world_size), _owners(own)
    return _straight(costs, moved, [(everybody, owners), (owners, [root])], adds=True)


def direct_broadcast(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """Shares to the owners, and from them to all."""
    own, root = _lengths(task, layout), task.root
    moved = (_table(task.world_size) + own).T.copy()  # from each owner to everybody
    moved[:, root] = 0
    moved[root] += own
    listeners = [rank for rank in range(task.world_size) if rank != root]
    owners = _owners(own)
    return _straight(costs, moved, [([root], owners), (owners, listeners)], adds=False)


def _owners(own: Table) -> list[int]:
    return [rank for rank, length in enumerate(own.tolist()) if length] or [0]


def direct_all_gather(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:  # noqa: ARG001
    """Blocks to all."""
    moved = (_table(task.world_size) + np.array(task.counts)).T.copy()
    everybody = range(task.world_size)
    return _straight(costs, moved, [(everybody, everybody)], adds=False)


def direct_reduce_scatter(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:  # noqa: ARG001
    """Contributions to the ranks they belong to."""
    moved = _table(task.world_size) + np.array(task.counts)
    everybody = range(task.world_size)
    return _straight(costs, moved, [(everybody, everybody)], adds=True)


def direct_all_to_all(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:  # noqa: ARG001
    """From each to each."""
    everybody = range(task.world_size)
    moved = np.array(task.counts, np.int64).reshape(task.world_size, task.world_size)
    return _straight(costs, moved, [(everybody, everybody)], adds=False)


# --- central ---


def central_all_reduce(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """The direct form with one owner."""
    return direct_all_reduce(task, owned_by(layout.order[0], layout), costs)


def central_reduce(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """The direct form, owned by the root."""
    return direct_reduce(task, owned_by(task.root, layout), costs)


def central_broadcast(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """The direct form, owned by the root."""
    return direct_broadcast(task, owned_by(task.root, layout), costs)


# --- two levels ---


def levels(task: Task, layout: AlgorithmSettings, costs: Costs) -> int:
    """Within machines and among them at the same time, but for the first piece in and out."""
    division, network = TwoLevels(task, layout), costs.network
    if division.levels.machines != network.machines:  # made for other machines than there are
        return price(Schedule(task, layout, "levels", division.maker), costs)
    ways = MachineWays(task, costs)
    for machine in division.machines:
        for owner, span in machine.owned.items():
            if task.collective.reduces:
                ways.rise(machine.rising(owner), machine.ranks, span.length)
            if task.collective is not Collective.REDUCE:
                ways.sink(machine.sinking(owner), machine.ranks, span.length)
    crossing = _among_machines(division, layout, costs)
    return max(ways.load().bound(costs), crossing) + ways.into + ways.out


class MachineWays:
    """What the ranks of machines tell each other, and how long the first piece takes."""

    def __init__(self, task: Task, costs: Costs) -> None:
        self._costs = costs
        self._flows: list[tuple[int, int, int]] = []
        self._pieces = [0] * task.world_size
        self._added = [0] * task.world_size
        self.into = 0
        """Nanoseconds until the first piece of a machine's sum is there."""
        self.out = 0
        """Nanoseconds from then until all ranks have it."""

    def rise(self, way: TreeShape, ranks: Sequence[int], count: int) -> None:
        """Contributions of this many elements, to the first of a tree."""
        nbytes = count * self._costs.itemsize
        self.into = max(self.into, self._move(way, ranks, nbytes, rises=True))

    def sink(self, way: TreeShape, ranks: Sequence[int], count: int) -> None:
        """Results of this many elements, from the first of a tree."""
        nbytes = count * self._costs.itemsize
        self.out = max(self.out, self._move(way, ranks, nbytes, rises=False))

    def _move(self, way: TreeShape, ranks: Sequence[int], nbytes: int, *, rises: bool) -> int:
        costs, longest = self._costs, 0
        for rank in ranks:
            below, above = rank, way.parent(rank)
            if above is None or not nbytes:
                continue
            self._flows.append((below, above, nbytes) if rises else (above, below, nbytes))
            for end in (below, above):
                self._pieces[end] += costs.pieces(nbytes)
            if rises:
                self._added[above] += nbytes
            took = 0
            while above is not None:
                pair = (below, above) if rises else (above, below)
                took += costs.hop(*pair, nbytes)
                took += costs.host.piece * (len(way.children(above)) - 1)
                below, above = above, way.parent(above)
            longest = max(longest, took)
        return longest

    def load(self) -> Load:
        """Of all ways together."""
        return Load.of(self._costs, self._flows, self._pieces, self._added)


def _among_machines(division: TwoLevels, layout: AlgorithmSettings, costs: Costs) -> int:
    """What the owners of a machine do among machines, each with its part of the cable."""
    size, task, how = len(division.machines), division.task, division.levels
    if size == 1 or not task.total:
        return 0
    owners = min(len(machine.owned) for machine in division.machines)
    every = costs.network.among_machines
    heads = [ranks[0] for ranks in costs.network.cables.values()]
    places = [heads.index(how.machines[machine.ranks[0]]) for machine in division.machines]
    network = Network(
        LinkMatrix(
            tuple(every.up[place] // owners for place in places),
            tuple(every.down[place] // owners for place in places),
            tuple(tuple(every.latency[here][there] for there in places) for here in places),
            air=tuple(every.air[place] for place in places),
        )
    )
    root = division.place_of(task.root) if task.collective.has_root else 0
    part = Task.whole(task.collective, size, -(-task.total // owners), root)
    shares = how.shares or (1,) * size
    settings = AlgorithmSettings(tuple(range(size)), shares, how.arity, layout.piece)
    costs = replace(costs, network=network)
    estimate = ESTIMATES.get((how.among, task.collective))
    if estimate is not None:
        return estimate(part, settings, costs)
    return price(AMONG[how.among].schedule(part, settings), costs)


ESTIMATES: dict[tuple[str, Collective], Estimate] = {
    ("ring", Collective.ALL_REDUCE): ring_all_reduce,
    ("ring", Collective.REDUCE_SCATTER): ring_reduce_scatter,
    ("ring", Collective.ALL_GATHER): ring_all_gather,
    ("central", Collective.ALL_REDUCE): central_all_reduce,
    ("central", Collective.BARRIER): central_all_reduce,
    ("central", Collective.REDUCE): central_reduce,
    ("central", Collective.BROADCAST): central_broadcast,
    ("doubling", Collective.ALL_REDUCE): doubling_all_reduce,
    ("doubling", Collective.BARRIER): doubling_barrier,
    ("doubling", Collective.ALL_GATHER): doubling_all_gather,
    ("direct", Collective.ALL_REDUCE): direct_all_reduce,
    ("direct", Collective.REDUCE): direct_reduce,
    ("direct", Collective.BROADCAST): direct_broadcast,
    ("direct", Collective.ALL_GATHER): direct_all_gather,
    ("direct", Collective.REDUCE_SCATTER): direct_reduce_scatter,
    ("direct", Collective.ALL_TO_ALL): direct_all_to_all,
    ("levels", Collective.ALL_REDUCE): levels,
    ("levels", Collective.REDUCE): levels,
    ("levels", Collective.BROADCAST): levels,
    ("levels", Collective.BARRIER): levels,
}
"""By name of the algorithm and collective."""
