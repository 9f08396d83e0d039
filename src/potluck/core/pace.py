"""How fast the heart of a group beats: the interval and the pause follow from its size.

Each member sends n-1 heartbeats in an interval and receives as many.  The interval grows with the
group, so that there are about 33 of each in a second at most; a pause is at least five intervals,
so that a few lost beats pause nobody.  The proposer of a view computes both once
and writes them into the proposal: all members of the view compute with the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable

from potluck.core.health_config import HealthConfig

__all__ = ["BEATS_IN_A_PAUSE", "BEATS_PER_SECOND", "LENGTHENED", "lengthened", "pace"]

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
