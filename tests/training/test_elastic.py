"""Elastic steps on groups and on real clusters, with losses placed exactly."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from potluck import (
    Aborted,
    BackendUnavailable,
    CollectiveMismatch,
    DistributedContext,
    GradientCompressor,
    PeerLost,
    SimulatedBackend,
)
from potluck.net.names import machine_name
from potluck.training import elastic
from potluck.training.checkpoint import Checkpointer, latest
from potluck.training.elastic import ElasticTrainer
from potluck.training.state import TrainingState
from support.clusters import everywhere
from support.elastic import SAMPLES, Regression
from support.threads import together


@pytest.fixture
def group() -> Iterator[list[DistributedContext]]:
    """Three ranks that stay."""
    contexts = [DistributedContext(each) for each in SimulatedBackend.create_group(3)]
    yield contexts
    for context in contexts:
        context.close()


def train(runs: list[Regression], steps: int) -> None:
    """Every member makes steps until so many are committed."""

    def work(run: Regression) -> None:
        while run.trainer.step_count < steps:
            run.step()

    everywhere(runs, work)


def run_to(run: Regression, steps: int) -> list[bool]:
    """One member makes steps until so many are committed."""
    outcomes = []
    while run.trainer.step_count < steps:
        outcomes.append(run.step().counted)
    return outcomes


# --- a group that stays ---


def test_members_begin_alike_and_stay_alike(group: list[DistributedContext]) -> None:
    """Each begins from weights of its own: the first one's count, and all go on bit-identical."""
    runs = [Regression(context, seed=context.rank) for context in group]
    first = runs[0].weights.copy()
    everywhere(runs, lambda run: run.trainer.start())
    assert all(np.array_equal(run.weights, first) for run in runs)
    assert runs[1].trainer.last_sync is not None
    assert runs[1].trainer.last_sync.receivers == (1, 2)
    train(runs, 16)
    assert len({run.fingerprint for run in runs}) == 1
    counted = Counter(pair for run in runs for pair in run.counted)
    assert counted == {(epoch, sample): 1 for epoch in range(2) for sample in range(SAMPLES)}


def test_unequal_batches_weigh_what_they_are(group: list[DistributedContext]) -> None:
    """The mean is that of one big batch; a weight of zero counts nothing, whatever it holds."""
    seen: list[Any] = []
    state = [TrainingState(model=np.zeros(1)) for _ in group]
    trainers = [
        ElasticTrainer(each, part, seen.append) for each, part in zip(group, state, strict=True)
    ]
    parts = [(np.array([1.0, 2.0]), 3), (np.array([5.0, 6.0]), 1), (np.array([np.nan, np.inf]), 0)]
    outcomes = together(
        *(
            lambda one=one, part=part: one.step({"g": part[0]}, part[1])
            for one, part in zip(trainers, parts, strict=True)
        )
    )
    assert [mean["g"].tolist() for mean in seen] == [[2.0, 3.0]] * 3
    assert {(each.step, each.weight, each.tries) for each in outcomes} == {(1, 4.0, 1)}


def test_the_undisturbed_run_is_that_of_one_machine(group: list[DistributedContext]) -> None:
    """Three members reach what one reaches that takes the same batches alone."""
    runs = [Regression(context) for context in group]
    train(runs, 24)
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        single = Regression(alone)
        train([single], 24)
    assert np.allclose(runs[0].weights, single.weights, atol=1e-9)
    assert runs[0].loss < 0.1


def test_tensors_and_narrow_types_are_averaged(group: list[DistributedContext]) -> None:
    """Gradients of PyTorch in bfloat16 and float32 come back as what they were."""
    means: list[Any] = []
    trainers = [
        ElasticTrainer(each, TrainingState(model=np.zeros(1)), means.append) for each in group
    ]

    def step(trainer: ElasticTrainer) -> None:
        narrow = torch.full((3,), float(trainer._group.rank), dtype=torch.bfloat16)
        trainer.step([narrow, (torch.ones(2, 2), np.float64(3.0))])

    everywhere(trainers, step)
    for mean in means:
        assert mean[0].dtype == torch.bfloat16
        assert mean[0].tolist() == [1.0] * 3
        assert torch.equal(mean[1][0], torch.ones(2, 2))
        assert mean[1][1] == 3.0


def test_compressed_steps_remember_what_they_left_behind(group: list[DistributedContext]) -> None:
    """Only a committed step changes the memory, and all members stay alike."""
    targets = np.linspace(-1, 1, 300).astype(np.float32)
    weights = [np.zeros(300, np.float32) for _ in group]
    compressors = [GradientCompressor("topk:0.1") for _ in group]

    def work(rank: int) -> None:
        mine = weights[rank]

        def apply(mean: Any) -> None:
            mine[:] -= 0.05 * mean

        trainer = ElasticTrainer(
            group[rank], TrainingState(model=mine), apply, compressor=compressors[rank]
        )
        for _ in range(150):
            trainer.step(mine - targets)

    together(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert {each.step for each in compressors} == {150}
    assert len({each.tobytes() for each in weights}) == 1
    assert np.abs(weights[0] - targets).max() < 0.3


def test_a_replica_that_comes_apart_is_named_and_put_right(
    group: list[DistributedContext], caplog: pytest.LogCaptureFixture
) -> None:
    """The majority's state counts; only the chunk that differs is sent."""
    runs = [Regression(context, verify_every=4) for context in group]
    train(runs, 3)
    runs[0].weights[2] += 1e-9
    train(runs, 8)
    assert len({run.fingerprint for run in runs}) == 1
    assert f"{machine_name()} (rank 0) has another state than the others" in caplog.text
    runs[2].speed[0] += 1
    reports = everywhere(runs, lambda run: run.trainer.verify())
    assert {report.receivers for report in reports} == {(2,)}
    assert len({run.fingerprint for run in runs}) == 1


def test_ranks_that_disagree_are_told_on_all_sides(group: list[DistributedContext]) -> None:
    """Other shapes, other steps or no samples at all: the same error everywhere."""
    trainers = [
        ElasticTrainer(each, TrainingState(model=np.zeros(1)), lambda _: None) for each in group
    ]

    def shapes(trainer: ElasticTrainer) -> None:
        with pytest.raises(CollectiveMismatch, match="Rank 2 brings other gradients than rank 0"):
            trainer.step(np.zeros(2 + (trainer._group.rank == 2)))

    def nothing(trainer: ElasticTrainer) -> None:
        with pytest.raises(CollectiveMismatch, match="No rank brings anything"):
            trainer.step(np.zeros(2), 0)

    def negative(trainer: ElasticTrainer) -> None:
        with pytest.raises(ValueError, match=r"A weight must be a number from 0 to .*, got -1"):
            trainer.step(np.zeros(2), -1)

    for attempt in (shapes, nothing, negative):
        everywhere(trainers, attempt)
    everywhere(trainers, lambda trainer: trainer.step(np.zeros(2)))
    assert {trainer.step_count for trainer in trainers} == {1}


def test_what_makes_no_sense_is_refused(group: list[DistributedContext]) -> None:
    """A sampler without a batch, samples without a sampler, gradients without numbers."""
    state = TrainingState(model=np.zeros(1))
    with pytest.raises(ValueError, match="belong together"):
        ElasticTrainer(group[0], state, lambda _: None, batch=4)
    trainer = ElasticTrainer(group[0], state, lambda _: None)
    with pytest.raises(ValueError, match="no sampler"):
        trainer.take()
    with pytest.raises(ValueError, match="no arrays"):
        trainer.step({})
    with pytest.raises(TypeError, match="floating-point numbers, not int64"):
        trainer.step(np.zeros(2, np.int64))


def test_a_failure_to_apply_ends_this_member() -> None:
    """Its state is no longer what the others have, and it says so."""

    def fail(_: Any) -> None:
        raise ZeroDivisionError

    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        trainer = ElasticTrainer(alone, TrainingState(model=np.zeros(1)), fail)
        with pytest.raises(ZeroDivisionError):
            trainer.step(np.zeros(1))
        with pytest.raises(BackendUnavailable, match="applying a step failed: ZeroDivisionError"):
            trainer.step(np.zeros(1))


def test_training_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    """Model, optimiser, samples and the number of steps: as if it had never stopped."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        straight = Regression(alone)
        train([straight], 12)
        first = Regression(alone)
        train([first], 5)
        with Checkpointer(tmp_path) as saver:
            first.trainer.save(saver)
        found = latest(tmp_path)
        assert found is not None
        second = Regression(alone, seed=9)
        second.trainer.resume(found)
        assert second.trainer.step_count == 5
        train([second], 12)
        assert second.fingerprint == straight.fingerprint
        with pytest.raises(ValueError, match="before the trainer starts"):
            second.trainer.resume(found)


class Stopwatch(threading.local):
    """A clock of its own for every member."""

    now = 0.0

    def perf_counter(self) -> float:
        """Seconds that this member has computed."""
        return self.now


def test_shares_follow_speed_and_the_slow_one_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Speeds 1, 1, 1 and a quarter: all finish together, at 90 % of their summed throughput."""
    clock = Stopwatch()
    monkeypatch.setattr(elastic, "time", clock)
    costs = [0.5, 0.5, 0.5, 2.0]  # seconds per sample, emulated
    contexts = [DistributedContext(each) for each in SimulatedBackend.create_group(4)]
    runs = [Regression(context, batch=32) for context in contexts]
    sizes: list[list[int]] = [[], [], [], []]

    def work(rank: int) -> None:
        run = runs[rank]
        while run.trainer.step_count < 12:
            indices = run.trainer.take()
            sizes[rank].append(len(indices))
            clock.now += costs[rank] * len(indices)
            run.trainer.step(run.gradient(indices))

    together(*(lambda rank=rank: work(rank) for rank in range(4)))
    for context in contexts:
        context.close()
    assert [each[0] for each in sizes] == [8, 8, 8, 8]  # nobody knows yet
    assert {sum(step) for step in zip(*sizes, strict=True)} == {32}
    slowest = max(each[-1] * cost for each, cost in zip(sizes, costs, strict=True))
    assert 32 / slowest >= 0.9 * sum(1 / cost for cost in costs), sizes
    straggler = runs[0].trainer.straggler
    assert straggler is not None
    assert straggler.rank == 3
    assert f"{machine_name()} (rank 3) is 4.0 times slower than the others" in caplog.text
    assert len({run.fingerprint for run in runs}) == 1


def test_gradients_for_a_state_that_is_gone_do_not_count(tmp_path: Path) -> None:
    """One has a checkpoint, the other has begun to compute: it gets the state, and begins again."""
    contexts = [DistributedContext(each) for each in SimulatedBackend.create_group(2)]
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        first = Regression(alone)
        train([first], 5)
        with Checkpointer(tmp_path) as saver:
            first.trainer.save(saver)
    runs = [Regression(context, seed=context.rank) for context in contexts]
    found = latest(tmp_path)
    assert found is not None
    runs[1].trainer.resume(found)

    runs[0].trainer._taken = ((0, 2),)  # as if it had not waited for the others
    results = together(lambda: run_to(runs[0], 8), lambda: run_to(runs[1], 8))
    for context in contexts:
        context.close()
    assert results[0][0] is False
    assert len({run.fingerprint for run in runs}) == 1


def test_a_step_that_was_interrupted_with_its_result_is_finished_first(
    group: list[DistributedContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is interrupted at the barrier and calls again: what all hold counts, not what is new."""
    seen: list[Any] = []
    trainers = [
        ElasticTrainer(each, TrainingState(model=np.zeros(1)), seen.append) for each in group
    ]
    barrier, calls = group[1].barrier, iter([KeyboardInterrupt])

    def interrupted(timeout: float | None = None) -> None:
        for error in calls:
            raise error
        barrier(timeout)

    monkeypatch.setattr(group[1], "barrier", interrupted)

    def work(trainer: ElasticTrainer) -> None:
        try:
            trainer.step(np.ones(2))
        except KeyboardInterrupt:
            trainer.step(np.full(2, 7.0))

    everywhere(trainers, work)
    assert [each.tolist() for each in seen] == [[1.0, 1.0]] * 3


def test_a_group_that_stays_cannot_go_on_without_a_member() -> None:
    """There the loss is raised, as everywhere else."""
    contexts = [DistributedContext(each) for each in SimulatedBackend.create_group(2)]
    trainers = [
        ElasticTrainer(each, TrainingState(model=np.zeros(1)), lambda _: None) for each in contexts
    ]
    everywhere(trainers, lambda trainer: trainer.step(np.zeros(1)))
    contexts[1].close()
    with pytest.raises((PeerLost, Aborted), match=r"left|closed|gone"):
        trainers[0].step(np.zeros(1))
    contexts[0].close()
