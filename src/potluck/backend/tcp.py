"""TcpBackend: ranks in processes, on one machine or many, each connected to each."""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from potluck.backend.base import check_whole
from potluck.backend.dialling import Meeting
from potluck.backend.laned import LaneBackend
from potluck.backend.membership import Membership
from potluck.backend.rendezvous import meet
from potluck.config import read_launch
from potluck.errors import InvalidRank, InvalidWorldSize, SelfSend
from potluck.net.addresses import parse_address
from potluck.vocabulary import Seconds, in_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from typing import Self

    from potluck.backend.lanes import OpenLane
    from potluck.messages import Table
    from potluck.net.namespace import NetworkNamespace

__all__ = ["TcpBackend", "formed"]

formed: list[Callable[[TcpBackend], None]] = []
"""Called with every group that has formed: layers above show it to observers."""


class TcpBackend(LaneBackend):
    """One rank of a group of processes.

    All ranks are given the same ``world_size`` and ``master_addr`` (``host:port``, where rank 0
    listens), and may start in any order within ``timeout`` seconds.  Afterwards every rank has a
    direct connection to every other; rank 0 is nothing special.

    Only members of ``namespace`` can connect, and every byte is encrypted; unless given, it is the
    namespace this machine uses.  ``NetworkNamespace.insecure()`` is plain TCP.

    Ranks other than 0 listen at ``port``, or at any that is free; with ``peers``, the addresses of
    all ranks in their order, each listens at its own.  Rank 0 must be on the machine that has
    ``master_addr``, unless ``mapped`` says that another machine maps this address to it.

    >>> import socket
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with socket.create_server(("127.0.0.1", 0)) as door:
    ...     port = door.getsockname()[1]  # one that is free; usually it is given
    >>> def run(rank):  # in reality, each on a machine of its own
    ...     with TcpBackend(rank, world_size=2, master_addr=f"127.0.0.1:{port}") as backend:
    ...         backend.barrier()
    ...         return backend.rank, backend.world_size
    >>> with ThreadPoolExecutor(2) as machines:
    ...     list(machines.map(run, range(2)))
    [(0, 2), (1, 2)]
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        master_addr: str | Sequence[str],
        *,
        timeout: Seconds = 30,
        namespace: NetworkNamespace | str | None = None,
        port: int = 0,
        peers: Sequence[str] = (),
        mapped: bool = False,
    ) -> None:
        timeout = in_seconds(timeout)
        check_whole(rank, "rank")  # variables of the environment are text
        check_whole(world_size, "world size")
        if world_size < 2:  # noqa: PLR2004 - one process alone needs no network
            raise InvalidWorldSize(
                world_size, minimum=2, hint="Use SimulatedBackend for a single process."
            )
        if not 0 <= rank < world_size:
            raise InvalidRank(rank, world_size)
        masters = [master_addr] if isinstance(master_addr, str) else master_addr
        meeting = Meeting(
            rank,
            world_size,
            [parse_address(text) for text in masters],
            timeout,
            time.monotonic() + timeout,
            Membership.load(namespace),
            port,
            [parse_address(text) for text in peers],
            mapped,
        )
        super().__init__(rank, world_size)
        self._nodes[rank] = meeting.members.me
        try:
            self._lanes = meet(meeting, self._welcome)
        except BaseException:
            super().close()
            raise
        self._acceptor = self._lanes.extend(self._park, self._switchboard.count)
        for follow in formed:
            follow(self)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        timeout: Seconds = 30,
        namespace: NetworkNamespace | str | None = None,
    ) -> Self:
        """Join as ``torchrun``, ``mpirun`` or ``srun`` tell this process to."""
        launch = read_launch(os.environ if environ is None else environ)
        return cls(
            launch.rank,
            launch.world_size,
            launch.masters,
            timeout=timeout,
            namespace=namespace,
            mapped=True,
        )

    @property
    def table(self) -> Table:
        """Who is who in this group, as rank 0 has written it down."""
        return self._lanes.table

    def _dial(self, rank: int, purpose: str, deadline: float, look: Callable[[], None]) -> OpenLane:
        return self._lanes.open(rank, purpose, deadline, look, self._leash.hold)

    def _check_rank(self, rank: int) -> int:
        if super()._check_rank(rank) == self.rank:
            raise SelfSend(rank)
        return rank

    def close(self) -> None:
        """Leave the group and stop listening."""
        if self._closed is None:
            super().close()
            self._acceptor.close()
            self._clear_switchboard()
