"""Elastic steps on groups and on real clusters, with losses placed exactly."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import potluck
from potluck import (
    Aborted,
    BackendUnavailable,
    Cluster,
    CollectiveMismatch,
    DistributedContext,
    DistributedError,
    GradientCompressor,
    MalformedFrame,
    NoQuorum,
    PeerLost,
    SimulatedBackend,
)
from potluck._types import Branch, NodeId, ProcessId, View
from potluck.identity.node import machine_name
from potluck.membership.messages import MAX_BRANCHES
from potluck.training import elastic
from potluck.training.averaging import Gradients, StepContribution, check_records
from potluck.training.balance import MemberCondition
from potluck.training.checkpoint import Checkpointer, latest
from potluck.training.elastic import (
    ElasticTrainer,
    MemberReport,
    StepAttempt,
    SyncResult,
    ViewScope,
    settle,
)
from potluck.training.sampler import ElasticSampler
from potluck.training.state import TrainingState
from potluck.training.steps import FRESH, Milestone, Position, StepReport, SyncAction, SyncDecision
from support.clusters import clusters, everywhere, insist, join, new_job
from support.elastic import SAMPLES, Regression
from support.threads import PATIENCE, Background, eventually, together


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
        with pytest.raises(CollectiveMismatch, match="No rank has samples"):
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
    with pytest.raises(ValueError, match="both sampler= and batch="):
        ElasticTrainer(group[0], state, lambda _: None, batch=4)
    trainer = ElasticTrainer(group[0], state, lambda _: None)
    with pytest.raises(ValueError, match="no sampler"):
        trainer.take()
    with pytest.raises(ValueError, match="no arrays"):
        trainer.step({})
    with pytest.raises(TypeError, match="floating-point numbers, got int64"):
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
    monotonic = staticmethod(time.monotonic)

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


def test_an_early_start_leaves_alone_what_was_interrupted(
    group: list[DistributedContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next backward pass begins after a step that the others may count already."""
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
            late = Gradients(np.full(2, 7.0), trainer.room)
            trainer.begin_early(late.buckets, 1.0)
            trainer.go_on_early(late.buckets, 0)
            trainer.step(np.full(2, 7.0))

    everywhere(trainers, work)
    assert [each.tolist() for each in seen] == [[1.0, 1.0]] * 3


def test_a_group_that_stays_is_one_lineage(group: list[DistributedContext]) -> None:
    """It is written into checkpoints, and must be the same in every version."""

    def work(context: DistributedContext) -> Position:
        trainer = ElasticTrainer(context, TrainingState(model=np.zeros(1)), lambda _: None)
        trainer.step(np.ones(1))
        return trainer.position

    assert everywhere(group, work) == [Position("0" * 32, 1, 1)] * 3


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


# --------------------------------------------------------------------------------------------------
# Elastic steps on real clusters, with losses placed exactly.


class Trap:
    """Something that happens to a member at a certain point of its steps."""

    def __init__(self, run: Regression, place: str, step: int, spring: Callable[[], None]) -> None:
        self.sprung = threading.Event()
        member: Any = run.trainer
        target, name = {
            "averaging": (member._group, "all_reduce"),
            "acknowledging": (member._group, "barrier"),
            "applying": (member, "_apply"),
        }[place]
        original = getattr(target, name)

        def trapped(*arguments: Any, **options: Any) -> Any:
            if run.trainer.step_count == step and not self.sprung.is_set():
                self.sprung.set()
                spring()
            return original(*arguments, **options)

        setattr(target, name, trapped)


class Gone(Exception):
    """This member's program ends here."""


@pytest.mark.parametrize("place", ["averaging", "acknowledging", "applying"])
def test_a_member_leaves_in_the_middle_of_a_step(place: str) -> None:
    """Before its part of the averaging, before the barrier, or between commit and apply.

    The survivors go on together, bit-identical, and every sample of the epoch counts once.
    """
    with clusters(3) as nodes:
        runs = [Regression(node) for node in nodes]
        lost = runs[1]

        def leave() -> None:
            nodes[1].close()
            raise Gone

        Trap(lost, place, 3, leave)

        def work(run: Regression) -> None:
            try:
                while run.trainer.step_count < 16:
                    run.step()
            except Gone:
                pass

        everywhere(runs, work)
        survivors = [runs[0], runs[2]]
        assert len({run.fingerprint for run in survivors}) == 1
        assert {run.trainer.step_count for run in survivors} == {16}
        survivors[0].sampler.check()
        assert survivors[0].sampler.log == survivors[1].sampler.log
        assert survivors[0].sampler.epoch >= 1
        mine = Counter(pair for run in runs for pair in run.counted)
        assert max(mine.values()) == 1
        assert set(mine) <= set(survivors[0].sampler.log)


def test_what_somebody_ends_on_purpose_is_not_tried_again() -> None:
    """An abort in a view that goes on is raised; the step can be made again."""
    with clusters(2) as nodes:
        runs = [Regression(node) for node in nodes]
        train(runs, 2)
        waiting = Background(runs[0].step)
        eventually(lambda: runs[0].trainer._pending is not None)
        eventually(lambda: ended(nodes[0], waiting))
        with pytest.raises(Aborted, match="enough for today"):
            waiting.result()


def test_a_member_that_fails_in_a_step_does_not_end_the_others() -> None:
    """It raises there; the others try again, with it or without it."""
    with clusters(3) as nodes:
        runs = [Regression(node) for node in nodes]
        train(runs, 2)
        fails: Any = nodes[2].group._monitor
        begin, broken = fails.begin, threading.Event()

        def raising(*arguments: Any) -> None:
            begin(*arguments)
            fails.begin = begin
            broken.set()
            raise MemoryError

        fails.begin = raising
        waiting = [Background(run.step) for run in runs]
        with pytest.raises(MemoryError):
            waiting[2].result()
        assert broken.is_set()
        again = Background(runs[2].step)
        for each in (*waiting[:2], again):
            assert each.result().counted
        assert len({run.fingerprint for run in runs}) == 1


def ended(node: Cluster, waiting: Background[Any]) -> bool:
    """Abort until something was under way that could be."""
    node.abort("enough for today")
    return waiting.ended


def test_a_newcomer_gets_the_state_and_takes_its_share() -> None:
    """It begins from other weights, gets those of the others, and all go on alike."""
    job = new_job()
    with clusters(2, job) as nodes:
        runs = [Regression(node) for node in nodes]
        train(runs, 3)
        goal: list[int] = []  # known to all long before anybody is there

        def go_on(run: Regression) -> None:
            while not goal or run.trainer.step_count < goal[0]:
                run.step()

        def come() -> None:
            with join(2, job) as node:  # and leaves as soon as it is through
                newcomer = Regression(node, seed=8)
                newcomer.step()
                goal.append(newcomer.trainer.step_count + 9)
                runs.append(newcomer)
                go_on(newcomer)

        before = runs[:2]
        together(come, *(lambda run=run: go_on(run) for run in before))
        assert len({run.fingerprint for run in runs}) == 1
        assert runs[2].counted
        runs[0].sampler.check()
        assert set(runs[2].counted) <= set(runs[0].sampler.log)


def test_some_have_the_result_and_one_has_not() -> None:
    """One leaves then: nobody can have applied it, so it is averaged again, by all who are left."""
    with clusters(3) as nodes:
        runs = [Regression(node) for node in nodes]
        late: Any = runs[2].trainer
        complete, gone = StepAttempt.finish, threading.Event()
        outcomes: list[list[int]] = [[], [], []]

        def finish(self: StepAttempt, *arguments: Any) -> None:
            complete(self, *arguments)
            if self is late._begun and late.step_count == 3 and not gone.is_set():
                eventually(lambda: bool(holds(0) and holds(1)))
                gone.set()
                nodes[1].close()
                assert late._scope._session.over.wait(PATIENCE)
                raise Aborted("As if the last piece had never come")

        def holds(place: int) -> bool:
            return runs[place].trainer._report.holds

        def work(place: int) -> None:
            try:
                while runs[place].trainer.step_count < 8:
                    outcome = runs[place].step()
                    outcomes[place].append(outcome.tries)
            except DistributedError:
                assert place == 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(StepAttempt, "finish", finish)
            together(*(functools.partial(work, place) for place in range(3)))
        assert outcomes[0] == outcomes[2] == [1, 1, 1, 2, 1, 1, 1, 1]
        assert runs[0].fingerprint == runs[2].fingerprint
        runs[0].sampler.check()


def test_who_had_the_last_samples_of_an_epoch_leaves() -> None:
    """The others had none in hand: they take those samples anew, and each counts once."""
    with clusters(3) as nodes:
        runs = [Regression(node) for node in nodes]
        for run in runs:
            run.sampler.committed = ((0, SAMPLES - 1),)
        everywhere(runs, lambda run: run.trainer.start())
        taken = everywhere(runs, lambda run: run.trainer.take().tolist())
        ((holder, last),) = [(place, each) for place, each in enumerate(taken) if each]
        nodes[holder].close()
        rest = [run for place, run in enumerate(runs) if place != holder]
        train(rest, 2)
        assert rest[0].fingerprint == rest[1].fingerprint
        assert rest[0].sampler.log == rest[1].sampler.log
        assert [each for each in rest[0].sampler.log if each[0] == 0] == [(0, last[0])]


def test_two_have_taken_the_same_samples() -> None:
    """As after an absence: those of one count, and nobody ends for that."""
    with clusters(3) as nodes:
        runs = [Regression(node) for node in nodes]
        train(runs, 1)
        everywhere(runs, lambda run: run.trainer.take())
        first, second = runs[0].trainer, runs[1].trainer
        second._taken = first._taken
        nodes[2].close()
        counted: list[bool] = []

        def work(run: Regression) -> None:
            while run.trainer.step_count < 12:
                counted.append(run.step().counted)

        everywhere(runs[:2], work)
        assert counted.count(False) == 1
        assert runs[0].fingerprint == runs[1].fingerprint
        runs[0].sampler.check()
        assert runs[0].sampler.epoch == 1


# --------------------------------------------------------------------------------------------------
# Members of a training that make different calls: most of them decide who is at fault.

LIMIT = 10.0  # seconds; one that is cut off waits for so long


def outcome(cluster: Cluster, count: int, *, trains: bool) -> BaseException | None:
    """What a sum of so many values ends with, as a user calls it or as a trainer does."""
    try:
        if not trains:
            cluster.all_reduce(np.ones(count), timeout=PATIENCE)
            return None
        with ViewScope(cluster).enter_view(LIMIT):
            cluster.all_reduce(np.ones(count), timeout=LIMIT)
    except potluck.DistributedError as error:
        return error
    return None


def outcomes(nodes: list[Cluster], *counts: int, trains: bool) -> list[BaseException | None]:
    """The same of all nodes at once."""
    return together(
        *(partial(outcome, *each, trains=trains) for each in zip(nodes, counts, strict=True))
    )


def test_a_user_whose_ranks_disagree_gets_the_error_on_all_of_them() -> None:
    """No member is removed: a mistake in a program must be seen."""
    with clusters(3) as nodes:
        assert outcomes(nodes, 3, 3, 3, trains=True) == [None] * 3
        for error in outcomes(nodes, 3, 3, 4, trains=False):
            assert isinstance(error, CollectiveMismatch)
        assert outcomes(nodes, 3, 3, 3, trains=False) == [None] * 3


@pytest.mark.parametrize("odd", [0, 2])
def test_in_a_training_the_odd_one_is_removed(odd: int) -> None:
    """It gets the error itself, unless it is cut off sooner; the others are told who and why."""
    with clusters(3) as nodes:
        counts = [3, 3, 3]
        counts[odd] = 4
        found = outcomes(nodes, *counts, trains=True)
        assert isinstance(found[odd], CollectiveMismatch | NoQuorum)
        others = [node for rank, node in enumerate(nodes) if rank != odd]
        for error in found[:odd] + found[odd + 1 :]:
            assert isinstance(error, PeerLost)
            assert error.rank == odd
            assert f"Rank {odd} made another call than most members" in str(error)
            assert "4 elements) where all_reduce(sum, float64, 3 elements) was expected" in str(
                error
            )
        assert outcomes(others, 3, 3, trains=True) == [None] * 2


def test_of_two_members_both_get_the_error_that_names_both_sides() -> None:
    """Neither is in the majority, so neither is removed."""
    with clusters(2) as nodes:
        for error in outcomes(nodes, 3, 4, trains=True):
            assert isinstance(error, CollectiveMismatch)
            assert "3 elements" in str(error)
            assert "4 elements" in str(error)
        assert outcomes(nodes, 3, 3, trains=True) == [None] * 2


def test_averaging_may_begin_before_the_gradients_are_complete(
    group: list[DistributedContext],
) -> None:
    """Bucket by bucket, in order; what comes out of turn waits.  The mean is the same."""
    got: list[Any] = [None] * 3
    trees = [[np.full(4, float(rank), np.float32) for _ in range(3)] for rank in range(3)]

    def work(rank: int) -> list[int]:
        def apply(mean: Any) -> None:
            got[rank] = [each.tolist() for each in mean]

        trainer = ElasticTrainer(group[rank], TrainingState(model=np.zeros(1)), apply)
        trainer.begin_early(Gradients(trees[rank], trainer.room, limit=16).buckets, 2.0)
        assert trainer._begun is None  # before the members have met
        trainer.start()
        gradients = Gradients(trees[rank], trainer.room, limit=16)
        buckets = gradients.buckets
        assert len(buckets.all) == 3
        trainer.begin_early(buckets, 0.0)
        assert trainer._begun is None  # nothing to bring
        trainer.begin_early(buckets, 2.0)
        begun: list[int] = []
        for number in (1, 0, 0, 1):
            gradients.pack(number, 2.0)
            trainer.go_on_early(buckets, number)
            assert trainer._begun is not None
            begun.append(trainer._begun.begun)
        with pytest.raises(ValueError, match="started with weight 2, not 3"):
            trainer.step_in_buckets(trees[rank], 3.0, limit=16, buckets=buckets)
        outcome = trainer.step_in_buckets(trees[rank], 2.0, limit=16, buckets=buckets)
        assert (outcome.counted, outcome.weight, outcome.tries) == (True, 6.0, 1)
        return begun

    assert together(*(partial(work, rank) for rank in range(3))) == [[0, 1, 1, 2]] * 3
    assert got == [[[1.0] * 4] * 3] * 3


def test_a_member_that_begins_early_and_one_that_does_not_make_the_same_step(
    group: list[DistributedContext],
) -> None:
    """Also one that has nothing to bring begins only when it knows that others do."""
    got: list[Any] = [None] * 3

    def work(rank: int) -> list[tuple[bool, float, int]]:
        def apply(mean: Any) -> None:
            got[rank] = mean.tolist()

        sampler = ElasticSampler(12)
        trainer = ElasticTrainer(
            group[rank], TrainingState(model=np.zeros(1)), apply, sampler=sampler, batch=6
        )
        trainer.start()
        outcomes = []
        for weight in (0.0, 2.0, 2.0):
            if weight:
                assert len(trainer.take()) == 2
            gradients = Gradients(np.full(4, float(rank)), trainer.room)
            if rank == 0:
                trainer.begin_early(gradients.buckets, weight)
                gradients.pack(0, weight)
                trainer.go_on_early(gradients.buckets, 0)
            outcomes.append(trainer.step_in_buckets(gradients.tree, weight))
        return [(each.counted, each.weight, each.tries) for each in outcomes]

    expected = [(False, 0.0, 1), (True, 6.0, 1), (True, 6.0, 1)]
    assert together(*(partial(work, rank) for rank in range(3))) == [expected] * 3
    assert got == [[1.0] * 4] * 3


# --------------------------------------------------------------------------------------------------
# What members tell each other, before a step and when a view begins.


def test_a_newcomer_that_finds_nobody_with_the_state_says_so() -> None:
    """It does not begin anew where others may have been training."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        late = View("f" * 32, 7, (ProcessId(NodeId("a" * 32), 1),))
        with pytest.raises(BackendUnavailable, match=r"are not here.*begins anew"):
            settle(alone, late, MemberReport(StepReport(), (), 0, MemberCondition()))


class Other(DistributedContext):
    """A group of two, in which the other one says something of the test's choice."""

    said: Any = None
    rank, world_size = 0, 2

    def all_gather_object(self, value: Any, **_: Any) -> list[Any]:
        """Ours, and what it says."""
        return [value, self.said]


VIEW = View("a" * 32, 2, tuple(ProcessId(NodeId(letter * 32), 1) for letter in "ab"))


def hear(said: Any) -> SyncResult:
    """Settle with a member that says this."""
    with Other(SimulatedBackend.create_group(1)[0]) as group:
        group.said = said
        return settle(group, VIEW, STANDING, 96)


def written(*fields: Any) -> bytes:
    """Fields of a report, as they travel."""
    return msgspec.msgpack.encode(list(fields))


def fields() -> list[Any]:
    """Those of a good one."""
    found: list[Any] = msgspec.msgpack.decode(msgspec.msgpack.encode(STANDING.message()))
    return found


@pytest.mark.parametrize("value", [None, (), b"", b"\xc1", b"\x93\x01\x02\x03", {"a": 1}])
def test_a_report_that_makes_no_sense_is_refused(value: Any) -> None:
    """Whatever another member sends, it is understood or refused, and its sender named."""
    with pytest.raises(MalformedFrame, match="Rank 1 sent its report") as refused:
        hear(value)
    assert refused.value.rank == 1


class Silent(Other):
    """A group of two, in which one says that it has nothing to say."""

    def all_gather_object(self, value: Any, **_: Any) -> list[Any]:
        """As the collective does."""
        raise DistributedError("It has no message", rank=self.said)


def test_a_member_that_announces_no_report_is_named() -> None:
    """Unless it is this one, or it is not known which one it is."""
    with Silent(SimulatedBackend.create_group(1)[0]) as group:
        for said, kind in ((1, MalformedFrame), (0, DistributedError), (None, DistributedError)):
            group.said = said
            with pytest.raises(DistributedError) as found:
                settle(group, VIEW, STANDING, 96)
            assert type(found.value) is kind
            assert found.value.rank == said


STANDING = MemberReport(
    StepReport(
        Position("a" * 32, 2, 9),
        ("a" * 32, 2),
        Position("a" * 32, 2, 10),
        True,
        False,
        (Branch("b" * 32, 3),),
        90,
        (Milestone("b" * 32, 3, 7, 70),),
        100,
    ),
    ((0, 4),),
    5000,
    MemberCondition(),
    waits=True,
    token="abc",  # noqa: S106 - a mark in a folder
)


def test_a_report_survives_the_way() -> None:
    """Position, ancestry, samples and trail, up to the largest numbers."""
    found = hear(written(*fields()))
    assert found.decision.target == STANDING.report.attempt
    assert (found.trained, found.speeds, found.taken) == ((0, 1), (5000, 5000), (((0, 4),),) * 2)
    new = MemberReport(StepReport(), (), 0, MemberCondition())
    assert hear(msgspec.msgpack.encode(new.message())).trained == (0,)
    largest = "f" * 32, (1 << 62) - 1, (1 << 62) - 1, (1 << 62) - 1
    past = [[largest[:2]] * MAX_BRANCHES, largest[1], [largest] * MAX_BRANCHES, largest[1]]
    assert hear(written(*fields()[:5], *past, *fields()[9:])).tokens == ("abc", "abc")
    endless = dataclasses.replace(STANDING.report, samples=1 << 80, samples_held=1 << 80)
    told = MemberReport.of(dataclasses.replace(STANDING, report=endless).message()).report
    assert (told.samples, told.samples_held) == (largest[1], largest[1])


@pytest.mark.parametrize("ours", [3, 1 << 40])
def test_a_step_that_no_training_reaches_is_refused_from_one_member_alone(ours: int) -> None:
    """The others would follow it; where most are there, it has been reached."""

    def at(step: int) -> MemberReport:
        report = StepReport(Position("a" * 32, 1, step), ("a" * 32, 1), founder=True)
        return MemberReport(report, (), 0, MemberCondition())

    with Other(SimulatedBackend.create_group(1)[0]) as group:
        group.said = msgspec.msgpack.encode(at(1 << 40).message())
        if ours == 1 << 40:
            assert settle(group, VIEW, at(ours), 96).decision.target.step == ours
            return
        with pytest.raises(MalformedFrame, match="which no training reaches") as refused:
            settle(group, VIEW, at(ours), 96)
        assert refused.value.rank == 1


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        (0, ("a" * 33, 1, 1)),
        (0, ("a", -1, 1)),
        (0, ("a", 1, 1.5)),
        (1, ("a" * 33, 1)),
        (2, ("a", 1, 1 << 62)),
        (3, 1),
        (4, None),
        (5, (("a" * 33, 1),)),
        (5, (("a", -1),)),
        (5, ((b"a", 1),)),
        (5, (("a", 1, 1),)),
        (5, (("a", 1),) * (MAX_BRANCHES + 1)),
        (6, -1),
        (6, 1 << 62),
        (6, 1.0),
        (6, "1"),
        (6, True),
        (7, (("a", 1, 1),) * (MAX_BRANCHES + 1)),
        (7, (("a" * 33, 1, 1, 1),)),
        (7, (("a", 1, 1, 1 << 62),)),
        (8, None),
    ],
    ids=str,
)
def test_a_field_that_is_out_of_bounds_is_refused(field: int, wrong: Any) -> None:
    """At most 32 branches, 32 characters, and numbers from 0 to 2^62 - 1."""
    good = fields()
    with pytest.raises(MalformedFrame, match="Rank 1 sent its report"):
        hear(written(*good[:field], wrong, *good[field + 1 :]))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        (9, "x"),
        (9, ((1, 2),)),
        (9, ((("b" * 32, 1), "x" * 300),)),
        (10, 1),
        (0, ("a" * 32, 3, 9)),  # a view that is yet to come
        (11, 7),
        (11, ((0, float("inf")),)),
        (11, ((5, 2),)),
        (11, ((0, 4), (2, 6))),
        (11, ((0, 97),)),  # of 96 samples
        (11, ((0, 1),) * 9),
        (12, "x"),
        (12, -1),
        (13, ()),
        (13, {"load": 900}),
        (14, 1),
        (15, "../a"),
        (15, "a/b"),
        (15, "a\n"),
        (15, "a" * 65),
        (15, "."),
    ],
    ids=str,
)
def test_what_stands_beside_the_report_is_checked_too(field: int, wrong: Any) -> None:
    """Samples in hand, speed, condition, and the mark, which becomes the name of a file."""
    good = fields()
    with pytest.raises(MalformedFrame, match="Rank 1 sent its report"):
        hear(written(*good[:field], wrong, *good[field + 1 :]))


def end_a_try(ground: ViewScope, teller: int | None) -> DistributedError:
    """Another member ends a step of all; what this one makes of it."""
    error = Aborted("it ran out of memory", rank=1)
    error.teller = teller
    with pytest.raises(DistributedError) as found, ground.enter_view(PATIENCE):
        raise error
    return found.value


def test_a_member_that_ends_one_try_after_the_other_is_removed() -> None:
    """Each try but the last is made again; a step that succeeds in between clears it."""
    with clusters(3) as nodes:
        ground = ViewScope(nodes[0])
        for tellers in ((2, 2), (1, 2)):
            for teller in tellers:
                error = end_a_try(ground, teller)
                assert isinstance(error, Aborted)
                assert ground.can_continue(error)
            ground.note_progress(1, (), 1)
        for teller in (2, 1):
            assert isinstance(end_a_try(ground, teller), Aborted)
        error = end_a_try(ground, 2)
        assert error.rank == 2
        assert "Rank 2 aborted the step of all members 2 times in a row" in str(error)
        eventually(lambda: nodes[0].world_size == 2)
        left = nodes[0].view
        assert left is not None
        assert nodes[2].process not in left.members


def test_tries_that_no_member_owns_up_to_end_with_their_own_error() -> None:
    """There is none to blame."""
    with clusters(1) as (node,):
        ground = ViewScope(node)
        errors = [end_a_try(ground, None) for _ in range(elastic.MOST_ALARMS)]
        assert [ground.can_continue(error) for error in errors] == [True, True, False]
        assert errors[-1].message == "it ran out of memory"


def test_what_was_ended_here_or_by_nobody_known_is_not_tried_again() -> None:
    """It is raised as it is."""
    with clusters(1) as (node,):
        ground = ViewScope(node)
        for rank in (node.rank, None):
            error = Aborted("the program had enough", rank=rank)
            with pytest.raises(Aborted) as found, ground.enter_view(PATIENCE):
                raise error
            assert found.value is error
            assert not ground.can_continue(error)


def test_what_was_ended_in_an_earlier_view_is_not_held_against_a_member() -> None:
    """Ranks are others there."""
    with clusters(3) as nodes:
        ground = ViewScope(nodes[0])
        for _ in range(2):
            assert isinstance(end_a_try(ground, 1), Aborted)
        nodes[2].close()

        def stand() -> int:
            with ground.enter_view(PATIENCE) as view:
                return len(view.members)

        eventually(lambda: insist(stand) == 2)
        error = end_a_try(ground, 1)
        assert isinstance(error, Aborted)
        assert error.is_unclear


def test_who_has_been_there_from_the_beginning() -> None:
    """A member that joined later is not, nor one whose own group gave way to that one."""
    job = new_job()
    with clusters(1, job) as (first,):
        assert ViewScope(first).is_constant
        with clusters(1, job) as (later,):
            eventually(lambda: first.world_size == later.world_size == 2)
            assert [ViewScope(each).is_constant for each in (first, later)].count(True) == 1


def test_records_survive_the_way_and_odd_ones_are_refused() -> None:
    """Weights, speeds and intervals as numbers; more pieces than can be are an error."""
    record = StepContribution(3, 99, 0.1, 5000, 2, ((0, 5), (9, 12)))
    row = record.encode().tolist()
    assert StepContribution.decode(row, 0) == record
    with pytest.raises(MalformedFrame, match=r"Rank 7 sent its part in a step .* 99 intervals"):
        StepContribution.decode([*row[:5], 99, *row[6:]], 7)
    odd = dataclasses.replace(record, signature=5)
    with pytest.raises(MalformedFrame, match="Rank 2 sent its part") as found:
        check_records([record, record, odd], 0)
    assert found.value.rank == 2
    with pytest.raises(CollectiveMismatch, match="Rank 2 brings other gradients"):
        check_records([record, record, odd], 2)  # it must not blame the others
    with pytest.raises(CollectiveMismatch, match="Rank 1 brings other gradients"):
        check_records([record, odd], 0)  # one against one: neither is right
    with pytest.raises(CollectiveMismatch, match="Rank 1 is at step 4, rank 0 at step 3"):
        check_records([record, dataclasses.replace(record, step=4)])
    with pytest.raises(CollectiveMismatch, match="different epochs"):
        check_records([record, dataclasses.replace(record, epoch=1)])


def test_what_two_have_taken_counts_for_one() -> None:
    """One was away while its samples were handed out anew; both stand where all stand."""
    actions = (
        SyncAction.KEEP,
        SyncAction.KEEP,
        SyncAction.APPLY,
        SyncAction.RECEIVE,
        SyncAction.RECEIVE,
    )
    taken = ((0, 4),), ((3, 6),), ((8, 9),), ((4, 6),), ((6, 8),)
    found = SyncResult(SyncDecision(FRESH, actions, ""), actions[0], taken, (), (), ())
    assert found.kept({0, 1, 2, 3}) == [((0, 4),), None, (), ((4, 6),), None]
