"""Peers: few labels, whoever comes and goes; nothing that was counted is lost."""

import msgspec
import numpy as np
import pytest

from potluck.collective.call import Call
from potluck.collective.collectives import count, count_failure
from potluck.errors import PeerLost
from potluck.metrics import registry
from potluck.metrics.instruments import LONG, OTHER, hold
from potluck.metrics.registry import (
    MAX_LABEL,
    MAX_PEERS,
    MAX_WATCHES,
    OPERATIONS,
    DistributedMetrics,
    MetricsSnapshot,
    PeerCounters,
    PeerSnapshot,
    RpcMetrics,
    SharedMetrics,
    TrainingMetrics,
    ViewMetrics,
)
from potluck.schedule.task import Collective, Task


def waiting(book: PeerCounters) -> dict[str, float]:
    """By label."""
    return {each.peer: each.waiting for each in book.snapshot()}


def test_a_peer_keeps_its_label() -> None:
    """Two processes of one machine are told apart, and stay who they are."""
    book = PeerCounters()
    first = [book.label(key, "attic") for key in ("a", "b")]
    assert first == ["attic", "attic (2)"]
    assert [book.label(key, "attic") for key in ("b", "a")] == first[::-1]


def test_whoever_restarts_gets_the_label_again() -> None:
    """A machine that restarts a thousand times is one line in a graph, not a thousand."""
    book = PeerCounters()
    for start in range(1000):
        assert book.label(("node", start), "attic") == "attic"
        book.keep([])
    assert book.snapshot() == []


def test_labels_are_bounded_in_number_and_size() -> None:
    """Whatever a thousand peers call themselves."""
    book = PeerCounters()
    labels = {book.label(number, f"{number}-{'x' * 500}\n\x1b[2J") for number in range(1000)}
    assert len(labels) == MAX_PEERS + 1
    assert OTHER in labels
    assert all(len(label) <= MAX_LABEL and label.isprintable() for label in labels)


def test_nobody_can_call_itself_other() -> None:
    """Nor nothing at all."""
    book = PeerCounters()
    assert book.label(1, "other") == "other (2)"
    assert book.label(2, "") == "?"


def test_waiting_is_counted_by_peer_over_all_groups() -> None:
    """A subgroup waits for the same machine as the whole, whatever rank that has there."""
    book = PeerCounters()
    whole, part = {1: 2.0, 2: 1.0}, {0: 0.5}
    book.watch({1: "attic", 2: "cellar"}, whole)
    book.watch({0: "cellar"}, part)
    assert waiting(book) == {"attic": 2.0, "cellar": 1.5}
    part[0] += 1.0
    assert waiting(book)["cellar"] == 2.5
    book.release(part)
    part[0] += 100.0
    assert waiting(book)["cellar"] == 2.5


def test_what_was_counted_for_those_who_are_gone_is_of_others() -> None:
    """The sum never falls, also while the group they were in is still there."""
    book = PeerCounters()
    labels = {1: book.label("a", "attic"), 2: book.label("c", "cellar")}
    book.watch(labels, {1: 2.0, 2: 1.0})
    settled = {1: 4.0}
    book.watch(labels, settled)
    book.release(settled)
    book.keep(["c"])
    assert waiting(book) == {"cellar": 1.0, OTHER: 6.0}
    assert book.label("new", "attic") == "attic"
    assert "attic" not in waiting(book)


def test_so_many_groups_at_once() -> None:
    """More of them cost no more memory, and what they had counted stays."""
    book = PeerCounters()
    for _ in range(MAX_WATCHES + 10):
        book.watch({1: "attic"}, {1: 1.0})
    assert waiting(book) == {"attic": pytest.approx(MAX_WATCHES + 10)}


def test_peers_come_by_rank_and_the_others_last() -> None:
    """With what is known of each."""
    book = PeerCounters()
    book.watch({0: "attic", 2: "cellar", 3: OTHER}, {0: 1.0, 3: 9.0})
    book.see(
        [
            PeerSnapshot(peer="cellar", rank=2, status="healthy", round_trip=0.001, jitter=0.0),
            PeerSnapshot(peer="visitor", status="dead", loss=0.5),
            PeerSnapshot(peer=OTHER, rank=7, status="suspect"),
        ]
    )
    lines = book.snapshot()
    assert [(each.peer, each.rank, each.status) for each in lines] == [
        ("attic", 0, ""),
        ("cellar", 2, "healthy"),
        ("visitor", -1, "dead"),
        (OTHER, -1, ""),
    ]
    assert lines[1].round_trip == 0.001
    book.see([])
    assert [each.status for each in book.snapshot()] == ["", ""]


# --------------------------------------------------------------------------------------------------
# The registry: everything in one place, and snapshots that stay as they are.

VALUES = np.zeros(8, np.float32)
SUM = Call(Task.whole(Collective.ALL_REDUCE, 2, 8), VALUES, VALUES)
GATHER = Call(Task.blocks(Collective.ALL_GATHER, (3, 5)), VALUES, VALUES)


def test_a_snapshot_does_not_change() -> None:
    """It shows the numbers of its moment."""
    metrics = DistributedMetrics()
    metrics.all_reduce.completed.inc()
    metrics.all_reduce.duration_ms.observe(4)
    before = metrics.snapshot()
    metrics.all_reduce.completed.inc()
    assert before.all_reduce.completed == 1
    assert before.all_reduce.p50_ms == before.all_reduce.mean_ms == 4
    assert before.uptime >= 0


def test_every_collective_has_its_numbers() -> None:
    """Whatever can be asked of a group is counted, under its own name."""
    assert set(OPERATIONS) == {each.value for each in Collective}
    assert set(DistributedMetrics().snapshot().operations) == set(OPERATIONS)


def test_a_snapshot_can_be_written_and_read() -> None:
    """As JSON, all sections included."""
    metrics = DistributedMetrics()
    metrics.barrier.note(0.25, 0)
    metrics.peers.watch({1: "attic"}, {1: 2.0})
    metrics.compression.note(400, 100)
    metrics.training.commit(7, 64.0, tries=2)
    metrics.training.loss.set(0.5)
    snapshot = metrics.snapshot()
    again = msgspec.json.decode(msgspec.json.encode(snapshot), type=MetricsSnapshot)
    assert again == snapshot
    assert again.compression.ratio == 4.0
    assert (again.training.step, again.training.repeated, again.training.loss) == (7, 1, 0.5)


def test_shared_metrics_are_the_metrics() -> None:
    """Python shares objects as they are; the name of the origin is kept."""
    assert SharedMetrics is DistributedMetrics


def test_what_is_in_the_journal_is_in_every_number() -> None:
    """Each kind gets its own, whichever number is read."""
    metrics = DistributedMetrics()
    for call in (SUM, GATHER, SUM, SUM):
        count(metrics, call, began=0.0)
    assert len(metrics.journal) == 4
    assert metrics.all_gather.completed.value == 1
    assert not metrics.journal
    assert metrics.all_reduce.bytes_processed.value == 3 * 32
    assert metrics.all_reduce.duration_ms.percentile(50) > 0


def test_bytes_are_of_what_this_rank_gives_or_gets() -> None:
    """Whichever is more, and of another type as many as it has."""
    metrics = DistributedMetrics()
    scatter = Task.blocks(Collective.SCATTER, (10, 20, 30), root=1)
    for given, got, kind in ((0, 10, "f8"), (60, 20, "f8"), (0, 30, "f8"), (0, 10, "f2")):
        call = Call(scatter, np.zeros(given, kind), np.zeros(got, kind))
        count(metrics, call, began=0.0)
    exchange = Task.exchange([[0, 5, 0], [1, 0, 0], [0, 2, 0]])
    count(metrics, Call(exchange, np.zeros(1), np.zeros(7)), began=0.0)
    assert metrics.scatter.bytes_processed.value == 8 * (10 + 60 + 30) + 2 * 10
    assert metrics.all_to_all.bytes_processed.value == 8 * 7
    assert not metrics.journal


def test_a_signal_may_end_works_while_its_thread_counts() -> None:
    """Those are counted too, by the handler: it takes the lock that the thread has."""
    metrics = DistributedMetrics()
    with hold():
        count_failure(metrics, SUM, 0.0, PeerLost("gone", rank=1))
    assert metrics.snapshot().all_reduce.failed == 1


def test_the_journal_stays_short_though_nobody_reads() -> None:
    """A program that never looks at its metrics must not pay for them in memory."""
    metrics = DistributedMetrics()
    for _ in range(3 * LONG):
        count(metrics, SUM, began=0.0)
        assert len(metrics.journal) <= LONG
    assert metrics.snapshot().all_reduce.completed == 3 * LONG


@pytest.mark.parametrize("before", [0, 3], ids=["at once", "after some that went well"])
def test_the_first_success_after_an_interruption_is_another_try(before: int) -> None:
    """What went well before it was not, though nobody had counted that yet."""
    metrics = DistributedMetrics()
    for _ in range(before):
        count(metrics, SUM, began=0.0)
    count_failure(metrics, SUM, 0.0, PeerLost("gone", rank=1))
    count(metrics, GATHER, began=0.0)
    assert metrics.all_reduce.retried.value == 0
    count(metrics, SUM, began=0.0)
    count(metrics, SUM, began=0.0)
    sums = metrics.snapshot().all_reduce
    assert (sums.completed, sums.failed, sums.retried) == (before + 2, 1, 1)
    assert metrics.snapshot().all_gather.retried == 0


# --------------------------------------------------------------------------------------------------
# Sections: what needs more than a counter.


class Clock:
    """Stands until it is pushed."""

    def __init__(self) -> None:
        self.now = 50.0

    def monotonic(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """In place of the machine's."""
    made = Clock()
    monkeypatch.setattr(registry, "time", made)
    return made


def test_pauses_add_up_and_the_present_one_counts(clock: Clock) -> None:
    """Whoever is told twice that it pauses has paused once."""
    views = ViewMetrics()
    views.pause(paused=False)
    views.pause(paused=True)
    clock.now += 2
    views.pause(paused=True)
    assert (views.snapshot().pauses, views.snapshot().paused_seconds) == (1, 2)
    views.pause(paused=False)
    clock.now += 100
    views.pause(paused=True)
    clock.now += 3
    assert (views.snapshot().pauses, views.snapshot().paused_seconds) == (2, 5)


def test_the_pace_of_training_is_that_of_the_last_steps(clock: Clock) -> None:
    """One step says nothing yet."""
    training = TrainingMetrics()
    training.commit(1, 10.0, tries=1)
    assert training.snapshot().samples_per_second == 0
    for step in range(2, 200):
        clock.now += 10 if step < 100 else 0.5
        training.commit(step, 10.0, tries=1)
    assert training.snapshot().samples_per_second == pytest.approx(20)
    assert training.snapshot().seconds_per_step == pytest.approx(0.5)
    assert training.snapshot().samples == 1990


def test_calls_under_way_are_those_of_the_agents_that_are_there() -> None:
    """One that is gone has none."""

    class Agent:
        in_flight = 3

    rpc, agent = RpcMetrics(), Agent()
    for _ in range(2):
        rpc.follow(agent, lambda each: each.in_flight)
    assert rpc.snapshot().in_flight == 3
    del agent
    assert rpc.snapshot().in_flight == 0
