"""``init_method="potluck://"``: the ranks meet as Potluck's own do, and nothing listens in clear.

Where a launcher has said who is who (``potluck run``, ``torchrun``, ``mpirun``, ``srun``, or the
variables by hand), rank 0 listens at the master address.  Otherwise the machines of the namespace
find each other, and ranks are those of the view that they agree on.

Under ``potluck run``, ``init_process_group("potluck")`` meets in the same way without being asked:
the launcher knows all ranks, and PyTorch's own store would be neither authenticated nor encrypted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, urlsplit

from torch._C._distributed_c10d import HashStore, PrefixStore, Store
from torch.distributed.rendezvous import _rendezvous_handlers, register_rendezvous_handler

from potluck.backend.base import Backend
from potluck.backend.simulated import SimulatedBackend
from potluck.backend.tcp import TcpBackend
from potluck.config import read_launch
from potluck.errors import BackendUnavailable
from potluck.net.addresses import is_loopback, parse_address
from potluck.runtime.auto import AutoDiscoveryBackend
from potluck.runtime.auto_config import AutoDiscoveryConfig
from potluck.training.store import PotluckStore
from potluck.training.work import seconds

__all__ = ["SCHEME", "register_scheme", "store_below"]

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
        stage = node.stages.wait_for(lambda found: found.world_size >= config.wanted_nodes, timeout)
    except BaseException:
        node.close()
        raise
    assert stage.backend is not None
    return stage.backend, node.close


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
