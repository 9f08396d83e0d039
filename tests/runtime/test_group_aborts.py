"""Groups that are aborted, closed or interrupted: exactly what was meant ends, on all ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from potluck import DistributedContext, SimulatedBackend, SimulatedFaults, SubBackend
from potluck.backend import simulated
from potluck.errors import Aborted, BackendUnavailable, ChannelClosed, DistributedError, Timeout
from potluck.runtime.group import Group
from potluck.runtime.work import Work
from support.groups import LIMIT, in_world, over_tcp, sum_call
from support.threads import Background, eventually, interrupted_when, signalled_when

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
    faults = SimulatedFaults(delay=(0.004, 0.005))  # 10 s for the whole array

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
            with pytest.raises(Timeout, match="still behind operations that rank 0 had started"):
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
        with interrupted_when(lambda: len(here._jobs) == 1), pytest.raises(KeyboardInterrupt):
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
