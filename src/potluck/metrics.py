"""Metrics: what a context counts about its collectives.

Plain numbers without locks: whoever counts from several threads holds one of its own.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields

__all__ = [
    "Counter",
    "DistributedMetrics",
    "Histogram",
    "MetricsSnapshot",
    "OperationMetrics",
    "OperationSnapshot",
]

WINDOW = 1000
"""Values of which a histogram knows more than their number."""


@dataclass(slots=True)
class Counter:
    """A number that only grows."""

    value: int = 0

    def inc(self) -> None:
        """One more."""
        self.value += 1

    def add(self, amount: int) -> None:
        """So many more."""
        self.value += amount


@dataclass(slots=True)
class Histogram:
    """The last values observed, and how many there were in all.

    >>> times = Histogram()
    >>> for time in (1.0, 2.0, 9.0): times.observe(time)
    >>> times.count, times.mean, times.percentile(50)
    (3, 4.0, 2.0)
    """

    count: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def observe(self, value: float) -> None:
        """Take note of a value."""
        self.count += 1
        self.recent.append(value)

    @property
    def mean(self) -> float:
        """Of the last values; 0 where there are none."""
        return sum(self.recent) / len(self.recent) if self.recent else 0.0

    def percentile(self, percent: float) -> float:
        """The value that so many percent of the last ones do not exceed; 0 where there are none."""
        ordered = sorted(self.recent)
        if not ordered:
            return 0.0
        place = -(-len(ordered) * percent // 100) - 1
        return ordered[int(min(max(place, 0), len(ordered) - 1))]


@dataclass(slots=True)
class OperationMetrics:
    """What is counted about one kind of operation."""

    completed: Counter = field(default_factory=Counter)
    failed: Counter = field(default_factory=Counter)
    bytes_processed: Counter = field(default_factory=Counter)
    """Of the arrays given, whatever went over the wire for them."""
    duration_ms: Histogram = field(default_factory=Histogram)

    def snapshot(self) -> OperationSnapshot:
        """The numbers as they are now."""
        times = self.duration_ms
        return OperationSnapshot(
            completed=self.completed.value,
            failed=self.failed.value,
            bytes_processed=self.bytes_processed.value,
            mean_ms=times.mean,
            p50_ms=times.percentile(50),
            p95_ms=times.percentile(95),
            p99_ms=times.percentile(99),
        )


@dataclass(frozen=True, slots=True)
class OperationSnapshot:
    """One kind of operation at one moment; times are of the last operations."""

    completed: int
    failed: int
    bytes_processed: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float


@dataclass(slots=True)
class DistributedMetrics:
    """What is counted, one entry for each kind of collective.  Several contexts may share it."""

    all_reduce: OperationMetrics = field(default_factory=OperationMetrics)
    reduce: OperationMetrics = field(default_factory=OperationMetrics)
    broadcast: OperationMetrics = field(default_factory=OperationMetrics)
    all_gather: OperationMetrics = field(default_factory=OperationMetrics)
    reduce_scatter: OperationMetrics = field(default_factory=OperationMetrics)
    gather: OperationMetrics = field(default_factory=OperationMetrics)
    scatter: OperationMetrics = field(default_factory=OperationMetrics)
    all_to_all: OperationMetrics = field(default_factory=OperationMetrics)
    barrier: OperationMetrics = field(default_factory=OperationMetrics)

    def snapshot(self) -> MetricsSnapshot:
        """All numbers as they are now."""
        return MetricsSnapshot(
            **{each.name: getattr(self, each.name).snapshot() for each in fields(self)}
        )


@dataclass(frozen=True, slots=True)
class MetricsSnapshot:
    """All numbers at one moment."""

    all_reduce: OperationSnapshot
    reduce: OperationSnapshot
    broadcast: OperationSnapshot
    all_gather: OperationSnapshot
    reduce_scatter: OperationSnapshot
    gather: OperationSnapshot
    scatter: OperationSnapshot
    all_to_all: OperationSnapshot
    barrier: OperationSnapshot
