"""The survey: how fast the links of a group are, measured by the ranks and agreed among them.

Before the first large operation each rank sends something to each other rank, in rounds in which
everybody sends to one and receives from one; what arrives is timed where it arrives.  Then all
ranks exchange what they saw, so all make the same plans.  From time to time they compare how long
operations take with how long they took at first, and survey again when that has changed.
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

__all__ = ["Experience", "agree", "have_changed", "measure"]

BLOCK = 1 << 17
"""Bytes that are sent at a time; the first block starts the clock and is not counted."""

BLOCKS = 8
"""Blocks that are sent over a link unless it is slow."""

PATIENCE = 0.025
"""Seconds for two blocks; a link that takes longer has been measured well enough."""

PINGS = 3
"""Short messages sent there and back; the quickest counts."""

QUICKEST = 1_000_000_000
"""Bytes per second beyond which not the link is the limit but the machines."""

ALIKE = 70
"""Per cent of the best rate from which a link counts as equally fast: closer is chance."""

EVERY = 50
"""Large operations between two comparisons."""

CHANGED = 150
"""Per cent of their first duration from which operations count as having become slower."""

NANOSECONDS = 1_000_000_000


def measure(messenger: Messenger, rank: int, size: int) -> Array:
    """What this rank sees: for each other rank its rate towards us, and the time to reach it."""
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
    """Bytes per second that come from the left; each receiver says whether it wants more."""
    verdict = memoryview(bytearray(1))
    for _ in range(2):
        messenger.send(right, block)
    rate, took = _receive_blocks(messenger, left, block, 2)
    wants_more = took < PATIENCE * NANOSECONDS
    messenger.send(left, memoryview(bytes([wants_more])))
    messenger.receive(right, verdict)
    if verdict[0]:
        for _ in range(BLOCKS):
            messenger.send(right, block)
    if wants_more:
        rate = max(rate, _receive_blocks(messenger, left, block, BLOCKS)[0])
    return rate


def _receive_blocks(
    messenger: Messenger, left: int, block: memoryview, count: int
) -> tuple[int, int]:
    """The rate, and the nanoseconds that all but the first took."""
    messenger.receive(left, block)
    start = time.perf_counter_ns()
    for _ in range(count - 1):
        messenger.receive(left, block)
    took = max(1, time.perf_counter_ns() - start)
    return (count - 1) * BLOCK * NANOSECONDS // took, took


def agree(rows: Array) -> LinkMatrix:
    """The links, from what all ranks saw; the same on all of them."""
    rates, times = rows[:, 0, :], rows[:, 1, :]
    up = _alike([int(rates[:, rank].max()) for rank in range(len(rows))])
    down = _alike([int(rates[rank, :].max()) for rank in range(len(rows))])
    latency = tuple(
        tuple(min(int(time), (1 << 32) - 1) for time in times[rank]) for rank in range(len(rows))
    )
    return LinkMatrix(up, down, latency)


def _alike(rates: Sequence[int]) -> tuple[int, ...]:
    """The same rates, without the differences that are chance."""
    capped = [min(rate, QUICKEST) for rate in rates]
    best = max(capped)
    return tuple(best if rate * 100 >= best * ALIKE else rate for rate in capped)


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
