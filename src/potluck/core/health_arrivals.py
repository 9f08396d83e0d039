"""What one peer's arrivals teach: how long its silences usually are, and how good its link is.

The deadline is the median silence plus eight deviations (from the median absolute deviation), and
at least one and a half times the longest of the recent ones.  A phi-accrual detector would fit a
normal distribution to the same samples; on Wi-Fi the gaps are anything but normal, one burst
inflates the variance for the whole window, and its threshold says nothing to a person.  Median and
longest silence are robust against both, and the sentence "silent for 0.9 s, never more than 0.4 s
before" can be checked by whoever reads it.
"""

from __future__ import annotations

from bisect import bisect_left as bisect
from collections import deque

from potluck.core.health_config import HealthConfig

__all__ = ["Arrivals"]

_WINDOW = 64  # silences remembered: about 13 s of heartbeats with the wired preset
_ENOUGH = 8  # silences from which on they are trusted
_LEARN_EVERY = 8  # silences; a lesson that is not much older costs a tenth
_DEVIATIONS = 8.0
_MARGIN = 1.5  # times the longest recent silence
_NORMAL = 1.4826  # standard deviation of a normal distribution for each median absolute deviation
_MOST_MISSED = 3  # heartbeats that one silence counts for: an outage is not a lossy link
_GAIN = 1 / 8  # of a new round trip in the smoothed one, as TCP does (RFC 6298)
_JITTER_GAIN = 1 / 4


class Arrivals:
    """The silences and round trips of one peer; times in lived seconds."""

    def __init__(self, config: HealthConfig, lived: float) -> None:
        self._config = config
        self._silences: deque[float] = deque(maxlen=_WINDOW)
        self._learned: tuple[float, float] | None = None  # None: to be computed
        self._longest = 0.0  # the longest silence at the last lesson
        self._unlearned = 0  # silences since then
        self.heard_at = lived
        self._trips = 0
        self.round_trip: float | None = None
        """Smoothed, seconds."""
        self.jitter: float | None = None
        """Smoothed deviation of the round trips, seconds."""

    def adopt(self, config: HealthConfig) -> None:
        """Judge by another beat from now on; silences that were learned at the old one go."""
        if config.interval != self._config.interval:
            self._silences.clear()
        self._config, self._learned = config, None

    def arrived(self, lived: float, round_trip: float | None, *, is_late: bool = False) -> None:
        """Something came from the peer; if we ran late ourselves, the round trip is partly ours."""
        silence = lived - self.heard_at
        self.heard_at = lived
        if silence >= self._config.interval / 2:  # messages in between say nothing about the beat
            self._silences.append(min(silence, self._config.pause_after))
            self._unlearned += 1
            if silence > self._longest or self._unlearned >= _LEARN_EVERY:
                self._learned = None  # patience grows at once, and shrinks a little later
        if round_trip is None or round_trip < 0:
            return
        if is_late and (self.round_trip is None or round_trip > self.round_trip):
            return  # a quick answer is true at any time, a slow one says nothing about the link
        self._smooth(round_trip)

    def _smooth(self, round_trip: float) -> None:
        self._trips += 1
        if self.round_trip is None or self.jitter is None:
            self.round_trip, self.jitter = round_trip, 0.0
            return
        first = 1 / self._trips  # at first the mean of all, so that the first one weighs no more
        self.jitter += max(_JITTER_GAIN, first) * (abs(round_trip - self.round_trip) - self.jitter)
        self.round_trip += max(_GAIN, first) * (round_trip - self.round_trip)

    @property
    def is_timed(self) -> bool:
        """Whether round trip and jitter rest on enough samples to judge by."""
        return self._trips >= _ENOUGH

    @property
    def patience(self) -> float:
        """Seconds of silence that are still normal; the longest allowed until enough is known."""
        return self._lesson[0]

    @property
    def loss(self) -> float:
        """Share of the heartbeats that did not come in time, among the recent ones."""
        return self._lesson[1]

    @property
    def _lesson(self) -> tuple[float, float]:
        if self._learned is None:
            self._learned = self._learn()
        return self._learned

    def _learn(self) -> tuple[float, float]:
        """Patience and loss; asked for with every tick, computed after several arrivals."""
        config, silences = self._config, sorted(self._silences)
        self._longest, self._unlearned = silences[-1] if silences else 0.0, 0
        if len(silences) < _ENOUGH:
            return config.pause_after, 0.0
        middle = silences[len(silences) // 2]
        deviation = sorted(abs(silence - middle) for silence in silences)[len(silences) // 2]
        wanted = max(middle + _DEVIATIONS * _NORMAL * deviation, _MARGIN * silences[-1])
        late = silences[bisect(silences, 1.5 * config.interval) :]
        missed = sum(_missed(silence / config.interval) for silence in late)
        patience = min(max(wanted, config.least_patience), config.pause_after)
        return patience, missed / (missed + len(silences))


def _missed(intervals: float) -> int:
    """Heartbeats that did not come in a silence of so many intervals."""
    return min(max(0, round(intervals) - 1), _MOST_MISSED)
