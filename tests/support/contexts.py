"""Whole groups in this process, one thread for each rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TypeVar

from potluck import DistributedContext, SimulatedBackend
from support.threads import together

Result = TypeVar("Result")


def in_group(size: int, action: Callable[[DistributedContext], Result]) -> list[Result]:
    """What every rank of a new group returns, in rank order."""
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(DistributedContext.with_metrics(backend))
            for backend in SimulatedBackend.create_group(size)
        ]
        return together(*(lambda rank=rank: action(rank) for rank in ranks))


def outcomes_in_group(
    size: int, action: Callable[[DistributedContext], Result]
) -> list[Result | Exception]:
    """What every rank returns or raises."""

    def caught(context: DistributedContext) -> Result | Exception:
        try:
            return action(context)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            return error

    return in_group(size, caught)
