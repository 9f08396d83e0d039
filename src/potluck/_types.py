"""The words every layer shares: small types that say what a value means.

They cost little or nothing at run time; the type checker keeps a node's id from being taken for a
name.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Annotated, NamedTuple, NewType, TypeAlias, overload

import msgspec

from potluck.errors import InvalidWorldSize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from _typeshed import DataclassInstance


Seconds: TypeAlias = float | timedelta
"""A length of time as users write it."""

NodeId = NewType("NodeId", str)
"""Who a machine is: 32 lower-case letters and digits, a hash of its public key.

All processes of one machine and user share it; a process is a node id with an incarnation.
"""


@overload
def in_seconds(time: Seconds) -> float: ...


@overload
def in_seconds(time: Seconds | None) -> float | None: ...


def in_seconds(time: Seconds | None) -> float | None:
    """A length of time as a number of seconds; what is one already stays as it is.

    >>> in_seconds(timedelta(minutes=1)), in_seconds(2.5), in_seconds(None)
    (60.0, 2.5, None)
    """
    return time.total_seconds() if isinstance(time, timedelta) else time


def settle_seconds(config: DataclassInstance) -> None:
    """Make every ``timedelta`` among the fields of a frozen configuration a number of seconds."""
    for each in fields(config):
        value = getattr(config, each.name)
        if isinstance(value, timedelta):
            object.__setattr__(config, each.name, value.total_seconds())


class ProcessId(NamedTuple):
    """Which start of which process: a machine's id, and a number that grows with every start.

    >>> from potluck._types import NodeId
    >>> str(ProcessId(NodeId("a" * 32), 1_731_700_004_711))
    'aaaaaaaa/4711'
    """

    node: NodeId
    incarnation: int

    def __str__(self) -> str:
        """Short, for people: the front of the one and the end of the other."""
        return f"{self.node[:8]}/{self.incarnation % 10_000}"


class Branch(NamedTuple):
    """A point of a lineage: the lineage, and the epoch to which it was followed."""

    lineage: Annotated[str, msgspec.Meta(max_length=32)]
    epoch: Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]


@dataclass(frozen=True, slots=True)
class View:
    """Who is in, as agreed: one of the numbered views of a lineage.

    >>> from potluck._types import NodeId
    >>> me, you = (ProcessId(NodeId(letter * 32), 1) for letter in "ab")
    >>> view = View("f" * 32, 3, (me, you))
    >>> view.leader == me, view.rank_of(you), view.rank_of(ProcessId(NodeId("c" * 32), 1))
    (True, 1, None)
    """

    lineage: str
    """Drawn when the first view was made: 32 hexadecimal digits."""
    epoch: int
    """Counts the views of a lineage, from 1."""
    members: tuple[ProcessId, ...]
    """In rank order."""
    ancestry: tuple[Branch, ...] = field(default=(), compare=False, repr=False)
    """The points (lineage, epoch) at which this lineage and its ancestors branched off."""

    @property
    def leader(self) -> ProcessId:
        """Rank 0."""
        return self.members[0]

    @property
    def session(self) -> bytes:
        """What connections of this view, and no other, present: 16 bytes, the same everywhere."""
        text = f"{self.lineage} {self.epoch} {' '.join(f'{n}/{i}' for n, i in self.members)}"
        return hashlib.sha256(text.encode()).digest()[:16]

    def rank_of(self, process: ProcessId) -> int | None:
        """The rank of a process; None if it is not a member."""
        return self.members.index(process) if process in self.members else None


def lowest_of_each(places: Sequence[object], size: int) -> tuple[int, ...]:
    """For each of ``size`` ranks the lowest one that is in the same place.

    >>> lowest_of_each(["desk", "attic", "desk"], 3)
    (0, 1, 0)
    """
    first: dict[object, int] = {}
    for rank, place in enumerate(places):
        first.setdefault(place, rank)
    if len(places) != size:
        msg = f"{size} ranks are in as many places, not {len(places)}"
        raise ValueError(msg)
    return tuple(first[place] for place in places)


@dataclass(frozen=True, slots=True)
class LinkMatrix:
    """What is known of the links of a group, in whole numbers, so that all ranks compute alike.

    Zero means: not measured yet.  Each rank measures its own row.

    >>> LinkMatrix.uniform(2, rate=125_000_000, latency=100_000).latency
    ((0, 100000), (100000, 0))
    """

    up: tuple[int, ...]
    """Bytes per second that each rank can send."""
    down: tuple[int, ...]
    """Bytes per second that each rank can receive."""
    latency: tuple[tuple[int, ...], ...]
    """Nanoseconds that a short message takes from each rank (row) to each (column)."""
    machines: tuple[int, ...] = ()
    """For each rank the lowest rank of its machine; empty if that is not known."""
    air: tuple[int, ...] = ()
    """Which ranks share a radio: equal numbers from 1 on, 0 for a rank on a cable.

    Empty if none is known to be on a radio.
    """
    in_memory: bool = False
    """Whether all ranks share memory, so that what is large passes no socket."""

    def __post_init__(self) -> None:
        """Refuse what is not a matrix of numbers of a bounded size."""
        size = len(self.up)
        if size == 0:
            raise InvalidWorldSize(0)
        if len(self.air) not in {0, size} or min(self.air, default=0) < 0:
            msg = f"{size} ranks need as many numbers of radios, none negative; got {self.air}"
            raise ValueError(msg)
        if {len(self.down), len(self.latency), *map(len, self.latency)} != {size}:
            msg = f"{size} ranks need as many rates up and down and rows of latencies"
            raise ValueError(msg)
        if self.machines and self.machines != lowest_of_each(self.machines, size):
            msg = f"machines must name the lowest rank of each rank's machine, not {self.machines}"
            raise ValueError(msg)
        rates, latencies = {*self.up, *self.down}, {time for row in self.latency for time in row}
        if min(rates | latencies) < 0 or max(rates) >> 63 or max(latencies) >> 32:
            msg = "Rates must fit into 63 bits, latencies (in nanoseconds) into 32, none negative"
            raise ValueError(msg)

    @classmethod
    def uniform(cls, size: int, *, rate: int, latency: int) -> LinkMatrix:
        """Equal links between all."""
        rows = tuple(
            tuple(0 if there == here else latency for there in range(size)) for here in range(size)
        )
        return cls((rate,) * size, (rate,) * size, rows)

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.up)


def sharing_air(told: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Which ranks share a radio, from the cell and the network that each tells; see ``LinkMatrix``.

    Zero means not known, two zeros mean a cable.  Equal cells share the air.  Who does not know its
    cell shares the air of its network.

    >>> sharing_air([(0, 0), (7, 1), (7, 1), (0, 1), (8, 2)])
    (0, 1, 1, 1, 2)
    >>> sharing_air([(0, 0), (0, 0)])
    ()
    """
    groups = list(range(1, len(told) + 1))
    for rank, (cell, network) in enumerate(told):
        for other, (their_cell, their_network) in enumerate(told[:rank]):
            by_cell = cell == their_cell if cell and their_cell else network == their_network != 0
            if by_cell:
                old, new = groups[rank], groups[other]
                groups = [new if group == old else group for group in groups]
    on_air = [group if any(facts) else 0 for group, facts in zip(groups, told, strict=True)]
    if not any(on_air):
        return ()
    numbers = {group: number for number, group in enumerate(dict.fromkeys(filter(None, on_air)), 1)}
    return tuple(numbers.get(group, 0) for group in on_air)
