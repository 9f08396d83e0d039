"""The endpoint: it answers scrapers, and whoever means ill costs it nothing but a place."""

import contextlib
import http.client
import os
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator

import pytest

from potluck import BackendUnavailable, DistributedMetrics, MetricsEndpoint
from potluck.runtime import metrics_endpoint
from potluck.runtime.metrics_endpoint import PLACES
from support.threads import PATIENCE, eventually, together


@pytest.fixture
def metrics() -> DistributedMetrics:
    """With something in them."""
    made = DistributedMetrics()
    made.barrier.note(0.001, 0)
    return made


@pytest.fixture
def endpoint(metrics: DistributedMetrics) -> Iterator[MetricsEndpoint]:
    """On this machine, at any port."""
    with MetricsEndpoint(metrics) as made:
        yield made


def scrape(endpoint: MetricsEndpoint) -> str:
    """As Prometheus does."""
    with urllib.request.urlopen(endpoint.url, timeout=PATIENCE) as page:  # noqa: S310 - our own
        text: str = page.read().decode()
        return text


@contextlib.contextmanager
def connected(endpoint: MetricsEndpoint) -> Iterator[socket.socket]:
    """A bare connection."""
    where = (endpoint.address.host, endpoint.address.port)
    with socket.create_connection(where, timeout=PATIENCE) as sock:
        yield sock


def test_a_scraper_gets_the_numbers_of_the_moment(
    endpoint: MetricsEndpoint, metrics: DistributedMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each time."""
    monkeypatch.setattr(metrics_endpoint, "FRESH", 0.0)
    line = 'potluck_collective_operations_total{operation="barrier",outcome="completed"}'
    assert f"{line} 1.0\n" in scrape(endpoint)
    metrics.barrier.note(0.001, 0)
    assert f"{line} 2.0\n" in scrape(endpoint)


def test_who_asks_all_the_time_gets_the_same_page(metrics: DistributedMetrics) -> None:
    """Making it costs time that training would miss."""
    made = []

    def snapshot() -> object:
        made.append(1)
        return metrics.snapshot()

    with MetricsEndpoint(snapshot) as endpoint:  # type: ignore[arg-type]
        began = time.monotonic()
        together(*[lambda: scrape(endpoint)] * 6)
        assert len(made) <= 1 + (time.monotonic() - began) / metrics_endpoint.FRESH


def test_it_is_for_this_machine_unless_told(endpoint: MetricsEndpoint) -> None:
    """Metrics name machines and tell what they do."""
    assert endpoint.address.host == "127.0.0.1"


def test_elsewhere_it_says_so(
    metrics: DistributedMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever opens it to others reads what that means."""
    with MetricsEndpoint(metrics, host="0.0.0.0") as endpoint:
        pass
    assert f"read by everybody who reaches 0.0.0.0:{endpoint.address.port}" in caplog.text


def test_a_port_in_use_is_a_clear_error(
    endpoint: MetricsEndpoint, metrics: DistributedMetrics
) -> None:
    """With where, why and what to do."""
    port = endpoint.address.port
    with pytest.raises(BackendUnavailable, match=rf"127.0.0.1:{port}: .*in use.*metrics_port="):
        MetricsEndpoint(metrics, port)


@pytest.mark.parametrize(
    ("host", "port", "hint"),
    [("127.0.0.1", 70000, "another port"), ("203.0.113.1", 0, "an address of this machine")],
)
def test_an_address_that_is_none_is_a_clear_error(
    metrics: DistributedMetrics, host: str, port: int, hint: str
) -> None:
    """Whatever the system calls it, what to do fits what is wrong."""
    with pytest.raises(BackendUnavailable, match=f"Metrics cannot be served at .*{hint}"):
        MetricsEndpoint(metrics, port, host)


def test_those_who_only_wait_do_not_keep_others_out(endpoint: MetricsEndpoint) -> None:
    """More idle callers than there are places: the oldest have to go."""
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(endpoint)) for _ in range(3 * PLACES)]
        assert "potluck_uptime_seconds" in scrape(endpoint)
        assert idle[0].recv(1) == b""


def test_who_does_not_come_to_the_point_is_sent_away(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A letter now and then does not extend the time."""
    monkeypatch.setattr(metrics_endpoint, "PATIENCE", 0.2)
    with connected(endpoint) as sock, contextlib.suppress(OSError):
        for _ in range(1000):
            sock.sendall(b"G")
            time.sleep(0.01)  # the rhythm of somebody who is slow on purpose
    assert not endpoint._visitors


def test_who_does_not_read_the_answer_is_sent_away(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for it."""
    monkeypatch.setattr(metrics_endpoint, "PATIENCE", 0.2)
    monkeypatch.setattr(metrics_endpoint, "exposition", lambda _: bytes(8 << 20))
    with connected(endpoint) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert sock.recv(1) == b"H"
        eventually(lambda: not endpoint._visitors)


@pytest.mark.parametrize(
    "words",
    [
        b"",
        b"\0" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 5000,
        b"GET " + b"/" * 20000,
    ],
)
def test_whatever_somebody_says_the_next_one_is_answered(
    endpoint: MetricsEndpoint, words: bytes
) -> None:
    """Nonsense, other protocols, endless headers; and hanging up in the middle."""
    for _ in range(3):
        with connected(endpoint) as sock, contextlib.suppress(OSError):
            sock.sendall(words)
    assert "potluck_uptime_seconds" in scrape(endpoint)


def test_a_page_that_cannot_be_made_ends_one_connection(
    metrics: DistributedMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    """The fault is in the log, and the endpoint goes on."""
    faults = [ZeroDivisionError("a fault of ours")]

    def snapshot() -> object:
        if faults:
            raise faults.pop()
        return metrics.snapshot()

    with MetricsEndpoint(snapshot) as endpoint:  # type: ignore[arg-type]
        with pytest.raises((http.client.HTTPException, OSError)):
            scrape(endpoint)
        assert "potluck_uptime_seconds" in scrape(endpoint)
    assert "a fault of ours" in caplog.text


def test_closing_ends_thread_and_port(metrics: DistributedMetrics) -> None:
    """At once, also with somebody connected; twice is no more than once."""
    endpoint = MetricsEndpoint(metrics)
    with connected(endpoint) as sock:
        endpoint.close()
        endpoint.close()
        assert sock.recv(1) == b""
    assert "potluck-metrics" not in {thread.name for thread in threading.enumerate()}
    MetricsEndpoint(metrics, endpoint.address.port).close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_child_does_not_keep_the_port(metrics: DistributedMetrics) -> None:
    """Nor does closing there disturb the parent."""
    with MetricsEndpoint(metrics) as endpoint:
        go, stay = os.pipe()
        closed, tell = os.pipe()
        child = os.fork()
        if not child:  # pragma: no cover - in the child
            endpoint.close()
            os.close(stay)
            os.write(tell, b"x")
            os.read(go, 1)
            os._exit(0)
        os.close(tell)
        assert os.read(closed, 1) == b"x"  # the child has let go of the port
        os.close(closed)
        assert "potluck_uptime_seconds" in scrape(endpoint)
    MetricsEndpoint(metrics, endpoint.address.port).close()
    os.close(stay)
    os.close(go)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
