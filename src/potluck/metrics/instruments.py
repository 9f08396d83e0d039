"""Cells: the numbers that metrics are made of.

Any thread may write and read them.  They take a lock for an instant, so they are for what happens
now and then; :mod:`potluck.metrics.instruments` has a journal for what happens all the time.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from potluck._process import call_in_children

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


# --------------------------------------------------------------------------------------------------
# Snapshots: all numbers at one moment, typed; they can be written as JSON as they are.
#
# ``msgspec.json.encode(snapshot)`` does.


class _Section(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Numbers that belong together."""


class OperationSnapshot(_Section, frozen=True, kw_only=True):
    """One kind of operation at one moment; times in ms and the rate are of the last operations."""

    completed: int = 0
    failed: int = 0
    retried: int = 0
    bytes_processed: int = 0
    seconds: float = 0.0
    """Spent in all of them together."""
    bytes_per_second: float = 0.0
    mean_ms: float = 0.0
    p50_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    errors: Mapping[str, float] = {}
    """How often each error was raised."""
    buckets: list[int] = []
    """Durations, in the buckets of a :class:`~potluck.metrics.instruments.Histogram`."""


class PeerSnapshot(_Section, frozen=True, kw_only=True):
    """One peer, by the name of its machine; of very many, the last ones together as ``other``."""

    peer: str
    rank: int = -1
    """In the present view; -1 for one that is in none, and for ``other``."""
    status: str = ""
    """healthy, degraded, suspect or dead; empty where nobody watches."""
    round_trip: float | None = None
    """Seconds, as heartbeats see it."""
    jitter: float | None = None
    loss: float = 0.0
    """Share of the heartbeats that did not come in time, from 0 to 1."""
    waiting: float = 0.0
    """Seconds that operations here have slept because bytes of this peer were missing."""


class CompressionSnapshot(_Section, frozen=True, kw_only=True):
    """Sums whose values travelled in fewer bytes."""

    operations: int = 0
    raw_bytes: int = 0
    sent_bytes: int = 0

    @property
    def ratio(self) -> float:
        """How many times smaller; 1 where nothing was compressed."""
        return self.raw_bytes / self.sent_bytes if self.sent_bytes else 1.0


class HealthSnapshot(_Section, frozen=True, kw_only=True):
    """How the peers are."""

    peers: Mapping[str, int] = {}
    """How many have each status."""
    changes: Mapping[str, float] = {}
    """How often a peer got each status."""
    lateness: float = 0.0
    """Seconds by which this node's own loop ran late recently."""


class ElectionSnapshot(_Section, frozen=True, kw_only=True):
    """Who leads."""

    events: Mapping[str, float] = {}
    """How often each kind of event happened: started, elected, new leader, timeout …"""
    term: int = 0
    is_leader: bool = False


class ViewSnapshot(_Section, frozen=True, kw_only=True):
    """Who is in."""

    state: str = ""
    """joining, active, paused or left; empty outside of a cluster."""
    epoch: int = 0
    members: int = 0
    rank: int = -1
    installed: int = 0
    changes: Mapping[str, float] = {}
    """Views by what brought them: founded, joined, left, lost, merged, other."""
    events: Mapping[str, float] = {}
    """How often each kind of event of the membership happened."""
    pauses: int = 0
    paused_seconds: float = 0.0


class DiscoverySnapshot(_Section, frozen=True, kw_only=True):
    """Who is seen."""

    visible: int = 0
    arrivals: int = 0
    departures: int = 0
    strangers: int = 0
    """Seen, but of another namespace, job or protocol."""
    refused: int = 0
    """Callers that were sent away at the door: strangers, and who said nothing sensible."""
    attempts: int = 0
    """Connections that this process tried to open to others of its job."""
    unreachable: int = 0
    """Of these, the ones that failed."""


class RpcSnapshot(_Section, frozen=True, kw_only=True):
    """Remote calls: those made, and those answered."""

    calls: OperationSnapshot = OperationSnapshot()
    in_flight: int = 0
    served: OperationSnapshot = OperationSnapshot()


class TrainingSnapshot(_Section, frozen=True, kw_only=True):
    """Steps of training."""

    step: int = 0
    committed: int = 0
    repeated: int = 0
    """Averagings that had to be begun again, because somebody came or went."""
    discarded: int = 0
    """Steps whose gradients were for a state that is gone."""
    withdrawn: int = 0
    """Committed steps that were discarded when this member's cluster met another one."""
    samples: float = 0.0
    """Of all members together."""
    loss: float | None = None
    """As this member said last."""
    duration: OperationSnapshot = OperationSnapshot()
    samples_per_second: float = 0.0
    """Of all members together, over the last steps."""


class StateSnapshot(_Section, frozen=True, kw_only=True):
    """Exchanges of the state, and checkpoints."""

    syncs: int = 0
    received_bytes: int = 0
    sync_seconds: float = 0.0
    saved: int = 0
    failed: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0


class MetricsSnapshot(_Section, frozen=True, kw_only=True):
    """All numbers at one moment.

    >>> from potluck import DistributedMetrics
    >>> DistributedMetrics().snapshot().all_reduce.completed
    0
    """

    time: float = 0.0
    """Seconds since 1970."""
    uptime: float = 0.0
    """Seconds since counting began."""
    all_reduce: OperationSnapshot = OperationSnapshot()
    reduce: OperationSnapshot = OperationSnapshot()
    broadcast: OperationSnapshot = OperationSnapshot()
    all_gather: OperationSnapshot = OperationSnapshot()
    reduce_scatter: OperationSnapshot = OperationSnapshot()
    gather: OperationSnapshot = OperationSnapshot()
    scatter: OperationSnapshot = OperationSnapshot()
    all_to_all: OperationSnapshot = OperationSnapshot()
    barrier: OperationSnapshot = OperationSnapshot()
    peers: list[PeerSnapshot] = []
    compression: CompressionSnapshot = CompressionSnapshot()
    health: HealthSnapshot = HealthSnapshot()
    elections: ElectionSnapshot = ElectionSnapshot()
    views: ViewSnapshot = ViewSnapshot()
    discovery: DiscoverySnapshot = DiscoverySnapshot()
    rpc: RpcSnapshot = RpcSnapshot()
    training: TrainingSnapshot = TrainingSnapshot()
    state: StateSnapshot = StateSnapshot()

    @property
    def operations(self) -> dict[str, OperationSnapshot]:
        """Every kind of collective by its name."""
        return {name: getattr(self, name) for name in OPERATIONS}


OPERATIONS = (
    *("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter"),
    *("gather", "scatter", "all_to_all", "barrier"),
)
"""The kinds of collectives."""


# --------------------------------------------------------------------------------------------------
# What is counted about operations that happen all the time: collectives and remote calls.
#
# An operation that ends well is appended to a journal, which is atomic and takes no lock.
# Whoever reads a number works off the journal first; if nobody reads, so does the one who finds it
# long.  What fails is rare, and is counted at once.

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
