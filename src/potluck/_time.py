"""The clock of everything that is told to the cluster's core: it counts the time a machine sleeps.

Leases and silences hang on it.  ``time.monotonic`` stands still while a laptop sleeps, on Linux and
on macOS, so a node that wakes up would believe in leases that ended long ago.  Waits of a single
thread (a join, a socket's deadline) stay on ``time.monotonic``; the two never meet in one sum.

Call it as ``clock.now()``, by the module, so that a test can replace it everywhere.
"""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Sequence
from datetime import timedelta

from potluck._platform import sleepless_clock
from potluck._types import Seconds, in_seconds

_read = sleepless_clock()


def now() -> float:
    """Seconds since some moment, time asleep included."""
    return _read()


# --------------------------------------------------------------------------------------------------
# Time limits as users write them.

PLAIN = frozenset({int, float})


def read_timeout(seconds: Seconds | None) -> float | None:
    """Seconds, or None for no limit; refuses what is not a length of time.

    >>> read_timeout(5), read_timeout(float("inf"))
    (5, None)
    """
    if type(seconds) in PLAIN and 0 <= seconds < math.inf:  # type: ignore[operator]
        return seconds  # type: ignore[return-value] # the shortest way for almost every call
    if isinstance(seconds, timedelta):
        seconds = seconds.total_seconds()
    if seconds is None or seconds == math.inf:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        msg = f"A timeout is a number of seconds, or None for no limit, not {seconds!r}"
        raise TypeError(msg)
    if not seconds >= 0:  # which NaN is not either
        msg = f"A timeout must be zero or more seconds, not {seconds}"
        raise ValueError(msg)
    return seconds


class Countdown:
    """One limit for several things that are done one after the other."""

    def __init__(self, timeout: Seconds | None) -> None:
        self._timeout, seconds = in_seconds(timeout), read_timeout(timeout)
        self._end = None if seconds is None else time.monotonic() + seconds

    @property
    def left(self) -> float | None:
        """Seconds until then; without a limit what was said instead."""
        return self._timeout if self._end is None else max(0.0, self._end - time.monotonic())


# --------------------------------------------------------------------------------------------------
# Numbers for people: times, sizes, rates and proportions in a few characters.

_TIMES = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
_SIZES = ((1_000_000_000, "GB"), (1_000_000, "MB"), (1_000, "kB"), (1, "B"))


def duration(nanoseconds: int) -> str:
    """A duration.

    >>> duration(682_021_000), duration(41_300), duration(0)
    ('682 ms', '41.3 µs', '0 ns')
    """
    return _scaled(nanoseconds, _TIMES)


def size(nbytes: int) -> str:
    """A number of bytes.

    >>> size(16 << 20)
    '16.8 MB'
    """
    return _scaled(nbytes, _SIZES)


def speed(rate: int) -> str:
    """Bytes per second.

    >>> speed(125_000_000)
    '125 MB/s'
    """
    return f"{size(rate)}/s"


def ratio(parts: Sequence[int]) -> str:
    """Proportions; of many, the first ones.

    >>> ratio((1, 1, 1, 0))
    '1:1:1:0'
    """
    shown = ":".join(map(str, parts[:8]))
    return shown if len(parts) <= 8 else f"{shown}:…"  # noqa: PLR2004 - what fits into a line


def _scaled(number: int, units: Sequence[tuple[int, str]]) -> str:
    scale, unit = next((each for each in units if number >= each[0]), units[-1])
    return f"{number / scale:.3g} {unit}"
