"""Errands: what takes time and touches sockets, done for the control thread on short-lived threads.

A bounded number runs at once; the others wait in line.  Each ends by itself: whatever it does has a
deadline.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

from potluck.logs import get_logger
from potluck.net import descriptors
from potluck.net.addresses import Address, is_loopback, unmapped

__all__ = ["Errands", "link_address", "probe"]

logger = get_logger(__name__)

AT_ONCE = 16
"""Errands that run at the same time."""

RESERVED = 8
"""More of them for what is urgent: many who do not answer must not hold up the proof of a death."""

PROBE_WITHIN = 1.0
"""Seconds for an answer from a port; a refusal on a local network takes a millisecond."""

_ARP = Path("/proc/net/arp")


class Errands:
    """Runs errands until closed."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: deque[Callable[[], None]] = deque()
        self._urgent: deque[Callable[[], None]] = deque()
        self._running: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = False

    def run(self, errand: Callable[[], None], *, urgent: bool = False, ahead: bool = False) -> None:
        """Run an errand soon; one with a reason to be ``ahead`` before those that wait already.

        An urgent one comes before all others, and on a thread kept for such.
        """
        with self._lock:
            if self._closed:
                return
            line = self._urgent if urgent else self._waiting
            (line.appendleft if ahead else line.append)(errand)
            if len(self._running) < self._at_once + (RESERVED if urgent else 0):
                thread = threading.Thread(target=self._work, name="potluck-errand", daemon=True)
                self._running.add(thread)
                thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                errand = self._next()
                if errand is None:
                    self._running.discard(threading.current_thread())
                    return
            try:
                errand()
            except Exception:  # a fault of ours in one must not end the others
                logger.exception("An errand failed")

    def _next(self) -> Callable[[], None] | None:
        if self._closed:
            return None
        if self._urgent:
            return self._urgent.popleft()
        if self._waiting and len(self._running) <= self._at_once:
            return self._waiting.popleft()
        return None

    @property
    def is_closed(self) -> bool:
        """Whether errands that run should come to an end."""
        return self._closed

    def close(self, within: float) -> None:
        """Begin no more, and wait for those that run, for so many seconds at most."""
        deadline = time.monotonic() + within
        with self._lock:
            self._closed = True
            self._waiting.clear()
            self._urgent.clear()
            running = list(self._running)
        for thread in running:
            thread.join(max(0.0, deadline - time.monotonic()))


def probe(
    addresses: Iterable[Address], known_link: str | None = None, within: float = PROBE_WITHIN
) -> str | None:
    """Try a port: None if the machine itself refused the connection, else why that is no proof.

    A refusal counts only from the machine: over loopback, or on a network that we are attached to
    (a router in between may refuse for it), from the link address that it had before.
    """
    why = "no address of it is known"
    for address in addresses:
        try:
            _try_port(address, within)
        except ConnectionRefusedError:
            if not is_attached(address.host):
                why = f"{address} refuses, but it is not on a network of ours"
            elif known_link and (link_address(address.host) or known_link) != known_link:
                why = f"{address} refuses, but another machine has that address now"
            else:
                return None
        except (OSError, ValueError) as error:  # what a peer calls its address may be none
            why = f"{address}: {getattr(error, 'strerror', None) or error}"
        else:
            return f"{address} still answers"
    return why


def _try_port(address: Address, within: float) -> None:
    family, kind, proto, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as sock:
        descriptors.track(sock)
        sock.settimeout(within)
        sock.connect(target)
        if sock.getsockname() == sock.getpeername():
            # Dialling a free local port can, by chance, connect the socket to itself.
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")


def is_attached(host: str) -> bool:
    """Whether a literal address is this machine's, or on a network it is directly attached to.

    >>> is_attached("127.0.0.1"), is_attached("not an address")
    (True, False)
    """
    if is_loopback(host):
        return True
    import psutil

    with contextlib.suppress(ValueError):
        wanted = ipaddress.ip_address(unmapped(host).partition("%")[0])
        for entries in psutil.net_if_addrs().values():
            for entry in entries:
                if entry.family in (socket.AF_INET, socket.AF_INET6) and entry.netmask:
                    own = entry.address.partition("%")[0]
                    if wanted in _network(own, entry.netmask):
                        return True
    return False


def _network(own: str, netmask: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    if ":" in netmask:  # psutil writes an IPv6 mask as an address
        prefix: int | str = int(ipaddress.IPv6Address(netmask.partition("/")[0])).bit_count()
    else:
        prefix = netmask
    return ipaddress.ip_network(f"{own}/{prefix}", strict=False)


def link_address(host: str) -> str | None:
    """The hardware address behind an IPv4 address, as this machine knows it; None if it does not.

    >>> link_address("127.0.0.1") is None
    True
    """
    try:
        lines = _ARP.read_text(encoding="ascii", errors="replace").splitlines()[1:]
    except OSError:
        return None
    fields = (line.split() for line in lines)
    found = [row[3] for row in fields if len(row) > 3 and row[0] == unmapped(host)]  # noqa: PLR2004
    return found[0] if found and found[0] != "00:00:00:00:00:00" else None
