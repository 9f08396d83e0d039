"""Compressed sums as one operation of their group: in order, left alone, ended as one."""

import asyncio
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from potluck import (
    Aborted,
    DistributedContext,
    GradientCompressor,
    MalformedFrame,
    QuantizationType,
    Timeout,
)
from potluck.collective.compression.base import Floats, Turn
from potluck.collective.compression.sparse import Sparse
from potluck.collective.compression.topk import TopK
from support.contexts import in_group, outcomes_in_group
from support.gradients import normal, relative_error
from support.threads import PATIENCE, eventually

LOSSY = ["bfloat16", "int8", "onebit", "topk:0.1", "random:0.1", "powersgd:2", "auto"]
SHAPE = (60, 50)


def gradient(rank: int, step: int = 0) -> Floats:
    """Of a rank in a step."""
    return normal(3000, seed=100 * step + rank).reshape(SHAPE)


# -- started and left alone ------------------------------------------------------------------------


@pytest.mark.parametrize("method", LOSSY)
def test_what_is_started_ends_as_if_it_was_waited_for(method: str) -> None:
    """On several tensors and on the same one again, among other operations: bit by bit."""

    def action(context: DistributedContext, *, async_op: bool) -> list[bytes]:
        compressor = GradientCompressor(method)
        works: list[Any] = []
        options: Any = {"async_op": async_op}
        for step in range(3):
            for name in ("a", "b"):
                array, tensor = gradient(context.rank, step), compressor.tensor(name)
                works.append(context.all_reduce(array, "mean", compression=tensor, **options))
            works.append(context.all_reduce(np.ones(3), **options))
        ends = [work.wait(PATIENCE) if async_op else work for work in works]
        assert compressor.step == 6
        return [each.tobytes() for each in ends]

    waited = in_group(3, lambda context: action(context, async_op=False))
    started = in_group(3, lambda context: action(context, async_op=True))
    mixed = in_group(3, lambda context: action(context, async_op=context.rank == 1))
    assert len({tuple(ends) for ends in waited + started + mixed}) == 1


def test_a_result_may_be_awaited() -> None:
    """From a coroutine, which gets the array."""

    def action(context: DistributedContext) -> bool:
        async def main() -> bool:
            array = gradient(context.rank)
            compressor = GradientCompressor("topk:0.5")
            work = context.all_reduce(array, compression=compressor, async_op=True)
            return await work is array

        return asyncio.run(main())

    assert all(in_group(2, action))


@pytest.mark.parametrize("method", ["topk:0.1", "powersgd:2"])
def test_an_abort_reaches_what_is_started(method: str) -> None:
    """On all ranks; nothing of it is remembered, and the group goes on."""
    is_over = threading.Event()

    def action(context: DistributedContext) -> tuple[str, bool]:
        compressor = GradientCompressor(method, auto_commit=False)
        context.all_reduce(gradient(context.rank), compression=compressor, timeout=PATIENCE)
        compressor.commit()
        before = compressor.residuals[""].tobytes()
        if context.rank == 0:
            work = context.all_reduce(gradient(0, 1), compression=compressor, async_op=True)
            context.abort("enough of it")
            with pytest.raises(Aborted) as caught:
                work.wait(PATIENCE)
            is_over.set()
        else:
            assert is_over.wait(PATIENCE)
            with pytest.raises(Aborted) as caught:
                context.barrier(PATIENCE)
        compressor.commit()  # of nothing: what failed has been taken back
        is_same = compressor.residuals[""].tobytes() == before
        context.all_reduce(gradient(context.rank, 2), compression=compressor, timeout=PATIENCE)
        return str(caught.value), is_same

    for text, is_same in in_group(2, action):
        assert "Rank 0 ended the operation: enough of it" in text
        assert is_same


def test_a_bad_piece_reaches_who_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of every rank ends with the reason."""
    pack = Sparse.pack

    def lie(sparse: Sparse) -> Any:
        packed = pack(sparse)
        packed[:8].view(np.uint64)[0] += sparse.values[0] == 7.0  # the mark of rank 1
        return packed

    monkeypatch.setattr(Sparse, "pack", lie)

    def action(context: DistributedContext) -> None:
        array = gradient(context.rank)
        array[0, 0] = 6.0 + context.rank
        compressor = GradientCompressor("topk:0.01")
        context.all_reduce(array, compression=compressor, async_op=True).wait(PATIENCE)

    for outcome in outcomes_in_group(3, action):
        assert isinstance(outcome, MalformedFrame | Aborted)
        assert "Rank 1 sent sparse values that cannot be decoded" in str(outcome)


class Exhausted(TopK):
    """Has no memory left."""

    def select(self, values: Floats, turn: Turn) -> Sparse:
        """Fail."""
        raise MemoryError("no memory is left")


@pytest.mark.parametrize("async_op", [False, True])
def test_whatever_fails_between_two_collectives_ends_it_on_all_ranks(*, async_op: bool) -> None:
    """Others do not wait for somebody who will not come; and the group goes on."""

    def action(context: DistributedContext) -> tuple[str, float]:
        compressor = GradientCompressor("topk:0.1")
        if context.rank == 1:
            compressor.method = Exhausted(0.1)

        def reduce() -> None:
            array = gradient(context.rank)
            if async_op:
                context.all_reduce(array, compression=compressor, async_op=True).wait(PATIENCE)
            else:
                context.all_reduce(array, compression=compressor, timeout=PATIENCE)

        with pytest.raises((MemoryError, Aborted)) as caught:
            reduce()
        assert (compressor.compression_ratio, compressor.step) == (1.0, 0)
        return str(caught.value), context.all_reduce(1.0, timeout=PATIENCE)

    first, second, third = in_group(3, action)
    assert second == ("no memory is left", 3.0)
    assert first == third == ("Rank 1 failed: no memory is left", 3.0)


def test_it_is_counted_as_one_operation() -> None:
    """Of the kind that was asked for, however many collectives it takes."""

    def counts(context: DistributedContext) -> tuple[float, float, float]:
        counted = context.metrics_snapshot()
        assert counted is not None
        sums, gathers = counted.all_reduce, counted.all_gather
        return sums.completed, sums.bytes_processed, gathers.completed

    def action(context: DistributedContext) -> None:
        compressor = GradientCompressor("powersgd:2")
        context.all_reduce(gradient(context.rank), compression=compressor)
        sparse = GradientCompressor("topk:0.1")
        context.all_reduce(gradient(context.rank), compression=sparse, async_op=True).wait()
        eventually(lambda: counts(context) == (2, 2 * 12_000, 0))

    in_group(2, action)


# -- who takes part --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["int8", "topk:0.1", "random:0.1", "powersgd:2"])
def test_what_is_left_behind_survives_a_change_of_members(method: str) -> None:
    """One leaves, and comes back knowing nothing: of the others nothing is lost."""

    def action(context: DistributedContext) -> list[tuple[Any, Any, Any]]:
        compressor = GradientCompressor(method)
        notes: list[tuple[Any, Any, Any]] = []
        part = context.subgroup([0, 1]) if context.rank < 2 else None
        for group in (context, part, context):
            if group is None:  # its process has ended, and another begins in its place
                compressor = GradientCompressor(method)
                notes.append((0.0, 0.0, 0.0))
                continue
            left = compressor.residuals.get("w", np.zeros(3000, np.float32)).astype(np.float64)
            found = group.all_reduce(
                gradient(context.rank), compression=compressor.tensor("w"), timeout=PATIENCE
            )
            kept = compressor.residuals["w"].copy()
            notes.append((left, found.astype(np.float64).reshape(-1), kept))
        return notes

    phases = zip(*in_group(3, action), strict=True)
    for number, ranks in enumerate(phases):
        members = range(2) if number == 1 else range(3)
        before = sum(ranks[rank][0] + gradient(rank).reshape(-1) for rank in members)
        after = ranks[0][1] + sum(ranks[rank][2] for rank in members)
        np.testing.assert_allclose(after, before, atol=1e-4)
        assert len({ranks[rank][1].tobytes() for rank in members}) == 1


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_who_is_left_alone_gets_what_was_left_behind(dtype: Any) -> None:
    """At once and all of it, once: nothing is compressed where nothing travels."""

    def action(context: DistributedContext) -> None:
        compressor = GradientCompressor("topk:0.1")
        compressor.residuals.load({"w": np.full(3000, 2.0)})
        for total in (3.0, 1.0):
            found = context.all_reduce(np.ones(3000, dtype), compression=compressor.tensor("w"))
            assert (found == total).all()
        assert compressor.state_dict()["residuals"]["w"].size == 0
        other = GradientCompressor("topk:0.1")
        other.load_state_dict(compressor.state_dict())
        assert not other.has_residual("w")

    in_group(1, action)


def test_a_result_may_overlap_what_it_is_made_of() -> None:
    """Memory that is read and written at different places is copied first."""

    def action(context: DistributedContext) -> bytes:
        memory = np.arange(1001, dtype=np.float32) + context.rank
        for method in ("none", "bfloat16", "topk:0.5"):
            compressor = GradientCompressor(method, error_feedback=False)
            context.all_reduce(memory[:-1], out=memory[1:], compression=compressor)
        return memory[1:].tobytes()

    assert len(set(in_group(2, action))) == 1


@pytest.mark.parametrize("method", ["int8", "topk:0.1", "random:0.1", "powersgd:2"])
def test_two_contexts_may_share_a_compressor(method: str) -> None:
    """At the same time, on tensors of their own: nothing is lost, and all ranks get the same."""

    def action(context: DistributedContext) -> tuple[bytes, Any]:
        other = context.subgroup([1, 0])
        compressor = GradientCompressor(method)
        total = np.zeros((2, 3000))
        for step in range(4):
            works = [
                each.all_reduce(
                    gradient(context.rank, step), compression=compressor.tensor(name), async_op=True
                )
                for each, name in ((context, "a"), (other, "b"))
            ]
            total += [work.wait(PATIENCE).reshape(-1) for work in works]
        return total.tobytes(), total / 2 + [compressor.residuals[name] for name in "ab"]

    (first, ours), (second, theirs) = in_group(2, action)
    assert first == second
    every = [gradient(rank, step).reshape(-1) for rank in range(2) for step in range(4)]
    np.testing.assert_allclose(ours + theirs, [np.sum(every, axis=0)] * 2, atol=1e-4)


# -- what goes in, and what comes out --------------------------------------------------------------


@pytest.mark.parametrize("method", LOSSY)
@pytest.mark.parametrize("size", [2, 4, 8])
def test_means_of_odd_arrays_are_the_same_bits_on_all_ranks(method: str, size: int) -> None:
    """Of odd lengths, with gaps between their elements, transposed, empty."""

    def action(context: DistributedContext) -> bytes:
        base = normal(2 * 1001, context.rank)
        arrays = [base[::2], base.reshape(2, 1001).T, base[:7], base[:0], base[:1].reshape(())]
        compressor = GradientCompressor(method)
        for number, array in enumerate(arrays):
            context.all_reduce(array, "mean", compression=compressor.tensor(str(number)))
        return b"".join(array.tobytes() for array in arrays)

    assert len(set(in_group(size, action))) == 1


@settings(max_examples=25)
@given(
    method=st.sampled_from([*LOSSY, "float16", "none"]),
    ranks=st.lists(st.integers(0, 5), min_size=2, max_size=5),
    shape=hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=17),
    op=st.sampled_from(["sum", "mean"]),
    feedback=st.booleans(),
)
def test_whatever_is_reduced_all_ranks_get_the_same_bits(
    method: str, ranks: list[int], shape: tuple[int, ...], op: str, *, feedback: bool
) -> None:
    """Of any shape, in any number of ranks, some of which have nothing but zeros to add."""

    def action(context: DistributedContext) -> bytes:
        scale, count = ranks[context.rank], int(np.prod(shape))
        compressor = GradientCompressor(method, feedback)
        found = []
        for step in range(2):
            array = (normal(count, 9 * scale + step) * np.float32(scale)).reshape(shape)
            work = context.all_reduce(array, op, compression=compressor, async_op=scale > 2)  # type: ignore[call-overload]
            found.append((work.wait(PATIENCE) if scale > 2 else work).tobytes())
        return b"".join(found)

    assert len(set(in_group(len(ranks), action))) == 1


def test_the_error_does_not_grow_with_the_number_of_ranks() -> None:
    """Every contribution and every result is encoded once, however many there are."""

    def error(size: int) -> float:
        def action(context: DistributedContext) -> Floats:
            return context.all_reduce(normal(20_000, context.rank), compression="int8")

        wanted = np.sum([normal(20_000, rank) for rank in range(size)], axis=0)
        return relative_error(in_group(size, action)[0], wanted)

    errors = [error(size) for size in (2, 4, 8)]
    assert max(errors) < 0.01
    assert errors[2] < 1.3 * errors[0]


@pytest.mark.parametrize("method", [*LOSSY, "float16"])
def test_odd_values_are_no_trap(method: str) -> None:
    """Zeros, denormals, infinity: the same bits for all, real memories, and none that stay bad."""
    tiny = np.float32(1e-42)

    def action(context: DistributedContext) -> list[bytes]:
        compressor = GradientCompressor(method)
        ends: list[bytes] = []
        spoiled = gradient(context.rank, 3)
        spoiled[context.rank, 7] = np.inf
        for array in (np.zeros(SHAPE, np.float32), gradient(context.rank) * tiny, spoiled):
            for name in ("each", str(len(ends))):
                found = context.all_reduce(array.copy(), compression=compressor.tensor(name))
                assert np.isfinite(found).all() == np.isfinite(array).all()
                residual = compressor.residuals.get(name, np.zeros(1))
                assert np.isfinite(residual).all()
                ends.append(found.tobytes())
        clean = context.all_reduce(gradient(context.rank), compression=compressor.tensor("each"))
        assert np.isfinite(clean).all()
        return [*ends, clean.tobytes()]

    first, second = in_group(2, action)
    assert first == second


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("method", [*LOSSY, "none"])
def test_gradients_of_16_bits_are_worked_on_as_float32(method: str, dtype: Any) -> None:
    """They come back in their own type; what rounding to it loses is all that is not remembered."""

    def action(context: DistributedContext) -> tuple[bytes, Any, Any]:
        array = gradient(context.rank).astype(dtype)
        compressor = GradientCompressor(method)
        found = context.all_reduce(array, compression=compressor)
        assert found is array
        left = compressor.residuals.get("")
        return found.tobytes(), found.astype(np.float64), 0.0 if left is None else left

    ends = in_group(3, action)
    assert len({octets for octets, _, _ in ends}) == 1
    found = ends[0][1].reshape(-1) + sum(left for _, _, left in ends)
    wanted = np.sum([gradient(rank).astype(dtype).astype(np.float64) for rank in range(3)], axis=0)
    rounding = 2.0 ** (-8 if dtype is ml_dtypes.bfloat16 else -11)
    np.testing.assert_allclose(found, wanted.reshape(-1), atol=16 * rounding)


def test_the_ratio_is_that_of_what_was_sent() -> None:
    """By each method; what travels as it is counts too."""

    def action(context: DistributedContext) -> list[float]:
        ratios = []
        methods: list[QuantizationType | str] = [*LOSSY, QuantizationType.FP16]
        for method in methods:
            for has_feedback in (True, False):
                compressor = GradientCompressor(method, has_feedback)
                context.all_reduce(gradient(context.rank), compression=compressor)
                ratios.append(compressor.compression_ratio)
        return ratios

    ratios = in_group(2, action)[0]
    bfloat16, int8, onebit, topk, random, powersgd, auto, float16 = ratios[::2]
    assert ratios[1::2] == ratios[::2]
    assert (bfloat16, float16, auto) == (2.0, 2.0, 1.0)  # so small an array is left as it is
    assert int8 == 12_000 / (3000 + 4 * 94)
    assert onebit == 12_000 / (375 + 4 * 3)
    assert 7.5 < topk < 8.0
    assert random == 10.0
    assert powersgd == 3000 / (2 * (60 + 50))


def test_one_limit_is_for_all_of_it() -> None:
    """Where somebody is missing, it ends in time, says who, and tells the one when it comes."""
    is_over = threading.Event()

    def action(context: DistributedContext) -> str:
        compressor = GradientCompressor("powersgd:2")
        if context.rank:
            assert is_over.wait(PATIENCE)
        with pytest.raises(Timeout) as caught:
            context.all_reduce(
                gradient(0), compression=compressor, timeout=PATIENCE if context.rank else 0.2
            )
        is_over.set()
        return str(caught.value)

    first, second = in_group(2, action)
    assert "nothing came from rank 1" in first
    assert second.startswith("Rank 0 gave up")
