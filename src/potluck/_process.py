"""What can be closed closes itself at the end of a ``with`` block."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import weakref
from types import TracebackType
from typing import Protocol, Self

from potluck._platform import call_in_children
from potluck.errors import BackendUnavailable


class Closing:
    """A context manager out of :meth:`close`."""

    def close(self) -> None:
        """Let go of everything; must do no harm the second time."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Itself."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close, however the block ended."""
        self.close()


# --------------------------------------------------------------------------------------------------
# Locks that outlive a fork.
#
# A forked child has one thread.  A lock that another thread of its parent held at that moment is
# held there for ever; whatever a module keeps for the whole process is therefore guarded by one of
# these.


class ForkSafeLock:
    """A lock that is free in a forked child, unless the thread that forked held it.

    Its holder may take it again, as the handler of a signal does that interrupts the holder.  For
    what lives as long as the process: a child remembers it for ever.
    """

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = threading.RLock()
        call_in_children(self._become_forked)

    def __enter__(self) -> None:
        """Take it, as soon as it is free."""
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
        """Take it; False if another thread has it and this should not wait."""
        return self._lock.acquire(blocking=blocking)

    def release(self) -> None:
        """Give it back."""
        self._lock.release()

    def _become_forked(self) -> None:
        if self._lock.acquire(blocking=False):  # free, or its owner is the thread that forked
            self._lock.release()
        else:
            self._lock = threading.RLock()


# --------------------------------------------------------------------------------------------------
# Which descriptors are ours, so that a forked child can let go of them.
#
# A child made by :func:`os.fork` (a data loader, for instance) inherits every socket.  Were it to
# keep them, the death of its parent would go unnoticed, because the connection would still be open.
# So the child closes every Potluck descriptor at once and silently, without a word on the wire: it
# takes no lock (another thread of the parent may have held it at the fork) and shuts nothing down.


class _Closable(Protocol):
    def close(self) -> None: ...


class _ForkAware(Protocol):
    def become_forked(self) -> None:
        """Runs in the child: refuse all further use, take no lock."""


# Keyed by id: the objects need not be hashable, and a plain dict is copied in one step.
_owned: dict[int, weakref.ref[_Closable]] = {}
_fork_aware: dict[int, weakref.ref[_ForkAware]] = {}


def track(owner: _Closable) -> None:
    """Close ``owner`` in every forked child; forget it when it is collected."""
    key = id(owner)
    _owned[key] = weakref.ref(owner, lambda _: _owned.pop(key, None))


def on_fork(listener: _ForkAware) -> None:
    """Tell ``listener`` in every forked child, after the descriptors are closed."""
    key = id(listener)
    _fork_aware[key] = weakref.ref(listener, lambda _: _fork_aware.pop(key, None))


def _let_go() -> None:
    for owner in [reference() for reference in list(_owned.values())]:
        if owner is not None:
            with contextlib.suppress(OSError):
                owner.close()
    for listener in [reference() for reference in list(_fork_aware.values())]:
        if listener is not None:
            listener.become_forked()
    _owned.clear()
    _fork_aware.clear()


call_in_children(_let_go)


# --------------------------------------------------------------------------------------------------
# How a backend ends with its process: at exit it says goodbye, and a forked child has none.

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
