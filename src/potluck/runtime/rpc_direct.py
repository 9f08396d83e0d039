"""Waiting for an answer: who waits reads, if nobody else does, so no thread has to wake another."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from potluck.runtime.rpc_calls import RpcFuture
    from potluck.runtime.rpc_connection import Connection

__all__ = ["read_until_done"]

LONGEST = 3600.0
"""Seconds of one sleep: epoll ends at 24 days."""


def read_until_done(connection: Connection, call: RpcFuture[Any], deadline: float) -> None:
    """Read until a call is done or time is up.  ``connection.reading`` is held."""
    direct = connection.direct
    assert direct is not None
    try:
        connection.watch_reading(wanted=False)  # the agent's own thread sleeps on
        while not call.done and connection.is_open:
            if not connection.spin.until(connection.read_all):
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return
                direct.wait(min(remaining, LONGEST))
    finally:
        connection.watch_reading(wanted=True)
