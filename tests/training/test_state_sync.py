"""State sync: only what differs, from several members, and whoever dies."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from potluck import DistributedContext, DistributedError, SimulatedBackend, ViewChanged
from potluck.errors import MalformedFrame
from potluck.training import state_sync
from potluck.training.elastic import ElasticTrainer
from potluck.training.state import TrainingState
from potluck.training.state_chunks import CHUNK, Chunks
from potluck.training.state_sync import StateSync
from support.clusters import clusters, everywhere, join, new_job
from support.threads import together


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


def test_what_came_of_an_older_state_is_forgotten(
    group: list[DistributedContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off again and again while the others go on, it never keeps more than one state."""
    monkeypatch.setattr(state_sync, "ROUND", 2)
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
        patch.setattr(state_sync, "Chunks", Lying)
        together(*(lambda rank=rank: run(rank) for rank in range(4)))
    assert not states[3].any()


def test_a_plan_is_bound_to_what_was_announced() -> None:
    """Its sender cannot describe another state, or a larger one than is plausible here."""
    chunks = Chunks({"model": model(1)})
    plan = state_sync.Plan(chunks.layout, b"".join(chunks.digests))
    assert plan.checked(1, chunks.digest, chunks.nbytes) == chunks.digests
    other = state_sync.Plan(chunks.layout, bytes(len(plan.digests)))
    short = state_sync.Plan(chunks.layout, plan.digests[:-1])
    for wrong, limit in ((other, chunks.nbytes), (short, chunks.nbytes), (plan, 8)):
        with pytest.raises(MalformedFrame, match="Rank 1 sent the layout of its state") as found:
            wrong.checked(1, chunks.digest, limit)
        assert found.value.rank == 1


@pytest.mark.parametrize("wish", [[7], [1, 0], [1, 1]])
def test_wishes_for_what_is_not_there_are_refused(wish: list[int]) -> None:
    """Or for one part twice; and who has everything wishes for nothing."""
    with pytest.raises(MalformedFrame, match="Rank 1 sent its wishes"):
        state_sync._check_wishes([[0], wish], [0, 1], 3)
    with pytest.raises(MalformedFrame, match="Rank 1 sent its wishes"):
        state_sync._check_wishes([[0], [0]], [0], 3)


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
