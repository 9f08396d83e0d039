"""The memory of an operation: spans as bytes and as elements, folding, and slots used again."""

from __future__ import annotations

import numpy as np
import pytest

from potluck.collective.reduce import BFLOAT16, ReduceOp, Reducer
from potluck.collective.schedule import Form, Place, Program, Step
from potluck.collective.task import Collective, Span, Task
from potluck.runtime.call import Call
from potluck.runtime.memory import KEPT, Memory, Pool, Slot
from potluck.runtime.units import compile_program
from support.groups import Array

OFFSET = 10
"""Where the coordinates of these tests begin."""


def memory_of(source: Array, target: Array, step: Step, op: ReduceOp | None) -> tuple[Memory, Pool]:
    """Memory of two ranks' task that consists of one step."""
    span = Span(OFFSET, OFFSET + source.size)
    units = compile_program(Program(0, span, span, (step,)), source.size)
    pool = Pool()
    pool.fit(1024)
    reducer = None if op is None else Reducer.of(op, source.dtype)
    task = Task.whole(Collective.ALL_REDUCE, 2, source.size)
    return Memory(units, Call(task, source, target, reducer), pool), pool


def staged(pool: Pool, values: Array) -> Slot:
    """A slot with values in it."""
    slot = pool.take()
    slot.view(values.dtype, values.size)[:] = values
    return slot


def step_of(**changes: object) -> Step:
    """A step that adds what comes from rank 1 to our own."""
    step = Step(OFFSET, OFFSET + 3, (1,), (Form.DATA,), Place.INPUT, 0, Place.OUTPUT, final=True)
    return step._replace(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["f4", "i2", "f8", BFLOAT16], ids=str)
def test_spans_are_found_by_coordinate(dtype: str) -> None:
    """As elements and as the bytes of the same memory."""
    array = np.arange(3).astype(dtype)
    memory, _ = memory_of(array, array, step_of(), ReduceOp.SUM)
    assert memory.cells(Place.INPUT, OFFSET + 1, OFFSET + 3).tolist() == [1, 2]
    octets = memory.octets(Place.OUTPUT, OFFSET + 1, OFFSET + 2)
    assert bytes(octets) == array[1:2].tobytes()
    octets[:] = array[2:3].tobytes()
    assert array.tolist() == [0, 2, 2]


@pytest.mark.parametrize("own_at", [0, 1])
@pytest.mark.parametrize(
    ("op", "wanted"), [(ReduceOp.SUM, [5, 7, 9]), (ReduceOp.MEAN, [2.5, 3.5, 4.5])]
)
def test_two_become_one_in_place(op: ReduceOp, wanted: list[float], own_at: int) -> None:
    """What came and what is here; a mean is divided at the end."""
    array = np.array([1, 2, 3], "f4")
    memory, pool = memory_of(array, array, step_of(own_at=own_at), op)
    unit = compile_program(Program(0, Span(10, 13), Span(10, 13), (step_of(own_at=own_at),)), 3)
    slot = staged(pool, np.array([4, 5, 6], "f4"))
    assert memory.fold(unit.units[0], [slot]) is None
    assert array.tolist() == wanted
    assert pool.take() is slot  # it was given back


def test_narrow_numbers_are_summed_wide() -> None:
    """Rounded once, at the end: 2048 + 1 + 1 is 2050, although 2048 + 1 is 2048 in 16 bits."""
    array = np.array([2048], "f2")
    step = step_of(stop=OFFSET + 1, sources=(1, 2), takes=(Form.DATA, Form.DATA))
    memory, pool = memory_of(array, array, step, ReduceOp.SUM)
    one = np.array([1], "f2")
    unit = compile_program(Program(0, Span(10, 11), Span(10, 11), (step,)), 1).units[0]
    memory.fold(unit, [staged(pool, one), staged(pool, one)])
    assert array.tolist() == [2050]


@pytest.mark.parametrize("dtype", ["f4", "f2"])
def test_a_relay_is_held_and_not_stored(dtype: str) -> None:
    """Its value travels from the slot, wide if that is how partial sums travel."""
    array = np.array([1, 2, 3], dtype)
    step = step_of(into=None, to=(2,), gives=Form.PARTIAL, final=False)
    memory, pool = memory_of(array, array, step, ReduceOp.SUM)
    unit = compile_program(Program(0, Span(10, 13), Span(10, 13), (step,)), 3).units[0]
    held = memory.fold(unit, [staged(pool, np.array([4, 5, 6], dtype))])
    assert held is not None
    assert np.frombuffer(memory.value(unit, held), "f4").tolist() == [5, 7, 9]
    assert array.tolist() == [1, 2, 3]


def test_what_is_already_there_is_not_copied() -> None:
    """Own memory onto itself; and to another place, if that is another."""
    array, other = np.array([1, 2, 3]), np.zeros(3, "i8")
    step = Step(OFFSET, OFFSET + 3, own=Place.INPUT, into=Place.OUTPUT)
    unit = compile_program(Program(0, Span(10, 13), Span(10, 13), (step,)), 3).units[0]
    for target in (array, other):
        memory, _ = memory_of(array, target, step, None)
        memory.fold(unit, [])
        assert target.tolist() == [1, 2, 3]
        assert bytes(memory.value(unit, None)) == array.tobytes()


def test_slots_are_used_again_but_not_hoarded() -> None:
    """Up to a few megabytes; slots of another size are dropped."""
    pool = Pool()
    pool.fit(1 << 20)
    slots = [pool.take() for _ in range(10)]
    for slot in slots:
        pool.give_back(slot)
    again = [pool.take() for _ in range(10)]
    assert len(set(map(id, slots)) & set(map(id, again))) == KEPT >> 20
    pool.fit(1 << 18)  # a little smaller: what is there will do
    assert pool.take().size == 1 << 20
    pool.fit(100)
    pool.give_back(again[0])
    assert pool.take().size == 100
