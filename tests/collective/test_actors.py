"""The parts of the machine: bounded streams, memory by coordinates, who may go on."""

import numpy as np
import pytest

from potluck.collective.actors import Actor, Memory, Rank, Receiver, Sender, Stage, Stream
from potluck.collective.machine import straight
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.schedule import Form, Place, Program, Step
from potluck.collective.task import Span

SUM = Reducer.of(ReduceOp.SUM, "i8")
HALF = Reducer.of(ReduceOp.SUM, "f2")


def rank_with(*steps: Step, piece: int = 2) -> Rank:
    """Rank 1 with eight cells and these steps."""
    program = Program(1, Span(0, 8), Span(0, 8), steps)
    memory = Memory(program, np.arange(8), SUM, world_size=3, in_place=True)
    return Rank(program, memory, SUM, piece)


def test_a_stream_keeps_order_and_its_bounds() -> None:
    """Chunks are cut as needed; the room that is left is known."""
    stream = Stream(capacity=5)
    stream.push(np.array([1, 2, 3]))
    stream.push(np.array([4, 5]))
    assert stream.room == 0
    taken = [stream.pull(most) for most in (2, 9, 9, 9)]
    assert [None if each is None else each.tolist() for each in taken] == [
        [1, 2],
        [3],
        [4, 5],
        None,
    ]
    assert stream.room == 5


def test_in_place_means_the_same_cells() -> None:
    """Input and output overlap where their coordinates do."""
    program = Program(0, Span(2, 4), Span(0, 6), ())
    memory = Memory(program, np.array([7, 8]), SUM, world_size=2, in_place=True)
    assert memory.cells(Place.OUTPUT, 2, 4).tolist() == [7, 8]
    memory.cells(Place.OUTPUT, 3, 4)[:] = 9
    assert memory.input.tolist() == [7, 9]
    apart = Memory(program, np.array([7, 8]), SUM, world_size=2)
    apart.output[:] = 0
    assert apart.input.tolist() == [7, 8]


def test_partial_values_rest_in_the_output_unless_they_are_wider() -> None:
    """Then they have memory of their own."""
    program = Program(0, Span(0, 2), Span(0, 2), ())
    same = Memory(program, np.zeros(2, "i8"), SUM, world_size=2)
    same.cells(Place.SUM, 0, 1)[:] = 5
    assert same.output[0] == 5
    wider = Memory(program, np.zeros(2, "f2"), HALF, world_size=2)
    assert wider.cells(Place.SUM, 0, 2).dtype == np.float32


def test_a_step_is_done_when_all_have_it() -> None:
    """The value must be there and be handed to every stream."""
    stage = Stage(Step(0, 8, (0,), (Form.DATA,), into=Place.OUTPUT, to=(0, 2)), SUM)
    stage.value = 6
    stage.sent = {0: 4, 2: 5}
    assert stage.done == 4
    alone = Stage(Step(0, 8, (0,), (Form.DATA,), into=Place.OUTPUT), SUM)
    assert alone.done == 0


def test_a_frontier_is_what_the_unfinished_allow() -> None:
    """A step may go as far as those it waits for; finished ones do not count any more."""
    steps = (
        Step(0, 4, (0,), (Form.DATA,), into=Place.OUTPUT),
        Step(4, 8, (0,), (Form.DATA,), into=Place.OUTPUT),
        Step(0, 8, own=Place.OUTPUT, to=(2,), reads=(0, 1)),
    )
    rank = rank_with(*steps)
    assert rank.readable(steps[2]) == 0
    rank.stages[0].value = 3
    assert rank.readable(steps[2]) == 3
    rank.stages[0].value = 4
    assert rank.readable(steps[2]) == 4
    rank.stages[1].value = 8
    assert rank.readable(steps[2]) == 8


def test_a_receiver_fills_no_more_than_the_prescribed_pieces() -> None:
    """One for a step that stores, two for one that passes on, and it takes them at once."""
    own, out = Place.INPUT, Place.OUTPUT
    for step, pieces in (
        (Step(0, 8, (0,), (Form.DATA,), own=own, into=out, final=True), 1),
        (Step(0, 8, (0,), (Form.DATA,), own=own, to=(2,)), 2),
    ):
        rank = rank_with(step)
        stream = Stream(capacity=8)
        stream.push(np.arange(8))
        receiver = Receiver(rank, 0, stream)
        receiver.combiners[rank.stages[0]] = combiner = Actor(rank)  # type: ignore[assignment]
        assert receiver.act(straight) == [combiner]
        assert receiver.act(straight) is None
        assert rank.stages[0].pulled == [2 * pieces]


def test_a_sender_waits_for_room_and_for_its_value() -> None:
    """And has nothing to do at the end."""
    rank = rank_with(Step(0, 3, own=Place.INPUT, to=(2,)))
    stream = Stream(capacity=2)
    sender = Sender(rank, 2, stream)
    assert sender.act(straight) == []
    assert sender.act(straight) is None
    stream.pull(2)
    assert sender.act(straight) == []
    stream.pull(2)
    assert sender.act(straight) is None


def test_an_actor_by_itself_can_do_nothing() -> None:
    """It is the idea of one."""
    with pytest.raises(NotImplementedError):
        Actor(rank_with()).act(straight)
