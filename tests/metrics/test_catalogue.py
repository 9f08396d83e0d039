"""The table of metrics: names that tell kind and unit, and the figures derived from it."""

import re

import pytest

from potluck.metrics.catalogue import METRICS, Metric, figures
from potluck.metrics.instruments import count
from potluck.metrics.registry import MAX_PEERS, OPERATIONS, DistributedMetrics


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_say_kind_and_unit(metric: Metric) -> None:
    """Counters end in _total, durations are in seconds, sizes in bytes; the help is a sentence."""
    assert re.fullmatch(r"potluck_[a-z_]+", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    if metric.kind == "histogram":
        assert metric.name.endswith("_seconds")
    assert not re.search(r"_(ms|milliseconds|kb|percent)\b", metric.name)
    assert metric.help.endswith(".")
    assert len({each.name for each in METRICS}) == len(METRICS)


def test_what_is_not_used_is_not_shown() -> None:
    """A context that has done nothing has an uptime, and no hundred zeros."""
    snapshot = DistributedMetrics().snapshot()
    shown = [metric.name for metric in METRICS if list(metric.samples(snapshot))]
    assert shown == ["potluck_uptime_seconds"]


# --------------------------------------------------------------------------------------------------
# Figures: a snapshot as a small flat table of numbers.

ROOM = 256
"""Figures that one journal of a node has room for."""


def busiest() -> DistributedMetrics:
    """Metrics with all that there can be."""
    metrics = DistributedMetrics()
    for name in OPERATIONS:
        getattr(metrics, name).note(0.002, 1000)
    metrics.all_reduce.note(0.5, 10, "PeerLost")
    metrics.peers.watch(
        {rank: f"node-{rank}" for rank in range(MAX_PEERS)}, dict.fromkeys(range(MAX_PEERS), 1.5)
    )
    metrics.compression.note(400, 100)
    for event in ("started", "elected", "new leader", "timeout", "stepped down", "split brain"):
        count(metrics.elections.events, event)
    metrics.views.state = "active"
    metrics.views.epoch, metrics.views.members = 3, 2
    count(metrics.views.changes, "lost")
    metrics.rpc.calls.note(0.001, 1)
    metrics.rpc.served.note(0.001, 1, "ValueError")
    metrics.training.steps.note(0.1, 0)
    metrics.training.commit(7, 64.0, tries=2)
    metrics.training.loss.set(0.25)
    metrics.state.syncs.note(1.0, 10)
    metrics.state.saves.note(2.0, 20)
    return metrics


def test_every_layer_has_its_figures() -> None:
    """Under the names that observers look for."""
    found = figures(busiest().snapshot())
    wanted = {
        "collectives.completed": 9,
        "collectives.failed": 1,
        "all_reduce.completed": 1,
        "barrier.p95_ms": 2,
        "waiting.2": 1.5,
        "waiting.total": 1.5 * MAX_PEERS,
        "compression.ratio": 4,
        "elections.won": 1,
        "elections.lost": 1,
        "views.epoch": 3,
        "views.changes.lost": 1,
        "discovery.refused": 0,
        "rpc.calls": 1,
        "rpc.served_failures": 1,
        "training.step": 7,
        "training.repeated": 1,
        "training.loss": 0.25,
        "state.received_bytes": 10,
        "checkpoints.bytes": 20,
    }
    assert {name: found.get(name) for name in wanted} == wanted
    assert 0 < found["collectives.bytes_per_second"] <= 1000 / 0.002


def test_there_is_room_for_all_of_them() -> None:
    """What a node tells an observer is bounded."""
    found = figures(busiest().snapshot())
    assert len(found) <= ROOM
    assert all(isinstance(value, float) for value in found.values())


def test_what_was_never_used_is_left_out() -> None:
    """Nobody wants to look at a hundred zeros."""
    assert set(figures(DistributedMetrics().snapshot())) == {
        "uptime_seconds",
        "waiting.total",
    }
