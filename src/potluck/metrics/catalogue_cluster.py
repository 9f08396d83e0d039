"""The catalogue, second part: what is counted about the peers and the membership of a cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from potluck.metrics.families import Family, Read, Sample, in_cluster, one, tally
from potluck.metrics.snapshot import MetricsSnapshot

__all__ = ["MEMBERSHIP", "PEERS", "STATUS_NUMBERS"]

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
