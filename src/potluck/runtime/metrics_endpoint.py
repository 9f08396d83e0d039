"""The endpoint where metrics can be read: ``http://127.0.0.1:PORT/metrics``.

One thread, a few connections, a deadline for each: a scraper that hangs, or somebody who means ill,
costs a place for seconds and nothing else.  Whoever reaches the address may read, so it is this
machine's own unless somebody names another.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import selectors
import socket
import threading
import time
from collections.abc import Callable
from functools import cache

from potluck.closing import Closing
from potluck.errors import BackendUnavailable
from potluck.logs import get_logger
from potluck.metrics import DistributedMetrics, MetricsSnapshot
from potluck.net import descriptors
from potluck.net.addresses import Address, is_loopback
from potluck.runtime.auto_config import AutoDiscoveryConfig
from potluck.runtime.metrics_exposition import exposition
from potluck.runtime.metrics_http import MAX_REQUEST, answer

__all__ = ["LOOPBACK", "MetricsEndpoint", "process_metrics"]

logger = get_logger(__name__)

LOOPBACK = "127.0.0.1"

MAX_PORT = 65535

PORT_TROUBLES = frozenset({errno.EADDRINUSE, errno.EACCES, errno.EPERM})
OTHER_PORT = (
    "Name another port with metrics_port= or POTLUCK_METRICS_PORT; 0 takes any that is free. "
    "Each process needs one of its own."
)
OTHER_HOST = "Name an address of this machine with metrics_host= or POTLUCK_METRICS_HOST."

PLACES = 16
"""Connections at once; one more takes the place of the oldest."""

PATIENCE = 5.0
"""Seconds that a connection may last, from its first byte to our last."""

FRESH = 0.25
"""Seconds for which a page is good: who asks more often gets the same."""

CLOSING = 2.0
"""Seconds for the thread to end."""

PAUSE = 0.05
"""Seconds without accepting after that has failed, as for want of descriptors."""


class _Visitor:
    """One connection."""

    __slots__ = ("deadline", "heard", "sock", "unsent")

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.deadline = time.monotonic() + PATIENCE
        self.heard = b""
        self.unsent: memoryview | None = None
        """The rest of the answer; None while the question is not complete."""


class MetricsEndpoint(Closing):
    """Serves metrics over HTTP until it is closed; a context manager.

    ``join(metrics_port=9464)`` has one.  Port 0 takes any that is free; :attr:`url` tells.

    >>> import urllib.request
    >>> from potluck import DistributedMetrics
    >>> with MetricsEndpoint(DistributedMetrics()) as endpoint:
    ...     page = urllib.request.urlopen(endpoint.url, timeout=10).read().decode()
    >>> page.splitlines()[1]
    '# TYPE potluck_uptime_seconds gauge'
    """

    def __init__(
        self,
        metrics: DistributedMetrics | Callable[[], MetricsSnapshot],
        port: int = 0,
        host: str = LOOPBACK,
    ) -> None:
        self._snapshot = metrics.snapshot if isinstance(metrics, DistributedMetrics) else metrics
        self._listener = _listen(host, port)
        self._listener.setblocking(False)  # who called may have left before it is let in
        bound = self._listener.getsockname()
        self.address = Address(str(bound[0]), int(bound[1]))
        self._is_local = is_loopback(self.address.host)
        if not self._is_local:
            logger.warning("Metrics can be read by everybody who reaches %s", self.address)
        self._page, self._page_at = b"", -FRESH
        self._visitors: dict[int, _Visitor] = {}  # in order of arrival, so of deadline
        self._selector = selectors.DefaultSelector()
        self._wake_in, self._wake_out = socket.socketpair()
        for each in (self._wake_in, self._wake_out, self._listener, self._selector):
            descriptors.track(each)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_in, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="potluck-metrics", daemon=True)
        self._thread.start()
        descriptors.on_fork(self)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        """Answer nobody any more.  May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(OSError):
                self._wake_out.send(b"\0")
            self._thread.join(CLOSING)

    def become_forked(self) -> None:
        """In a forked child: the descriptors are closed, and the thread is the parent's."""
        self._is_closed = True

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed:
                first = next(iter(self._visitors.values()), None)
                wait = None if first is None else max(0.0, first.deadline - time.monotonic())
                for key, _ in self._selector.select(wait):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif self._visitors.get(key.fd) is key.data is not None:
                        self._attend(key.data)
                now = time.monotonic()
                for visitor in [each for each in self._visitors.values() if each.deadline <= now]:
                    self._drop(visitor)
        finally:
            for visitor in list(self._visitors.values()):
                self._drop(visitor)
            self._selector.close()
            for sock in (self._listener, self._wake_in, self._wake_out):
                sock.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # whoever called has left, or there are no descriptors left
            logger.debug("metrics: could not accept a connection: %s", error)
            time.sleep(PAUSE)
            return
        if len(self._visitors) >= PLACES:
            self._drop(next(iter(self._visitors.values())))
        visitor = self._visitors[sock.fileno()] = _Visitor(sock)
        self._selector.register(sock, selectors.EVENT_READ, visitor)

    def _attend(self, visitor: _Visitor) -> None:
        try:
            if visitor.unsent is None and not self._hear(visitor):
                return
            assert visitor.unsent is not None
            visitor.unsent = visitor.unsent[visitor.sock.send(visitor.unsent) :]
            if not visitor.unsent:
                visitor.sock.shutdown(socket.SHUT_WR)
                self._drop(visitor)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(visitor)
        except Exception:  # one page that cannot be made must not end all others
            logger.exception("metrics: a request could not be answered")
            self._drop(visitor)

    def _hear(self, visitor: _Visitor) -> bool:
        """Take in what is there; whether there is an answer now."""
        data = visitor.sock.recv(MAX_REQUEST)
        if not data:
            raise ConnectionResetError
        visitor.heard += data
        if b"\r\n\r\n" not in visitor.heard and len(visitor.heard) < MAX_REQUEST:
            return False
        visitor.unsent = memoryview(answer(visitor.heard, self._make, local=self._is_local))
        self._selector.modify(visitor.sock, selectors.EVENT_WRITE, visitor)
        return True

    def _make(self) -> bytes:
        if time.monotonic() - self._page_at >= FRESH:
            self._page, self._page_at = exposition(self._snapshot), time.monotonic()
        return self._page

    def _drop(self, visitor: _Visitor) -> None:
        self._selector.unregister(visitor.sock)
        del self._visitors[visitor.sock.fileno()]
        visitor.sock.close()


def _listen(host: str, port: int) -> socket.socket:
    where = Address(host, port)
    try:
        if not 0 <= port <= MAX_PORT:
            raise OSError(errno.EACCES, f"a port is a number from 0 to {MAX_PORT}")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=PLACES)
    except OSError as error:
        raise BackendUnavailable(
            f"Metrics cannot be served at {where}",
            # Python adds which address it tried, which is said already.
            cause=(error.strerror or str(error)).partition(" (while")[0],
            hint=OTHER_PORT if error.errno in PORT_TROUBLES else OTHER_HOST,
        ) from error


@cache
def process_metrics() -> DistributedMetrics:
    """Where all groups of fixed ranks of this process count, unless they are told otherwise.

    With ``POTLUCK_METRICS_PORT`` they can be read over HTTP from the first group on.
    """
    metrics = DistributedMetrics()
    address = AutoDiscoveryConfig().metrics_address
    if address is not None:
        host, port = address
        atexit.register(MetricsEndpoint(metrics, port, host).close)
    return metrics
