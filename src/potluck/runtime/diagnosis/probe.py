"""Trying to meet somebody, only to find out what is in the way."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import time
from dataclasses import replace

from potluck.backend.introduction import Declined, SecretChanged, say_hello
from potluck.backend.membership import Membership
from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame, Timeout
from potluck.messages import LaneOpened, Sync
from potluck.net import tcp
from potluck.net.addresses import Address, is_loopback
from potluck.net.opening import RefusedByPeer
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.tls import AnotherNamespace
from potluck.runtime.diagnosis.life import signs_of_life
from potluck.runtime.diagnosis.machine_facts import meaning_of
from potluck.runtime.diagnosis.packets import measure_passage
from potluck.runtime.diagnosis.patience import within
from potluck.runtime.diagnosis.scene import Outcome, Probe
from potluck.vocabulary import NodeId

__all__ = ["probe"]

CONNECTING = 2.0
"""Seconds for a connection; at home it takes milliseconds, or a second if a packet is lost."""

TALKING = 2.5  # seconds for proving who both are; it takes milliseconds
MEASURING = 4.0  # seconds for packets of all sizes

_LOOKS_ALIVE = frozenset({errno.EHOSTUNREACH, errno.ECONNABORTED})
"""What a firewall that refuses politely causes, and what a machine that is off causes as well."""


def probe(members: Membership, address: Address) -> Probe:
    """Connect, prove who we are, agree on who belongs, and hang up; never raises."""
    means = () if _is_literal(address.host) else meaning_of(address.host)
    if not means and not _is_literal(address.host):
        return Probe(address, Outcome.UNKNOWN_NAME, "nobody knows this name")
    return replace(_connect(members, address), means=means)


def _connect(members: Membership, address: Address) -> Probe:
    try:
        sock = tcp.connect(address, time.monotonic() + CONNECTING)
    except ConnectionRefusedError:
        return Probe(address, Outcome.REFUSED)
    except TimeoutError:
        return Probe(address, Outcome.SILENT, life=signs_of_life(address.host))
    except OSError as error:
        life = signs_of_life(address.host) if error.errno in _LOOKS_ALIVE else ""
        words = error.strerror or str(error)
        return Probe(address, Outcome.UNREACHABLE, words, life, code=error.errno or 0)
    with contextlib.closing(sock):
        result = _talk(members, address, sock)
    if is_loopback(address.host) or result.outcome not in {Outcome.MET, Outcome.MUTE}:
        return result
    return replace(result, passage=within(MEASURING, lambda: measure_passage(address), None))


def _is_literal(host: str) -> bool:
    try:
        ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return False
    return True


def _talk(members: Membership, address: Address, sock: socket.socket) -> Probe:
    deadline = time.monotonic() + TALKING
    opened: OpeningSocket = sock
    skew: float | None = None
    try:
        opened = members.security.dial(sock, str(address), deadline)
        with contextlib.suppress(SecretChanged):  # we had missed that, and have it now
            skew = _compare_clocks(opened, members, deadline)
    except AnotherNamespace as error:
        return Probe(address, Outcome.OTHER_NAMESPACE, error.message)
    except (DistributedError, OSError) as error:
        if not members.security.is_encrypted and isinstance(error, RefusedByPeer):
            return Probe(address, Outcome.MET)  # in clear nobody agrees on members, and it said so
        return Probe(address, _meaning(error), _words(error), node=_proved(opened))
    return Probe(address, Outcome.MET, node=_proved(opened), skew=skew)


def _compare_clocks(opened: OpeningSocket, members: Membership, deadline: float) -> float | None:
    """Say hello; by how much the other's clock is ahead."""
    asked = time.time()
    answer = say_hello(opened, Sync(), LaneOpened, members, deadline)
    return answer.clock - (asked + time.time()) / 2 if answer.clock else None


def _proved(opened: OpeningSocket) -> NodeId | None:
    return opened.peer if isinstance(opened, SecureSocket) else None


def _meaning(error: DistributedError | OSError) -> Outcome:
    if "protocol version" in str(error):
        return Outcome.OTHER_VERSION
    if isinstance(error, Declined | RefusedByPeer):
        return Outcome.DECLINED
    if isinstance(error, HandshakeRefused) and "our namespace" in error.message:
        return Outcome.OTHER_NAMESPACE
    if isinstance(error, Timeout | TimeoutError):
        return Outcome.MUTE
    if isinstance(error, HandshakeRefused | MalformedFrame):
        return Outcome.NOT_POTLUCK
    return Outcome.FAILED


def _words(error: DistributedError | OSError) -> str:
    if isinstance(error, Timeout | TimeoutError):
        return "It took the connection, and then said nothing."
    if isinstance(error, DistributedError):
        return f"{error.message}: {error.cause}" if error.cause else error.message
    return error.strerror or str(error)
