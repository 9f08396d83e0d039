"""The machine plays a schedule with the least room, in any order, and notices a deadlock."""

from collections.abc import Callable

import numpy as np
import pytest

from potluck.collective import registry, verify
from potluck.collective.machine import Deadlock, Limits, Machine, straight
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.schedule import Draft, Form, Place, Program, Schedule, Step
from potluck.collective.task import Collective, Layout, Span, Task
from support.collectives import dice

SUM = Reducer.of(ReduceOp.SUM, "i8")


def planted(task: Task, write: Callable[[Draft, int], None]) -> Schedule:
    """A schedule whose programs a test writes by hand."""

    def maker(rank: int) -> Program:
        draft = Draft.of(task, rank)
        write(draft, rank)
        return draft.finish()

    return Schedule(task, Layout.plain(task.world_size), "planted", maker)


def test_the_same_dice_play_the_same_game() -> None:
    """What happened can be replayed from its seed; other dice end in the same state."""
    task = Task.whole(Collective.ALL_REDUCE, 3, 20)
    schedule = registry.schedule("ring", task)
    inputs = verify.distinct(task)
    throws: list[list[int]] = []
    outputs = []
    for seed in (1, 1, 2):
        seen: list[int] = []
        fall = dice(seed)

        def watched(sides: int, fall: Callable[[int], int] = fall, seen: list[int] = seen) -> int:
            seen.append(fall(sides))
            return seen[-1]

        outputs.append(verify.run(schedule, inputs, SUM, limits=Limits(7, 5), dice=watched))
        throws.append(seen)
    assert throws[0] == throws[1] != throws[2]
    np.testing.assert_array_equal(outputs[0], outputs[2])


def test_two_that_wait_for_each_other_are_a_deadlock() -> None:
    """Each stores what the other passes on: nobody begins."""
    task = Task.whole(Collective.BROADCAST, 3, 4)

    def write(draft: Draft, rank: int) -> None:
        if rank:
            draft.store(Span(0, 4), source=3 - rank, to=(3 - rank,))

    inputs = [np.arange(4), np.empty(0, "i8"), np.empty(0, "i8")]
    machine = Machine(planted(task, write), inputs, SUM, limits=Limits(), in_place=False)
    with pytest.raises(Deadlock, match=r"rank 1 in step 0 at 0.*rank 2 in step 0 at 0"):
        machine.run(straight)


def test_a_rank_that_is_never_fed_is_a_deadlock() -> None:
    """It waits for what nobody sends."""
    task = Task.whole(Collective.BROADCAST, 2, 4)

    def write(draft: Draft, rank: int) -> None:
        if rank:
            draft.store(Span(0, 4), source=0)

    with pytest.raises(Deadlock, match="rank 1"):
        verify.run(planted(task, write), [np.arange(4), np.empty(0, "i8")], SUM)


def test_a_relay_that_only_moves_holds_what_it_passes_on() -> None:
    """It needs no memory of its own beside the staged pieces."""
    task = Task.whole(Collective.REDUCE, 3, 5, root=2)

    def write(draft: Draft, rank: int) -> None:
        if rank == 0:
            draft.send(Span(0, 5), to=(1,))
        elif rank == 1:
            draft.add(Step(0, 5, (0,), (Form.DATA,), to=(2,)))
        else:
            step = Step(0, 5, (1,), (Form.DATA,), own=Place.INPUT, into=Place.OUTPUT, final=True)
            draft.add(step)

    inputs = [np.arange(5), np.arange(5) * 100, np.arange(5) * 10]
    outputs = verify.run(planted(task, write), inputs, SUM)
    assert outputs[2].tolist() == [0, 11, 22, 33, 44]
    assert outputs[1].tolist() == []


def test_what_is_not_written_is_garbage() -> None:
    """A forgotten cell shows: memory does not begin as zeros."""
    task = Task.whole(Collective.BROADCAST, 2, 2)

    def write(draft: Draft, rank: int) -> None:
        if rank == 0:
            draft.send(Span(0, 1), to=(1,))
        else:
            draft.store(Span(0, 1), source=0)

    outputs = verify.run(planted(task, write), [np.zeros(2, "i8"), np.empty(0, "i8")], SUM)
    assert outputs[1][0] == 0
    assert outputs[1][1] != 0
