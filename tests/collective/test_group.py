"""Groups: collectives run over a backend, on every rank, and give what they should."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from potluck import DistributedContext, SimulatedBackend, SubBackend
from potluck import SimulatedFaults as potluck_SimulatedFaults
from potluck.backend import simulated
from potluck.backend.simulated import SimulatedBackend as SimulatedSimulatedBackend
from potluck.backend.simulated import SimulatedFaults
from potluck.collective.call import Call, Work
from potluck.collective.group import INTERVAL, Group, ShortSwitchInterval
from potluck.errors import (
    Aborted,
    BackendUnavailable,
    ChannelClosed,
    CollectiveMismatch,
    DistributedError,
    PeerLost,
    Timeout,
    UnsupportedOperation,
)
from potluck.schedule import verify
from potluck.schedule.reduce import BFLOAT16, DTYPES, Dtype, ReduceOp, Reducer
from potluck.schedule.task import Collective, Strategy, Task
from support.collectives import OFFERS, task
from support.groups import LIMIT, Array, call_of, in_world, on_backends, over_tcp, sum_call
from support.threads import Background, eventually, interrupted_when, signalled_when


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


@pytest.mark.parametrize(
    ("algorithm", "partners"), [("ring", 2), ("doubling", 4), ("tree", 5), ("direct", 15)]
)
def test_streams_are_opened_only_where_the_plan_needs_them(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, partners: int
) -> None:
    """In a large group a member does not connect with all others unless the algorithm does."""
    opened: dict[int, set[int]] = {rank: set() for rank in range(16)}
    open_stream = SimulatedSimulatedBackend.open_stream

    def noted(self: SimulatedBackend, rank: int, *rest: Any) -> Any:
        opened[self.rank].add(rank)
        return open_stream(self, rank, *rest)

    monkeypatch.setattr(SimulatedSimulatedBackend, "open_stream", noted)
    work = task(Collective.ALL_REDUCE, 16, 64)
    check(work, algorithm)
    assert max(map(len, opened.values())) == partners


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
    monkeypatch.setattr("potluck.collective.group.IDLE", 0.05)

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


# --------------------------------------------------------------------------------------------------
# Groups that are aborted, closed or interrupted: exactly what was meant ends, on all ranks.

World = Callable[[int, Callable[[Group], Any]], list[Any]]


def total(group: Group, count: int = 5, timeout: float = LIMIT) -> float:
    """One sum of ones: the number of ranks."""
    array = np.ones(count, "f4")
    group.run(sum_call(array, group.world_size), timeout)
    return float(array[-1])


def begin(group: Group, count: int = 5) -> Work[float]:
    """The same, started."""
    array = np.ones(count, "f4")
    return group.start(sum_call(array, group.world_size), lambda: float(array[-1]))


def outcome(action: Callable[[], float]) -> float | str:
    """What it gives, or the kind of error."""
    try:
        return action()
    except DistributedError as error:
        return type(error).__name__


def pair(stack: ExitStack) -> tuple[Group, Group]:
    """Two ranks, each with a group."""
    backends = [stack.enter_context(each) for each in SimulatedBackend.create_group(2)]
    first, second = (stack.enter_context(Group(backend)) for backend in backends)
    return first, second


# -- from a signal's handler -----------------------------------------------------------------------


@pytest.mark.parametrize("count", [5, 300_000])
def test_a_signal_s_handler_may_abort_what_it_interrupts(count: int) -> None:
    """The operation ends with the error when the handler returns; the group goes on."""
    with ExitStack() as stack:
        here, there = pair(stack)
        with (
            signalled_when(lambda: here._is_busy, lambda: here.abort("the lid was closed")),
            pytest.raises(Aborted, match="lid was closed"),
        ):
            total(here, count)
        assert outcome(lambda: total(there)) == "Aborted"
        other = Background(lambda: total(there))
        assert total(here) == other.result() == 2


def test_a_signal_s_handler_may_close_what_it_interrupts() -> None:
    """The operation ends, then the group and the backend; others hear that this rank has left."""
    ours, theirs = SimulatedBackend.create_group(2)
    context = DistributedContext(ours)
    with DistributedContext(theirs) as other:
        with (
            signalled_when(lambda: context.group._is_busy, context.close),
            pytest.raises(Aborted, match="left the group"),
        ):
            context.all_reduce(1, timeout=LIMIT)
        with pytest.raises(ChannelClosed):
            ours.post_send(b"", 1)
        for _ in range(2):
            with pytest.raises(Aborted, match="Rank 0 ended the operation: it left the group"):
                other.all_reduce(1, timeout=LIMIT)


def test_a_signal_s_handler_may_not_wait_for_itself() -> None:
    """A collective in the middle of another on the same thread is refused in words."""
    with ExitStack() as stack:
        here, there = pair(stack)
        caught: list[BaseException] = []

        def misuse() -> None:
            with pytest.raises(BackendUnavailable, match="in the middle of an operation") as found:
                here.barrier()
            caught.append(found.value)

        with signalled_when(lambda: here._is_busy, misuse):

            def come_late() -> float:
                eventually(lambda: bool(caught))
                return total(there)

            other = Background(come_late)
            assert total(here) == other.result() == 2


# -- callbacks -------------------------------------------------------------------------------------


def test_a_callback_may_use_the_group() -> None:
    """Also when other works wait for the very thread that it is called on."""

    def action(group: Group) -> list[float]:
        sums: list[float] = []
        works = [begin(group) for _ in range(3)]
        last: list[Work[float]] = []

        def more() -> None:
            last.append(begin(group))
            sums.extend([total(group), last[0].wait(LIMIT)])

        works[0].add_done_callback(more)
        eventually(lambda: len(sums) == 2)
        return [*sums, *(work.wait(LIMIT) for work in works)]

    # Whether the callback comes before or after other calls does not matter: they are all alike.
    assert in_world(2, action) == [[2.0] * 5] * 2


def test_a_callback_may_close_the_group() -> None:
    """It does not wait for the thread that it is called on."""

    def action(group: Group) -> bool:
        group.barrier(LIMIT)
        work = begin(group)
        work.add_done_callback(group.close)
        assert outcome(lambda: work.wait(LIMIT)) in {2.0, "Aborted"}
        eventually(lambda: group._worker is None)
        return group.is_closed

    assert in_world(2, action) == [True, True]


# -- which calls end -------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [1, 3])
def test_an_abort_ends_exactly_what_was_started(many: int) -> None:
    """On ranks that started more, the rest goes on, with what the first rank calls next."""
    aborted = threading.Event()

    def action(group: Group) -> list[float | str]:
        if group.rank == 0:
            works = [begin(group) for _ in range(many)]
            eventually(lambda: group._is_busy)
            group.abort("enough")
            aborted.set()
            works += [begin(group) for _ in range(5 - many)]
        else:
            if group.rank == 2:
                aborted.wait(LIMIT)
            works = [begin(group) for _ in range(5)]
        return [outcome(lambda work=work: work.wait(LIMIT)) for work in works]  # type: ignore[misc]

    wanted = ["Aborted"] * many + [3.0] * (5 - many)
    assert in_world(3, action) == [wanted] * 3


@pytest.mark.parametrize("calls_before", [0, 1])
def test_an_abort_between_operations_is_heard_once(calls_before: int) -> None:
    """By all other ranks, in their next call; also of a rank that has never made one."""
    aborted = threading.Event()

    def action(group: Group) -> list[float | str]:
        sums: list[float | str] = [total(group) for _ in range(calls_before)]
        if group.rank == 1:
            group.abort("stop")
            group.abort("really")
            aborted.set()
        else:
            aborted.wait(LIMIT)
            sums.append(outcome(lambda: total(group)))
        return [*sums, total(group), total(group)]

    sums: list[float | str] = [3.0] * calls_before
    heard, aborter = [*sums, "Aborted", 3.0, 3.0], [*sums, 3.0, 3.0]
    assert in_world(3, action) == [heard, aborter, heard]


def test_ranks_that_abort_at_the_same_time_go_on_together() -> None:
    """Although one of them had started more: its calls count."""
    ready, first, both = threading.Barrier(2), threading.Event(), threading.Barrier(3)

    def action(group: Group) -> list[float | str]:
        works = [begin(group) for _ in range(1 + 2 * group.rank)] if group.rank < 2 else []
        if group.rank < 2:
            eventually(lambda: group._is_busy)
            ready.wait(LIMIT)
            if group.rank == 1:
                first.wait(LIMIT)  # an abort after its calls have ended would be another one
            group.abort("both")
            first.set()
            eventually(lambda: works[0].done)  # before, rank 2 might complete it
        both.wait(LIMIT)
        works += [begin(group) for _ in range(4 - len(works))]
        return [outcome(lambda work=work: work.wait(LIMIT)) for work in works]  # type: ignore[misc]

    assert in_world(3, action) == [["Aborted"] * 3 + [3.0]] * 3


def test_an_abort_of_what_another_has_just_ended_ends_nothing_more() -> None:
    """It came while the call was under way, and all ranks know that it has ended."""
    ended = threading.Barrier(3)

    def action(group: Group) -> list[float | str]:
        backend = group.backend
        abandon = backend.abandon_streams

        def abort_as_well(is_over: Callable[[str], bool]) -> None:
            group.abort("late")  # after the others were told, before the turn is over
            abandon(is_over)

        if group.rank == 2:  # without it nobody gets any further
            ended.wait(LIMIT)
            return [outcome(lambda: total(group)) for _ in range(3)]
        if group.rank == 0:
            vars(backend)["abandon_streams"] = abort_as_well
        work = begin(group)
        if group.rank == 1:
            eventually(lambda: group._is_busy)
            group.abort("early")
        heard = outcome(lambda: work.wait(LIMIT))
        vars(backend).pop("abandon_streams", None)
        ended.wait(LIMIT)
        return [heard, outcome(lambda: total(group)), outcome(lambda: total(group))]

    assert in_world(3, action) == [["Aborted", 3.0, 3.0]] * 3


def test_a_group_that_one_rank_left_fails_at_once_for_ever() -> None:
    """Nobody waits for a rank that will not come."""
    left = threading.Event()

    def action(group: Group) -> list[float | str]:
        if group.rank == 0:
            group.close()
            left.set()
            return ["Aborted"] * 3
        left.wait(LIMIT)
        return [outcome(lambda: total(group)) for _ in range(3)]

    assert in_world(2, action) == [["Aborted"] * 3] * 2


@pytest.mark.parametrize("world", [in_world, over_tcp])
def test_a_group_of_the_same_name_is_another(world: World) -> None:
    """Who has left the first and waits in the second does not meet those still in the first."""
    waiting = threading.Event()

    def action(whole: Group) -> list[float | str]:
        sums: list[float | str] = []
        for _ in range(3):
            with Group(SubBackend(whole.backend, [0, 1], name="pair")) as group:
                if whole.rank == 0:
                    call = Background(lambda group=group: outcome(lambda: total(group)))  # type: ignore[misc]
                    eventually(lambda group=group: group._is_busy)  # type: ignore[misc]
                    waiting.set()
                    sums.append(call.result())
                    waiting.clear()
                else:
                    waiting.wait(LIMIT)
            with Group(SubBackend(whole.backend, [0, 1], name="pair")) as group:
                sums.append(total(group))
                sums.append(total(group))
        return sums

    once = ["Aborted", 2.0, 2.0]
    assert world(2, action) == [once * 3, [2.0] * 6]


# -- who gives up ----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [in_world, over_tcp])
@pytest.mark.parametrize("count", [5, 20_000])
def test_nobody_succeeds_with_what_was_left_behind(count: int, world: World) -> None:
    """Of two ranks, one comes when the other has given up: all its bytes are there."""
    gone = threading.Event()

    def action(group: Group) -> list[float | str]:
        sums: list[float | str] = [total(group, count)]
        if group.rank == 1:
            gone.wait(LIMIT)
        sums.append(outcome(lambda: total(group, count, 0.1 if group.rank == 0 else LIMIT)))
        gone.set()
        return [*sums, total(group, count)]

    assert world(2, action) == [[2.0, "Timeout", 2.0]] * 2


@pytest.mark.parametrize("ends", ["Timeout", "Aborted"])
def test_an_operation_that_moves_slowly_ends_when_it_must(
    ends: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At its limit, or when it is aborted, although something arrives all the time."""
    monkeypatch.setattr(simulated, "STREAM_CAPACITY", 4096)
    faults = potluck_SimulatedFaults(delay=(0.004, 0.005))  # 10 s for the whole array

    def action(group: Group) -> str:
        array = np.ones(2_000_000, "f4")
        call, limit = sum_call(array, 2, "ring"), 0.5 if ends == "Timeout" else LIMIT
        running = Background(lambda: group.run(call, limit))
        if ends == "Aborted" and group.rank == 0:
            eventually(lambda: array[0] == 2)
            group.abort("this takes too long")
        with pytest.raises((Timeout, Aborted)) as caught:
            running.result(4)
        return type(caught.value).__name__

    assert in_world(2, action, faults=faults) == [ends, ends]


def test_a_limit_counts_from_the_call() -> None:
    """Not from when those before are done; the call then ends for the others as well."""
    gone = threading.Event()

    def action(group: Group) -> list[float | str]:
        first = begin(group) if group.rank == 0 else None
        if group.rank == 0:
            with pytest.raises(Timeout, match="still waiting for earlier operations of rank 0"):
                total(group, timeout=0.1)
            gone.set()
        gone.wait(LIMIT)
        first = first or begin(group)
        sums: list[float | str] = [first.wait(LIMIT)]
        sums.append(outcome(lambda: total(group)) if group.rank else "Timeout")
        return [*sums, total(group)]

    assert in_world(2, action) == [[2.0, "Timeout", 2.0]] * 2


def test_ctrl_c_withdraws_a_call_that_waits_for_its_turn() -> None:
    """Its array is the caller's again, and is never touched; the others hear of it."""
    with ExitStack() as stack:
        here, there = pair(stack)
        first, array = begin(here), np.ones(3)
        eventually(lambda: here._is_busy)
        with interrupted_when(lambda: len(here._queue) == 1), pytest.raises(KeyboardInterrupt):
            here.run(sum_call(array, 2), LIMIT)
        other = Background(lambda: [outcome(lambda: total(there)) for _ in range(3)])
        assert first.wait(LIMIT) == 2
        assert total(here) == 2
        assert other.result() == [2.0, "Aborted", 2.0]
        assert (array == 1).all()


def test_ctrl_c_aborts_a_queued_call_that_runs() -> None:
    """It ends before the interrupt goes on, so the array is free."""
    with ExitStack() as stack:
        here, there = pair(stack)
        first = begin(here)
        eventually(lambda: here._is_busy)
        helper = Background(lambda: total(there))

        def is_running() -> bool:
            return first.done and here._is_busy

        with interrupted_when(is_running), pytest.raises(KeyboardInterrupt):
            total(here)
        assert not here._is_busy
        assert helper.result() == first.wait(LIMIT) == 2
        assert outcome(lambda: total(there)) == "Aborted"
        other = Background(lambda: total(there))
        assert total(here) == other.result() == 2


# --------------------------------------------------------------------------------------------------
# Groups when something goes wrong: every rank hears the same, nobody hangs, and it goes on.

SHORT, LONG = 5, 300_000
"""Elements of an operation that is done from top to bottom, and of one that is pumped."""


def all_reduce(
    count: int, dtype: str = "f4", op: ReduceOp = ReduceOp.SUM, strategy: str | None = None
) -> Callable[[Group], None]:
    """One all-reduce."""

    def act(group: Group) -> None:
        array = np.ones(count, dtype)
        task = Task.whole(Collective.ALL_REDUCE, group.world_size, count)
        chosen = Strategy(strategy) if strategy else None
        group.run(Call(task, array, array, Reducer.of(op, dtype), chosen), LIMIT)

    return act


def broadcast(count: int, root: int) -> Callable[[Group], None]:
    """One broadcast."""

    def act(group: Group) -> None:
        task = Task.whole(Collective.BROADCAST, group.world_size, count, root)
        given = np.ones(count if group.rank == root else 0, "f4")
        group.run(Call(task, given, np.zeros(count, "f4")), LIMIT)

    return act


def gather(count: int, root: int) -> Callable[[Group], None]:
    """One gathering."""

    def act(group: Group) -> None:
        size = group.world_size
        task = Task.blocks(Collective.GATHER, (count,) * size, root)
        target = np.zeros(count * size if group.rank == root else 0, "f4")
        group.run(Call(task, np.ones(count, "f4"), target), LIMIT)

    return act


CALLS = {
    "another collective": (all_reduce(SHORT), broadcast(SHORT, 0)),
    "another reduction": (all_reduce(SHORT), all_reduce(SHORT, op=ReduceOp.MAX)),
    "another type": (all_reduce(SHORT), all_reduce(SHORT, "i4")),
    "another count": (all_reduce(SHORT), all_reduce(SHORT + 1)),
    "another count, long": (all_reduce(LONG), all_reduce(LONG + 1)),
    "short and long": (all_reduce(SHORT), all_reduce(LONG)),
    "nothing and something": (all_reduce(0), all_reduce(SHORT)),
    "another root": (broadcast(SHORT, 0), broadcast(SHORT, 1)),
    "another root, long": (broadcast(LONG, 0), broadcast(LONG, 2)),
    "another root to gather": (gather(SHORT, 0), gather(SHORT, 2)),
    "another strategy": (all_reduce(SHORT), all_reduce(SHORT, strategy="ring")),
}


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("case", CALLS)
def test_ranks_that_disagree_all_hear_of_it(case: str, odd: int) -> None:
    """Each gets an error that names both sides; nobody returns success, nobody hangs."""
    usual, other = CALLS[case]

    def action(group: Group) -> None:
        (other if group.rank == odd else usual)(group)

    for rank, got in enumerate(in_world(4, action)):
        assert isinstance(got, CollectiveMismatch), (rank, got)
        assert "called" in str(got)
        assert f"rank {odd}" in str(got)


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("case", CALLS)
def test_where_ranks_ask_around_most_of_them_know_the_odd_one(case: str, odd: int) -> None:
    """All but the odd one itself, or some of them: then no other rank is named."""
    usual, other = CALLS[case]

    def action(group: Group) -> None:
        group.ask_around()
        all_reduce(SHORT)(group)
        (other if group.rank == odd else usual)(group)

    found: list[Any] = in_world(4, action)
    assert all(isinstance(got, CollectiveMismatch) for got in found)
    named = [got.ballot.odd_one() for got in found]
    assert named.pop(odd) is None
    assert not found[odd].ballot.has_most
    assert {each and each[0] for each in named} <= {odd, None}
    assert any(named)


@pytest.mark.parametrize("size", [2, 4])
def test_without_a_majority_no_rank_is_the_odd_one(size: int) -> None:
    """One against one, and two against two."""

    def action(group: Group) -> None:
        group.ask_around()
        all_reduce(SHORT + group.rank % 2)(group)

    for got in in_world(size, action):
        assert isinstance(got, CollectiveMismatch)
        assert got.ballot.odd_one() is None
        assert not got.ballot.has_most


@pytest.mark.parametrize("odd", [0, 2])
def test_a_rank_that_is_a_call_ahead_is_named(odd: int) -> None:
    """It left out a call that the others make."""

    def action(group: Group) -> None:
        all_reduce(SHORT)(group)
        if group.rank != odd:
            broadcast(SHORT, 1)(group)
        all_reduce(SHORT)(group)

    for got in in_world(3, action):
        assert isinstance(got, CollectiveMismatch)


@pytest.mark.parametrize("count", [SHORT, LONG])
@pytest.mark.parametrize("strategy", ["ring", "tree", "doubling", "direct", "central"])
def test_a_rank_that_vanishes_is_named_by_all(strategy: str, count: int) -> None:
    """Also by those who have no stream to it."""

    def action(group: Group) -> None:
        all_reduce(count, strategy=strategy)(group)
        if group.rank == 2:
            assert isinstance(group.backend, SimulatedSimulatedBackend)
            group.backend.lose()
            return
        all_reduce(count, strategy=strategy)(group)

    got = in_world(4, action)
    for rank in (0, 1, 3):
        error = got[rank]
        assert isinstance(error, PeerLost), error
        assert error.rank == 2


@pytest.mark.parametrize("writes", [3, 8, 20, 45])
def test_a_rank_that_vanishes_in_the_middle_leaves_nobody_behind(writes: int) -> None:
    """After any number of writes; the others hear of it, or had what they needed."""

    def action(group: Group) -> str:
        for _ in range(4):
            all_reduce(LONG)(group)
        return "done"

    got = in_world(3, action, faults=SimulatedFaults(lose={1: writes}))
    for rank in (0, 2):
        error = got[rank]
        assert isinstance(error, PeerLost), error
        assert error.rank == 1


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_a_rank_that_does_not_come_is_named(count: int) -> None:
    """At the deadline, with the call and who was missing."""
    gone = threading.Event()

    def action(group: Group) -> None:
        if group.rank == 1:
            gone.wait(LIMIT)
            return
        array = np.ones(count, "f4")
        try:
            group.run(sum_call(array, group.world_size), 0.3)
        finally:
            gone.set()

    got = in_world(2, action)
    error = got[0]
    assert isinstance(error, Timeout)
    assert error.missing == (1,)
    assert "rank 1" in str(error).lower()


@pytest.mark.parametrize("world_size", [3, 4, 5])
@pytest.mark.parametrize("count", [0, SHORT, LONG])
def test_only_who_does_not_come_is_named(world_size: int, count: int) -> None:
    """On all ranks, and not somebody who waits for it as well."""
    absent, gone = world_size - 1, threading.Barrier(world_size)

    def action(group: Group) -> tuple[int, ...] | None:
        missing: tuple[int, ...] | None = None
        if group.rank != absent:
            try:
                group.run(sum_call(np.ones(count, "f4"), world_size), 0.4)
            except Timeout as error:
                missing = tuple(error.missing)
        gone.wait(LIMIT)
        return missing

    assert in_world(world_size, action) == [(absent,)] * absent + [None]


@pytest.mark.parametrize("count", [SHORT, LONG])
def test_an_abort_ends_the_operation_on_all_ranks(count: int) -> None:
    """From another thread, at once; afterwards the group is as good as new."""
    aborted = threading.Event()

    def action(group: Group) -> float:
        array = np.ones(count, "f4")
        if group.rank == 0:
            waiting = Background(lambda: group.run(sum_call(array, 3), LIMIT))
            eventually(lambda: group._is_busy)
            group.abort("somebody closed the lid")
            aborted.set()
            with pytest.raises(Aborted, match="closed the lid"):
                waiting.result()
        else:
            if group.rank == 2:
                aborted.wait(LIMIT)  # it comes when all is over
            with pytest.raises(Aborted, match="closed the lid"):
                group.run(sum_call(array, 3), LIMIT)
        array = np.ones(count, "f4")
        group.run(sum_call(array, 3), LIMIT)
        return float(array[0])

    assert in_world(3, action) == [3.0] * 3


def test_what_was_started_is_aborted_as_well() -> None:
    """All that waits in line fails with the same error."""
    aborted = threading.Event()

    def action(group: Group) -> list[str]:
        if group.rank == 1:
            aborted.wait(LIMIT)
            with pytest.raises(Aborted):
                group.barrier(LIMIT)
            return ["Aborted"] * 3
        works: list[Work[None]] = [group.start(sum_call(np.ones(SHORT), 2)) for _ in range(3)]
        eventually(lambda: group._is_busy)
        group.abort("enough")
        aborted.set()
        kinds = []
        for work in works:
            with pytest.raises(DistributedError) as caught:
                work.wait(LIMIT)
            kinds.append(type(caught.value).__name__)
        return kinds

    assert in_world(2, action) == [["Aborted"] * 3] * 2


def test_a_group_that_is_left_says_so() -> None:
    """Those who still call are told that this rank has left, not that it died."""

    def action(group: Group) -> None:
        group.barrier(LIMIT)
        if group.rank == 0:
            return
        all_reduce(SHORT)(group)

    error = in_world(2, action)[1]
    assert isinstance(error, Aborted)
    assert "left the group" in str(error)


def test_errors_of_different_ranks_do_not_mix_epochs() -> None:
    """After a mismatch all ranks go on together, several times."""

    def action(group: Group) -> list[float]:
        sums = []
        for number in range(5):
            with pytest.raises(CollectiveMismatch):
                (all_reduce(SHORT) if group.rank != number % 3 else broadcast(SHORT, 0))(group)
            array = np.full(LONG, group.rank + 1.0)
            group.run(sum_call(array, group.world_size), LIMIT)
            sums.append(float(array[-1]))
        return sums

    assert in_world(3, action) == [[6.0] * 5] * 3


def test_closing_the_backend_ends_an_operation() -> None:
    """Ours, while a thread waits in it."""
    backends = SimulatedSimulatedBackend.create_group(2)

    def action(group: Group) -> None:
        if group.rank == 1:
            backends[0].close()
            return
        group.run(sum_call(np.ones(SHORT), 2), LIMIT)

    error = on_backends(backends, action)[0]
    assert isinstance(error, DistributedError)
    backends[1].close()


# --------------------------------------------------------------------------------------------------
# Groups under fire: ranks abort, time out and leave at random while others go on.
#
# What a call combines is written into its data: every rank adds the number of its own call in a
# cell of its own.  So a result that mixes calls, or misses a rank, shows.

SIZE = 3
CHAOS = 0.6
"""Seconds of it."""

CALM = 12
"""Calls after it: those that are yet to hear of a failure fail, and the last ones succeed."""

StressWorld = Callable[[int, Callable[[Group], Any]], list[Any]]
Mix = tuple[int, ...]


class Caller:
    """One rank, which makes calls in one group and keeps what came of them."""

    def __init__(self, group: Group, count: int, seed: str) -> None:
        self.group = group
        self._count = count
        self.random = random.Random(f"{seed}/{group.rank}")
        self.mixes: list[Mix] = []
        self.works: list[tuple[int, Work[Any]]] = []
        self._number = 0

    def _cells(self) -> Any:
        self._number += 1
        cells = np.ones(self._count, "i8")
        cells[:SIZE] = 0
        cells[self.group.rank] = self._number
        return cells

    def _note(self, number: int, cells: Any) -> None:
        mix = tuple(cells[:SIZE].tolist())
        assert mix[self.group.rank] == number, "the call of another was taken for ours"
        assert (cells[SIZE:] == SIZE).all(), "a rank is missing, or counted twice"
        self.mixes.append(mix)

    def run(self, timeout: float) -> bool:
        """A blocking call; whether it went well."""
        cells = self._cells()
        number = self._number
        try:
            self.group.run(sum_call(cells, SIZE), timeout)
        except (Aborted, Timeout):
            return False
        self._note(number, cells)
        return True

    def start(self) -> None:
        """One that goes on by itself, and now and then has a callback that aborts."""
        cells = self._cells()
        work = self.group.start(sum_call(cells, SIZE), lambda: cells)
        if not self.random.randrange(8):
            work.add_done_callback(lambda: self.group.abort("from a callback"))
        self.works.append((self._number, work))

    def collect(self) -> None:
        """What has come of those that were started."""
        for number, work in self.works:
            try:
                cells = work.wait(LIMIT)
            except (Aborted, Timeout):
                continue
            self._note(number, cells)
        self.works.clear()

    def misbehave(self, until: float) -> None:
        """Call, abort and dawdle."""
        while time.monotonic() < until:
            match self.random.randrange(20):
                case 0:
                    self.group.abort("at random")
                case 1 | 2 | 3 | 4 | 5 | 6:
                    self.start()
                case 7 | 8:
                    threading.Event().wait(self.random.uniform(0, 0.03))
                case 9:
                    self.run(self.random.uniform(0, 0.05))
                case _:
                    self.run(LIMIT if self.random.randrange(3) else 0.1)

    def settle(self, last: int) -> list[bool]:
        """Call until a certain one; which of them went well."""
        fine = []
        while self.group._calls < last:
            fine.append(self.run(LIMIT))
        self.collect()
        return fine


def check_mixes(callers: list[Caller]) -> None:
    """Whoever took part in a call that went well somewhere took part in no other."""
    mixes = {mix for caller in callers for mix in caller.mixes}
    for rank in range(SIZE):
        numbers = [mix[rank] for mix in mixes]
        assert len(numbers) == len(set(numbers)), "one call was part of two results"


def use_subgroups(group: Group, seed: str) -> int:
    """Make groups, use them for a while and leave them, while others still call."""
    choice, done = random.Random(f"{seed}/{group.rank}"), 0
    for number in range(6):
        sub = SubBackend(group.backend, range(SIZE), name=f"{number % 2}")
        with Group(sub) as part:
            try:
                for _ in range(choice.randrange(12)):
                    cells = np.full(1, group.rank + 1)
                    part.run(sum_call(cells, SIZE), LIMIT)
                    assert (cells == SIZE * (SIZE + 1) // 2).all()
                    done += 1
            except DistributedError as error:
                assert isinstance(error, Aborted), error  # noqa: PT017 - not another one
        sub.close()
    return done


@pytest.mark.parametrize("count", [SIZE + 1, 20_000])
@pytest.mark.parametrize("world", [in_world, over_tcp])
def test_nothing_is_mixed_up_and_nobody_hangs(world: StressWorld, count: int) -> None:
    """While every rank does as it pleases; afterwards they go on as if nothing had been.

    The seed follows from that of the test run, so the same choices can be made again.
    """
    seed = str(random.randrange(1 << 32))
    meeting, callers = threading.Barrier(SIZE), [None] * SIZE
    calls: list[int] = []
    ended: set[int] = set()
    until = time.monotonic() + CHAOS

    def action(group: Group) -> list[bool]:
        caller = callers[group.rank] = Caller(group, count, seed)  # type: ignore[call-overload]
        meddling = random.Random(f"{seed}/{group.rank}/meddling")

        def meddle() -> None:
            while time.monotonic() < until:
                threading.Event().wait(meddling.uniform(0, 0.2))
                group.abort("from another thread")

        helpers: list[Background[Any]] = [
            Background(meddle),
            Background(lambda: use_subgroups(group, seed)),
        ]
        caller.misbehave(until)
        while len(ended) < SIZE:  # some are still in a call, and need us there
            caller.run(0.05)
            if all(helper.ended for helper in helpers):
                ended.add(group.rank)
        for helper in helpers:
            helper.result()
        calls.append(group._calls)
        meeting.wait(LIMIT)
        return caller.settle(max(calls) + CALM)

    results = world(SIZE, action)
    for fine in results:
        assert isinstance(fine, list), (seed, fine)
        assert fine[-CALM // 2 :] == [True] * (CALM // 2), seed
    check_mixes(callers)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# The switch interval is short while somebody needs it so, and as it was afterwards.


def test_the_last_one_out_restores_the_interval() -> None:
    """Whatever the order in which threads come and go."""
    usual, brisk = sys.getswitchinterval(), ShortSwitchInterval()
    inside, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with brisk:
            inside.set()
            leave.wait(10)

    other = threading.Thread(target=stay)
    with brisk:
        other.start()
        inside.wait(10)
        assert sys.getswitchinterval() == pytest.approx(INTERVAL)
    assert sys.getswitchinterval() == pytest.approx(INTERVAL)
    leave.set()
    other.join()
    assert sys.getswitchinterval() == pytest.approx(usual)


def test_an_interval_that_is_shorter_already_stays() -> None:
    """Somebody wanted it so."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(INTERVAL / 10)
    try:
        with ShortSwitchInterval():
            assert sys.getswitchinterval() == pytest.approx(INTERVAL / 10)
    finally:
        sys.setswitchinterval(usual)
