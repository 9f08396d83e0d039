"""Broadcast, all-gather, gather and scatter, of arrays of every kind."""

from typing import Any

import numpy as np
import pytest
import torch

from potluck import CollectiveMismatch, DistributedContext
from potluck.collective.reduce import DTYPES
from support.contexts import in_group, outcomes_in_group

WORLDS = range(1, 6)


def block(rank: int, rows: int = 2) -> Any:
    """The rows of one rank, which no other has."""
    return np.arange(rows * 3).reshape(rows, 3) + 100 * rank


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("count", [0, 1, 5, 1000])
def test_every_rank_can_broadcast(size: int, count: int) -> None:
    """All ranks have the root's elements in their own arrays."""

    def act(context: DistributedContext) -> list[Any]:
        arrays = [np.full(count, context.rank) for _ in range(size)]
        for root, array in enumerate(arrays):
            assert context.broadcast(array, root) is array
        return arrays

    for arrays in in_group(size, act):
        for root, array in enumerate(arrays):
            assert array.tolist() == [root] * count


@pytest.mark.parametrize("dtype", [*DTYPES, "M8[s]", "f8", ">i2", "S3", "U2", "V4"], ids=str)
def test_every_type_can_be_moved(dtype: Any) -> None:
    """Those that cannot be reduced included."""

    def act(context: DistributedContext) -> Any:
        array = values.copy() if context.rank == 1 else np.zeros(4, dtype)
        return context.broadcast(array, 1), context.all_gather(values[context.rank :][:2])

    values = np.zeros(4, dtype)
    values.view("u1")[...] = np.arange(values.nbytes) % 2  # truth values have no others
    for told, gathered in in_group(2, act):
        assert told.dtype == gathered.dtype == values.dtype
        assert told.tobytes() == values.tobytes()
        assert gathered.tobytes() == values[:2].tobytes() + values[1:3].tobytes()


def test_the_root_of_a_broadcast_may_be_read_only() -> None:
    """Its array is only read; bytes will do, and a number is a number elsewhere too."""

    def act(context: DistributedContext) -> Any:
        told = context.broadcast(7 if context.rank == 0 else 0)
        return context.broadcast(b"soup" if context.rank == 0 else bytearray(4)), told

    assert in_group(2, act) == [(b"soup", 7), (bytearray(b"soup"), 7)]


@pytest.mark.parametrize("strided", [False, True])
def test_parameters_are_broadcast_in_place(strided: bool) -> None:
    """As a user of PyTorch starts a training."""

    def act(context: DistributedContext) -> Any:
        weight = torch.full((3, 4), float(context.rank), dtype=torch.bfloat16)
        parameter = torch.nn.Parameter(weight.t() if strided else weight)
        context.broadcast(parameter, 2)
        return parameter

    for parameter in in_group(3, act):
        assert (parameter == 2).all()
        assert parameter.is_leaf


@pytest.mark.parametrize("strategy", ["ring", "tree", "tree:1", "centralized", "direct"])
def test_a_strategy_can_be_named(strategy: str) -> None:
    """All of them move the same."""

    def act(context: DistributedContext) -> Any:
        return context.broadcast(np.full(9, context.rank), 1, strategy=strategy)

    for array in in_group(4, act):
        assert (array == 1).all()


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("rows", [0, 1, 3])
def test_an_all_gather_joins_the_rows_of_all(size: int, rows: int) -> None:
    """In rank order, along the first dimension."""
    expected = np.concatenate([block(rank, rows) for rank in range(size)])
    for gathered in in_group(size, lambda context: context.all_gather(block(context.rank, rows))):
        assert np.array_equal(gathered, expected)
        assert gathered.shape == expected.shape


def test_single_numbers_are_gathered_into_an_array() -> None:
    """One row each."""
    for gathered in in_group(3, lambda context: context.all_gather(context.rank + 0.5)):
        assert isinstance(gathered, np.ndarray)
        assert gathered.tolist() == [0.5, 1.5, 2.5]


@pytest.mark.parametrize("told", [True, False])
def test_an_all_gather_can_be_uneven(told: bool) -> None:
    """The counts are known to all, or the ranks tell each other."""
    counts = [2, 0, 5]

    def act(context: DistributedContext) -> Any:
        own = block(context.rank, counts[context.rank])
        return context.all_gather(own, counts=counts if told else "ask")

    expected = np.concatenate([block(rank, rows) for rank, rows in enumerate(counts)])
    for gathered in in_group(3, act):
        assert np.array_equal(gathered, expected)


def test_counts_may_be_an_array() -> None:
    """Numbers of numpy count like those of Python."""

    def act(context: DistributedContext) -> Any:
        counts: Any = np.array([1, 2])
        own = torch.ones(int(counts[context.rank]), 2)
        gathered = context.all_gather(own, counts=counts)
        return context.reduce_scatter(gathered, counts=counts).tolist()

    assert in_group(2, act) == [[[2, 2]], [[2, 2], [2, 2]]]


def test_an_all_gather_works_in_place() -> None:
    """The input may be the place in the output where it belongs, or any other."""

    def act(context: DistributedContext) -> list[Any]:
        whole, shifted = np.zeros((6, 3), int), np.zeros((6, 3), int)
        own = whole[2 * context.rank :][:2]
        own[...] = block(context.rank)
        shifted[1:3] = block(context.rank)
        assert context.all_gather(own, out=whole) is whole
        context.all_gather(shifted[1:3], out=shifted)
        return [whole, shifted]

    expected = np.concatenate([block(rank) for rank in range(3)])
    for pair in in_group(3, act):
        for gathered in pair:
            assert np.array_equal(gathered, expected)


def test_tensors_are_gathered_into_tensors() -> None:
    """What comes back is of the kind that was given."""

    def act(context: DistributedContext) -> Any:
        return context.all_gather(torch.full((1, 2), context.rank, dtype=torch.bfloat16))

    for gathered in in_group(3, act):
        assert gathered.dtype is torch.bfloat16
        assert gathered.tolist() == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("size", WORLDS)
def test_every_rank_can_gather(size: int) -> None:
    """The root has all rows, the others None."""

    def act(context: DistributedContext) -> list[Any]:
        return [context.gather(block(context.rank), root) for root in range(size)]

    expected = np.concatenate([block(rank) for rank in range(size)])
    for rank, results in enumerate(in_group(size, act)):
        for root, result in enumerate(results):
            if rank == root:
                assert np.array_equal(result, expected)
            else:
                assert result is None


def test_a_gather_can_be_uneven_and_go_elsewhere() -> None:
    """Out counts at the root only."""
    counts = [1, 3]

    def act(context: DistributedContext) -> Any:
        out = np.zeros((4, 3), int) if context.rank == 1 else None
        result = context.gather(block(context.rank, counts[context.rank]), 1, counts="ask", out=out)
        assert result is out
        return result

    _, gathered = in_group(2, act)
    assert np.array_equal(gathered, np.concatenate([block(0, 1), block(1, 3)]))


@pytest.mark.parametrize("size", WORLDS)
def test_every_rank_can_scatter(size: int) -> None:
    """Each rank has its rows of the root's array."""
    whole = np.arange(size * 6).reshape(size * 2, 3)

    def act(context: DistributedContext) -> list[Any]:
        parts = []
        for root in range(size):
            if context.rank == root:
                parts.append(context.scatter(whole + root, root))
            else:
                out = np.zeros((2, 3), int)
                assert context.scatter(None, root, out=out) is out
                parts.append(out)
        return parts

    for rank, parts in enumerate(in_group(size, act)):
        for root, part in enumerate(parts):
            assert np.array_equal(part, whole[2 * rank :][:2] + root)


def test_a_scatter_can_be_uneven() -> None:
    """All ranks pass the counts."""
    counts = [1, 0, 4]

    def act(context: DistributedContext) -> Any:
        out = np.zeros(counts[context.rank])
        array = np.arange(5.0) if context.rank == 2 else None
        return context.scatter(array, 2, counts=counts, out=out)

    assert [part.tolist() for part in in_group(3, act)] == [[0], [], [1, 2, 3, 4]]


@pytest.mark.parametrize(
    ("arguments", "kind", "reason"),
    [
        ({"array": None}, TypeError, "is the root"),
        ({"array": np.zeros(3)}, ValueError, "pass counts="),
        ({"array": np.zeros(3), "counts": [1, 1]}, ValueError, "2 belong there"),
        ({"array": None, "root": 1}, TypeError, "must pass out="),
        ({"root": 1, "out": np.zeros(2), "counts": [1, 1]}, ValueError, "1 belong there"),
    ],
)
def test_a_scatter_that_cannot_be_is_refused(
    arguments: dict[str, Any], kind: type[Exception], reason: str
) -> None:
    """Each with the sentence that says what is missing."""

    def act(context: DistributedContext) -> None:
        if context.rank == 0:
            with pytest.raises(kind, match=reason):
                context.scatter(**arguments)
        context.barrier()

    in_group(2, act)


def test_counts_are_numbers_or_a_question() -> None:
    """Another word is refused."""
    (outcome,) = outcomes_in_group(
        1,
        lambda context: context.all_gather(np.ones(1), counts="guess"),  # type: ignore[arg-type]
    )
    assert isinstance(outcome, ValueError)
    assert "'ask'" in str(outcome)


def test_ranks_that_disagree_are_told_so() -> None:
    """An uneven all-gather without counts is an error on all ranks, not a hang."""
    outcomes = outcomes_in_group(2, lambda context: context.all_gather(np.ones(context.rank + 1)))
    assert [type(outcome) for outcome in outcomes] == [CollectiveMismatch] * 2


def test_every_move_can_be_started() -> None:
    """With async_op each returns its work, and the work its result."""

    def act(context: DistributedContext) -> list[Any]:
        out = np.zeros((1, 3), int) if context.rank else None
        works = [
            context.broadcast(block(context.rank), async_op=True),
            context.all_gather(block(context.rank, 1), async_op=True),
            context.gather(block(context.rank, 1), async_op=True),
            context.scatter(block(0, 2) if out is None else None, out=out, async_op=True),
        ]
        return [work.wait(30) for work in works]

    joined = np.concatenate([block(0, 1), block(1, 1)])
    first, second = in_group(2, act)
    for told, gathered, _, _ in (first, second):
        assert np.array_equal(told, block(0))
        assert np.array_equal(gathered, joined)
    assert np.array_equal(first[2], joined)
    assert second[2] is None
    assert np.array_equal(np.concatenate([first[3], second[3]]), block(0, 2))
