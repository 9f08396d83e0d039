"""Groups: collectives run over a backend, on every rank, and give what they should."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import numpy as np
import pytest

from potluck import SimulatedBackend, SubBackend
from potluck.backend.simulated import SimulatedFaults
from potluck.collective import verify
from potluck.collective.reduce import BFLOAT16, DTYPES, Dtype, ReduceOp, Reducer
from potluck.collective.task import Collective, Task
from potluck.errors import ChannelClosed, UnsupportedOperation
from potluck.runtime.call import Call
from potluck.runtime.group import Group
from support.collectives import OFFERS, task
from support.groups import LIMIT, Array, call_of, in_world, on_backends, sum_call
from support.threads import Background


def check(work: Task, algorithm: str, *, faults: SimulatedFaults | None = None) -> None:
    """Run a task on every rank and compare what comes out with what should."""
    reducer, inputs = verify.exact(work), verify.distinct(work)

    def action(group: Group) -> Array:
        call = call_of(work, inputs[group.rank], reducer, group.rank, algorithm)
        group.run(call, LIMIT)
        assert call.source.tobytes() == inputs[group.rank].tobytes(), "the input was changed"
        return call.target

    got = in_world(work.world_size, action, faults=faults)
    for one in got:
        if isinstance(one, BaseException):
            raise one
    verify.compare(work, got, reducer)  # type: ignore[arg-type] # no errors are left


@pytest.mark.parametrize(("algorithm", "collective"), OFFERS)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_algorithm_gives_what_it_should(
    algorithm: str, collective: Collective, size: int
) -> None:
    """With short vectors and uneven blocks."""
    check(task(collective, size, count=40, root=size - 1), algorithm)


@pytest.mark.parametrize(("algorithm", "collective"), OFFERS)
@pytest.mark.parametrize("size", [2, 4])
def test_long_vectors_are_pipelined(algorithm: str, collective: Collective, size: int) -> None:
    """With many pieces, more than the streams hold at once."""
    check(task(collective, size, count=400_000, root=1), algorithm)


@pytest.mark.parametrize(("algorithm", "collective"), OFFERS)
def test_nothing_to_move_is_no_problem(algorithm: str, collective: Collective) -> None:
    """Empty vectors, and fewer elements than ranks."""
    for count in (0, 1, 2):
        if collective is not Collective.BARRIER:
            check(task(collective, 3, count), algorithm)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "doubling", "direct", "central"])
def test_delays_change_nothing(algorithm: str) -> None:
    """Whatever arrives when."""
    faults = SimulatedFaults(seed=5, delay=(0.0, 0.003))
    check(task(Collective.ALL_REDUCE, 4, 100_000), algorithm, faults=faults)


@pytest.mark.parametrize("algorithm", ["ring", "tree", "doubling", "direct", "central"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_is_summed_in_place(algorithm: str, dtype: Dtype) -> None:
    """Also those of 16 bits, which are summed wide; every rank has the same bits."""

    def action(group: Group) -> Array:
        array = (np.arange(10_001) % 7 + group.rank).astype(dtype)
        group.run(sum_call(array, group.world_size, algorithm), LIMIT)
        return array

    got = in_world(3, action)
    inputs = [(np.arange(10_001) % 7 + rank).astype(dtype) for rank in range(3)]
    work = Task.whole(Collective.ALL_REDUCE, 3, 10_001)
    wanted = verify.expected(work, inputs, Reducer.of(ReduceOp.SUM, dtype))[0]
    for one in got:
        assert isinstance(one, np.ndarray), one
        assert one.tobytes() == wanted.tobytes()


@pytest.mark.parametrize("algorithm", ["ring", "tree", "doubling", "direct", "central"])
@pytest.mark.parametrize("dtype", ["f2", "f4", BFLOAT16], ids=str)
def test_rough_sums_are_the_same_everywhere(algorithm: str, dtype: str) -> None:
    """Numbers whose sum depends on the order of addition: bit-identical, and repeatable."""
    work = Task.whole(Collective.ALL_REDUCE, 4, 50_000)
    inputs = verify.rough(work, dtype)

    def action(group: Group) -> list[bytes]:
        results = []
        for _ in range(2):
            array = inputs[group.rank].copy()
            reducer = Reducer.of(ReduceOp.MEAN, array.dtype)
            strategy = sum_call(array, 4, algorithm).strategy
            group.run(Call(work, array, array, reducer, strategy), LIMIT)
            results.append(array.tobytes())
        return results

    assert len({one for got in in_world(4, action) for one in got}) == 1  # type: ignore[union-attr]


def test_operations_follow_one_another() -> None:
    """Short and long, of all kinds, back to back, with ranks running ahead of each other."""

    def action(group: Group) -> list[int]:
        seen = []
        for number in range(60):
            count = (1, 700, 90_000)[number % 3]
            array = np.full(count, number + group.rank, "i8")
            group.run(sum_call(array, group.world_size), LIMIT)
            assert (array == array[0]).all()
            seen.append(int(array[0]))
            if number % 7 == 0:
                root = number % group.world_size
                work = Task.whole(Collective.BROADCAST, group.world_size, 5, root)
                given = np.full(5 if group.rank == root else 0, number)
                target = np.zeros(5, given.dtype)
                group.run(Call(work, given, target), LIMIT)
                assert (target == number).all()
        return seen

    got = in_world(3, action)
    assert got[0] == got[1] == got[2] == [3 * number + 3 for number in range(60)]


def test_started_operations_run_in_order() -> None:
    """Many in flight; one that is waited for queues behind them."""

    def action(group: Group) -> list[float]:
        arrays = [np.full(30_000, number + group.rank, "f4") for number in range(20)]
        works = [
            group.start(sum_call(array, group.world_size), finish=lambda a=array: float(a[0]))  # type: ignore[misc]
            for array in arrays
        ]
        last = np.full(3, 100.0 + group.rank)
        group.run(sum_call(last, group.world_size), LIMIT)
        assert all(work.done for work in works)
        return [work.wait(LIMIT) for work in works] + [float(last[0])]

    for one in in_world(3, action):
        assert one == [3.0 * number + 3 for number in range(20)] + [303.0]


def test_several_groups_work_at_once() -> None:
    """Overlapping subgroups and the whole, each on a thread of its own."""
    with ExitStack() as stack:
        backends = SimulatedBackend.create_group(3)
        for backend in backends:
            stack.enter_context(backend)
        members = {"all": [0, 1, 2], "left": [0, 1], "right": [1, 2]}
        parts = {
            name: [SubBackend(backends[rank], ranks, name=name) for rank in ranks]
            for name, ranks in members.items()
        }

        def action(group: Group) -> float:
            total = np.zeros(50_000, "f4")
            for _ in range(10):
                total[:] = group.rank + 1
                group.run(sum_call(total, group.world_size), LIMIT)
            return float(total[0])

        running = {
            name: Background(lambda part=part: on_backends(part, action))  # type: ignore[misc]
            for name, part in parts.items()
        }
        assert running["all"].result() == [6.0] * 3
        assert running["left"].result() == running["right"].result() == [3.0] * 2


def test_barriers_let_nobody_through_early() -> None:
    """Whoever has passed knows that all have come."""
    come: set[int] = set()

    def action(group: Group) -> int:
        come.add(group.rank)
        group.barrier(LIMIT)
        return len(come)

    assert in_world(4, action) == [4] * 4


def test_a_group_is_found_again() -> None:
    """Until it is closed; after that, calls are refused."""
    with SimulatedBackend.create_group(1)[0] as backend:
        group = Group.of(backend)
        assert Group.of(backend) is group
        group.close()
        group.close()
        with pytest.raises(ChannelClosed, match="has closed this group"):
            group.barrier()
        assert Group.of(backend) is not group


def test_what_an_algorithm_does_not_offer_is_refused() -> None:
    """Before anything is sent, and the group goes on."""

    def action(group: Group) -> bool:
        work = Task.blocks(Collective.SCATTER, (1, 1))
        given = np.zeros(2 if group.rank == 0 else 0)
        call = call_of(work, given, Reducer.of(ReduceOp.SUM, "f8"), group.rank, "ring")
        with pytest.raises(UnsupportedOperation):
            group.run(call, LIMIT)
        group.barrier(LIMIT)
        return True

    assert in_world(2, action) == [True, True]


def test_the_groups_thread_ends_when_there_is_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And starts again when there is."""
    monkeypatch.setattr("potluck.runtime.queueing.IDLE", 0.05)

    def action(group: Group) -> int:
        seen = []
        for _ in range(2):
            array = np.ones(4)
            group.start(sum_call(array, 1)).wait(LIMIT)
            worker = next(t for t in threading.enumerate() if t.name == "potluck-collectives")
            worker.join(LIMIT)
            seen.append(worker.is_alive())
        return seen.count(False)

    assert in_world(1, action) == [2]
