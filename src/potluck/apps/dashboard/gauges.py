"""Gauges: rates and curves, from counters that processes tell now and then.

A counter says how much there was since a process began; what people want to see is how much there
is now, and how it went.  Bounded: a few minutes of each process, a few hundred points of each loss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

__all__ = ["Gauges", "Sample"]

EVERY = 1.0
"""Seconds between two points of a curve."""

KEPT = 300
"""Points of each process: five minutes."""

MAX_CURVE = 512
"""Points of a loss: when there are more, every second one is dropped."""

JITTER = 10
"""Steps by which those who are asked at the same moment may differ."""

MAX_PROCESSES = 160
"""Processes with curves; of more, the last ones heard."""

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Sample:
    """How a process did within one second or so."""

    time: float
    throughput: float
    """Bytes of arrays per second that its collectives took."""
    waiting: float
    """Share of the time that it slept because the bytes of others were missing, 0 to 1."""

    def as_list(self) -> list[float]:
        """For the page, in few characters."""
        return [round(self.time, 1), round(self.throughput), round(self.waiting, 4)]


@dataclass(slots=True)
class _Curve:
    """The loss of a job by its steps; thinner when it is long."""

    points: list[list[float]] = field(default_factory=list)
    stride: int = 1

    def add(self, step: float, loss: float) -> None:
        if self.points and step < self.points[-1][0] - JITTER:  # it goes on from an earlier state
            self.points, self.stride = [point for point in self.points if point[0] < step], 1
        if self.points and step < self.points[-1][0] + self.stride:
            return
        self.points.append([step, loss])
        if len(self.points) > MAX_CURVE:
            self.points = self.points[::2]
            self.stride = max(1, int(self.points[-1][0] - self.points[-2][0]))


class Gauges:
    """Rates and curves of all processes and jobs."""

    def __init__(self) -> None:
        self._samples: dict[Key, deque[Sample]] = {}
        self._last: dict[Key, tuple[float, float, float]] = {}  # time, bytes, seconds of waiting
        self._losses: dict[str, _Curve] = {}

    def note(self, key: Key, figures: Mapping[str, float], now: float) -> None:
        """A process has told its counters."""
        octets, waited = figures.get("collectives.bytes"), figures.get("waiting.total")
        if octets is None and waited is None:
            return
        current = (now, octets or 0.0, waited or 0.0)
        before = self._last.get(key)
        if before is not None and now - before[0] < EVERY:
            return
        self._last[key] = current
        if before is not None:
            seconds = now - before[0]
            throughput = max(0.0, current[1] - before[1]) / seconds
            waiting = min(1.0, max(0.0, current[2] - before[2]) / seconds)
            samples = self._samples.setdefault(key, deque(maxlen=KEPT))
            samples.append(Sample(now, throughput, waiting))

    def note_loss(self, job: str, step: float, loss: float) -> None:
        """Some process of a job has told its loss."""
        self._losses.setdefault(job, _Curve()).add(step, loss)

    def keep(self, keys: Iterable[Key], jobs: Iterable[str]) -> None:
        """Forget all others."""
        wanted, named = set(keys), set(jobs)
        for book in (self._samples, self._last):
            for key in [each for each in book if each not in wanted]:
                del book[key]
            while len(book) > MAX_PROCESSES:
                del book[next(iter(book))]
        for job in [each for each in self._losses if each not in named]:
            del self._losses[job]

    def samples(self, key: Key) -> list[Sample]:
        """The last minutes of a process, oldest first."""
        return list(self._samples.get(key, ()))

    def loss(self, job: str) -> list[list[float]]:
        """Step and loss, in order."""
        curve = self._losses.get(job)
        return [] if curve is None else list(curve.points)
