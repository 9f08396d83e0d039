"""Collectives as functions, on any backend."""

import inspect
from typing import Any

import numpy as np
import pytest

import potluck
from potluck import Backend, DistributedContext, SimulatedBackend, SubBackend
from potluck.runtime import functions
from support.threads import together


def on_each(group: list[Any], action: Any) -> list[Any]:
    """What every rank of a group of backends returns; the backends are closed afterwards."""
    try:
        return together(*(lambda rank=rank: action(rank) for rank in group))
    finally:
        for backend in group:
            DistributedContext(backend).close()


def act(backend: Backend) -> dict[str, Any]:
    """Call every function once."""
    rank, size = backend.rank, backend.world_size
    whole = np.arange(size * 2)
    out = np.zeros(2, int)
    potluck.barrier(backend)
    return {
        "all_reduce": potluck.all_reduce(backend, whole + rank).tolist(),
        "allreduce": potluck.allreduce(backend, rank, "max"),
        "reduce": potluck.reduce(backend, rank + 1, 0),
        "reduce_scatter": potluck.reduce_scatter(backend, whole).tolist(),
        "broadcast": potluck.broadcast(backend, rank + 5, 0),
        "all_gather": potluck.all_gather(backend, np.array(rank)).tolist(),
        "gather": potluck.gather(backend, np.array([rank]), 0) is not None,
        "scatter": potluck.scatter(backend, whole if rank == 0 else None, out=out).tolist(),
        "all_to_all": potluck.all_to_all(backend, whole).tolist(),
    }


@pytest.mark.parametrize("size", [1, 3])
def test_every_collective_is_a_function(size: int) -> None:
    """On a plain backend, which has no collectives of its own."""
    whole = np.arange(size * 2)
    for rank, result in enumerate(on_each(list(SimulatedBackend.create_group(size)), act)):
        assert result == {
            "all_reduce": (whole * size + sum(range(size))).tolist(),
            "allreduce": size - 1,
            "reduce": sum(range(1, size + 1)) if rank == 0 else None,
            "reduce_scatter": [2 * rank * size, (2 * rank + 1) * size],
            "broadcast": 5,
            "all_gather": list(range(size)),
            "gather": rank == 0,
            "scatter": [2 * rank, 2 * rank + 1],
            "all_to_all": [2 * rank, 2 * rank + 1] * size,
        }


def test_functions_work_within_a_subgroup() -> None:
    """A subgroup is a backend like any other."""
    parents = SimulatedBackend.create_group(3)
    subs = [SubBackend(parents[rank], [0, 2]) for rank in (0, 2)]
    try:
        assert on_each(subs, lambda sub: potluck.all_reduce(sub, sub.rank + 1)) == [3, 3]
    finally:
        for parent in parents:
            parent.close()


def test_a_raw_buffer_has_its_type_named() -> None:
    """As in the origin, where buffers were bytes."""

    def sum_up(backend: Backend) -> list[float]:
        buffer = bytearray(np.array([1, 2], "f4").tobytes())
        functions.all_reduce(backend, buffer, dtype="float32")
        part = functions.reduce_scatter(backend, buffer, dtype=np.float32)
        return [*np.frombuffer(buffer, "f4").tolist(), *np.asarray(part).tolist()]

    first, second = on_each(list(SimulatedBackend.create_group(2)), sum_up)
    assert first == [2, 4, 4]
    assert second == [2, 4, 8]


def test_functions_take_what_the_methods_take() -> None:
    """Every option of a method is one of the function, but for asynchronous work."""
    for name in functions.__all__:
        function = inspect.signature(getattr(functions, name))
        method = inspect.signature(getattr(DistributedContext, name.replace("allr", "all_r")))
        expected = [each for each in method.parameters if each not in {"self", "async_op"}]
        assert list(function.parameters)[1:] == expected
