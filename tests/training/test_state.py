"""What training counts: steps that counted, were repeated or in vain, states and checkpoints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from potluck import (
    Checkpointer,
    DistributedContext,
    DistributedError,
    ElasticTrainer,
    SimulatedBackend,
    ViewChanged,
)
from potluck.arrays import trees
from potluck.collective.call import Work
from potluck.errors import MalformedFrame
from potluck.metrics.registry import DistributedMetrics, MetricsSnapshot
from potluck.training import state as training_state
from potluck.training.averaging import StepOutcome, count_step
from potluck.training.checkpoint import count_save
from potluck.training.state import (
    CHUNK,
    Chunks,
    StateLayout,
    StateSync,
    TrainingState,
)
from support.clusters import clusters, everywhere, join, new_job
from support.contexts import in_group
from support.threads import PATIENCE, together


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

    saved, began = 0, time.perf_counter()
    snapshots = in_group(2, act)
    elapsed = time.perf_counter() - began
    for found in snapshots:
        assert found is not None
        for seconds in (
            found.training.duration.seconds,
            found.state.sync_seconds,
            found.state.save_seconds,
        ):
            assert 0 < seconds < elapsed
        assert (found.training.committed, found.training.step) == (3, 3)
        assert found.training.loss == 0.5
        assert found.state.syncs >= 2
        assert (found.state.saved, found.state.failed) == (1, 0)
        saved += found.state.saved_bytes
    assert saved == 4 * 8


def test_what_a_trainer_saves_by_itself_is_counted_too(tmp_path: Path) -> None:
    """Every second step, into a folder that all members share."""

    def act(context: DistributedContext) -> MetricsSnapshot | None:
        weights = np.zeros(4)
        trainer = ElasticTrainer(
            context,
            TrainingState(model=weights),
            lambda mean: np.subtract(weights, mean, out=weights),
            checkpoints=tmp_path,
            save_every=2,
        )
        with trainer:
            for _ in range(4):
                trainer.step(np.ones(4))
        return context.metrics_snapshot()

    found = [each.state for each in in_group(2, act) if each is not None]
    assert [(each.saved, each.failed) for each in found] == [(2, 0)] * 2
    assert sum(each.saved_bytes for each in found) == 2 * 4 * 8


def test_a_trainer_without_metrics_trains() -> None:
    """What nobody counts is not in the way."""
    weights = np.zeros(2)
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
        trainer = ElasticTrainer(context, TrainingState(model=weights), lambda _: None)
        trainer.note_loss(1.0)
        assert trainer.step(np.ones(2)).step == 1


# --------------------------------------------------------------------------------------------------
# States: declared by parts, compared by chunks, and brought to those who lack them.

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


def test_arrays_that_are_not_in_one_piece_are_filled() -> None:
    """Every second column of a table, a tensor turned round: the user's own elements change."""
    table, tensor = np.zeros((2, 4)), torch.zeros(2, 3)
    state = TrainingState(model=[table[:, ::2], tensor.t()])
    state.restore({"model": [np.ones((2, 2)), torch.arange(6.0).reshape(3, 2)]})
    assert table.tolist() == [[1, 0, 1, 0]] * 2
    assert tensor.tolist() == [[0, 2, 4], [1, 3, 5]]


def test_what_does_not_fit_is_refused() -> None:
    """No parts, parts without a way in, other names, other arrays, other shapes."""
    with pytest.raises(ValueError, match="at least one part"):
        TrainingState()
    with pytest.raises(TypeError, match="model: a str cannot be part of a training state"):
        TrainingState(model="weights.bin")
    with pytest.raises(TypeError, match="count: a tuple cannot be part of a training state"):
        TrainingState(count=(lambda: 5, 5))
    state = TrainingState(model={"w": np.zeros(2)})
    with pytest.raises(ValueError, match="has the parts model, but the other one has optimizer"):
        state.restore({"optimizer": {}})
    with pytest.raises(ValueError, match="different arrays"):
        state.restore({"model": {"v": np.zeros(2)}})
    with pytest.raises(ValueError, match=r"model\.w: 2 values of float64 here, 3 of float64"):
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
    chunks.layout.check()


SHAPE = Chunks({"a": np.zeros(1)}).layout.shape


@pytest.mark.parametrize(
    "layout",
    [
        StateLayout(SHAPE, (("a", "object", (1,)),)),
        StateLayout(SHAPE, (("a", "float64", (1 << 47,)),)),
        StateLayout(SHAPE, (("a", "nonsense", (1,)),)),
        StateLayout(SHAPE, (("a", "f8", (1,)),)),
        StateLayout(SHAPE, (("a", "(99,)f8", (1,)),)),
        StateLayout(SHAPE, (("a", "f8,f8", (1,)),)),
        StateLayout(SHAPE, (("a", "float64", (1,) * 65),)),
        StateLayout(SHAPE, (("b", "float64", (1,)),)),
        StateLayout(SHAPE, ()),
        StateLayout(SHAPE, (("a", "float64", (1,)),) * 2),
        StateLayout(SHAPE, (("a", "float64", (1,)), ("b", "float64", (1,)))),
        StateLayout(b"", ()),
        StateLayout(b"\x92\x00\x05", ()),
    ],
    ids=str,
)
def test_a_layout_that_cannot_be_is_refused(layout: StateLayout) -> None:
    """By a check that looks at names, types and sizes alone."""
    with pytest.raises(MalformedFrame):
        layout.check()


def test_arrays_that_cannot_be_changed_are_refused_at_once() -> None:
    """Not in the middle of a training, when a state comes."""
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    with pytest.raises(TypeError, match=r"model\.w cannot be changed in place: pass a pair"):
        TrainingState(model={"w": frozen})


# --------------------------------------------------------------------------------------------------
# State sync: only what differs, from several members, and whoever dies.


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
        [n for n in range(7) if training_state._server([0, 1, 2], n, 3) == who] for who in range(3)
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
    assert "has another state" not in caplog.text


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
    monkeypatch.setattr(training_state, "ROUND", 2)
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


def test_what_came_of_an_older_state_is_forgotten(
    group: list[DistributedContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off again and again while the others go on, it never keeps more than one state."""
    monkeypatch.setattr(training_state, "ROUND", 2)
    states = [model() for _ in range(3)] + [np.zeros(6 * CHUNK // 8)]
    syncs = [StateSync(TrainingState(model=state)) for state in states]

    def cut(rank: int) -> None:
        with pytest.raises(ViewChanged):
            syncs[rank].run(Breaking(group[rank], 1), [0, 1, 2], "same")  # type: ignore[arg-type]

    for _ in range(3):
        together(*(lambda rank=rank: cut(rank) for rank in range(4)))
        for state in states[:3]:
            np.add(state, 1, out=state)
        assert len(syncs[3]._arrived) == 2


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
        patch.setattr(training_state, "Chunks", Lying)
        together(*(lambda rank=rank: run(rank) for rank in range(4)))
    assert not states[3].any()


def test_a_plan_is_bound_to_what_was_announced() -> None:
    """Its sender cannot describe another state, or a larger one than is plausible here."""
    chunks = Chunks({"model": model(1)})
    plan = training_state.SyncPlan(chunks.layout, b"".join(chunks.digests))
    assert plan.checked(1, chunks.digest, chunks.nbytes) == chunks.digests
    other = training_state.SyncPlan(chunks.layout, bytes(len(plan.digests)))
    short = training_state.SyncPlan(chunks.layout, plan.digests[:-1])
    for wrong, limit in ((other, chunks.nbytes), (short, chunks.nbytes), (plan, 8)):
        with pytest.raises(MalformedFrame, match="Rank 1 sent the layout of its state") as found:
            wrong.checked(1, chunks.digest, limit)
        assert found.value.rank == 1


@pytest.mark.parametrize("wish", [[7], [1, 0], [1, 1]])
def test_wishes_for_what_is_not_there_are_refused(wish: list[int]) -> None:
    """Or for one part twice; and who has everything wishes for nothing."""
    with pytest.raises(MalformedFrame, match="Rank 1 sent its wishes"):
        training_state._check_wishes([[0], wish], [0, 1], 3)
    with pytest.raises(MalformedFrame, match="Rank 1 sent its wishes"):
        training_state._check_wishes([[0], [0]], [0], 3)


class Greedy:
    """A group in which this member's second message to all is another one."""

    def __init__(self, group: DistributedContext, message: object) -> None:
        self._group = group
        self._messages = [None, msgspec.msgpack.encode(message)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def all_gather_object(self, data: Any, **options: Any) -> Any:
        """What it has to say, or what it should not say."""
        other = self._messages.pop(0) if self._messages else None
        return self._group.all_gather_object(other or data, **options)


@pytest.mark.parametrize(("who", "wish"), [(1, [0]), (3, [2]), (3, [-1])])
def test_a_member_that_wishes_for_what_it_may_not_is_named_by_all(
    group: list[DistributedContext], who: int, wish: list[int]
) -> None:
    """One that has everything, or one that asks for a part that there is not."""
    states = [model(2) for _ in range(3)] + [np.zeros(2 * CHUNK // 8)]

    def run(rank: int) -> None:
        talks: Any = Greedy(group[rank], wish) if rank == who else group[rank]
        with pytest.raises(MalformedFrame, match=f"Rank {who} sent its wishes"):
            StateSync(TrainingState(model=states[rank])).run(talks, [0, 1, 2], "same")

    together(*(lambda rank=rank: run(rank) for rank in range(4)))
    assert not states[3].any()


def test_what_is_here_in_another_place_is_not_sent(group: list[DistributedContext]) -> None:
    """Equal chunks are one: a state that repeats itself costs what is new in it."""
    first, second = model(2).reshape(2, -1)
    states = [np.concatenate([second, second, first]) for _ in range(3)]
    states.append(np.concatenate([first, second, second]))

    def run(rank: int) -> Any:
        return StateSync(TrainingState(model=states[rank])).run(group[rank], [0, 1, 2], "same")

    reports = together(*(lambda rank=rank: run(rank) for rank in range(4)))
    assert np.array_equal(states[3], states[0])
    assert reports[3].nbytes <= 2 * CHUNK


def test_a_newcomer_that_has_hardly_anything_gets_a_state_of_many_arrays() -> None:
    """What little its own takes to describe is no measure."""
    whole = {f"layer{number}": np.full(2, number) for number in range(500)}
    mine: list[Any] = [np.zeros(1)]

    def act(context: DistributedContext) -> Any:
        state = TrainingState(all=(lambda: mine[0], lambda tree: mine.__setitem__(0, tree)))
        if context.rank == 0:
            state = TrainingState(all=(lambda: whole, lambda _: None))
        return StateSync(state).run(context, [0], "same").receivers

    assert in_group(2, act) == [(1,), (1,)]
    assert [mine[0][name].tolist() for name in whole] == [[n, n] for n in range(500)]


def test_a_newcomer_gets_a_state_of_thousands_of_arrays() -> None:
    """The others have three arrays for each of its own, as an optimiser that has made a step."""
    model = {f"layer{number}": np.zeros(1) for number in range(2300)}
    whole = {"model": model, "first": dict(model), "second": dict(model)}
    box: list[Any] = [{"model": model}]

    def act(context: DistributedContext) -> Any:
        state = TrainingState(all=(lambda: box[0], lambda tree: box.__setitem__(0, tree)))
        if context.rank == 0:
            state = TrainingState(all=(lambda: whole, lambda _: None))
        return StateSync(state).run(context, [0], "same").receivers

    assert in_group(2, act) == [(1,), (1,)]
    assert set(box[0]) == set(whole)
    assert set(box[0]["second"]) == set(model)


# --- the source dies ---


def test_the_source_leaves_in_the_middle_of_a_transfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newcomer gets the rest from the other member, and all go on."""
    monkeypatch.setattr(training_state, "ROUND", 1)
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
                trainer.step(np.ones(3))
                done.append(True)
                return trainer.step_count

        done: list[bool] = []
        left, reached, joined = together(source, survivor, newcomer, within=3 * PATIENCE)
        assert left < joined <= reached
        assert np.array_equal(weights[1][3:], weights[2][3:])


def test_a_state_that_those_who_have_trained_cannot_use_is_blamed_on_its_sender(
    group: list[DistributedContext],
) -> None:
    """They keep their own, although a part of it was replaced already; a newcomer has no say."""
    states = [{"a": np.full(3, 1.0), "b": np.full(2, 1.0)} for _ in group]
    states[0] = {"a": np.full(3, 9.0), "c": np.full(2, 9.0)}

    def run(rank: int, trained: list[int]) -> None:
        sync = StateSync(TrainingState(**states[rank]))
        sync._state.restore = lambda tree: restore(states[rank], tree)  # type: ignore[method-assign]
        sync.run(group[rank], [0], "same", trained)

    def restore(state: Any, tree: Any) -> None:
        for name, array in state.items():
            array[:] = tree[name]

    def blamed(rank: int) -> None:
        with pytest.raises(MalformedFrame, match="Rank 0 sent its state") as found:
            run(rank, [0, 1, 2])
        assert found.value.rank == 0

    def alone(rank: int) -> None:
        with pytest.raises(KeyError) if rank else contextlib.nullcontext():
            run(rank, [0])

    for what in (blamed, alone):
        together(*(lambda rank=rank, what=what: what(rank) for rank in range(4)))
        assert all((each["a"] == 1).all() and (each["b"] == 1).all() for each in states[1:])
