"""What is known of this machine itself: facts only, gathered by ``machine_facts``."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from potluck.core.topology_nodes import Battery

__all__ = ["Machine", "TakenPort", "Trouble"]


@dataclass(frozen=True, slots=True)
class TakenPort:
    """A port on which nodes usually listen, and on which another program does."""

    port: int
    program: str = ""
    """Its name and number, where the system tells."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What keeps this machine from taking part at all: an error, for a person."""

    message: str
    fix: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """This machine, as far as its operating system tells; what it does not tell is empty."""

    system: str = ""
    """As ``platform.system()`` calls it: Linux, Darwin, Windows."""
    release: str = ""
    program: str = ""
    """The interpreter that runs this."""
    name: str = ""
    """The host's name."""
    name_means: tuple[str, ...] = ()
    """The addresses to which that name leads here."""
    networks: tuple[str, ...] = ()
    """Those it is attached to directly, as ``10.0.0.1/24``."""
    speeds: tuple[tuple[str, int], ...] = ()
    """What each interface says it carries, in Mbit/s; only those that say something."""
    gateway: str = ""
    """The router's address."""
    gateway_life: str = ""
    """By what it is known to be on."""
    battery: Battery | None = None
    taken: tuple[TakenPort, ...] = ()
    """Usual ports that other programs have."""
    usual: int = 0
    """How many usual ports there are."""
    network_category: str = ""
    """On Windows: Public, Private or DomainAuthenticated."""
    trouble: Trouble | None = None

    def is_attached(self, host: str) -> bool:
        """Whether an address is in a network to which this machine is attached directly.

        >>> Machine(networks=("10.0.0.1/24",)).is_attached("10.0.0.77")
        True
        >>> Machine(networks=("10.0.0.1/24",)).is_attached("desk.local")
        False
        """
        try:
            address = ipaddress.ip_address(host.partition("%")[0])
        except ValueError:
            return False
        return any(address in ipaddress.ip_interface(each).network for each in self.networks)

    def speed_of(self, interface: str) -> int:
        """What an interface says it carries, in Mbit/s; 0 if it says nothing."""
        return dict(self.speeds).get(interface, 0)
