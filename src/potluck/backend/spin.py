"""Spinning: look a few times more before going to sleep, as long as that pays.

Waking a sleeping thread can cost more than a whole small message, so an answer that comes within
microseconds is better waited for awake.  But where it does not come so soon (large messages, fewer
processors than ranks) looking would only take time from those who have work.  So every success
earns a few more attempts, every failure costs them, and a rare attempt finds out whether it would
pay again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from potluck.net.transport import Event, Poller

__all__ = ["Spin"]

LOOK_FOR = 50e-6
"""Seconds one attempt lasts: about what it costs to wake a sleeper."""

MOST = 8
"""Attempts that may fail in a row after many successes."""

RETRY_EVERY = 32
"""Waits between two attempts while spinning does not pay."""

_yield_processor = getattr(os, "sched_yield", lambda: time.sleep(0))


class Spin:
    """Whether to look again, learned from whether it helped."""

    def __init__(self) -> None:
        self._attempts = MOST
        self._skipped = 0

    def look(self, poller: Poller) -> list[Event]:
        """Events that come within a moment; none when it is not worth looking."""
        found: list[Event] = []

        def has_events() -> bool:
            found.extend(poller.wait(0))
            return bool(found)

        self.until(has_events)
        return found

    def until(self, is_there: Callable[[], bool]) -> bool:
        """Ask again and again for a moment; False when it did not come, or is not worth asking."""
        if self._attempts <= 0:
            self._skipped += 1
            if self._skipped < RETRY_EVERY:
                return False
            self._skipped = 0
            self._attempts = 1
        end = time.perf_counter() + LOOK_FOR
        while not is_there():
            if time.perf_counter() >= end:
                self._attempts -= 1
                return False
            _yield_processor()
        self._attempts = min(MOST, self._attempts + 1)
        return True
