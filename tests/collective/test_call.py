"""Requests: what a user's call means in numbers and memory."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.arrays.adapters import as_buffer
from potluck.arrays.base import Access
from potluck.collective.call import (
    CallSite,
    Work,
    read_op,
    read_strategy,
    reducer_for,
    request,
    rows_for,
    rows_of,
    shape_with,
)
from potluck.errors import PeerLost, Timeout
from potluck.schedule.reduce import ReduceOp
from potluck.schedule.task import AllReduceStrategy, Collective, Task
from support.threads import Background


@pytest.mark.parametrize("op", ReduceOp)
def test_every_reduction_has_a_name(op: ReduceOp) -> None:
    """In any case, and as an attribute of somebody else's list."""
    assert read_op(op) is read_op(op.value) is read_op(op.value.upper()) is op
    assert read_op(f"ReduceOp.{op.value.upper()}") is op


def test_a_name_that_is_none_is_refused_with_the_list() -> None:
    """So that a typing error is mended at once."""
    with pytest.raises(ValueError, match="'summ' is not a reduction: use one of sum, mean"):
        read_op("summ")


def test_what_is_no_name_is_refused_as_clearly() -> None:
    """Whatever it is, also what cannot be looked up."""
    array = as_buffer(np.ones(2), Access.READ)
    wrong: list[Any] = [5, None, ["sum"], {}]
    for each in wrong:
        with pytest.raises(ValueError, match="is not a reduction: use one of sum"):
            reducer_for(each, array)
    with pytest.raises(TypeError, match="such as 'ring' or one of AllReduceStrategy, not 5"):
        read_strategy(AllReduceStrategy, 5)  # type: ignore[arg-type]


def test_a_strategy_is_named_given_or_left_open() -> None:
    """None leaves it to the group."""
    assert read_strategy(AllReduceStrategy, None) is None
    assert read_strategy(AllReduceStrategy, "ring") is AllReduceStrategy.RING
    assert read_strategy(AllReduceStrategy, AllReduceStrategy.TREE) is AllReduceStrategy.TREE


@given(st.integers(0, 1000), st.integers(1, 70))
def test_rows_are_cut_like_numpy_does(rows: int, parts: int) -> None:
    """Parts differ by at most one, larger ones first."""
    expected = [len(part) for part in np.array_split(np.empty(rows), parts)]
    assert rows_for(rows, parts) == expected


@pytest.mark.parametrize(
    ("shape", "rows", "row"), [((), 1, 1), ((4,), 4, 1), ((4, 2, 3), 4, 6), ((0, 5), 0, 5)]
)
def test_rows_are_cells_of_the_first_dimension(shape: tuple[int, ...], rows: int, row: int) -> None:
    """A single number is one row of one element."""
    buffer = as_buffer(np.zeros(shape), Access.READ)
    assert rows_of(buffer) == (rows, row)
    assert shape_with(7, buffer) == (7, *shape[1:])


def test_the_larger_side_counts() -> None:
    """For metrics: an all-gather processes what it gives, not only what it takes."""
    place, task = CallSite(0, 2), Task.blocks(Collective.ALL_GATHER, (3, 3))
    made = request(place, task, (np.zeros(3), np.zeros(6)), lambda: None)
    assert made.nbytes == 48
    assert made.finish() is None


TASKS = st.sampled_from(
    [
        Task.whole(Collective.ALL_REDUCE, 3, 6),
        Task.blocks(Collective.ALL_GATHER, (1, 2, 3)),
        Task.blocks(Collective.REDUCE_SCATTER, (2, 0, 4)),
        Task.exchange([[1, 2, 0], [2, 1, 1], [0, 0, 3]]),
    ]
)


@given(TASKS, st.integers(0, 2), st.integers(0, 12), st.integers(0, 12))
def test_a_cell_is_shared_only_with_itself(task: Task, rank: int, first: int, second: int) -> None:
    """Where input and output overlap in another way, the input is copied; else it never is."""
    memory: Any = np.arange(32)
    inside, outside = task.input(rank), task.output(rank)
    source = memory[first : first + inside.length]
    target = memory[second : second + outside.length]
    call = request(CallSite(rank, 3), task, (source, target), lambda: None).call
    assert call.source.tolist() == source.tolist()
    sources = {first + n: inside.start + n for n in range(inside.length)}
    targets = {second + n: outside.start + n for n in range(outside.length)}
    shared = sources.keys() & targets.keys()
    harmless = task.in_place and all(sources[cell] == targets[cell] for cell in shared)
    is_copy = source.size > 0 and not np.shares_memory(call.source, source)
    assert is_copy == bool(shared and not harmless)


# --------------------------------------------------------------------------------------------------
# Work: waiting for something that another thread does.


def test_waiting_returns_the_result() -> None:
    """On any number of threads."""
    work: Work[int] = Work()
    waiting = [Background(lambda: work.wait(10)) for _ in range(3)]
    assert not work.done
    work.succeed(7)
    assert [one.result() for one in waiting] == [7, 7, 7]
    assert work.done
    assert work.result() == 7
    assert work.exception() is None


def test_waiting_raises_what_went_wrong() -> None:
    """Each who asks gets an error of its own: tracebacks do not pile up."""
    work: Work[int] = Work()
    work.fail(PeerLost("Rank 1 is gone", rank=1))
    caught = []
    for _ in range(2):
        with pytest.raises(PeerLost, match="Rank 1 is gone") as found:
            work.wait()
        caught.append(found.value)
    assert caught[0] is not caught[1]
    assert isinstance(work.exception(), PeerLost)


def test_errors_of_others_are_raised_as_they_are() -> None:
    """Also those that are not ours."""
    work: Work[int] = Work()
    error = KeyError("x")
    work.fail(error)
    with pytest.raises(KeyError) as found:
        work.result()
    assert found.value is error


def test_what_is_not_done_yet_says_so() -> None:
    """It goes on, and can be waited for again."""
    work: Work[str] = Work(lambda: "The sum")
    with pytest.raises(Timeout, match=r"The sum timed out after 0\.01 s"):
        work.wait(0.01)
    with pytest.raises(Timeout, match="The sum is not done yet"):
        work.result()
    with pytest.raises(Timeout, match="not done yet"):
        work.exception()
    work.succeed("done")
    assert work.wait(0) == "done"


def test_callbacks_are_called_once() -> None:
    """Those that come late, at once."""
    work: Work[None] = Work()
    called: list[str] = []
    work.add_done_callback(lambda: called.append("early"))
    work.succeed(None)
    work.add_done_callback(lambda: called.append("late"))
    assert called == ["early", "late"]


def test_coroutines_await_it_without_blocking() -> None:
    """The loop goes on meanwhile."""
    work: Work[int] = Work()
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while not work.done:
            ticks += 1
            if ticks == 3:
                threading.Thread(target=work.succeed, args=(5,)).start()
            await asyncio.sleep(0.001)

    async def both() -> int:
        ticking = asyncio.create_task(tick())
        result = await work
        await ticking
        return result

    assert asyncio.run(both()) == 5
    assert ticks >= 3


def test_a_cancelled_coroutine_does_not_disturb_the_work() -> None:
    """It ends well although nobody awaits it any more."""
    work: Work[int] = Work()

    async def give_up() -> None:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(_awaiting(work), 0.01)
        work.succeed(1)
        await asyncio.sleep(0.01)

    asyncio.run(give_up())
    assert work.result() == 1


async def _awaiting(work: Work[int]) -> int:
    return await work


def test_a_callback_that_fails_disturbs_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """The others are called, and whoever ended the work goes on."""
    work: Work[None] = Work(lambda: "The sum")
    called: list[str] = []

    def fail() -> None:
        raise KeyError("a fault of its owner")

    work.add_done_callback(fail)
    work.add_done_callback(lambda: called.append("next"))
    work.succeed(None)
    assert called == ["next"]
    assert "A callback of The sum failed" in caplog.text
