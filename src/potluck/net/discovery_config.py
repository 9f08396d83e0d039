"""Where to look for others: what a caller said, what the environment says, and the usual port.

Addresses by hand (``peers=[...]`` or ``POTLUCK_PEERS``) are of use only if ports can be known
beforehand.  So a node prefers :data:`DEFAULT_PORT` plus its slot, and an address without a port
means the first few of these.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from potluck.config import read_launch
from potluck.errors import BackendUnavailable
from potluck.net.addresses import Address, parse_address
from potluck.net.private_files import potluck_home

__all__ = ["DEFAULT_PORT", "DiscoveryConfig", "Rendezvous", "preferred_port"]

DEFAULT_PORT = 52416
"""Where the first node of a machine listens if the port is free; the second one on the next."""

USUAL_PORTS = 4
"""How many of them are tried on a machine whose address was given without a port."""

MAX_GIVEN = 64
"""Addresses that may be given by hand; more are a mistake."""


def preferred_port(slot: int) -> int:
    """Where a node in this slot of its machine should listen if it can, so others can guess it.

    >>> preferred_port(0), preferred_port(2)
    (52416, 52418)
    """
    return DEFAULT_PORT + slot % 1024


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """What a launcher's environment says about where to meet."""

    addresses: tuple[Address, ...] = ()
    """Where rank 0 is, or may be."""
    listen_port: int | None = None
    """Where this process has to listen to be found there: it is rank 0."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Rendezvous:
        """As MASTER_ADDR and the like tell; empty where no launcher has said anything.

        >>> env = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "desk", "MASTER_PORT": "4711"}
        >>> Rendezvous.from_environment(env).listen_port
        4711
        """
        if "POTLUCK_RUN" in environ:  # `potluck run` has said where all are, in POTLUCK_PEERS
            return cls()
        with contextlib.suppress(BackendUnavailable, ValueError):
            launch = read_launch(environ)
            masters = tuple(parse_address(text) for text in launch.masters)
            return cls(masters, masters[0].port if launch.rank == 0 else None)
        return cls()


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscoveryConfig:
    """Which sources to use, and how."""

    peers: tuple[Address, ...] = ()
    """Given by hand; these are always tried."""
    rendezvous: Rendezvous = Rendezvous()
    interfaces: tuple[str, ...] = ()
    """Use these alone; empty means all that others may reach."""
    virtual: bool = False
    """Use container and VPN interfaces too."""
    multicast: bool = True
    """Ask the local network by multicast DNS."""
    neighbours: bool = True
    """Look for processes of this machine and user."""
    known: bool = True
    """Try the peers of the last run, and keep those of this one."""
    announce: bool = True
    """Be found; an observer only looks."""
    home: Path = field(default_factory=potluck_home)

    @classmethod
    def from_environment(
        cls, peers: Iterable[str] = (), *, environ: Mapping[str, str] = os.environ
    ) -> DiscoveryConfig:
        """The usual configuration: arguments first, then ``POTLUCK_PEERS`` and a launcher's words.

        >>> config = DiscoveryConfig.from_environment(["10.0.0.5:4711"], environ={})
        >>> [str(address) for address in config.peers]
        ['10.0.0.5:4711']
        """
        texts = list(peers) or re.split(r"[,\s]+", environ.get("POTLUCK_PEERS", "").strip())
        return cls(
            peers=given_addresses(text for text in texts if text),
            rendezvous=Rendezvous.from_environment(environ),
            interfaces=tuple(environ.get("POTLUCK_INTERFACES", "").replace(",", " ").split()),
        )


def given_addresses(texts: Iterable[str]) -> tuple[Address, ...]:
    """Addresses by hand; one without a port becomes several, with the usual ports.

    >>> [str(address) for address in given_addresses(["desk"])][:2]
    ['desk:52416', 'desk:52417']
    """
    found: dict[Address, None] = {}
    for text in texts:
        address = parse_address(text, default_port=0)
        ports = [address.port] if address.port else range(DEFAULT_PORT, DEFAULT_PORT + USUAL_PORTS)
        found |= {Address(address.host, port): None for port in ports}
    if len(found) > MAX_GIVEN * USUAL_PORTS:
        msg = f"{len(found)} addresses of peers were given; at most {MAX_GIVEN} machines can be"
        raise ValueError(msg)
    return tuple(found)
