"""Who is well: statuses learned from arrivals, each with its reason, as a pure state machine.

Whoever drives a :class:`HealthMonitor` tells it what was heard and when, and calls ``tick`` at
``next_deadline``.  From the driver's own lateness the monitor learns whether it may accuse others
at all (see :mod:`potluck.core.health_clock`); from the arrivals how long a peer's silences usually
are (:mod:`potluck.core.health_arrivals`).

* *suspect*: silent for longer than ``patience``, or its connection ended;
* *dead*: silent for twice the time after which a member pauses itself; never without silence;
* *degraded*: heard in time over a slow, uneven or lossy link.

A reason is written once, when the cause changes, so logs and screens repeat nothing.
"""

from __future__ import annotations

from potluck.core.health_arrivals import Arrivals
from potluck.core.health_clock import LivedClock
from potluck.core.health_config import HealthConfig
from potluck.core.health_records import (
    HealthCause,
    HealthEvent,
    HealthStatus,
    HealthSummary,
    PeerHealth,
)
from potluck.vocabulary import ProcessId

__all__ = [
    "HealthConfig",
    "HealthEvent",
    "HealthMonitor",
    "HealthStatus",
    "HealthSummary",
    "PeerHealth",
]

_CALM = 0.7  # a link is good again below this share of the bound that made it degraded
_LASTING = 25  # heartbeats for which a link must be poor before it is said: a busy moment is not
_SHORTEST_SLEEP = 0.001  # seconds; rounding must not make the driver spin


class _Watched:
    """One peer as the monitor knows it."""

    def __init__(self, name: str, arrivals: Arrivals, elapsed: float) -> None:
        self.name = name
        self.arrivals = arrivals
        self.heard_elapsed = elapsed
        self.lateness = 0.0  # seconds by which it ran late recently, as it says
        self.cause = HealthCause.FINE
        self.reason = "nothing has been missed since it is watched"
        self.told = HealthStatus.HEALTHY  # the status of the last event
        self.untold = False  # an event is due at the next tick
        self._poor: tuple[HealthCause, float] | None = None  # what the link shows, and since when

    def lasting(self, cause: HealthCause, lived: float, least: float) -> HealthCause:
        """The quality of the link, unless it became so poor only now."""
        if cause is self.cause or cause is HealthCause.FINE:
            self._poor = None
            return cause
        if self._poor is None or self._poor[0] is not cause:
            self._poor = (cause, lived)
        return cause if lived - self._poor[1] >= least else self.cause

    def become(self, cause: HealthCause, reason: str) -> None:
        self.cause, self.reason, self.untold = cause, reason, True

    def tell(self, peer: ProcessId, now: float) -> HealthEvent:
        event = HealthEvent(peer, self.name, self.told, self.cause.status, self.reason, now)
        self.told, self.untold = self.cause.status, False
        return event


class HealthMonitor:
    """The health of the peers of one node, as far as the node can know it.

    >>> from potluck.vocabulary import NodeId
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
    attic is suspect: nothing was heard for 0.6 s, and 0.6 s is the longest normal silence
    """

    def __init__(self, config: HealthConfig = HealthConfig()) -> None:  # noqa: B008 - frozen
        self.config = config
        self._negligible = config.interval / 10  # seconds of lateness that are everyday life
        self._clock = LivedClock(**_bounds(config))
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
        lived = self._clock.advance(now)
        if self._clock.due is None:
            self._clock.due = self._clock.wall + self.config.interval
        self._next = None
        arrivals = Arrivals(self.config, lived)
        self._peers[peer] = _Watched(name or str(peer), arrivals, self._clock.elapsed)

    def forget(self, peer: ProcessId) -> None:
        """Expect nothing of a peer any more; nothing happens if nothing was."""
        self._peers.pop(peer, None)
        self._next = None
        if not self._peers:
            self._clock.due = None  # nobody to watch: no loop that could be late

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
        lived = self._clock.advance(now)
        watched = self._peers.get(peer)
        if watched is None:
            return
        silence = self._clock.elapsed - watched.heard_elapsed
        watched.arrivals.arrived(lived, round_trip, is_late=self._stretch > 0)
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
        lived = self._clock.advance(now)
        for watched in self._peers.values():
            self._judge(watched, lived)
        self._clock.due = self._clock.wall + self.config.interval if self._peers else None
        self._next = None
        untold = [(peer, watched) for peer, watched in self._peers.items() if watched.untold]
        return [watched.tell(peer, now) for peer, watched in untold]

    def _judge(self, watched: _Watched, lived: float) -> None:
        silence = lived - watched.arrivals.heard_at
        if silence >= self._dead_after(watched):
            cause = HealthCause.GIVEN_UP
        elif not watched.cause.is_operational:
            return  # silence is ended by a sign of life, not by patience that has grown since
        elif silence >= self._patience(watched):
            cause = HealthCause.SILENT
        else:
            cause = watched.lasting(self._quality(watched), lived, _LASTING * self.config.interval)
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
        late = f" (we ran {_time(self.lateness)} late ourselves)" if self._stretch else ""
        if watched.lateness > self._negligible:
            late += f" (it said that it ran {_time(watched.lateness)} late)"
        sentences = {
            HealthCause.FINE: "its link is good again",
            HealthCause.LOSSY: f"{link.loss:.0%} of its heartbeats do not come in time",
            HealthCause.SLOW: f"a round trip takes {_time(link.round_trip)}, "
            f"more than {_time(config.slow_round_trip)}",
            HealthCause.UNEVEN: f"its round trips vary by {_time(link.jitter)}, "
            f"more than {_time(config.high_jitter)}",
            HealthCause.SILENT: f"nothing was heard for {_time(silence)}, and "
            f"{_time(self._patience(watched))} is the longest normal silence{late}",
            HealthCause.GIVEN_UP: f"nothing was heard for {_time(silence)}; if it is alive, it "
            f"paused itself after {_time(config.pause_after)}{late}",
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
        silence = self._clock.lived - watched.arrivals.heard_at
        if watched.cause.is_operational:
            return self._patience(watched) - silence
        return self._dead_after(watched) - silence

    @property
    def _stretch(self) -> float:
        """What our own lateness adds to every patience, seconds."""
        lateness = self._clock.lateness
        return min(lateness, self.config.stretch_limit) if lateness > self._negligible else 0.0

    def _allowance(self, watched: _Watched) -> float:
        """What our own lateness, or that of the peer, adds to the patience with it, seconds."""
        ours, lateness, negligible = self._clock.lateness, watched.lateness, self._negligible
        if ours <= negligible:
            return lateness if lateness > negligible else 0.0
        stretch = min(ours, self.config.stretch_limit)
        return max(stretch, lateness if lateness > negligible else 0.0)

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
