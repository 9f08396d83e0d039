"""Direct: everybody exchanges with everybody, and shares fit the links."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.schedule import verify
from potluck.schedule.algorithms.direct import DIRECT, MOST_SEGMENTS, around, exchange, share_out
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import AlgorithmSettings, Collective, Span, Task


def layout(*shares: int, piece: int = 1 << 16) -> AlgorithmSettings:
    """Ranks in their own order with these shares."""
    return AlgorithmSettings(tuple(range(len(shares))), shares, piece=piece)


@given(st.lists(st.integers(0, 3), min_size=2, max_size=6).filter(any), st.integers(1, 60))
def test_the_sum_does_not_depend_on_the_shares(shares: list[int], count: int) -> None:
    """Whoever owns an element adds in the order of the ranks: the same bits for every plan."""
    task = Task.whole(Collective.ALL_REDUCE, len(shares), count)
    inputs = verify.rough(task, "f4")
    reducer = Reducer.of(ReduceOp.SUM, "f4")
    (right, *_) = verify.expected(task, inputs, reducer)
    for output in verify.play(DIRECT.schedule(task, layout(*shares)), inputs, reducer):
        assert output.tobytes() == right.tobytes()


def test_who_owns_nothing_only_contributes_and_gets_the_result() -> None:
    """A rank with a slow link sends the vector once and receives it once."""
    task = Task.whole(Collective.ALL_REDUCE, 4, 300)
    schedule = DIRECT.schedule(task, layout(1, 1, 1, 0))
    moved = []
    for program in schedule.programs:
        out = sum(step.length * len(step.to) for step in program.steps)
        came = sum(step.length * len(step.sources) for step in program.steps)
        moved.append((out, came))
    assert moved == [(500, 500), (500, 500), (500, 500), (300, 300)]


def test_results_flow_back_before_the_last_contribution_has_gone() -> None:
    """On the stream between two owners, results and contributions alternate."""
    task = Task.whole(Collective.ALL_REDUCE, 2, 80)
    program = DIRECT.schedule(task, layout(1, 1, piece=10)).program(0)
    kinds = ["result" if program.steps[i].final else "own" for i in program.outgoing[1]]
    assert kinds == ["own", "own", "result", "own", "result", "own", "result", "result"]


def test_segments_are_bounded() -> None:
    """A huge vector does not make a huge program."""
    task = Task.whole(Collective.ALL_REDUCE, 3, 10**9)
    owners = share_out(task, layout(1, 0, 2, piece=1000))
    assert {rank: len(spans) for rank, spans in owners.items()} == {
        0: MOST_SEGMENTS,
        2: MOST_SEGMENTS,
    }
    assert len(DIRECT.schedule(task, layout(1, 0, 2, piece=1000)).program(0).steps) < 40
    assert share_out(Task.whole(Collective.ALL_REDUCE, 2, 0), layout(1, 1)) == {}


def test_an_owner_that_is_not_the_root_keeps_its_input() -> None:
    """It passes its sums on without storing them."""
    task = Task.whole(Collective.REDUCE, 3, 30, root=0)
    program = DIRECT.schedule(task, layout(1, 1, 1)).program(1)
    assert all(step.into is None for step in program.steps)


def test_the_others_begin_after_oneself() -> None:
    """So that not everybody turns to rank 0 first."""
    assert around(2, range(5)) == (3, 4, 0, 1)
    assert around(2, [0, 3]) == (3, 0)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_an_exchange_needs_only_the_own_row_and_column(rank: int) -> None:
    """A rank makes its program without knowing what others exchange among themselves."""
    matrix = np.array([[1, 0, 2], [3, 1, 0], [0, 0, 4]])
    task = Task.exchange(matrix.tolist())
    program = exchange(rank, matrix[rank].tolist(), matrix[:, rank].tolist())
    assert program == DIRECT.schedule(task).program(rank)


def test_an_exchange_of_nothing_is_nothing() -> None:
    """No step, whatever the number of ranks."""
    program = exchange(1, [0, 0, 0], [0, 0, 0])
    assert program.steps == ()
    assert program.input == Span(0, 0)
