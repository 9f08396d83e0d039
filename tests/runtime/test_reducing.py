"""All-reduce, reduce and reduce-scatter, of arrays of every kind."""

import weakref
from typing import Any

import numpy as np
import pytest
import torch

from potluck import DistributedContext, InvalidRank, ReduceOp, UnsupportedOperation
from potluck.collective.reduce import DTYPES
from support.contexts import in_group, outcomes_in_group
from support.threads import eventually

WORLDS = range(1, 6)


def mine(rank: int, count: int, dtype: Any = "float64") -> Any:
    """Numbers of one rank: small, so that every type can add them up."""
    return (np.arange(count) % 3 + rank + 1).astype(dtype)


def total(size: int, count: int) -> Any:
    """The sum of all ranks' numbers."""
    return sum(mine(rank, count) for rank in range(size))


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("count", [0, 1, 2, 7, 1000])
def test_an_all_reduce_works_in_place(size: int, count: int) -> None:
    """Every rank's own array has the sum, also where there are fewer elements than ranks."""

    def act(context: DistributedContext) -> Any:
        array = mine(context.rank, count)
        assert context.all_reduce(array) is array
        return array

    for array in in_group(size, act):
        assert np.array_equal(array, total(size, count))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_type_can_be_summed(dtype: Any) -> None:
    """Floats of any width, all integers, truth values and complex numbers."""
    for array in in_group(3, lambda context: context.all_reduce(mine(context.rank, 5, dtype))):
        assert array.dtype == dtype
        assert np.array_equal(array, total(3, 5).astype(dtype))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", [6, 9]),
        (ReduceOp.SUM, [6, 9]),
        ("MEAN", [2, 3]),
        ("avg", [2, 3]),
        ("min", [1, 2]),
        ("max", [3, 4]),
        ("product", [6, 24]),
        ("prod", [6, 24]),
        (torch.distributed.ReduceOp.MAX, [3, 4]),
    ],
    ids=str,
)
def test_a_reduction_is_named_or_given(op: Any, expected: list[float]) -> None:
    """The names of other libraries are understood too."""
    for array in in_group(3, lambda context: context.all_reduce(mine(context.rank, 2), op)):
        assert array.tolist() == expected


@pytest.mark.parametrize(
    ("op", "expected"),
    [("bit_and", 0), ("bit_or", 3), ("bxor", 0), ("and", 1), ("or", 1)],
)
def test_bits_and_truth_are_reduced(op: str, expected: int) -> None:
    """Of the integers 1, 2 and 3."""
    results = in_group(3, lambda context: context.all_reduce(context.rank + 1, op))
    assert results == [expected] * 3


@pytest.mark.parametrize(
    ("array", "op", "kind", "reason"),
    [
        (np.ones(2, "i4"), "mean", UnsupportedOperation, "mean of integers"),
        (np.ones(2), "bit_or", UnsupportedOperation, "Bits and truth"),
        (np.ones(2, "c8"), "max", UnsupportedOperation, "no order"),
        (np.ones(2), "median", ValueError, "'median' is no reduction"),
        (np.zeros(1, "M8[s]"), "sum", UnsupportedOperation, "cannot be reduced"),
        (bytearray(4), "sum", TypeError, "dtype='float32'"),
        (b"1234", "sum", ValueError, "read-only"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_reason(
    array: Any, op: str, kind: type[Exception], reason: str
) -> None:
    """Before anything moves, so the group goes on."""

    def act(context: DistributedContext) -> float:
        with pytest.raises(kind, match=reason):
            context.all_reduce(array, op)
        return context.all_reduce(1.0)

    assert in_group(2, act) == [2, 2]


def test_a_single_number_comes_back_reduced() -> None:
    """A loss is averaged without making an array of it."""
    results = in_group(3, lambda context: context.all_reduce(float(context.rank), "mean"))
    assert results == [1.0] * 3


def test_the_result_can_go_elsewhere() -> None:
    """With out= the array stays as it is, and what is returned is out."""

    def act(context: DistributedContext) -> Any:
        array, out = mine(context.rank, 4), np.empty(4)
        assert context.all_reduce(array, out=out) is out
        assert np.array_equal(array, mine(context.rank, 4))
        return out

    for out in in_group(3, act):
        assert np.array_equal(out, total(3, 4))


@pytest.mark.parametrize(
    ("out", "kind", "reason"),
    [
        (np.empty(3), ValueError, "3 elements, but 4"),
        (np.empty(4, "f4"), TypeError, "one type"),
        (np.broadcast_to(0.0, 4), ValueError, "read-only"),
    ],
)
def test_an_out_that_does_not_fit_is_refused(out: Any, kind: type[Exception], reason: str) -> None:
    """Another size or type, or no place to write."""
    (outcome,) = outcomes_in_group(1, lambda context: context.all_reduce(np.ones(4), out=out))
    assert isinstance(outcome, kind)
    assert reason in str(outcome)


def test_input_and_output_may_overlap_anyhow() -> None:
    """A shifted view of the same memory gives the same sum as a copy would."""

    def act(context: DistributedContext) -> Any:
        memory = mine(context.rank, 9)
        return context.all_reduce(memory[:8], out=memory[1:])

    for out in in_group(2, act):
        assert np.array_equal(out, total(2, 9)[:8])


def test_a_strided_array_is_reduced_where_it_lies() -> None:
    """The elements between its own are not touched."""

    def act(context: DistributedContext) -> Any:
        whole = np.full((4, 6), -1.0)
        context.all_reduce(whole[::2, 1::2])
        return whole

    for whole in in_group(3, act):
        assert (whole[::2, 1::2] == -3).all()
        assert (whole == -1).sum() == 24 - 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("strided", [False, True])
def test_tensors_are_reduced_in_place(dtype: torch.dtype, strided: bool) -> None:
    """Contiguous or not; bfloat16 is added up in float32 and rounded once."""

    def act(context: DistributedContext) -> Any:
        whole = torch.full((2, 6), context.rank + 1, dtype=dtype)
        part = whole[:, ::2] if strided else whole
        assert context.all_reduce(part) is part
        return part

    for part in in_group(3, act):
        assert (part == 6).all()


def test_a_raw_buffer_is_reduced_as_what_the_caller_says() -> None:
    """As in the origin: bytes in, bytes out, the type is named."""

    def act(context: DistributedContext) -> bytes:
        buffer = bytearray(np.array([context.rank, 1], "f4").tobytes())
        assert context.all_reduce(buffer, dtype="float32") is buffer
        return bytes(buffer)

    for buffer in in_group(3, act):
        assert np.frombuffer(buffer, "f4").tolist() == [3, 3]


@pytest.mark.parametrize(
    "strategy", ["ring", "tree", "tree:3", "centralized", "direct", "doubling"]
)
def test_a_strategy_can_be_named(strategy: str) -> None:
    """All of them give the same sum."""

    def act(context: DistributedContext) -> Any:
        return context.all_reduce(mine(context.rank, 11), strategy=strategy)

    for array in in_group(3, act):
        assert np.array_equal(array, total(3, 11))


def test_an_unknown_strategy_is_refused() -> None:
    """And the others are listed."""
    (outcome,) = outcomes_in_group(1, lambda context: context.all_reduce(1.0, strategy="star"))
    assert isinstance(outcome, ValueError)
    assert "tree:ARITY" in str(outcome)


@pytest.mark.parametrize("size", WORLDS)
def test_every_rank_can_be_the_root_of_a_reduce(size: int) -> None:
    """The root has the sum in its own array, the others keep theirs and get None."""

    def act(context: DistributedContext) -> list[Any]:
        kept = []
        for root in range(size):
            array = mine(context.rank, 5)
            result = context.reduce(array, root)
            assert (result is array) == (context.rank == root)
            kept.append(array)
        return kept

    for rank, arrays in enumerate(in_group(size, act)):
        for root, array in enumerate(arrays):
            assert np.array_equal(array, total(size, 5) if rank == root else mine(rank, 5))


def test_a_reduce_reads_what_cannot_be_written() -> None:
    """Only the root needs a place for the result, and out= can be that."""

    def act(context: DistributedContext) -> Any:
        array = mine(context.rank, 3)
        array.flags.writeable = False
        return context.reduce(array, 1, out=np.empty(3) if context.rank == 1 else None)

    nothing, result = in_group(2, act)
    assert nothing is None
    assert np.array_equal(result, total(2, 3))


@pytest.mark.parametrize(
    ("root", "kind"), [(-1, InvalidRank), (2, InvalidRank), (True, TypeError), (0.0, TypeError)]
)
def test_a_root_that_does_not_exist_is_refused(root: Any, kind: type[Exception]) -> None:
    """Negative numbers do not count from the end, and truth values do not count."""
    for outcome in outcomes_in_group(2, lambda context: context.reduce(1.0, root)):
        assert isinstance(outcome, kind)


@pytest.mark.parametrize("size", WORLDS)
@pytest.mark.parametrize("rows", [0, 1, 2, 7, 12])
def test_a_reduce_scatter_gives_each_rank_its_rows(size: int, rows: int) -> None:
    """Parts differ by at most one row, and together they are the sum."""

    def act(context: DistributedContext) -> Any:
        return context.reduce_scatter(mine(context.rank, rows * 2).reshape(rows, 2))

    parts = in_group(size, act)
    assert [part.shape for part in parts] == [
        part.shape for part in np.array_split(np.empty((rows, 2)), size)
    ]
    assert np.array_equal(np.concatenate(parts).reshape(-1), total(size, rows * 2))


def test_a_reduce_scatter_can_be_uneven() -> None:
    """Counts say how many rows each rank gets; a block of the input may be the place for it."""
    counts = [3, 0, 1]

    def act(context: DistributedContext) -> Any:
        array = mine(context.rank, 4)
        start = sum(counts[: context.rank])
        own = array[start : start + counts[context.rank]]
        return context.reduce_scatter(array, "max", counts=counts, out=own)

    parts = in_group(3, act)
    assert [len(part) for part in parts] == counts
    assert np.array_equal(np.concatenate(parts), mine(2, 4))


@pytest.mark.parametrize(
    ("counts", "reason"),
    [([1, 1], "2 belong there"), ([2], "as many counts"), ([5, -1], "zero or")],
)
def test_counts_that_do_not_fit_are_refused(counts: list[int], reason: str) -> None:
    """Each rank can see that for itself."""
    for outcome in outcomes_in_group(
        2, lambda context: context.reduce_scatter(np.ones(4), counts=counts)
    ):
        assert isinstance(outcome, ValueError)
        assert reason in str(outcome)


def test_work_goes_on_beside_the_caller() -> None:
    """Many all-reduces are started at once, and each gives its own array back."""

    def act(context: DistributedContext) -> list[Any]:
        arrays = [mine(context.rank, count) for count in range(20)]
        works = [context.all_reduce(array, async_op=True) for array in arrays]
        strided = np.ones((3, 4))[:, 1]
        last = context.all_reduce(strided, async_op=True)
        assert [work.wait(30) is array for work, array in zip(works, arrays, strict=True)]
        assert last.wait(30) is strided
        assert last.done
        assert last.exception() is None
        assert strided.tolist() == [context.world_size] * 3
        return arrays

    for arrays in in_group(3, act):
        for count, array in enumerate(arrays):
            assert np.array_equal(array, total(3, count))


def test_nothing_holds_an_array_afterwards() -> None:
    """A buffer may grow again, and an array's memory is free as soon as its owner forgets it."""

    def act(context: DistributedContext) -> bool:
        buffer = bytearray(8)
        context.all_reduce(buffer, dtype="float32")
        buffer.append(1)
        array = np.ones(1000)
        kept = weakref.ref(array)
        context.all_reduce(array, async_op=True).wait(30)
        del array
        eventually(lambda: kept() is None)  # the group's thread may be a moment behind
        return True

    assert in_group(2, act) == [True, True]


def test_a_time_out_belongs_to_the_wait() -> None:
    """It cannot be given to work that nobody waits for yet."""
    (outcome,) = outcomes_in_group(
        1,
        lambda context: context.all_reduce(1.0, timeout=3, async_op=True),  # type: ignore[call-overload]
    )
    assert isinstance(outcome, ValueError)
    assert "wait(timeout)" in str(outcome)
