"""Time for promises that hang on it: it never goes back, whatever the caller's clock does."""

from __future__ import annotations

__all__ = ["SteadyTime"]

_SHORTEST_WAIT = 0.0002  # seconds; rounding must not make the driver spin


class SteadyTime:
    """The caller's time, with steps back of its clock left out.

    >>> time = SteadyTime(100.0)
    >>> time.advance(101.5), time.advance(60.0), time.advance(61.0)
    (101.5, 101.5, 102.5)
    >>> time.on_the_wall(103.0)
    61.5
    """

    def __init__(self, now: float) -> None:
        self._wall = now
        self._shift = 0.0
        self.current = now

    def advance(self, now: float) -> float:
        """Go on to ``now``; the steady time."""
        if now < self._wall:
            self._shift += self._wall - now
        self._wall = now
        self.current = max(self.current, now + self._shift)
        return self.current

    def on_the_wall(self, time: float) -> float:
        """What the caller's clock will show at a steady time."""
        if time <= self.current:
            return self._wall
        return max(self._wall + _SHORTEST_WAIT, time - self._shift)
