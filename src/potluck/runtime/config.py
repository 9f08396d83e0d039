"""DistributedConfig: who takes part, for groups that are written down by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from potluck.backend.base import check_whole
from potluck.errors import InvalidRank, InvalidWorldSize
from potluck.net.addresses import MAX_PORT, Address, parse_address
from potluck.vocabulary import settle_seconds

if TYPE_CHECKING:
    from potluck.net.namespace import NetworkNamespace

__all__ = ["DEFAULT_PORT", "DistributedConfig"]

DEFAULT_PORT = 52416
"""Where a rank listens unless its address says otherwise."""


Peer: TypeAlias = str | tuple[str, int]


@dataclass(frozen=True)
class DistributedConfig:
    """All ranks' addresses, and which of them we are.  A wrong one raises at once.

    >>> config = DistributedConfig(["192.168.1.10", ("192.168.1.11", 4000)], rank=1)
    >>> config.world_size, [str(address) for address in config.addresses]
    (2, ['192.168.1.10:52416', '192.168.1.11:4000'])
    """

    peers: Sequence[Peer]
    """``host``, ``host:port`` or ``(host, port)`` of every rank, ours included, in rank order.

    The same list on every rank."""
    rank: int
    timeout: float = 30.0
    """Seconds within which all ranks must have started."""
    namespace: NetworkNamespace | str | None = None
    """Whose members may connect; unless given, the namespace this machine uses."""

    def __post_init__(self) -> None:
        """Refuse what could not work."""
        settle_seconds(self)
        self.validate()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.peers)

    @property
    def addresses(self) -> list[Address]:
        """Where each rank listens."""
        return [_read(rank, peer) for rank, peer in enumerate(self.peers)]

    def validate(self) -> DistributedConfig:
        """Raise if this makes no sense; itself otherwise."""
        if isinstance(self.peers, str) or not isinstance(self.peers, Sequence):
            msg = f"peers is a list of addresses, one for each rank, not {self.peers!r}"
            raise TypeError(msg)
        if not self.peers:
            raise InvalidWorldSize(0, hint="peers names every rank's address, ours included.")
        if not 0 <= check_whole(self.rank, "rank") < self.world_size:
            raise InvalidRank(self.rank, self.world_size)
        seen: dict[Address, int] = {}
        for rank, address in enumerate(self.addresses):
            if address.port == 0:
                msg = f"peers[{rank}] needs a port that the others know, not 0"
                raise ValueError(msg)
            if seen.setdefault(address, rank) != rank:
                msg = f"peers[{seen[address]}] and peers[{rank}] cannot both be {address}"
                raise ValueError(msg)
        if not self.timeout > 0:
            msg = f"timeout must be more than zero seconds, not {self.timeout}"
            raise ValueError(msg)
        return self


def _read(rank: int, peer: object) -> Address:
    """One entry of the list; an error names it."""
    try:
        if isinstance(peer, str):
            return parse_address(peer, DEFAULT_PORT)
        if isinstance(peer, tuple | list) and len(peer) == 2:  # noqa: PLR2004 - host and port
            host, port = peer
            if isinstance(host, str) and 0 <= check_whole(port, "port") <= MAX_PORT:
                bare = host.strip("[]")
                return parse_address(f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}")
    except (TypeError, ValueError) as error:
        msg = f"peers[{rank}]: {error}"
        raise type(error)(msg) from None
    msg = f"peers[{rank}] is {peer!r}; write 'host', 'host:port' or ('host', port)"
    raise (ValueError if isinstance(peer, tuple | list) else TypeError)(msg)
