"""What training counts: steps that counted, were repeated or in vain, states and checkpoints."""

from pathlib import Path

import numpy as np
import pytest

from potluck import Checkpointer, DistributedContext, ElasticTrainer, SimulatedBackend
from potluck.metrics import DistributedMetrics, MetricsSnapshot
from potluck.runtime.work import Work
from potluck.training.counting import count_save, count_step
from potluck.training.elastic import StepOutcome
from potluck.training.state import TrainingState
from support.contexts import in_group


def outcome(step: int, *, counted: bool = True, tries: int = 1) -> StepOutcome:
    """How a step of 32 samples went."""
    return StepOutcome(step, counted=counted, world_size=2, weight=32.0, tries=tries)


def test_steps_are_counted_by_how_they_went() -> None:
    """Committed, repeated, or for a state that is gone."""
    metrics = DistributedMetrics()
    for made in (outcome(1), outcome(2, tries=3), outcome(9, counted=False)):
        assert count_step(metrics, [made].pop) is made
    with pytest.raises(ZeroDivisionError):
        count_step(metrics, lambda: outcome(1 // 0))
    training = metrics.snapshot().training
    assert (training.committed, training.repeated, training.discarded) == (2, 2, 1)
    assert training.withdrawn == 0
    metrics.training.withdraw(37)
    assert metrics.snapshot().training.withdrawn == 37
    assert (training.step, training.samples) == (9, 64.0)
    assert (training.duration.completed, training.duration.failed) == (3, 1)
    assert training.samples_per_second > 0


def test_without_metrics_nothing_is_counted() -> None:
    """And everything goes on as before."""
    work: Work[int] = Work()
    assert count_step(None, lambda: outcome(1)).step == 1
    assert count_save(None, work, 5) is work


def test_a_checkpoint_counts_when_it_is_saved() -> None:
    """Or when it could not be."""
    metrics = DistributedMetrics()
    good: Work[int] = Work()
    bad: Work[int] = Work()
    count_save(metrics, good, 100)
    count_save(metrics, bad, 7)
    assert metrics.snapshot().state.saved == 0
    good.succeed(1)
    bad.fail(OSError("no space"))
    state = metrics.snapshot().state
    assert (state.saved, state.failed, state.saved_bytes) == (1, 1, 107)


def test_a_trainer_counts_where_its_group_does(tmp_path: Path) -> None:
    """Steps, exchanges of the state, the loss and checkpoints."""

    def act(context: DistributedContext) -> MetricsSnapshot | None:
        weights = np.zeros(4)

        def descend(gradient: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
            weights[:] -= gradient

        trainer = ElasticTrainer(context, TrainingState(model=weights), descend, verify_every=1)
        with Checkpointer(tmp_path, rank=context.rank, world_size=2) as keeper:
            for _ in range(3):
                trainer.step(np.ones(4))
                trainer.note_loss(0.5)
            trainer.save(keeper).wait(30)
        return context.metrics_snapshot()

    saved = 0
    for found in in_group(2, act):
        assert found is not None
        assert (found.training.committed, found.training.step) == (3, 3)
        assert found.training.loss == 0.5
        assert found.state.syncs >= 2
        assert (found.state.saved, found.state.failed) == (1, 0)
        saved += found.state.saved_bytes
    assert saved == 4 * 8


def test_a_trainer_without_metrics_trains() -> None:
    """What nobody counts is not in the way."""
    weights = np.zeros(2)
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
        trainer = ElasticTrainer(context, TrainingState(model=weights), lambda _: None)
        trainer.note_loss(1.0)
        assert trainer.step(np.ones(2)).step == 1
