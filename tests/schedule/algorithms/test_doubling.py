"""Recursive doubling: few hops, for any number of ranks."""

import numpy as np
import pytest

from potluck.schedule import verify
from potluck.schedule.algorithms.doubling import DOUBLING
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.schedule import Program
from potluck.schedule.task import Collective, Task


def sends(program: Program) -> int:
    """How many messages a rank sends."""
    return sum(len(step.to) for step in program.steps)


@pytest.mark.parametrize(("size", "most"), [(2, 1), (3, 2), (4, 2), (8, 3), (11, 4), (64, 6)])
def test_few_messages_are_enough(size: int, most: int) -> None:
    """The logarithm of the world size; one more for who stands in for another."""
    schedule = DOUBLING.schedule(Task.whole(Collective.ALL_REDUCE, size, 5))
    assert max(sends(program) for program in schedule.programs) == most


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 21, 64])
def test_a_barrier_takes_one_message_a_round(size: int) -> None:
    """⌈log₂ N⌉ rounds, for any N."""
    schedule = DOUBLING.schedule(Task.whole(Collective.BARRIER, size, 1))
    assert {sends(program) for program in schedule.programs} == {(size - 1).bit_length()}


@pytest.mark.parametrize("size", [2, 3, 6, 8, 13])
def test_neighbouring_blocks_travel_together(size: int) -> None:
    """A gather sends at most two spans a round: one, and what lies beyond the end."""
    schedule = DOUBLING.schedule(Task.blocks(Collective.ALL_GATHER, [3] * size))
    for program in schedule.programs:
        assert sends(program) <= 2 * (size - 1).bit_length()


@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8, 12])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_all_ranks_add_in_the_same_order(size: int, dtype: str) -> None:
    """Each computes the sum by itself, and all get the same bits."""
    task = Task.whole(Collective.ALL_REDUCE, size, 9)
    reducer = Reducer.of(ReduceOp.SUM, dtype)
    outputs = verify.run(DOUBLING.schedule(task), verify.rough(task, dtype), reducer)
    assert len({output.tobytes() for output in outputs}) == 1


def test_even_the_payload_of_nan_is_the_same() -> None:
    """Operands are ordered by rank on both sides of an exchange, not "mine first"."""
    task = Task.whole(Collective.ALL_REDUCE, 4, 7)
    bits = [np.full(7, 0x7FC00000 + rank, "u4") for rank in range(4)]
    inputs = [each.view("f4") for each in bits]
    outputs = verify.run(DOUBLING.schedule(task), inputs, Reducer.of(ReduceOp.SUM, "f4"))
    assert len({output.tobytes() for output in outputs}) == 1
