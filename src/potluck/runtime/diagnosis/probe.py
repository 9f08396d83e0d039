"""Trying to meet somebody, only to find out what is in the way."""

from __future__ import annotations

import contextlib
import socket
import time
from pathlib import Path

from potluck.backend.introduction import Declined, SecretChanged, say_hello
from potluck.backend.membership import Membership
from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame, Timeout
from potluck.messages import LaneOpened, Sync
from potluck.net import tcp
from potluck.net.addresses import Address
from potluck.net.opening import RefusedByPeer
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.tls import AnotherNamespace
from potluck.runtime.diagnosis.scene import Outcome, Probe

__all__ = ["probe", "signs_of_life"]

CONNECTING = 2.0
"""Seconds for a connection; at home it takes milliseconds, or a second if a packet is lost."""

TALKING = 3.0  # seconds for proving who both are
KNOCKING = 0.4  # seconds for each of the doors that show whether anybody is at home

DOORS = (9, 22, 80)
"""Ports of which a machine that is on usually refuses or accepts one."""


def probe(members: Membership, address: Address) -> Probe:
    """Connect, prove who we are, agree on who belongs, and hang up; never raises."""
    try:
        sock = tcp.connect(address, time.monotonic() + CONNECTING)
    except socket.gaierror as error:
        return Probe(address, Outcome.UNKNOWN_NAME, f"nobody knows this name ({error.strerror})")
    except ConnectionRefusedError:
        return Probe(address, Outcome.REFUSED)
    except TimeoutError:
        return Probe(address, Outcome.SILENT, life=signs_of_life(address.host))
    except OSError as error:
        return Probe(address, Outcome.UNREACHABLE, error.strerror or str(error))
    with contextlib.closing(sock):
        return _talk(members, address, sock)


def _talk(members: Membership, address: Address, sock: socket.socket) -> Probe:
    deadline = time.monotonic() + TALKING
    opened: OpeningSocket = sock
    try:
        opened = members.security.dial(sock, str(address), deadline)
        with contextlib.suppress(SecretChanged):  # we had missed that, and have it now
            say_hello(opened, Sync(), LaneOpened, members, deadline)
    except AnotherNamespace as error:
        return Probe(address, Outcome.OTHER_NAMESPACE, error.message)
    except (DistributedError, OSError) as error:
        if not members.security.is_encrypted and isinstance(error, RefusedByPeer):
            return Probe(address, Outcome.MET)  # in clear nobody agrees on members, and it said so
        return Probe(address, _meaning(error), _words(error))
    node = opened.peer if isinstance(opened, SecureSocket) else None
    return Probe(address, Outcome.MET, node=node)


def _meaning(error: DistributedError | OSError) -> Outcome:
    if "protocol version" in str(error):
        return Outcome.OTHER_VERSION
    if isinstance(error, Declined | RefusedByPeer):
        return Outcome.DECLINED
    if isinstance(error, HandshakeRefused) and "our namespace" in error.message:
        return Outcome.OTHER_NAMESPACE
    if isinstance(error, HandshakeRefused | MalformedFrame):
        return Outcome.NOT_POTLUCK
    return Outcome.FAILED


def _words(error: DistributedError | OSError) -> str:
    if isinstance(error, Timeout | TimeoutError):
        return "It took the connection, and then said nothing."
    if isinstance(error, DistributedError):
        return f"{error.message}: {error.cause}" if error.cause else error.message
    return error.strerror or str(error)


def signs_of_life(host: str, *, arp: Path = Path("/proc/net/arp")) -> str:
    """By what a machine shows that it is on, although a port of it is silent; "" if by nothing."""
    for door in DOORS:
        try:
            socket.create_connection((host, door), KNOCKING).close()
        except ConnectionRefusedError:
            return f"it refuses port {door} at once"
        except OSError:
            continue
        return f"it answers on port {door}"
    with contextlib.suppress(OSError):
        for line in arp.read_text().splitlines()[1:]:
            entry, _, flags, hardware, *_ = line.split()
            if entry == host and int(flags, 16) & 2 and hardware.strip("0:"):
                return f"its network card answers (ARP: {hardware})"
    return ""
