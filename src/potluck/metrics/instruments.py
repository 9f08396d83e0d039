"""Instruments: counters, gauges, histograms, and the counts of frequent operations.

Any thread may write and read them.  Cells (:class:`Counter`, :class:`Histogram` and so on) take a
lock for an instant: they are for rare events.  :class:`OperationMetrics` is for frequent ones: an
operation that succeeds is appended to a journal, which is atomic and takes no lock.  A reader
counts the journal before it reads a number, and a writer does so when the journal has become long.
Failures are rare and are counted at once.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from potluck._platform import call_in_children

Entry = TypeVar("Entry")

WINDOW = 1000
"""Values that a histogram keeps, for percentiles."""

BOUNDS = tuple(
    digit * 10.0**power for power in range(-2, 5) for digit in (1.0, 2.5, 5.0)
)  # milliseconds, from 10 µs to 50 s
"""Upper bounds of the buckets of a histogram; one more bucket has the larger values."""

_BOUNDS = np.array(BOUNDS)

FEW = 64
"""Below this number of values a loop is faster than making an array."""

OTHER = "other"
"""The name under which everything beyond a limit of names is counted."""

# Not a ForkSafeLock, which is slower: it is taken for every number.  Re-entrant, because a signal
# handler may end operations, which are counted, while the interrupted thread is counting.
_lock = threading.RLock()


def hold() -> threading.RLock:
    """The lock of all cells, to write or read several of them at once."""
    return _lock


def drain(journal: list[Entry]) -> list[Entry]:
    """Take all entries out of a journal.  The caller holds the lock; others may append."""
    count = len(journal)
    taken = journal[:count]
    del journal[:count]
    return taken


class Counter:
    """A number that only increases."""

    __slots__ = ("value",)

    def __init__(self, value: int = 0) -> None:
        self.value: int = value

    def inc(self) -> None:
        """Add one."""
        with _lock:
            self.value += 1

    def add(self, amount: int) -> None:
        """Add an amount."""
        with _lock:
            self.value += amount


class Gauge:
    """The latest value of a number; None before the first."""

    __slots__ = ("value",)

    def __init__(self, value: float | None = None) -> None:
        self.value: float | None = value

    def set(self, value: float) -> None:
        """Replace the value."""
        self.value = value


def count(counts: dict[str, float], name: str, *, limit: int = 32) -> None:
    """Add one to the count of a name; names beyond a limit are counted together as ``other``.

    >>> sources: dict[str, float] = {}
    >>> for name in ("mdns", "known", "given", "mdns"): count(sources, name, limit=2)
    >>> sources
    {'mdns': 2, 'known': 1, 'other': 1}
    """
    with _lock:
        if name not in counts and len(counts) >= limit:
            name = OTHER
        counts[name] = counts.get(name, 0) + 1


class Histogram:
    """A distribution of values: all of them in buckets, and the latest ones as they are.

    >>> times = Histogram()
    >>> for time in (1.0, 2.0, 9.0): times.observe(time)
    >>> times.count, times.mean, times.percentile(50)
    (3, 4.0, 2.0)
    """

    __slots__ = ("buckets", "count", "recent", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        """The sum of all values."""
        self.buckets = [0] * (len(BOUNDS) + 1)
        """Values in each bucket: up to its bound in :data:`BOUNDS`, above the bound before it."""
        self.recent: deque[float] = deque(maxlen=WINDOW)

    def observe(self, value: float) -> None:
        """Count a value."""
        with _lock:
            self.take((value,))

    def take(self, values: Sequence[float]) -> None:
        """Count values, for a caller that holds the lock."""
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
        """The mean of the latest values; 0 if there are none."""
        recent = list(self.recent)
        return sum(recent) / len(recent) if recent else 0.0

    def percentile(self, percent: float) -> float:
        """The value that this percentage of the latest values does not exceed; 0 if none."""
        return self.percentiles(percent)[0]

    def percentiles(self, *percents: float) -> list[float]:
        """Several percentiles at once."""
        ordered = sorted(self.recent)
        if not ordered:
            return [0.0] * len(percents)
        last = len(ordered) - 1
        places = [-(-len(ordered) * percent // 100) - 1 for percent in percents]
        return [ordered[int(min(max(place, 0), last))] for place in places]


def _renew_lock() -> None:
    """Replace the lock in a forked child: another thread of the parent may have held it."""
    global _lock  # noqa: PLW0603 - a lock cannot be freed by another than its owner
    _lock = threading.RLock()


call_in_children(_renew_lock)


class OperationSnapshot(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One kind of operation at one moment; times in ms and the rate are of the last operations."""

    completed: int = 0
    failed: int = 0
    retried: int = 0
    bytes_processed: int = 0
    seconds: float = 0.0
    """The total duration of all of them."""
    bytes_per_second: float = 0.0
    mean_ms: float = 0.0
    p50_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    errors: Mapping[str, float] = {}
    """How often each error was raised."""
    buckets: list[int] = []
    """Durations, in the buckets of a :class:`~potluck.metrics.instruments.Histogram`."""


LONG = 512
"""Entries after which a writer counts the journal: few enough to stay in the CPU cache."""

WINDOWED = 256
"""Operations over which rates are taken."""

RETRYABLE = frozenset(
    {"Aborted", "PeerLost", "ViewChanged", "LeftOut", "Disconnected", "Timeout", "NoQuorum"}
)
"""Errors after which a program is expected to repeat the call."""


class OperationMetrics:
    """Counts of one kind of operation: outcomes, bytes, durations, errors."""

    __slots__ = (
        *("_bytes", "_completed", "_duration", "_errors", "_failed", "_rate", "_retried"),
        *("_count_before",),
        *("is_interrupted", "seconds", "sizes"),
    )

    def __init__(self, count_before: Callable[[], None] | None = None) -> None:
        self._count_before = count_before
        self.seconds: list[float] = []
        """The journal: durations of operations that succeeded and are not counted yet."""
        self.sizes: list[int] = []
        """The sizes of the same operations, in bytes."""
        self.is_interrupted = False
        """Whether the last operation was interrupted, so that the next one is a retry."""
        self._completed, self._failed, self._retried = Counter(), Counter(), Counter()
        self._bytes = Counter()
        self._duration = Histogram()
        self._errors: dict[str, float] = {}
        self._rate: deque[int] = deque(maxlen=WINDOWED)

    def note(self, seconds: float, nbytes: int, error: str = "") -> None:
        """Count an operation that has ended: its duration, size, and the name of its error."""
        if error:
            self._note_failure(seconds, nbytes, error)
            return
        self.seconds.append(seconds)
        self.sizes.append(nbytes)
        if self.is_interrupted or len(self.sizes) > LONG:
            self.tidy()

    def tidy(self) -> None:
        """After a success was appended: count a retry, and count a long journal."""
        if self.is_interrupted:
            with hold():
                self._retried.value += self.is_interrupted
                self.is_interrupted = False
        if len(self.sizes) > LONG:
            self.count_journal()

    def _note_failure(self, seconds: float, nbytes: int, error: str) -> None:
        with hold():
            self._failed.value += 1
            self._retried.value += self.is_interrupted
            self.is_interrupted = error in RETRYABLE
            count(self._errors, error, limit=24)
            self._duration.take([seconds * 1e3])
            self._bytes.value += nbytes

    def count_journal(self) -> None:
        """Count the journal, and the shared journal of all collectives before it."""
        if self._count_before is not None:
            self._count_before()
        with hold():
            self._count(drain(self.seconds), drain(self.sizes))

    def take(self, seconds: Sequence[float], sizes: Sequence[int]) -> None:
        """Count several successes, at least one, for a caller that holds the lock."""
        self._retried.value += self.is_interrupted
        self.is_interrupted = False
        self._count(seconds, sizes)

    def _count(self, seconds: Sequence[float], sizes: Sequence[int]) -> None:
        if not seconds and not sizes:
            return
        self._completed.value += len(seconds)
        self._duration.take([each * 1e3 for each in seconds])
        self._bytes.value += sum(sizes)
        self._rate.extend(sizes[-WINDOWED:])

    # -- numbers that include the journal ----------------------------------------------------------

    @property
    def completed(self) -> Counter:
        """Operations that succeeded."""
        self.count_journal()
        return self._completed

    @property
    def failed(self) -> Counter:
        """Operations that raised."""
        self.count_journal()
        return self._failed

    @property
    def retried(self) -> Counter:
        """Operations called after the previous one of their kind was interrupted."""
        self.count_journal()
        return self._retried

    @property
    def bytes_processed(self) -> Counter:
        """Bytes of the arrays given, regardless of how many bytes were sent."""
        self.count_journal()
        return self._bytes

    @property
    def duration_ms(self) -> Histogram:
        """Milliseconds from the call of an operation to its end."""
        self.count_journal()
        return self._duration

    def snapshot(self) -> OperationSnapshot:
        """The numbers as they are now."""
        self.count_journal()
        times = self._duration
        with hold():
            recent = list(times.recent)[-len(self._rate) :] if self._rate else []
            seconds = sum(recent) / 1e3
            p50, p95, p99 = times.percentiles(50, 95, 99)
            return OperationSnapshot(
                completed=self._completed.value,
                failed=self._failed.value,
                retried=self._retried.value,
                bytes_processed=self._bytes.value,
                seconds=times.total / 1e3,
                bytes_per_second=sum(self._rate) / seconds if seconds else 0.0,
                mean_ms=times.mean,
                p50_ms=p50,
                p95_ms=p95,
                p99_ms=p99,
                errors=dict(self._errors),
                buckets=list(times.buckets) if times.count else [],
            )
