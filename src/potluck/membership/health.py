"""Who is well: statuses learned from arrivals, each with its reason, as a pure state machine.

The driver of a :class:`HealthMonitor` tells it what was heard and when, and calls ``tick`` at
``next_deadline``.  From the driver's own lateness the monitor learns whether it may accuse others
at all (see :mod:`potluck.membership.health`); from the arrivals how long a peer's silences usually
are (:mod:`potluck.membership.health`).

* *suspect*: silent for longer than ``patience``, or its connection ended;
* *dead*: silent for twice the time after which a member pauses itself; never without silence;
* *degraded*: heard in time over a slow, uneven or lossy link.

A reason is written once, when the cause changes, so logs and screens repeat nothing.
"""

from __future__ import annotations

from bisect import bisect_left as bisect
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum

from potluck._types import ProcessId, Seconds, in_seconds, settle_seconds

# --------------------------------------------------------------------------------------------------
# How health is judged: the beat, the bounds of patience, and what counts as a poor link.
#
# Three presets fit the networks people have.  Interval and pause are those of small groups: larger
# ones beat more slowly (:mod:`potluck.membership.health`).  A member without contact for
# ``pause_after`` pauses itself, and the others exclude it after twice that, so an excluded member
# has stopped before.


@dataclass(frozen=True, slots=True)
class HealthConfig:
    """Times in seconds.  The default is the preset for wired networks.

    >>> HealthConfig.wired().dead_after
    2.0
    """

    interval: float = 0.2
    """From one heartbeat to the next."""
    least_patience: float = 0.6
    """Shorter silence never makes a peer suspect, however regular it was."""
    pause_after: float = 1.0
    """Longest learned patience, and the silence after which a member pauses itself."""
    slow_round_trip: float = 0.1
    """A link whose smoothed round trip takes longer is degraded."""
    high_jitter: float = 0.05
    """A link whose round trips deviate by more (smoothed) is degraded."""
    high_loss: float = 0.2
    """A link on which a larger share of the heartbeats does not come in time is degraded."""

    def __post_init__(self) -> None:
        """Refuse what could not work."""
        settle_seconds(self)
        if not 0 < 2 * self.interval <= self.least_patience <= self.pause_after < float("inf"):
            msg = (
                "Health needs 0 < 2 × interval ≤ least_patience ≤ pause_after, so that one late "
                f"heartbeat accuses no peer; got interval={self.interval}, "
                f"least_patience={self.least_patience}, pause_after={self.pause_after}"
            )
            raise ValueError(msg)
        if not (self.slow_round_trip > 0 and self.high_jitter > 0 and 0 < self.high_loss < 1):
            msg = (
                "slow_round_trip and high_jitter must be positive and high_loss between 0 and 1; "
                f"got {self.slow_round_trip}, {self.high_jitter} and {self.high_loss}"
            )
            raise ValueError(msg)

    def paced(self, interval: Seconds, pause_after: Seconds) -> HealthConfig:
        """The same at the pace of a group: its interval and pause, and patience that fits them.

        >>> HealthConfig.wired().paced(1.0, 5.0).least_patience
        3.0
        """
        pace, pause = in_seconds(interval), in_seconds(pause_after)
        least = min(max(self.least_patience, 3 * pace), pause)
        return replace(self, interval=pace, least_patience=least, pause_after=pause)

    @property
    def dead_after(self) -> float:
        """Silence after which a peer is given up: it has paused itself long before."""
        return 2 * self.pause_after

    @property
    def stretch_limit(self) -> float:
        """How much patience our own lateness can add at most."""
        return 2 * self.pause_after

    @classmethod
    def loopback(cls) -> HealthConfig:
        """Processes of one machine: quick answers, but all compete for the same cores."""
        return cls(
            interval=0.1,
            least_patience=0.4,
            pause_after=1.0,
            slow_round_trip=0.05,
            high_jitter=0.03,
        )

    @classmethod
    def wired(cls) -> HealthConfig:
        """Cables: given up after 2 s of silence, which leaves 1 s to agree on who remains."""
        return cls()

    @classmethod
    def wifi(cls) -> HealthConfig:
        """Radio: power saving and roaming silence a healthy laptop for a second or two."""
        return cls(
            interval=0.5,
            least_patience=2.0,
            pause_after=4.0,
            slow_round_trip=0.3,
            high_jitter=0.15,
            high_loss=0.3,
        )


# --------------------------------------------------------------------------------------------------
# What one peer's arrivals teach: how long its silences usually are, and how good its link is.
#
# The deadline is the median silence plus eight deviations (from the median absolute deviation), and
# at least one and a half times the longest of the recent ones.  A phi-accrual detector would fit a
# normal distribution to the same samples; on Wi-Fi the gaps are anything but normal, one burst
# inflates the variance for the whole window, and its threshold says nothing to a person.  Median
# and longest silence are robust against both, and the sentence "silent for 0.9 s, never more than
# 0.4 s before" can be checked by the reader.

_WINDOW = 64  # silences remembered: about 13 s of heartbeats with the wired preset
_ENOUGH = 8  # silences from which on they are trusted
_LEARN_EVERY = 8  # silences; a lesson that is not much older costs a tenth
_DEVIATIONS = 8.0
_MARGIN = 1.5  # times the longest recent silence
_NORMAL = 1.4826  # standard deviation of a normal distribution for each median absolute deviation
_MOST_MISSED = 3  # heartbeats that one silence counts for: an outage is not a lossy link
_GAIN = 1 / 8  # of a new round trip in the smoothed one, as TCP does (RFC 6298)
_JITTER_GAIN = 1 / 4


class ArrivalTimes:
    """The silences and round trips of one peer; times in awake seconds."""

    def __init__(self, config: HealthConfig, awake: float) -> None:
        self._config = config
        self._silences: deque[float] = deque(maxlen=_WINDOW)
        self._learned: tuple[float, float] | None = None  # None: to be computed
        self._longest = 0.0  # the longest silence at the last lesson
        self._unlearned = 0  # silences since then
        self.heard_at = awake
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

    def arrived(self, awake: float, round_trip: float | None, *, is_late: bool = False) -> None:
        """Something came from the peer; if we ran late ourselves, the round trip is partly ours."""
        silence = awake - self.heard_at
        self.heard_at = awake
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
    """Heartbeats that did not come in a silence of this many intervals, one and a half or more."""
    return min(round(intervals) - 1, _MOST_MISSED)


# --------------------------------------------------------------------------------------------------
# The time for which this node was awake: while its own loop was held up, no peer's silence counts.
#
# A process that got no processor for five seconds finds five seconds of silence of everybody, and
# they of it; accusing them would tear a healthy cluster apart.  So the clock here stands still for
# the time by which a call came later than the loop had meant to wake up, and remembers, fading, how
# late that was: neighbours on the same machine were probably held up for as long.


class StallAwareClock:
    """Turns the caller's ``now`` into awake time; jumps of ``now`` in either direction do no harm.

    >>> clock = StallAwareClock(grace=0.1, half_life=1.0)
    >>> clock.advance(100.0)
    0.0
    >>> clock.due = 101.0               # the loop means to wake up again in a second
    >>> clock.advance(106.0)            # it did after six: five of them do not count
    1.0
    >>> clock.lateness
    5.0
    """

    def __init__(self, *, grace: float, half_life: float, most: float = float("inf")) -> None:
        self._grace = grace  # seconds of lateness, or of a step back, that are everyday life
        self._half_life = half_life  # awake seconds after which half of the lateness is forgotten
        self._most = most  # seconds of lateness that are remembered: more does not help
        self._wall: float | None = None
        self.awake = 0.0
        """Seconds, held-up time and steps back of the clock left out."""
        self.elapsed = 0.0
        """Seconds, only steps back of the clock left out."""
        self.lateness = 0.0
        """How late the own loop was recently, in seconds."""
        self.due: float | None = None
        """When the loop means to call again at the latest, by the caller's clock."""

    def adopt(self, *, grace: float, half_life: float, most: float) -> None:
        """Use other bounds from now on."""
        self._grace, self._half_life, self._most = grace, half_life, most
        self.lateness = min(self.lateness, most)

    @property
    def wall(self) -> float:
        """The latest ``now``."""
        return 0.0 if self._wall is None else self._wall

    def advance(self, now: float) -> float:
        """Advance to ``now``; the time without stalls."""
        step = 0.0 if self._wall is None else now - self._wall
        if step < -self._grace and self.due is not None:
            self.due += step  # the caller's clock was set back
        if self._wall is None or step > 0 or step < -self._grace:
            self._wall = now
        if step <= 0:
            return self.awake
        late = 0.0 if self.due is None else min(step, now - self.due)
        if late <= self._grace:
            late = 0.0
        self.elapsed += step
        self.awake += step - late
        faded = self.lateness * 0.5 ** ((step - late) / self._half_life)
        self.lateness = min(self._most, max(late, faded))
        return self.awake

    def elapsed_at(self, now: float) -> float:
        """What ``elapsed`` is at ``now``, without going there."""
        return self.elapsed + (0.0 if self._wall is None else max(0.0, now - self._wall))


# --------------------------------------------------------------------------------------------------
# What health tells: a status with its reason, the event of a change, and the summary of all.


class HealthStatus(Enum):
    """How a peer is, from best to worst.

    >>> HealthStatus.DEGRADED.is_operational, HealthStatus.DEAD.severity
    (True, 3)
    """

    HEALTHY = "healthy"
    """Heard in time over a good link."""
    DEGRADED = "degraded"
    """Heard in time, but the link is slow, uneven or loses heartbeats."""
    SUSPECT = "suspect"
    """Silent for longer than it ever is, or its connection has ended."""
    DEAD = "dead"
    """Silent for so long that, were it alive, it would have paused itself."""

    def __init__(self, word: str) -> None:
        self.is_operational = word in {"healthy", "degraded"}
        """Whether one can work with the peer now."""

    @property
    def severity(self) -> int:
        """0 for healthy to 3 for dead."""
        return list(HealthStatus).index(self)


class HealthCause(Enum):
    """Why a peer has its status: this status, and a number that tells the causes apart."""

    FINE = HealthStatus.HEALTHY, 0
    LOSSY = HealthStatus.DEGRADED, 1
    SLOW = HealthStatus.DEGRADED, 2
    UNEVEN = HealthStatus.DEGRADED, 3
    SILENT = HealthStatus.SUSPECT, 4
    LOST = HealthStatus.SUSPECT, 5
    GIVEN_UP = HealthStatus.DEAD, 6

    def __init__(self, status: HealthStatus, _: int) -> None:
        self.status = status
        self.is_operational = status.is_operational


@dataclass(frozen=True, slots=True)
class HealthEvent:
    """The status of a peer changed, or its cause did (a silent peer's connection ends).

    >>> from potluck._types import NodeId
    >>> peer = ProcessId(NodeId("b" * 32), 1)
    >>> well, ill = HealthStatus.HEALTHY, HealthStatus.SUSPECT
    >>> print(HealthEvent(peer, "attic", well, ill, "its connection has ended", 7.5))
    attic is suspect: its connection has ended
    """

    peer: ProcessId
    name: str
    previous: HealthStatus
    status: HealthStatus
    reason: str
    time: float

    def __str__(self) -> str:
        """One sentence for the log, the command and the dashboard."""
        return f"{self.name} is {self.status.value}: {self.reason}"


@dataclass(frozen=True, slots=True)
class PeerHealth:
    """All that is known of one peer's health.  Times in seconds; None where not measured yet."""

    peer: ProcessId
    name: str
    status: HealthStatus
    reason: str
    silence: float
    patience: float
    round_trip: float | None
    jitter: float | None
    loss: float
    """Share of the heartbeats that did not come in time, from 0 to 1."""


@dataclass(frozen=True, slots=True)
class HealthSummary:
    """The health of all peers at one moment.

    >>> empty = HealthSummary(peers=(), lateness=0.0)
    >>> empty.is_cluster_healthy, empty.health_percentage
    (True, 100.0)
    """

    peers: tuple[PeerHealth, ...]
    lateness: float
    """Seconds by which this node's own loop ran late recently; it adds to every patience."""

    @property
    def counts(self) -> dict[HealthStatus, int]:
        """How many peers have each status."""
        counted = Counter(peer.status for peer in self.peers)
        return {status: counted[status] for status in HealthStatus}

    @property
    def is_cluster_healthy(self) -> bool:
        """Whether one can work with every peer."""
        return all(peer.status.is_operational for peer in self.peers)

    @property
    def health_percentage(self) -> float:
        """Share of the peers one can work with, in per cent; 100 when there are none."""
        if not self.peers:
            return 100.0
        return 100.0 * sum(peer.status.is_operational for peer in self.peers) / len(self.peers)

    def __str__(self) -> str:
        """One line: how many of each, then the reason of each that is not healthy."""
        if not self.peers:
            return "no peers"
        numbers = ", ".join(
            f"{count} {status.value}" for status, count in self.counts.items() if count
        )
        reasons = [
            f"{peer.name} is {peer.status.value}: {peer.reason}"
            for peer in self.peers
            if peer.status is not HealthStatus.HEALTHY
        ]
        return "; ".join([numbers, *reasons])


# --------------------------------------------------------------------------------------------------

_CALM = 0.7  # a link is good again below this share of the bound that made it degraded
_LASTING = 25  # heartbeats for which a link must be poor before it is said: a busy moment is not
_SHORTEST_SLEEP = 0.001  # seconds; rounding must not make the driver spin


class _Watched:
    """One peer as the monitor knows it."""

    def __init__(self, name: str, arrivals: ArrivalTimes, elapsed: float) -> None:
        self.name = name
        self.arrivals = arrivals
        self.heard_elapsed = elapsed
        self.lateness = 0.0  # seconds by which it ran late recently, as it says
        self.cause = HealthCause.FINE
        self.reason = "no heartbeat was missed so far"
        self.told = HealthStatus.HEALTHY  # the status of the last event
        self.untold = False  # an event is due at the next tick
        self._poor: tuple[HealthCause, float] | None = None  # what the link shows, and since when

    def lasting(self, cause: HealthCause, awake: float, least: float) -> HealthCause:
        """The quality of the link, unless it became so poor only now."""
        if cause is self.cause or cause is HealthCause.FINE:
            self._poor = None
            return cause
        if self._poor is None or self._poor[0] is not cause:
            self._poor = (cause, awake)
        return cause if awake - self._poor[1] >= least else self.cause

    def become(self, cause: HealthCause, reason: str) -> None:
        self.cause, self.reason, self.untold = cause, reason, True

    def tell(self, peer: ProcessId, now: float) -> HealthEvent:
        event = HealthEvent(peer, self.name, self.told, self.cause.status, self.reason, now)
        self.told, self.untold = self.cause.status, False
        return event


class HealthMonitor:
    """The health of the peers of one node, as far as the node can know it.

    >>> from potluck._types import NodeId
    >>> peer = ProcessId(NodeId("b" * 32), 1)
    >>> monitor = HealthMonitor(HealthConfig.wired())
    >>> monitor.watch(peer, now=0.0, name="attic")
    >>> for beat in range(1, 21):
    ...     monitor.heard(peer, now=beat * 0.2, round_trip=0.001)
    ...     events = monitor.tick(now=beat * 0.2)
    >>> monitor.status(peer), round(monitor.patience(peer), 3)
    (<HealthStatus.HEALTHY: 'healthy'>, 0.6)
    >>> while not events:                    # from here on, silence
    ...     events = monitor.tick(monitor.next_deadline)
    >>> print(events[0])
    attic is suspect: no heartbeat for 0.6 s, and 0.6 s is the longest normal gap
    """

    def __init__(self, config: HealthConfig = HealthConfig()) -> None:  # noqa: B008 - frozen
        self.config = config
        self._negligible = config.interval / 10  # seconds of lateness that are everyday life
        self._clock = StallAwareClock(**_bounds(config))
        self._peers: dict[ProcessId, _Watched] = {}
        self._next: float | None = None  # the deadline, if nothing happened that makes it earlier

    def adopt(self, config: HealthConfig) -> None:
        """Judge by another beat from now on: that of a group of another size."""
        if config == self.config:
            return
        self.config = config
        self._negligible = config.interval / 10
        self._clock.adopt(**_bounds(config))
        for watched in self._peers.values():
            watched.arrivals.adopt(config)
        if self._clock.due is not None:
            self._clock.due = min(self._clock.due, self._clock.wall + config.interval)
        self._next = None

    def __contains__(self, peer: object) -> bool:
        return peer in self._peers

    @property
    def peers(self) -> tuple[ProcessId, ...]:
        """Who is watched, in the order in which they came."""
        return tuple(self._peers)

    @property
    def lateness(self) -> float:
        """Seconds by which our own loop ran late recently; fades with a half-life."""
        return self._clock.lateness

    def watch(self, peer: ProcessId, now: float, *, name: str = "") -> None:
        """Begin to expect heartbeats of a peer; its silence counts from now."""
        if peer in self._peers:
            return
        awake = self._clock.advance(now)
        if self._clock.due is None:
            self._clock.due = self._clock.wall + self.config.interval
        arrivals = ArrivalTimes(self.config, awake)
        self._peers[peer] = _Watched(name or str(peer), arrivals, self._clock.elapsed)

    def forget(self, peer: ProcessId) -> None:
        """Expect nothing of a peer any more; nothing happens if nothing was."""
        self._peers.pop(peer, None)
        self._next = None
        if not self._peers:
            self._clock.due = None  # no peer to watch: no loop that could be late

    def heard(
        self,
        peer: ProcessId,
        now: float,
        *,
        round_trip: float | None = None,
        lateness: float | None = None,
    ) -> None:
        """Something arrived from a peer, perhaps the answer to what was sent a round trip ago.

        It may say how late it ran itself: then it is given more time before it is accused.
        """
        awake = self._clock.advance(now)
        watched = self._peers.get(peer)
        if watched is None:
            return
        silence = self._clock.elapsed - watched.heard_elapsed
        watched.arrivals.arrived(awake, round_trip, is_late=self._stretch > 0)
        watched.heard_elapsed = self._clock.elapsed
        if lateness is not None:
            watched.lateness = min(lateness, self.config.stretch_limit)
        if not watched.cause.is_operational:
            watched.become(HealthCause.FINE, f"it was heard again after {_time(silence)}")
            self._next = None

    def lost(self, peer: ProcessId, now: float, reason: str) -> None:
        """The connection to a peer ended: it is suspect at once, and until it is heard again."""
        self._clock.advance(now)
        watched = self._peers.get(peer)
        if (
            watched is None
            or watched.cause is HealthCause.LOST
            or watched.cause is HealthCause.GIVEN_UP
        ):
            return
        watched.become(HealthCause.LOST, f"its connection ended: {reason}")
        self._next = None

    def tick(self, now: float) -> list[HealthEvent]:
        """Judge everybody; what changed since the last tick, in the order of ``peers``."""
        awake = self._clock.advance(now)
        for watched in self._peers.values():
            self._judge(watched, awake)
        self._clock.due = self._clock.wall + self.config.interval if self._peers else None
        self._next = None
        untold = [(peer, watched) for peer, watched in self._peers.items() if watched.untold]
        return [watched.tell(peer, now) for peer, watched in untold]

    def _judge(self, watched: _Watched, awake: float) -> None:
        silence = awake - watched.arrivals.heard_at
        if silence >= self._dead_after(watched):
            cause = HealthCause.GIVEN_UP
        elif not watched.cause.is_operational:
            return  # silence is ended by a sign of life, not by patience that has grown since
        elif silence >= self._patience(watched):
            cause = HealthCause.SILENT
        else:
            cause = watched.lasting(self._quality(watched), awake, _LASTING * self.config.interval)
        if cause is not watched.cause:
            watched.become(cause, self._reason(watched, cause, silence))

    def _quality(self, watched: _Watched) -> HealthCause:
        """How good the link is; what was said is taken back only when it is clearly better."""
        config, link = self.config, watched.arrivals
        loss, delay, jitter = link.loss / config.high_loss, 0.0, 0.0
        if link.is_timed:
            delay = (link.round_trip or 0.0) / config.slow_round_trip
            jitter = (link.jitter or 0.0) / config.high_jitter
        if loss <= _CALM and delay <= _CALM and jitter <= _CALM:
            return HealthCause.FINE
        measured = {HealthCause.LOSSY: loss, HealthCause.SLOW: delay, HealthCause.UNEVEN: jitter}
        if measured.get(watched.cause, 0.0) > _CALM:
            return watched.cause
        return next((cause for cause, ratio in measured.items() if ratio > 1), HealthCause.FINE)

    def _reason(self, watched: _Watched, cause: HealthCause, silence: float) -> str:
        link, config = watched.arrivals, self.config
        late = f" (this machine ran {_time(self.lateness)} late itself)" if self._stretch else ""
        if watched.lateness > self._negligible:
            late += f" (it reported that it ran {_time(watched.lateness)} late)"
        sentences = {
            HealthCause.FINE: "its link is good again",
            HealthCause.LOSSY: f"{link.loss:.0%} of its heartbeats are lost or late",
            HealthCause.SLOW: f"a round trip takes {_time(link.round_trip)}, "
            f"more than {_time(config.slow_round_trip)}",
            HealthCause.UNEVEN: f"its round trips vary by {_time(link.jitter)}, "
            f"more than {_time(config.high_jitter)}",
            HealthCause.SILENT: f"no heartbeat for {_time(silence)}, and "
            f"{_time(self._patience(watched))} is the longest normal gap{late}",
            HealthCause.GIVEN_UP: f"no heartbeat for {_time(silence)}{late}",
        }
        return sentences[cause]

    @property
    def next_deadline(self) -> float | None:
        """When ``tick`` wants to be called next, by the clock of ``now``; None with no peers.

        What is heard only makes it later, so it is worked out once for each tick.
        """
        if self._clock.due is None:
            return None
        if self._next is None:
            self._next = self._work_out_deadline(self._clock.due)
        return min(self._next, self._clock.due)

    def _work_out_deadline(self, due: float) -> float:
        clock, shortest = self._clock, self.config.interval
        for watched in self._peers.values():
            if watched.untold:
                return clock.wall
            shortest = min(shortest, self._wait(watched))
        return min(due, clock.wall + max(_SHORTEST_SLEEP, shortest))

    def _wait(self, watched: _Watched) -> float:
        """Seconds until silence alone makes the peer's status worse."""
        if watched.cause is HealthCause.GIVEN_UP:
            return self.config.interval
        silence = self._clock.awake - watched.arrivals.heard_at
        if watched.cause.is_operational:
            return self._patience(watched) - silence
        return self._dead_after(watched) - silence

    @property
    def _stretch(self) -> float:
        """What our own lateness adds to every patience, seconds."""
        lateness = self._clock.lateness
        return lateness if lateness > self._negligible else 0.0

    def _allowance(self, watched: _Watched) -> float:
        """What our own lateness, or that of the peer, adds to the patience with it, seconds."""
        theirs = watched.lateness if watched.lateness > self._negligible else 0.0
        return max(self._stretch, theirs)

    def _dead_after(self, watched: _Watched) -> float:
        return self.config.dead_after + 2 * self._allowance(watched)

    def _patience(self, watched: _Watched) -> float:
        return watched.arrivals.patience + self._allowance(watched)

    def status(self, peer: ProcessId) -> HealthStatus:
        """How a watched peer is, as of the last call."""
        return self._peers[peer].cause.status

    def is_operational(self, peer: ProcessId) -> bool:
        """Whether one can work with a watched peer, as of the last call."""
        return self._peers[peer].cause.is_operational

    def reason(self, peer: ProcessId) -> str:
        """Why, in words that stay the same until the cause changes."""
        return self._peers[peer].reason

    def silence(self, peer: ProcessId, now: float) -> float:
        """Seconds since a watched peer was last heard, our own lateness included."""
        return self._clock.elapsed_at(now) - self._peers[peer].heard_elapsed

    def allowance(self, peer: ProcessId) -> float:
        """Seconds that lateness, ours or the peer's, adds before it is accused."""
        return self._allowance(self._peers[peer])

    def patience(self, peer: ProcessId) -> float:
        """Seconds of silence after which the peer is suspect: learned, longer if one ran late."""
        return self._patience(self._peers[peer])

    def summary(self, now: float) -> HealthSummary:
        """Everybody's health at one moment."""
        return HealthSummary(
            tuple(
                PeerHealth(
                    peer=peer,
                    name=watched.name,
                    status=watched.cause.status,
                    reason=watched.reason,
                    silence=self.silence(peer, now),
                    patience=self._patience(watched),
                    round_trip=watched.arrivals.round_trip,
                    jitter=watched.arrivals.jitter,
                    loss=watched.arrivals.loss,
                )
                for peer, watched in self._peers.items()
            ),
            self.lateness,
        )


def _bounds(config: HealthConfig) -> dict[str, float]:
    """How the clock of a monitor with this configuration measures lateness."""
    return {
        "grace": config.interval / 4,
        "half_life": config.pause_after,
        "most": config.stretch_limit,
    }


def _time(seconds: float | None) -> str:
    """Seconds in words of a fitting unit."""
    value = seconds or 0.0
    return f"{value:.1f} s" if value >= 0.1 else f"{value * 1000:.1f} ms"  # noqa: PLR2004


# --------------------------------------------------------------------------------------------------
# How fast the heart of a group beats: the interval and the pause follow from its size.
#
# Each member sends n-1 heartbeats in an interval and receives as many.  The interval grows with the
# group, so that there are about 33 of each in a second at most; a pause is at least five intervals,
# so that a few lost beats pause no member.  The proposer of a view computes both once
# and writes them into the proposal: all members of the view compute with the same numbers.

BEATS_PER_SECOND = 33.0
"""Heartbeats that a member sends and receives in a second at most, in a group at rest."""

BEATS_IN_A_PAUSE = 5

LENGTHENED = 4.0
"""Times the pause of the view for which a member that runs late may ask at most."""

_NEGLIGIBLE = 0.1  # of a pause: lateness below it is everyday life


def pace(members: int, preset: HealthConfig, slowest: Iterable[float] = ()) -> tuple[float, float]:
    """The interval and the pause of a group of this size, in seconds.

    ``slowest`` are the pauses that members ask for by their own presets: the longest counts.

    >>> pace(7, HealthConfig.wired())
    (0.2, 1.0)
    >>> pace(34, HealthConfig.wired())
    (1.0, 5.0)
    >>> pace(2, HealthConfig.wired(), [1.0, 4.0])
    (0.2, 4.0)
    """
    own = min(preset.interval, preset.pause_after / BEATS_IN_A_PAUSE)
    interval = max(own, (members - 1) / BEATS_PER_SECOND)
    return interval, max([preset.pause_after, BEATS_IN_A_PAUSE * interval, *slowest])


def lengthened(pause_after: float, lateness: float) -> float:
    """The pause that a member announces that ran late, or hears from others that they did.

    >>> lengthened(1.0, 0.05), lengthened(1.0, 0.5), lengthened(1.0, 30.0)
    (1.0, 2.0, 4.0)
    """
    if lateness <= _NEGLIGIBLE * pause_after:
        return pause_after
    return min(pause_after + 2 * lateness, LENGTHENED * pause_after)


# --------------------------------------------------------------------------------------------------
# A token bucket: a few at once, and then no more than a rate allows.
#
# What one event may cause at once (heartbeats out of turn, probes, connections, campaigns) is
# bounded by one of these, so that no storm of events becomes a storm of messages.


class TokenBucket:
    """Holds at most ``burst`` tokens and gains ``rate`` of them in a second; full at first.

    >>> bucket = TokenBucket(rate=2.0, burst=2, now=0.0)
    >>> [bucket.take(0.0) for _ in range(3)]
    [True, True, False]
    >>> bucket.take(0.4), bucket.take(0.5)
    (False, True)
    """

    def __init__(self, rate: float, burst: int, now: float) -> None:
        if not (rate > 0 and burst >= 1):
            msg = f"A token bucket needs a positive rate and room for one; got {rate} and {burst}"
            raise ValueError(msg)
        self.rate = rate
        self.burst = burst
        self._tokens = float(burst)
        self._at = now

    def _fill(self, now: float) -> None:
        if now > self._at:  # a clock that was set back adds nothing, and takes nothing away
            self._tokens = min(float(self.burst), self._tokens + (now - self._at) * self.rate)
        self._at = now

    def has(self, now: float) -> bool:
        """Whether there is a token."""
        self._fill(now)
        return self._tokens >= 1.0

    def take(self, now: float, tokens: float = 1.0) -> bool:
        """Take tokens; False if there is none.  More than there are leave a debt to wait for."""
        if not self.has(now):
            return False
        self._tokens -= tokens
        return True

    def when(self, now: float) -> float:
        """When there is a token: ``now`` if there is one already."""
        self._fill(now)
        return now + max(0.0, 1.0 - self._tokens) / self.rate
