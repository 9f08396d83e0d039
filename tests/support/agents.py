"""Agents of a group in this process, and functions for them."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from potluck import RpcAgent, RpcConfig, SimulatedBackend
from support.threads import PATIENCE


@contextlib.contextmanager
def agents(count: int = 2, **limits: Any) -> Iterator[list[RpcAgent]]:
    """One for each rank of a new group, all with the same limits."""
    with contextlib.ExitStack() as stack:
        backends = [
            stack.enter_context(backend) for backend in SimulatedBackend.create_group(count)
        ]
        yield [stack.enter_context(RpcAgent(backend, RpcConfig(**limits))) for backend in backends]


class Hold:
    """A function that waits until it is let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.running = 0
        self.calls: list[Any] = []
        self._lock = threading.Lock()

    def __call__(self, payload: bytes) -> bytes:
        """Wait."""
        with self._lock:
            self.running += 1
            self.calls.append(RpcAgent.current_call())
        self.go.wait(PATIENCE)
        with self._lock:
            self.running -= 1
        return payload


class Notes:
    """A function that remembers what it was given."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []

    def __call__(self, payload: bytes) -> bytes:
        """Remember."""
        self.taken.append(payload)
        return payload
