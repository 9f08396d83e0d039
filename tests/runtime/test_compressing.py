"""all_reduce(compression=...): what users get from it."""

from typing import Any

import numpy as np
import pytest

from potluck import (
    Aborted,
    CompressionStrategy,
    DistributedContext,
    GradientCompressor,
    MalformedFrame,
    UnsupportedOperation,
    all_reduce,
)
from potluck.collective.compression.base import Floats
from potluck.collective.compression.sparse import Sparse
from support.contexts import in_group, outcomes_in_group
from support.gradients import normal, relative_error

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
        assert "theirs are [0, 1]" in str(outcome)


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
        ({"op": "max"}, "sums and means, not max"),
        ({"strategy": "ring"}, "not exchanged by ring"),
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
            assert choice.reason.startswith(f"{choice.strategy}, because ")
        return relative_error(found, normal(1 << 17, 0) + normal(1 << 17, 1)) < 0.02

    assert all(in_group(2, action))
