"""DistributedConfig: who takes part, for groups that are written down by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.errors import InvalidRank, InvalidWorldSize
from potluck.net.addresses import Address, parse_address

if TYPE_CHECKING:
    from potluck.net.namespace import NetworkNamespace

__all__ = ["DEFAULT_PORT", "DistributedConfig"]

DEFAULT_PORT = 52416
"""Where a rank listens unless its address says otherwise."""


@dataclass(frozen=True)
class DistributedConfig:
    """All ranks' addresses, and which of them we are.

    >>> config = DistributedConfig(["192.168.1.10", "192.168.1.11:4000"], rank=1)
    >>> config.world_size, [str(address) for address in config.addresses]
    (2, ['192.168.1.10:52416', '192.168.1.11:4000'])
    """

    peers: Sequence[str]
    """``host`` or ``host:port`` of every rank, ours included, in rank order; equal everywhere."""
    rank: int
    timeout: float = 30.0
    """Seconds within which all ranks must have started."""
    namespace: NetworkNamespace | str | None = None
    """Whose members may connect; unless given, the namespace this machine uses."""

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.peers)

    @property
    def addresses(self) -> list[Address]:
        """Where each rank listens."""
        return [parse_address(peer, DEFAULT_PORT) for peer in self.peers]

    def validate(self) -> DistributedConfig:
        """Raise if this makes no sense; itself otherwise."""
        if isinstance(self.peers, str):
            msg = f"peers is a list of addresses, not the one address {self.peers!r}"
            raise TypeError(msg)
        if not self.peers:
            raise InvalidWorldSize(0, hint="peers names every rank's address, ours included.")
        if not 0 <= self.rank < self.world_size:
            raise InvalidRank(self.rank, self.world_size)
        seen: dict[Address, int] = {}
        for rank, address in enumerate(self.addresses):
            if address.port == 0:
                msg = f"Rank {rank} needs a port that the others know, not 0"
                raise ValueError(msg)
            if seen.setdefault(address, rank) != rank:
                msg = f"Ranks {seen[address]} and {rank} cannot both be at {address}"
                raise ValueError(msg)
        if not self.timeout > 0:
            msg = f"timeout must be more than zero seconds, not {self.timeout}"
            raise ValueError(msg)
        return self
