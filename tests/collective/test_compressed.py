"""auto: proposed by each rank, agreed among all, kept for a while."""

import asyncio
import threading
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from potluck import (
    Aborted,
    CollectiveMismatch,
    DistributedContext,
    GradientCompressor,
    MalformedFrame,
    QuantizationType,
    Timeout,
)
from potluck.collective.call import Call
from potluck.collective.compressed import (
    LASTING,
    AgreedMethods,
    CompressedExchange,
    encoder_speeds,
    low_rank_sum,
    sparse_sum,
)
from potluck.compression.base import CompressionContext, Floats
from potluck.compression.choice import CANDIDATES, Choice
from potluck.compression.sparse import Sparse, TopK
from potluck.compression.strategy import CompressionStrategy
from support.contexts import in_group, outcomes_in_group
from support.gradients import normal, relative_error
from support.threads import PATIENCE, eventually

NONE, INT8, TOPK = CANDIDATES[0], CANDIDATES[2], CANDIDATES[3]
KEY = (1 << 20, 4, True, False)


class Others:
    """A group in which the other rank proposes something."""

    def __init__(self, proposal: int) -> None:
        self.proposal = proposal
        self.asked = 0

    def run(self, call: Call) -> None:
        """Gather both proposals."""
        self.asked += 1
        call.target[:] = [call.source[0], self.proposal]


def settle(choices: AgreedMethods, others: Others, mine: Choice) -> CompressionStrategy:
    """What comes of a proposal."""
    return choices.agreed(CompressedExchange(2, others.run), KEY, lambda: mine)


def test_the_gentlest_proposal_is_taken() -> None:
    """A machine with a slow encoder slows nobody down by it."""
    assert settle(AgreedMethods(), Others(0), Choice(INT8, "")) == NONE
    assert settle(AgreedMethods(), Others(3), Choice(INT8, "")) == INT8
    assert settle(AgreedMethods(), Others(3), Choice(TOPK, "")) == TOPK


def test_an_agreement_says_why() -> None:
    """In words, on every rank; and where another rank decided, that too."""
    choices = AgreedMethods()
    settle(choices, Others(3), Choice(INT8, "int8, because it pays"))
    assert [str(choice.reason) for choice in choices.made] == ["int8, because it pays"]
    choices.agreed(
        CompressedExchange(2, Others(0).run), (9, 4, True, False), lambda: Choice(INT8, "int8 pays")
    )
    assert choices.made[-1].strategy == NONE
    assert choices.made[-1].reason == "none, because another rank prefers it; here: int8 pays"


def test_a_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Not for every size of arrays; and again when it changes."""
    choices, others = AgreedMethods(), Others(3)
    with caplog.at_level("INFO", "potluck.collective.compressed"):
        for size in (1 << 20, 1 << 21, 1 << 22):
            key = (size, 4, True, False)
            choices.agreed(
                CompressedExchange(2, others.run), key, lambda: Choice(INT8, "int8 pays")
            )
        assert [record.getMessage() for record in caplog.records] == ["Compression: int8 pays"]
        for _ in range(LASTING + 1):
            settle(choices, others, Choice(NONE, "none pays"))
    assert [record.getMessage() for record in caplog.records[1:]] == ["Compression: none pays"]


@pytest.mark.parametrize("number", [-2, 4, 1 << 40])
def test_a_proposal_that_does_not_exist_is_refused(number: int) -> None:
    """With the rank that made it."""
    with pytest.raises(MalformedFrame, match="Rank 1 proposes an unknown compression"):
        settle(AgreedMethods(), Others(number), Choice(INT8, ""))


def test_an_agreement_lasts_for_a_while() -> None:
    """The ranks ask each other at the same call, and seldom."""
    choices, others = AgreedMethods(), Others(2)
    for _ in range(2 * LASTING + 2):
        assert settle(choices, others, Choice(INT8, "")) == INT8
    assert others.asked == 2


def test_until_the_links_are_known_nothing_is_compressed() -> None:
    """And nothing is agreed on: the next call asks again."""
    choices, others = AgreedMethods(), Others(-1)
    assert settle(choices, others, Choice(INT8, "")) == NONE
    others.proposal = 2
    assert settle(choices, others, Choice(NONE, "", is_known=False)) == NONE
    assert settle(choices, others, Choice(INT8, "")) == INT8


def test_speeds_are_measured_for_all_that_can_be_chosen() -> None:
    """Once; in bytes per second of a machine that is not from another world."""
    speeds = encoder_speeds()
    assert set(speeds) == set(CANDIDATES[1:])
    assert all(1_000_000 < each.encode < 10**12 for each in speeds.values())
    assert encoder_speeds() is speeds
    assert np.all([each.decode > 0 for each in speeds.values()])


# --------------------------------------------------------------------------------------------------
# Sums that take several collectives.


@pytest.mark.parametrize("method", ["random:0.5", "powersgd:2", "topk:0.5"])
def test_without_feedback_nothing_is_remembered(method: str) -> None:
    """And all ranks still end with the same bits."""

    def action(context: DistributedContext) -> bytes:
        compressor = GradientCompressor(method, error_feedback=False)
        array = normal(3000, context.rank).reshape(60, 50)
        context.all_reduce(array, compression=compressor)
        assert len(compressor.residuals) == 0
        return array.tobytes()

    first, second = in_group(2, action)
    assert first == second


def test_a_vector_has_no_low_rank() -> None:
    """PowerSGD sums it as it is, with what may have been left behind before."""

    def action(context: DistributedContext) -> Any:
        compressor = GradientCompressor("powersgd:2")
        compressor.residuals.load({"bias": np.ones(50)})
        found = context.all_reduce(normal(50, context.rank), compression=compressor.tensor("bias"))
        assert not compressor.residuals["bias"].any()
        return found

    wanted = normal(50, 0) + normal(50, 1) + 2
    for found in in_group(2, action):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("method", ["topk:0.1", "random:0.1", "powersgd:2"])
def test_what_is_no_number_reaches_all_ranks_once(method: str) -> None:
    """It shows in the sum of that step on every rank, and is gone with the next."""

    def action(context: DistributedContext) -> tuple[bool, bool]:
        compressor = GradientCompressor(method)
        array = normal(3000, context.rank).reshape(60, 50)
        if context.rank == 1:
            array[:, 7] = np.nan
        spoiled = context.all_reduce(array, compression=compressor)
        clean = context.all_reduce(normal(3000).reshape(60, 50), compression=compressor)
        return bool(np.isfinite(spoiled).all()), bool(np.isfinite(clean).all())

    assert in_group(2, action) == [(False, True)] * 2


@pytest.mark.parametrize("size", [-1, 5, 20_000])
def test_a_size_that_nobody_needs_is_refused(size: int) -> None:
    """Before the second collective, which would carry so many bytes."""
    asked = []

    def run(call: Call) -> None:
        asked.append(call.task.collective)
        call.target[:] = [*call.source, size, values.size]

    values = normal(3000)
    compressor = GradientCompressor("topk:0.1", error_feedback=False)
    with pytest.raises(MalformedFrame, match=r"Rank 1 announces \S+ bytes for some of 3000"):
        sparse_sum(CompressedExchange(2, run), values, compressor, "", values.copy())
    assert len(asked) == 1


def test_as_many_collectives_as_promised() -> None:
    """Two for sparse values; PowerSGD two small sums and a word about who is in which step."""
    ran: list[tuple[str, int]] = []

    def run(call: Call) -> None:
        ran.append((call.task.collective.value, call.target.size))
        call.target.reshape(-1, call.source.size)[:] = call.source  # alone, or with its likes

    values = normal(60 * 50)
    out = np.empty_like(values)
    low_rank_sum(
        CompressedExchange(1, run),
        values,
        GradientCompressor("powersgd:2"),
        "",
        out,
        shape=(60, 50),
    )
    assert ran[1:] == [("all_reduce", 2 * 60), ("all_reduce", 2 * 50)]
    assert ran[0] == ("all_gather", 4)
    ran.clear()
    sparse_sum(CompressedExchange(2, run), values, GradientCompressor("topk:0.1", False), "", out)
    assert [collective for collective, _ in ran] == ["all_gather", "all_gather"]


def test_tensors_that_differ_are_told_apart() -> None:
    """Values at other places would be added up, and nobody would notice."""
    for method, counts, names in (
        ("topk:0.01", (3000, 3005), "ww"),
        ("random:0.01", (3000, 3005), "ww"),
        ("random:0.01", (3000, 3000), "wb"),
        ("powersgd:2", (3000, 3000), "wb"),
    ):
        compressors = [GradientCompressor(method).tensor(name) for name in names]
        arrays = [normal(count) for count in counts]

        def action(context: DistributedContext, by: Any = compressors, of: Any = arrays) -> None:
            context.all_reduce(of[context.rank], compression=by[context.rank])

        found = outcomes_in_group(2, action)
        assert all(isinstance(outcome, CollectiveMismatch) for outcome in found), (method, found)
        assert "Ranks compress different tensors" in str(found[0])


def test_the_odd_one_of_three_is_known_to_the_others() -> None:
    """So that a training can continue without it."""
    for method, names, seeds in (
        ("random:0.01", "wwb", (1, 1, 1)),
        ("random:0.01", "www", (1, 1, 2)),
        ("powersgd:2", "wbw", (1, 1, 1)),
    ):
        compressors = [
            GradientCompressor(method, seed=seed).tensor(name)
            for name, seed in zip(names, seeds, strict=True)
        ]

        def action(context: DistributedContext, by: Any = compressors) -> None:
            context.all_reduce(normal(3000), compression=by[context.rank])

        found: list[Any] = outcomes_in_group(3, action)
        assert all(isinstance(outcome, CollectiveMismatch) for outcome in found), (method, found)
        odd = names.index("b") if "b" in names else 2
        first_hand = [outcome.odd_one for outcome in found if not outcome.is_heard]
        assert set(first_hand) <= {odd, None}
        assert found[odd].odd_one is None
        assert odd in first_hand


def test_its_parts_are_nobody_else_s() -> None:
    """Who sums as many values as random-k has drawn gets no sum of them, but is told."""

    def action(context: DistributedContext) -> None:
        if context.rank:
            context.all_gather(np.zeros(4, np.int64))
            context.all_reduce(normal(30))
        else:
            context.all_reduce(normal(3000), compression=GradientCompressor("random:0.01"))

    outcomes = outcomes_in_group(2, action)
    assert all(isinstance(outcome, CollectiveMismatch) for outcome in outcomes), outcomes
    assert "called all_reduce with compression='random'" in str(outcomes[0])


def test_large_tensors_need_no_further_copies() -> None:
    """PowerSGD multiplies in blocks; besides the compressor's memory there is next to nothing."""
    values = normal(1 << 20)
    out = np.empty_like(values)
    exchange = CompressedExchange(1, lambda call: np.copyto(call.target, call.source))
    compressor = GradientCompressor("powersgd:2", error_feedback=False)
    tracemalloc.start()
    try:
        low_rank_sum(exchange, values, compressor, "", out, shape=(1 << 10, 1 << 10))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes / 4


# --------------------------------------------------------------------------------------------------
# Compressed sums as one operation of their group: in order, left alone, ended as one.

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

    def select(self, values: Floats, turn: CompressionContext) -> Sparse:
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
    assert len({raw for raw, _, _ in ends}) == 1
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
    assert "nothing was received from rank 1" in first
    assert second.startswith("Rank 0 gave up")
