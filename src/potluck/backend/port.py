"""One port per process: for control connections and the connections of every view.

The hello says what a connection is for.  A peer that gets this far has proved its identity and
agrees with us on the members, so a handler only decides whether it may have what it asks for.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from msgspec import structs

from potluck import _process
from potluck._process import Closing
from potluck._types import NodeId, ProcessId
from potluck.errors import BackendUnavailable, MalformedFrame, from_os_error
from potluck.identity.node import Incarnation, claim_process, this_process
from potluck.net import tcp
from potluck.net.addresses import Address
from potluck.net.listener import Acceptor
from potluck.net.opening import answer, refuse
from potluck.net.secure_socket import NOBODY, OpeningSocket, SecureSocket, Security
from potluck.trust.connect import AdmissionHandshake, open_any, say_hello
from potluck.trust.membership_store import TrustStore
from potluck.wire_messages import (
    ControlReply,
    ControlRequest,
    Introduction,
    Join,
    OpenRequest,
    unpack,
)

if TYPE_CHECKING:
    from potluck.identity.namespace import NetworkNamespace


# --------------------------------------------------------------------------------------------------
# The lobby of a port: lanes find the view they belong to, or wait for it for a moment.
#
# Members install a view some milliseconds apart, so the first to do so open lanes to others who do
# not know it yet.  Such lanes wait, bounded in number and time, and are then sent away for now:
# their diallers ask again for as long as they want them.

WAIT = 5.0
"""Seconds a lane waits for its view: longer than a view takes to reach every member."""

SEATS = 256
"""Lanes that may wait at once; each is an open connection."""

SEATS_EACH = 64
"""Of these, from one node, which may run that many processes; in clear, from one address."""

ANOTHER = "this connection belongs to another group"

REMEMBERED = 64
"""Sessions that are known to be over, so that their lanes do not wait in vain."""

Intake: TypeAlias = Callable[[OpeningSocket, OpenRequest], None]
"""Takes the lanes of one session; owns them from then on, and must not block."""


@dataclass(frozen=True, slots=True, eq=False)
class _PendingConnection:
    """A lane that waits."""

    sock: OpeningSocket
    lane: OpenRequest
    origin: str
    deadline: float


class PendingConnections:
    """Hands incoming connections to the backend that serves their session."""

    def __init__(self) -> None:
        self._intakes: dict[bytes, Intake] = {}
        self._guests: list[_PendingConnection] = []  # in order of arrival, so of deadline
        self._over: deque[bytes] = deque(maxlen=REMEMBERED)
        self._is_closed = False
        self._serves_one = False
        self._usher: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """How many lanes wait."""
        with self._changed:
            return len(self._guests)

    def serve(self, session: bytes, intake: Intake, *, alone: bool = False) -> None:
        """From now on ``intake`` gets the lanes of a session; also those that wait.

        If it is served ``alone`` there will never be another one.
        """
        with self._changed:
            self._intakes[session] = intake
            self._serves_one = alone
            if session in self._over:
                self._over.remove(session)
            come = self._dismiss(lambda guest: guest.lane.session == session)
            others = self._dismiss(lambda _: alone)
        for guest in come:
            _hand_over(guest, intake)
        for guest in others:
            refuse(guest.sock, ANOTHER, for_now=True)

    def withdraw(self, session: bytes) -> None:
        """Stop serving a session; later connections for it are refused."""
        with self._changed:
            if self._intakes.pop(session, None) is not None:
                self._over.append(session)

    def receive(self, sock: OpeningSocket, lane: OpenRequest) -> None:
        """Take a lane in."""
        with self._changed:
            intake = self._intakes.get(lane.session)
            refused = "" if intake is not None else self._seat(sock, lane)
        if intake is not None:
            intake(sock, lane)
        elif refused:
            refuse(sock, refused, for_now=True)

    def _seat(self, sock: OpeningSocket, lane: OpenRequest) -> str:
        """Let a lane wait; or why it cannot."""
        if self._is_closed:
            return "this process is leaving"
        if self._serves_one:
            return ANOTHER
        if lane.session in self._over:
            return "this view has ended here"
        origin = _origin(sock)
        here = sum(guest.origin == origin for guest in self._guests)
        if here >= SEATS_EACH or len(self._guests) >= SEATS:
            return "too many connections are waiting for later views"
        self._guests.append(_PendingConnection(sock, lane, origin, time.monotonic() + WAIT))
        if self._usher is None:
            self._usher = threading.Thread(target=self._run, name="potluck-lobby", daemon=True)
            try:
                self._usher.start()
            except RuntimeError:  # the system gives no more threads
                self._usher = None
                self._guests.pop()
                return "this machine cannot start another thread"
        return ""

    def _run(self) -> None:
        """Refuse connections that have waited too long, until none wait."""
        while True:
            with self._changed:
                if not self._guests:
                    self._usher = None
                    return
                self._changed.wait(max(0.0, self._guests[0].deadline - time.monotonic()))
                late = self._dismiss(lambda guest: guest.deadline <= time.monotonic())
            for guest in late:
                refuse(
                    guest.sock, "the view of this connection is not known here yet", for_now=True
                )

    def _dismiss(self, chosen: Callable[[_PendingConnection], bool]) -> list[_PendingConnection]:
        """Take guests off the list; only inside the lock."""
        leaving = [guest for guest in self._guests if chosen(guest)]
        self._guests = [guest for guest in self._guests if guest not in leaving]
        if leaving:
            self._changed.notify_all()
        return leaving

    def close(self) -> None:
        """Refuse every connection that waits, and all that come later."""
        with self._changed:
            self._is_closed = True
            self._intakes.clear()
            leaving = self._dismiss(lambda _: True)
            usher = self._usher
        for guest in leaving:
            refuse(guest.sock, "this process is leaving", for_now=True)
        if usher is not None and usher is not threading.current_thread():
            usher.join()


def _hand_over(guest: _PendingConnection, intake: Intake) -> None:
    try:
        intake(guest.sock, guest.lane)
    except OSError:
        guest.sock.close()  # it has left meanwhile


def _origin(sock: OpeningSocket) -> str:
    if isinstance(sock, SecureSocket):
        return sock.peer
    try:
        return str(sock.getpeername()[0])
    except OSError:
        return ""


# --------------------------------------------------------------------------------------------------

JoinHandler: TypeAlias = Callable[[OpeningSocket, Join], None]
"""Owns the connection of a rank that wants to join; must not block."""

ControlHandler: TypeAlias = Callable[[OpeningSocket, ControlRequest], None]
"""Owns the connection of a control lane from its hello on; must not block."""

HELLO_WITHIN = 5.0
"""Seconds for a control lane's hello and its answer."""

ANSWER_WITHIN = 1.0
"""Seconds for an answer to leave: it fits into the buffer of a connection that is new."""


class NodePort(Closing):
    """Where a process can be reached, for as long as it is part of a cluster.

    Each one is a process of its own to others (:attr:`process`), also when a program opens one
    after the other: what was said to an earlier one never reaches a later one.  One that
    ``is_shared`` is the process to which this program's groups of fixed ranks belong; such a group
    opens one on its own ``listener``, with the ``members`` that it knows already, and ``on_join``
    gets the ranks that want to join.
    """

    def __init__(
        self,
        namespace: NetworkNamespace | str | None = None,
        *,
        port: int = 0,
        host: str = "",
        security: Security | None = None,
        is_shared: bool = False,
        members: TrustStore | None = None,
        listener: socket.socket | None = None,
        on_join: JoinHandler | None = None,
    ) -> None:
        if members is not None:
            security = members.security
        security = security or Security.load(namespace)
        node = security.identity.id
        self._claim: Incarnation | None = None
        if is_shared:
            this = this_process(node)
        else:
            this, self._claim = claim_process(node)
        self.process = ProcessId(node, this.incarnation)
        """Which start of which node; proved to others, except on connections in clear."""
        self.slot = this.slot
        """Its place among the processes of this machine: a later one in it proves our end."""
        self.members = members or TrustStore(security, lambda _: this)
        self._lobby = PendingConnections()
        self._on_control: ControlHandler | None = None
        self._on_join = on_join  # set before the first caller is heard
        self._closed: BackendUnavailable | None = None
        try:
            self.members.check()
            self._acceptor = self._accept(listener or self._listen(host, port))
        except BaseException:
            self._release()
            raise
        self.port = self._acceptor.port
        """Where this process listens, on IPv4 and IPv6."""
        _process.on_fork(self)

    @staticmethod
    def _listen(host: str, port: int) -> socket.socket:
        try:
            return tcp.listen(host, port)
        except OSError as error:
            where = str(Address(host, port)) if host else f"port {port}"
            raise from_os_error(f"This process could not listen on {where}", error) from error

    def _accept(self, listener: socket.socket) -> Acceptor:
        members = self.members
        return Acceptor(
            listener,
            self._receive,
            members.security,
            lambda channel, where: AdmissionHandshake(members, channel, where),
            members.refused_stranger,
            lambda error, channel, host: members.differs(
                error, None if channel is None else channel.peer, host
            ),
        )

    @property
    def refused(self) -> int:
        """Callers that were sent away at the door."""
        return self._acceptor.refused

    def introduction(self) -> Introduction:
        """What our hellos and answers say of this process; in clear, only which start it is."""
        if self.members.security.is_encrypted:
            return self.members.introduction()
        return Introduction(incarnation=self.process.incarnation)

    # -- control lanes -------------------------------------------------------------------------

    def on_control(self, handler: ControlHandler) -> None:
        """From now on ``handler`` gets the control lanes that others open.

        It runs on the thread that answers the door, and answers with :meth:`answer_control` or with
        :func:`~potluck.net.opening.refuse`, there or later on a thread of its own.
        """
        self._on_control = handler

    def answer_control(self, sock: OpeningSocket, opened: ControlReply) -> None:
        """Open a control lane; raises ``OSError`` if the caller has left meanwhile."""
        sock.settimeout(ANSWER_WITHIN)
        answer(sock, structs.replace(opened, introduction=self.introduction()))

    def dial_control(
        self,
        addresses: Address | Sequence[Address],
        expected: NodeId | None,
        hello: ControlRequest,
        deadline: float,
        look: Callable[[], None] = lambda: None,
    ) -> tuple[OpeningSocket, ControlReply]:
        """Open a control connection to ``expected``, or to any member of the group found there.

        The addresses are tried best first; one that does not answer at once does not hold up the
        next.  ``look`` is called while waiting, and raises when that makes no sense any more.
        Raises a :class:`~potluck.errors.DistributedError` or an ``OSError``.
        """
        self.check_open()
        given = [addresses] if isinstance(addresses, Address) else addresses
        hello = structs.replace(hello, introduction=self.introduction())

        def say(sock: OpeningSocket) -> tuple[OpeningSocket, ControlReply]:
            soon = min(deadline, time.monotonic() + HELLO_WITHIN)
            return sock, say_hello(sock, hello, ControlReply, self.members, soon)

        return open_any(self.members, given, deadline, expected, look, say)

    # -- the lanes of views --------------------------------------------------------------------

    def serve(self, session: bytes, intake: Intake, *, alone: bool = False) -> None:
        """Lanes of this session, those included that wait already, go to ``intake``.

        If it is served ``alone``, those of all others are sent away.
        """
        self.check_open()
        self._lobby.serve(session, intake, alone=alone)

    def withdraw(self, session: bytes) -> None:
        """The session is over: its lanes are sent away."""
        self._lobby.withdraw(session)

    # -- ranks that join a group of fixed ranks ------------------------------------------------

    def on_join(self, handler: JoinHandler) -> None:
        """From now on ``handler`` gets those who want to join by rank."""
        self._on_join = handler

    def _receive(self, sock: OpeningSocket, payload: bytes) -> None:
        hello = unpack(payload, Join | OpenRequest | ControlRequest)  # type: ignore[arg-type]
        if isinstance(hello, OpenRequest):
            self._lobby.receive(sock, hello)
        elif isinstance(hello, ControlRequest) and self._on_control is not None:
            self._on_control(sock, hello)
        elif isinstance(hello, ControlRequest):
            refuse(sock, "this process has only just started", for_now=True)
        elif self._on_join is not None and isinstance(hello, Join):
            self._on_join(sock, hello)
        else:
            raise MalformedFrame("This process is part of a cluster: joining by rank is refused")

    # -- endings -------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raise if nothing can be opened here any more."""
        if self._closed is not None:
            raise self._closed

    def close(self) -> None:
        """Stop listening; what is open stays open.  May be called twice."""
        if self._closed is None:
            self._closed = BackendUnavailable("This process has closed its port")
            self._acceptor.close()
            self._lobby.close()
            self._release()

    def _release(self) -> None:
        if self._claim is not None:
            self._claim.release()

    def become_forked(self) -> None:
        """In a forked child: the descriptors are closed, and nothing here may be used."""
        self._closed = BackendUnavailable(
            f"This port belongs to the parent process (pid {os.getppid()})",
            hint="Join again in the child process if it has to take part.",
        )


def proved_node(sock: OpeningSocket) -> NodeId:
    """The identity that the peer has proved; ``NOBODY`` on an unencrypted connection."""
    return sock.peer if isinstance(sock, SecureSocket) else NOBODY
