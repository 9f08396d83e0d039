"""Callbacks of calls that have ended, on a thread of their own.

The thread that ends a call reads a connection, and nobody else reads it meanwhile: a callback that
makes a call there, or closes the agent, would wait for itself.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from potluck.forking import ForkSafeLock, call_in_children
from potluck.logs import get_logger

__all__ = ["run_soon"]

logger = get_logger(__name__)

_lock = ForkSafeLock()
_due: deque[tuple[Callable[[], object], str]] = deque()
_is_running = False


def run_soon(callback: Callable[[], object], whose: str) -> None:
    """Have a callback called, after those that are due already."""
    global _is_running  # noqa: PLW0603 - one thread for all agents, while there is something to do
    with _lock:
        _due.append((callback, whose))
        if _is_running:
            return
        _is_running = True
    threading.Thread(target=_run, name="potluck-rpc-callbacks", daemon=True).start()


def _run() -> None:
    global _is_running  # noqa: PLW0603
    while True:
        with _lock:
            if not _due:
                _is_running = False
                return
            callback, whose = _due.popleft()
        try:
            callback()
        except Exception:  # the others are due all the same
            logger.exception("A callback of %s failed", whose)


def _begin_anew() -> None:
    """In a forked child, where nobody runs what was due."""
    global _is_running  # noqa: PLW0603
    _is_running = False
    _due.clear()


call_in_children(_begin_anew)
