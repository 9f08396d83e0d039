"""How health is judged: the beat, the bounds of patience, and what counts as a poor link.

Three presets fit the networks people have.  Interval and pause are those of small groups: larger
ones beat more slowly (:mod:`potluck.core.pace`).  A member without contact for ``pause_after``
pauses itself, and the others exclude it after twice that, so an excluded member has stopped before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from potluck.vocabulary import Seconds, in_seconds, settle_seconds

__all__ = ["HealthConfig"]


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
                f"heartbeat accuses nobody; got interval={self.interval}, "
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
