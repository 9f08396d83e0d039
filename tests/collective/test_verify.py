"""The verifier finds wrong results, not only broken contracts."""

from collections.abc import Callable

import numpy as np
import pytest

from potluck.collective import registry, verify
from potluck.collective.machine import Deadlock
from potluck.collective.reduce import ReduceOp, Reducer
from potluck.collective.schedule import Form, Place, Program, Schedule, Step
from potluck.collective.task import Collective, Span, Task

Change = Callable[[int, tuple[Step, ...]], list[Step]]


def spoiled(name: str, task: Task, change: Change) -> Schedule:
    """A schedule of an algorithm, with the steps of each rank changed."""
    good = registry.schedule(name, task)

    def maker(rank: int) -> Program:
        program = good.program(rank)
        return Program(rank, program.input, program.output, tuple(change(rank, program.steps)))

    return Schedule(task, good.layout, "spoiled", maker)


def test_the_all_gather_that_begins_one_block_too_early_is_found() -> None:
    """A classic: the ring is off by one, every rank gets plausible and wrong sums."""
    task = Task.whole(Collective.ALL_REDUCE, 3, 3)

    def change(_: int, steps: tuple[Step, ...]) -> list[Step]:
        late = [step for step in steps if step.moves]
        shifted = [step.at(Span((step.start + 1) % 3, (step.start + 1) % 3 + 1)) for step in late]
        return [step for step in steps if not step.moves] + shifted

    with pytest.raises(verify.Faulty):
        verify.prove(spoiled("ring", task, change))


def test_wrong_results_are_found() -> None:
    """Even when every rule of the contract is kept: here a source is added twice."""
    task = Task.whole(Collective.REDUCE, 3, 2)

    def change(rank: int, steps: tuple[Step, ...]) -> list[Step]:
        (step,) = steps
        if rank == 1:
            return [step, step.after((), ())]
        if rank == 2:
            return []
        return [
            step._replace(sources=(1,), takes=(Form.DATA,), into=Place.SUM, final=False),
            Step(
                0, 2, (1,), (Form.DATA,), Place.SUM, into=Place.OUTPUT, final=True, reads=(0,)
            ).after((0,), (0,)),
        ]

    schedule = spoiled("central", task, change)
    verify.inspect(schedule)
    with pytest.raises(verify.Faulty, match="Rank 0 gets"):
        verify.prove(schedule)


def test_results_that_differ_in_a_bit_are_found() -> None:
    """Both ranks add the same numbers, but one associates them differently."""
    task = Task.whole(Collective.ALL_REDUCE, 4, 9)

    def change(rank: int, steps: tuple[Step, ...]) -> list[Step]:
        """Everybody sends to everybody and adds by itself, in an order of its own."""
        others = tuple(other for other in range(4) if other != rank)
        add = Step(0, 9, others, (Form.DATA,) * 3, Place.INPUT, into=Place.OUTPUT, final=True)
        return [Step(0, 9, own=Place.INPUT, to=others), add.after((), (0,))]

    with pytest.raises(verify.Faulty, match="differ in some bits"):
        verify.prove(spoiled("direct", task, change))


def test_a_broken_contract_is_found_first() -> None:
    """Before anything is run."""
    task = Task.whole(Collective.BROADCAST, 2, 4)
    with pytest.raises(verify.Faulty, match="never written"):
        verify.prove(spoiled("tree", task, lambda rank, steps: [] if rank else list(steps)))


def test_a_changed_input_is_found() -> None:
    """Out of place, nobody may write to what it was given."""
    task = Task.whole(Collective.ALL_REDUCE, 2, 1)

    def change(rank: int, _: tuple[Step, ...]) -> list[Step]:
        other = (1 - rank,)
        send = Step(0, 1, own=Place.INPUT, to=other)
        add = Step(0, 1, other, (Form.DATA,), Place.INPUT, into=Place.INPUT, final=True)
        return [send, add.after((), (0,))]

    with pytest.raises(verify.Faulty, match="Rank 0 changed its input"):
        verify.run(spoiled("direct", task, change), verify.distinct(task), verify.exact(task))


def test_playing_needs_what_is_sent_and_sends_what_is_needed() -> None:
    """From top to bottom: missing messages are a deadlock, surplus ones a fault."""
    task = Task.whole(Collective.BROADCAST, 2, 2)
    inputs = verify.distinct(task)
    reducer = verify.exact(task)
    with pytest.raises(Deadlock, match="1 ranks wait"):
        verify.play(spoiled("tree", task, lambda r, s: list(s) if r else []), inputs, reducer)
    with pytest.raises(verify.Faulty, match="nobody awaits"):
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
