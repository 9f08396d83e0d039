"""A store for PyTorch that nobody but members can reach: rank 0 keeps it, the others call.

It stands on connections that are authenticated and encrypted before the first word, so with
``init_method="potluck://"`` nothing listens in clear.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from potluck.backend.base import Backend
from potluck.backend.sub import SubBackend
from potluck.errors import Timeout
from potluck.runtime.rpc import RpcAgent
from potluck.runtime.rpc_config import RpcConfig
from potluck.training.shelf import Shelf
from potluck.training.work import seconds

__all__ = ["PotluckStore"]

FIRST_PAUSE, LONGEST_PAUSE = 0.002, 0.1
"""Seconds between two looks at a key that is not there yet."""

CALL = 30.0
"""Seconds for one call to rank 0."""

FOREVER = 365 * 86400.0


class PotluckStore(Store):
    """Keys and values of a group, kept by its rank 0."""

    def __init__(self, backend: Backend, close: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.backend = backend
        """The group whose members reach it."""
        self._close = close
        self._limit = 300.0
        # A part of the group for itself: the group's own agent is for those who want one.
        part = SubBackend(backend, range(backend.world_size), name="store")
        self._agent = RpcAgent(part, RpcConfig(workers=1))  # one after the other
        if backend.rank == 0:
            for function in Shelf().functions():
                self._agent.expose(function)
        self._rank_0 = self._agent.service(0, timeout=CALL)
        part.barrier(CALL)  # nobody calls before rank 0 can answer

    def close(self) -> None:
        """Answer nobody any more."""
        self._agent.close()

    def leave(self) -> None:
        """Leave whatever stands around the group; after the group itself."""
        if self._close is not None:
            self._close()

    # -- what PyTorch calls ------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value."""
        self._rank_0.shelf_set(key, _octets(value))

    def get(self, key: str) -> bytes:
        """A value, as soon as there is one."""
        self.wait([key])
        value: bytes = self._rank_0.shelf_get(key)
        return value

    def add(self, key: str, amount: int) -> int:
        """Count up, and say how far."""
        return int(self._rank_0.shelf_add(key, amount))

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of them are there."""
        return not self._rank_0.shelf_missing(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when all of them are there."""
        limit = self._limit if timeout is None else seconds(timeout) or FOREVER
        deadline, pause = time.monotonic() + limit, FIRST_PAUSE
        while missing := self._rank_0.shelf_missing(list(keys)):
            if time.monotonic() >= deadline:
                raise Timeout(f"Nobody has set {missing[0]!r} within {limit:g} s", seconds=limit)
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, pause * 2)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace a value if it is the expected one; what is there then."""
        value: bytes = self._rank_0.shelf_swap(key, _octets(expected), _octets(desired))
        return value

    def delete_key(self, key: str) -> bool:
        """Forget a value; False if there was none."""
        return bool(self._rank_0.shelf_delete(key))

    def num_keys(self) -> int:
        """How many there are."""
        return int(self._rank_0.shelf_count())

    def set_timeout(self, timeout: timedelta) -> None:
        """How long to wait for a key unless told otherwise."""
        self._limit = seconds(timeout) or FOREVER

    # As C++ asks for them.
    compareSet, deleteKey, getNumKeys = compare_set, delete_key, num_keys  # noqa: N815
    setTimeout = set_timeout  # noqa: N815


def _octets(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
