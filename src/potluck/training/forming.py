"""Forming a group by means of PyTorch's store: it tells the ranks where rank 0 is, no more.

The store is neither authenticated nor encrypted, so nothing in it is trusted: it is used to find
each other, and whoever is found there must show that it belongs to the namespace.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from potluck.backend.base import Backend
from potluck.backend.simulated import SimulatedBackend
from potluck.backend.tcp import TcpBackend
from potluck.errors import Timeout
from potluck.net.namespace import NetworkNamespace, SecurityWarning
from potluck.net.whereabouts import Whereabouts
from potluck.training.work import seconds

__all__ = ["Options", "form"]

PORTS = 4
"""Ports that rank 0 proposes: between looking and listening, somebody else may take one."""

FOREVER = 365 * 86400.0
"""Seconds, for those who set no limit."""


@dataclass(frozen=True, slots=True)
class Options:
    """What can be said about the group beside what PyTorch says: ``pg_options`` takes one."""

    namespace: NetworkNamespace | str | None = None
    """Whose members may connect, by name or as such; unless given, the one this machine uses.

    ``"insecure"`` is plain TCP; so is ``POTLUCK_NAMESPACE=insecure`` in the environment.
    """

    @classmethod
    def read(cls, given: Any) -> Options:
        """The options a caller has passed."""
        if given is None:
            return cls()
        if isinstance(given, cls):
            return given
        msg = f"pg_options takes potluck.torch.Options, not a {type(given).__name__}"
        raise TypeError(msg)


def form(store: Any, rank: int, size: int, timeout: timedelta | None, options: Options) -> Backend:
    """Meet the others and become one group with them."""
    if size == 1:
        return SimulatedBackend.create_group(1)[0]
    limit = seconds(timeout) or FOREVER
    deadline = time.monotonic() + limit
    if rank == 0:
        _warn_about(store)
    table = _exchange(store, rank, size, limit)
    is_local = len({each.machine for each in table}) == 1
    masters = table[0].addresses(is_local=is_local, also=_host_of(store))
    if rank == 0 and not is_local:  # on every interface: others may reach us on any of them
        masters = [f"0.0.0.0:{port}" for port in table[0].ports]
    return TcpBackend(
        rank,
        size,
        masters,
        timeout=max(1.0, deadline - time.monotonic()),
        namespace=options.namespace,
    )


def _exchange(store: Any, rank: int, size: int, limit: float) -> list[Whereabouts]:
    """Tell the others where we are, and wait until all have."""
    # A store may outlive a group: the next one that uses it must not read what is over.
    generation = store.add(f"potluck/{rank}", 1)
    keys = [f"potluck/{generation}/{each}" for each in range(size)]
    store.set(keys[rank], Whereabouts.here(PORTS if rank == 0 else 0).to_bytes())
    try:
        store.wait(keys, timedelta(seconds=min(limit, 1e9)))
    except (RuntimeError, ValueError) as error:
        missing = [each for each, key in enumerate(keys) if not _is_there(store, key)]
        names = ", ".join(map(str, missing)) or "unknown"
        raise Timeout(
            f"Rank {rank} waited {limit:g} s for ranks that did not come: {names}",
            seconds=limit,
            missing=missing,
            rank=missing[0] if missing else None,
            cause=str(error).partition("\n")[0],
            hint="Check that they were started, with the same world size and store.",
        ) from error
    return [Whereabouts.from_bytes(store.get(key), f"rank {n}") for n, key in enumerate(keys)]


def _is_there(store: Any, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:
        return False  # the store is gone as well


_warned: set[str] = set()


def _below(store: Any) -> Any:
    """The store below those that only add a prefix."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


def _host_of(store: Any) -> str | None:
    """Where the user has said that rank 0 is: there it is, or its neighbour is, most of the time.

    It may be a network that machines do not hand out addresses of by themselves, such as a VPN.
    """
    below = _below(store)
    return str(below.host) if isinstance(below, TCPStore) else None


def _warn_about(store: Any) -> None:
    """Say once that PyTorch's own store is open to everybody."""
    if isinstance(_below(store), TCPStore) and "store" not in _warned:
        _warned.add("store")
        warnings.warn(
            "PyTorch's store (TCPStore) is neither authenticated nor encrypted: everybody on this "
            "network can read and change it. Potluck uses it only to find the other ranks, which "
            "then prove who they are; what else a program keeps in it is open.",
            SecurityWarning,
            stacklevel=2,
        )
