"""Locks that outlive a fork.

A forked child has one thread.  A lock that another thread of its parent held at that moment is held
there for ever; whatever a module keeps for the whole process is therefore guarded by one of these.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType

__all__ = ["ForkSafeLock", "call_in_children"]


def call_in_children(action: Callable[[], None]) -> None:
    """Have something done in every child that this process forks from now on, before all else."""
    if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
        os.register_at_fork(after_in_child=action)


class ForkSafeLock:
    """A lock that is nobody's in a forked child, unless the thread that forked held it.

    Whoever holds it may take it again, as a signal's handler does that interrupts its owner.  For
    what lives as long as the process: a child remembers it for ever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()
        call_in_children(self._become_forked)

    def __enter__(self) -> None:
        """Take it, when nobody else has it."""
        self._lock.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give it back."""
        self._lock.release()

    def acquire(self, *, blocking: bool = True) -> bool:
        """Take it; False if somebody else has it and this shall not wait."""
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        """Give it back."""
        self._lock.release()

    def _become_forked(self) -> None:
        if self._lock.acquire(blocking=False):  # free, or its owner is the thread that forked
            self._lock.release()
        else:
            self._lock = threading.RLock()
