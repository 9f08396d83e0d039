"""One port per process: control lanes, the lanes of every view, and whatever comes later.

The hello says what a connection is for.  Whoever gets this far has proved who it is and agrees with
us on who belongs, so a handler judges only whether it may have what it asks for.
"""

from __future__ import annotations

import os
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
from potluck.trust.connect import Reception, open_any, say_hello
from potluck.trust.membership_store import Membership
from potluck.wire_messages import Control, ControlOpened, Introduction, Join, Lane, unpack

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

REMEMBERED = 64
"""Sessions that are known to be over, so that their lanes do not wait in vain."""

Intake: TypeAlias = Callable[[OpeningSocket, Lane], None]
"""Takes the lanes of one session; owns them from then on, and must not block."""


@dataclass(frozen=True, slots=True, eq=False)
class _Guest:
    """A lane that waits."""

    sock: OpeningSocket
    lane: Lane
    origin: str
    deadline: float


class Lobby:
    """Hands lanes to whoever serves their session."""

    def __init__(self) -> None:
        self._intakes: dict[bytes, Intake] = {}
        self._guests: list[_Guest] = []  # in order of arrival, so of deadline
        self._over: deque[bytes] = deque(maxlen=REMEMBERED)
        self._is_closed = False
        self._usher: threading.Thread | None = None
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """How many lanes wait."""
        with self._changed:
            return len(self._guests)

    def serve(self, session: bytes, intake: Intake) -> None:
        """From now on ``intake`` gets the lanes of a session; also those that wait."""
        with self._changed:
            self._intakes[session] = intake
            if session in self._over:
                self._over.remove(session)
            come = self._dismiss(lambda guest: guest.lane.session == session)
        for guest in come:
            _hand_over(guest, intake)

    def withdraw(self, session: bytes) -> None:
        """Nobody serves a session any more, and nobody will."""
        with self._changed:
            if self._intakes.pop(session, None) is not None:
                self._over.append(session)

    def receive(self, sock: OpeningSocket, lane: Lane) -> None:
        """Take a lane in."""
        with self._changed:
            intake = self._intakes.get(lane.session)
            refused = "" if intake is not None else self._seat(sock, lane)
        if intake is not None:
            intake(sock, lane)
        elif refused:
            refuse(sock, refused, for_now=True)

    def _seat(self, sock: OpeningSocket, lane: Lane) -> str:
        """Let a lane wait; or why it cannot."""
        if self._is_closed:
            return "this process is leaving"
        if lane.session in self._over:
            return "this view is over here"
        origin = _origin(sock)
        here = sum(guest.origin == origin for guest in self._guests)
        if here >= SEATS_EACH or len(self._guests) >= SEATS:
            return "too many connections wait here for views that are yet to come"
        self._guests.append(_Guest(sock, lane, origin, time.monotonic() + WAIT))
        if self._usher is None:
            self._usher = threading.Thread(target=self._run, name="potluck-lobby", daemon=True)
            try:
                self._usher.start()
            except RuntimeError:  # the system gives no more threads
                self._usher = None
                self._guests.pop()
                return "this machine has no thread left to answer with"
        return ""

    def _run(self) -> None:
        """Send away whoever has waited in vain, until nobody waits."""
        while True:
            with self._changed:
                if not self._guests:
                    self._usher = None
                    return
                self._changed.wait(max(0.0, self._guests[0].deadline - time.monotonic()))
                late = self._dismiss(lambda guest: guest.deadline <= time.monotonic())
            for guest in late:
                refuse(guest.sock, "the view of this lane is not known here yet", for_now=True)

    def _dismiss(self, chosen: Callable[[_Guest], bool]) -> list[_Guest]:
        """Take guests off the list; only inside the lock."""
        leaving = [guest for guest in self._guests if chosen(guest)]
        self._guests = [guest for guest in self._guests if guest not in leaving]
        if leaving:
            self._changed.notify_all()
        return leaving

    def close(self) -> None:
        """Send everybody away, and seat nobody from now on."""
        with self._changed:
            self._is_closed = True
            self._intakes.clear()
            leaving = self._dismiss(lambda _: True)
            usher = self._usher
        for guest in leaving:
            refuse(guest.sock, "this process is leaving", for_now=True)
        if usher is not None and usher is not threading.current_thread():
            usher.join()


def _hand_over(guest: _Guest, intake: Intake) -> None:
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

ControlHandler: TypeAlias = Callable[[OpeningSocket, Control], None]
"""Owns the connection of a control lane from its hello on; must not block."""

HELLO_WITHIN = 5.0
"""Seconds for a control lane's hello and its answer."""

ANSWER_WITHIN = 1.0
"""Seconds for an answer to leave: it fits into the buffer of a connection that is new."""


class NodePort(Closing):
    """Where a process can be reached, for as long as it is part of a cluster.

    Each one is a process of its own to others (:attr:`process`), also when a program opens one
    after the other: what was said to an earlier one never reaches a later one.  One that
    ``is_shared`` is the process to which this program's groups of fixed ranks belong.
    """

    def __init__(
        self,
        namespace: NetworkNamespace | str | None = None,
        *,
        port: int = 0,
        host: str = "",
        security: Security | None = None,
        is_shared: bool = False,
    ) -> None:
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
        self.members = Membership(security, lambda _: this)
        self._lobby = Lobby()
        self._on_control: ControlHandler | None = None
        self._closed: BackendUnavailable | None = None
        try:
            self.members.check()
            self._acceptor = self._listen(host, port)
        except BaseException:
            self._release()
            raise
        self.port = self._acceptor.port
        """Where this process listens, on IPv4 and IPv6."""
        _process.on_fork(self)

    def _listen(self, host: str, port: int) -> Acceptor:
        members = self.members
        try:
            listener = tcp.listen(host, port)
        except OSError as error:
            where = str(Address(host, port)) if host else f"port {port}"
            raise from_os_error(f"This process could not listen on {where}", error) from error
        return Acceptor(
            listener,
            self._receive,
            members.security,
            lambda channel, where: Reception(members, channel, where),
            members.refused_stranger,
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

    def answer_control(self, sock: OpeningSocket, opened: ControlOpened) -> None:
        """Open a control lane; raises ``OSError`` if the caller has left meanwhile."""
        sock.settimeout(ANSWER_WITHIN)
        answer(sock, structs.replace(opened, introduction=self.introduction()))

    def dial_control(
        self,
        addresses: Address | Sequence[Address],
        expected: NodeId | None,
        hello: Control,
        deadline: float,
        look: Callable[[], None] = lambda: None,
    ) -> tuple[OpeningSocket, ControlOpened]:
        """Open a control lane to ``expected``, or to whoever of the namespace is there.

        The addresses are tried best first; one that does not answer at once does not hold up the
        next.  ``look`` is called while waiting, and raises when that makes no sense any more.
        Raises a :class:`~potluck.errors.DistributedError` or an ``OSError``.
        """
        self.check_open()
        given = [addresses] if isinstance(addresses, Address) else addresses
        hello = structs.replace(hello, introduction=self.introduction())

        def say(sock: OpeningSocket) -> tuple[OpeningSocket, ControlOpened]:
            soon = min(deadline, time.monotonic() + HELLO_WITHIN)
            return sock, say_hello(sock, hello, ControlOpened, self.members, soon)

        return open_any(self.members, given, deadline, expected, look, say)

    # -- the lanes of views --------------------------------------------------------------------

    def serve(self, session: bytes, intake: Intake) -> None:
        """Lanes of this session, those included that wait already, go to ``intake``."""
        self.check_open()
        self._lobby.serve(session, intake)

    def withdraw(self, session: bytes) -> None:
        """The session is over: its lanes are sent away."""
        self._lobby.withdraw(session)

    def _receive(self, sock: OpeningSocket, payload: bytes) -> None:
        hello = unpack(payload, Join | Lane | Control)  # type: ignore[arg-type]
        if isinstance(hello, Lane):
            self._lobby.receive(sock, hello)
        elif isinstance(hello, Control) and self._on_control is not None:
            self._on_control(sock, hello)
        elif isinstance(hello, Control):
            refuse(sock, "this process has only just started", for_now=True)
        else:
            raise MalformedFrame("Nobody joins by rank here: this process is part of a cluster")

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
            hint="Join anew in the child process if it has to take part.",
        )


def proved_node(sock: OpeningSocket) -> NodeId:
    """Who the other side has proved to be; nobody on a connection in clear."""
    return sock.peer if isinstance(sock, SecureSocket) else NOBODY
