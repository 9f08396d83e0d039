"""Local SGD and DiLoCo: rare meetings, few bytes, nearly the same loss."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from potluck import DistributedContext, DistributedError, SimulatedBackend
from potluck.training.local_sgd import LocalSgd
from potluck.training.sampler import ElasticSampler
from support.clusters import clusters, join, new_job
from support.threads import PATIENCE, together

SAMPLES, FEATURES, HIDDEN = 512, 6, 24


class Network:
    """One hidden layer in float32, which learns a smooth function from noisy samples."""

    def __init__(self, seed: int = 0) -> None:
        source = np.random.default_rng(11)
        self.inputs = source.normal(size=(SAMPLES, FEATURES)).astype(np.float32)
        wave = np.sin(self.inputs @ source.normal(size=FEATURES))
        self.targets = (wave + 0.3 * source.normal(size=SAMPLES)).astype(np.float32)
        mine = np.random.default_rng(seed)
        self.weights = {
            "first": (0.5 * mine.normal(size=(FEATURES, HIDDEN))).astype(np.float32),
            "second": (0.3 * mine.normal(size=HIDDEN)).astype(np.float32),
        }

    def gradient(self, indices: Any) -> dict[str, Any]:
        """The mean gradient over some samples."""
        rows, goals = self.inputs[indices], self.targets[indices]
        hidden = np.tanh(rows @ self.weights["first"])
        error = (hidden @ self.weights["second"] - goals) * np.float32(2 / len(rows))
        back = np.outer(error, self.weights["second"]) * (1 - hidden**2)
        return {"first": rows.T @ back, "second": hidden.T @ error}

    def descend(self, gradient: dict[str, Any], rate: float = 0.05) -> None:
        """One step of plain gradient descent."""
        for name in self.weights:
            self.weights[name] -= np.float32(rate) * gradient[name]

    @property
    def loss(self) -> float:
        """Over all samples."""
        made = np.tanh(self.inputs @ self.weights["first"]) @ self.weights["second"]
        return float(np.mean((made - self.targets) ** 2))


@pytest.fixture
def group() -> Iterator[list[DistributedContext]]:
    """Three ranks."""
    contexts = [DistributedContext(each) for each in SimulatedBackend.create_group(3)]
    yield contexts
    for context in contexts:
        context.close()


def data_parallel(steps: int) -> float:
    """The loss of training in which every step is averaged: as one machine with big batches."""
    net, chance = Network(), np.random.default_rng(1)
    for _ in range(steps):
        net.descend(net.gradient(chance.integers(0, SAMPLES, 48)))
    return net.loss


def test_diloco_needs_far_fewer_bytes_for_nearly_the_same_loss(
    group: list[DistributedContext],
) -> None:
    """H = 50 and int8: at least 150 times fewer bytes than every step in float32, 2 % more loss."""
    steps, every = 1500, 50
    nets = [Network(seed=rank) for rank in range(3)]
    meetings = [LocalSgd(group[rank], nets[rank].weights, every=every) for rank in range(3)]

    def work(rank: int) -> None:
        net, mine = nets[rank], np.random.default_rng(rank)
        meetings[rank].start()
        for _ in range(steps):
            net.descend(net.gradient(mine.integers(0, SAMPLES, 16)))
            meetings[rank].step(16)

    together(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert {each.trainer.step_count for each in meetings} == {steps // every}
    assert len({str([a.tobytes() for a in net.weights.values()]) for net in nets}) == 1
    compressor = meetings[0].compressor
    assert compressor is not None
    assert every * compressor.compression_ratio >= 150
    assert nets[0].loss <= 1.02 * data_parallel(steps)


def test_plain_local_sgd_averages_the_parameters(group: list[DistributedContext]) -> None:
    """Without momentum or compression a meeting is the mean, by weight; also of tensors."""
    weights = [torch.full((4,), float(rank), dtype=torch.float64) for rank in range(3)]
    box = [np.zeros(2) for _ in range(3)]

    def work(rank: int) -> None:
        with torch.no_grad():
            mine = weights[rank]

            def put(tree: Any) -> None:
                mine.copy_(tree[0])
                box[rank] = tree[1]

            meetings = LocalSgd(
                group[rank],
                (lambda: [mine, box[rank]], put),
                every=1,
                rate=1.0,
                momentum=0.0,
                compression=None,
            )
            meetings.start()
            mine += rank
            box[rank] = box[rank] + 4 * rank
            meetings.step(weight=1 + (rank == 2))

    together(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert [each.tolist() for each in weights] == [[1.25] * 4] * 3  # (0 + 1 + 2 · 2) / 4
    assert [each.tolist() for each in box] == [[5.0] * 2] * 3


def test_parameters_may_lie_anywhere_in_memory(group: list[DistributedContext]) -> None:
    """Every second column of a table, a tensor turned round: the user's own elements change."""
    tables = [np.full((2, 4), float(rank), np.float32) for rank in range(3)]
    tensors = [torch.full((2, 3), float(rank)) for rank in range(3)]

    def work(rank: int) -> None:
        table, tensor = tables[rank][:, ::2], tensors[rank].t()
        mine = [table, tensor]
        meetings = LocalSgd(group[rank], mine, every=1, rate=1.0, momentum=0.0, compression=None)
        meetings.start()
        table += rank
        tensor += rank
        meetings.step()

    together(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert [each.tolist() for each in tables] == [[[1.0, rank, 1.0, rank]] * 2 for rank in range(3)]
    assert [each.tolist() for each in tensors] == [[[1.0] * 3] * 2] * 3


def test_the_outer_optimiser_is_sgd_with_nesterovs_momentum(
    group: list[DistributedContext],
) -> None:
    """Each meeting changes what all have in common as in the paper of DiLoCo."""

    def work(rank: int) -> list[float]:
        weights = np.zeros(2, np.float32)
        meetings = LocalSgd(group[rank], weights, every=1, rate=0.5, momentum=0.5, compression=None)
        meetings.start()
        seen = []
        for _ in range(3):
            weights += 1
            meetings.step()
            seen.append(float(weights[0]))
        return seen

    place, speed, expected = 0.0, 0.0, []
    for _ in range(3):
        speed = 0.5 * speed - 1
        place -= 0.5 * (-1 + 0.5 * speed)
        expected.append(place)
    assert together(*(lambda rank=rank: work(rank) for rank in range(3))) == [expected] * 3


def test_what_all_have_in_common_is_kept_in_enough_digits(
    group: list[DistributedContext],
) -> None:
    """Wide parameters lose none, and a narrow one moves by ways that are too small for it."""
    little = 2.0**-10  # from 1 to the next number in half precision

    def work(rank: int) -> tuple[list[float], list[float]]:
        wide, narrow = np.full(2, 1 / 3), np.ones(2, np.float16)
        meetings = LocalSgd(
            group[rank], [wide, narrow], every=1, rate=0.25, momentum=0.0, compression=None
        )
        meetings.start()
        for _ in range(4):
            narrow += np.float16(little)
            meetings.step()
        return wide.tolist(), narrow.tolist()

    found = together(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert found == [([1 / 3] * 2, [1 + little] * 2)] * 3


def test_a_meeting_counts_what_was_made_since_the_last(group: list[DistributedContext]) -> None:
    """Two steps of four samples on each of three members, every time."""

    def work(rank: int) -> list[float]:
        meetings = LocalSgd(group[rank], np.zeros(2, np.float32), every=2)
        meetings.start()
        outcomes = [meetings.step(4) for _ in range(6)]
        return [each.weight for each in outcomes if each is not None]

    found = together(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert found == [[24.0] * 3] * 3


def test_samples_between_meetings_are_shared_out(group: list[DistributedContext]) -> None:
    """Each member works through its own share, and every sample counts once per epoch."""
    samplers = [ElasticSampler(60, seed=2) for _ in group]
    seen: list[list[int]] = [[], [], []]

    def work(rank: int) -> None:
        weights = np.zeros(3, np.float32)
        meetings = LocalSgd(group[rank], weights, sampler=samplers[rank], batch=30, every=1)
        while samplers[rank].epoch == 0:
            seen[rank] += meetings.take().tolist()
            meetings.step(10)

    together(*(lambda rank=rank: work(rank) for rank in range(3)))
    assert sorted(index for each in seen for index in each) == list(range(60))


def test_members_come_between_meetings() -> None:
    """A newcomer goes on from what all have in common."""
    job = new_job()
    goal: list[int] = []
    with clusters(2, job) as nodes:
        nets = [Network(seed=3), Network(seed=4), Network(seed=5)]

        def run(node: Any, net: Network) -> None:
            meetings = LocalSgd(node, net.weights, every=3)
            meetings.start()
            mine = np.random.default_rng(1)
            while not goal or meetings.trainer.step_count < goal[0]:
                net.descend(net.gradient(mine.integers(0, SAMPLES, 16)))
                outcome = meetings.step(16)
                if outcome is not None and outcome.world_size == 3 and not goal:
                    goal.append(outcome.step + 5)

        def come() -> None:
            with join(2, job) as node:
                run(node, nets[2])

        together(come, lambda: run(nodes[0], nets[0]), lambda: run(nodes[1], nets[1]))
    assert len({str([a.tobytes() for a in net.weights.values()]) for net in nets}) == 1


def test_nobody_waits_for_a_newcomer_to_catch_up(group: list[DistributedContext]) -> None:
    """It takes part in the meeting that is under way, with nothing, instead of computing first."""
    weights = [np.full(4, float(rank), np.float32) for rank in range(3)]
    meetings = [LocalSgd(group[rank], weights[rank], every=10**9) for rank in range(3)]

    def compute() -> float:
        meetings[0].step()
        return meetings[0].meet().weight

    assert together(compute, meetings[1].start, meetings[2].start)[0] == 1
    assert {each.trainer.step_count for each in meetings} == {1}
    assert [each.tolist() for each in weights] == [[0.0] * 4] * 3


def test_what_is_computed_during_a_meeting_is_kept(group: list[DistributedContext]) -> None:
    """With nothing but averaging, members that walk alike get as far as without meetings."""
    weights = [np.zeros(3, np.float32) for _ in group]

    def work(rank: int) -> list[int]:
        meetings = LocalSgd(
            group[rank], weights[rank], every=4, overlap=3, rate=1.0, momentum=0.0, compression=None
        )
        meetings.start()
        outcomes = []
        for _ in range(22):
            weights[rank] += 1
            outcomes.append(meetings.step())
        outcomes.append(meetings.finish())
        assert {each.weight for each in outcomes if each is not None} == {3 * 4.0}
        return [each.step for each in outcomes if each is not None]

    assert together(*(lambda rank=rank: work(rank) for rank in range(3))) == [[1, 2, 3, 4, 5]] * 3
    assert [each.tolist() for each in weights] == [[22.0] * 3] * 3


def test_computing_goes_on_while_a_meeting_is_under_way(group: list[DistributedContext]) -> None:
    """Two members make further steps though the third has not come to the meeting yet."""
    weights = [np.zeros(3, np.float32) for _ in group]
    meetings = [LocalSgd(group[rank], weights[rank], every=2, overlap=2) for rank in range(3)]
    ahead = threading.Barrier(3)

    def walk(rank: int) -> None:
        meetings[rank].start()
        if rank == 2:
            ahead.wait(PATIENCE)  # until the others are one step beyond their meeting
        for number in range(3):
            weights[rank] -= rank
            assert meetings[rank].step() is None
            if number == 2 and rank != 2:
                ahead.wait(PATIENCE)
        meetings[rank].finish()

    together(*(lambda rank=rank: walk(rank) for rank in range(3)))
    assert {each.trainer.step_count for each in meetings} == {1}
    assert len({each._anchor[0].tobytes() for each in meetings}) == 1


def test_a_member_leaves_during_a_meeting_that_overlaps() -> None:
    """The other goes on, with what it computed meanwhile."""
    with clusters(2) as nodes:
        nets = [Network(seed=3), Network(seed=4)]

        def run(place: int, steps: int) -> LocalSgd:
            meetings = LocalSgd(nodes[place], nets[place].weights, every=4, overlap=4)
            meetings.start()
            mine = np.random.default_rng(place)
            for _ in range(steps):
                nets[place].descend(nets[place].gradient(mine.integers(0, SAMPLES, 16)))
                meetings.step(16)
            return meetings

        def leave() -> None:
            meetings = run(1, 9)  # one step after it has begun its second meeting
            nodes[1].close()
            with contextlib.suppress(DistributedError):  # unless the meeting was over already
                meetings.finish()

        def stay() -> int:
            meetings = run(0, 40)
            meetings.finish()
            return meetings.trainer.step_count

        assert together(leave, stay)[1] == 10
    assert nets[0].loss < Network(seed=3).loss


def test_what_makes_no_sense_is_refused(group: list[DistributedContext]) -> None:
    """No steps between meetings, too much momentum, nothing to train, another model."""
    with pytest.raises(ValueError, match="every must be at least 1"):
        LocalSgd(group[0], np.zeros(2), every=0)
    with pytest.raises(ValueError, match="every must be at least 1"):
        LocalSgd(group[0], np.zeros(2), momentum=1.0)
    with pytest.raises(ValueError, match="no arrays"):
        LocalSgd(group[0], {})
    with pytest.raises(ValueError, match="every must be at least 1"):
        LocalSgd(group[0], np.zeros(2), momentum=-0.1)
    for overlap in (-1, 6):
        with pytest.raises(ValueError, match="overlap must be between 0 and every"):
            LocalSgd(group[0], np.zeros(2), every=5, overlap=overlap)
    with pytest.raises(ValueError, match="cannot be combined with a sampler or further parts"):
        LocalSgd(group[0], np.zeros(2), overlap=1, extra=np.zeros(1))
    with pytest.raises(ValueError, match="cannot be combined with a sampler"):
        LocalSgd(group[0], np.zeros(2), overlap=1, sampler=ElasticSampler(4), batch=2)
    meetings = LocalSgd(group[0], np.zeros(2, np.float32))
    with pytest.raises(ValueError, match="all must train the same model"):
        meetings._restore({"anchor": [np.zeros(3)], "speed": [np.zeros(3)]})
