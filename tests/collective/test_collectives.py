"""all_reduce(compression=...): what users get from it."""

import re
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import (
    Aborted,
    CollectiveMismatch,
    CompressionStrategy,
    DistributedContext,
    DistributedError,
    GradientCompressor,
    InvalidRank,
    MalformedFrame,
    ReduceOp,
    Timeout,
    UnsupportedOperation,
    all_reduce,
)
from potluck.collective.call import Purpose, part_of
from potluck.compression.base import Floats
from potluck.compression.sparse import Sparse
from potluck.schedule.reduce import DTYPES
from potluck.schedule.task import Collective, Task
from support.contexts import in_group, outcomes_in_group
from support.gradients import normal, relative_error
from support.programs import Step, compare, run, steps
from support.threads import eventually

SHAPE = (60, 50)
METHODS = [
    *("none", "float16", "bfloat16", "int8", "onebit"),
    *("topk:0.1", "random:0.1", "powersgd:2", "auto"),
]
methods = pytest.mark.parametrize("method", METHODS)


def gradient(rank: int, step: int = 0) -> Floats:
    """Of a rank in a step."""
    return normal(3000, seed=100 * step + rank).reshape(SHAPE)


def wanted(size: int, steps: int = 1) -> Any:
    """The sum over all ranks and steps."""
    return sum(
        gradient(rank, step).astype(np.float64) for rank in range(size) for step in range(steps)
    )


@methods
@pytest.mark.parametrize("size", [1, 2, 3])
def test_all_ranks_get_the_same_bits_step_after_step(method: str, size: int) -> None:
    """With error feedback, whatever the method."""

    def action(context: DistributedContext) -> list[bytes]:
        compressor = GradientCompressor(method)
        return [
            context.all_reduce(
                gradient(context.rank, step), "mean", compression=compressor
            ).tobytes()
            for step in range(4)
        ]

    assert len({tuple(each) for each in in_group(size, action)}) == 1


@methods
def test_with_feedback_everything_arrives_in_the_end(method: str) -> None:
    """What came out, and what is left behind on all ranks, is what went in."""
    steps = 5

    def action(context: DistributedContext) -> tuple[Any, Any]:
        compressor = GradientCompressor(method)
        total = np.zeros(SHAPE)
        for step in range(steps):
            total += context.all_reduce(
                gradient(context.rank, step), compression=compressor.tensor("w")
            )
        left = compressor.residuals.get("w")
        return total, 0.0 if left is None else left.reshape(SHAPE)

    ends = in_group(3, action)
    found = ends[0][0] + sum(left for _, left in ends)
    np.testing.assert_allclose(found, wanted(3, steps), atol=1e-4)


def test_a_method_by_name_needs_no_memory() -> None:
    """A text, or a strategy; in place, as always."""

    def action(context: DistributedContext) -> list[float]:
        errors = []
        for compression in ("int8", CompressionStrategy.BFLOAT16, "none"):
            array = gradient(context.rank)
            assert context.all_reduce(array, compression=compression) is array
            errors.append(relative_error(array, wanted(3).astype(np.float32)))
        return errors

    for int8, bfloat16, none in in_group(3, action):
        assert none < 1e-6 < bfloat16 < 0.005 < int8 < 0.01


def test_the_function_takes_it_too() -> None:
    """On any backend."""

    def action(context: DistributedContext) -> float:
        array = all_reduce(context.backend, gradient(context.rank), compression="int8")
        return relative_error(array, wanted(2).astype(np.float32))

    assert all(1e-6 < error < 0.01 for error in in_group(2, action))


def test_the_result_may_go_elsewhere() -> None:
    """The gradient stays as it is."""

    def action(context: DistributedContext) -> bool:
        array, out = gradient(context.rank), np.empty(SHAPE, np.float32)
        for compression in ("int8", GradientCompressor("topk:0.5")):
            context.all_reduce(array, compression=compression, out=out)
            assert (array == gradient(context.rank)).all()
            assert relative_error(out, wanted(2).astype(np.float32)) < 0.5
        return True

    assert all(in_group(2, action))


def test_several_can_be_under_way() -> None:
    """A compressor keeps the tensors of asynchronous operations apart."""

    def action(context: DistributedContext) -> list[bytes]:
        compressor = GradientCompressor("int8")
        works = [
            context.all_reduce(
                gradient(context.rank, number),
                compression=compressor.tensor(f"tensor {number}"),
                async_op=True,
            )
            for number in range(4)
        ]
        ends = [work.wait().tobytes() for work in works]
        assert len(compressor.residuals) == 4
        return ends

    first, second = in_group(2, action)
    assert first == second


def test_a_step_that_is_not_committed_is_repeated_exactly() -> None:
    """What was left behind changes with the step, not with the try."""

    def action(context: DistributedContext) -> bool:
        for method in METHODS:
            compressor = GradientCompressor(method, auto_commit=False)

            def step(number: int, by: GradientCompressor = compressor) -> bytes:
                array = gradient(context.rank, number)
                return context.all_reduce(array, compression=by).tobytes()

            step(0)
            compressor.commit()
            first = step(1)
            compressor.discard()
            assert step(1) == first
        return True

    assert all(in_group(2, action))


def test_dense_gradients_are_not_sent_sparsely() -> None:
    """Where indices and values take more than the whole, the whole is sent, and nothing is left."""

    def action(context: DistributedContext) -> tuple[Any, float]:
        compressor = GradientCompressor("topk:1")
        array = context.all_reduce(gradient(context.rank), compression=compressor)
        return array, float(np.abs(compressor.residuals[""]).max())

    for array, left in in_group(3, action):
        np.testing.assert_allclose(array, wanted(3), atol=1e-5)
        assert left == 0.0


def test_a_newcomer_finds_its_way_in() -> None:
    """A rank that has kept nothing makes all begin again, and all end with the same bits."""

    def action(context: DistributedContext) -> list[bytes]:
        ends = []
        for method in ("powersgd:2", "random:0.1"):
            compressor = GradientCompressor(method)
            for step in range(3):
                if step == 2 and context.rank == 1:
                    compressor = GradientCompressor(method)
                array = gradient(context.rank, step)
                ends.append(context.all_reduce(array, compression=compressor).tobytes())
        return ends

    first, second = in_group(2, action)
    assert first == second


def test_seeds_that_differ_are_named() -> None:
    """Or every rank would send other values."""

    def action(context: DistributedContext) -> None:
        compressor = GradientCompressor("random:0.1", seed=context.rank)
        context.all_reduce(gradient(0), compression=compressor)

    for outcome in outcomes_in_group(2, action):
        assert isinstance(outcome, ValueError)
        assert "the seeds are [0, 1]" in str(outcome)


@pytest.mark.parametrize("method", ["topk:0.01", "onebit", "random:0.1", "powersgd:2"])
def test_methods_without_use_for_it_want_a_memory(method: str) -> None:
    """The error says how to give them one."""

    def action(context: DistributedContext) -> None:
        context.all_reduce(gradient(0), compression=method)

    (outcome,) = outcomes_in_group(1, action)
    assert isinstance(outcome, UnsupportedOperation)
    assert f"GradientCompressor('{method}')" in str(outcome)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"op": "max"}, "sum and mean, not max"),
        ({"strategy": "ring"}, "ring does not support compression"),
        ({"array": np.zeros(3)}, "not float64. Convert the array to float32"),
        ({"array": np.zeros(3, np.int64), "compression": "auto"}, "not int64"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], words: str) -> None:
    """Before anything moves."""

    def action(context: DistributedContext) -> None:
        array = options.get("array", gradient(0))
        rest = {key: value for key, value in options.items() if key != "array"}
        context.all_reduce(array, **{"compression": "int8", **rest})

    for outcome in outcomes_in_group(2, action):
        assert isinstance(outcome, UnsupportedOperation)
        assert words in str(outcome)


def test_sparse_values_that_cannot_be_decoded_end_it_on_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the name of the rank that sent them."""
    pack = Sparse.pack

    def lie(sparse: Sparse) -> Any:
        packed = pack(sparse)
        if sparse.values[0] == 7.0:  # the mark of rank 1
            packed[:8].view(np.uint64)[0] += 1
        return packed

    monkeypatch.setattr(Sparse, "pack", lie)

    def action(context: DistributedContext) -> None:
        array = gradient(context.rank)
        array[0, 0] = 6.0 + context.rank
        context.all_reduce(array, compression=GradientCompressor("topk:0.01"))
        context.barrier()

    outcomes = outcomes_in_group(2, action)
    assert all(isinstance(outcome, MalformedFrame | Aborted) for outcome in outcomes)
    assert "Rank 1" in str(outcomes[0])


def test_large_arrays_are_compressed_only_where_that_pays() -> None:
    """Within one process nothing is faster than memory: auto ends with none, and exact sums."""

    def action(context: DistributedContext) -> bool:
        compressor = GradientCompressor("auto")
        array = normal(1 << 17, context.rank)
        for _ in range(3):
            context.all_reduce(array.copy(), compression=compressor)
        found = context.all_reduce(array.copy(), compression="auto")
        assert context.compression_choices, "the links are known by now"
        for choice in context.compression_choices:
            assert re.match(rf"{choice.strategy}, (because|as always on) ", choice.reason)
        return relative_error(found, normal(1 << 17, 0) + normal(1 << 17, 1)) < 0.02

    assert all(in_group(2, action))


# --------------------------------------------------------------------------------------------------
# All-to-all and the barrier.

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
        ({"send_counts": [1]}, ValueError, "2 non-negative numbers"),
        ({"send_counts": [3, -1]}, ValueError, "non-negative"),
        (
            {"send_counts": [1, 1], "counts": [[1, 1], [1, 1]]},
            TypeError,
            "either counts or send_counts",
        ),
        ({"counts": [[1, 2], [1, 1]]}, ValueError, "expected 3, got"),
        ({"out": np.empty(3)}, ValueError, "expected 2, got"),
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


# --------------------------------------------------------------------------------------------------
# Broadcast, all-gather, gather and scatter, of arrays of every kind.

MOVING_WORLDS = range(1, 6)


def block(rank: int, rows: int = 2) -> Any:
    """The rows of one rank, which no other has."""
    return np.arange(rows * 3).reshape(rows, 3) + 100 * rank


@pytest.mark.parametrize("size", MOVING_WORLDS)
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


@pytest.mark.parametrize("size", MOVING_WORLDS)
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


@pytest.mark.parametrize("size", MOVING_WORLDS)
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


@pytest.mark.parametrize("size", MOVING_WORLDS)
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
        ({"array": np.zeros(3), "counts": [1, 1]}, ValueError, "expected 2, got"),
        ({"array": None, "root": 1}, TypeError, "must pass out="),
        ({"root": 1, "out": np.zeros(2), "counts": [1, 1]}, ValueError, "expected 1, got"),
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


# --------------------------------------------------------------------------------------------------
# Small objects: broadcast, all-gather, gather and scatter.

OBJECTS_WORLDS = range(1, 6)
THINGS = st.recursive(
    st.none() | st.integers() | st.text() | st.binary(max_size=50) | st.floats(allow_nan=False),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@pytest.mark.parametrize("size", OBJECTS_WORLDS)
def test_every_rank_can_broadcast_an_object(size: int) -> None:
    """The others need not know what it is."""

    def act(context: DistributedContext) -> list[Any]:
        return [
            context.broadcast_object({"root": root} if context.rank == root else None, root)
            for root in range(size)
        ]

    assert in_group(size, act) == [[{"root": root} for root in range(size)]] * size


@pytest.mark.parametrize("size", OBJECTS_WORLDS)
def test_all_objects_are_gathered_in_rank_order(size: int) -> None:
    """Of any length each."""
    everything = [{"rank": rank, "text": "x" * rank * 100} for rank in range(size)]

    def act(context: DistributedContext) -> tuple[Any, Any]:
        own = everything[context.rank]
        return context.all_gather_object(own), context.gather_object(own, size - 1)

    for rank, (gathered, at_root) in enumerate(in_group(size, act)):
        assert gathered == everything
        assert at_root == (everything if rank == size - 1 else None)


@pytest.mark.parametrize("size", OBJECTS_WORLDS)
def test_objects_are_scattered(size: int) -> None:
    """Each rank gets its own, of its own length."""
    everything = [("part", rank, b"." * rank) for rank in range(size)]

    def act(context: DistributedContext) -> Any:
        return context.scatter_object(everything if context.rank == 0 else None)

    assert in_group(size, act) == everything


@settings(max_examples=15)
@given(st.lists(THINGS, min_size=2, max_size=2))
def test_any_objects_arrive(things: list[Any]) -> None:
    """Whatever can be written down."""
    assert in_group(2, lambda context: context.all_gather_object(things[context.rank])) == [
        things,
        things,
    ]


@pytest.mark.parametrize(
    "call",
    [
        lambda context, bad: context.broadcast_object(bad if context.rank == 1 else None, 1),
        lambda context, bad: context.all_gather_object(bad if context.rank == 1 else 0),
        lambda context, bad: context.gather_object(bad if context.rank == 1 else 0),
        lambda context, bad: context.scatter_object([bad] * 3 if context.rank == 1 else None, 1),
    ],
)
@pytest.mark.parametrize(
    ("bad", "kind"), [(object(), TypeError), ("x" * (20 << 20), ValueError)], ids=["type", "size"]
)
def test_an_object_that_cannot_travel_is_an_error_everywhere(
    call: Any, bad: Any, kind: type[Exception]
) -> None:
    """The rank that has it gets the reason, the others its rank; the group goes on."""

    def act(context: DistributedContext) -> Any:
        try:
            call(context, bad)
        except (DistributedError, TypeError, ValueError) as error:
            return error, context.all_reduce(1)
        return None, 0

    outcomes = in_group(3, act)
    assert [count for _, count in outcomes] == [3, 3, 3]
    assert isinstance(outcomes[1][0], kind)
    for rank in (0, 2):
        error = outcomes[rank][0]
        assert isinstance(error, DistributedError)
        assert error.rank == 1


def test_a_length_is_checked_before_anything_is_allocated() -> None:
    """A rank that allows less than the other sends refuses it."""

    def act(context: DistributedContext) -> Any:
        limit = 10 if context.rank else 1000
        return context.all_gather_object("x" * 100 if context.rank == 0 else "", limit=limit)

    _, refusal = outcomes_in_group_of_two(act)
    assert isinstance(refusal, DistributedError)
    assert "announced an object of 102 bytes; the limit is 10" in str(refusal)


def outcomes_in_group_of_two(act: Any) -> list[Any]:
    """What two ranks return or raise, where the first may wait in vain for the second."""

    def hurried(context: DistributedContext) -> Any:
        context.timeout = 5.0
        try:
            return act(context)
        finally:
            context.abort("the test is over") if context.rank else None

    return list(outcomes_in_group(2, hurried))


def test_a_hostile_length_is_refused() -> None:
    """Whatever another rank says, no more than the limit is allocated."""

    def act(context: DistributedContext) -> Any:
        if context.rank == 0:
            length = np.array([1 << 62])
            task = Task.whole(Collective.BROADCAST, 2, 1)
            made = part_of(Purpose.BROADCAST_OBJECT, task, length, length)
            context._launch(made, 10, async_op=False)
            return None
        with pytest.raises(DistributedError, match="announced an object of"):
            context.broadcast_object()
        return None

    in_group(2, act)


@pytest.mark.parametrize(
    ("of_objects", "alike"),
    [
        (lambda it: it.broadcast_object("a"), lambda it: it.broadcast(np.array([5]))),
        (lambda it: it.all_gather_object("a"), lambda it: it.all_gather(np.array([5]))),
        (lambda it: it.gather_object("a"), lambda it: it.all_gather_object("a")),
        (lambda it: it.scatter_object("ab"), lambda it: it.broadcast(np.array([5, 6]))),
        (lambda it: it.all_gather_object("a"), lambda it: it.all_gather(np.ones(1), counts="ask")),
        (lambda it: it.gather(np.ones(1), counts="ask"), lambda it: it.all_gather(np.array([5]))),
        (
            lambda it: it.all_to_all(np.ones(2), send_counts=[1, 1]),
            lambda it: it.all_gather(np.array([5, 6])),
        ),
    ],
)
def test_no_other_collective_is_taken_for_a_part_of_one(
    of_objects: Callable[[DistributedContext], Any], alike: Callable[[DistributedContext], Any]
) -> None:
    """Lengths look like anybody's integers: who mixes the two up is told, on both ranks."""

    def act(context: DistributedContext) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            (of_objects if context.rank == 0 else alike)(context)
        context.barrier(timeout=10)
        return str(caught.value)

    first, second = in_group(2, act)
    assert "called" in first
    assert "called" in second


def test_ranks_that_disagree_about_objects_read_what_they_wrote() -> None:
    """Not the collectives that their calls are made of."""

    def act(context: DistributedContext) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            context.barrier() if context.rank else context.gather_object("a", root=1)
        return str(caught.value)

    for text in in_group(2, act):
        assert "called gather_object" in text
        assert "called barrier()" in text


def test_roots_of_objects_are_compared() -> None:
    """And both are named."""

    def act(context: DistributedContext) -> str:
        with pytest.raises(CollectiveMismatch) as caught:
            context.gather_object("a", root=context.rank)
        return str(caught.value)

    assert all("with roots" in text for text in in_group(2, act))


@pytest.mark.parametrize(("values", "got"), [(None, "None"), ([1], "1"), ([1] * 3, "3"), (5, "5")])
def test_the_root_of_a_scatter_has_one_for_each(values: Any, got: str) -> None:
    """Too few, too many or none: it is told how many, and the others do not wait for them."""

    def act(context: DistributedContext) -> None:
        if context.rank == 0:
            with pytest.raises(ValueError, match=f"must pass 2 objects, not {got}"):
                context.scatter_object(values, timeout=10)
        else:
            with pytest.raises(DistributedError, match="Rank 0 cannot send its object"):
                context.scatter_object(timeout=10)
        context.barrier(timeout=10)

    in_group(2, act)


# --------------------------------------------------------------------------------------------------
# Random programs of collectives, compared with what numpy says they must give.

PROGRAMS = st.integers(1, 5).flatmap(lambda size: st.lists(steps(size), min_size=1, max_size=12))


@settings(max_examples=30)
@given(PROGRAMS)
def test_random_programs_give_what_numpy_says(program: list[Step]) -> None:
    """Whatever comes after whatever, waited for at once or at the end."""
    size = len(program[0].counts)
    for rank, results in enumerate(in_group(size, lambda context: run(program, context))):
        compare(program, rank, results)


# --------------------------------------------------------------------------------------------------
# All-reduce, reduce and reduce-scatter, of arrays of every kind.

REDUCING_WORLDS = range(1, 6)


def mine(rank: int, count: int, dtype: Any = "float64") -> Any:
    """Numbers of one rank: small, so that every type can add them up."""
    return (np.arange(count) % 3 + rank + 1).astype(dtype)


def total(size: int, count: int) -> Any:
    """The sum of all ranks' numbers."""
    return sum(mine(rank, count) for rank in range(size))


@pytest.mark.parametrize("size", REDUCING_WORLDS)
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
        (np.ones(2), "median", ValueError, "'median' is not a reduction"),
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
        (np.empty(3), ValueError, "expected 4, got 3"),
        (np.empty(4, "f4"), TypeError, "float64, but has float32"),
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
def test_a_strategy_can_be_named_reducing(strategy: str) -> None:
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


@pytest.mark.parametrize("size", REDUCING_WORLDS)
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


@pytest.mark.parametrize("size", REDUCING_WORLDS)
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
    [([1, 1], "expected 2, got"), ([2], "one entry for each"), ([5, -1], "zero or")],
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
