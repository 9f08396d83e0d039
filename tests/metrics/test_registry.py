"""The registry: everything in one place, and snapshots that stay as they are."""

import msgspec
import numpy as np
import pytest

from potluck.collective.task import Collective, Task
from potluck.errors import PeerLost
from potluck.metrics import DistributedMetrics, MetricsSnapshot, SharedMetrics
from potluck.metrics.cells import hold
from potluck.metrics.operations import LONG
from potluck.metrics.snapshot import OPERATIONS
from potluck.runtime.call import Call
from potluck.runtime.counting import count, count_failure

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
