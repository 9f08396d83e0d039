"""The clock of everything that is told to the cluster's core: it counts the time a machine sleeps.

Leases and silences hang on it.  ``time.monotonic`` stands still while a laptop sleeps, on Linux and
on macOS, so a node that wakes up would believe in leases that ended long ago.  Waits of a single
thread (a join, a socket's deadline) stay on ``time.monotonic``; the two never meet in one sum.

Call it as ``clock.now()``, by the module, so that whoever replaces it replaces it everywhere.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

__all__ = ["now"]


def choose(platform: str) -> Callable[[], float]:
    """The clock of a platform that goes on while the machine sleeps and is never set.

    >>> choose("an unknown one") is time.monotonic
    True
    """
    name = {"linux": "CLOCK_BOOTTIME", "darwin": "CLOCK_MONOTONIC"}.get(platform)
    number = getattr(time, name, None) if name else None
    if number is None:
        return time.monotonic  # on Windows it counts sleep
    try:
        time.clock_gettime(number)
    except OSError:  # an old kernel, or a sandbox
        return time.monotonic
    return lambda: time.clock_gettime(number)


_read = choose(sys.platform)


def now() -> float:
    """Seconds since some moment, time asleep included."""
    return _read()
