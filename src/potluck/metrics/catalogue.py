"""The table of metrics: every number shown outside the process is defined here, once.

A row has the Prometheus name, the kind, a sentence of help, how to read the number from a snapshot,
and the name of the same number in the table for observers (:func:`figures`).  ``/metrics``,
``docs/internals/metrics.md``, ``potluck status --json`` and the dashboard all derive from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from potluck.metrics.instruments import OperationSnapshot
from potluck.metrics.registry import MetricsSnapshot

Value: TypeAlias = float | OperationSnapshot
"""A number, or an operation whose durations are shown as a histogram."""

Values: TypeAlias = Mapping[str, Value] | Mapping[tuple[str, str], Value]
"""Values by the value of one label, or of two labels."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the table."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    read: Callable[[MetricsSnapshot], Value | Values | None]
    """None, or an empty mapping, where there is nothing to show."""
    labels: tuple[str, ...] = ()
    figure: str = ""
    """The name for observers, with ``{}`` for the label; empty for a number they do not get."""
    when: Callable[[MetricsSnapshot], object] = lambda _: True
    """Whether the feature that it belongs to is in use."""

    def samples(self, snapshot: MetricsSnapshot) -> Iterator[tuple[tuple[str, ...], Value]]:
        """The values of the labels, and the value, of each sample in a snapshot."""
        found = self.read(snapshot) if self.when(snapshot) else None
        if isinstance(found, Mapping):
            for key, value in found.items():
                yield (key,) if isinstance(key, str) else key, value
        elif found is not None:
            yield (), found


def _only_if(when: Callable[[MetricsSnapshot], object], *metrics: Metric) -> tuple[Metric, ...]:
    return tuple(replace(each, when=when) for each in metrics)


def _used(snapshot: MetricsSnapshot) -> dict[str, OperationSnapshot]:
    """The kinds of collectives that were used."""
    found = snapshot.operations.items()
    return {name: each for name, each in found if each.completed or each.failed}


def _outcomes(completed: float, failed: float) -> dict[str, float]:
    return {"completed": completed, "failed": failed}


COLLECTIVES = (
    Metric(
        "potluck_collective_operations_total",
        "counter",
        "Collective operations that have ended, by outcome.",
        lambda s: {
            (name, outcome): count
            for name, each in _used(s).items()
            for outcome, count in _outcomes(each.completed, each.failed).items()
        },
        ("operation", "outcome"),
    ),
    Metric(
        "potluck_collective_retries_total",
        "counter",
        "Operations called after the previous one of their kind was interrupted.",
        lambda s: {name: each.retried for name, each in _used(s).items()},
        ("operation",),
    ),
    Metric(
        "potluck_collective_errors_total",
        "counter",
        "Errors that operations have raised, by class.",
        lambda s: {
            (name, error): count
            for name, each in _used(s).items()
            for error, count in each.errors.items()
        },
        ("operation", "error"),
    ),
    Metric(
        "potluck_collective_bytes_total",
        "counter",
        "Bytes of the arrays given to operations, regardless of how many bytes were sent.",
        lambda s: {name: each.bytes_processed for name, each in _used(s).items()},
        ("operation",),
    ),
    Metric(
        "potluck_collective_duration_seconds",
        "histogram",
        "Seconds from the call of an operation to its end.",
        _used,
        ("operation",),
        figure="{}",
    ),
    Metric(
        "potluck_collective_bytes_per_second",
        "gauge",
        "Bytes of arrays per second of operation, over the last 256 operations.",
        lambda s: {name: each.bytes_per_second for name, each in _used(s).items()},
        ("operation",),
    ),
    *_only_if(
        lambda s: s.compression.operations,
        Metric(
            "potluck_compression_operations_total",
            "counter",
            "Sums that were made with a compressor.",
            lambda s: s.compression.operations,
            figure="compression.operations",
        ),
        Metric(
            "potluck_compression_raw_bytes_total",
            "counter",
            "Bytes of the arrays of these sums before compression.",
            lambda s: s.compression.raw_bytes,
            figure="compression.raw_bytes",
        ),
        Metric(
            "potluck_compression_sent_bytes_total",
            "counter",
            "Bytes of these arrays after compression.",
            lambda s: s.compression.sent_bytes,
            figure="compression.sent_bytes",
        ),
        Metric(
            "potluck_compression_ratio",
            "gauge",
            "How many times smaller compression has made these arrays, over all sums.",
            lambda s: s.compression.ratio,
            figure="compression.ratio",
        ),
    ),
)

STATUS_NUMBERS = {"healthy": 0, "degraded": 1, "suspect": 2, "dead": 3}
"""The health of a peer as a number."""


def _in_cluster(snapshot: MetricsSnapshot) -> bool:
    return bool(snapshot.views.state)


PEERS = (
    Metric(
        "potluck_peer_waiting_seconds_total",
        "counter",
        "Seconds that operations of this process have waited for data from a peer.",
        lambda s: {each.peer: each.waiting for each in s.peers},
        ("peer",),
    ),
    Metric(
        "potluck_peer_status",
        "gauge",
        "Health of a peer: 0 healthy, 1 degraded, 2 suspect, 3 dead.",
        lambda s: {
            each.peer: STATUS_NUMBERS[each.status]
            for each in s.peers
            if each.status in STATUS_NUMBERS
        },
        ("peer",),
    ),
    Metric(
        "potluck_peer_round_trip_seconds",
        "gauge",
        "Round-trip time of heartbeats to a peer, in seconds.",
        lambda s: {each.peer: each.round_trip for each in s.peers if each.round_trip is not None},
        ("peer",),
    ),
    Metric(
        "potluck_peer_jitter_seconds",
        "gauge",
        "Jitter of the heartbeats of a peer, in seconds.",
        lambda s: {each.peer: each.jitter for each in s.peers if each.jitter is not None},
        ("peer",),
    ),
    Metric(
        "potluck_peer_heartbeat_loss_ratio",
        "gauge",
        "Share of the heartbeats of a peer that did not arrive in time, from 0 to 1.",
        lambda s: {each.peer: each.loss for each in s.peers},
        ("peer",),
    ),
    *_only_if(
        _in_cluster,
        Metric(
            "potluck_peers",
            "gauge",
            "Number of peers, by health.",
            lambda s: s.health.peers,
            ("status",),
        ),
        Metric(
            "potluck_health_changes_total",
            "counter",
            "Changes of the health of a peer, by new status.",
            lambda s: s.health.changes,
            ("status",),
        ),
        Metric(
            "potluck_loop_lateness_seconds",
            "gauge",
            "Recent delay of the control loop of this process, in seconds.",
            lambda s: s.health.lateness,
        ),
    ),
)

MEMBERSHIP = _only_if(
    _in_cluster,
    Metric(
        "potluck_view_epoch",
        "gauge",
        "Epoch of the current view.",
        lambda s: s.views.epoch,
        figure="views.epoch",
    ),
    Metric(
        "potluck_view_members",
        "gauge",
        "Members of the current view.",
        lambda s: s.views.members,
        figure="views.members",
    ),
    Metric(
        "potluck_view_rank",
        "gauge",
        "Rank of this process in the current view; -1 before the first view.",
        lambda s: s.views.rank,
        figure="views.rank",
    ),
    Metric(
        "potluck_view_changes_total",
        "counter",
        "Views that this process has entered, by cause.",
        lambda s: s.views.changes,
        ("cause",),
        figure="views.changes.{}",
    ),
    Metric(
        "potluck_membership_events_total",
        "counter",
        "Membership events, by kind.",
        lambda s: s.views.events,
        ("event",),
    ),
    Metric(
        "potluck_pauses_total",
        "counter",
        "Times that this process paused because a quorum was missing.",
        lambda s: s.views.pauses,
        figure="views.paused",
    ),
    Metric(
        "potluck_paused_seconds_total",
        "counter",
        "Seconds that this process was paused.",
        lambda s: s.views.paused_seconds,
        figure="views.paused_seconds",
    ),
    Metric(
        "potluck_election_events_total",
        "counter",
        "Election events, by kind.",
        lambda s: s.elections.events,
        ("event",),
        figure="elections.{}",
    ),
    Metric(
        "potluck_election_term",
        "gauge",
        "Term of the last election in the current view.",
        lambda s: s.elections.term,
        figure="elections.term",
    ),
    Metric(
        "potluck_leader",
        "gauge",
        "1 while this process leads its view, else 0.",
        lambda s: int(s.elections.is_leader),
    ),
    Metric(
        "potluck_discovery_visible",
        "gauge",
        "Processes of this job that discovery sees now.",
        lambda s: s.discovery.visible,
        figure="discovery.visible",
    ),
    Metric(
        "potluck_discovery_arrivals_total",
        "counter",
        "Processes that discovery has found.",
        lambda s: s.discovery.arrivals,
        figure="discovery.arrivals",
    ),
    Metric(
        "potluck_discovery_departures_total",
        "counter",
        "Processes that discovery has lost.",
        lambda s: s.discovery.departures,
        figure="discovery.departures",
    ),
    Metric(
        "potluck_discovery_strangers",
        "gauge",
        "Announcements of another group or job that were ignored.",
        lambda s: s.discovery.strangers,
        figure="discovery.strangers",
    ),
    Metric(
        "potluck_refused_callers_total",
        "counter",
        "Connections that this process has refused.",
        lambda s: s.discovery.refused,
        figure="discovery.refused",
    ),
    Metric(
        "potluck_connection_attempts_total",
        "counter",
        "Attempts to connect to a process of the job.",
        lambda s: s.discovery.attempts,
        figure="discovery.attempts",
    ),
    Metric(
        "potluck_unreachable_attempts_total",
        "counter",
        "Attempts to connect that failed.",
        lambda s: s.discovery.unreachable,
        figure="discovery.unreachable",
    ),
)


def _has_called(snapshot: MetricsSnapshot) -> bool:
    calls = snapshot.rpc.calls
    return bool(calls.completed or calls.failed or snapshot.rpc.in_flight)


RPC = (
    *_only_if(
        _has_called,
        Metric(
            "potluck_rpc_calls_total",
            "counter",
            "Remote calls that this process made and that have ended, by outcome.",
            lambda s: _outcomes(s.rpc.calls.completed, s.rpc.calls.failed),
            ("outcome",),
        ),
        Metric(
            "potluck_rpc_errors_total",
            "counter",
            "Errors of these calls, by class.",
            lambda s: s.rpc.calls.errors,
            ("error",),
        ),
        Metric(
            "potluck_rpc_in_flight",
            "gauge",
            "Remote calls that this process has made and that have not ended.",
            lambda s: s.rpc.in_flight,
            figure="rpc.in_flight",
        ),
        Metric(
            "potluck_rpc_duration_seconds",
            "histogram",
            "Seconds from a remote call to its answer.",
            lambda s: s.rpc.calls,
        ),
    ),
    *_only_if(
        lambda s: s.rpc.served.buckets,
        Metric(
            "potluck_rpc_served_total",
            "counter",
            "Remote calls that this process has answered, by outcome.",
            lambda s: _outcomes(s.rpc.served.completed, s.rpc.served.failed),
            ("outcome",),
        ),
        Metric(
            "potluck_rpc_served_duration_seconds",
            "histogram",
            "Seconds that the functions of these calls took.",
            lambda s: s.rpc.served,
        ),
    ),
)


def _has_trained(snapshot: MetricsSnapshot) -> bool:
    training = snapshot.training
    return bool(training.duration.buckets or training.committed or training.step)


TRAINING = (
    *_only_if(
        _has_trained,
        Metric(
            "potluck_training_step",
            "gauge",
            "Training steps that are committed, as all members count them.",
            lambda s: s.training.step,
            figure="training.step",
        ),
        Metric(
            "potluck_training_steps_committed_total",
            "counter",
            "Steps that used the gradients of this member.",
            lambda s: s.training.committed,
            figure="training.committed",
        ),
        Metric(
            "potluck_training_steps_repeated_total",
            "counter",
            "Averagings that were repeated because a member joined or left.",
            lambda s: s.training.repeated,
            figure="training.repeated",
        ),
        Metric(
            "potluck_training_steps_discarded_total",
            "counter",
            "Steps that discarded the gradients of this member because they were out of date.",
            lambda s: s.training.discarded,
            figure="training.discarded",
        ),
        Metric(
            "potluck_training_steps_withdrawn_total",
            "counter",
            "Committed steps that were discarded when two parts of a split job merged.",
            lambda s: s.training.withdrawn,
            figure="training.withdrawn",
        ),
        Metric(
            "potluck_training_samples_total",
            "counter",
            "Samples, or weights, of all members in these steps.",
            lambda s: s.training.samples,
            figure="training.samples",
        ),
        Metric(
            "potluck_training_samples_per_second",
            "gauge",
            "Samples of all members per second, over the last 64 steps.",
            lambda s: s.training.samples_per_second,
            figure="training.samples_per_second",
        ),
    ),
    Metric(
        "potluck_training_loss",
        "gauge",
        "Loss that this member reported last.",
        lambda s: s.training.loss,
        figure="training.loss",
    ),
    Metric(
        "potluck_training_step_duration_seconds",
        "histogram",
        "Seconds from submitting the gradients of a step to the end of its update.",
        lambda s: s.training.duration if s.training.duration.buckets else None,
    ),
    *_only_if(
        lambda s: s.state.syncs,
        Metric(
            "potluck_state_syncs_total",
            "counter",
            "Comparisons and exchanges of the training state with other members.",
            lambda s: s.state.syncs,
            figure="state.syncs",
        ),
        Metric(
            "potluck_state_received_bytes_total",
            "counter",
            "Bytes of the training state that this member received.",
            lambda s: s.state.received_bytes,
            figure="state.received_bytes",
        ),
        Metric(
            "potluck_state_sync_seconds_total",
            "counter",
            "Seconds that these exchanges took.",
            lambda s: s.state.sync_seconds,
            figure="state.seconds",
        ),
    ),
    *_only_if(
        lambda s: s.state.saved or s.state.failed,
        Metric(
            "potluck_checkpoints_total",
            "counter",
            "Checkpoints of this member's part, by outcome.",
            lambda s: _outcomes(s.state.saved, s.state.failed),
            ("outcome",),
        ),
        Metric(
            "potluck_checkpoint_bytes_total",
            "counter",
            "Bytes of these checkpoints.",
            lambda s: s.state.saved_bytes,
            figure="checkpoints.bytes",
        ),
        Metric(
            "potluck_checkpoint_seconds_total",
            "counter",
            "Seconds that saving them took, in parallel with training.",
            lambda s: s.state.save_seconds,
            figure="checkpoints.seconds",
        ),
    ),
)

PROCESS = (
    Metric(
        "potluck_uptime_seconds",
        "gauge",
        "Seconds since this process began to count.",
        lambda s: s.uptime,
        figure="uptime_seconds",
    ),
)

SECTIONS = {
    "Collectives": COLLECTIVES,
    "Peers": PEERS,
    "Membership and discovery": MEMBERSHIP,
    "Remote calls": RPC,
    "Training": TRAINING,
    "The process": PROCESS,
}
"""The metrics by subject."""

METRICS = tuple(metric for section in SECTIONS.values() for metric in section)
"""All metrics, in the order in which they are shown."""

_ELECTION_EVENTS = {
    "elected": "won",
    "new leader": "lost",
    "timeout": "timeouts",
    "stepped down": "stepped_down",
    "split brain": "split_brains",
}
"""Labels that observers get under another name."""

_OPERATION_FIGURES = {
    "bytes": "bytes_processed",
    **{
        name: name
        for name in (
            *("completed", "failed", "retried", "seconds", "bytes_per_second"),
            *("mean_ms", "p50_ms", "p95_ms", "p99_ms"),
        )
    },
}
"""What observers get of an operation, and its field in the snapshot."""


def figures(snapshot: MetricsSnapshot) -> dict[str, float]:
    """The numbers as a flat table for observers; those of features not in use are left out.

    >>> from potluck.metrics.registry import DistributedMetrics
    >>> metrics = DistributedMetrics()
    >>> metrics.barrier.note(0.5, nbytes=0)
    >>> figures(metrics.snapshot())["barrier.mean_ms"]
    500.0
    """
    found: dict[str, float] = {}
    for metric in METRICS:
        if metric.figure:
            for labels, value in metric.samples(snapshot):
                name = metric.figure.format(*(_ELECTION_EVENTS.get(each, each) for each in labels))
                if isinstance(value, OperationSnapshot):
                    for key, field in _OPERATION_FIGURES.items():
                        found[f"{name}.{key}"] = float(getattr(value, field))
                else:
                    found[name] = float(value)
    found.update((name, float(value)) for name, value in _summaries(snapshot))
    return found


def _summaries(snapshot: MetricsSnapshot) -> Iterator[tuple[str, float]]:
    """Figures that summarise several metrics."""
    kinds = _used(snapshot).values()
    if kinds:
        nbytes = sum(each.bytes_processed for each in kinds)
        yield "collectives.completed", sum(each.completed for each in kinds)
        yield "collectives.failed", sum(each.failed for each in kinds)
        yield "collectives.retried", sum(each.retried for each in kinds)
        yield "collectives.bytes", nbytes
        yield "collectives.seconds", sum(each.seconds for each in kinds)
        # Weighted by the bytes of each kind: the last barrier says nothing about the links.
        rates = sum(each.bytes_per_second * each.bytes_processed for each in kinds)
        yield "collectives.bytes_per_second", rates / nbytes if nbytes else 0.0
    yield "waiting.total", sum(each.waiting for each in snapshot.peers)
    for peer in snapshot.peers:
        if peer.rank >= 0 and peer.waiting:
            yield f"waiting.{peer.rank}", peer.waiting
    if _in_cluster(snapshot):
        yield "views.installed", snapshot.views.installed
    calls, served = snapshot.rpc.calls, snapshot.rpc.served
    if _has_called(snapshot):
        yield "rpc.calls", calls.completed + calls.failed
        yield "rpc.failures", calls.failed
        yield "rpc.mean_ms", calls.mean_ms
        yield "rpc.p50_ms", calls.p50_ms
        yield "rpc.p95_ms", calls.p95_ms
        yield "rpc.p99_ms", calls.p99_ms
    if served.buckets:
        yield "rpc.served", served.completed + served.failed
        yield "rpc.served_failures", served.failed
    if _has_trained(snapshot):
        yield "training.step_ms", 1e3 * snapshot.training.seconds_per_step
    if snapshot.state.saved or snapshot.state.failed:
        yield "checkpoints.saved", snapshot.state.saved
        yield "checkpoints.failed", snapshot.state.failed
