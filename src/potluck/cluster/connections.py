"""The links of a process: whom it dials, which connections it has, and what is said on them.

Belongs to the control thread, which asks and is told; pool and the I/O thread do the work.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from potluck import _process, _time
from potluck._types import NodeId, ProcessId
from potluck._version import THIS_BUILD, VersionMismatch
from potluck.backend.port import NodePort, proved_node
from potluck.cluster.io import ControlConnection, ControlFrame, IoThread
from potluck.discovery.records import DEFAULT_PORT, PeerFound, PeerGone, Sighting, job_tag
from potluck.errors import (
    ChannelClosed,
    DistributedError,
    HandshakeRefused,
    IoError,
    MalformedFrame,
    describe,
)
from potluck.identity.node import is_slot_free
from potluck.logs import get_logger
from potluck.membership.health import HealthConfig, TokenBucket
from potluck.membership.messages import MAX_MEMBERS, ProcessInfo, ProcessRole
from potluck.membership.topology import NodeProfile
from potluck.metrics.registry import DiscoveryMetrics
from potluck.net import tcp
from potluck.net.addresses import Address, interfaces, is_loopback, unmapped, usable_hosts
from potluck.net.opening import refuse
from potluck.net.secure_socket import NOBODY, OpeningSocket
from potluck.wire_messages import ControlReply, ControlRequest, pack, unpack

if TYPE_CHECKING:
    from potluck.cluster.config import AutoDiscoveryConfig
    from potluck.discovery.service import Discovery


# --------------------------------------------------------------------------------------------------
# Which connection leads to which process: at most one is used, whichever side dialled.
#
# When two processes dial each other at the same moment there are two connections.  Both sides keep
# the one that the process with the smaller id dialled; the other is not written to any more, but
# read until its end, so that nothing said on it is lost.  A connection that comes much later than
# another replaces it: the side that dialled it has lost the first, though this side may not have
# noticed.

AT_ONCE = 2.0
"""Seconds within which two connections count as dialled at the same moment."""


@dataclass(frozen=True, slots=True, eq=False)
class OpenedConnection:
    """A control connection whose other end has said who it is."""

    connection: ControlConnection
    card: ProcessInfo
    dialler: ProcessId
    address: Address
    """Where it can be reached, as far as this connection shows."""
    link: str | None = None
    """The hardware address behind it, where one is known."""
    profile: NodeProfile | None = None
    """What its machine can do, if it told."""
    here: str = ""
    """Our own end: an address of this machine."""


class ConnectionTable:
    """The connections of one process; used by the control thread alone."""

    def __init__(self, me: ProcessId) -> None:
        self._me = me
        self._by_process: dict[ProcessId, OpenedConnection] = {}
        self._by_connection: dict[ControlConnection, OpenedConnection] = {}
        self._since: dict[ProcessId, float] = {}

    def __len__(self) -> int:
        return len(self._by_process)

    def add(self, opened: OpenedConnection, now: float) -> tuple[bool, ControlConnection | None]:
        """One more connection: whether its process is new, and the one to close, if any."""
        process = opened.card.process
        known = self._by_process.get(process)
        self._by_connection[opened.connection] = opened
        if known is None:
            self._by_process[process], self._since[process] = opened, now
            return True, None
        smaller = min(self._me, process)
        is_late = now - self._since[process] > AT_ONCE
        # Of two that the same side dialled the later one counts: it had lost the first.
        if is_late or opened.dialler == smaller or known.dialler != smaller:
            self._by_process[process], self._since[process] = opened, now
            return False, known.connection
        return False, opened.connection

    def ended(self, connection: ControlConnection) -> OpenedConnection | None:
        """A connection is over; returned if it was the one in use."""
        opened = self._by_connection.pop(connection, None)
        if opened is not None and self._by_process.get(opened.card.process) is opened:
            del self._by_process[opened.card.process], self._since[opened.card.process]
            return opened
        return None

    def remove(self, process: ProcessId) -> list[ControlConnection]:
        """Forget a process; its connections, to be closed."""
        self._by_process.pop(process, None)
        self._since.pop(process, None)
        connections = [
            connection
            for connection, each in self._by_connection.items()
            if each.card.process == process
        ]
        for connection in connections:
            del self._by_connection[connection]
        return connections

    def surplus(self, process: ProcessId, retired: ControlConnection) -> list[ControlConnection]:
        """Further connections to a process; one beside the one in use is enough."""
        kept = {self._by_process[process].connection, retired}
        opened = [
            connection
            for connection, each in self._by_connection.items()
            if each.card.process == process
        ]
        return [connection for connection in opened if connection not in kept]

    def to(self, process: ProcessId) -> OpenedConnection | None:
        """The connection to a process."""
        return self._by_process.get(process)

    def behind(self, connection: ControlConnection) -> ProcessInfo | None:
        """Who is at the other end of a connection."""
        opened = self._by_connection.get(connection)
        return opened.card if opened else None

    @property
    def opened(self) -> list[OpenedConnection]:
        """The connections in use."""
        return list(self._by_process.values())


# --------------------------------------------------------------------------------------------------
# Contacts: processes that may be there, where, and when to try them next.
#
# Discovery and members tell of processes; dialling finds out.  Both sides of a pair may dial; the
# one with the smaller id does so at once and the other after a moment, so that there is rarely more
# than one connection, and always at least one.

COURTESY = 0.3
"""Seconds that the side with the larger id waits for the other to dial."""

CROWD = 4
"""Processes for which that is long enough; with more it waits longer in proportion.

The other side dials one after the other, and each handshake costs both sides processor time.
"""

LONGEST_COURTESY = 10.0
"""Seconds, however many there are."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds before trying again; each time twice as long."""

RARELY = 30.0
"""The longest pause for those who are only remembered from an earlier run."""

UNTIL_UPGRADED = 10.0
"""The pause for a process of a version with which no work is possible: another start is needed."""

MAX_CONTACTS = 1024
"""More are not remembered: hints are not worth any memory."""

TRIES = 12
"""Attempts at a process that discovery no longer reports."""


@dataclass(slots=True, eq=False)
class DialCandidate:
    """A process to connect to."""

    key: str
    node: NodeId | None = None
    """Who has to answer; None for any process there."""
    process: ProcessId | None = None
    addresses: tuple[Address, ...] = ()
    name: str = ""
    reported: set[str] = field(default_factory=set)
    """The sources that say it is there."""
    is_dialled: bool = False
    is_connected: bool = False
    is_self: bool = False
    tries: int = 0
    due: float = 0.0
    trouble: str = ""
    """Why the last attempt failed."""
    is_of_another_version: bool = False
    """Whether it failed because no protocol version is common to both."""


class DialCandidates:
    """Who may be there; used by the control thread alone."""

    def __init__(self, me: ProcessId) -> None:
        self._me = me
        self._known: dict[str, DialCandidate] = {}

    def sighted(self, sighting: Sighting, now: float) -> None:
        """Discovery has seen a process, or sees it elsewhere."""
        self._learn(
            sighting.key,
            sighting.process,
            sighting.node,
            sighting.addresses,
            sighting.name,
            now,
        ).reported = set(sighting.sources)

    def unsighted(self, key: str) -> None:
        """Discovery no longer sees a process; an open connection stays."""
        contact = self._known.get(key)
        if contact is not None:
            contact.reported.clear()

    def introduced(self, card: ProcessInfo, now: float) -> None:
        """A member has told of a process."""
        addresses = tuple(Address(host, card.port) for host in card.hosts)
        if card.port and addresses:
            key = _key(card.process)
            self._learn(key, card.process, card.node, addresses, card.name, now)

    def _learn(
        self,
        key: str,
        process: ProcessId | None,
        node: NodeId | None,
        addresses: tuple[Address, ...],
        name: str,
        now: float,
    ) -> DialCandidate:
        known = self._known.get(key if process is None else _key(process))
        if known is None:
            known = DialCandidate(key if process is None else _key(process), node, process)
            if process is not None and process < self._me:
                known.due = now + self._courtesy
            known.is_self = process == self._me
            if len(self._known) < MAX_CONTACTS:
                self._known[known.key] = known
                if process is not None:
                    self._known.setdefault(key, known)
        elif known.addresses != addresses and not known.is_connected:
            known.due, known.tries = min(known.due, now), 0
        known.addresses = addresses or known.addresses
        known.name = name or known.name
        return known

    def connected(self, process: ProcessId, now: float, via: DialCandidate | None = None) -> None:
        """A connection to a process is open; ``via`` is the contact that was dialled for it.

        The contact may have had an address only.  If it was another process, such as an earlier one
        that had the same port, it is not there any more: it is forgotten, or, if discovery still
        reports it, dialled again later.
        """
        for contact in self._of(process):
            contact.is_connected, contact.tries, contact.trouble = True, 0, ""
        if via is None:
            return
        if via.process is None:
            via.is_connected, via.process, via.tries = True, process, 0
        elif via.process != process and via.reported:
            self.failed(via, f"another process answers at its address ({_key(process)})", now)
        elif via.process != process:
            self.forget(via.process)

    def disconnected(self, process: ProcessId, now: float) -> None:
        """The connection to a process has ended: try again."""
        for contact in self._of(process):
            contact.is_connected = False
            contact.due = now + (self._courtesy if process < self._me else FIRST_PAUSE)
            if contact.node is None:
                contact.process = None  # any process at that address now

    def failed(self, contact: DialCandidate, trouble: str, now: float) -> None:
        """An attempt has failed."""
        contact.is_dialled = False
        contact.trouble = trouble
        contact.tries += 1
        longest = RARELY if contact.reported == {"known"} else LONGEST_PAUSE
        pause = min(FIRST_PAUSE * 2 ** min(contact.tries, 12), longest)
        contact.due = now + max(pause, UNTIL_UPGRADED * contact.is_of_another_version)
        if not contact.reported and contact.tries >= TRIES:
            for key in [key for key, each in self._known.items() if each is contact]:
                del self._known[key]

    def forget(self, process: ProcessId) -> None:
        """Do not try a process any more, until it is seen anew."""
        for contact in self._of(process):
            for key in [key for key, each in self._known.items() if each is contact]:
                del self._known[key]

    def _of(self, process: ProcessId) -> list[DialCandidate]:
        return [each for each in set(self._known.values()) if each.process == process]

    def addresses_of(self, process: ProcessId) -> tuple[Address, ...]:
        """Where a process was last seen."""
        return tuple(dict.fromkeys(a for each in self._of(process) for a in each.addresses))

    @property
    def _courtesy(self) -> float:
        return min(COURTESY * max(1.0, len(self._known) / CROWD), LONGEST_COURTESY)

    def due(self, now: float, most: int = MAX_CONTACTS) -> list[DialCandidate]:
        """Whom to dial now, those first that wait longest; each is marked as being dialled."""
        found = [each for each in self._candidates() if each.due <= now]
        if len(found) > most:
            found = sorted(found, key=lambda each: (each.due, each.key))[:most]
        for contact in found:
            contact.is_dialled = True
        return found

    def _candidates(self) -> set[DialCandidate]:
        taken = {each.process for each in self._known.values() if each.is_connected}
        return {
            each
            for each in self._known.values()
            if not (each.is_dialled or each.is_connected or each.is_self)
            and each.addresses
            and (each.process is None or each.process not in taken)
        }

    @property
    def next_deadline(self) -> float | None:
        """When the next process has to be dialled."""
        return min((each.due for each in self._candidates()), default=None)

    @property
    def troubles(self) -> dict[str, str]:
        """Whom we could not reach lately, and why."""
        return self.troubles_except(lambda _: False)

    def troubles_except(self, is_over: Callable[[DialCandidate], bool]) -> dict[str, str]:
        """The same without those of whom it is known that they have ended."""
        return {
            each.name or ", ".join(map(str, each.addresses)): each.trouble
            for each in set(self._known.values())
            if each.trouble and not each.is_connected and not is_over(each)
        }


def _key(process: ProcessId) -> str:
    return f"{process.node}/{process.incarnation}"


# --------------------------------------------------------------------------------------------------
# Tasks: what takes time and touches sockets, done for the control thread on short-lived threads.
#
# A bounded number runs at once; the others wait in line.  Each ends by itself: whatever it does has
# a deadline.

TASKS_AT_ONCE = 16
"""Tasks that run at the same time."""

RESERVED = 8
"""More of them for what is urgent: many who do not answer must not hold up the proof of a death."""

PROBE_WITHIN = 1.0
"""Seconds for an answer from a port; a refusal on a local network takes a millisecond."""

_ARP = Path("/proc/net/arp")


class DialPool:
    """Runs tasks until closed."""

    def __init__(self, at_once: int = TASKS_AT_ONCE) -> None:
        self._at_once = at_once
        self._waiting: deque[Callable[[], None]] = deque()
        self._urgent: deque[Callable[[], None]] = deque()
        self._running: set[threading.Thread] = set()
        self._lock = threading.Lock()
        self._closed = False

    def run(self, task: Callable[[], None], *, urgent: bool = False, ahead: bool = False) -> None:
        """Run a task soon; one with a reason to be ``ahead`` before those that wait already.

        An urgent one comes before all others, and on a thread kept for such.
        """
        with self._lock:
            if self._closed:
                return
            line = self._urgent if urgent else self._waiting
            (line.appendleft if ahead else line.append)(task)
            if len(self._running) < self._at_once + (RESERVED if urgent else 0):
                thread = threading.Thread(target=self._work, name="potluck-task", daemon=True)
                self._running.add(thread)
                thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                task = self._next()
                if task is None:
                    self._running.discard(threading.current_thread())
                    return
            try:
                task()
            except Exception:  # a fault of ours in one must not end the others
                logger.exception("A background task failed")

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
        """Whether tasks that run should come to an end."""
        return self._closed

    def close(self, within: float) -> None:
        """Start no more, and wait for those that run, for this many seconds at most."""
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
    """Try a port: None if the machine itself refused the connection, else what casts doubt.

    A refusal counts only from the machine: over loopback, or on a network that we are attached to
    (a router in between may refuse for it), from the link address that it had before.
    """
    why = "its address is not known"
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
            why = f"{address}: {describe(error)}"
        else:
            return f"{address} still answers"
    return why


def _try_port(address: Address, within: float) -> None:
    family, kind, proto, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as sock:
        _process.track(sock)
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


# --------------------------------------------------------------------------------------------------
# Opening control connections: what is said at the door, on both sides, and who is let in.

SAME_PROCESS = "this is the same process"
"""How one learns that an address is one's own."""

DIAL_WITHIN = 6.0
"""Seconds for one attempt, all its addresses and the handshake included."""


class ControlHandshake:
    """Opens connections for one process and job: dials, and answers who dials.

    Observers may look at any job of the namespace; None stands for all.
    """

    def __init__(
        self,
        port: NodePort,
        job: str | None,
        card: ProcessInfo,
        receive: Callable[[OpenedConnection], None],
        objection: Callable[[ProcessId], str | None] = lambda _: None,
        *,
        profile: NodeProfile | None = None,
    ) -> None:
        self._profile = profile.to_bytes() if profile else b""
        self._port = port
        self._job_name = job
        self.card = card
        self._receive = receive
        self._objection = objection
        port.on_control(self._answer)

    @property
    def job_tag(self) -> str:
        """Stands for the job, or for all of them; follows the secret of the namespace."""
        namespace = self._port.members.security.namespace
        return "" if self._job_name is None else job_tag(namespace, self._job_name)

    # -- dialling: on the pool --------------------------------------------------------------

    def dial(
        self, addresses: Sequence[Address], expected: NodeId | None, look: Callable[[], None]
    ) -> OpenedConnection:
        """Open a connection; raises ``DistributedError`` or ``OSError``."""
        hello = ControlRequest(job=self.job_tag, card=pack(self.card), profile=self._profile)
        deadline = time.monotonic() + DIAL_WITHIN
        sock, answer = self._port.dial_control(addresses, expected, hello, deadline, look)
        try:
            card, profile = self._read_card(sock, answer), _read_profile(answer)
            return self._opened(sock, card, self.card.process, profile)
        except BaseException:
            sock.close()
            raise

    # -- answering: on the thread of the port --------------------------------------------------

    def _answer(self, sock: OpeningSocket, hello: ControlRequest) -> None:
        try:
            card, profile = self._read_card(sock, hello), _read_profile(hello)
        except (HandshakeRefused, MalformedFrame) as error:
            refuse(sock, error.message)
            return
        if objection := self._objection(card.process):
            refuse(sock, objection, for_now=True)
            return
        answer = ControlReply(job=self.job_tag, card=pack(self.card), profile=self._profile)
        self._port.answer_control(sock, answer)
        self._receive(self._opened(sock, card, card.process, profile))

    # -- both ----------------------------------------------------------------------------------

    def _read_card(self, sock: OpeningSocket, said: ControlRequest | ControlReply) -> ProcessInfo:
        """What the other side says of itself, if it fits what it has proved."""
        card = unpack(said.card, ProcessInfo)
        proved = proved_node(sock)
        introduction = said.introduction
        if card.process == self.card.process:
            raise HandshakeRefused(SAME_PROCESS)
        if said.job != self.job_tag and ProcessRole.OBSERVER not in {card.role, self.card.role}:
            raise HandshakeRefused("this process works on another job")
        if proved is not NOBODY and proved != card.node:
            raise HandshakeRefused("it claims to be another node than its key proves")
        if introduction.incarnation != card.incarnation:
            raise HandshakeRefused("its introduction and its card are of different starts")
        if introduction.machine:
            card = msgspec.structs.replace(
                card,
                machine=introduction.machine,
                boot=introduction.boot,
                slot=introduction.slot,
            )
        return card

    def _opened(
        self,
        sock: OpeningSocket,
        card: ProcessInfo,
        dialler: ProcessId,
        profile: NodeProfile | None,
    ) -> OpenedConnection:
        host, port = sock.getpeername()[:2]
        host = unmapped(str(host))
        address = Address(host, card.port or int(port))
        link = None
        with contextlib.suppress(OSError, DistributedError):
            link = link_address(host)
        connection = ControlConnection(sock, f"{card} at {address}")
        here = unmapped(str(sock.getsockname()[0]))
        return OpenedConnection(connection, card, dialler, address, link, profile, here)


def _read_profile(said: ControlRequest | ControlReply) -> NodeProfile | None:
    return NodeProfile.from_bytes(said.profile) if said.profile else None


# --------------------------------------------------------------------------------------------------

logger = get_logger(__name__)

CLUSTER, REPORTS = 0, 1
"""Tags of control messages: for the core, and of those who ask how we are."""

MAX_CONNECTIONS = 2 * MAX_MEMBERS
"""Processes with a connection at once: all members of the largest view, and as many who wait."""

DIALS_AT_ONCE = 4
"""Processes that are dialled at the same time: a handshake computes more than it waits."""

WAITING_DIALS = 12
"""More of them that have waited for an answer for a second: an address may be a black hole."""

PATIENT = 1.0
"""Seconds for which a dial counts as one that computes."""

DIALS_BURST, DIALS_PER_SECOND = 64, 16.0
"""Connections that are opened at once, and in a second after that, whatever happens."""

PROBES_BURST, PROBES_PER_SECOND = 64, 32.0
"""The same for ports that are tried."""

MAX_OBSERVERS = 64
"""Observers that have a connection at once."""

MAX_BANNED = 256
"""Processes whose connections are refused; of more, the latest."""


class ConnectionListener(Protocol):
    """Who is told; everything on the control thread."""

    def met(self, card: ProcessInfo) -> None:
        """There is a connection to a process."""

    def lost(self, process: ProcessId, cause: str) -> None:
        """There is none any more."""

    def misbehaved(self, process: ProcessId, why: str) -> None:
        """It sent what no correct process sends."""

    def probed(self, process: ProcessId, what: str, *, has_ended: bool) -> None:
        """Its slot and port were tried: how it ended, or why nothing is known."""

    def said(self, process: ProcessId, payload: bytes) -> None:
        """It sent a message for the core; raises ``MalformedFrame``."""

    def asked(self, connection: ControlConnection, payload: bytes) -> None:
        """A process sent a report, or asks for one; raises ``MalformedFrame``."""


class ControlConnections:
    """All control connections of one process."""

    def __init__(
        self,
        me: ProcessInfo,
        listener: ConnectionListener,
        pool: DialPool,
        post: Callable[..., None],
    ) -> None:
        self._me = me
        self._listener = listener
        self._pool = pool
        self._post = post
        self._connections = ConnectionTable(me.process)
        self.contacts = DialCandidates(me.process)
        self._observers = ConnectionTable(me.process)  # connections of which one end is an observer
        self._last: dict[
            ProcessId, OpenedConnection
        ] = {}  # the latest connection to every process we have met
        self._banned: dict[ProcessId, str] = {}
        self._dialling: dict[DialCandidate, float] = {}  # who is dialled now, and since when
        now = _time.now()
        self._dials = TokenBucket(DIALS_PER_SECOND, DIALS_BURST, now)
        self._probes = TokenBucket(PROBES_PER_SECOND, PROBES_BURST, now)
        self._probing: set[ProcessId] = set()
        self.handshake: ControlHandshake | None = None
        self.discovery: Discovery | None = None
        self._draining = False
        self.counts = DiscoveryMetrics()
        self.is_over = False
        self.io = IoThread(self.arrived, self.ended, self.silenced)

    # -- any thread ----------------------------------------------------------------------------

    def objection(self, process: ProcessId) -> str | None:
        """Why a process may not open a connection, if so."""
        return self._banned.get(process)

    def opened(self, connection: OpenedConnection) -> None:
        """A process has opened a connection."""
        if self.is_over:
            connection.connection.close()
        else:
            self._post(lambda: self._on_opened(connection))

    def arrived(self, connection: ControlConnection, frame: ControlFrame) -> None:
        """A message has come in."""
        self._post(lambda: self._on_message(connection, frame))

    def ended(self, connection: ControlConnection, cause: str) -> None:
        """A connection is over."""
        self._post(lambda: self._on_ended(connection, cause))

    def silenced(self, reason: str) -> None:
        """The I/O thread is over: so is the control thread, whose groups end for good."""
        self._post(lambda: _raise(reason))

    def wake(self) -> None:
        """Discovery has news."""
        if not self._draining:
            self._draining = True
            self._post(self._drain)

    # -- the control thread --------------------------------------------------------------------

    def send(self, to: ProcessId, payload: bytes) -> None:
        """Send a message for the core of a process, if there is a connection to it."""
        opened = self._connections.to(to)
        if opened is not None:
            self.io.send(opened.connection, payload, CLUSTER)

    def dial_due(self, now: float) -> None:
        """Dial whom it is time to dial, a few at a time."""
        if self.handshake is None:
            return
        quick = sum(now - since < PATIENT for since in self._dialling.values())
        room = min(DIALS_AT_ONCE - quick, DIALS_AT_ONCE + WAITING_DIALS - len(self._dialling))
        if room <= 0 or not self._dials.has(now):
            return
        for contact in self.contacts.due(now, room):
            self._dials.take(now)
            self._dialling[contact] = now
            self._dial(contact)

    def next_dial(self, now: float) -> float | None:
        """When the next dial is due; None if it depends on something else."""
        due = None if self.handshake is None else self.contacts.next_deadline
        if due is None:
            return None
        if len(self._dialling) >= DIALS_AT_ONCE:
            due = max(due, now + PATIENT / 4)  # the end of a dial wakes us earlier
        return max(due, self._dials.when(now))

    def drop(self, process: ProcessId, why: str) -> None:
        """Make sure of a process anew: end the connection to it, as if it had broken."""
        opened = self._connections.to(process)
        if opened is not None:
            self.io.drop(opened.connection)
            self._on_ended(opened.connection, why)

    def ban(self, process: ProcessId, reason: str) -> None:
        """Close all connections to a process, and accept none."""
        self._banned[process] = reason
        while len(self._banned) > MAX_BANNED:
            del self._banned[next(iter(self._banned))]
        for connection in self._connections.remove(process):
            self.io.drop(connection)
        self.contacts.forget(process)

    def probe(self, process: ProcessId) -> None:
        """Try the port of a process, unless that is being done, or was done too often."""
        if process in self._probing or not self._probes.take(_time.now()):
            return  # the core asks again with its next beat
        self._probing.add(process)
        addresses = list(self.addresses_of(process))
        last = self._last.get(process)
        link = last.link if last else None
        slot = self._slot_here(last.card) if last else None

        def task() -> None:
            if _is_free(slot):
                has_ended, what = True, "its slot on its machine is free"
            else:
                why = probe(addresses, link, PROBE_WITHIN if slot is None else PROBE_HERE_WITHIN)
                has_ended, what = why is None, why or "its port refuses connections"
            self._post(lambda: self._on_probed(process, what, has_ended=has_ended))

        self._pool.run(task, urgent=True)

    def _slot_here(self, card: ProcessInfo) -> int | None:
        """The slot of a process of this user on this machine; None for all others."""
        is_here = card.node == self._me.node and card.machine == self._me.machine
        return card.slot if is_here else None

    def addresses_of(self, process: ProcessId) -> tuple[Address, ...]:
        """Where a process may be reached, first where it was reached last."""
        last = self._last.get(process)
        known = self.contacts.addresses_of(process)
        return tuple(dict.fromkeys([*([last.address] if last else []), *known]))

    @property
    def opened_connections(self) -> list[OpenedConnection]:
        """The connections in use."""
        return self._connections.opened

    @property
    def observers(self) -> dict[ControlConnection, OpenedConnection]:
        """The connections in use of which one end is an observer; any thread."""
        return {each.connection: each for each in self._observers.opened}

    def observer_behind(self, connection: ControlConnection) -> ProcessInfo | None:
        """Who is at the other end of such a connection, also if it is not used any more."""
        return self._observers.behind(connection)

    def _remember(self, opened: OpenedConnection) -> None:
        self._last[opened.card.process] = opened
        if len(self._last) > 2 * MAX_CONNECTIONS:
            self.forget_except(set())

    def forget_except(self, processes: set[ProcessId]) -> None:
        """Remember no more of those who are gone than is of use."""
        for process in [each for each in self._last if each not in processes]:
            if self._connections.to(process) is None:
                del self._last[process]

    def _dial(self, contact: DialCandidate) -> None:
        addresses, node, handshake = contact.addresses, contact.node, self.handshake
        assert handshake is not None
        self.counts.add(attempts=1)

        def look() -> None:
            if self._pool.is_closed:
                raise ChannelClosed("This process is leaving")

        def task() -> None:
            try:
                opened = handshake.dial(addresses, node, look)
            except (DistributedError, OSError, ValueError) as error:  # an address may be none
                failure = error
                self._post(lambda: self._on_failed(contact, failure))
            else:
                self._post(lambda: self._on_opened(opened, contact))

        # Anybody may announce a thousand machines that do not answer; the others come first.
        self._pool.run(task, ahead=contact.reported != {"mdns"})

    def _on_failed(self, contact: DialCandidate, error: Exception) -> None:
        self._dialling.pop(contact, None)
        trouble = str(error)
        contact.is_self = contact.is_self or SAME_PROCESS in trouble
        if trouble != contact.trouble and not contact.is_self:  # once for each reason
            logger.debug("could not reach %s: %s", contact.name or contact.addresses, trouble)
        if not contact.is_self:
            self.counts.add(unreachable=1)
        contact.is_of_another_version = isinstance(error, VersionMismatch)
        self.contacts.failed(contact, trouble, _time.now())
        if isinstance(error, VersionMismatch) and error.node and self.discovery is not None:
            self.discovery.remember([_seen_of_another_version(contact, error)])

    def _on_opened(self, opened: OpenedConnection, via: DialCandidate | None = None) -> None:
        process = opened.card.process
        if via is not None:
            via.is_dialled = False
            self._dialling.pop(via, None)
        is_watch = ProcessRole.OBSERVER in {opened.card.role, self._me.role}
        table, most = (
            (self._observers, MAX_OBSERVERS) if is_watch else (self._connections, MAX_CONNECTIONS)
        )
        if self.is_over or process in self._banned:
            self._decline(opened, via, self._banned.get(process, "this process is leaving"))
            return
        if len(table) >= most and table.to(process) is None:
            self._decline(opened, via, "there are too many connections already")
            return
        self._remember(opened)
        if not is_watch:
            self.contacts.introduced(opened.card, _time.now())
        self.contacts.connected(process, _time.now(), via)
        is_new, unwanted = table.add(opened, _time.now())
        self.io.add(opened.connection)
        if unwanted is not None:
            self.io.retire(unwanted)
            for connection in table.surplus(process, unwanted):
                self.io.drop(connection)
        if is_new:
            self._listener.met(opened.card)

    def _decline(self, opened: OpenedConnection, via: DialCandidate | None, why: str) -> None:
        """Do without a connection; who was dialled is not dialled again at once."""
        opened.connection.close()
        if via is not None:
            self.contacts.failed(via, why, _time.now())

    def _on_ended(self, connection: ControlConnection, cause: str) -> None:
        opened = self._observers.ended(connection) or self._connections.ended(connection)
        if opened is not None and not self.is_over:
            self.contacts.disconnected(opened.card.process, _time.now())
            self._listener.lost(opened.card.process, cause)

    def _on_message(self, connection: ControlConnection, frame: ControlFrame) -> None:
        self.io.looked_at(connection)
        if self.is_over:
            return
        card = self._connections.behind(connection)
        try:
            if frame.tag == REPORTS:
                self._listener.asked(connection, frame.payload)
            elif card is not None:
                self._listener.said(card.process, frame.payload)
        except MalformedFrame as error:
            logger.warning("%s sent an invalid message: %s", connection.name, error)
            why = f"it sent an invalid message ({error})"
            self.io.drop(connection, 0.0)
            if card is not None:
                self._listener.misbehaved(card.process, why)
            self._on_ended(connection, why)

    def _on_probed(self, process: ProcessId, what: str, *, has_ended: bool) -> None:
        self._probing.discard(process)
        if not self.is_over and self._connections.to(process) is None:
            self._listener.probed(process, what, has_ended=has_ended)

    def _drain(self) -> None:
        self._draining = False
        if self.discovery is None or self.is_over:
            return
        now = _time.now()
        for event in self.discovery.drain():
            if isinstance(event, PeerGone):
                self.counts.add(departures=1)
                self.contacts.unsighted(event.sighting.key)
            elif event.sighting.process != self._me.process:
                if isinstance(event, PeerFound):
                    self.counts.add(arrivals=1)
                self.contacts.sighted(event.sighting, now)


PROBE_HERE_WITHIN = 0.05
"""Seconds for a port of this machine.

It answers at once or a firewall drops the question.  The system may release the slot of a process
that was killed a moment after its connections, so the slot is looked at again soon.
"""


def _is_free(slot: int | None) -> bool:
    """Whether the system has released the lock of a slot here, whatever a firewall does."""
    if slot is None:
        return False
    try:
        return is_slot_free(slot)
    except DistributedError as error:
        logger.debug("slot %d could not be checked: %s", slot, error)
        return False


def _seen_of_another_version(contact: DialCandidate, error: VersionMismatch) -> Sighting:
    """What is remembered of a machine that cannot be worked with, for `potluck members`."""
    node, theirs = NodeId(error.node or ""), error.theirs
    return Sighting(
        key=f"{node}/0",
        sources=("known",),
        node=node,
        incarnation=0,
        job_tag="",
        addresses=contact.addresses,
        version=theirs.protocol,
        name=contact.name,
        oldest=theirs.oldest,
        potluck=theirs.potluck,
    )


def _raise(reason: str) -> None:
    raise RuntimeError(reason)


# --------------------------------------------------------------------------------------------------
# The port of a process, and the card on which it says who it is.

cluster_logger = get_logger("potluck.cluster")

USUAL_PORTS = 16
"""Ports that are tried before any free one will do."""


def open_port(
    config: AutoDiscoveryConfig, rendezvous: int | None = None, *, is_shared: bool = False
) -> NodePort:
    """The port of this process: the one that is wanted, a usual one, or any that is free."""

    def opened(number: int) -> NodePort:
        return NodePort(config.namespace, port=number, host=config.host, is_shared=is_shared)

    wanted = config.port or rendezvous or 0
    if wanted:
        return opened(wanted)
    wished = config.wished_port
    usual = range(DEFAULT_PORT, DEFAULT_PORT + USUAL_PORTS)
    for number in (*((wished,) if wished else ()), *usual):
        if _port_is_free(config.host, number):
            with contextlib.suppress(IoError):  # another one was faster
                return opened(number)
    return opened(0)


def _port_is_free(host: str, port: int) -> bool:
    try:
        tcp.listen(host, port).close()
    except OSError:
        return False
    return True


def make_card(
    port: NodePort,
    config: AutoDiscoveryConfig,
    role: ProcessRole,
    health: HealthConfig | None = None,
) -> ProcessInfo:
    """What this process says of itself; ``health`` are the deadlines that a member has chosen."""
    introduction = port.introduction()
    hosts = [config.host] if config.host else _hosts(config)
    return ProcessInfo(
        node=port.process.node,
        incarnation=port.process.incarnation,
        slot=port.slot,
        machine=introduction.machine,
        boot=introduction.boot,
        name=config.node_name,
        hosts=tuple(hosts[:16]) or ("127.0.0.1",),  # without a network, for this machine alone
        port=port.port,
        role=role,
        schema=config.schema,
        pause_after=(health or HealthConfig()).pause_after,
        quorum=config.quorum,
        place=config.wished_rank,
        versions=(THIS_BUILD.potluck, THIS_BUILD.protocol, THIS_BUILD.oldest),
    )


def _hosts(config: AutoDiscoveryConfig) -> list[str]:
    """Where others can reach this machine."""
    wanted = config.discovery().interfaces
    hosts = usable_hosts(virtual=config.virtual, only=wanted)
    if wanted and not hosts:
        names = ", ".join(sorted({each.name for each in interfaces()}))
        cluster_logger.warning(
            "Other machines cannot reach this one: the network interface %s is missing or "
            "has no address for them. This machine has: %s.",
            " or ".join(wanted),
            names or "none",
        )
    return hosts
