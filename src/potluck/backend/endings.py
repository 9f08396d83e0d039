"""How a backend ends with its process: at exit it says goodbye, and a forked child has none."""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from typing import Protocol

from potluck.errors import BackendUnavailable

__all__ = ["close_at_exit", "left_to_parent"]


class _Closable(Protocol):
    def close(self) -> None: ...


_live: weakref.WeakSet[_Closable] = weakref.WeakSet()


def close_at_exit(backend: _Closable) -> None:
    """Close it when the interpreter ends, unless it has been forgotten before."""
    _live.add(backend)


@atexit.register
def _close_all() -> None:
    for backend in list(_live):
        with contextlib.suppress(Exception):
            backend.close()


def left_to_parent(rank: int) -> BackendUnavailable:
    """The error for a group that a forked child finds closed."""
    return BackendUnavailable(
        f"This group belongs to the parent process (pid {os.getppid()})",
        rank=rank,
        hint="Create a new group in the child process if it needs one.",
    )
