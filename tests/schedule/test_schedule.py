"""An algorithm is a name and a builder for each collective it offers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import InvalidRank, UnsupportedOperation
from potluck.schedule.planner import find
from potluck.schedule.schedule import Draft, Form, Hazards, Operand, Program, Schedule, ScheduleStep
from potluck.schedule.task import AlgorithmSettings, Collective, Span, Task


def test_what_it_does_not_offer_is_refused() -> None:
    """The error says what it does offer."""
    task = Task.whole(Collective.REDUCE, world_size=2, count=1)
    with pytest.raises(UnsupportedOperation, match=r"doubling offers no reduce.*barrier"):
        find("doubling").schedule(task)


def test_a_layout_for_another_group_is_refused() -> None:
    """Before any program is made."""
    task = Task.whole(Collective.ALL_REDUCE, world_size=3, count=1)
    with pytest.raises(ValueError, match="layout is for 2 ranks, the task for 3"):
        find("ring").schedule(task, AlgorithmSettings.plain(2))


def test_without_a_layout_the_plain_one_is_used() -> None:
    """Ranks in their own order with equal shares."""
    task = Task.whole(Collective.ALL_REDUCE, world_size=3, count=1)
    assert find("ring").schedule(task).layout == AlgorithmSettings.plain(3)


# --------------------------------------------------------------------------------------------------
# Hazards: what reads waits for what writes, what writes waits for what reads or wrote.

touches = st.tuples(st.integers(-5, 20), st.integers(1, 9), st.booleans(), st.booleans())


@given(st.lists(touches, max_size=12))
def test_every_conflict_of_every_cell_is_found(steps: list[tuple[int, int, bool, bool]]) -> None:
    """The intervals say what following each cell by itself says, and nothing else."""
    hazards = Hazards()
    writer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    for index, (start, length, reads, writes) in enumerate(steps):
        cells = range(start, start + length)
        found = hazards.step(index, start, start + length, reads=reads, writes=writes)
        written = {writer[cell] for cell in cells if cell in writer}
        read = {one for cell in cells for one in readers.get(cell, set())}
        assert found[0] == (tuple(sorted(written)) if reads else ())
        assert found[1] == (tuple(sorted(written | read)) if writes else ())
        for cell in cells:
            if writes:
                writer[cell], readers[cell] = index, set()
            elif reads:
                readers.setdefault(cell, set()).add(index)


def test_reading_hinders_no_reader() -> None:
    """Any number of steps may send the same cells."""
    hazards = Hazards()
    assert hazards.step(0, 0, 4, reads=True, writes=False) == ((), ())
    assert hazards.step(1, 0, 4, reads=True, writes=False) == ((), ())
    assert hazards.step(2, 2, 3, reads=True, writes=True) == ((), (0, 1))


# --------------------------------------------------------------------------------------------------
# Schedules: programs of steps, and how they are written.

SPAN = Span(0, 4)


def draft() -> Draft:
    """An empty program of rank 1, which brings and gets four cells."""
    return Draft(1, brings=SPAN, gets=SPAN)


def test_a_step_says_what_kind_it_is() -> None:
    """Sends, moves and combinations are told apart; lengths and operands are counted."""
    send = ScheduleStep(0, 4, own=Operand.INPUT, to=(2,))
    move = ScheduleStep(0, 4, (0,), (Form.DATA,), into=Operand.OUTPUT)
    relay = ScheduleStep(0, 4, (0,), (Form.DATA,), own=Operand.INPUT, to=(2,))
    assert (send.only_sends, move.only_sends, relay.only_sends) == (True, False, False)
    assert (send.moves, move.moves, relay.moves) == (False, True, False)
    assert (send.operands, move.operands, relay.operands) == (1, 1, 2)
    assert relay.at(Span(6, 9)).length == 3
    assert relay.at(Span(6, 9))[2:] == relay[2:]
    assert relay.after((1,), (2, 3)) == relay._replace(reads=(1,), overwrites=(2, 3))


def test_empty_spans_are_left_out() -> None:
    """Nothing is sent, awaited or stored for them; nor is anything sent to nobody."""
    program = draft()
    program.send(Span(2, 2), to=(0,))
    program.store(Span(2, 2), source=0)
    program.keep(Span(2, 2))
    program.send(SPAN, to=())
    assert program.finish().steps == ()


def test_what_is_sent_must_be_gone_before_it_is_overwritten() -> None:
    """In place, a store waits for the sends of the same cells, and for no other."""
    program = draft()
    program.send(Span(0, 2), to=(0,))
    program.send(Span(2, 4), to=(2,))
    program.store(Span(2, 3), source=0)
    assert [step.overwrites for step in program.finish().steps] == [(), (), (1,)]


def test_without_common_memory_nothing_waits() -> None:
    """If input and output are never the same, sends and stores do not concern each other."""
    program = Draft(1, brings=SPAN, gets=SPAN, in_place=False)
    program.send(SPAN, to=(0,))
    program.store(SPAN, source=0)
    assert [step.overwrites for step in program.finish().steps] == [(), ()]


def test_what_is_read_must_have_been_written() -> None:
    """A step that forwards partial sums waits for the one that stored them."""
    program = draft()
    program.add(ScheduleStep(*SPAN, (0,), (Form.DATA,), own=Operand.INPUT, into=Operand.SUM))
    program.send(SPAN, to=(2,), own=Operand.SUM, gives=Form.PARTIAL)
    finished = program.finish()
    assert finished.steps[1].reads == (0,)
    assert finished.needs_sum
    assert not draft().finish().needs_sum


def test_a_program_knows_its_streams() -> None:
    """For each peer the steps that its stream feeds, and those whose values go there."""
    steps = (
        ScheduleStep(0, 4, own=Operand.INPUT, to=(2, 0)),
        ScheduleStep(0, 4, (0, 2), (Form.DATA,) * 2, into=Operand.OUTPUT, to=(2,)),
    )
    program = Program(1, SPAN, SPAN, steps)
    assert program.outgoing == {2: (0, 1), 0: (0,)}
    assert program.incoming == {0: (1,), 2: (1,)}


def test_programs_are_made_when_asked_for() -> None:
    """An executor pays for its own rank only, and only once."""
    made: list[int] = []

    def maker(rank: int) -> Program:
        made.append(rank)
        return Program(rank, SPAN, SPAN, ())

    task = Task.whole(Collective.ALL_REDUCE, 3, 4)
    schedule = Schedule(task, AlgorithmSettings.plain(3), "none", maker)
    assert schedule.program(2) is schedule.program(2)
    assert made == [2]
    assert [program.rank for program in schedule.programs] == [0, 1, 2]
    assert made == [2, 0, 1]
    with pytest.raises(InvalidRank):
        schedule.program(3)
    with pytest.raises(InvalidRank):
        schedule.program(-1)
