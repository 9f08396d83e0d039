"""Trying to reach a peer, only to find out what is in the way."""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from dataclasses import dataclass, field, replace
from typing import TypeVar

from potluck._types import NodeId
from potluck._version import THIS_BUILD, VersionMismatch
from potluck.backend.base import PeerStream
from potluck.backend.port import NodePort
from potluck.cluster.bandwidth import Bandwidth, ProbeLimits, measure_bandwidth
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
from potluck.net.secure_socket import CHUNK, OpeningSocket, SecureSocket
from potluck.net.tcp import TcpStream, make_poller
from potluck.net.tls import AnotherNamespace
from potluck.net.transport import Buffer
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
# Two who look around at the same time help each other: both measure the link between them.
#
# It is the probe that members of a cluster use.  Time and bytes are bounded on both sides; only
# members of the namespace are served, a few at a time.

LIMITS = ProbeLimits(seconds=0.25, patience=4.0)
SERVED = 4  # who are served at the same time


class TlsStream:
    """A connection in TLS, as a probe wants it: it never blocks."""

    is_local = False
    shared = None

    def __init__(self, sock: SecureSocket) -> None:
        self._sock, self._channel, ahead = sock.hand_over()
        self._below = TcpStream(self._sock)
        self.fileno, self.peer_name = self._below.fileno, self._below.peer_name
        self.expect, self.pace, self.close = (
            self._below.expect,
            self._below.pace,
            self._below.close,
        )
        self._plain = bytearray(ahead)
        self._unsent = b""

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        """Encrypt all of it, as soon as what was encrypted before is on its way."""
        self._flush()
        if self._unsent:
            raise BlockingIOError
        data = b"".join(buffers)
        self._channel.write(data)
        self._flush()
        return len(data)

    def recv_into(self, buffer: memoryview, /) -> int:
        """Decrypt what is there."""
        self._flush()
        if not self._plain:
            data = self._sock.recv(CHUNK)
            if not data:
                return 0
            self._channel.receive(data)
            self._plain += self._channel.read()
            if not self._plain:
                raise BlockingIOError
        count = min(len(buffer), len(self._plain))
        buffer[:count] = self._plain[:count]
        del self._plain[:count]
        return count

    def _flush(self) -> None:
        self._unsent += self._channel.outgoing()
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self._sock.send(self._unsent) :]

    def finish(self, deadline: float) -> None:
        """Send what is left, and close when it has arrived."""
        self._sock.settimeout(max(0.01, deadline - time.monotonic()))
        with contextlib.suppress(OSError):
            self._sock.sendall(self._unsent)
        self._sock.setblocking(False)
        self._below.finish(deadline)


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
            thread.join(LIMITS.patience)

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
            _measure(sock, first=False)

    # -- who asks ------------------------------------------------------------------------------

    def ask(self, addresses: Sequence[Address]) -> Rate | None:
        """How much goes through to a colleague; None if it does not take part."""
        with self._asking, contextlib.suppress(OSError, DistributedError):  # one after the other
            deadline = time.monotonic() + LIMITS.patience
            hello = ControlRequest(job=self.job)
            sock, opened = self.port.dial_control(addresses, None, hello, deadline)
            with contextlib.closing(sock):
                profile = NodeProfile.from_bytes(opened.profile) if opened.profile else None
                battery = profile.battery if profile else None
                host = unmapped(str(sock.getsockname()[0]))
                found = _measure(sock, first=True)
                return Rate(
                    max(1, found.up),
                    host,
                    is_on_battery=battery is not None and not battery.plugged,
                    down=found.down,
                    latency=found.latency,
                )
        return None


def _measure(sock: OpeningSocket, *, first: bool) -> Bandwidth:
    stream = TlsStream(sock) if isinstance(sock, SecureSocket) else TcpStream(sock)
    poller = make_poller()
    try:
        return measure_bandwidth(PeerStream(stream), poller, first=first, limits=LIMITS)
    finally:
        poller.close()
        stream.finish(time.monotonic() + FINISHING)


FINISHING = 1.0
"""Seconds for the last words of a probe to arrive."""


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
