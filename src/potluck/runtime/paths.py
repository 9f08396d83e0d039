"""Which of a peer's addresses is fastest: found out by knocking at all of them at once.

A machine with a cable and a radio has an address for each, and nothing in the addresses says which
is which.  How long a connection takes to open does: a cable answers in a fraction of a millisecond.
It is measured once in a while for each address, before the connections of a view are opened; when
one fails the dialler goes on with the next.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence

from msgspec import structs

from potluck.core.topology_links import ConnectionProfile, Endpoint, Paths
from potluck.messages import Peer
from potluck.net import descriptors
from potluck.net.addresses import is_loopback

__all__ = ["PathFinder", "knock"]

WITHIN = 0.1
"""Seconds for all knocks; whoever has not answered by then is slower than any usable path."""

KNOCKS = 2
"""At each address; the quicker one counts: the first may have had to ask for a hardware address."""

REMEMBERED = 60.0
"""Seconds for which a measurement holds, also that there was no answer."""

MOST = 512
"""Addresses of which the times are kept."""


class PathFinder:
    """Orders the addresses of peers, fastest first; any thread."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        measure: Callable[[Sequence[Endpoint]], dict[Endpoint, float]] | None = None,
    ) -> None:
        self._clock = clock
        self._knock = measure or knock
        self._lock = threading.Lock()
        self._known: dict[Endpoint, tuple[float | None, float]] = {}  # seconds, and when measured

    def sorted(self, peers: Iterable[Peer]) -> list[Peer]:
        """The same peers, each with its fastest address first; takes a tenth of a second at most.

        A peer on this machine, or with a single address, is left as it is.
        """
        peers = list(peers)
        self._measure([_addresses(peer) for peer in peers])
        return [structs.replace(peer, hosts=self._order(peer)) for peer in peers]

    def _measure(self, choices: Sequence[Sequence[Endpoint]]) -> None:
        now = self._clock()
        with self._lock:
            wanted = [
                address
                for choice in choices
                for address in choice
                if address not in self._known or now - self._known[address][1] > REMEMBERED
            ]
        if not wanted:
            return
        found = self._knock(wanted)
        with self._lock:
            self._known |= {address: (found.get(address), now) for address in wanted}
            while len(self._known) > MOST:
                del self._known[next(iter(self._known))]

    def _order(self, peer: Peer) -> list[str]:
        addresses = _addresses(peer)
        with self._lock:
            times = {each: self._known[each][0] for each in addresses if each in self._known}
        if not times:
            return peer.hosts
        paths = Paths()
        paths.name(addresses)
        paths.used(addresses[0])  # where it was reached before: another must be clearly better
        for address, seconds in times.items():
            if seconds is None:
                paths.failed(address, 0.0)
        profiles: dict[Endpoint | None, ConnectionProfile] = {
            address: ConnectionProfile.from_round_trip(seconds, 0.0, address=address)
            for address, seconds in times.items()
            if seconds is not None
        }
        return [host for host, _ in paths.order(profiles, 0.0)]


def _addresses(peer: Peer) -> list[Endpoint]:
    """Those among which there is a choice."""
    if len(peer.hosts) < 2 or is_loopback(peer.hosts[0]):  # noqa: PLR2004 - one is no choice
        return []
    return [(host, peer.port) for host in peer.hosts]


def knock(addresses: Sequence[Endpoint], *, within: float = WITHIN) -> dict[Endpoint, float]:
    """Seconds until a connection to each address was open; those that were not are left out."""
    deadline = time.monotonic() + within
    found: dict[Endpoint, float] = {}
    for _ in range(KNOCKS):
        for address, seconds in _knock_once(list(dict.fromkeys(addresses)), deadline):
            found[address] = min(seconds, found.get(address, seconds))
    return found


def _knock_once(addresses: Sequence[Endpoint], deadline: float) -> list[tuple[Endpoint, float]]:
    found = []
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        descriptors.track(selector)
        for address in addresses:
            with contextlib.suppress(OSError):  # no number, or no way there from here
                sock = stack.enter_context(_connecting(address))
                selector.register(sock, selectors.EVENT_WRITE, (address, time.monotonic()))
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                now, (address, begun) = time.monotonic(), key.data
                selector.unregister(key.fileobj)
                sock = key.fileobj  # type: ignore[assignment]
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                    found.append((address, now - begun))
    return found


def _connecting(address: Endpoint) -> socket.socket:
    """A socket on its way to an address given in numbers."""
    family, kind, proto, _, target = socket.getaddrinfo(
        *address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
    )[0]
    sock = socket.socket(family, kind, proto)
    descriptors.track(sock)
    try:
        sock.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return sock
