"""A usual loop of PyTorch on elastic steps."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from potluck import BackendUnavailable, DistributedContext, SimulatedBackend
from potluck.torch.elastic import ElasticOptimizer
from potluck.training.sampler import ElasticSampler
from support.clusters import clusters
from support.threads import together


@pytest.fixture
def group() -> Iterator[list[DistributedContext]]:
    """Two ranks."""
    contexts = [DistributedContext(each) for each in SimulatedBackend.create_group(2)]
    yield contexts
    for context in contexts:
        context.close()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    """What is learned."""
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 3, generator=source)
    return inputs, inputs @ torch.tensor([[1.0], [-2.0], [0.5]])


def make(seed: int, group: DistributedContext) -> tuple[torch.nn.Module, ElasticOptimizer, Any]:
    """A model, its optimiser and a schedule, as a script has them."""
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.1 * seed)
        model.bias.fill_(seed)
    inner = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(inner, step_size=20, gamma=0.9)
    optimizer = ElasticOptimizer(
        inner,
        model,
        group,
        parts={"schedule": schedule},
        sampler=ElasticSampler(64, seed=2),
        batch=16,
    )
    return model, optimizer, schedule


Run = tuple[torch.nn.Module, ElasticOptimizer, Any]


def train(run: Run, steps: int) -> None:
    """The usual loop."""
    model, optimizer, schedule = run
    inputs, targets = data()
    optimizer.start()
    while optimizer.trainer.step_count < steps:
        indices = torch.from_numpy(optimizer.trainer.take())
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[indices]), targets[indices])
        loss.backward()  # type: ignore[no-untyped-call] # PyTorch has not typed it
        optimizer.step()
        schedule.step()


def test_a_usual_loop_trains_together(group: list[DistributedContext]) -> None:
    """Two ranks that began apart reach what one reaches alone, and have the same bits."""
    made = [make(seed, each) for seed, each in enumerate(group)]
    together(*(lambda run=run: train(run, 60) for run in made))
    weights = [model.weight.detach() for model, _, _ in made]  # type: ignore[operator]
    assert torch.equal(weights[0], weights[1])
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        single = make(0, alone)
        train(single, 60)
        expected: Any = single[0].weight
        assert torch.allclose(weights[0], expected.detach(), atol=1e-4)
    states = [optimizer.state_dict() for _, optimizer, _ in made]
    assert states[0]["state"][0]["step"] == 60
    assert torch.equal(states[0]["state"][0]["exp_avg"], states[1]["state"][0]["exp_avg"])
    assert made[1][2].last_epoch == 60


def test_it_is_an_optimiser_like_any(group: list[DistributedContext]) -> None:
    """Schedulers take it, groups and states are those of the wrapped one, closures are called."""
    model, optimizer, _ = make(0, group[0])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    before = optimizer.param_groups[0]["lr"]
    assert optimizer.param_groups is optimizer._wrapped.param_groups
    assert optimizer.state is optimizer._wrapped.state
    assert optimizer.defaults is optimizer._wrapped.defaults
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    assert repr(optimizer).startswith("ElasticOptimizer(Adam")
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        model, optimizer, _ = make(0, alone)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)

        def closure() -> float:
            optimizer.zero_grad()
            loss = model(torch.ones(1, 3)).sum()
            loss.backward()
            return float(loss.detach())

        assert optimizer.step(closure, weight=2) == 0.0
        schedule.step()
        assert optimizer.param_groups[0]["lr"] == before / 2
        assert optimizer.outcome is not None
        assert optimizer.outcome.weight == 2
        optimizer.zero_grad()
        optimizer.step()  # without gradients nothing is added, and nothing fails


def test_a_machine_leaves_and_the_loop_goes_on() -> None:
    """Training over the process group raises here; this goes on."""
    with clusters(2) as nodes:
        made = [make(seed, node) for seed, node in enumerate(nodes)]

        def leaver() -> None:
            train(made[1], 10)
            nodes[1].close()

        together(leaver, lambda: train(made[0], 30))
        assert made[0][1].trainer.step_count == 30


# --- averaging while the backward pass computes ---


def deep(group: DistributedContext) -> tuple[torch.nn.Module, ElasticOptimizer]:
    """A model of several buckets, one parameter of which no loss depends on."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(16, 16) for _ in range(4)]
    model = torch.nn.Sequential(torch.nn.Linear(3, 16), *layers, torch.nn.Linear(16, 1))
    model.register_parameter("unused", torch.nn.Parameter(torch.ones(5)))
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, ElasticOptimizer(inner, model, group, bucket=2048)


def descend(run: Any, steps: int, rows: slice, *, overlap: bool) -> list[bytes]:
    """Train on some rows, weighted by their number; the bits of the model after each step."""
    model, optimizer = run
    inputs, targets = (each[rows] for each in data())
    optimizer.start()
    bits = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        with optimizer.overlap(len(inputs)) if overlap else contextlib.nullcontext():
            loss.backward()  # type: ignore[no-untyped-call] # PyTorch has not typed it
        optimizer.step(weight=len(inputs))
        bits.append(b"".join(each.detach().numpy().tobytes() for each in model.parameters()))
    return bits


def test_overlap_changes_no_bit(group: list[DistributedContext]) -> None:
    """Begun during the backward pass or after it, on all members or on one: the same bits."""
    seen = []
    for ways in ((False, False), (True, True), (True, False)):
        runs = [deep(each) for each in group]
        assert len(runs[0][1]._backward._planned().all) > 2
        first, second = together(
            functools.partial(descend, runs[0], 12, slice(40), overlap=ways[0]),
            functools.partial(descend, runs[1], 12, slice(40, 64), overlap=ways[1]),
        )
        assert first == second
        seen.append(first)
    assert seen[0] == seen[1] == seen[2]


def test_buckets_are_averaged_before_the_backward_pass_is_over(
    group: list[DistributedContext],
) -> None:
    """While one layer still computes, the others' buckets are under way or done."""
    runs = [deep(each) for each in group]
    begun: list[int] = []

    def look(model: torch.nn.Module, optimizer: ElasticOptimizer) -> None:
        first = model.get_parameter("0.weight")

        def last_gradient(_: torch.Tensor) -> None:
            under_way = optimizer.trainer._begun
            assert under_way is not None
            begun.append(under_way.begun)

        first.register_hook(last_gradient)  # type: ignore[no-untyped-call]

    for run in runs:
        look(*run)
    together(*(lambda run=run: descend(run, 1, slice(9), overlap=True) for run in runs))
    assert min(begun) >= 2


def test_what_overlap_cannot_do_is_said() -> None:
    """Gradients changed afterwards, two passes for one step, another weight than announced."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        model, optimizer = deep(alone)
        optimizer.start()

        def backward(weight: float | None = None) -> None:
            optimizer.zero_grad()
            with optimizer.overlap(weight):
                model(torch.ones(2, 3)).sum().backward()

        backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with pytest.raises(ValueError, match="was changed after its averaging began"):
            optimizer.step()
        with pytest.raises(ValueError, match="One backward pass is watched"):
            backward()
        model, optimizer = deep(alone)
        optimizer.start()
        with optimizer.overlap():
            for _ in range(2):
                model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(ValueError, match="or added up by several passes"):
            optimizer.step()


def test_a_backward_pass_that_fails_in_overlap_ends_this_member() -> None:
    """The others have a part of its gradients already: it says so, and what to do."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        _, optimizer = deep(alone)
        optimizer.start()
        with pytest.raises(MemoryError), optimizer.overlap():
            raise MemoryError
        with pytest.raises(BackendUnavailable, match=r"MemoryError\(\).*Start it again"):
            optimizer.step()
        with pytest.raises(BackendUnavailable, match="overlap"), optimizer.overlap():
            pass


def test_a_view_ends_in_the_middle_of_a_backward_pass() -> None:
    """What was begun counts nothing; the step is made from the gradients among who is left."""
    with clusters(3) as nodes:
        runs = [deep(node) for node in nodes]

        def leaver() -> None:
            descend(runs[2], 3, slice(9), overlap=True)
            _, optimizer = runs[2]
            with optimizer.overlap(9):
                nodes[2].close()  # its record is on the way

        ways = [functools.partial(descend, run, 8, slice(9), overlap=True) for run in runs[:2]]
        _, first, second = together(leaver, *ways)
        assert first == second
        assert {run[1].trainer.step_count for run in runs[:2]} == {8}


def test_parameters_that_are_added_later_are_averaged_too(group: list[DistributedContext]) -> None:
    """Otherwise the members would come apart."""
    added = [torch.nn.Parameter(torch.zeros(2)) for _ in group]

    def work(rank: int) -> None:
        model, optimizer = deep(group[rank])
        optimizer.start()
        optimizer.add_param_group({"params": [added[rank]]})
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(2, 3)).sum() + (1 + rank) * added[rank].sum()
            with optimizer.overlap():
                loss.backward()
            optimizer.step()

    together(*(lambda rank=rank: work(rank) for rank in range(2)))
    assert added[0].tolist() == added[1].tolist()
    assert added[0].tolist() != [0.0, 0.0]
