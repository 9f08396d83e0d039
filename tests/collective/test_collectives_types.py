"""Type checkers see what a call returns: mypy reads this file, and so does pytest."""

from typing import assert_type

import numpy as np
import numpy.typing as npt
import torch

from potluck import DistributedContext, SimulatedBackend, Work, all_reduce

Floats = npt.NDArray[np.float64]


def test_blocking_calls_return_what_they_were_given() -> None:
    """The kind of the array is the kind of the result."""
    floats: Floats = np.ones(2)
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
        assert_type(context.all_reduce(floats), Floats)
        assert_type(context.all_reduce(torch.ones(2)), torch.Tensor)
        assert_type(context.all_reduce(1.5, "mean"), float)
        assert_type(context.reduce(floats, 0), Floats | None)
        assert_type(context.broadcast(floats), Floats)
        assert_type(context.all_gather(floats), Floats)
        assert_type(context.gather(floats), Floats | None)
        assert_type(context.scatter(floats), Floats)
        assert_type(context.reduce_scatter(floats), Floats)
        assert_type(context.all_to_all(floats), Floats)
        assert_type(all_reduce(context, floats), Floats)


def test_started_calls_return_work() -> None:
    """With async_op the result is one step away."""
    floats: Floats = np.ones(2)
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
        assert_type(context.all_reduce(floats, async_op=True), Work[Floats])
        assert_type(context.reduce(floats, async_op=True), Work[Floats | None])
        assert_type(context.broadcast(floats, async_op=True).wait(30), Floats)
        assert_type(context.all_gather(floats, async_op=True).wait(30), Floats)
        assert_type(context.gather(floats, async_op=True).wait(30), Floats | None)
        assert_type(context.scatter(floats, async_op=True).wait(30), Floats)
        assert_type(context.reduce_scatter(floats, async_op=True).wait(30), Floats)
        assert_type(context.all_to_all(floats, async_op=True).wait(30), Floats)
        context.barrier(async_op=True).wait(30)
