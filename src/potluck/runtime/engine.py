"""Collectives that an engine below does itself, where a backend stands on one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from potluck.collective.task import Collective

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.runtime.call import Call

__all__ = ["done_by_engine"]


def done_by_engine(backend: Backend, call: Call, deadline: float | None) -> bool:
    """Let the engine do a call; False if it cannot, or if the caller wants it done in our way.

    The answer is the same on all ranks, since it follows from what they agree on.
    """
    if call.strategy is not None or call.codec is not None:
        return False
    timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
    match call.task.collective:
        case Collective.ALL_REDUCE:
            assert call.reducer is not None
            if call.target is not call.source:
                np.copyto(call.target, call.source)
            return backend.all_reduce_by_engine(call.target, call.reducer.op.value, timeout)
        case Collective.BROADCAST:
            root = call.task.root
            if call.target is not call.source and backend.rank == root:
                np.copyto(call.target, call.source)
            return backend.broadcast_by_engine(call.target, root, timeout)
        case _:
            return False
