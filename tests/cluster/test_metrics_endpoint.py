"""The endpoint: it answers scrapers, and whoever means ill costs it nothing but a place."""

import contextlib
import http.client
import os
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from potluck import BackendUnavailable, DistributedMetrics, MetricsCollector, MetricsEndpoint
from potluck.cluster import metrics_endpoint
from potluck.cluster.metrics_endpoint import MAX_REQUEST, PLACES, answer, exposition
from potluck.metrics.catalogue import METRICS
from potluck.metrics.registry import MAX_PEERS, PeerSnapshot
from support.interpreter import ask
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
    assert f"Any program that reaches 0.0.0.0:{endpoint.address.port}" in caplog.text


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
    assert not endpoint._clients


def test_who_does_not_read_the_answer_is_sent_away(
    endpoint: MetricsEndpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits for it."""
    monkeypatch.setattr(metrics_endpoint, "PATIENCE", 0.2)
    monkeypatch.setattr(metrics_endpoint, "exposition", lambda _: bytes(8 << 20))
    with connected(endpoint) as sock:
        sock.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
        assert sock.recv(1) == b"H"
        eventually(lambda: not endpoint._clients)


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


# --------------------------------------------------------------------------------------------------
# The exposition: what a scraper reads, as Prometheus's own tool wants it.


def busy() -> DistributedMetrics:
    """Metrics of which everything is used."""
    metrics = DistributedMetrics()
    for number in range(100):
        metrics.all_reduce.note(number * 1e-4, 4096)
    metrics.all_reduce.note(0.5, 4096, "PeerLost")
    metrics.barrier.completed.inc()
    metrics.peers.watch({1: "attic"}, {1: 2.5})
    metrics.peers.see(
        [PeerSnapshot(peer="attic", rank=1, status="suspect", round_trip=0.001, jitter=0.0)]
    )
    metrics.compression.note(400, 100)
    metrics.health.peers = {"healthy": 2}
    metrics.views.state = "active"
    metrics.views.events["met"] = 1
    metrics.elections.events["elected"] = 1
    metrics.rpc.calls.note(0.1, 1)
    metrics.rpc.calls.note(0.1, 1, "RpcTimeout")
    metrics.rpc.served.note(0.1, 1)
    metrics.training.steps.note(0.1, 0)
    metrics.training.commit(7, 64.0, tries=2)
    metrics.training.loss.set(0.25)
    metrics.state.syncs.note(1.0, 10)
    metrics.state.saves.note(2.0, 20)
    return metrics


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    """One number."""
    return registry.get_sample_value(name, labels)


def test_a_registry_finds_every_number() -> None:
    """In the units that Prometheus wants."""
    registry = CollectorRegistry()
    registry.register(MetricsCollector(busy()))
    duration = "potluck_collective_duration_seconds"
    assert value(registry, f"{duration}_count", operation="all_reduce") == 101
    assert value(registry, f"{duration}_sum", operation="all_reduce") == pytest.approx(0.995)
    assert value(registry, f"{duration}_bucket", operation="all_reduce", le="0.001") == 11
    assert value(registry, f"{duration}_bucket", operation="all_reduce", le="+Inf") == 101
    assert value(registry, f"{duration}_count", operation="barrier") == 0  # counted by hand
    errors = {"operation": "all_reduce", "error": "PeerLost"}
    assert value(registry, "potluck_collective_errors_total", **errors) == 1
    assert value(registry, "potluck_peer_status", peer="attic") == 2
    assert value(registry, "potluck_peer_waiting_seconds_total", peer="attic") == 2.5
    assert value(registry, "potluck_compression_ratio") == 4
    assert value(registry, "potluck_training_loss") == 0.25
    assert value(registry, "potluck_checkpoint_bytes_total") == 20


def test_prometheus_finds_nothing_to_complain_about() -> None:
    """Names, kinds, units and help of everything that there is."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    page = exposition(busy().snapshot)
    result = subprocess.run(
        [promtool, "check", "metrics"], input=page, capture_output=True, check=False, timeout=30
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, b"", b"")
    shown = {family.name for family in text_string_to_metric_families(page.decode())}
    assert shown == {family.name.removesuffix("_total") for family in METRICS}


def test_names_from_the_network_cannot_forge_a_line() -> None:
    """Whatever a machine calls itself, it stays within its label."""
    metrics = DistributedMetrics()
    label = metrics.peers.label(1, 'attic"} 1\npotluck_training_loss 0\n#\\')
    metrics.peers.watch({1: label}, {1: 1.0})
    page = exposition(metrics.snapshot).decode()
    families = {each.name: each for each in text_string_to_metric_families(page)}
    assert "potluck_training_loss" not in families
    (sample,) = families["potluck_peer_waiting_seconds"].samples
    assert sample.labels["peer"] == label


def test_a_thousand_peers_are_few_lines() -> None:
    """The number of series does not grow with the number of those who come and go."""
    metrics = DistributedMetrics()
    for number in range(1000):
        label = metrics.peers.label(number, f"node-{number}")
        metrics.peers.watch({1: label}, {1: 0.001})
    lines = [
        line
        for line in exposition(metrics.snapshot).decode().splitlines()
        if line.startswith("potluck_peer_waiting_seconds_total{")
    ]
    assert len(lines) == MAX_PEERS + 1


def test_the_library_for_prometheus_is_loaded_when_first_used(tmp_path: Path) -> None:
    """A program that nobody scrapes does not pay for it."""
    source = (
        "import json, sys, potluck; potluck.MetricsCollector; potluck.MetricsEndpoint; "
        "potluck.join; print(json.dumps('prometheus_client' in sys.modules))"
    )
    assert ask(source, cwd=tmp_path) is False


# --------------------------------------------------------------------------------------------------
# HTTP for metrics: a question in, an answer out, whatever the question is.

PAGE = b"potluck_up 1\n"


def status_of(request: bytes, *, local: bool = True) -> int:
    """The number in the first line of the answer."""
    return int(answer(request, lambda: PAGE, local=local).split(b" ", 2)[1])


def test_the_page_is_given() -> None:
    """With its length and type, and nothing that a browser would guess or keep."""
    said = answer(
        b"GET /metrics?x=1 HTTP/1.1\r\nHost: localhost:9464\r\n\r\n", lambda: PAGE, local=True
    )
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == PAGE
    for line in (b"Content-Length: 13", b"text/plain; version=0.0.4", b"nosniff", b"no-store"):
        assert line in head


def test_whoever_asks_for_the_head_gets_the_head() -> None:
    """The length is that of the page."""
    said = answer(b"HEAD /metrics HTTP/1.0\r\n\r\n", lambda: PAGE, local=True)
    assert said.endswith(b"\r\n\r\n")
    assert b"Content-Length: 13" in said


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", 404),
        (b"GET /metrics/../etc/passwd HTTP/1.1", 404),
        (b"POST /metrics HTTP/1.1", 405),
        (b"GET /metrics", 400),
        (b"GET /metrics HTTP/2", 400),
        (b"", 400),
    ],
)
def test_other_questions_are_declined(request_line: bytes, status: int) -> None:
    """In the words of HTTP."""
    assert status_of(request_line + b"\r\n\r\n") == status


def test_an_endless_question_is_too_long() -> None:
    """Nobody reads on for ever."""
    assert status_of(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * MAX_REQUEST) == 431


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"127.0.0.1:9464", 200),
        (b"localhost", 200),
        (b"[::1]:9464", 200),
        (b"", 200),
        (b"evil.example", 421),
        (b"192.168.1.5", 421),
        (b"[nonsense", 421),
        (b"localhost\r\nHost: evil.example", 421),
    ],
)
def test_a_page_in_a_browser_cannot_make_a_name_stand_for_this_machine(
    host: bytes, status: int
) -> None:
    """Where only this machine can ask; where others may, they come by any name."""
    request = b"GET /metrics HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
    assert status_of(request) == status
    assert status_of(request, local=False) == 200


@given(st.binary(max_size=200))
def test_whatever_comes_there_is_an_answer(request: bytes) -> None:
    """And never an error of ours."""
    assert status_of(request) in {200, 400, 404, 405, 421, 431}
