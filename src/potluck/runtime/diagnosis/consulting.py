"""Two who look around at the same time help each other: each measures how much goes through.

The one who asks sends for a moment, the other counts and tells the rate.  Time and bytes are
bounded on both sides; only members of the namespace are served, a few at a time.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from potluck.backend.port import NodePort
from potluck.core.topology_nodes import NodeProfile
from potluck.errors import DistributedError
from potluck.messages import Control, ControlOpened
from potluck.net.addresses import Address, unmapped
from potluck.net.opening import refuse
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.runtime.bandwidth import steady_rate
from potluck.runtime.diagnosis.scene import Rate

__all__ = ["Consulting"]

SENDING = 0.5  # seconds for which one sends
PATIENCE = 2.0  # seconds for all of it; a link that is slower than that is slow
BLOCK = 1 << 16  # bytes
MOST = 1 << 26  # bytes that are taken from one who asks
SERVED = 4  # who are served at the same time
WAITING = 1 << 17  # bytes that may wait in our kernel: what waits there has not gone through

_BUSY = struct.Struct("=120xQ40xQQ")
"""Of Linux's ``struct tcp_info``: bytes acknowledged, and microseconds in which some were not yet,
and in which the other side had no room."""

_MORE, _LAST = b"\1", b"\0"
_RATE = struct.Struct(">Q")


@dataclass
class Consulting:
    """Serves others, and asks them; its threads end soon after :meth:`close`."""

    port: NodePort
    job: str
    """The tag under which those who look find each other."""
    profile: NodeProfile
    _served: list[threading.Thread] = field(default_factory=list)
    _asking: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        """From now on others are served."""
        self.port.on_control(self._receive)

    def close(self) -> None:
        """Wait for those who are being served."""
        for thread in self._served:
            thread.join(PATIENCE)

    # -- who is asked --------------------------------------------------------------------------

    def _receive(self, sock: OpeningSocket, hello: Control) -> None:
        self._served = [thread for thread in self._served if thread.is_alive()]
        if hello.job != self.job or len(self._served) >= SERVED:
            refuse(sock, "this process only looks around, or is busy with that", for_now=True)
            return
        thread = threading.Thread(
            target=self._serve, args=(sock,), name="potluck-consulting", daemon=True
        )
        self._served.append(thread)
        thread.start()

    def _serve(self, sock: OpeningSocket) -> None:
        with contextlib.closing(sock), contextlib.suppress(OSError, DistributedError):
            opened = ControlOpened(job=self.job, profile=self.profile.to_bytes())
            self.port.answer_control(sock, opened)
            sock.settimeout(PATIENCE)
            sock.sendall(_RATE.pack(steady_rate(_count(sock, time.monotonic() + PATIENCE))))

    # -- who asks ------------------------------------------------------------------------------

    def ask(self, addresses: Sequence[Address]) -> Rate | None:
        """How much goes through to a colleague; None if it does not take part."""
        with self._asking, contextlib.suppress(OSError, DistributedError):  # one after the other
            deadline = time.monotonic() + PATIENCE
            hello = Control(job=self.job)
            sock, opened = self.port.dial_control(addresses, None, hello, deadline)
            with contextlib.closing(sock):
                profile = NodeProfile.from_bytes(opened.profile) if opened.profile else None
                battery = profile.battery if profile else None
                return Rate(
                    _send(sock, time.monotonic() + PATIENCE),
                    unmapped(str(sock.getsockname()[0])),
                    is_on_battery=battery is not None and not battery.plugged,
                )
        return None


def _count(sock: OpeningSocket, deadline: float) -> list[tuple[float, int]]:
    """What has come by when, until the other side says that it was the last block."""
    arrivals, count, is_last = [(time.monotonic(), 0)], 0, False
    while count < MOST and time.monotonic() < deadline and not (is_last and count % BLOCK == 0):
        data = sock.recv(BLOCK - count % BLOCK)
        if not data:
            break
        is_last = is_last or (count % BLOCK == 0 and data[:1] == _LAST)
        count += len(data)
        arrivals.append((time.monotonic(), count))
    return arrivals


def _send(sock: OpeningSocket, deadline: float) -> int:
    """Send for a moment; the rate that the other tells, or what got away until the deadline."""
    bare = sock.hand_over()[0] if isinstance(sock, SecureSocket) else sock
    bare.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, WAITING)
    body = os.urandom(BLOCK - 1)  # nothing on the way can make it shorter
    begin, sent = time.monotonic(), 0
    told = 0
    try:
        while time.monotonic() < begin + SENDING and sent < MOST - 2 * BLOCK:
            sock.settimeout(max(0.01, deadline - time.monotonic()))
            sock.sendall(_MORE + body)
            sent += BLOCK
        sock.settimeout(max(0.01, deadline - time.monotonic()))
        sock.sendall(_LAST + body)
        answer = b""
        while len(answer) < _RATE.size:
            part = sock.recv(_RATE.size - len(answer))
            if not part:
                break
            answer += part
        if len(answer) == _RATE.size:
            told = int(_RATE.unpack(answer)[0])
    except TimeoutError:
        told = int(sent / (time.monotonic() - begin))
    return max(1, told, _while_the_link_was_busy(bare))


def _while_the_link_was_busy(sock: socket.socket) -> int:
    """Bytes per second, not counting when one of the two programs was the limit; 0 if untold.

    On a busy machine a program may wait for its turn longer than for the link.
    """
    option = getattr(socket, "TCP_INFO", None)
    if sys.platform != "linux" or option is None:
        return 0
    with contextlib.suppress(OSError, struct.error):  # an old kernel tells less
        facts = sock.getsockopt(socket.IPPROTO_TCP, option, _BUSY.size)
        octets, busy, full = _BUSY.unpack(facts)
        return int(octets * 1_000_000 / max(1, busy - full))
    return 0
