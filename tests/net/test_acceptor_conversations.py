"""Between hello and answer: a conversation with a member, which never holds up anybody else."""

from __future__ import annotations

import contextlib
import queue
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from potluck.errors import HandshakeRefused
from potluck.messages import LaneOpened, Sync
from potluck.net import tcp
from potluck.net.acceptor import Acceptor
from potluck.net.frames import Kind, encode
from potluck.net.namespace import NetworkNamespace
from potluck.net.opening import Greeting, Next, Turn, answer, ask, hello_frame, opening_frame
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.security import Security
from potluck.net.tls import TlsChannel
from support.threads import eventually
from support.tls_pair import CALLED, CALLER

LAB = NetworkNamespace("lab", b"l" * 32, home=Path("/nowhere"))
HELLO = hello_frame(Sync())
LONG = 60_000  # bytes of a roster


def roster(size: int = LONG) -> bytes:
    """A frame as long as they come."""
    return encode(Kind.ROSTER, length=size) + bytes(size)


class Hall:
    """Says one thing after another, whatever it hears."""

    def __init__(self, *turns: Turn) -> None:
        self.turns = turns
        self.heard: queue.SimpleQueue[Kind] = queue.SimpleQueue()
        self.granted: list[bytes] = []
        self.acceptor = Acceptor(
            tcp.listen("127.0.0.1", 0), self._receive, Security(LAB, CALLED), self._begin
        )

    def _receive(self, sock: OpeningSocket, payload: bytes) -> None:
        self.granted.append(payload)
        with contextlib.closing(sock):
            answer(sock, LaneOpened(rank=3))

    def _begin(self, channel: TlsChannel, where: str) -> Talk:
        assert channel.peer == CALLER.id
        assert where.startswith("127.0.0.1:")
        return Talk(self)

    def call(self) -> SecureSocket:
        """Come in as far as TLS."""
        sock = socket.create_connection(("127.0.0.1", self.acceptor.port), timeout=30)
        try:
            secure = Security(LAB, CALLER).dial(sock, "hall", time.monotonic() + 30)
        except BaseException:
            sock.close()
            raise
        assert isinstance(secure, SecureSocket)
        return secure


class Talk:
    """With one caller."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._turns = list(hall.turns)

    def receive(self, kind: Kind, payload: bytes) -> Turn:
        """Say what is next."""
        self._hall.heard.put(kind)
        return self._turns.pop(0)


@contextlib.contextmanager
def hall(*turns: Turn) -> Iterator[Hall]:
    """Open for the length of a test."""
    one = Hall(*turns)
    with contextlib.closing(one.acceptor):
        yield one


def listen(sock: OpeningSocket, said: bytes = b"") -> Greeting:
    """The next frame."""
    return ask(sock, time.monotonic() + 30, said)


def test_frames_go_to_and_fro_until_it_is_granted() -> None:
    """The hello is handed on as it was, and answered by whoever serves it."""
    with hall(Turn(Next.LISTEN, roster()), Turn(Next.GRANT)) as one:
        with contextlib.closing(one.call()) as sock:
            greeting = listen(sock, HELLO)
            assert (greeting.kind, len(greeting.payload)) == (Kind.ROSTER, LONG)
            assert listen(sock, roster()).kind is Kind.WELCOME
        assert one.granted == [HELLO[36:]]
        assert [one.heard.get(), one.heard.get()] == [Kind.HELLO, Kind.ROSTER]


def test_who_is_refused_in_the_middle_is_told_why() -> None:
    """The connection ends after the sentence."""
    with hall(Turn(Next.LISTEN, roster()), Turn(Next.REFUSE, sentence="because")) as one:
        with contextlib.closing(one.call()) as sock:
            listen(sock, HELLO)
            with pytest.raises(HandshakeRefused, match="because"):
                listen(sock, roster())
        assert one.granted == []


def test_the_last_word_arrives_before_the_end() -> None:
    """However long it is, and however late it is read."""
    last = b"".join(roster() for _ in range(100))
    with hall(Turn(Next.CLOSE, last)) as one, contextlib.closing(one.call()) as sock:
        sock.sendall(HELLO)
        assert one.heard.get(timeout=30) is Kind.HELLO
        for _ in range(100):
            assert len(listen(sock).payload) == LONG
        with pytest.raises(ConnectionError):
            listen(sock)


def test_who_does_not_read_holds_up_nobody() -> None:
    """What it was told waits for it alone, and it is forgotten when its time is over."""
    flood = Turn(Next.LISTEN, b"".join(roster() for _ in range(200)))
    with hall(flood) as one, contextlib.ExitStack() as lines:
        for _ in range(3):
            deaf = lines.enter_context(contextlib.closing(one.call()))
            deaf.sendall(HELLO)
            assert one.heard.get(timeout=30) is Kind.HELLO
        eventually(lambda: len(one.acceptor._callers) == 3)
        one.turns = (Turn(Next.GRANT),)
        with contextlib.closing(one.call()) as sock:
            assert listen(sock, HELLO).kind is Kind.WELCOME
        eventually(lambda: not one.acceptor._callers)


def test_who_declines_instead_of_saying_hello_is_heard() -> None:
    """The dialler may not accept whom it has reached."""
    with hall(Turn(Next.REFUSE, sentence="as you like")) as one:
        told = pytest.raises(HandshakeRefused, match="as you like")
        with contextlib.closing(one.call()) as sock, told:
            listen(sock, encode(Kind.REFUSAL, length=2) + b"no")
        assert one.heard.get() is Kind.REFUSAL


@pytest.mark.parametrize("kind", [Kind.ROSTER, Kind.WELCOME])
def test_no_conversation_begins_with_anything_else(kind: Kind) -> None:
    """A roster before the hello, an answer without a question."""
    with hall() as one, contextlib.closing(one.call()) as sock:
        with pytest.raises(ConnectionError):
            listen(sock, opening_frame(kind, Sync()))
        assert one.heard.empty()
