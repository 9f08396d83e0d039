"""States: declared by parts, compared by chunks, and brought to those who lack them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from potluck import DistributedContext, DistributedError, SimulatedBackend, ViewChanged
from potluck.errors import MalformedFrame
from potluck.training import state_sync, trees
from potluck.training.elastic import ElasticTrainer
from potluck.training.state import TrainingState
from potluck.training.state_chunks import CHUNK, Chunks, Layout
from potluck.training.state_sync import StateSync
from support.clusters import clusters, everywhere, join, new_job
from support.threads import together

# --- parts ---


def test_every_kind_of_part_is_captured_and_restored() -> None:
    """Models of PyTorch, pairs of functions, random generators and arrays in place."""
    model = torch.nn.Linear(2, 2)
    chance = np.random.default_rng(4)
    table: dict[str, Any] = {"a": [np.zeros(3, np.float32), np.ones((2, 2))]}
    box = [5]

    def put(value: int) -> None:
        box[0] = value

    state = TrainingState(
        model=model, chance=chance, table=table, count=(lambda: box[0], put), tensor=torch.zeros(2)
    )
    assert state.names == ["model", "chance", "table", "count", "tensor"]
    saved = Chunks(state.capture())
    stream = bytearray(b"".join(saved.read(number) for number in range(len(saved.digests))))
    expected = chance.normal(size=3), model.weight.detach().clone()
    with torch.no_grad():
        model.weight.fill_(9)
    table["a"][0][:] = 7
    box[0] = 6
    state.restore(trees.read(saved.layout.shape, saved.layout.parts(stream)))
    assert np.array_equal(chance.normal(size=3), expected[0])
    assert torch.equal(model.weight, expected[1])
    assert table["a"][0].tolist() == [0, 0, 0]
    assert box == [5]


def test_what_does_not_fit_is_refused() -> None:
    """No parts, parts without a way in, other names, other arrays, other shapes."""
    with pytest.raises(ValueError, match="at least one part"):
        TrainingState()
    with pytest.raises(TypeError, match="model: a str is no part of a state"):
        TrainingState(model="weights.bin")
    state = TrainingState(model={"w": np.zeros(2)})
    with pytest.raises(ValueError, match="has the parts model, but what came has optimizer"):
        state.restore({"optimizer": {}})
    with pytest.raises(ValueError, match="other arrays"):
        state.restore({"model": {"v": np.zeros(2)}})
    with pytest.raises(ValueError, match=r"model\.w: 2 values of float64 are here, 3 of float64"):
        state.restore({"model": {"w": np.zeros(3)}})
    assert state.with_part("model", np.zeros(1)) is state


# --- chunks ---


def test_a_hash_covers_everything() -> None:
    """A value, a type, a shape, a name or a plain number: any difference shows."""
    different: list[Any] = [
        {"a": np.zeros(4), "n": 1},
        {"a": np.array([0, 0, 0, 1.0]), "n": 1},
        {"a": np.zeros(8, np.float32), "n": 1},
        {"a": np.zeros((2, 2)), "n": 1},
        {"b": np.zeros(4), "n": 1},
        {"a": np.zeros(4), "n": 2},
    ]
    assert len({Chunks(tree).digest for tree in different}) == len(different)
    assert Chunks(different[0]).digest == Chunks({"a": np.zeros(4), "n": 1}).digest


def test_chunks_cross_the_borders_of_arrays() -> None:
    """Arrays of odd sizes and types come back from the stream as they were."""
    source = np.random.default_rng(1)
    tree = {
        "bytes": source.integers(0, 255, 3, np.uint8),
        "large": source.normal(size=CHUNK // 8 + 3),
        "none": np.empty((0, 2)),
        "rest": source.normal(size=5).astype(np.float32),
    }
    chunks = Chunks(tree)
    assert len(chunks.digests) == 2
    stream = bytearray(chunks.read(0) + chunks.read(1))
    assert len(stream) == chunks.nbytes == chunks.layout.nbytes
    for name, array in chunks.layout.parts(stream).items():
        assert np.array_equal(array, tree[name])
    layout = chunks.layout
    assert Layout.checked([layout.shape, [list(row) for row in layout.arrays]]) == layout


@pytest.mark.parametrize(
    "value",
    [
        None,
        (b"", [("a", "object", (1,))]),
        (b"", [("a", "float32", (-1,))]),
        (b"", [("a", "float64", (1 << 50,))]),
        (b"", [("a", "nonsense", (1,))]),
    ],
)
def test_a_layout_that_cannot_be_is_refused(value: Any) -> None:
    """Before anything is allocated for it."""
    with pytest.raises(MalformedFrame):
        Layout.checked(value)


# --- sync ---


@pytest.fixture
def group() -> Iterator[list[DistributedContext]]:
    """Four ranks."""
    contexts = [DistributedContext(each) for each in SimulatedBackend.create_group(4)]
    yield contexts
    for context in contexts:
        context.close()


def model(chunks: int = 6) -> Any:
    """A state of several chunks, all different."""
    return np.random.default_rng(2).normal(size=chunks * CHUNK // 8)


def test_a_newcomer_gets_everything_from_several_members(group: list[DistributedContext]) -> None:
    """Each of the three who have it sends a third; the newcomer's tree may have another shape."""
    states: list[Any] = [{"model": model(), "momentum": np.ones(5)} for _ in range(3)]
    box: list[Any] = [{"model": np.zeros(3)}]
    reads = [0] * 4

    def put(tree: Any) -> None:
        box[0] = tree

    parts = [TrainingState(all=state) for state in states]
    parts.append(TrainingState(all=(lambda: box[0], put)))

    def sync(rank: int) -> Any:
        report = StateSync(parts[rank]).run(group[rank], [0, 1, 2], "same")
        reads[rank] = report.nbytes
        return report

    reports = together(*(lambda rank=rank: sync(rank) for rank in range(4)))
    assert {(each.receivers, each.servers) for each in reports} == {((3,), (0, 1, 2))}
    assert reads == [0, 0, 0, reports[0].whole]
    assert np.array_equal(box[0]["model"], states[0]["model"])
    assert np.array_equal(box[0]["momentum"], np.ones(5))
    shares = [
        [n for n in range(7) if state_sync._server([0, 1, 2], n, 3) == who] for who in range(3)
    ]
    assert min(map(len, shares)) >= 2


def test_only_what_differs_is_sent(group: list[DistributedContext]) -> None:
    """One changed number costs one chunk; equal states cost nothing."""
    states = [model() for _ in group]
    states[2][3 * CHUNK // 8 + 5] += 1
    syncs = [StateSync(TrainingState(model=state)) for state in states]

    def run(rank: int) -> Any:
        return syncs[rank].run(group[rank], range(4), "same")

    reports = together(*(lambda rank=rank: run(rank) for rank in range(4)))
    assert [each.nbytes for each in reports] == [0, 0, CHUNK, 0]
    assert np.array_equal(states[2], states[0])
    again = together(*(lambda rank=rank: run(rank) for rank in range(4)))
    assert {each.receivers for each in again} == {()}


def test_where_no_majority_is_the_first_counts(
    group: list[DistributedContext], caplog: pytest.LogCaptureFixture
) -> None:
    """Two machines of different kinds compute different bits: that is nobody's fault."""
    states = [np.full(3, float(rank // 2)) for rank in range(4)]

    def run(rank: int) -> Any:
        sync = StateSync(TrainingState(model=states[rank]))
        return sync.run(group[rank], range(4), "arm" if rank >= 2 else "intel")

    reports = together(*(lambda rank=rank: run(rank) for rank in range(4)))
    assert {each.receivers for each in reports} == {(2, 3)}
    assert {state.tolist()[0] for state in states} == {0.0}
    assert "come apart" not in caplog.text


class Breaking:
    """A group whose views end after so many exchanges."""

    def __init__(self, group: DistributedContext, exchanges: int) -> None:
        self._group = group
        self._left = exchanges

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_to_all(self, *arguments: Any, **options: Any) -> Any:
        """One exchange, or the end."""
        if not self._left:
            raise ViewChanged("somebody is gone")
        self._left -= 1
        return self._group.all_to_all(*arguments, **options)


def test_what_has_arrived_is_not_sent_again(
    group: list[DistributedContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A view that ends in the middle costs only what was under way."""
    monkeypatch.setattr(state_sync, "ROUND", 2)
    states = [model() for _ in range(3)] + [np.zeros(6 * CHUNK // 8)]
    syncs = [StateSync(TrainingState(model=state)) for state in states]

    def cut(rank: int) -> None:
        with pytest.raises(ViewChanged):
            syncs[rank].run(Breaking(group[rank], 2), [0, 1, 2], "same")  # type: ignore[arg-type]

    together(*(lambda rank=rank: cut(rank) for rank in range(4)))
    assert not states[3].any()  # nothing of it is used before all of it is there
    reports = together(
        *(lambda rank=rank: syncs[rank].run(group[rank], [0, 1, 2], "same") for rank in range(4))
    )
    assert reports[3].nbytes == 2 * CHUNK
    assert np.array_equal(states[3], states[0])


def test_a_server_that_sends_something_else_is_named(group: list[DistributedContext]) -> None:
    """Its part does not match the hash that was announced; nothing of it is used."""
    states = [model(2) for _ in range(3)] + [np.zeros(2 * CHUNK // 8)]

    class Lying(Chunks):
        """Changes its mind after announcing."""

        def read(self, number: int) -> bytes:
            """Not what it was."""
            data = super().read(number)
            return data if not hasattr(self, "digests") else bytes(len(data))

    def run(rank: int) -> None:
        sync = StateSync(TrainingState(model=states[rank]))
        if rank < 3:
            sync.run(group[rank], [0, 1, 2], "same")
            return
        with pytest.raises(DistributedError, match=r"Rank \d sent a part of the state"):
            sync.run(group[rank], [0, 1, 2], "same")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_sync, "Chunks", Lying)
        together(*(lambda rank=rank: run(rank) for rank in range(4)))
    assert not states[3].any()


@pytest.mark.parametrize("plan", [None, (1, 2), ((b"", ()), b"short"), ((b"", ()), 5)])
def test_a_plan_that_makes_no_sense_is_refused(plan: Any) -> None:
    """And so are wishes for chunks that do not exist."""
    with pytest.raises(MalformedFrame):
        state_sync._read_plan(plan)
    with pytest.raises(MalformedFrame, match="Rank 1 wishes"):
        state_sync._check_wishes([[0], [7]], 3)


# --- the source dies ---


def test_the_source_leaves_in_the_middle_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer gets the rest from the other member, and all go on."""
    monkeypatch.setattr(state_sync, "ROUND", 1)
    job = new_job()
    with clusters(2, job) as nodes:
        weights = [model(), model(), np.zeros(6 * CHUNK // 8)]

        def trainer_on(node: Any, mine: Any) -> ElasticTrainer:
            def apply(mean: Any) -> None:
                mine[:3] -= mean

            return ElasticTrainer(node, TrainingState(model=mine), apply)

        trainers = [trainer_on(node, mine) for node, mine in zip(nodes, weights, strict=False)]
        everywhere(trainers, lambda trainer: trainer.step(np.ones(3)))
        exchange, rounds = nodes[0].all_to_all, iter(range(9))

        def leave(*arguments: Any, **options: Any) -> Any:
            if next(rounds) == 2:
                nodes[0].close()
                raise KeyboardInterrupt
            return exchange(*arguments, **options)

        monkeypatch.setattr(nodes[0], "all_to_all", leave)

        def source() -> int:
            with contextlib.suppress(KeyboardInterrupt):
                while True:
                    trainers[0].step(np.ones(3))
            return trainers[0].step_count

        def survivor() -> int:
            while not done:
                trainers[1].step(np.ones(3))
            return trainers[1].step_count

        def newcomer() -> int:
            with join(2, job) as node:
                trainer = trainer_on(node, weights[2])
                trainer.start()
                done.append(True)
                trainer.step(np.ones(3))
                return trainer.step_count

        done: list[bool] = []
        left, reached, joined = together(source, survivor, newcomer)
        assert left < joined <= reached
        assert np.array_equal(weights[1][3:], weights[2][3:])
