"""Cells: the numbers that metrics are made of.

Any thread may write and read them.  They take a lock for an instant, so they are for what happens
now and then; :mod:`potluck.metrics.operations` has a journal for what happens all the time.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np

from potluck.forking import call_in_children

__all__ = ["BOUNDS", "OTHER", "WINDOW", "Counter", "Gauge", "Histogram", "Tally", "drain", "hold"]

Entry = TypeVar("Entry")

WINDOW = 1000
"""Values of which a histogram knows more than their number."""

BOUNDS = tuple(
    digit * 10.0**power for power in range(-2, 5) for digit in (1.0, 2.5, 5.0)
)  # milliseconds, from 10 µs to 50 s
"""Where the buckets of a histogram end; what is larger is in one more."""

_BOUNDS = np.array(BOUNDS)

FEW = 64
"""Values up to which it is not worth while to make an array of them."""

OTHER = "other"
"""Where everything is counted for which there is no place of its own."""

# Not a ForkSafeLock, which is slower: it is taken for every number.  Re-entrant, since a signal's
# handler may end works, which are counted, while the thread that it interrupts counts.
_lock = threading.RLock()


def hold() -> threading.RLock:
    """The lock of all cells, to write or read several at once."""
    return _lock


def drain(journal: list[Entry]) -> list[Entry]:
    """Take out what is in a journal; for whoever has the lock, while others append."""
    count = len(journal)
    taken = journal[:count]
    del journal[:count]
    return taken


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self, value: int = 0) -> None:
        self.value: int = value

    def inc(self) -> None:
        """One more."""
        with _lock:
            self.value += 1

    def add(self, amount: int) -> None:
        """So many more."""
        with _lock:
            self.value += amount


class Gauge:
    """A number that is what it is now; None while nobody has said."""

    __slots__ = ("value",)

    def __init__(self, value: float | None = None) -> None:
        self.value: float | None = value

    def set(self, value: float) -> None:
        """From now on this."""
        self.value = value


class Tally:
    """Counters by name; of more names than a limit the later ones are counted together.

    >>> tally = Tally(limit=2)
    >>> for name in ("mdns", "known", "given", "mdns"): tally.inc(name)
    >>> tally.counts
    {'mdns': 2, 'known': 1, 'other': 1}
    """

    __slots__ = ("_counts", "_limit")

    def __init__(self, names: Iterable[str] = (), limit: int = 32) -> None:
        self._counts: dict[str, float] = dict.fromkeys(names, 0)
        self._limit = limit

    def inc(self, name: str, amount: float = 1) -> None:
        """So many more of these."""
        with _lock:
            self.take(name, amount)

    def take(self, name: str, amount: float = 1) -> None:
        """The same, for those who hold the lock."""
        if name not in self._counts and len(self._counts) >= self._limit:
            name = OTHER
        self._counts[name] = self._counts.get(name, 0) + amount

    @property
    def counts(self) -> dict[str, float]:
        """All of them, as they are now."""
        return dict(self._counts)


class Histogram:
    """How large values were: all of them in buckets, and the last ones as they are.

    >>> times = Histogram()
    >>> for time in (1.0, 2.0, 9.0): times.observe(time)
    >>> times.count, times.mean, times.percentile(50)
    (3, 4.0, 2.0)
    """

    __slots__ = ("buckets", "count", "recent", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        """The sum of all values there were."""
        self.buckets = [0] * (len(BOUNDS) + 1)
        """How many values there were up to each of :data:`BOUNDS`, and above the bound before."""
        self.recent: deque[float] = deque(maxlen=WINDOW)

    def observe(self, value: float) -> None:
        """Take note of a value."""
        with _lock:
            self.take((value,))

    def take(self, values: Sequence[float]) -> None:
        """Take note of values; for those who hold the lock."""
        if len(values) < FEW:
            for value in values:
                self.buckets[bisect_left(BOUNDS, value)] += 1
        else:
            places = np.searchsorted(_BOUNDS, np.array(values))
            counts = np.bincount(places, minlength=len(self.buckets)).tolist()
            self.buckets = [have + new for have, new in zip(self.buckets, counts, strict=True)]
        self.total += sum(values)
        self.count += len(values)
        self.recent.extend(values[-WINDOW:])

    @property
    def mean(self) -> float:
        """Of the last values; 0 where there are none."""
        recent = list(self.recent)
        return sum(recent) / len(recent) if recent else 0.0

    def percentile(self, percent: float) -> float:
        """The value that so many percent of the last ones do not exceed; 0 where there are none."""
        return self.percentiles(percent)[0]

    def percentiles(self, *percents: float) -> list[float]:
        """Several of them at once."""
        ordered = sorted(self.recent)
        if not ordered:
            return [0.0] * len(percents)
        last = len(ordered) - 1
        places = [-(-len(ordered) * percent // 100) - 1 for percent in percents]
        return [ordered[int(min(max(place, 0), last))] for place in places]


def _renew_lock() -> None:
    """In a forked child: another thread of the parent may have held it."""
    global _lock  # noqa: PLW0603 - a lock cannot be freed by another than its owner
    _lock = threading.RLock()


call_in_children(_renew_lock)
