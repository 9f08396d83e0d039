"""All-to-all and the barrier."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

from potluck import DistributedContext, Timeout
from support.contexts import in_group, outcomes_in_group

WORLDS = range(1, 6)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("each", [0, 1, 3])
def test_an_all_to_all_is_a_transposition(size: int, each: int) -> None:
    """What rank i has for rank j, rank j has from rank i."""

    def act(context: DistributedContext) -> Any:
        return context.all_to_all(np.repeat(np.arange(size) + 10 * context.rank, each))

    for rank, array in enumerate(in_group(size, act)):
        assert array.tolist() == np.repeat(10 * np.arange(size) + rank, each).tolist()


def test_rows_that_do_not_come_out_even_are_divided_like_everywhere() -> None:
    """The first parts are one row longer."""
    results = in_group(3, lambda context: context.all_to_all(np.arange(4) + 10 * context.rank))
    assert [result.tolist() for result in results] == [
        [0, 1, 10, 11, 20, 21],
        [2, 12, 22],
        [3, 13, 23],
    ]


@pytest.mark.parametrize("told", [True, False])
def test_an_all_to_all_can_be_uneven(told: bool) -> None:
    """The whole matrix is known to all, or each rank says what it has for the others."""
    matrix = [[1, 0, 2], [0, 3, 1], [2, 2, 0]]

    def act(context: DistributedContext) -> Any:
        sends = matrix[context.rank]
        rows = np.repeat(np.arange(3), sends) + 10 * context.rank
        array = torch.tensor(rows).reshape(-1, 1).expand(-1, 2)
        if told:
            return context.all_to_all(array, counts=matrix)
        return context.all_to_all(array, send_counts=sends)

    for rank, result in enumerate(in_group(3, act)):
        rows = [10 * other + rank for other in range(3) for _ in range(matrix[other][rank])]
        assert result.tolist() == [[row, row] for row in rows]


def test_an_all_to_all_may_overwrite_its_input() -> None:
    """The input is copied first where the output is the same memory."""

    def act(context: DistributedContext) -> Any:
        array = np.arange(4) + 10 * context.rank
        assert context.all_to_all(array, out=array) is array
        return array.tolist()

    assert in_group(2, act) == [[0, 1, 10, 11], [2, 3, 12, 13]]


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"counts": [[1, 1]]}, ValueError, "2 rows of 2"),
        ({"send_counts": [1]}, ValueError, "2 numbers"),
        ({"send_counts": [3, -1]}, ValueError, "zero or more"),
        ({"send_counts": [1, 1], "counts": [[1, 1], [1, 1]]}, TypeError, "one of them"),
        ({"counts": [[1, 2], [1, 1]]}, ValueError, "3 belong there"),
        ({"out": np.empty(3)}, ValueError, "2 belong there"),
    ],
)
def test_an_exchange_that_cannot_be_is_refused(
    options: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    """Before anything moves."""

    def act(context: DistributedContext) -> None:
        if context.rank == 0:
            with pytest.raises(kind, match=reason):
                context.all_to_all(np.ones(2), **options)
        context.barrier()

    in_group(2, act)


def test_nobody_passes_a_barrier_early() -> None:
    """The last to come is the first to see all others there."""
    here = set()

    def act(context: DistributedContext) -> int:
        here.add(context.rank)
        context.barrier()
        return len(here)

    assert in_group(5, act) == [5] * 5


def test_a_barrier_alone_is_passed() -> None:
    """A group of one waits for nobody."""
    assert in_group(1, lambda context: context.barrier()) == [None]


def test_a_barrier_can_be_started() -> None:
    """It queues behind what was started before it, so it also says that that is done."""

    def act(context: DistributedContext) -> Any:
        array = np.ones(1000)
        context.all_reduce(array, async_op=True)
        context.barrier(async_op=True).wait(30)
        return array[0]

    assert in_group(3, act) == [3] * 3


def test_a_barrier_gives_up_when_it_is_told_to() -> None:
    """The rank that comes alone gets a time-out."""
    given_up = threading.Event()

    def act(context: DistributedContext) -> None:
        if context.rank:
            given_up.wait(30)
            return
        try:
            context.barrier(timeout=0.05)
        finally:
            given_up.set()

    alone, _ = outcomes_in_group(2, act)
    assert isinstance(alone, Timeout)
