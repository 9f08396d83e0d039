"""Time limits as users write them."""

from __future__ import annotations

import math
import numbers

__all__ = ["read_timeout"]

PLAIN = frozenset({int, float})


def read_timeout(seconds: float | None) -> float | None:
    """So many seconds, or None for as long as it takes; refuses what is no length of time.

    >>> read_timeout(5), read_timeout(float("inf"))
    (5, None)
    """
    if type(seconds) in PLAIN and 0 <= seconds < math.inf:  # type: ignore[operator]
        return seconds  # the shortest way for almost every call
    if seconds is None or seconds == math.inf:
        return None
    if isinstance(seconds, bool) or not isinstance(seconds, numbers.Real):
        msg = f"A timeout is a number of seconds, or None for no limit, not {seconds!r}"
        raise TypeError(msg)
    if not seconds >= 0:  # which NaN is not either
        msg = f"A timeout must be zero or more seconds, not {seconds}"
        raise ValueError(msg)
    return seconds
