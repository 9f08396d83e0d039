"""The exposition: what a scraper reads, as Prometheus's own tool wants it."""

import shutil
import subprocess
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from potluck import DistributedMetrics, MetricsCollector
from potluck.metrics.catalogue import CATALOGUE
from potluck.metrics.peers import MAX_PEERS
from potluck.metrics.snapshot import PeerSnapshot
from potluck.runtime.metrics_exposition import exposition
from support.interpreter import ask


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
    metrics.views.events.inc("met")
    metrics.elections.events.inc("elected")
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
    assert shown == {family.name.removesuffix("_total") for family in CATALOGUE}


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
