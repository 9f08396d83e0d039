"""RingBackend: a group written down by hand, with collectives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.backend.simulated import SimulatedBackend
from potluck.backend.tcp import TcpBackend
from potluck.runtime.lifted import Lifted

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.collective.config import CollectiveConfig
    from potluck.runtime.config import DistributedConfig

__all__ = ["RingBackend"]


class RingBackend(Lifted):
    """One rank of a group whose addresses everybody knows.

    Every rank listens at its own address, and the others connect to it there.  An address that is
    not this machine's, or that differs between the lists of two ranks, raises an error that names
    the entry.  The name is that of its
    ancestor; whether a ring is what suits the links is found out, unless ``collectives`` says so:
    ``CollectiveConfig(local_all_reduce=AllReduceStrategy.RING)``.

    >>> import socket
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from potluck import DistributedConfig
    >>> doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    >>> addresses = [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]  # usually known
    >>> for door in doors: door.close()
    >>> def run(rank):  # in reality, each on a machine of its own
    ...     with RingBackend(DistributedConfig(addresses, rank)) as ring:
    ...         return ring.all_reduce(ring.rank + 1.0)
    >>> with ThreadPoolExecutor(2) as machines:
    ...     list(machines.map(run, range(2)))
    [3.0, 3.0]
    """

    def __init__(
        self, config: DistributedConfig, collectives: CollectiveConfig | None = None
    ) -> None:
        self._config = config.validate()
        backend = _connect(config)
        try:
            super().__init__(backend, collectives)
        except BaseException:
            backend.close()
            raise

    @property
    def config(self) -> DistributedConfig:
        """Who takes part."""
        return self._config


def _connect(config: DistributedConfig) -> Backend:
    if config.world_size == 1:
        return SimulatedBackend(0, 1)  # nobody to connect to
    addresses = [str(address) for address in config.addresses]
    return TcpBackend(
        config.rank,
        config.world_size,
        addresses[0],
        timeout=config.timeout,
        namespace=config.namespace,
        peers=addresses,
    )
