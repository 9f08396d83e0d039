"""Decisions about remote calls: how many at a time, for how long, where they run, and to whom.

Nothing here knows a clock, a thread or a connection; moments are numbers that are passed in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from potluck.core.calls_errors import RpcNoConnection, near_names
from potluck.core.calls_frames import MAX_PATIENCE, SHORT
from potluck.vocabulary import NodeId, ProcessId

__all__ = [
    "Budget",
    "Pace",
    "Stall",
    "Whereabouts",
    "Window",
    "find_rank",
    "milliseconds",
    "name_in_bytes",
    "reply_by",
]

MAX_NAME = 1024
"""Bytes of a function's name."""

LEAST = 4
"""Characters of an id that may stand for all of it."""

MANY = 8
"""Machines that are named to somebody who looks for another."""


class Budget:
    """Bytes of messages that may be under way at a time.

    Short messages have so many, long ones as many again, and beside them there may be one that is
    larger than that: so none waits for a longer one.

    >>> budget = Budget(100_000)
    >>> budget.add(1 << 30); budget.admits(1 << 30), budget.admits(100_000), budget.admits(1)
    (False, True, True)
    """

    __slots__ = ("_larger", "_long", "_octets", "_short", "_short_up_to")

    def __init__(self, octets: int) -> None:
        self._octets = octets
        self._short_up_to = min(SHORT, octets)  # none longer counts as short
        self._short = 0
        self._long = 0
        self._larger = 0

    def admits(self, size: int) -> bool:
        """Whether one more may begin."""
        if size <= self._short_up_to:
            return size + self._short <= self._octets
        return not self._larger if size > self._octets else size + self._long <= self._octets

    def is_larger(self, size: int) -> bool:
        """Whether a message may only be under way if no other such one is."""
        return size > self._octets

    def add(self, size: int) -> None:
        """One has begun."""
        self._count(size, 1)

    def remove(self, size: int) -> None:
        """One has ended."""
        self._count(size, -1)

    def _count(self, size: int, sign: int) -> None:
        if size <= self._short_up_to:
            self._short += sign * size
        elif size > self._octets:
            self._larger += sign
        else:
            self._long += sign * size


class Window(Budget):
    """How much may be under way between two agents: so many calls, and of so many bytes.

    >>> window = Window(2, 100)
    >>> window.admits(500); window.add(500); window.admits(1); window.add(1); window.admits(1)
    True
    True
    False
    """

    __slots__ = ("_calls", "calls")

    def __init__(self, calls: int, octets: int) -> None:
        super().__init__(octets)
        self._calls = calls
        self.calls = 0
        """Under way now."""

    @property
    def octets(self) -> int:
        """Bytes under way, but for one message that is larger than all of them may be."""
        return self._short + self._long

    def admits(self, size: int) -> bool:
        """Whether one more may begin."""
        if size <= self._short_up_to:  # as most are: each step counts here
            return self.calls < self._calls and size + self._short <= self._octets
        return self.calls < self._calls and super().admits(size)

    def add(self, size: int) -> None:
        """One has begun."""
        self.calls += 1
        if size <= self._short_up_to:
            self._short += size
        else:
            super().add(size)

    def remove(self, size: int) -> None:
        """One has ended."""
        self.calls -= 1
        if size <= self._short_up_to:
            self._short -= size
        else:
            super().remove(size)


class Pace:
    """Whether a function is quick enough to run where its request is read, learned from its runs.

    Several quick runs in a row earn the trust; one slow run, which a busy machine may cause, does
    not lose it, two do.
    """

    __slots__ = ("_trust",)

    QUICK = 300e-6
    """Seconds: handing over to another thread costs a tenth of it."""
    ENOUGH, MOST, PRICE = 3, 8, 4

    def __init__(self) -> None:
        self._trust = 0

    def observe(self, seconds: float) -> None:
        """A run has ended."""
        if seconds <= self.QUICK:
            self._trust = min(self.MOST, self._trust + 1)
        else:
            self._trust = max(0, self._trust - self.PRICE)

    @property
    def is_quick(self) -> bool:
        """Whether it has been quick lately."""
        return self._trust >= self.ENOUGH


class Stall:
    """Notices when no worker is left: every one waits for a call of its own, for some time.

    A call that comes from within another then has little hope: what the workers wait for may be
    waiting for it.
    """

    def __init__(self, workers: int, after: float) -> None:
        self._workers = workers
        self._after = after
        self._waiting = 0
        self._since = math.inf

    def begin_waiting(self, now: float) -> None:
        """A worker waits for a call."""
        self._waiting += 1
        if self._waiting >= self._workers:
            self._since = now

    def end_waiting(self) -> None:
        """It got its answer."""
        self._waiting -= 1
        self._since = math.inf

    def is_stalled(self, now: float) -> bool:
        """Whether all have been waiting for so long that it looks like for ever."""
        return now - self._since >= self._after


def milliseconds(seconds: float) -> int:
    """A time as it is carried to the other side, at least one.

    >>> milliseconds(0.25), milliseconds(1e-9), milliseconds(float("inf")) == MAX_PATIENCE
    (250, 1, True)
    """
    return max(1, int(min(seconds * 1000, MAX_PATIENCE)))


def reply_by(arrived: float, patience: int) -> float:
    """The moment at which a call must be answered for the caller to learn why it was not.

    A little before the caller gives up, so that the reason is there in time.
    """
    seconds = patience / 1000
    return arrived + seconds - min(seconds / 10, 0.1)


def name_in_bytes(name: str) -> bytes:
    """A function's name as it travels.

    >>> name_in_bytes("add")
    b'add'
    """
    if not isinstance(name, str):
        msg = f"A function is called by its name, a str, not by {name!r}"
        raise TypeError(msg)
    try:
        octets = name.encode()
    except UnicodeEncodeError:
        msg = f"The name {name[:MAX_NAME]!r} has characters that cannot travel"
        raise ValueError(msg) from None
    if not 0 < len(octets) <= MAX_NAME:
        msg = f"A function's name has 1 to {MAX_NAME} bytes, not {len(octets)}"
        raise ValueError(msg)
    return octets


class Whereabouts(NamedTuple):
    """Where a rank is."""

    name: str
    """Its machine, and perhaps an address: ``attic at 10.0.0.3:4040``."""
    node: str = ""
    """The id of that machine; empty if it is not known."""
    start: int | None = None
    """Which start of the process; None if that is not known."""


def find_rank(wanted: str, ranks: Mapping[int, Whereabouts]) -> int:
    """The rank that somebody means with the name of a machine, or with (the beginning of) an id.

    >>> ranks = {0: Whereabouts("kitchen", "c0ffee00"), 1: Whereabouts("attic", "badcab1e", 7)}
    >>> find_rank("attic", ranks), find_rank("c0ff", ranks), find_rank("badcab/7", ranks)
    (1, 0, 1)
    """
    short = {rank: each.name.partition(" at ")[0] for rank, each in ranks.items()}
    found = [rank for rank, each in ranks.items() if wanted in (each.name, short[rank])]
    found = found or [rank for rank, each in ranks.items() if _is_meant(wanted, each)]
    if len(found) == 1:
        return found[0]
    if found:
        numbers = ", ".join(map(str, found))
        names = ", ".join(dict.fromkeys(ranks[rank].name for rank in found))
        raise RpcNoConnection(
            wanted,
            cause=f"that is several ranks: {numbers} ({names})",
            hint="Address one by its number, or by the id of its process.",
        )
    near = near_names(wanted, sorted(set(short.values())))
    here = ", ".join(sorted(set(short.values()))[:MANY])
    raise RpcNoConnection(
        wanted,
        cause="no rank runs there",
        hint=f"Did you mean {' or '.join(near)}?" if near else f"The machines here: {here}.",
    )


def _is_meant(wanted: str, there: Whereabouts) -> bool:
    node, slash, start = wanted.partition("/")
    if len(node) < LEAST or not there.node.startswith(node):
        return False
    if not slash or there.start is None:
        return not slash
    shown = str(ProcessId(NodeId(there.node), there.start)).partition("/")[2]
    return start in (str(there.start), shown)
