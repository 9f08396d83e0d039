"""The survey: how fast the links of a group are, measured by the ranks and agreed among them.

Before the first large operation each rank sends something to each other rank, in rounds in which
everybody sends to one and receives from one; what arrives is timed where it arrives.  Between two
of one machine there is no link, and how busy its processors are just now says nothing about one, so
nothing is timed.  Then all ranks exchange what they saw, so all make the same plans.  From time to
time they compare how long operations take with how long they took at first, and survey again when
that has changed.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from potluck.vocabulary import LinkMatrix

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.collective.reduce import Array
    from potluck.collective.task import Task
    from potluck.runtime.straight import Messenger

__all__ = ["FAST", "Experience", "agree", "have_changed", "measure"]

BLOCK = 1 << 17
"""Bytes that are sent at a time."""

TRIES = (2, 8, 24)
"""Blocks that are sent over a link, try by try, until one takes long enough.

The first may be carried by buffers on the way that let a burst pass; its rate is not believed if
there is another.
"""

PATIENCE = 0.025
"""Seconds; a link on which a try takes longer has been measured well enough."""

PINGS = 3
"""Short messages sent there and back; the quickest counts."""

QUICKEST = 1_000_000_000
"""Bytes per second that every link counts for which is not the limit."""

ALIKE = 60
"""Per cent of the best rate from which a link counts as equally fast: closer is chance."""

FAST = 250_000_000
"""Bytes per second from which not the link is taken to be the limit but the machines."""

EVERY = 50
"""Large operations between two comparisons."""

CHANGED = 150
"""Per cent of their first duration from which operations count as having become slower."""

NANOSECONDS = 1_000_000_000


def measure(messenger: Messenger, rank: int, size: int) -> Array:
    """What this rank sees: for each other rank its rate towards us, and the time to reach it.

    The rate is 0 where there is no link, within one machine.
    """
    seen = np.zeros((2, size), np.int64)
    block = bytearray(BLOCK)
    for distance in range(1, size):
        right, left = (rank + distance) % size, (rank - distance) % size
        seen[1, right] = min(_ping(messenger, right, left) for _ in range(PINGS))
        seen[0, left] = _time_blocks(messenger, right, left, memoryview(block))
    return seen


def _ping(messenger: Messenger, right: int, left: int) -> int:
    """Nanoseconds to the right neighbour, while the left one finds out the same about us."""
    word = memoryview(bytearray(1))
    start = time.perf_counter_ns()
    messenger.send(right, word)
    messenger.receive(left, word)
    messenger.send(left, word)
    messenger.receive(right, word)
    return max(1, (time.perf_counter_ns() - start) // 2)


def _time_blocks(messenger: Messenger, right: int, left: int, block: memoryview) -> int:
    """Bytes per second that come from the left, while the right neighbour finds out the same.

    Who receives gives the word, and its clock starts before: a late reader, who would find
    everything in its buffer, cannot take that for a fast link.  So no rate is too high, and the
    highest of several is the best known.
    """
    word = memoryview(bytearray(1))
    wanted = [] if messenger.is_local(left) else list(TRIES)
    asked = [] if messenger.is_local(right) else list(TRIES)
    rate = took = 0
    while wanted or asked:
        start = time.perf_counter_ns()
        if wanted:
            if took >= PATIENCE * NANOSECONDS:
                wanted.clear()
            messenger.send(left, memoryview(bytes([bool(wanted)])))
        if asked:
            messenger.receive(right, word)
            if not word[0]:
                asked.clear()
            for _ in range(asked.pop(0) if asked else 0):
                messenger.send(right, block)
        if wanted:
            count = wanted.pop(0)
            for _ in range(count):
                messenger.receive(left, block)
            took = max(1, time.perf_counter_ns() - start)
            found = count * BLOCK * NANOSECONDS // took
            rate = max(rate, found) if count > TRIES[1] else found
    return rate


def agree(rows: Array) -> LinkMatrix:
    """The links, from what all ranks saw; the same on all of them."""
    rates, times = rows[:, 0, :], rows[:, 1, :]
    up = _alike([int(rates[:, rank].max()) or QUICKEST for rank in range(len(rows))])
    down = _alike([int(rates[rank, :].max()) or QUICKEST for rank in range(len(rows))])
    latency = tuple(
        tuple(min(int(time), (1 << 32) - 1) for time in times[rank]) for rank in range(len(rows))
    )
    return LinkMatrix(up, down, latency)


def _alike(rates: Sequence[int]) -> tuple[int, ...]:
    """The same rates, without the differences that are chance."""
    best = max(rates)
    if best >= FAST:
        return tuple(QUICKEST if rate >= FAST else rate for rate in rates)
    return tuple(best if rate * 100 >= best * ALIKE else rate for rate in rates)


def have_changed(changes: Array) -> bool:
    """Whether operations have become so much slower, or faster, that it is worth another look."""
    return bool(changes.max() >= CHANGED or changes.min() <= 100 * 100 // CHANGED)


class Experience:
    """How long large operations took, since the last survey."""

    def __init__(self) -> None:
        self.operations = 0
        self._durations: dict[Task, tuple[list[float], deque[float]]] = {}

    def note(self, task: Task, seconds: float) -> None:
        """One more."""
        self.operations += 1
        first, last = self._durations.setdefault(task, ([], deque(maxlen=10)))
        if len(first) < 10:  # noqa: PLR2004 - enough for a median
            first.append(seconds)
        last.append(seconds)

    @property
    def is_due(self) -> bool:
        """Whether it is time to compare."""
        return self.operations > 0 and self.operations % EVERY == 0

    def change(self, task: Task) -> int:
        """Per cent of their first duration that operations take now."""
        first, last = self._durations.get(task, ([], deque()))
        return round(100 * median(last) / median(first)) if first else 100
