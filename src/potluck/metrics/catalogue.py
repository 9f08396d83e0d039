"""The catalogue: every metric that is shown to the outside, with its name, unit and meaning.

One table from which the exposition reads and ``docs/metrics.md`` is checked.  Names, units and
kinds are as Prometheus wants them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from potluck.metrics.instruments import MetricsSnapshot, OperationSnapshot

# --------------------------------------------------------------------------------------------------
# Families: what a line of the catalogue of metrics is, and how it finds its numbers.

Sample: TypeAlias = tuple[tuple[str, ...], "float | OperationSnapshot"]
"""The values of the labels, and a number, or an operation of which the durations are meant."""

Read: TypeAlias = Callable[[MetricsSnapshot], Iterable[Sample]]


@dataclass(frozen=True, slots=True)
class Family:
    """A metric: one line of the catalogue."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    meaning: str
    read: Read
    labels: tuple[str, ...] = ()


def used(snapshot: MetricsSnapshot) -> Iterator[tuple[str, OperationSnapshot]]:
    """The kinds of collectives that were used."""
    for name, each in snapshot.operations.items():
        if each.completed or each.failed:
            yield name, each


def each_operation(read: Callable[[OperationSnapshot], float]) -> Read:
    """A number of each kind of collective that was used."""
    return lambda snapshot: [((name,), read(each)) for name, each in used(snapshot)]


def one(read: Callable[[MetricsSnapshot], float | OperationSnapshot | None]) -> Read:
    """A single number; None where there is nothing to show."""

    def samples(snapshot: MetricsSnapshot) -> list[Sample]:
        value = read(snapshot)
        return [] if value is None else [((), value)]

    return samples


def tally(read: Callable[[MetricsSnapshot], Mapping[str, float]]) -> Read:
    """Numbers by a label."""
    return lambda snapshot: [((name,), value) for name, value in read(snapshot).items()]


def outcomes(read: Callable[[MetricsSnapshot], OperationSnapshot]) -> Read:
    """How often it ended well, and how often not."""

    def samples(snapshot: MetricsSnapshot) -> list[Sample]:
        each = read(snapshot)
        return [(("completed",), each.completed), (("failed",), each.failed)]

    return samples


def in_cluster(
    read: Callable[[MetricsSnapshot], float],
) -> Callable[[MetricsSnapshot], float | None]:
    """Only where there is a cluster."""
    return lambda snapshot: read(snapshot) if snapshot.views.state else None


# --------------------------------------------------------------------------------------------------
# The catalogue, second part: what is counted about the peers and the membership of a cluster.

STATUS_NUMBERS = {"healthy": 0, "degraded": 1, "suspect": 2, "dead": 3}
"""How a peer is, as a number."""


def _peers(read: Callable[[object], float | None], name: str) -> Read:
    def samples(snapshot: MetricsSnapshot) -> Iterator[Sample]:
        for peer in snapshot.peers:
            value = read(getattr(peer, name))
            if value is not None:
                yield (peer.peer,), value

    return samples


def _number(value: object) -> float | None:
    return value if isinstance(value, float | int) else None


def _status(value: object) -> float | None:
    return STATUS_NUMBERS.get(str(value))


PEERS = (
    Family(
        "potluck_peer_waiting_seconds_total",
        "counter",
        "Seconds that operations here have slept because bytes of a peer were missing.",
        _peers(_number, "waiting"),
        ("peer",),
    ),
    Family(
        "potluck_peer_status",
        "gauge",
        "How a peer is: 0 healthy, 1 degraded, 2 suspect, 3 dead.",
        _peers(_status, "status"),
        ("peer",),
    ),
    Family(
        "potluck_peer_round_trip_seconds",
        "gauge",
        "Seconds of a heartbeat to a peer and back.",
        _peers(_number, "round_trip"),
        ("peer",),
    ),
    Family(
        "potluck_peer_jitter_seconds",
        "gauge",
        "Seconds by which heartbeats of a peer differ from their rhythm.",
        _peers(_number, "jitter"),
        ("peer",),
    ),
    Family(
        "potluck_peer_heartbeat_loss_ratio",
        "gauge",
        "Share of the heartbeats of a peer that did not come in time, from 0 to 1.",
        _peers(_number, "loss"),
        ("peer",),
    ),
    Family(
        "potluck_peers",
        "gauge",
        "Peers by how they are.",
        tally(lambda snapshot: snapshot.health.peers),
        ("status",),
    ),
    Family(
        "potluck_health_changes_total",
        "counter",
        "Times that a peer got a status.",
        tally(lambda s: s.health.changes if s.views.state else {}),
        ("status",),
    ),
    Family(
        "potluck_loop_lateness_seconds",
        "gauge",
        "Seconds by which this node's own control loop ran late recently.",
        one(in_cluster(lambda snapshot: snapshot.health.lateness)),
    ),
)

MEMBERSHIP = (
    Family(
        "potluck_view_epoch",
        "gauge",
        "Number of the view that this node is in.",
        one(in_cluster(lambda snapshot: snapshot.views.epoch)),
    ),
    Family(
        "potluck_view_members",
        "gauge",
        "Members of that view.",
        one(in_cluster(lambda snapshot: snapshot.views.members)),
    ),
    Family(
        "potluck_view_rank",
        "gauge",
        "Rank of this node in that view; -1 before the first.",
        one(in_cluster(lambda snapshot: snapshot.views.rank)),
    ),
    Family(
        "potluck_view_changes_total",
        "counter",
        "Views that this node has entered, by what brought them.",
        tally(lambda s: s.views.changes if s.views.state else {}),
        ("cause",),
    ),
    Family(
        "potluck_membership_events_total",
        "counter",
        "What happened about who is in, by kind.",
        tally(lambda snapshot: snapshot.views.events),
        ("event",),
    ),
    Family(
        "potluck_pauses_total",
        "counter",
        "Times that this node has paused for want of a quorum.",
        one(in_cluster(lambda snapshot: snapshot.views.pauses)),
    ),
    Family(
        "potluck_paused_seconds_total",
        "counter",
        "Seconds that it was paused.",
        one(in_cluster(lambda snapshot: snapshot.views.paused_seconds)),
    ),
    Family(
        "potluck_election_events_total",
        "counter",
        "What happened in elections, by kind.",
        tally(lambda snapshot: snapshot.elections.events),
        ("event",),
    ),
    Family(
        "potluck_election_term",
        "gauge",
        "Term of the last election in this node's view.",
        one(in_cluster(lambda snapshot: snapshot.elections.term)),
    ),
    Family(
        "potluck_leader",
        "gauge",
        "1 while this node leads its view, else 0.",
        one(in_cluster(lambda snapshot: int(snapshot.elections.is_leader))),
    ),
    Family(
        "potluck_discovery_visible",
        "gauge",
        "Processes of this namespace and job that are seen now.",
        one(in_cluster(lambda snapshot: snapshot.discovery.visible)),
    ),
    Family(
        "potluck_discovery_arrivals_total",
        "counter",
        "Processes that came into sight.",
        one(in_cluster(lambda snapshot: snapshot.discovery.arrivals)),
    ),
    Family(
        "potluck_discovery_departures_total",
        "counter",
        "Processes that went out of sight.",
        one(in_cluster(lambda snapshot: snapshot.discovery.departures)),
    ),
    Family(
        "potluck_discovery_strangers",
        "gauge",
        "Announcements heard that are of another namespace or job, and ignored.",
        one(in_cluster(lambda snapshot: snapshot.discovery.strangers)),
    ),
    Family(
        "potluck_refused_callers_total",
        "counter",
        "Connections that were sent away at this node's port.",
        one(in_cluster(lambda snapshot: snapshot.discovery.refused)),
    ),
    Family(
        "potluck_connection_attempts_total",
        "counter",
        "Attempts to connect to a process of the job.",
        one(in_cluster(lambda snapshot: snapshot.discovery.attempts)),
    ),
    Family(
        "potluck_unreachable_attempts_total",
        "counter",
        "Attempts to connect that failed.",
        one(in_cluster(lambda snapshot: snapshot.discovery.unreachable)),
    ),
)


# --------------------------------------------------------------------------------------------------
# The catalogue, first part: what is counted about the work, collectives, calls and training.


def _operations(snapshot: MetricsSnapshot) -> Iterator[Sample]:
    for name, each in used(snapshot):
        yield (name, "completed"), each.completed
        yield (name, "failed"), each.failed


def _errors(snapshot: MetricsSnapshot) -> Iterator[Sample]:
    for name, each in used(snapshot):
        for error, count in each.errors.items():
            yield (name, error), count


COLLECTIVES = (
    Family(
        "potluck_collective_operations_total",
        "counter",
        "Collective operations that have ended, by how they did.",
        _operations,
        ("operation", "outcome"),
    ),
    Family(
        "potluck_collective_retries_total",
        "counter",
        "Operations called after the last one of their kind had been interrupted.",
        each_operation(lambda each: each.retried),
        ("operation",),
    ),
    Family(
        "potluck_collective_errors_total",
        "counter",
        "Errors that operations have raised, by their class.",
        _errors,
        ("operation", "error"),
    ),
    Family(
        "potluck_collective_bytes_total",
        "counter",
        "Bytes of the arrays given to operations, whatever went over the wire for them.",
        each_operation(lambda each: each.bytes_processed),
        ("operation",),
    ),
    Family(
        "potluck_collective_duration_seconds",
        "histogram",
        "Seconds from the call of an operation to its end.",
        lambda snapshot: [((name,), each) for name, each in used(snapshot)],
        ("operation",),
    ),
    Family(
        "potluck_collective_bytes_per_second",
        "gauge",
        "Bytes of arrays per second of operation, over the last 256 operations.",
        each_operation(lambda each: each.bytes_per_second),
        ("operation",),
    ),
    Family(
        "potluck_compression_operations_total",
        "counter",
        "Sums that were made with a compressor.",
        one(lambda snapshot: snapshot.compression.operations or None),
    ),
    Family(
        "potluck_compression_raw_bytes_total",
        "counter",
        "Bytes of the arrays of these sums.",
        one(lambda snapshot: snapshot.compression.raw_bytes or None),
    ),
    Family(
        "potluck_compression_sent_bytes_total",
        "counter",
        "Bytes that stood for these arrays.",
        one(lambda snapshot: snapshot.compression.sent_bytes or None),
    ),
    Family(
        "potluck_compression_ratio",
        "gauge",
        "How many times smaller the arrays of these sums became, over all of them.",
        one(lambda s: s.compression.ratio if s.compression.operations else None),
    ),
)


def _has_called(snapshot: MetricsSnapshot) -> bool:
    calls = snapshot.rpc.calls
    return bool(calls.completed or calls.failed or snapshot.rpc.in_flight)


RPC = (
    Family(
        "potluck_rpc_calls_total",
        "counter",
        "Remote calls that this process made and that have ended, by how they did.",
        lambda s: outcomes(lambda each: each.rpc.calls)(s) if _has_called(s) else [],
        ("outcome",),
    ),
    Family(
        "potluck_rpc_errors_total",
        "counter",
        "Errors with which they ended, by their class.",
        tally(lambda snapshot: snapshot.rpc.calls.errors),
        ("error",),
    ),
    Family(
        "potluck_rpc_in_flight",
        "gauge",
        "Remote calls that this process has made and that have not ended.",
        one(lambda s: s.rpc.in_flight if _has_called(s) else None),
    ),
    Family(
        "potluck_rpc_duration_seconds",
        "histogram",
        "Seconds from a remote call to its answer.",
        one(lambda s: s.rpc.calls if _has_called(s) else None),
    ),
    Family(
        "potluck_rpc_served_total",
        "counter",
        "Remote calls that this process has answered, by how its function ended.",
        lambda s: outcomes(lambda each: each.rpc.served)(s) if s.rpc.served.buckets else [],
        ("outcome",),
    ),
    Family(
        "potluck_rpc_served_duration_seconds",
        "histogram",
        "Seconds that its functions took.",
        one(lambda s: s.rpc.served if s.rpc.served.buckets else None),
    ),
)


def _trains(
    read: Callable[[MetricsSnapshot], float],
) -> Callable[[MetricsSnapshot], float | None]:
    return lambda s: read(s) if s.training.duration.buckets else None


def _state(read: Callable[[MetricsSnapshot], float]) -> Callable[[MetricsSnapshot], float | None]:
    return lambda s: read(s) if s.state.syncs or s.state.saved or s.state.failed else None


TRAINING = (
    Family(
        "potluck_training_step",
        "gauge",
        "Steps of training that are committed, as all members count them.",
        one(_trains(lambda snapshot: snapshot.training.step)),
    ),
    Family(
        "potluck_training_steps_committed_total",
        "counter",
        "Steps in which this member's gradients counted.",
        one(_trains(lambda snapshot: snapshot.training.committed)),
    ),
    Family(
        "potluck_training_steps_repeated_total",
        "counter",
        "Averagings that were begun again because somebody came or went.",
        one(_trains(lambda snapshot: snapshot.training.repeated)),
    ),
    Family(
        "potluck_training_steps_discarded_total",
        "counter",
        "Steps for which this member's gradients were for a state that was gone.",
        one(_trains(lambda snapshot: snapshot.training.discarded)),
    ),
    Family(
        "potluck_training_steps_withdrawn_total",
        "counter",
        "Committed steps that were discarded when this member's cluster met another one.",
        one(_trains(lambda snapshot: snapshot.training.withdrawn)),
    ),
    Family(
        "potluck_training_samples_total",
        "counter",
        "Samples, or weights, of all members in these steps.",
        one(_trains(lambda snapshot: snapshot.training.samples)),
    ),
    Family(
        "potluck_training_samples_per_second",
        "gauge",
        "Samples of all members per second, over the last 64 steps.",
        one(_trains(lambda snapshot: snapshot.training.samples_per_second)),
    ),
    Family(
        "potluck_training_loss",
        "gauge",
        "Loss that this member has said last.",
        one(lambda snapshot: snapshot.training.loss),
    ),
    Family(
        "potluck_training_step_duration_seconds",
        "histogram",
        "Seconds from handing over the gradients of a step to its being applied.",
        one(lambda s: s.training.duration if s.training.duration.buckets else None),
    ),
    Family(
        "potluck_state_syncs_total",
        "counter",
        "Comparisons and exchanges of the state with other members.",
        one(_state(lambda snapshot: snapshot.state.syncs)),
    ),
    Family(
        "potluck_state_received_bytes_total",
        "counter",
        "Bytes of the state that this member received in them.",
        one(_state(lambda snapshot: snapshot.state.received_bytes)),
    ),
    Family(
        "potluck_state_sync_seconds_total",
        "counter",
        "Seconds that they took.",
        one(_state(lambda snapshot: snapshot.state.sync_seconds)),
    ),
    Family(
        "potluck_checkpoints_total",
        "counter",
        "Checkpoints of this member's part, by how saving them ended.",
        lambda s: (
            [(("completed",), s.state.saved), (("failed",), s.state.failed)]
            if s.state.saved or s.state.failed
            else []
        ),
        ("outcome",),
    ),
    Family(
        "potluck_checkpoint_bytes_total",
        "counter",
        "Bytes of them.",
        one(lambda s: s.state.saved_bytes if s.state.saved else None),
    ),
    Family(
        "potluck_checkpoint_seconds_total",
        "counter",
        "Seconds that saving them took, beside training.",
        one(lambda s: s.state.save_seconds if s.state.saved else None),
    ),
)


# --------------------------------------------------------------------------------------------------

PROCESS = (
    Family(
        "potluck_uptime_seconds",
        "gauge",
        "Seconds since this process began to count.",
        one(lambda snapshot: snapshot.uptime),
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
"""By what they are about."""

CATALOGUE = tuple(family for section in SECTIONS.values() for family in section)
"""Everything that there is, in the order in which it is shown."""


# --------------------------------------------------------------------------------------------------
# Figures: a snapshot as a flat table of numbers, small enough to be told to observers.

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

    >>> from potluck.metrics.registry import DistributedMetrics
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
