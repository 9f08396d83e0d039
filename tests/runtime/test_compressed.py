"""Sums that take several collectives."""

import tracemalloc
from typing import Any

import numpy as np
import pytest

from potluck import CollectiveMismatch, DistributedContext, GradientCompressor, MalformedFrame
from potluck.runtime.call import Call
from potluck.runtime.compressed import Exchange, low_rank_sum, sparse_sum
from support.contexts import in_group, outcomes_in_group
from support.gradients import normal


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
    """Before anything is allocated for it."""
    asked = []

    def run(call: Call) -> None:
        asked.append(call.task.collective)
        call.target[:] = [*call.source, size, values.size]

    values = normal(3000)
    compressor = GradientCompressor("topk:0.1", error_feedback=False)
    with pytest.raises(MalformedFrame, match=r"Rank 1 announces \S+ bytes for some of 3000"):
        sparse_sum(Exchange(2, run), values, compressor, "", values.copy())
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
        Exchange(1, run), values, GradientCompressor("powersgd:2"), "", out, shape=(60, 50)
    )
    assert ran[1:] == [("all_reduce", 2 * 60), ("all_reduce", 2 * 50)]
    assert ran[0] == ("all_gather", 4)
    ran.clear()
    sparse_sum(Exchange(2, run), values, GradientCompressor("topk:0.1", False), "", out)
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
    exchange = Exchange(1, lambda call: np.copyto(call.target, call.source))
    compressor = GradientCompressor("powersgd:2", error_feedback=False)
    tracemalloc.start()
    try:
        low_rank_sum(exchange, values, compressor, "", out, shape=(1 << 10, 1 << 10))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < values.nbytes / 4
