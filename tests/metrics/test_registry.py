"""The registry: everything in one place, and snapshots that stay as they are."""

import msgspec

from potluck.collective.task import Collective
from potluck.metrics import DistributedMetrics, MetricsSnapshot, SharedMetrics
from potluck.metrics.snapshot import OPERATIONS


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
