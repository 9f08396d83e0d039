"""Pollers: sleep until one of many sockets can move bytes.

``epoll`` where there is one, :mod:`selectors` elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import select
import selectors
import socket
import threading
from typing import TYPE_CHECKING

from potluck.net import descriptors

if TYPE_CHECKING:
    from potluck.net.transport import Event, Poller, Stream

__all__ = ["EpollPoller", "SelectorPoller", "make_poller"]


def make_poller() -> Poller:
    """The fastest poller of this platform."""
    return EpollPoller() if hasattr(select, "epoll") else SelectorPoller()


class EpollPoller:
    """Linux: changes made by another thread take effect while one is waiting."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._keys: dict[int, int] = {}
        self._masks: dict[int, int] = {}
        descriptors.track(self)

    def register(self, stream: Stream, key: int) -> None:
        """Watch a stream for reading."""
        descriptor = stream.fileno()  # type: ignore[attr-defined]
        self._keys[descriptor] = key
        self._masks[descriptor] = select.EPOLLIN
        self._epoll.register(descriptor, select.EPOLLIN)

    def want_write(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: ARG002, FBT001
        """Watch for room to write as well, or stop."""
        self._want(stream, select.EPOLLOUT, wanted)

    def want_read(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: ARG002, FBT001
        """Stop watching for bytes to read, or do so again."""
        self._want(stream, select.EPOLLIN, wanted)

    def _want(self, stream: Stream, what: int, wanted: bool) -> None:  # noqa: FBT001
        descriptor = stream.fileno()  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, ValueError, KeyError):  # closed: the reader will say so
            mask = self._masks[descriptor]
            mask = mask | what if wanted else mask & ~what
            self._epoll.modify(descriptor, mask)
            self._masks[descriptor] = mask

    def unregister(self, stream: Stream) -> None:
        """Stop watching; harmless for a stream already closed."""
        descriptor = stream.fileno()  # type: ignore[attr-defined]
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(descriptor)
        self._keys.pop(descriptor, None)
        self._masks.pop(descriptor, None)

    def wait(self, timeout: float | None) -> list[Event]:
        """Sleep until something can move."""
        events: list[Event] = []
        for descriptor, mask in self._epoll.poll(timeout):
            key = self._keys.get(descriptor)
            if key is not None:
                events.append((key, bool(mask & ~select.EPOLLOUT), bool(mask & select.EPOLLOUT)))
            elif descriptor == self._wake:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
        return events

    def wake(self) -> None:
        """End the current or next wait."""
        with contextlib.suppress(OSError, ValueError):  # the latter: closed already
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """Release both descriptors.  Never unregisters: a forked child shares the kernel's list."""
        if not self._epoll.closed:
            self._epoll.close()
            # First forgotten: a late wake must not write into whatever gets the number next.
            wake, self._wake = self._wake, -1
            os.close(wake)


class SelectorPoller:
    """Everywhere else.  A waiting thread is woken to see changes made by another."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._lock = threading.Lock()
        self._receiver, self._sender = socket.socketpair()
        for end in (self._receiver, self._sender):
            end.setblocking(False)
        descriptors.track(self)
        self._selector.register(self._receiver, selectors.EVENT_READ, None)
        self._masks: dict[Stream, int] = {}
        self._changes: list[tuple[Stream, int, int]] = []

    def register(self, stream: Stream, key: int) -> None:
        """Watch a stream for reading."""
        with self._lock:
            self._masks[stream] = 0
        self._want(stream, key, selectors.EVENT_READ, wanted=True)

    def want_write(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: FBT001
        """Watch for room to write as well, or stop."""
        self._want(stream, key, selectors.EVENT_WRITE, wanted)

    def want_read(self, stream: Stream, key: int, wanted: bool) -> None:  # noqa: FBT001
        """Stop watching for bytes to read, or do so again."""
        self._want(stream, key, selectors.EVENT_READ, wanted)

    def unregister(self, stream: Stream) -> None:
        """Stop watching."""
        with self._lock:
            if self._masks.pop(stream, None) is not None:
                self._changes.append((stream, 0, 0))
        self.wake()

    def _want(self, stream: Stream, key: int, what: int, wanted: bool) -> None:  # noqa: FBT001
        with self._lock:
            mask = self._masks.get(stream)
            if mask is None:  # one that is watched no more stays so
                return
            self._masks[stream] = mask = mask | what if wanted else mask & ~what
            self._changes.append((stream, key, mask))
        self.wake()

    def _apply_changes(self) -> None:
        with self._lock:
            changes, self._changes = self._changes, []
        for stream, key, mask in changes:
            with contextlib.suppress(KeyError, ValueError, OSError):
                self._selector.unregister(stream)  # type: ignore[arg-type]
            if mask:
                with contextlib.suppress(ValueError, OSError):
                    self._selector.register(stream, mask, key)  # type: ignore[arg-type]

    def wait(self, timeout: float | None) -> list[Event]:
        """Sleep until something can move."""
        self._apply_changes()
        events: list[Event] = []
        for entry, mask in self._selector.select(timeout):
            if entry.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._receiver.recv(4096)
            else:
                readable, writable = mask & selectors.EVENT_READ, mask & selectors.EVENT_WRITE
                events.append((entry.data, bool(readable), bool(writable)))
        return events

    def wake(self) -> None:
        """End the current or next wait."""
        with contextlib.suppress(OSError):  # a full pipe already wakes it
            self._sender.send(b"\0")

    def close(self) -> None:
        """Release the selector and its pipe."""
        self._selector.close()
        self._receiver.close()
        self._sender.close()
