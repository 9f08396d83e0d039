"""Time limits as users write them."""

from __future__ import annotations

import math
import numbers
import time
from datetime import timedelta

from potluck.vocabulary import Seconds, in_seconds

__all__ = ["Countdown", "read_timeout"]

PLAIN = frozenset({int, float})


def read_timeout(seconds: Seconds | None) -> float | None:
    """So many seconds, or None for as long as it takes; refuses what is no length of time.

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
