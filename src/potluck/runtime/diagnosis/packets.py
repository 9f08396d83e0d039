"""Whether packets of full size arrive: one is sent, and the other side's kernel must acknowledge.

What is sent is the beginning of a TLS record that never ends, so no program over there sees more
than a caller who has thought better of it.  Where a full packet is lost on the way (a switch or a
tunnel with a smaller MTU that does not say so), the largest size that arrives is looked for.
"""

from __future__ import annotations

import contextlib
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from potluck.net.addresses import Address
from potluck.net.tcp import unacknowledged

__all__ = ["SIZES", "Passage", "measure_passage"]

HEADERS = {socket.AF_INET: 40, socket.AF_INET6: 60}
"""Bytes of a packet that are taken by the headers of IP and TCP."""

OPTIONS = 12
"""Bytes that the time stamps of TCP take, which every system sends."""

SIZES = (1400, 1280, 1000, 576)
"""Packets that are tried where those of full size do not pass, in bytes."""

CONNECTING = 1.0  # seconds
ARRIVING = 0.9  # seconds: two losses in a row are repeated within that
LARGEST = 9000  # bytes: the largest packets of any home network
_LOOKING = 0.01  # seconds between two looks

_RECORD = b"\x16\x03\x01\x3f\xff"  # the header of a record of 16383 bytes, which will not come


@dataclass(frozen=True, slots=True)
class Passage:
    """What passes on the way to somebody."""

    packet: int
    """Bytes of the largest packet that the two sides have agreed on."""
    passes: int
    """Bytes of the largest packet that was seen to arrive: smaller if the way loses larger ones."""


def measure_passage(address: Address) -> Passage | None:
    """Try packets of full size, and if they are lost smaller ones; None if nothing can be told."""
    agreed, arrived = _try(address, 0)
    if agreed == 0 or arrived is None:
        return None
    if arrived:
        return Passage(agreed, agreed)
    sizes = [size for size in SIZES if size < agreed]
    with ThreadPoolExecutor(len(SIZES), "potluck-packets") as pool:
        results = list(pool.map(lambda size: _try(address, size)[1], sizes))
    passed = [size for size, result in zip(sizes, results, strict=True) if result]
    return Passage(agreed, passed[0]) if passed else None


def _try(address: Address, size: int) -> tuple[int, bool | None]:
    """Send one packet of so many bytes, 0 for full size: the agreed size, and if it arrived."""
    family, kind, proto, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    with contextlib.suppress(OSError), socket.socket(family, kind, proto) as sock:
        sock.settimeout(CONNECTING)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if size:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, size - HEADERS[family])
        sock.connect(target)
        # One byte more than a segment takes would make the kernel send two.
        segment = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)
        sock.sendall(_RECORD.ljust(min(segment, LARGEST), b"\0"))
        return segment + HEADERS[family] + OPTIONS, _arrives(sock)
    return 0, None


def _arrives(sock: socket.socket) -> bool | None:
    deadline = time.monotonic() + ARRIVING
    while (rest := unacknowledged(sock)) > 0:
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOKING)
    return None if rest < 0 else True
