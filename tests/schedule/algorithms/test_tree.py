"""Tree: sums rise, results sink."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.schedule import verify
from potluck.schedule.algorithms.tree import TREE, children_of, parent_of
from potluck.schedule.schedule import Form
from potluck.schedule.task import AlgorithmSettings, Collective, Task


@given(st.integers(1, 200), st.integers(1, 9))
def test_parents_and_children_agree(size: int, arity: int) -> None:
    """Every place but the root is the child of its parent, and of nobody else."""
    found = {place: list(children_of(place, arity, size)) for place in range(size)}
    assert sorted(child for below in found.values() for child in below) == list(range(1, size))
    for place, below in found.items():
        assert len(below) <= arity
        assert all(parent_of(child, arity) == place for child in below)
    assert parent_of(0, arity) is None


@pytest.mark.parametrize("arity", [1, 2, 3, 5, 20])
def test_any_arity_is_right(arity: int) -> None:
    """From a chain to a star."""
    for collective in TREE.offers:
        count = 1 if collective is Collective.BARRIER else 5
        task = Task.whole(collective, 11, count, root=0)
        verify.prove(TREE.schedule(task, AlgorithmSettings.plain(11, arity=arity)))


def test_inner_nodes_store_no_sums() -> None:
    """A reduction leaves the vectors of all but the root alone, and needs no memory of its own."""
    task = Task.whole(Collective.REDUCE, 7, 5, root=3)
    for program in TREE.schedule(task).programs:
        assert not program.needs_sum
        assert all((step.into is None) == (program.rank != 3) for step in program.steps)


def test_only_sums_travel_as_sums() -> None:
    """A leaf sends its numbers as they are, an inner node a partial sum."""
    task = Task.whole(Collective.ALL_REDUCE, 4, 5)
    schedule = TREE.schedule(task, AlgorithmSettings((3, 1, 0, 2), (1,) * 4, arity=2))
    rising = {rank: schedule.program(rank).steps[0] for rank in range(4)}
    assert {rank: step.gives for rank, step in rising.items()} == {
        3: Form.DATA,
        1: Form.PARTIAL,
        0: Form.DATA,
        2: Form.DATA,
    }
    assert rising[3].sources == (1, 0)
    assert rising[3].takes == (Form.PARTIAL, Form.DATA)
    assert rising[1].to == (3,)
