"""The catalogue, first part: what is counted about the work, collectives, calls and training."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from potluck.metrics.families import Family, Sample, each_operation, one, outcomes, tally, used
from potluck.metrics.snapshot import MetricsSnapshot

__all__ = ["COLLECTIVES", "RPC", "TRAINING"]


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
