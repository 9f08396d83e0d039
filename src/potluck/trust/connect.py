"""Every opening of a connection agrees on who belongs before anything is granted.

::

    dialler                                   who is called
       │  HELLO  what it wants, its roster's hash  │
       │ ────────────────────────────────────────► │  same roster, a member: go on
       │  ROSTER                                   │  otherwise
       │ ◄──────────────────────────────────────── │
       │  ROSTER   (and the secret, if it has a    │
       │ ────────────────────────────────────────► │   newer one and we are a member)
       │  WELCOME, or REFUSAL with a sentence, or ROSTER with the secret we lack

All of it is inside TLS, so both know whom they talk to.  :func:`dial` and :func:`say_hello` are the
dialler's side, :class:`Reception` is the other.  The decisions are in
:mod:`potluck.trust.admission`.
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
from potluck.errors import DistributedError, HandshakeRefused, MalformedFrame
from potluck.logs import get_logger
from potluck.net import tcp
from potluck.net.addresses import Address
from potluck.net.dial import reach
from potluck.net.frames import Kind
from potluck.net.opening import (
    MAX_SENTENCE,
    Next,
    RefusedForNow,
    Turn,
    ask,
    exchange_hello,
    hello_frame,
    opening_frame,
    refuse,
    understand,
)
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.tls import AnotherNamespace, TlsChannel
from potluck.trust.admission import TELL_ME, Exchange, Refused, judge_ourselves, judge_teller
from potluck.trust.membership_store import Membership
from potluck.wire_messages import Hello, LaneOpened, Sync, Told, unpack

logger = get_logger(__name__)

Reply = TypeVar("Reply")

_PAIR = "Pair the two: `potluck pair` on one of them. `potluck members` shows who belongs."


class Declined(HandshakeRefused):
    """Somebody answered whom this machine does not accept."""


class SecretChanged(RefusedForNow):
    """We came with an earlier secret and were given the present one: dial again."""


# -- the dialler -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Call:
    """Whom we call, and how long we try."""

    address: Address
    deadline: float
    """When the connection must be there at the latest."""
    within: float = 5.0
    """Seconds for each handshake: whoever listens there may be somebody else, and say nothing."""
    expected: NodeId | None = None
    """The node that has to answer; None for whoever is there and has the secret."""


def dial(members: Membership, call: Call) -> OpeningSocket:
    """Connect, in TLS.

    Where the other side was away while the secret changed, it is told so under the secret it has,
    and then called again.
    """
    try:
        return _connect(members, call)
    except AnotherNamespace:
        for secret in members.security.namespace.previous:
            if _bring_back(members, call, secret):
                return _connect(members, call)
        raise


def dial_any(
    members: Membership,
    addresses: Sequence[Address],
    deadline: float,
    expected: NodeId | None = None,
    look: Callable[[], None] = lambda: None,
) -> tuple[Address, OpeningSocket]:
    """The same with somebody who has several addresses, best first: whichever is there first."""
    try:
        return reach(members.security, addresses, deadline, expected, look)
    except AnotherNamespace as error:
        for address in addresses:
            if str(address) == error.host:
                return address, dial(members, Call(address, deadline, expected=expected))
        raise


def open_any(
    members: Membership,
    addresses: Sequence[Address],
    deadline: float,
    expected: NodeId | None,
    look: Callable[[], None],
    say: Callable[[OpeningSocket], Reply],
) -> Reply:
    """Dial, and have ``say`` open the connection; where another answers, try the next address.

    The answer of the very node that was called counts, whatever it is.  If it is that the secret
    has changed, we call once more, under the new one.
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


def _connect(members: Membership, call: Call, secret: bytes | None = None) -> OpeningSocket:
    sock = tcp.connect(call.address, call.deadline)
    try:
        soon = min(call.deadline, time.monotonic() + call.within)
        host = str(call.address)
        return members.security.dial(sock, host, soon, call.expected, secret=secret)
    except BaseException:
        sock.close()
        raise


def _bring_back(members: Membership, call: Call, secret: bytes) -> bool:
    """Offer the present secret to whoever is there under an earlier one; whether that is so."""
    try:
        sock = _connect(members, call, secret)
    except AnotherNamespace:
        return False
    with contextlib.closing(sock), contextlib.suppress(SecretChanged):
        soon = min(call.deadline, time.monotonic() + call.within)
        say_hello(sock, Sync(), LaneOpened, members, soon)
    return True


def say_hello(
    sock: OpeningSocket,
    request: Hello,
    reply: type[Reply],
    members: Membership,
    deadline: float,
) -> Reply:
    """Say hello, agree with the other side on who belongs, and wait for its answer."""
    if not isinstance(sock, SecureSocket):
        return exchange_hello(sock, request, reply, deadline)
    peer, tag = sock.peer, sock.tag
    introduction = members.introduction()
    if not members.security.is_current(tag):
        _decline(members, sock, members.judge_peer(peer))  # an earlier secret alone is nobody
        introduction = structs.replace(introduction, roster=TELL_ME)  # it gets ours, and the secret
    hello = structs.replace(request, introduction=introduction)
    greeting = ask(sock, deadline, hello_frame(hello))
    if greeting.kind is Kind.ROSTER:
        taken = members.take(peer, unpack(greeting.payload, Told))
        _decline(members, sock, judge_teller(taken, peer))
        told = opening_frame(Kind.ROSTER, members.tell(peer, tag))
        greeting = ask(sock, deadline, told)  # told even if we cannot follow: it may hold our vote
        _decline(members, sock, judge_ourselves(taken))
        if greeting.kind is Kind.ROSTER:
            members.inherit(unpack(greeting.payload, Told).secret)
            raise SecretChanged("The namespace has a new secret, which this machine has now")
    else:
        _decline(members, sock, members.judge_peer(peer))
    members.met(peer)
    return understand(greeting, reply)


def _decline(members: Membership, sock: SecureSocket, refused: Refused | None) -> None:
    """Tell the other side why we do not go on with it, and raise the same here."""
    if refused is None:
        return
    peer = sock.peer
    who = f"{members.name_of(peer)} ({peer})"
    logger.warning("declined %s: %s", who, refused.sentence)
    refuse(sock, f"this machine declines: {refused.sentence}")
    raise Declined(
        f"{who} answered, and this machine does not accept it",
        node=peer,
        cause=refused.sentence,
        hint=_PAIR,
    )


# -- who is called ---------------------------------------------------------------------------------


class Reception:
    """The conversation with one caller, which has proved who it is; never waits for it."""

    def __init__(self, members: Membership, channel: TlsChannel, where: str) -> None:
        self._members = members
        self._peer = channel.peer
        self._tag = channel.tag
        self._where = where
        self._hello: Hello | None = None

    def receive(self, kind: Kind, payload: bytes) -> Turn:
        """Answer the hello, or the roster that follows it."""
        try:
            if kind is Kind.REFUSAL:
                sentence = payload[:MAX_SENTENCE].decode(errors="replace")
                return self._refuse(Refused(f"it hung up, saying: {printable(sentence)}"))
            if self._hello is None:
                return self._begin(payload)
            return self._go_on(kind, payload)
        except MalformedFrame as error:
            logger.info("%s: %s", self._where, error)
            return Turn(Next.REFUSE, sentence="this hello cannot be understood")
        except DistributedError as error:
            logger.error("%s could not be answered: %s", self._where, error)  # noqa: TRY400
            return Turn(Next.REFUSE, sentence="this machine has a problem; its log says which")

    def _begin(self, payload: bytes) -> Turn:
        hello: Hello = unpack(payload, Hello)  # type: ignore[arg-type]
        self._hello = hello
        decision = self._members.judge_hello(self._peer, hello.introduction, self._tag)
        if isinstance(decision, Refused):
            return self._refuse(decision)
        if isinstance(decision, Exchange):
            # Nothing but the roster: the caller has not shown yet that it can follow.
            told = Told(self._members.tell(self._peer, self._tag).roster)
            return Turn(Next.LISTEN, opening_frame(Kind.ROSTER, told))
        return self._grant()

    def _go_on(self, kind: Kind, payload: bytes) -> Turn:
        if kind is not Kind.ROSTER:
            raise MalformedFrame(f"A {kind.name} frame tells no roster")
        taken = self._members.take(self._peer, unpack(payload, Told))
        if refused := judge_teller(taken, self._peer) or judge_ourselves(taken):
            return self._refuse(refused)
        if not self._members.security.is_current(self._tag):
            told = self._members.bequeath(self._peer, self._tag)
            if told is None:
                return self._refuse(
                    Refused("the secret has changed, and this machine does not have it yet either")
                )
            return Turn(Next.CLOSE, opening_frame(Kind.ROSTER, told))
        return self._grant()

    def _grant(self) -> Turn:
        self._members.met(self._peer)
        if isinstance(self._hello, Sync):
            opened = LaneOpened(rank=0, clock=time.time())
            return Turn(Next.CLOSE, opening_frame(Kind.WELCOME, opened))
        return Turn(Next.GRANT)

    def _refuse(self, refused: Refused) -> Turn:
        who = f"{self._members.name_of(self._peer)} ({self._peer}) at {self._where}"
        logger.warning("refused %s: %s", who, refused.sentence)
        self._members.last_refusal = f"{who} was turned away: {refused.sentence}"
        return Turn(Next.REFUSE, sentence=refused.sentence)
