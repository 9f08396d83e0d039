"""What is counted about operations that happen all the time: collectives and remote calls.

An operation that ends well is appended to a journal, which is atomic and takes no lock.
Whoever reads a number works off the journal first; if nobody reads, so does the one who finds it
long.  What fails is rare, and is counted at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from potluck.metrics.cells import Counter, Histogram, Tally, drain, hold
from potluck.metrics.snapshot import OperationSnapshot

__all__ = ["LONG", "OperationMetrics"]

LONG = 512
"""Entries after which the one who writes works off the journal: what fits into a cache."""

WINDOWED = 256
"""Operations over which rates are taken."""

RETRYABLE = frozenset(
    {"Aborted", "PeerLost", "ViewChanged", "LeftOut", "Disconnected", "Timeout", "NoQuorum"}
)
"""After these a program is expected to call again."""


class OperationMetrics:
    """What is counted about one kind of operation."""

    __slots__ = (
        *("_bytes", "_completed", "_duration", "_errors", "_failed", "_rate", "_retried"),
        *("_work_off_before",),
        *("is_interrupted", "seconds", "sizes"),
    )

    def __init__(self, work_off_before: Callable[[], None] | None = None) -> None:
        self._work_off_before = work_off_before
        self.seconds: list[float] = []
        """The journal: how long those took that have ended well and are not counted yet."""
        self.sizes: list[int] = []
        """And how large they were."""
        self.is_interrupted = False
        """Whether the last one failed so that the next one is another try."""
        self._completed, self._failed, self._retried = Counter(), Counter(), Counter()
        self._bytes = Counter()
        self._duration = Histogram()
        self._errors = Tally(limit=24)
        self._rate: deque[int] = deque(maxlen=WINDOWED)

    def note(self, seconds: float, nbytes: int, error: str = "") -> None:
        """An operation has ended: how long it took, how large it was, and the name of its error."""
        if error:
            self._note_failure(seconds, nbytes, error)
            return
        self.seconds.append(seconds)
        self.sizes.append(nbytes)
        if self.is_interrupted or len(self.sizes) > LONG:
            self.tidy()

    def tidy(self) -> None:
        """After something was noted: count it as another try, work off a long journal."""
        if self.is_interrupted:
            with hold():
                self._retried.value += self.is_interrupted
                self.is_interrupted = False
        if len(self.sizes) > LONG:
            self.work_off()

    def _note_failure(self, seconds: float, nbytes: int, error: str) -> None:
        with hold():
            self._failed.value += 1
            self._retried.value += self.is_interrupted
            self.is_interrupted = error in RETRYABLE
            self._errors.take(error)
            self._duration.take([seconds * 1e3])
            self._bytes.value += nbytes

    def work_off(self) -> None:
        """Count what is in the journal, and in the one before it, if there is one."""
        if self._work_off_before is not None:
            self._work_off_before()
        with hold():
            self._count(drain(self.seconds), drain(self.sizes))

    def take(self, seconds: Sequence[float], sizes: Sequence[int]) -> None:
        """Several operations have ended well, one at least; for whoever has the cells' lock."""
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

    # -- numbers, with everything that has happened ------------------------------------------------

    @property
    def completed(self) -> Counter:
        """Operations that ended well."""
        self.work_off()
        return self._completed

    @property
    def failed(self) -> Counter:
        """Operations that raised."""
        self.work_off()
        return self._failed

    @property
    def retried(self) -> Counter:
        """Operations that were called after one of their kind had been interrupted."""
        self.work_off()
        return self._retried

    @property
    def bytes_processed(self) -> Counter:
        """Of the arrays given, whatever went over the wire for them."""
        self.work_off()
        return self._bytes

    @property
    def duration_ms(self) -> Histogram:
        """From the call to its end."""
        self.work_off()
        return self._duration

    def snapshot(self) -> OperationSnapshot:
        """The numbers as they are now."""
        self.work_off()
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
                errors=self._errors.counts,
                buckets=list(times.buckets) if times.count else [],
            )
