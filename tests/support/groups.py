"""Groups of ranks on threads of this process, and calls for them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from potluck import NetworkNamespace, SecurityWarning, SimulatedBackend, TcpBackend
from potluck.backend.base import Backend
from potluck.backend.simulated import SimulatedFaults
from potluck.collective.call import Call
from potluck.collective.group import Group
from potluck.schedule.reduce import ReduceOp, Reducer
from potluck.schedule.task import Collective, Strategy, Task
from support.ports import free_port
from support.threads import PATIENCE, Background

Array = npt.NDArray[Any]
Result = TypeVar("Result")

LIMIT = 20.0
"""Seconds after which an operation of a test gives up."""


def sum_call(array: Array, world_size: int, strategy: str | None = None) -> Call:
    """An all-reduce in place."""
    task = Task.whole(Collective.ALL_REDUCE, world_size, array.size)
    reducer = Reducer.of(ReduceOp.SUM, array.dtype)
    return Call(task, array, array, reducer, Strategy(strategy) if strategy else None)


def call_of(task: Task, given: Array, reducer: Reducer, rank: int, strategy: str) -> Call:
    """What a rank calls, with memory of its own for the result."""
    target = np.full(task.output(rank).length, 113, given.dtype)
    used = reducer if task.collective.reduces else None
    return Call(task, given.copy(), target, used, Strategy(strategy))


def in_world(
    size: int,
    action: Callable[[Group], Result],
    *,
    faults: SimulatedFaults | None = None,
) -> list[Result | BaseException]:
    """Run something on every rank at once; what each returned or raised."""
    with ExitStack() as stack:
        backends = SimulatedBackend.create_group(size, faults=faults)
        for backend in backends:
            stack.enter_context(backend)
        return on_backends(backends, action)


def over_tcp(
    size: int, action: Callable[[Group], Result], *, sealed: bool = False
) -> list[Result | BaseException]:
    """The same over sockets of this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecurityWarning)
        namespace = None if sealed else NetworkNamespace.insecure()
    master = f"127.0.0.1:{free_port()}"

    def join(rank: int) -> Backend:
        return TcpBackend(rank, size, master, namespace=namespace)

    with ExitStack() as stack:
        joining = [Background(lambda rank=rank: join(rank)) for rank in range(size)]  # type: ignore[misc]
        backends = [stack.enter_context(one.result(PATIENCE)) for one in joining]
        return on_backends(backends, action)


def on_backends(
    backends: Sequence[Backend], action: Callable[[Group], Result]
) -> list[Result | BaseException]:
    """Run something on a group over each backend at once; what each returned or raised."""

    def work(backend: Backend) -> Result | BaseException:
        with Group(backend) as group:
            try:
                return action(group)
            except Exception as error:  # noqa: BLE001 - the test looks at it
                return error

    running = [Background(lambda backend=backend: work(backend)) for backend in backends]  # type: ignore[misc]
    return [one.result(PATIENCE) for one in running]
