"""Figures: a snapshot as a flat table of numbers, small enough to be told to observers."""

from __future__ import annotations

from collections.abc import Iterator

from potluck.metrics.snapshot import MetricsSnapshot, OperationSnapshot

__all__ = ["figures"]

_ELECTIONS = {
    "started": "started",
    "elected": "won",
    "new leader": "lost",
    "timeout": "timeouts",
    "stepped down": "stepped_down",
    "split brain": "split_brains",
}


def figures(snapshot: MetricsSnapshot) -> dict[str, float]:
    """The numbers by name; those of what was never used are left out.

    >>> from potluck.metrics import DistributedMetrics
    >>> metrics = DistributedMetrics()
    >>> metrics.barrier.note(0.5, nbytes=0)
    >>> figures(metrics.snapshot())["barrier.mean_ms"]
    500.0
    """
    return {name: float(value) for name, value in _figures(snapshot)}


def _figures(snapshot: MetricsSnapshot) -> Iterator[tuple[str, float]]:
    yield "uptime_seconds", snapshot.uptime
    yield from _collectives(snapshot)
    yield "waiting.total", sum(each.waiting for each in snapshot.peers)
    for peer in snapshot.peers:
        if peer.rank >= 0 and peer.waiting:
            yield f"waiting.{peer.rank}", peer.waiting
    compression = snapshot.compression
    if compression.operations:
        yield "compression.operations", compression.operations
        yield "compression.raw_bytes", compression.raw_bytes
        yield "compression.sent_bytes", compression.sent_bytes
        yield "compression.ratio", compression.ratio
    for kind, count in snapshot.elections.events.items():
        yield f"elections.{_ELECTIONS.get(kind, kind)}", count
    yield "elections.term", snapshot.elections.term
    yield from _membership(snapshot)
    yield from _calls(snapshot)
    yield from _training(snapshot)


def _operation(name: str, of: OperationSnapshot) -> Iterator[tuple[str, float]]:
    for key, value in (
        ("completed", of.completed),
        ("failed", of.failed),
        ("retried", of.retried),
        ("bytes", of.bytes_processed),
        ("seconds", of.seconds),
        ("bytes_per_second", of.bytes_per_second),
        ("mean_ms", of.mean_ms),
        ("p50_ms", of.p50_ms),
        ("p95_ms", of.p95_ms),
        ("p99_ms", of.p99_ms),
    ):
        yield f"{name}.{key}", value


def _collectives(snapshot: MetricsSnapshot) -> Iterator[tuple[str, float]]:
    used = {
        name: each for name, each in snapshot.operations.items() if each.completed or each.failed
    }
    if used:
        kinds = used.values()
        nbytes = sum(each.bytes_processed for each in kinds)
        yield "collectives.completed", sum(each.completed for each in kinds)
        yield "collectives.failed", sum(each.failed for each in kinds)
        yield "collectives.retried", sum(each.retried for each in kinds)
        yield "collectives.bytes", nbytes
        yield "collectives.seconds", sum(each.seconds for each in kinds)
        # Weighed by what each kind has moved: the last barrier says nothing about the links.
        rates = sum(each.bytes_per_second * each.bytes_processed for each in kinds)
        yield "collectives.bytes_per_second", rates / nbytes if nbytes else 0.0
    for name, each in used.items():
        yield from _operation(name, each)


def _membership(snapshot: MetricsSnapshot) -> Iterator[tuple[str, float]]:
    views, discovery = snapshot.views, snapshot.discovery
    if not views.state:
        return
    yield "views.epoch", views.epoch
    yield "views.members", views.members
    yield "views.rank", views.rank
    yield "views.installed", views.installed
    yield "views.paused", views.pauses
    yield "views.paused_seconds", views.paused_seconds
    for cause, count in views.changes.items():
        yield f"views.changes.{cause}", count
    yield "discovery.visible", discovery.visible
    yield "discovery.arrivals", discovery.arrivals
    yield "discovery.departures", discovery.departures
    yield "discovery.strangers", discovery.strangers
    yield "discovery.refused", discovery.refused
    yield "discovery.attempts", discovery.attempts
    yield "discovery.unreachable", discovery.unreachable


def _calls(snapshot: MetricsSnapshot) -> Iterator[tuple[str, float]]:
    calls, served = snapshot.rpc.calls, snapshot.rpc.served
    if calls.completed or calls.failed or snapshot.rpc.in_flight:
        yield "rpc.calls", calls.completed + calls.failed
        yield "rpc.failures", calls.failed
        yield "rpc.in_flight", snapshot.rpc.in_flight
        yield "rpc.mean_ms", calls.mean_ms
        yield "rpc.p50_ms", calls.p50_ms
        yield "rpc.p95_ms", calls.p95_ms
        yield "rpc.p99_ms", calls.p99_ms
    if served.completed or served.failed:
        yield "rpc.served", served.completed + served.failed
        yield "rpc.served_failures", served.failed


def _training(snapshot: MetricsSnapshot) -> Iterator[tuple[str, float]]:
    training, state = snapshot.training, snapshot.state
    if training.committed or training.step:
        yield "training.step", training.step
        yield "training.committed", training.committed
        yield "training.repeated", training.repeated
        yield "training.discarded", training.discarded
        yield "training.withdrawn", training.withdrawn
        yield "training.samples", training.samples
        yield "training.step_ms", training.duration.mean_ms
        yield "training.samples_per_second", training.samples_per_second
    if training.loss is not None:
        yield "training.loss", training.loss
    if state.syncs:
        yield "state.syncs", state.syncs
        yield "state.received_bytes", state.received_bytes
        yield "state.seconds", state.sync_seconds
    if state.saved or state.failed:
        yield "checkpoints.saved", state.saved
        yield "checkpoints.failed", state.failed
        yield "checkpoints.bytes", state.saved_bytes
        yield "checkpoints.seconds", state.save_seconds
