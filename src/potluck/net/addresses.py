"""Addresses: reading them, and choosing which of ours others can reach.

A machine usually has several: loopback, Ethernet, Wi-Fi, a container bridge, a VPN.  Handing out
the wrong one is the commonest reason why two nodes do not meet, so container and VPN interfaces
are left out unless asked for, loopback always, and link-local ones come last.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from potluck._platform import access_point_of, wireless_among

_VIRTUAL = re.compile(
    r"docker|br-|veth|virbr|vmnet|vboxnet|cni|flannel|cali|podman|lxc|lxd"  # containers, VMs
    r"|tun|tap|utun|wg|tailscale|zt|ppp|ipsec"  # VPNs
    r"|awdl|llw|anpi|gif|stf|dummy|ifb|nodelocaldns",  # Apple peer-to-peer radio, pseudo devices
    re.IGNORECASE,
)


MAX_PORT = 65535


class Address(NamedTuple):
    """A host and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        """As one writes it: ``host:port``, with brackets around an IPv6 host."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_address(text: str, default_port: int | None = None) -> Address:
    """Read ``host:port``, ``[v6]:port``, or a bare host when there is a default port.

    >>> parse_address("[::1]:80").host
    '::1'
    >>> str(parse_address("desk.local", 52416))
    'desk.local:52416'
    """
    text = text.strip()
    match = re.fullmatch(r"(\[.+\]|[^:\[\]\s]+)(?::([0-9]{1,5}))?", text)
    host, port = match.groups() if match else (f"[{text}]", None)  # perhaps a bare IPv6 host
    number = int(port) if port else default_port
    bracketed = host.startswith("[")
    if number is None or number > MAX_PORT or (bracketed and not _is_ipv6(host[1:-1])):
        return _refuse(text)
    return Address(host[1:-1] if bracketed else host, number)


def _is_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        return False
    return True


def _refuse(text: str) -> Address:
    msg = (
        f"{text!r} is not an address: write host:port, such as 192.168.1.10:29500 or "
        "[fe80::1]:29500"
    )
    raise ValueError(msg)


def unmapped(host: str) -> str:
    """An IPv4 address as such, where a socket for both families shows it as an IPv6 one.

    >>> unmapped("::ffff:10.0.0.5")
    '10.0.0.5'
    """
    return host.removeprefix("::ffff:") if "." in host else host


def is_literal(host: str) -> bool:
    """Whether it is an address in numbers: names that peers send are never looked up."""
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def is_loopback(host: str) -> bool:
    """Whether a literal address can only be reached from its own machine.

    >>> is_loopback("127.0.1.1"), is_loopback("192.168.1.10"), is_loopback("desk.local")
    (True, False, False)
    """
    try:
        return ipaddress.ip_address(unmapped(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


class Interface(NamedTuple):
    """One of this machine's ways into a network."""

    name: str
    hosts: tuple[str, ...]
    """Its addresses that others may reach, best first."""
    skipped: str = ""
    """Why it is not used, in words; empty if it is."""


def interfaces(*, virtual: bool = False, only: Iterable[str] = ()) -> list[Interface]:
    """Every interface of this machine, those included that are not used, and why.

    ``virtual`` uses container and VPN interfaces too; ``only`` names the interfaces to use.
    """
    import psutil

    wanted = set(only)
    state = psutil.net_if_stats()
    found = []
    for name, addresses in psutil.net_if_addrs().items():
        hosts = [e.address for e in addresses if e.family in (socket.AF_INET, socket.AF_INET6)]
        reachable = sorted((_preference(host), host) for host in hosts)
        usable = tuple(host for preference, host in reachable if preference < _NEVER)
        is_down = name in state and not state[name].isup
        skipped = ""
        if wanted and name not in wanted:
            skipped = "it is not among the interfaces to be used"
        elif not wanted and not virtual and _VIRTUAL.match(name):
            skipped = "it belongs to a container, a virtual machine or a VPN"
        elif is_down:
            skipped = "it is down"
        elif not usable:
            skipped = "it has no address that others can reach"
        found.append(Interface(name, usable, skipped))
    return found


class Attachment(NamedTuple):
    """What connects this machine to the others."""

    is_wireless: bool
    cell: int = 0
    """Stands for the access point; 0 where the system does not tell."""
    network: int = 0
    """Stands for the network of its address."""

    @property
    def air(self) -> tuple[int, int]:
        """Its cell and its network if it is on Wi-Fi; zeros otherwise."""
        return (self.cell, self.network) if self.is_wireless else (0, 0)


def attachment(
    *, virtual: bool = False, only: Iterable[str] = (), root: Path = Path("/")
) -> Attachment | None:
    """Whether this machine is on Wi-Fi, and on which; None without a network.

    Wi-Fi counts only where there is no cable: a cable is faster, and connections prefer it.
    """
    used = [each for each in interfaces(virtual=virtual, only=only) if not each.skipped]
    radios = wireless_among([each.name for each in used], root)
    if not used or len(radios) < len(used):
        return Attachment(is_wireless=False) if used else None
    cell, network = access_point_of(radios[0]), _network_of(used[0].hosts[0])
    return Attachment(True, _number_of(cell) if cell else 0, _number_of(network.encode()))


def _network_of(host: str) -> str:
    """The network that an address of ours is in, as text."""
    import psutil

    for address in (each for found in psutil.net_if_addrs().values() for each in found):
        if address.address == host and address.netmask:
            own, mask = host.partition("%")[0], ipaddress.ip_address(address.netmask)
            return str(ipaddress.ip_interface(f"{own}/{int(mask).bit_count()}").network)
    return host


def _number_of(name: bytes) -> int:
    """Stands for a name without telling it; never zero."""
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) >> 2 | 1


NO_NETWORK = "This machine is not connected to a network: plug in the cable, or join the Wi-Fi."


def usable_hosts(*, virtual: bool = False, only: Iterable[str] = ()) -> list[str]:
    """Addresses of this machine that others may reach, best first.

    ``virtual`` includes container and VPN interfaces; ``only`` names the interfaces to use.
    """
    used = (each for each in interfaces(virtual=virtual, only=only) if not each.skipped)
    return by_preference(host for each in used for host in each.hosts)


def by_preference(hosts: Iterable[str]) -> list[str]:
    """Literal addresses, each once, in the order in which they are worth trying.

    >>> by_preference(["fe80::1%eth0", "fd00::1", "10.0.0.1", "10.0.0.1"])
    ['10.0.0.1', 'fd00::1', 'fe80::1%eth0']
    """
    return sorted(set(hosts), key=lambda host: (_preference(host), host))


_NEVER = 9


def _preference(host: str) -> int:
    """Rank an address: private IPv4 first, it is what home networks route; link-local last."""
    address = ipaddress.ip_address(host.partition("%")[0])
    if address.is_loopback or address.is_unspecified or address.is_multicast:
        return _NEVER
    if address.version == 4:  # noqa: PLR2004 - the protocol's own number
        return 3 if address.is_link_local else 0 if address.is_private else 1
    return 4 if address.is_link_local else 2
