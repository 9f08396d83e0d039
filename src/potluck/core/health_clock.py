"""Time as this node lived it: while its own loop was held up, nobody else's silence counts.

A process that got no processor for five seconds finds five seconds of silence of everybody, and
they of it; accusing them would tear a healthy cluster apart.  So the clock here stands still for
the time by which a call came later than the loop had meant to wake up, and remembers, fading, how
late that was: neighbours on the same machine were probably held up for as long.
"""

from __future__ import annotations

__all__ = ["LivedClock"]


class LivedClock:
    """Turns the caller's ``now`` into lived time; jumps of ``now`` in either direction do no harm.

    >>> clock = LivedClock(grace=0.1, half_life=1.0)
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
        self._half_life = half_life  # lived seconds after which half of the lateness is forgotten
        self._most = most  # seconds of lateness that are remembered: more helps nobody
        self._wall: float | None = None
        self.lived = 0.0
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

    @property
    def wall(self) -> float:
        """The latest ``now``."""
        return 0.0 if self._wall is None else self._wall

    def advance(self, now: float) -> float:
        """Go on to ``now``; the lived time."""
        step = 0.0 if self._wall is None else now - self._wall
        if step < -self._grace and self.due is not None:
            self.due += step  # the caller's clock was set back
        if self._wall is None or step > 0 or step < -self._grace:
            self._wall = now
        if step <= 0:
            return self.lived
        late = 0.0 if self.due is None else min(step, now - self.due)
        if late <= self._grace:
            late = 0.0
        else:
            self.due = now
        self.elapsed += step
        self.lived += step - late
        faded = self.lateness * 0.5 ** ((step - late) / self._half_life)
        self.lateness = min(self._most, max(late, faded))
        return self.lived

    def elapsed_at(self, now: float) -> float:
        """What ``elapsed`` is at ``now``, without going there."""
        return self.elapsed + (0.0 if self._wall is None else max(0.0, now - self._wall))
