"""Putting the clocks of several machines side by side, from what their dumps have in common.

Processes of one machine share a steady clock.  Between machines two facts are used.  All ranks
leave an all-reduce, a barrier and their like at about the same moment, so the median difference of
the ends of such operations is the difference of the clocks, however late some rank came to them.
And no rank can leave before the last has come, nor receive what was not sent: these bounds always
hold, and correct the median where it is wrong.  Where nothing was done together, the clocks on the
wall have to do.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

from potluck.apps.cli.trace_reading import Dump
from potluck.runtime.recorder_format import Outcome, Record

__all__ = ["Alignment", "OperationKey", "align", "key_of", "matched_messages"]

SYNCHRONISING = frozenset({"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"})
"""No rank leaves one of these before all have come."""

RECENT = 256
"""Common operations that count, the last ones: clocks drift."""

MANY = 128
"""Machines beyond which only what two have done directly is used: the rest takes too long."""

OperationKey: TypeAlias = tuple[str, str, tuple[int, ...], int, str]
"""View, group, members, number and name: the same on all ranks of one operation."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """How to read the clocks of some dumps as one: add a dump's offset to its times."""

    offsets: tuple[float, ...]
    notes: tuple[str, ...]
    """How it was done, one sentence for each machine but the first."""
    uncertainty: float
    """Seconds by which two machines may be apart."""


def key_of(record: Record) -> OperationKey:
    """What a collective has in common on all its ranks."""
    return record.view, record.group, record.members, record.number, record.what


def align(dumps: Sequence[Dump]) -> Alignment:
    """Offsets for all dumps; the first one's clock is the measure."""
    machines: dict[str, list[int]] = {}
    for index, dump in enumerate(dumps):
        machines.setdefault(dump.header.machine or f"dump {index}", []).append(index)
    names = list(machines)
    home = {index: place for place, name in enumerate(names) for index in machines[name]}
    shared = _Shared(len(names))
    for one, other in _common_operations(dumps):
        if home[one[0]] != home[other[0]]:
            shared.met((home[one[0]], one[1]), (home[other[0]], other[1]))
    for (sender, sent), (receiver, received) in matched_messages(dumps):
        if home[sender] != home[receiver] and received.end is not None:
            # Sent before it was received: offset(sender) - offset(receiver) is at most this.
            shared.bound(home[receiver], home[sender], received.end - sent.begin)
    walls = [dumps[machines[name][0]].header for name in names]
    by_wall = [
        header.wall - header.monotonic - (walls[0].wall - walls[0].monotonic) for header in walls
    ]
    offsets, notes, uncertainty = shared.solve(
        by_wall, [header.name or header.host for header in walls]
    )
    return Alignment(tuple(offsets[home[index]] for index in range(len(dumps))), notes, uncertainty)


Ended: TypeAlias = tuple[int, Record]
"""Whose it is, and what."""


def _common_operations(dumps: Sequence[Dump]) -> Iterable[tuple[Ended, Ended]]:
    """Pairs of ranks in one operation that synchronises."""
    found: dict[OperationKey, list[Ended]] = defaultdict(list)
    for index, dump in enumerate(dumps):
        for record in dump.records:
            is_done = record.outcome is Outcome.DONE and record.end is not None
            if is_done and record.lane == "collectives" and record.what in SYNCHRONISING:
                found[key_of(record)].append((index, record))
    for ranks in found.values():
        first = ranks[0]
        for other in ranks[1:]:
            yield first, other


def matched_messages(dumps: Sequence[Dump]) -> list[tuple[Ended, Ended]]:
    """Sends and the receives that took them: the n-th to a rank is its n-th of that size."""
    sends: dict[object, Ended] = {}
    received: list[tuple[object, Ended]] = []
    for index, dump in enumerate(dumps):
        for record in dump.records:
            if record.lane != "messages" or record.outcome is not Outcome.DONE:
                continue
            is_send = record.what == "send"
            source, target = (record.rank, record.peer) if is_send else (record.peer, record.rank)
            where = (record.view, record.group, record.members, source, target)
            key = (*where, record.tag, record.number, record.bytes)
            if is_send:
                sends[key] = (index, record)
            else:
                received.append((key, (index, record)))
    return [(sends[key], taken) for key, taken in received if key in sends]


class _Shared:
    """What machines have done together."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._most = [[math.inf] * count for _ in range(count)]
        self._apart: dict[tuple[int, int], list[float]] = defaultdict(list)

    def met(self, one: Ended, other: Ended) -> None:
        """Two machines were in one operation, both to its end."""
        (here, mine), (there, theirs) = one, other
        assert mine.end is not None
        assert theirs.end is not None
        self.bound(here, there, mine.end - theirs.begin)
        self.bound(there, here, theirs.end - mine.begin)
        ends = mine.end - theirs.end
        self._apart[here, there].append(ends)
        self._apart[there, here].append(-ends)

    def bound(self, here: int, there: int, most: float) -> None:
        """The offset of ``there`` is at most so much more than that of ``here``."""
        self._most[here][there] = min(self._most[here][there], most)

    def solve(
        self, by_wall: Sequence[float], names: Sequence[str]
    ) -> tuple[list[float], tuple[str, ...], float]:
        """Offsets of all machines, how they were found, and how far they may be off."""
        self._close()
        offsets, spread = {0: 0.0}, {0: 0.0}
        while True:  # the machine with most in common with those that are placed comes next
            edges = [
                (len(apart), here, there)
                for (here, there), apart in self._apart.items()
                if here in offsets and there not in offsets
            ]
            if not edges:
                break
            _, here, there = max(edges)
            apart = self._apart[here, there][-RECENT:]
            offsets[there] = offsets[here] + median(apart)
            middle = median(apart)
            spread[there] = spread[here] + median(abs(each - middle) for each in apart)
        notes = []
        for place in range(1, self._count):
            guess = offsets.get(place, by_wall[place])
            offsets[place] = self._within(place, guess)
            notes.append(self._note(place, spread, names))
        return [offsets[place] for place in range(self._count)], tuple(notes), max(spread.values())

    def _close(self) -> None:
        """What follows from the bounds by way of other machines (Floyd and Warshall)."""
        if self._count > MANY:
            return
        most, places = self._most, range(self._count)
        for middle in places:
            for here in places:
                for there in places:
                    through = most[here][middle] + most[middle][there]
                    most[here][there] = min(most[here][there], through)

    def _within(self, place: int, guess: float) -> float:
        """What the bounds allow; where they contradict each other, for clocks drift, the middle."""
        highest, lowest = self._most[0][place], -self._most[place][0]
        if lowest > highest:
            return (lowest + highest) / 2
        return min(max(guess, lowest), highest)

    def _note(self, place: int, spread: dict[int, float], names: Sequence[str]) -> str:
        who = names[place] or f"machine {place + 1}"
        if place not in spread:
            return (
                f"The clock of {who} was taken from the wall: it has done nothing together with "
                "the others that is in the dumps."
            )
        count = max(len(apart) for (_, there), apart in self._apart.items() if there == place)
        times = "1 operation" if count == 1 else f"{min(count, RECENT)} operations"
        about = f"{spread[place] * 1e3:.2g} ms"
        return f"The clock of {who} was set by {times} in common, to about {about}."
