"""How often Python lets another thread run, while something in the background wants to."""

from __future__ import annotations

import sys
import threading
from types import TracebackType

from potluck.forking import call_in_children

__all__ = ["BRISK", "Brisk"]

INTERVAL = 1e-4
"""Seconds between two switches while asynchronous operations run.

Beside a busy loop in pure Python a sending thread gets the interpreter once per interval; at the
usual 5 ms it would move a few pieces in a second.
"""


class Brisk:
    """A context with a short interval.  Any number of threads may be in it; the last restores."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._usual = 0.0

    def __enter__(self) -> None:
        """Shorten the interval, if nobody has."""
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._usual = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual, INTERVAL))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore it, if nobody else needs it short."""
        with self._lock:
            self._inside -= 1
            if not self._inside:
                sys.setswitchinterval(self._usual)

    def become_forked(self) -> None:
        """In a forked child: the threads that were inside are not here."""
        if self._inside:
            sys.setswitchinterval(self._usual)
        self._lock, self._inside = threading.Lock(), 0


BRISK = Brisk()
"""The one of this process: the interval is the same for all threads."""

call_in_children(BRISK.become_forked)
