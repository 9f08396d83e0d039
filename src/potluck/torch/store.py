"""A store for PyTorch that only members can reach: rank 0 keeps it, the others call.

It uses connections that are authenticated and encrypted from the first byte, so with
``init_method="potluck://"`` nothing is sent unencrypted.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from potluck.backend.base import Backend
from potluck.backend.simulated import SimulatedBackend
from potluck.backend.sub import SubBackend
from potluck.backend.tcp import TcpBackend
from potluck.cluster.cluster import AutoDiscoveryBackend
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.errors import BackendUnavailable, Timeout
from potluck.identity.namespace import NetworkNamespace, SecurityWarning
from potluck.launch_env import read_launch
from potluck.net.addresses import is_loopback, parse_address
from potluck.net.tcp import EndpointHint
from potluck.rpc.agent import RpcAgent
from potluck.rpc.calls import RpcConfig
from potluck.torch.work import seconds

# --------------------------------------------------------------------------------------------------
# What the store keeps on rank 0, and the calls that reach it; bounded, whoever calls.

MOST_KEYS = 1 << 16
LONGEST_KEY = 4096
LARGEST = 1 << 20
"""Bytes of one value."""

MOST = 64 << 20
"""Bytes of all values together."""


class StoreServer:
    """Keys and values.  One call is carried out after the other.

    >>> shelf = StoreServer()
    >>> shelf.shelf_add("ranks", 2), shelf.shelf_get("ranks"), shelf.shelf_missing(["a"])
    (2, b'2', ['a'])
    """

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._size = 0

    def functions(self) -> list[Callable[..., Any]]:
        """What others may call."""
        return [
            self.shelf_set,
            self.shelf_get,
            self.shelf_add,
            self.shelf_missing,
            self.shelf_swap,
            self.shelf_delete,
            self.shelf_count,
        ]

    def shelf_set(self, key: str, value: bytes) -> None:
        """Keep a value."""
        before = self._values.get(key)
        size = self._size + len(value) - len(before or b"")
        if len(value) > LARGEST or size > MOST:
            msg = f"The store keeps {LARGEST} bytes under one key and {MOST} in all, not more"
            raise ValueError(msg)
        if before is None and (len(key) > LONGEST_KEY or len(self._values) >= MOST_KEYS):
            msg = f"The store has {MOST_KEYS} keys of {LONGEST_KEY} characters at most"
            raise ValueError(msg)
        self._size = size
        self._values[key] = bytes(value)

    def shelf_get(self, key: str) -> bytes:
        """A value; raises if there is none."""
        return self._values[key]

    def shelf_add(self, key: str, amount: int) -> int:
        """Count up; what has not been counted begins at zero."""
        total = int(self._values.get(key, b"0")) + amount
        self.shelf_set(key, str(total).encode())
        return total

    def shelf_missing(self, keys: list[str]) -> list[str]:
        """Which of them are not there."""
        return [key for key in keys if key not in self._values]

    def shelf_swap(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Replace the expected value, or the absent one where none is expected; what is there."""
        present = self._values.get(key)
        if present == expected or (present is None and not expected):
            self.shelf_set(key, desired)
            return desired
        return expected if present is None else present

    def shelf_delete(self, key: str) -> bool:
        """Forget a value; False if there was none."""
        value = self._values.pop(key, None)
        self._size -= len(value or b"")
        return value is not None

    def shelf_count(self) -> int:
        """How many keys there are."""
        return len(self._values)


# --------------------------------------------------------------------------------------------------

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
            for function in StoreServer().functions():
                self._agent.expose(function)
        self._rank_0 = self._agent.service(0, timeout=CALL)
        part.barrier(CALL)  # nobody calls before rank 0 can answer

    def close(self) -> None:
        """Stop answering."""
        self._agent.close()

    def leave(self) -> None:
        """Leave whatever stands around the group; after the group itself."""
        if self._close is not None:
            self._close()

    # -- what PyTorch calls ------------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        """Keep a value."""
        self._rank_0.shelf_set(key, _as_bytes(value))

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
                raise Timeout(f"No rank has set {missing[0]!r} within {limit:g} s", seconds=limit)
            time.sleep(pause)
            pause = min(LONGEST_PAUSE, pause * 2)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Replace a value if it is the expected one; what is there then."""
        value: bytes = self._rank_0.shelf_swap(key, _as_bytes(expected), _as_bytes(desired))
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


def _as_bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


# --------------------------------------------------------------------------------------------------
# ``init_method="potluck://"``: the ranks meet as Potluck's own do, and nothing listens in clear.
#
# Where a launcher has said who is who (``potluck run``, ``torchrun``, ``mpirun``, ``srun``, or the
# variables by hand), rank 0 listens at the master address.  Otherwise the machines of the namespace
# find each other, and ranks are those of the view that they agree on.
#
# Under ``potluck run``, ``init_process_group("potluck")`` meets in the same way without being
# asked: the launcher knows all ranks, and PyTorch's own store would be neither authenticated nor
# encrypted.

SCHEME = "potluck"

Handler: TypeAlias = Callable[..., Iterator[tuple[Store, int, int]]]

DEFAULT = 1800.0
"""Seconds to wait for the others unless told otherwise."""

_RANKED = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def _meet(timeout: float) -> tuple[Backend, Callable[[], None] | None]:
    """Meet the others; also how to leave whatever stands around the backend."""
    if any(name in os.environ for name in _RANKED):
        launch = read_launch(os.environ)
        if launch.world_size == 1:
            return SimulatedBackend.create_group(1)[0], None
        masters = launch.masters
        if launch.rank == 0 and _is_found_by_several_addresses():
            masters = tuple(f"0.0.0.0:{parse_address(each).port}" for each in masters)
        return TcpBackend(launch.rank, launch.world_size, masters, timeout=timeout), None
    config = AutoDiscoveryConfig()
    node = AutoDiscoveryBackend(config)
    try:
        session = node.sessions.wait_for(
            lambda found: found.world_size >= config.wanted_nodes, timeout
        )
    except BaseException:
        node.close()
        raise
    assert session.backend is not None
    return session.backend, node.close


def _is_found_by_several_addresses() -> bool:
    """Whether other machines come by whatever address they know: so it is with `potluck run`."""
    is_run = "POTLUCK_RUN" in os.environ
    return is_run and not is_loopback(os.environ.get("MASTER_ADDR", "127.0.0.1"))


def _handle(
    url: str,
    rank: int = -1,
    world_size: int = -1,
    timeout: timedelta | None = None,
    **_: Any,
) -> Iterator[tuple[Store, int, int]]:
    """What PyTorch asks for: a store, and who we are."""
    del url, rank, world_size  # they are what was agreed on
    backend, close = _meet(seconds(timeout) or DEFAULT)
    store: Store
    if backend.world_size == 1:
        store = HashStore()
        if close is not None:
            close()
    else:
        store = PotluckStore(backend, close)
    yield store, backend.rank, backend.world_size
    raise BackendUnavailable(
        "The ranks that met by potluck:// meet once",
        hint="Destroy the process group, and initialise it anew.",
    )


def store_below(store: Any) -> PotluckStore | None:
    """Our own store below those that only add a prefix, if it is that."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store if isinstance(store, PotluckStore) else None


_known: list[str] = []


def register_scheme() -> None:
    """Make the scheme known to PyTorch; once is enough, twice does no harm."""
    if not _known:
        _known.append(SCHEME)
        register_rendezvous_handler(SCHEME, _handle)  # type: ignore[no-untyped-call]
        _rendezvous_handlers["env"] = _default(_rendezvous_handlers["env"])


def _default(theirs: Handler) -> Handler:
    """What happens without ``init_method``: under ``potluck run`` ours, else PyTorch's own."""

    def handle(url: str, **options: Any) -> Iterator[tuple[Store, int, int]]:
        asks = sys._getframe(1)  # noqa: SLF001 - a handler is not told for which backend it is
        is_ours = (
            "POTLUCK_RUN" in os.environ
            and asks.f_code.co_name == "init_process_group"
            and asks.f_locals.get("backend") == SCHEME
            and _is_as_launched(url)
        )
        yield from _handle(url, **options) if is_ours else theirs(url, **options)

    return handle


def _is_as_launched(url: str) -> bool:
    """Whether a caller that names rank and world size names those of the launcher."""
    named = dict(parse_qsl(urlsplit(url).query))
    pairs = (("rank", "RANK"), ("world_size", "WORLD_SIZE"))
    return all(
        variable in os.environ and named.get(name, os.environ[variable]) == os.environ[variable]
        for name, variable in pairs
    )


# --------------------------------------------------------------------------------------------------
# Forming a group by means of PyTorch's store: it tells the ranks where rank 0 is, no more.
#
# The store is neither authenticated nor encrypted, so nothing in it is trusted: it is used to find
# each other, and whoever is found there must show that it belongs to the namespace.

PORTS = 4
"""Ports that rank 0 proposes: between looking and listening, another program may take one."""


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


def _exchange(store: Any, rank: int, size: int, limit: float) -> list[EndpointHint]:
    """Tell the others where we are, and wait until all have."""
    # A store may outlive a group: the next one that uses it must not read what is over.
    generation = store.add(f"potluck/{rank}", 1)
    keys = [f"potluck/{generation}/{each}" for each in range(size)]
    store.set(keys[rank], EndpointHint.here(PORTS if rank == 0 else 0).to_bytes())
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
    return [EndpointHint.from_bytes(store.get(key), f"rank {n}") for n, key in enumerate(keys)]


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
