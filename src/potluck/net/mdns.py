"""Multicast DNS, the local network's own directory: opening it, and what all users of it share.

zeroconf does the talking.  It brings its own threads and event loop, which begin with
:func:`open_zeroconf` and end with its ``close``.  It takes a quarter of a second to import, so that
happens when it is first used.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck.errors import DistributedError
from potluck.net.descriptors import track

if TYPE_CHECKING:
    from zeroconf import Zeroconf

__all__ = ["LOOPBACK", "DiscoveryUnavailable", "open_zeroconf", "scoped", "unavailable", "unscoped"]

LOOPBACK = "127.0.0.1"
"""What a machine without a network talks to itself on."""

_sockets: weakref.WeakKeyDictionary[Zeroconf, _Sockets] = weakref.WeakKeyDictionary()


class DiscoveryUnavailable(DistributedError, OSError):
    """Machines cannot find each other here; an address has to be given."""


def open_zeroconf(hosts: Sequence[str], *, hint: str, both: bool = False) -> Zeroconf:
    """Zeroconf on the interfaces with these addresses.

    By IPv4 where there is any, which carries IPv6 addresses just as well; with ``both``, by IPv6 in
    addition where that can be done.  Raises :class:`DiscoveryUnavailable` with this hint.
    """
    from zeroconf import Error, Zeroconf

    ipv4 = [host for host in hosts if ":" not in host]
    choices: list[list[str | int]] = [list(ipv4 or hosts)]
    indexes = _indexes([host for host in hosts if ":" in host]) if both else []
    if indexes:
        choices.insert(0, [*ipv4, *indexes])
    failure: Exception | None = None
    for choice in choices:
        try:
            opened = Zeroconf(interfaces=choice)
        except (Error, OSError, RuntimeError) as error:
            failure = error
            continue
        if opened.engine.senders:
            _sockets[opened] = sockets = _Sockets(opened)
            track(sockets)
            return opened
        opened.close()
    raise unavailable(failure, hint)


def unavailable(error: Exception | None, hint: str) -> DiscoveryUnavailable:
    """The error that says so, and what to do instead."""
    return DiscoveryUnavailable(
        "Machines cannot find each other on this network",
        cause=(str(error) or None) if error else "no interface of this machine can multicast",
        hint=hint,
    )


def scoped(host: str) -> str:
    """An address with the interface's name where zeroconf has its number."""
    address, _, scope = host.partition("%")
    if scope.isdecimal() and ipaddress.ip_address(address).is_link_local:
        with contextlib.suppress(OSError):
            return f"{address}%{socket.if_indextoname(int(scope))}"
    return address


def unscoped(host: str) -> str:
    """An address as it is told to others, to whom our interfaces mean nothing."""
    return host.partition("%")[0]


def _indexes(hosts: Sequence[str]) -> list[str | int]:
    """The numbers of the interfaces with these IPv6 addresses."""
    import psutil

    wanted = {unscoped(host) for host in hosts}
    found: list[str | int] = []
    for name, entries in psutil.net_if_addrs().items():
        if any(unscoped(entry.address) in wanted for entry in entries):
            with contextlib.suppress(OSError):
                found.append(socket.if_nametoindex(name))
    return found


class _Sockets:
    """The sockets of a zeroconf, for a forked child to let go of."""

    def __init__(self, opened: Zeroconf) -> None:
        self._opened = weakref.ref(opened)

    def close(self) -> None:
        """Runs in the child, where zeroconf's thread does not exist: nothing else uses them."""
        opened = self._opened()
        if opened is None:
            return
        engine = opened.engine
        # Of the sockets themselves: a zeroconf that was closed has their old numbers still, and by
        # now these may be anybody's.  What is open gets its number taken by nothing at all, since
        # the objects that hold it would otherwise close it again, whoever has it then.
        numbers = {each.sock.fileno() for each in (*engine.readers, *engine.senders)} - {-1}
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in numbers:
            os.dup2(nothing, number, inheritable=False)
        os.close(nothing)
