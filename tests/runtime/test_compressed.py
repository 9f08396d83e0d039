"""Sums that take several collectives."""

from typing import Any

import numpy as np
import pytest

from potluck import DistributedContext, GradientCompressor, MalformedFrame
from potluck.runtime.call import Call
from potluck.runtime.compressed import Exchange, sparse_sum
from support.contexts import in_group
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
        call.target[:] = [call.source[0], size]

    values = normal(3000)
    compressor = GradientCompressor("topk:0.1", error_feedback=False)
    with pytest.raises(MalformedFrame, match=r"Rank 1 announces \S+ bytes for some of 3000"):
        sparse_sum(Exchange(2, run), values, compressor, "", values.copy())
    assert len(asked) == 1
