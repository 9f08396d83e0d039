"""The parts of the machine: bounded streams, memory by coordinates, who may go on."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.schedule import planner, verify
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.schedule import Draft, Form, Operand, Program, Schedule, ScheduleStep
from potluck.schedule.task import AlgorithmSettings, Collective, Span, Task
from potluck.schedule.verify import (
    Actor,
    Deadlock,
    ElementStream,
    Rank,
    RankMemory,
    ScheduleRun,
    StepState,
    StreamReceiver,
    StreamSender,
    VerifyLimits,
    complaints,
    straight,
)
from support.collectives import OFFERS, dice, layouts, task

SUM = Reducer.of(ReduceOp.SUM, "i8")
HALF = Reducer.of(ReduceOp.SUM, "f2")


def rank_with(*steps: ScheduleStep, piece: int = 2) -> Rank:
    """Rank 1 with eight cells and these steps."""
    program = Program(1, Span(0, 8), Span(0, 8), steps)
    memory = RankMemory(program, np.arange(8), SUM, world_size=3, in_place=True)
    return Rank(program, memory, SUM, piece)


def test_a_stream_keeps_order_and_its_bounds() -> None:
    """Chunks are cut as needed; the room that is left is known."""
    stream = ElementStream(capacity=5)
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
    memory = RankMemory(program, np.array([7, 8]), SUM, world_size=2, in_place=True)
    assert memory.cells(Operand.OUTPUT, 2, 4).tolist() == [7, 8]
    memory.cells(Operand.OUTPUT, 3, 4)[:] = 9
    assert memory.input.tolist() == [7, 9]
    apart = RankMemory(program, np.array([7, 8]), SUM, world_size=2)
    apart.output[:] = 0
    assert apart.input.tolist() == [7, 8]


def test_partial_values_rest_in_the_output_unless_they_are_wider() -> None:
    """Then they have memory of their own."""
    program = Program(0, Span(0, 2), Span(0, 2), ())
    same = RankMemory(program, np.zeros(2, "i8"), SUM, world_size=2)
    same.cells(Operand.SUM, 0, 1)[:] = 5
    assert same.output[0] == 5
    wider = RankMemory(program, np.zeros(2, "f2"), HALF, world_size=2)
    assert wider.cells(Operand.SUM, 0, 2).dtype == np.float32


def test_a_step_is_done_when_all_have_it() -> None:
    """The value must be there and be handed to every stream."""
    stage = StepState(ScheduleStep(0, 8, (0,), (Form.DATA,), into=Operand.OUTPUT, to=(0, 2)), SUM)
    stage.value = 6
    stage.sent = {0: 4, 2: 5}
    assert stage.done == 4
    alone = StepState(ScheduleStep(0, 8, (0,), (Form.DATA,), into=Operand.OUTPUT), SUM)
    assert alone.done == 0


def test_a_frontier_is_what_the_unfinished_allow() -> None:
    """A step may go as far as those it waits for; finished ones do not count any more."""
    steps = (
        ScheduleStep(0, 4, (0,), (Form.DATA,), into=Operand.OUTPUT),
        ScheduleStep(4, 8, (0,), (Form.DATA,), into=Operand.OUTPUT),
        ScheduleStep(0, 8, own=Operand.OUTPUT, to=(2,), reads=(0, 1)),
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
    own, out = Operand.INPUT, Operand.OUTPUT
    for step, pieces in (
        (ScheduleStep(0, 8, (0,), (Form.DATA,), own=own, into=out, final=True), 1),
        (ScheduleStep(0, 8, (0,), (Form.DATA,), own=own, to=(2,)), 2),
    ):
        rank = rank_with(step)
        stream = ElementStream(capacity=8)
        stream.push(np.arange(8))
        receiver = StreamReceiver(rank, 0, stream)
        receiver.combiners[rank.stages[0]] = combiner = Actor(rank)  # type: ignore[assignment]
        assert receiver.act(straight) == [combiner]
        assert receiver.act(straight) is None
        assert rank.stages[0].pulled == [2 * pieces]


def test_a_sender_waits_for_room_and_for_its_value() -> None:
    """And has nothing to do at the end."""
    rank = rank_with(ScheduleStep(0, 3, own=Operand.INPUT, to=(2,)))
    stream = ElementStream(capacity=2)
    sender = StreamSender(rank, 2, stream)
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


# --------------------------------------------------------------------------------------------------
# Reading a schedule tells what is wrong with it: each planted fault is found.

INPUT, OUTPUT, CHECKS_SUM = Operand.INPUT, Operand.OUTPUT, Operand.SUM
DATA, PARTIAL = Form.DATA, Form.PARTIAL


def found(collective: Collective, *programs: list[ScheduleStep], count: int = 4) -> str:
    """What there is to complain about these programs."""
    work = Task.whole(collective, len(programs), count)
    made = [
        Program(rank, work.input(rank), work.output(rank), tuple(steps))
        for rank, steps in enumerate(programs)
    ]
    return "\n".join(
        complaints(Schedule(work, AlgorithmSettings.plain(len(made)), "", made.__getitem__))
    )


def alone(*steps: ScheduleStep) -> str:
    """What there is to complain about the first of two ranks in an all-reduce."""
    return found(Collective.ALL_REDUCE, list(steps), [])


@given(st.data())
def test_what_the_algorithms_write_is_without_complaint(data: st.DataObject) -> None:
    """Any collective, any layout."""
    name, collective = data.draw(st.sampled_from(OFFERS))
    size = data.draw(st.integers(1, 10))
    work = task(collective, size, data.draw(st.integers(0, 40)), size - 1)
    assert list(complaints(planner.schedule(name, work, data.draw(layouts(size))))) == []


FAULTS: list[tuple[str, Callable[[], str]]] = [
    ("2 is not another rank", lambda: alone(ScheduleStep(0, 4, own=INPUT, to=(2,)))),
    ("0 is not another rank", lambda: alone(ScheduleStep(0, 4, (0,), (DATA,), into=OUTPUT))),
    ("appears twice", lambda: alone(ScheduleStep(0, 4, own=INPUT, to=(1, 1)))),
    ("one form for each source", lambda: alone(ScheduleStep(0, 4, (1,), (), into=OUTPUT))),
    ("nothing to do", lambda: alone(ScheduleStep(0, 4, own=INPUT))),
    ("nothing to do", lambda: alone(ScheduleStep(0, 4, into=OUTPUT))),
    ("no place in the order", lambda: alone(ScheduleStep(0, 4, own=INPUT, own_at=1, to=(1,)))),
    ("span is empty", lambda: alone(ScheduleStep(4, 4, own=INPUT, to=(1,)))),
    ("writes to the input", lambda: alone(ScheduleStep(0, 4, (1,), (DATA,), into=INPUT))),
    ("0 to 5 is beyond input", lambda: alone(ScheduleStep(0, 5, own=INPUT, to=(1,)))),
    ("-1 to 4 is beyond output", lambda: alone(ScheduleStep(-1, 4, (1,), (DATA,), into=OUTPUT))),
    (
        "broadcast reduces nothing",
        lambda: found(
            Collective.BROADCAST, [ScheduleStep(0, 4, own=INPUT, to=(1,), final=True)], []
        ),
    ),
    (
        "broadcast reduces nothing",
        lambda: found(
            Collective.BROADCAST, [], [ScheduleStep(0, 4, (0,), (PARTIAL,), into=OUTPUT)]
        ),
    ),
    (
        "final value is treated as a partial one",
        lambda: alone(ScheduleStep(0, 4, (1,), (DATA,), INPUT, into=CHECKS_SUM, final=True)),
    ),
    (
        "stored as if it were final",
        lambda: alone(ScheduleStep(0, 4, (1,), (DATA,), INPUT, into=OUTPUT)),
    ),
    ("sent as if it were final", lambda: alone(ScheduleStep(0, 4, (1,), (DATA,), INPUT, to=(1,)))),
    (
        "reads the input's overwritten cell 0",
        lambda: alone(
            ScheduleStep(0, 4, (1,), (DATA,), into=OUTPUT), ScheduleStep(0, 4, own=INPUT, to=(1,))
        ),
    ),
    (
        "reads the unwritten cell 0",
        lambda: alone(ScheduleStep(0, 4, own=CHECKS_SUM, to=(1,), gives=PARTIAL)),
    ),
    (
        "step 1 does not wait for step 0 to write cell 2",
        lambda: alone(
            ScheduleStep(0, 4, (1,), (DATA,), INPUT, into=CHECKS_SUM),
            ScheduleStep(2, 4, own=CHECKS_SUM, to=(1,), gives=PARTIAL),
        ),
    ),
    (
        "step 1 overwrites cell 1",
        lambda: alone(
            ScheduleStep(0, 4, own=INPUT, to=(1,)), ScheduleStep(1, 2, (1,), (DATA,), into=OUTPUT)
        ),
    ),
    (
        "step 1 overwrites cell 0",
        lambda: alone(
            ScheduleStep(0, 4, (1,), (DATA,), into=OUTPUT),
            ScheduleStep(0, 1, (1,), (DATA,), into=OUTPUT),
        ),
    ),
    (
        "output's cell 3 is never written",
        lambda: alone(ScheduleStep(0, 3, (1,), (DATA,), into=OUTPUT)),
    ),
    (
        "output's cell 0 is never written",
        lambda: alone(ScheduleStep(0, 4, (1,), (DATA,), INPUT, into=CHECKS_SUM)),
    ),
    (
        "Rank 0 does not send what rank 1 awaits",
        lambda: alone(ScheduleStep(0, 4, own=INPUT, to=(1,))),
    ),
    (
        "Rank 1 does not send what rank 0 awaits",
        lambda: found(
            Collective.ALL_REDUCE,
            [ScheduleStep(0, 4, (1,), (PARTIAL,), into=OUTPUT)],
            [ScheduleStep(0, 4, own=INPUT, to=(0,))],
        ),
    ),
]


@pytest.mark.parametrize(("words", "schedule"), FAULTS, ids=[words for words, _ in FAULTS])
def test_a_fault_is_named(words: str, schedule: Callable[[], str]) -> None:
    """With the rank and the step where it is."""
    assert words in schedule()


def test_only_common_memory_can_be_overwritten() -> None:
    """An exchange has none: it may read its input whenever it likes."""
    work = Task.exchange([[2]])
    steps = (
        ScheduleStep(0, 2, own=INPUT, into=OUTPUT),
        ScheduleStep(0, 2, own=INPUT, into=OUTPUT, overwrites=(0,)),
    )
    program = Program(0, work.input(0), work.output(0), steps)
    assert list(complaints(Schedule(work, AlgorithmSettings.plain(1), "", lambda _: program))) == []


# --------------------------------------------------------------------------------------------------
# The machine plays a schedule with the least room, in any order, and notices a deadlock.

MACHINE_SUM = Reducer.of(ReduceOp.SUM, "i8")


def planted(task: Task, write: Callable[[Draft, int], None]) -> Schedule:
    """A schedule whose programs a test writes by hand."""

    def maker(rank: int) -> Program:
        draft = Draft.of(task, rank)
        write(draft, rank)
        return draft.finish()

    return Schedule(task, AlgorithmSettings.plain(task.world_size), "planted", maker)


def test_the_same_dice_play_the_same_game() -> None:
    """What happened can be replayed from its seed; other dice end in the same state."""
    task = Task.whole(Collective.ALL_REDUCE, 3, 20)
    schedule = planner.schedule("ring", task)
    inputs = verify.distinct(task)
    throws: list[list[int]] = []
    outputs = []
    for seed in (1, 1, 2):
        seen: list[int] = []
        fall = dice(seed)

        def watched(sides: int, fall: Callable[[int], int] = fall, seen: list[int] = seen) -> int:
            seen.append(fall(sides))
            return seen[-1]

        outputs.append(
            verify.run(schedule, inputs, MACHINE_SUM, limits=VerifyLimits(7, 5), dice=watched)
        )
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
    machine = ScheduleRun(
        planted(task, write), inputs, MACHINE_SUM, limits=VerifyLimits(), in_place=False
    )
    with pytest.raises(Deadlock, match=r"rank 1 in step 0 at 0.*rank 2 in step 0 at 0"):
        machine.run(straight)


def test_a_rank_that_is_never_fed_is_a_deadlock() -> None:
    """It waits for what nobody sends."""
    task = Task.whole(Collective.BROADCAST, 2, 4)

    def write(draft: Draft, rank: int) -> None:
        if rank:
            draft.store(Span(0, 4), source=0)

    with pytest.raises(Deadlock, match="rank 1"):
        verify.run(planted(task, write), [np.arange(4), np.empty(0, "i8")], MACHINE_SUM)


def test_a_relay_that_only_moves_holds_what_it_passes_on() -> None:
    """It needs no memory of its own beside the staged pieces."""
    task = Task.whole(Collective.REDUCE, 3, 5, root=2)

    def write(draft: Draft, rank: int) -> None:
        if rank == 0:
            draft.send(Span(0, 5), to=(1,))
        elif rank == 1:
            draft.add(ScheduleStep(0, 5, (0,), (Form.DATA,), to=(2,)))
        else:
            step = ScheduleStep(
                0, 5, (1,), (Form.DATA,), own=Operand.INPUT, into=Operand.OUTPUT, final=True
            )
            draft.add(step)

    inputs = [np.arange(5), np.arange(5) * 100, np.arange(5) * 10]
    outputs = verify.run(planted(task, write), inputs, MACHINE_SUM)
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

    outputs = verify.run(planted(task, write), [np.zeros(2, "i8"), np.empty(0, "i8")], MACHINE_SUM)
    assert outputs[1][0] == 0
    assert outputs[1][1] != 0


# --------------------------------------------------------------------------------------------------
# The verifier finds wrong results, not only broken contracts.

Change = Callable[[int, tuple[ScheduleStep, ...]], list[ScheduleStep]]


def spoiled(name: str, task: Task, change: Change) -> Schedule:
    """A schedule of an algorithm, with the steps of each rank changed."""
    good = planner.schedule(name, task)

    def maker(rank: int) -> Program:
        program = good.program(rank)
        return Program(rank, program.input, program.output, tuple(change(rank, program.steps)))

    return Schedule(task, good.layout, "spoiled", maker)


def test_the_all_gather_that_begins_one_block_too_early_is_found() -> None:
    """A classic: the ring is off by one, every rank gets plausible and wrong sums."""
    task = Task.whole(Collective.ALL_REDUCE, 3, 3)

    def change(_: int, steps: tuple[ScheduleStep, ...]) -> list[ScheduleStep]:
        late = [step for step in steps if step.moves]
        shifted = [step.at(Span((step.start + 1) % 3, (step.start + 1) % 3 + 1)) for step in late]
        return [step for step in steps if not step.moves] + shifted

    with pytest.raises(verify.FaultyScheduleError):
        verify.prove(spoiled("ring", task, change))


def test_wrong_results_are_found() -> None:
    """Even when every rule of the contract is kept: here a source is added twice."""
    task = Task.whole(Collective.REDUCE, 3, 2)

    def change(rank: int, steps: tuple[ScheduleStep, ...]) -> list[ScheduleStep]:
        (step,) = steps
        if rank == 1:
            return [step, step.after((), ())]
        if rank == 2:
            return []
        return [
            step._replace(sources=(1,), takes=(Form.DATA,), into=Operand.SUM, final=False),
            ScheduleStep(
                0, 2, (1,), (Form.DATA,), Operand.SUM, into=Operand.OUTPUT, final=True, reads=(0,)
            ).after((0,), (0,)),
        ]

    schedule = spoiled("central", task, change)
    verify.inspect(schedule)
    with pytest.raises(verify.FaultyScheduleError, match="Rank 0 gets"):
        verify.prove(schedule)


def test_results_that_differ_in_a_bit_are_found() -> None:
    """Both ranks add the same numbers, but one associates them differently."""
    task = Task.whole(Collective.ALL_REDUCE, 4, 9)

    def change(rank: int, steps: tuple[ScheduleStep, ...]) -> list[ScheduleStep]:
        """Everybody sends to everybody and adds by itself, in an order of its own."""
        others = tuple(other for other in range(4) if other != rank)
        add = ScheduleStep(
            0, 9, others, (Form.DATA,) * 3, Operand.INPUT, into=Operand.OUTPUT, final=True
        )
        return [ScheduleStep(0, 9, own=Operand.INPUT, to=others), add.after((), (0,))]

    with pytest.raises(verify.FaultyScheduleError, match="differ in some bits"):
        verify.prove(spoiled("direct", task, change))


def test_a_broken_contract_is_found_first() -> None:
    """Before anything is run."""
    task = Task.whole(Collective.BROADCAST, 2, 4)
    with pytest.raises(verify.FaultyScheduleError, match="never written"):
        verify.prove(spoiled("tree", task, lambda rank, steps: [] if rank else list(steps)))


def test_a_changed_input_is_found() -> None:
    """Out of place, nobody may write to what it was given."""
    task = Task.whole(Collective.ALL_REDUCE, 2, 1)

    def change(rank: int, _: tuple[ScheduleStep, ...]) -> list[ScheduleStep]:
        other = (1 - rank,)
        send = ScheduleStep(0, 1, own=Operand.INPUT, to=other)
        add = ScheduleStep(0, 1, other, (Form.DATA,), Operand.INPUT, into=Operand.INPUT, final=True)
        return [send, add.after((), (0,))]

    with pytest.raises(verify.FaultyScheduleError, match="Rank 0 changed its input"):
        verify.run(spoiled("direct", task, change), verify.distinct(task), verify.exact(task))


def test_playing_needs_what_is_sent_and_sends_what_is_needed() -> None:
    """From top to bottom: missing messages are a deadlock, surplus ones a fault."""
    task = Task.whole(Collective.BROADCAST, 2, 2)
    inputs = verify.distinct(task)
    reducer = verify.exact(task)
    with pytest.raises(Deadlock, match="1 ranks wait"):
        verify.play(spoiled("tree", task, lambda r, s: list(s) if r else []), inputs, reducer)
    with pytest.raises(verify.FaultyScheduleError, match="no rank awaits"):
        verify.play(spoiled("tree", task, lambda r, s: [] if r else list(s)), inputs, reducer)


@pytest.mark.parametrize("collective", Collective)
def test_what_is_expected_is_plain_arithmetic(collective: Collective) -> None:
    """The yardstick, on a case small enough to see."""
    if collective is Collective.ALL_TO_ALL:
        task = Task.exchange([[1, 2], [0, 1]])
        inputs = [np.array([1, 2, 3]), np.array([4])]
    elif collective.has_blocks:
        task = Task.blocks(collective, (1, 2), root=1)
        inputs = [np.arange(task.input(rank).length) + 10 * rank + 1 for rank in range(2)]
    else:
        task = Task.whole(collective, 2, 3, root=1)
        inputs = [np.arange(task.input(rank).length) + 10 * rank + 1 for rank in range(2)]
    found = verify.expected(task, inputs, Reducer.of(ReduceOp.SUM, "i8"))
    assert [each.tolist() for each in found] == {
        Collective.ALL_REDUCE: [[12, 14, 16], [12, 14, 16]],
        Collective.BARRIER: [[12, 14, 16], [12, 14, 16]],
        Collective.REDUCE: [[], [12, 14, 16]],
        Collective.REDUCE_SCATTER: [[12], [14, 16]],
        Collective.BROADCAST: [[11, 12, 13], [11, 12, 13]],
        Collective.ALL_GATHER: [[1, 11, 12], [1, 11, 12]],
        Collective.GATHER: [[], [1, 11, 12]],
        Collective.SCATTER: [[11], [12, 13]],
        Collective.ALL_TO_ALL: [[1], [2, 3, 4]],
    }[collective]


def test_inputs_tell_every_cell_and_every_rank_apart() -> None:
    """A sum shows which operands are in it, and how often."""
    inputs = verify.distinct(Task.whole(Collective.ALL_REDUCE, 5, 4))
    cells = [int(cell) for given in inputs for cell in given]
    assert len(set(cells)) == len(cells)
