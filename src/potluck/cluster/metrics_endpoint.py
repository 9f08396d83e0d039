"""The endpoint where metrics can be read: ``http://127.0.0.1:PORT/metrics``.

One thread, a few connections, a deadline for each: a scraper that hangs, or an attacker,
costs a place for seconds and nothing else.  Any program that reaches the address may read, so it is
this machine's own unless the user names another.
"""

from __future__ import annotations

import atexit
import errno
import ipaddress
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from potluck import _process
from potluck._process import Closing
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.errors import BackendUnavailable, describe
from potluck.logs import get_logger
from potluck.metrics.catalogue import METRICS
from potluck.metrics.instruments import BOUNDS, OperationSnapshot
from potluck.metrics.registry import DistributedMetrics, MetricsSnapshot
from potluck.net.addresses import Address, is_loopback
from potluck.net.tcp import Waker

if TYPE_CHECKING:
    from prometheus_client.core import Metric as PrometheusMetric

    from potluck.metrics.catalogue import Metric


# --------------------------------------------------------------------------------------------------
# Metrics as Prometheus reads them: a collector that takes a snapshot when it is asked.
#
# ``prometheus_client`` is imported when something here is first used.

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""What :func:`exposition` writes: the format that every scraper reads."""


class MetricsCollector:
    """The metrics of a process, for a registry of ``prometheus_client``.

    For programs that have one anyway: ``REGISTRY.register(MetricsCollector(cluster.metrics))``.
    Numbers are looked up when they are scraped, so it costs nothing in between.

    >>> from prometheus_client import CollectorRegistry
    >>> from potluck import DistributedMetrics
    >>> registry, metrics = CollectorRegistry(), DistributedMetrics()
    >>> registry.register(MetricsCollector(metrics))
    >>> metrics.barrier.completed.inc()
    >>> which = {"operation": "barrier", "outcome": "completed"}
    >>> registry.get_sample_value("potluck_collective_operations_total", which)
    1
    """

    def __init__(self, metrics: DistributedMetrics | Callable[[], MetricsSnapshot]) -> None:
        self._snapshot = metrics.snapshot if isinstance(metrics, DistributedMetrics) else metrics

    def describe(self) -> list[PrometheusMetric]:
        """Nothing: which metrics there are depends on what is used."""
        return []

    def collect(self) -> Iterator[PrometheusMetric]:
        """Everything that is known at this moment."""
        from prometheus_client import core

        makers = {
            "counter": core.CounterMetricFamily,
            "gauge": core.GaugeMetricFamily,
            "histogram": core.HistogramMetricFamily,
        }
        snapshot = self._snapshot()
        for metric in METRICS:
            family = makers[metric.kind](metric.name, metric.help, labels=metric.labels)
            _fill(family, metric, snapshot)
            if family.samples:
                yield family


def _fill(family: Any, metric: Metric, snapshot: MetricsSnapshot) -> None:
    for labels, value in metric.samples(snapshot):
        if isinstance(value, OperationSnapshot):
            counts = value.buckets or [0] * len(_EDGES)
            buckets = list(zip(_EDGES, accumulate(counts), strict=True))
            family.add_metric(labels, buckets, value.seconds)
        else:
            family.add_metric(labels, value)


# From milliseconds; "0.0025" and not "0.0025000000000000005".
_EDGES = [*(f"{bound / 1e3:.7g}" for bound in BOUNDS), "+Inf"]


def exposition(snapshot: Callable[[], MetricsSnapshot]) -> bytes:
    """The page that a scraper gets."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(MetricsCollector(snapshot))
    return generate_latest(registry)


# --------------------------------------------------------------------------------------------------
# The little of HTTP that an endpoint for metrics speaks: a request in, an answer out.

MAX_REQUEST = 8192
"""Bytes of a request, all its headers included."""

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
}


def answer(request: bytes, page: Callable[[], bytes], *, local: bool) -> bytes:
    r"""What to say to a request, whatever it is; ``local`` if only this machine can ask.

    >>> answer(b"GET /other HTTP/1.1\r\n\r\n", bytes, local=True).splitlines()[0]
    b'HTTP/1.1 404 Not Found'
    """
    head, complete, _ = request.partition(b"\r\n\r\n")
    if not complete:
        return _answer(431, "The request is too long.")
    first, *lines = head.split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):  # noqa: PLR2004 - method, path, version
        return _answer(400, "This is not an HTTP/1 request.")
    method, path, _ = words
    if local and not all(map(_names_this_machine, _headers(lines, b"host"))):
        # A page in a browser whose name was made to stand for this machine (DNS rebinding).
        return _answer(421, "Unknown Host header. Use the IP address of this machine.")
    if method not in {b"GET", b"HEAD"}:
        return _answer(405, "Metrics can only be read.", "Allow: GET, HEAD\r\n")
    if path.partition(b"?")[0] != b"/metrics":
        return _answer(404, "Metrics are at /metrics.", head_only=method == b"HEAD")
    return _answer(200, page(), kind=CONTENT_TYPE, head_only=method == b"HEAD")


def _answer(
    status: int,
    body: str | bytes,
    headers: str = "",
    *,
    kind: str = "text/plain; charset=utf-8",
    head_only: bool = False,
) -> bytes:
    content = body if isinstance(body, bytes) else f"{body}\n".encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        f"Content-Type: {kind}\r\n"
        f"Content-Length: {len(content)}\r\n"
        f"{headers}"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else content)


def _headers(lines: list[bytes], name: bytes) -> list[str]:
    """What all the headers of this name say."""
    pairs = [line.partition(b":") for line in lines]
    return [
        value.strip().decode("latin-1") for key, _, value in pairs if key.strip().lower() == name
    ]


def _names_this_machine(host: str) -> bool:
    """Whether a name cannot have been made up by an attacker; none is as good."""
    is_bracketed = host.startswith("[") and "]" in host
    name = host[1:].partition("]")[0] if is_bracketed else host.partition(":")[0]
    if name in {"", "localhost"}:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


# --------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

LOOPBACK = "127.0.0.1"

MAX_PORT = 65535

PORT_TROUBLES = frozenset({errno.EADDRINUSE, errno.EACCES, errno.EPERM})
OTHER_PORT = (
    "Name another port with metrics_port= or POTLUCK_METRICS_PORT; 0 picks a free one. "
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


class _Client:
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
            logger.warning("Any program that reaches %s can read the metrics", self.address)
        self._page, self._page_at = b"", -FRESH
        self._clients: dict[int, _Client] = {}  # in order of arrival, so of deadline
        self._selector = selectors.DefaultSelector()
        self._waker = Waker(self._selector)
        for each in (self._listener, self._selector):
            _process.track(each)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="potluck-metrics", daemon=True)
        self._thread.start()
        _process.on_fork(self)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{self.address}/metrics"

    def close(self) -> None:
        """Answer no more requests.  May be called twice."""
        if not self._is_closed:
            self._is_closed = True
            self._waker.wake()
            self._thread.join(CLOSING)

    def become_forked(self) -> None:
        """In a forked child: the descriptors are closed, and the thread is the parent's."""
        self._is_closed = True

    # -- the thread ------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closed:
                first = next(iter(self._clients.values()), None)
                wait = None if first is None else max(0.0, first.deadline - time.monotonic())
                for key, _ in self._selector.select(wait):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif self._clients.get(key.fd) is key.data is not None:
                        self._attend(key.data)
                now = time.monotonic()
                for client in [each for each in self._clients.values() if each.deadline <= now]:
                    self._drop(client)
        finally:
            for client in list(self._clients.values()):
                self._drop(client)
            self._selector.close()
            self._listener.close()
            self._waker.close()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the caller has left, or there are no descriptors left
            logger.debug("metrics: could not accept a connection: %s", error)
            time.sleep(PAUSE)
            return
        if len(self._clients) >= PLACES:
            self._drop(next(iter(self._clients.values())))
        client = self._clients[sock.fileno()] = _Client(sock)
        self._selector.register(sock, selectors.EVENT_READ, client)

    def _attend(self, client: _Client) -> None:
        try:
            if client.unsent is None and not self._hear(client):
                return
            assert client.unsent is not None
            client.unsent = client.unsent[client.sock.send(client.unsent) :]
            if not client.unsent:
                client.sock.shutdown(socket.SHUT_WR)
                self._drop(client)
        except BlockingIOError:
            pass
        except OSError:
            self._drop(client)
        except Exception:  # one page that cannot be made must not end all others
            logger.exception("metrics: a request could not be answered")
            self._drop(client)

    def _hear(self, client: _Client) -> bool:
        """Take in what is there; whether there is an answer now."""
        data = client.sock.recv(MAX_REQUEST)
        if not data:
            raise ConnectionResetError
        client.heard += data
        if b"\r\n\r\n" not in client.heard and len(client.heard) < MAX_REQUEST:
            return False
        client.unsent = memoryview(answer(client.heard, self._make, local=self._is_local))
        self._selector.modify(client.sock, selectors.EVENT_WRITE, client)
        return True

    def _make(self) -> bytes:
        if time.monotonic() - self._page_at >= FRESH:
            self._page, self._page_at = exposition(self._snapshot), time.monotonic()
        return self._page

    def _drop(self, client: _Client) -> None:
        self._selector.unregister(client.sock)
        del self._clients[client.sock.fileno()]
        client.sock.close()


def _listen(host: str, port: int) -> socket.socket:
    where = Address(host, port)
    try:
        if not 0 <= port <= MAX_PORT:
            raise OSError(errno.EACCES, f"a port must be between 0 and {MAX_PORT}")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=PLACES)
    except OSError as error:
        raise BackendUnavailable(
            f"Metrics cannot be served at {where}",
            # Python adds which address it tried, which is said already.
            cause=describe(error).partition(" (while")[0],
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
