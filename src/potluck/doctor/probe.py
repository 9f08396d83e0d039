"""Trying to reach a peer, only to find out what is in the way."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field, replace
from typing import TypeVar

from potluck._platform import TCP_INFO
from potluck._types import NodeId
from potluck._version import THIS_BUILD, VersionMismatch
from potluck.backend.port import NodePort
from potluck.cluster.bandwidth import steady_rate
from potluck.discovery.mdns import SERVICE, MdnsRecord, MdnsSource
from potluck.discovery.records import Advert, DiscoveryConfig, Sighting
from potluck.doctor.facts import (
    ProbeAttempt,
    ProbeOutcome,
    Rate,
    Target,
    meaning_of,
    measure_passage,
    signs_of_life,
    within,
)
from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame, Timeout, describe
from potluck.membership.topology import NodeProfile
from potluck.net import tcp
from potluck.net.addresses import Address, is_literal, is_loopback, unmapped
from potluck.net.opening import RefusedByPeer, refuse
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.tls import AnotherNamespace
from potluck.trust.connect import Declined, SecretChanged, say_hello
from potluck.trust.membership_store import TrustStore
from potluck.wire_messages import ControlReply, ControlRequest, OpenReply, Sync

CONNECTING = 2.0
"""Seconds for a connection; at home it takes milliseconds, or a second if a packet is lost."""

HANDSHAKE_TIMEOUT = 2.5  # seconds for proving who both are; it takes milliseconds
MEASURING = 4.0  # seconds for packets of all sizes

_LOOKS_ALIVE = frozenset({errno.EHOSTUNREACH, errno.ECONNABORTED})
"""What a firewall that refuses politely causes, and what a machine that is off causes as well."""


def probe(members: TrustStore, address: Address) -> ProbeAttempt:
    """Connect, prove who we are, agree on who belongs, and hang up; never raises."""
    means = () if is_literal(address.host) else meaning_of(address.host)
    if not means and not is_literal(address.host):
        return ProbeAttempt(address, ProbeOutcome.UNKNOWN_NAME, "the name is unknown")
    return replace(_connect(members, address), means=means)


def _connect(members: TrustStore, address: Address) -> ProbeAttempt:
    try:
        sock = tcp.connect(address, time.monotonic() + CONNECTING)
    except ConnectionRefusedError:
        return ProbeAttempt(address, ProbeOutcome.REFUSED)
    except TimeoutError:
        return ProbeAttempt(address, ProbeOutcome.SILENT, life=signs_of_life(address.host))
    except OSError as error:
        life = signs_of_life(address.host) if error.errno in _LOOKS_ALIVE else ""
        code = error.errno or 0
        return ProbeAttempt(address, ProbeOutcome.UNREACHABLE, describe(error), life, code=code)
    with contextlib.closing(sock):
        result = _talk(members, address, sock)
    if is_loopback(address.host) or result.outcome not in {ProbeOutcome.MET, ProbeOutcome.MUTE}:
        return result
    return replace(result, passage=within(MEASURING, lambda: measure_passage(address), None))


def _talk(members: TrustStore, address: Address, sock: socket.socket) -> ProbeAttempt:
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT
    opened: OpeningSocket = sock
    skew: float | None = None
    try:
        opened = members.security.dial(sock, str(address), deadline)
        with contextlib.suppress(SecretChanged):  # we had missed that, and have it now
            skew = _compare_clocks(opened, members, deadline)
    except AnotherNamespace as error:
        return ProbeAttempt(address, ProbeOutcome.OTHER_NAMESPACE, error.message)
    except (DistributedError, OSError) as error:
        if not members.security.is_encrypted and isinstance(error, RefusedByPeer):
            return ProbeAttempt(
                address, ProbeOutcome.MET
            )  # in clear nobody agrees on members, and it said so
        return ProbeAttempt(address, _meaning(error), _words(error), node=_proved(opened))
    return ProbeAttempt(address, ProbeOutcome.MET, node=_proved(opened), skew=skew)


def _compare_clocks(opened: OpeningSocket, members: TrustStore, deadline: float) -> float | None:
    """Say hello; by how much the other's clock is ahead."""
    asked = time.time()
    answer = say_hello(opened, Sync(), OpenReply, members, deadline)
    return answer.clock - (asked + time.time()) / 2 if answer.clock else None


def _proved(opened: OpeningSocket) -> NodeId | None:
    return opened.peer if isinstance(opened, SecureSocket) else None


def _meaning(error: DistributedError | OSError) -> ProbeOutcome:
    if isinstance(error, VersionMismatch):
        return ProbeOutcome.OTHER_VERSION
    if isinstance(error, Declined | RefusedByPeer):
        return ProbeOutcome.DECLINED
    if isinstance(error, HandshakeRefused) and "our group" in error.message:
        return ProbeOutcome.OTHER_NAMESPACE
    if isinstance(error, Timeout | TimeoutError):
        return ProbeOutcome.MUTE
    if isinstance(error, HandshakeRefused | MalformedFrame):
        return ProbeOutcome.NOT_POTLUCK
    return ProbeOutcome.FAILED


def _words(error: DistributedError | OSError) -> str:
    if isinstance(error, Timeout | TimeoutError):
        return "It accepted the connection and then did not respond."
    return describe(error)


# --------------------------------------------------------------------------------------------------
# Two who look around at the same time help each other: each measures how much goes through.
#
# The one who asks sends for a moment, the other counts and tells the rate.  Time and bytes are
# bounded on both sides; only members of the namespace are served, a few at a time.

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
class PeerThroughput:
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

    def _receive(self, sock: OpeningSocket, hello: ControlRequest) -> None:
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
            opened = ControlReply(job=self.job, profile=self.profile.to_bytes())
            self.port.answer_control(sock, opened)
            sock.settimeout(PATIENCE)
            sock.sendall(_RATE.pack(steady_rate(_count(sock, time.monotonic() + PATIENCE))))

    # -- who asks ------------------------------------------------------------------------------

    def ask(self, addresses: Sequence[Address]) -> Rate | None:
        """How much goes through to a colleague; None if it does not take part."""
        with self._asking, contextlib.suppress(OSError, DistributedError):  # one after the other
            deadline = time.monotonic() + PATIENCE
            hello = ControlRequest(job=self.job)
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
    if TCP_INFO is None:
        return 0
    with contextlib.suppress(OSError, struct.error):  # an old kernel tells less
        facts = sock.getsockopt(socket.IPPROTO_TCP, TCP_INFO, _BUSY.size)
        count, busy, full = _BUSY.unpack(facts)
        return int(count * 1_000_000 / max(1, busy - full))
    return 0


# --------------------------------------------------------------------------------------------------
# Attempts to meet everybody who was learnt of, side by side, and how they went.

Result = TypeVar("Result")

MAX_TARGETS = 32
MAX_COLLEAGUES = 3  # with whom it is measured how much goes through: half a second each
ADDRESSES_EACH = 3


@dataclass
class ConnectionProbes:
    """Attempts under way, each target's addresses one beside the other."""

    pool: ThreadPoolExecutor
    members: TrustStore
    consulting: PeerThroughput
    own: frozenset[str] = frozenset()
    """The addresses of this machine."""
    _started: dict[str, tuple[Target, list[Future[ProbeAttempt]]]] = field(default_factory=dict)
    _rates: dict[NodeId, Future[Rate | None]] = field(default_factory=dict)
    _addresses: set[Address] = field(default_factory=set)

    def start(
        self, name: str, origin: str, addresses: Iterable[Address], node: NodeId | None = None
    ) -> None:
        """Try a peer at all of these addresses."""
        if name in self._started or len(self._started) >= MAX_TARGETS:
            return
        addresses = list(addresses)
        self._addresses.update(addresses)
        silent = tuple(ProbeAttempt(each, ProbeOutcome.SILENT) for each in addresses)
        target = Target(name, origin, silent, node)
        attempts = [self.pool.submit(probe, self.members, each) for each in addresses]
        self._started[name] = target, attempts

    def start_heard(self, heard: Iterable[MdnsRecord], advert: Advert) -> None:
        """Try those of our namespace who announce themselves; strangers are told by their tag.

        One who shows our own id from somewhere else is tried too: its key may be a copy of ours.
        """
        for each in heard:
            ours = each.tag == advert.tag and each.build.agreed(THIS_BUILD) is not None
            addresses = each.addresses[:ADDRESSES_EACH]
            is_here = each.node == advert.node and not self.own.isdisjoint(
                address.host for address in each.addresses
            )
            if ours and not is_here and self._addresses.isdisjoint(addresses):
                name = f"{self.members.name_of(each.node)} at {addresses[0]}"
                self.start(name, "heard", addresses, each.node)

    def measure(self, colleagues: Iterable[MdnsRecord], advert: Advert) -> None:
        """Measure with those who look as well, once each."""
        for each in colleagues:
            ours = each.tag == advert.tag and each.build.agreed(THIS_BUILD) is not None
            if ours and each.node != advert.node and each.node not in self._rates:
                if len(self._rates) >= MAX_COLLEAGUES:
                    return
                addresses = each.addresses[:ADDRESSES_EACH]
                self._rates[each.node] = self.pool.submit(self.consulting.ask, addresses)

    def start_known(self, known: Iterable[Sighting], heard: Iterable[MdnsRecord]) -> None:
        """Try those of earlier runs who were not heard."""
        nodes = {each.node for each in heard}
        for each in known:
            if each.node is None or each.node in nodes:
                continue
            name = each.name or self.members.name_of(each.node)
            addresses = each.addresses[:ADDRESSES_EACH]
            if self._addresses.isdisjoint(addresses):
                self.start(f"{name} at {addresses[0]}", "known", addresses, each.node)

    def results(self, deadline: float) -> tuple[Target, ...]:
        """How it went; a peer that has not answered by the deadline is silent."""
        return tuple(
            replace(
                target,
                probes=tuple(
                    result_by(deadline, attempt, instead)
                    for attempt, instead in zip(attempts, target.probes, strict=True)
                ),
                rate=self._rate(target.node, deadline),
            )
            for target, attempts in self._started.values()
        )

    def _rate(self, node: NodeId | None, deadline: float) -> Rate | None:
        asked = self._rates.get(node) if node is not None else None
        return result_by(deadline, asked, None) if asked is not None else None


def result_by(deadline: float, future: Future[Result], instead: Result) -> Result:
    """What comes of an attempt, or what to assume where that takes too long."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except NotYet:
        return instead


# --------------------------------------------------------------------------------------------------
# What is heard: the jobs on this network, and others who look around.

DOCTORS = "_potluck-doctor._tcp.local."
"""Where those who look announce themselves: jobs are not disturbed."""

LINGER = 1.5  # seconds: one who has just come may get our answer only after a second
LONGEST = 4.0  # seconds that others can make us stay
MAX_HEARD = 256


class DoctorListener:
    """Listens and announces until closed."""

    def __init__(self, advert: Advert, config: DiscoveryConfig) -> None:
        self._advert = advert
        self._heard: dict[str, MdnsRecord] = {}
        self._colleagues: set[str] = set()
        self._colleague_came = 0.0
        self.heard_self = False
        observer = replace(advert, port=0)
        self._sources = [
            MdnsSource(observer, config, self._hear, self._forget, service=SERVICE),
            MdnsSource(advert, config, self._hear_colleague, self._forget, service=DOCTORS),
        ]

    def _hear(self, name: str, heard: MdnsRecord) -> bool:
        if (heard.node, heard.incarnation) == self._advert.process:
            self.heard_self = True
        elif len(self._heard) < MAX_HEARD:
            self._heard[name] = heard
        return False

    def _hear_colleague(self, name: str, heard: MdnsRecord) -> bool:
        if name not in self._heard and (heard.node, heard.incarnation) != self._advert.process:
            self._colleague_came = time.monotonic()
            self._colleagues.add(name)
        return self._hear(name, heard)

    def _forget(self, _name: str, _reason: str) -> None:
        """A peer that was here for a moment was here."""

    def listen_until(self, planned: float) -> float:
        """When to stop: later than planned if another doctor has just come and must hear us."""
        return max(planned, min(self._colleague_came + LINGER, planned + LONGEST))

    def others(self) -> list[MdnsRecord]:
        """Everybody else, each process once."""
        found = {(each.node, each.incarnation): each for each in list(self._heard.values())}
        return list(found.values())

    def colleagues(self) -> list[MdnsRecord]:
        """Those of them who look around as well."""
        return [self._heard[name] for name in list(self._colleagues) if name in self._heard]

    @property
    def is_open(self) -> bool:
        """Whether it was possible to listen at all."""
        return all(source.is_open for source in self._sources)

    @property
    def status(self) -> str:
        """How that went, in words."""
        return self._sources[-1].status

    def close(self) -> None:
        """Take our announcement back."""
        for source in self._sources:
            source.close()
