"""Reading a schedule tells what is wrong with it: each planted fault is found."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.collective import registry
from potluck.collective.checks import complaints
from potluck.collective.schedule import Form, Place, Program, Schedule, Step
from potluck.collective.task import Collective, Layout, Task
from support.collectives import OFFERS, layouts, task

INPUT, OUTPUT, SUM = Place.INPUT, Place.OUTPUT, Place.SUM
DATA, PARTIAL = Form.DATA, Form.PARTIAL


def found(collective: Collective, *programs: list[Step], count: int = 4) -> str:
    """What there is to complain about these programs."""
    work = Task.whole(collective, len(programs), count)
    made = [
        Program(rank, work.input(rank), work.output(rank), tuple(steps))
        for rank, steps in enumerate(programs)
    ]
    return "\n".join(complaints(Schedule(work, Layout.plain(len(made)), "", made.__getitem__)))


def alone(*steps: Step) -> str:
    """What there is to complain about the first of two ranks in an all-reduce."""
    return found(Collective.ALL_REDUCE, list(steps), [])


@given(st.data())
def test_what_the_algorithms_write_is_without_complaint(data: st.DataObject) -> None:
    """Any collective, any layout."""
    name, collective = data.draw(st.sampled_from(OFFERS))
    size = data.draw(st.integers(1, 10))
    work = task(collective, size, data.draw(st.integers(0, 40)), size - 1)
    assert list(complaints(registry.schedule(name, work, data.draw(layouts(size))))) == []


FAULTS: list[tuple[str, Callable[[], str]]] = [
    ("2 is no other rank", lambda: alone(Step(0, 4, own=INPUT, to=(2,)))),
    ("0 is no other rank", lambda: alone(Step(0, 4, (0,), (DATA,), into=OUTPUT))),
    ("appears twice", lambda: alone(Step(0, 4, own=INPUT, to=(1, 1)))),
    ("one form for each source", lambda: alone(Step(0, 4, (1,), (), into=OUTPUT))),
    ("nothing to do", lambda: alone(Step(0, 4, own=INPUT))),
    ("nothing to do", lambda: alone(Step(0, 4, into=OUTPUT))),
    ("no place in the order", lambda: alone(Step(0, 4, own=INPUT, own_at=1, to=(1,)))),
    ("span is empty", lambda: alone(Step(4, 4, own=INPUT, to=(1,)))),
    ("writes to the input", lambda: alone(Step(0, 4, (1,), (DATA,), into=INPUT))),
    ("0 to 5 is beyond input", lambda: alone(Step(0, 5, own=INPUT, to=(1,)))),
    ("-1 to 4 is beyond output", lambda: alone(Step(-1, 4, (1,), (DATA,), into=OUTPUT))),
    (
        "broadcast reduces nothing",
        lambda: found(Collective.BROADCAST, [Step(0, 4, own=INPUT, to=(1,), final=True)], []),
    ),
    (
        "broadcast reduces nothing",
        lambda: found(Collective.BROADCAST, [], [Step(0, 4, (0,), (PARTIAL,), into=OUTPUT)]),
    ),
    (
        "final value is treated as a partial one",
        lambda: alone(Step(0, 4, (1,), (DATA,), INPUT, into=SUM, final=True)),
    ),
    (
        "stored as if it were final",
        lambda: alone(Step(0, 4, (1,), (DATA,), INPUT, into=OUTPUT)),
    ),
    ("sent as if it were final", lambda: alone(Step(0, 4, (1,), (DATA,), INPUT, to=(1,)))),
    (
        "reads the input's overwritten cell 0",
        lambda: alone(Step(0, 4, (1,), (DATA,), into=OUTPUT), Step(0, 4, own=INPUT, to=(1,))),
    ),
    ("reads the unwritten cell 0", lambda: alone(Step(0, 4, own=SUM, to=(1,), gives=PARTIAL))),
    (
        "step 1 does not wait for step 0 to write cell 2",
        lambda: alone(
            Step(0, 4, (1,), (DATA,), INPUT, into=SUM),
            Step(2, 4, own=SUM, to=(1,), gives=PARTIAL),
        ),
    ),
    (
        "step 1 overwrites cell 1",
        lambda: alone(Step(0, 4, own=INPUT, to=(1,)), Step(1, 2, (1,), (DATA,), into=OUTPUT)),
    ),
    (
        "step 1 overwrites cell 0",
        lambda: alone(
            Step(0, 4, (1,), (DATA,), into=OUTPUT), Step(0, 1, (1,), (DATA,), into=OUTPUT)
        ),
    ),
    ("output's cell 3 is never written", lambda: alone(Step(0, 3, (1,), (DATA,), into=OUTPUT))),
    (
        "output's cell 0 is never written",
        lambda: alone(Step(0, 4, (1,), (DATA,), INPUT, into=SUM)),
    ),
    ("Rank 0 does not send what rank 1 awaits", lambda: alone(Step(0, 4, own=INPUT, to=(1,)))),
    (
        "Rank 1 does not send what rank 0 awaits",
        lambda: found(
            Collective.ALL_REDUCE,
            [Step(0, 4, (1,), (PARTIAL,), into=OUTPUT)],
            [Step(0, 4, own=INPUT, to=(0,))],
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
        Step(0, 2, own=INPUT, into=OUTPUT),
        Step(0, 2, own=INPUT, into=OUTPUT, overwrites=(0,)),
    )
    program = Program(0, work.input(0), work.output(0), steps)
    assert list(complaints(Schedule(work, Layout.plain(1), "", lambda _: program))) == []
