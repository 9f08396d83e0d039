"""One port per process: control lanes, the lanes of every view, and whatever comes later.

The hello says what a connection is for.  Whoever gets this far has proved who it is and agrees with
us on who belongs, so a handler judges only whether it may have what it asks for.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from msgspec import structs

from potluck.backend.introduction import Reception, open_any, say_hello
from potluck.backend.membership import Membership
from potluck.backend.port_lobby import Intake, Lobby
from potluck.closing import Closing
from potluck.errors import BackendUnavailable, MalformedFrame, from_os_error
from potluck.messages import Control, ControlOpened, Introduction, Join, Lane, unpack
from potluck.net import descriptors, tcp
from potluck.net.acceptor import Acceptor
from potluck.net.addresses import Address
from potluck.net.incarnation import Incarnation, claim_process, this_process
from potluck.net.opening import answer, refuse
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.security import NOBODY, Security
from potluck.vocabulary import NodeId, ProcessId

if TYPE_CHECKING:
    from potluck.net.namespace import NetworkNamespace

__all__ = ["ControlHandler", "NodePort", "proved_node"]

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
        descriptors.on_fork(self)

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
