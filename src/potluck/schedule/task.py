"""Tasks and layouts: what a collective is to do, and the knobs of how.

A *task* is the same for every algorithm: which collective, how many elements lie where, which root.
A *layout* is what a planner may turn: in which order the ranks stand, who owns which share of the
vector, how wide a tree is, how long a piece is.  Both count elements, never bytes, and both are
equal on all ranks.

Every rank sees its memory in *coordinates*.  A cell of the input and the cell of the output that
share a coordinate may be the same memory: that is what working in place means.  Only ``all_to_all``
cannot work in place, and only there coordinates differ from rank to rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import accumulate, pairwise
from typing import ClassVar, NamedTuple, Self

from potluck.errors import InvalidRank, InvalidWorldSize


class Collective(Enum):
    """What can be asked of a group."""

    ALL_REDUCE = "all_reduce"
    REDUCE = "reduce"
    BROADCAST = "broadcast"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"

    @property
    def reduces(self) -> bool:
        """Whether values are combined, not only moved."""
        return self in _REDUCING

    @property
    def has_root(self) -> bool:
        """Whether one rank is special."""
        return self in _ROOTED

    @property
    def has_blocks(self) -> bool:
        """Whether each rank has a block of its own, so that blocks may differ in size."""
        return self in _BLOCKED


_REDUCING = frozenset(
    {Collective.ALL_REDUCE, Collective.REDUCE, Collective.REDUCE_SCATTER, Collective.BARRIER}
)
_ROOTED = frozenset(
    {Collective.REDUCE, Collective.BROADCAST, Collective.GATHER, Collective.SCATTER}
)
_BLOCKED = frozenset(
    {Collective.ALL_GATHER, Collective.REDUCE_SCATTER, Collective.GATHER, Collective.SCATTER}
)


class Span(NamedTuple):
    """The cells from ``start`` up to, not including, ``stop``."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        """How many cells."""
        return self.stop - self.start


NOWHERE = Span(0, 0)


def split(span: Span, shares: Sequence[int]) -> list[Span]:
    """Cut a span in proportion to ``shares``; a share of zero gets nothing.

    >>> split(Span(0, 10), (1, 1, 1, 0))
    [Span(start=0, stop=3), Span(start=3, stop=6), Span(start=6, stop=10), Span(start=10, stop=10)]
    """
    whole = sum(shares)
    ends = [span.start + span.length * part // whole for part in accumulate(shares, initial=0)]
    return [Span(*both) for both in pairwise(ends)]


def cut(span: Span, parts: int) -> list[Span]:
    """Cut a span into ``parts`` of nearly equal length, empty ones last.

    >>> cut(Span(4, 9), 2)
    [Span(start=4, stop=7), Span(start=7, stop=9)]
    """
    length = -(-span.length // parts)
    starts = [min(span.start + index * length, span.stop) for index in range(parts + 1)]
    return [Span(*ends) for ends in pairwise(starts)]


@dataclass(frozen=True, slots=True)
class Task:
    """One collective call, in numbers that all ranks share."""

    collective: Collective
    world_size: int
    counts: tuple[int, ...]
    """Elements: of the vector, or of each rank's block, or from each rank to each, row by row."""
    root: int = 0

    def __post_init__(self) -> None:
        """Refuse what no group can do."""
        if self.world_size < 1:
            raise InvalidWorldSize(self.world_size)
        if not 0 <= self.root < self.world_size:
            raise InvalidRank(self.root, self.world_size)
        if self.collective is Collective.ALL_TO_ALL:
            expected = self.world_size**2
        else:
            expected = self.world_size if self.collective.has_blocks else 1
        if len(self.counts) != expected or min(self.counts) < 0:
            msg = (
                f"{self.collective.value} among {self.world_size} ranks needs {expected} "
                f"counts of zero or more, not {self.counts!r}"
            )
            raise ValueError(msg)

    @classmethod
    def whole(cls, collective: Collective, world_size: int, count: int, root: int = 0) -> Task:
        """A task on one vector that all ranks have in the same size.

        >>> Task.whole(Collective.BROADCAST, world_size=4, count=10, root=2).output(1)
        Span(start=0, stop=10)
        """
        return cls(collective, world_size, (count,), root)

    @classmethod
    def blocks(cls, collective: Collective, counts: Sequence[int], root: int = 0) -> Task:
        """A task in which rank *i* has a block of ``counts[i]`` elements.

        >>> Task.blocks(Collective.ALL_GATHER, (3, 0, 2)).input(2)
        Span(start=3, stop=5)
        """
        return cls(collective, len(counts), tuple(counts), root)

    @classmethod
    def exchange(cls, matrix: Sequence[Sequence[int]]) -> Task:
        """An all-to-all in which rank *i* sends ``matrix[i][j]`` elements to rank *j*."""
        counts = tuple(count for row in matrix for count in row)
        return cls(Collective.ALL_TO_ALL, len(matrix), counts)

    @property
    def in_place(self) -> bool:
        """Whether input and output may be the same memory."""
        return self.collective is not Collective.ALL_TO_ALL

    @property
    def total(self) -> int:
        """Elements of all blocks together."""
        return sum(self.counts)

    def block(self, rank: int) -> Span:
        """Where a rank's block lies among all blocks."""
        start = sum(self.counts[:rank])
        return Span(start, start + self.counts[rank])

    def spans(self) -> list[Span]:
        """Where every rank's block lies."""
        return [
            Span(end - count, end)
            for count, end in zip(self.counts, accumulate(self.counts), strict=True)
        ]

    def sends(self, rank: int) -> tuple[int, ...]:
        """Of an all-to-all: how many elements a rank has for each."""
        return self.counts[rank * self.world_size : (rank + 1) * self.world_size]

    def receives(self, rank: int) -> tuple[int, ...]:
        """Of an all-to-all: how many elements a rank gets from each."""
        return self.counts[rank :: self.world_size]

    def input(self, rank: int) -> Span:
        """The coordinates of what a rank brings along; empty if it brings nothing."""
        match self.collective:
            case Collective.ALL_GATHER | Collective.GATHER:
                return self.block(rank)
            case Collective.BROADCAST | Collective.SCATTER if rank != self.root:
                return NOWHERE
            case Collective.ALL_TO_ALL:
                return facing(rank, self.sends(rank), self.receives(rank))[0]
        return Span(0, self.total)

    def output(self, rank: int) -> Span:
        """The coordinates of what a rank gets; empty if it gets nothing."""
        match self.collective:
            case Collective.REDUCE_SCATTER | Collective.SCATTER:
                return self.block(rank)
            case Collective.REDUCE | Collective.GATHER if rank != self.root:
                return NOWHERE
            case Collective.ALL_TO_ALL:
                return facing(rank, self.sends(rank), self.receives(rank))[1]
        return Span(0, self.total)


def facing(rank: int, sends: Sequence[int], receives: Sequence[int]) -> tuple[Span, Span]:
    """Input and output of one rank of an all-to-all.

    Both are laid so that what a rank keeps for itself has the same coordinates in both.

    >>> facing(1, (3, 1), (2, 1))
    (Span(start=0, stop=4), Span(start=1, stop=4))
    """
    before_in, before_out = sum(sends[:rank]), sum(receives[:rank])
    shift = max(before_in, before_out)
    into, out = shift - before_in, shift - before_out
    return Span(into, into + sum(sends)), Span(out, out + sum(receives))


@dataclass(frozen=True, slots=True)
class Levels:
    """How the ranks of several machines divide a collective: within machines, and among them."""

    machines: tuple[int, ...]
    """For each rank the lowest rank of its machine."""
    within: str = "direct"
    """The algorithm among the ranks of a machine."""
    among: str = "tree"
    """The algorithm among machines, each of which acts as one rank."""
    shares: tuple[int, ...] = ()
    """Of the machines, in the order in which they stand: how much each owns; empty if alike."""
    arity: int = 2
    """Children of a node of a tree of machines."""


@dataclass(frozen=True, slots=True)
class AlgorithmSettings:
    """The knobs of an algorithm; equal on all ranks, or nothing fits."""

    order: tuple[int, ...]
    """Ranks in the order in which they stand: round the ring, down the tree, in pairs."""
    shares: tuple[int, ...]
    """How much of the vector each rank owns, in proportion; zero means nothing."""
    arity: int = 2
    """Children of a node of a tree; 1 makes a chain."""
    piece: int = 1 << 16
    """Elements that are moved and reduced at a time: 256 KiB of float32."""
    levels: Levels | None = None
    """Of the algorithm that knows machines; ``shares`` then divide the vector on each of them."""

    def __post_init__(self) -> None:
        """Refuse a layout that fits no group."""
        size = len(self.order)
        if sorted(self.order) != list(range(size)):
            msg = f"An order names each rank once, {self.order!r} does not"
            raise ValueError(msg)
        if len(self.shares) != size or min(self.shares, default=0) < 0 or not any(self.shares):
            msg = f"{size} ranks need as many shares of zero or more, not {self.shares!r}"
            raise ValueError(msg)
        if self.levels is not None and len(self.levels.machines) != size:
            msg = f"{size} ranks are on as many machines, or fewer, not {self.levels.machines!r}"
            raise ValueError(msg)
        if self.arity < 1 or self.piece < 1:
            msg = f"Arity and piece are at least 1, not {self.arity} and {self.piece}"
            raise ValueError(msg)

    @classmethod
    def plain(cls, world_size: int, *, arity: int = 2, piece: int = 1 << 16) -> AlgorithmSettings:
        """Ranks in their own order, with equal shares.

        >>> AlgorithmSettings.plain(3).order
        (0, 1, 2)
        """
        return cls(tuple(range(world_size)), (1,) * world_size, arity, piece)

    def headed_by(self, root: int) -> tuple[int, ...]:
        """The order with ``root`` moved to its front.

        >>> AlgorithmSettings.plain(4).headed_by(2)
        (2, 0, 1, 3)
        """
        return (root, *(rank for rank in self.order if rank != root))

    def turned_to(self, root: int) -> tuple[int, ...]:
        """The order, as a ring, entered at ``root``.

        >>> AlgorithmSettings.plain(4).turned_to(2)
        (2, 3, 0, 1)
        """
        place = self.order.index(root)
        return self.order[place:] + self.order[:place]


# --------------------------------------------------------------------------------------------------
# Strategies: how a caller names the algorithm it wants, or leaves the choice to the planner.


@dataclass(frozen=True, slots=True)
class Strategy:
    """An algorithm by name; none means that the planner chooses."""

    algorithm: str | None = None
    arity: int | None = None
    """Of a tree; none leaves it to the configuration."""
    among: Strategy | None = None
    """Among machines; the rest then holds among the ranks of each.  None does not part them."""

    @classmethod
    def tree(cls, arity: int = 2) -> Self:
        """A tree in which every node has ``arity`` children; 1 makes it a chain.

        >>> AllReduceStrategy.tree(arity=4)
        AllReduceStrategy.tree(4)
        """
        if arity < 1:
            msg = f"A node of a tree has at least one child, not {arity}"
            raise ValueError(msg)
        return cls("tree", arity)

    @classmethod
    def two_level(cls, within: Strategy | None = None, among: Strategy | None = None) -> Self:
        """One strategy among the ranks of each machine, and one among machines.

        What is left out is left to the planner.

        >>> AllReduceStrategy.two_level(among=AllReduceStrategy.RING)
        AllReduceStrategy.two_level(AllReduceStrategy.AUTO, AllReduceStrategy.RING)
        """
        within, among = within or cls(), among or cls()
        if within.among is not None or among.among is not None:
            msg = "Each of two levels has a strategy of its own, not of two levels again"
            raise ValueError(msg)
        return cls(within.algorithm, within.arity, among)

    @classmethod
    def named(cls, text: str) -> Self:
        """The strategy that a text names: ``ring``, ``tree:4``, ``direct/ring`` and so on.

        Before a slash stands what holds within a machine, behind it what holds among machines.

        >>> BroadcastStrategy.named("tree:4")
        BroadcastStrategy.tree(4)
        >>> AllReduceStrategy.named("direct/ring") == AllReduceStrategy.two_level(
        ...     AllReduceStrategy.DIRECT, AllReduceStrategy.RING
        ... )
        True
        """
        within, slash, among = text.partition("/")
        if slash:
            return cls.two_level(cls.named(within), cls.named(among))
        name, colon, arity = text.strip().lower().partition(":")
        if name == "tree" and arity.isdecimal():
            return cls.tree(int(arity))
        found = getattr(cls, name.upper(), None)
        if colon or not isinstance(found, cls):
            names = (each for each in dir(cls) if isinstance(getattr(cls, each), cls))
            msg = (
                f"Unknown {cls.__name__} {text!r}: use {', '.join(names).lower()}, tree:ARITY, "
                "or two of these as WITHIN/AMONG machines"
            )
            raise ValueError(msg)
        return found

    @property
    def is_auto(self) -> bool:
        """Whether the choice is left to the planner."""
        return self.algorithm is None and self.among is None

    @property
    def within(self) -> Strategy:
        """What holds among the ranks of a machine."""
        return Strategy(self.algorithm, self.arity)

    def with_arity(self, arity: int) -> Self:
        """The same, with ``arity`` for trees that do not say."""
        among = None if self.among is None else self.among.with_arity(arity)
        is_open = self.algorithm == "tree" and self.arity is None
        return replace(self, arity=arity if is_open else self.arity, among=among)

    def __str__(self) -> str:
        """As :meth:`named` reads it."""
        name = "centralized" if self.algorithm == "central" else self.algorithm or "auto"
        text = name if self.arity is None else f"{name}:{self.arity}"
        return text if self.among is None else f"{text}/{self.among}"

    def __repr__(self) -> str:
        """The expression that makes it."""
        kind = type(self)
        if self.among is not None:
            return (
                f"{kind.__name__}.two_level({kind(self.algorithm, self.arity)!r}, {self.among!r})"
            )
        if self.arity is not None:
            return f"{kind.__name__}.tree({self.arity})"
        for name in dir(kind):
            if getattr(kind, name) == self:
                return f"{kind.__name__}.{name}"
        return f"{kind.__name__}({self.algorithm!r})"


class AllReduceStrategy(Strategy):
    """How an all-reduce is done.

    >>> AllReduceStrategy.AUTO.is_auto, AllReduceStrategy.RING.algorithm
    (True, 'ring')
    """

    __slots__ = ()
    AUTO: ClassVar[AllReduceStrategy]
    RING: ClassVar[AllReduceStrategy]
    TREE: ClassVar[AllReduceStrategy]
    CENTRALIZED: ClassVar[AllReduceStrategy]
    DIRECT: ClassVar[AllReduceStrategy]
    DOUBLING: ClassVar[AllReduceStrategy]


class ReduceStrategy(Strategy):
    """How a reduction to one rank is done.

    >>> ReduceStrategy.named("ring") is ReduceStrategy.RING
    True
    """

    __slots__ = ()
    AUTO: ClassVar[ReduceStrategy]
    RING: ClassVar[ReduceStrategy]
    TREE: ClassVar[ReduceStrategy]
    CENTRALIZED: ClassVar[ReduceStrategy]
    DIRECT: ClassVar[ReduceStrategy]


class BroadcastStrategy(Strategy):
    """How a broadcast is done.

    >>> BroadcastStrategy.named("tree") is BroadcastStrategy.TREE
    True
    """

    __slots__ = ()
    AUTO: ClassVar[BroadcastStrategy]
    RING: ClassVar[BroadcastStrategy]
    TREE: ClassVar[BroadcastStrategy]
    CENTRALIZED: ClassVar[BroadcastStrategy]
    DIRECT: ClassVar[BroadcastStrategy]


for _kind in (AllReduceStrategy, ReduceStrategy, BroadcastStrategy):
    _kind.AUTO = _kind()
    _kind.RING = _kind("ring")
    _kind.TREE = _kind("tree")
    _kind.CENTRALIZED = _kind("central")
    _kind.DIRECT = _kind("direct")
AllReduceStrategy.DOUBLING = AllReduceStrategy("doubling")
