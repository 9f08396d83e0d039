"""Both sides of every new connection agree on who belongs before anything is granted.

::

    dialler                                   listener
       │  HELLO  what it wants, its roster's hash  │
       │ ────────────────────────────────────────► │  same roster, a member: WELCOME
       │  ROSTER                                   │  otherwise
       │ ◄──────────────────────────────────────── │
       │  ROSTER   (and the secret, if it has a    │
       │ ────────────────────────────────────────► │   newer one and we are a member)
       │  WELCOME, or REFUSAL with a sentence, or ROSTER with the secret we lack

All of it is inside TLS, so each side knows the other's node id.  :func:`dial` and
:func:`say_hello` are the dialler's side, :class:`AdmissionHandshake` is the listener's.  The
decisions are in :mod:`potluck.trust.admission`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec import structs

from potluck._decode import printable
from potluck._types import NodeId
from potluck._version import VersionMismatch
from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame
from potluck.logs import get_logger
from potluck.net import tcp
from potluck.net.addresses import Address
from potluck.net.dial import reach
from potluck.net.frames import FrameType
from potluck.net.opening import (
    MAX_SENTENCE,
    HandshakeAction,
    HandshakeStep,
    RefusedForNow,
    ask,
    exchange_hello,
    hello_frame,
    host_of,
    opening_frame,
    refuse,
    understand,
)
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.tls import AnotherNamespace, TlsChannel
from potluck.trust.admission import (
    NO_ROSTER,
    AdmissionRefused,
    RosterExchange,
    judge_ourselves,
    judge_sender,
)
from potluck.trust.membership_store import TrustStore
from potluck.wire_messages import Hello, OpenReply, Sync, Told, unpack

logger = get_logger(__name__)

Reply = TypeVar("Reply")

_PAIR = "Pair the two: `potluck pair` on one of them. `potluck members` shows who belongs."


class Declined(HandshakeRefused):
    """A node answered that this machine does not accept."""


class SecretChanged(RefusedForNow):
    """We used an earlier secret and were given the present one: dial again."""


# -- the dialler -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutgoingCall:
    """Where to dial, and how long to try."""

    address: Address
    deadline: float
    """When the connection must be open at the latest."""
    within: float = 5.0
    """Seconds for each handshake: another program may listen there and never answer."""
    expected: NodeId | None = None
    """The node that has to answer; None for any node with the secret."""


def dial(members: TrustStore, call: OutgoingCall) -> OpeningSocket:
    """Connect, in TLS.

    If the other side was away while the secret changed, it is given the present secret over a
    connection under the earlier one, and then dialled again.
    """
    try:
        return _connect(members, call)
    except AnotherNamespace:
        for secret in members.security.namespace.previous:
            if _bring_back(members, call, secret):
                return _connect(members, call)
        raise


def dial_any(
    members: TrustStore,
    addresses: Sequence[Address],
    deadline: float,
    expected: NodeId | None = None,
    look: Callable[[], None] = lambda: None,
) -> tuple[Address, OpeningSocket]:
    """The same for a node with several addresses, best first: the first that answers."""
    try:
        return reach(members.security, addresses, deadline, expected, look)
    except AnotherNamespace as error:
        for address in addresses:
            if str(address) == error.host:
                return address, dial(members, OutgoingCall(address, deadline, expected=expected))
        raise


def open_any(
    members: TrustStore,
    addresses: Sequence[Address],
    deadline: float,
    expected: NodeId | None,
    look: Callable[[], None],
    say: Callable[[OpeningSocket], Reply],
) -> Reply:
    """Dial, and have ``say`` open the connection; if another node answers, try the next address.

    An answer of the expected node is final.  If it says that the secret has changed, we dial once
    more, under the new one.
    """
    untried, is_renewed = list(addresses), False
    while True:
        address, sock = dial_any(members, untried, deadline, expected, look)
        try:
            return say(sock)
        except (OSError, MalformedFrame) as error:
            sock.close()
            if isinstance(error, SecretChanged) and not is_renewed:
                is_renewed = True
                continue
            untried.remove(address)
            is_last = not untried or (expected and isinstance(sock, SecureSocket))
            if is_last or isinstance(error, Declined):
                raise
        except BaseException:
            sock.close()
            raise


def _connect(members: TrustStore, call: OutgoingCall, secret: bytes | None = None) -> OpeningSocket:
    sock = tcp.connect(call.address, call.deadline)
    try:
        soon = min(call.deadline, time.monotonic() + call.within)
        host = str(call.address)
        return members.security.dial(sock, host, soon, call.expected, secret=secret)
    except BaseException:
        sock.close()
        raise


def _bring_back(members: TrustStore, call: OutgoingCall, secret: bytes) -> bool:
    """Offer the present secret to a node that has only an earlier one; whether it answered."""
    try:
        sock = _connect(members, call, secret)
    except AnotherNamespace:
        return False
    with contextlib.closing(sock), contextlib.suppress(SecretChanged):
        soon = min(call.deadline, time.monotonic() + call.within)
        say_hello(sock, Sync(), OpenReply, members, soon)
    return True


def say_hello(
    sock: OpeningSocket,
    request: Hello,
    reply: type[Reply],
    members: TrustStore,
    deadline: float,
) -> Reply:
    """Send a hello, agree with the other side on who belongs, and wait for its answer."""
    peer = sock.peer if isinstance(sock, SecureSocket) else None
    try:
        return _say_hello(sock, request, reply, members, deadline)
    except VersionMismatch as error:
        raise members.differs(error, peer, host_of(sock)) from None


def _say_hello(
    sock: OpeningSocket,
    request: Hello,
    reply: type[Reply],
    members: TrustStore,
    deadline: float,
) -> Reply:
    if not isinstance(sock, SecureSocket):
        return exchange_hello(sock, request, reply, deadline)
    peer, tag = sock.peer, sock.tag
    introduction = members.introduction()
    if not members.security.is_current(tag):
        _decline(members, sock, members.judge_peer(peer))  # an earlier secret alone opens nothing
        introduction = structs.replace(
            introduction, roster=NO_ROSTER
        )  # it gets ours, and the secret
    hello = structs.replace(request, introduction=introduction)
    greeting = ask(sock, deadline, hello_frame(hello))
    if greeting.kind is FrameType.ROSTER:
        taken = members.take(peer, unpack(greeting.payload, Told))
        _decline(members, sock, judge_sender(taken, peer))
        told = opening_frame(FrameType.ROSTER, members.tell(peer, tag))
        greeting = ask(sock, deadline, told)  # told even if we cannot follow: it may hold our vote
        _decline(members, sock, judge_ourselves(taken))
        if greeting.kind is FrameType.ROSTER:
            members.store_secret(unpack(greeting.payload, Told).secret)
            raise SecretChanged("The group has a new secret, and this machine has just received it")
    else:
        _decline(members, sock, members.judge_peer(peer))
    members.met(peer)
    return understand(greeting, reply)


def _decline(members: TrustStore, sock: SecureSocket, refused: AdmissionRefused | None) -> None:
    """Tell the other side why we decline it, and raise the same here."""
    if refused is None:
        return
    peer = sock.peer
    who = f"{members.name_of(peer)} ({peer})"
    logger.warning("declined %s: %s", who, refused.sentence)
    refuse(sock, f"this machine declines: {refused.sentence}")
    raise Declined(
        f"{who} answered, but this machine does not accept it",
        node=peer,
        cause=refused.sentence,
        hint=_PAIR,
    )


# -- the listener ----------------------------------------------------------------------------------


class AdmissionHandshake:
    """The handshake with one caller, which has proved who it is; never waits for it."""

    def __init__(self, members: TrustStore, channel: TlsChannel, where: str) -> None:
        self._members = members
        self._peer = channel.peer
        self._tag = channel.tag
        self._where = where
        self._hello: Hello | None = None

    def receive(self, kind: FrameType, payload: bytes) -> HandshakeStep:
        """Answer the hello, or the roster that follows it."""
        try:
            if kind is FrameType.REFUSAL:
                sentence = payload[:MAX_SENTENCE].decode(errors="replace")
                return self._refuse(
                    AdmissionRefused(f"it closed the connection: {printable(sentence)}")
                )
            if self._hello is None:
                return self._begin(payload)
            return self._continue(kind, payload)
        except MalformedFrame as error:
            logger.info("%s: %s", self._where, error)
            return HandshakeStep(HandshakeAction.REFUSE, sentence="this hello cannot be understood")
        except DistributedError as error:
            logger.error("%s could not be answered: %s", self._where, error)  # noqa: TRY400
            return HandshakeStep(
                HandshakeAction.REFUSE, sentence="this machine has a problem; see its log"
            )

    def _begin(self, payload: bytes) -> HandshakeStep:
        hello: Hello = unpack(payload, Hello)  # type: ignore[arg-type]
        self._hello = hello
        decision = self._members.judge_hello(self._peer, hello.introduction, self._tag)
        if isinstance(decision, AdmissionRefused):
            return self._refuse(decision)
        if isinstance(decision, RosterExchange):
            # Nothing but the roster: the caller has not shown yet that it can follow.
            told = Told(self._members.tell(self._peer, self._tag).roster)
            return HandshakeStep(HandshakeAction.LISTEN, opening_frame(FrameType.ROSTER, told))
        return self._grant()

    def _continue(self, kind: FrameType, payload: bytes) -> HandshakeStep:
        if kind is not FrameType.ROSTER:
            raise MalformedFrame(f"Expected a ROSTER frame, got {kind.name}")
        taken = self._members.take(self._peer, unpack(payload, Told))
        if refused := judge_sender(taken, self._peer) or judge_ourselves(taken):
            return self._refuse(refused)
        if not self._members.security.is_current(self._tag):
            told = self._members.secret_for(self._peer, self._tag)
            if told is None:
                return self._refuse(
                    AdmissionRefused(
                        "the secret has changed, and this machine does not have it yet either"
                    )
                )
            return HandshakeStep(HandshakeAction.CLOSE, opening_frame(FrameType.ROSTER, told))
        return self._grant()

    def _grant(self) -> HandshakeStep:
        self._members.met(self._peer)
        if isinstance(self._hello, Sync):
            opened = OpenReply(rank=0, clock=time.time())
            return HandshakeStep(HandshakeAction.CLOSE, opening_frame(FrameType.WELCOME, opened))
        return HandshakeStep(HandshakeAction.GRANT)

    def _refuse(self, refused: AdmissionRefused) -> HandshakeStep:
        who = f"{self._members.name_of(self._peer)} ({self._peer}) at {self._where}"
        logger.warning("refused %s: %s", who, refused.sentence)
        self._members.last_refusal = f"{who} was turned away: {refused.sentence}"
        return HandshakeStep(HandshakeAction.REFUSE, sentence=refused.sentence)
