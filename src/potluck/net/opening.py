"""Opening a connection: a hello, and the answer that opens it or does not.

The dialler speaks first and counts the connection as open only after the answer.  Until then a
stranger gets a bounded number of bytes, seconds and places, and never holds up anybody else.
Members may have to agree on who belongs before the answer: a :class:`HandshakeProtocol`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Protocol, TypeVar

import msgspec

from potluck._decode import printable
from potluck._version import THIS_BUILD, Build, VersionMismatch
from potluck.errors import (
    DistributedError,
    HandshakeRefused,
    MalformedFrame,
    Timeout,
    from_os_error,
)
from potluck.identity.node import machine_name
from potluck.logs import get_logger
from potluck.net.addresses import unmapped
from potluck.net.frames import (
    HEADER_SIZE,
    OPENING,
    FrameType,
    Header,
    build_of,
    decode,
    encode_opening,
)
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.wire_messages import pack, unpack

logger = get_logger(__name__)

Reply = TypeVar("Reply")

MAX_SENTENCE = 2000
"""Characters of a refusal that are sent, and that are shown."""


class HandshakeAction(Enum):
    """What becomes of a caller."""

    LISTEN = auto()  # it has more to say
    GRANT = auto()  # whoever serves its purpose takes over
    REFUSE = auto()  # it is told why, and hung up on
    CLOSE = auto()  # all is said


@dataclass(frozen=True, slots=True)
class HandshakeStep:
    """Our part of a conversation: what is said, and what is next."""

    next: HandshakeAction
    say: bytes = b""
    """Frames, sent before anything else."""
    sentence: str = ""
    """Why it is refused."""


class HandshakeProtocol(Protocol):
    """What is said with one caller that has proved who it is, before anything is granted."""

    def receive(self, kind: FrameType, payload: bytes) -> HandshakeStep:
        """Answer a frame; the first one is the hello.  Must not wait for the caller."""


class Greeting:
    """Collects the first frame of a connection, and not a byte more."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._header: Header | None = None

    @property
    def wanted(self) -> int:
        """How many bytes to read next; 0 when the frame is complete."""
        if self._header is None:
            return HEADER_SIZE - len(self._data)
        return HEADER_SIZE + self._header.length - len(self._data)

    def receive(self, data: bytes) -> bool:
        """Take bytes in; True when the frame is complete.  Raises ``MalformedFrame``."""
        self._data += data
        if self._header is None and len(self._data) >= HEADER_SIZE:
            self._header = decode(self._data, 0, max_eager=0)
            if self._header.kind not in OPENING:  # its payload may be larger than a stranger's
                raise MalformedFrame(f"A {self._header.kind.name} frame opens no connection")
        return self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether the whole frame is here."""
        return self._header is not None and self.wanted == 0

    @property
    def kind(self) -> FrameType:
        """What arrived."""
        assert self._header is not None
        return self._header.kind

    @property
    def build(self) -> Build:
        """What the sender runs."""
        assert self._header is not None
        return build_of(self._header)

    def check_version(self, sender: str) -> None:
        """Raise :class:`VersionMismatch` if no protocol version is common to us and the sender."""
        if THIS_BUILD.agreed(self.build) is None:
            raise VersionMismatch(machine_name(), THIS_BUILD, sender, self.build)

    @property
    def is_for_now(self) -> bool:
        """Whether a refusal may be followed by another answer in a moment."""
        return self._header is not None and self._header.piece == 1

    @property
    def payload(self) -> bytes:
        """What came with it."""
        return bytes(self._data[HEADER_SIZE:])


def _frame(kind: FrameType, payload: bytes, piece: int = 0) -> bytes:
    return encode_opening(kind, piece=piece, length=len(payload)) + payload


def opening_frame(kind: FrameType, message: msgspec.Struct) -> bytes:
    """A frame of an opening, with a message in it."""
    return _frame(kind, pack(message))


def hello_frame(message: msgspec.Struct) -> bytes:
    """The first frame of a connection."""
    return opening_frame(FrameType.HELLO, message)


def answer(sock: OpeningSocket, message: msgspec.Struct) -> None:
    """Open a connection.  The answer always fits into an empty send buffer."""
    sock.sendall(_frame(FrameType.WELCOME, pack(message)))


class RefusedByPeer(HandshakeRefused):
    """The other side has answered no; ``cause`` is its sentence."""


class RefusedForNow(RefusedByPeer):
    """Refused, but it may be worth asking again in a moment."""

    recoverable = True


def refuse(sock: OpeningSocket, sentence: str, *, for_now: bool = False, reason: str = "") -> None:
    """Tell why not, and close without waiting; a ``reason`` that is not told is logged instead."""
    log_refusal(_who(sock), reason or sentence)
    with contextlib.suppress(OSError):
        sock.setblocking(False)
        text = sentence[:MAX_SENTENCE].encode(errors="replace")
        sock.sendall(_frame(FrameType.REFUSAL, text, piece=int(for_now)))
    hang_up(sock)


def log_refusal(who: str, reason: str) -> None:
    """Write down whom we sent away and why, in one line whatever was said to us."""
    logger.info("refused %s: %s", who, printable(reason[:MAX_SENTENCE]))


def host_of(sock: OpeningSocket) -> str:
    """Where the other side of a connection is, for people."""
    try:
        return unmapped(str(sock.getpeername()[0]))
    except OSError:
        return "the other side"


def _who(sock: OpeningSocket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        where = "a caller who has left"
    else:
        where = f"{unmapped(host)}:{port}"
    if isinstance(sock, SecureSocket):
        with contextlib.suppress(DistributedError):  # the channel may have failed since
            return f"{where} (node {sock.peer})"
    return where


def hang_up(sock: OpeningSocket) -> None:
    """Close after what was written, without waiting.

    Unread bytes would turn the close into a reset, which can overtake the last words.
    """
    with contextlib.suppress(OSError, DistributedError):
        sock.setblocking(False)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass
    sock.close()


def exchange_hello(
    sock: OpeningSocket, hello: msgspec.Struct, reply: type[Reply], deadline: float
) -> Reply:
    """Say hello and wait for the answer."""
    return await_answer(sock, reply, deadline, hello_frame(hello))


def await_answer(
    sock: OpeningSocket, reply: type[Reply], deadline: float, first: bytes = b""
) -> Reply:
    """Wait for the answer, or for another one, after saying ``first``."""
    return understand(ask(sock, deadline, first), reply)


def ask(sock: OpeningSocket, deadline: float, first: bytes = b"") -> Greeting:
    """The next frame from the other side, after saying ``first``; a refusal is raised."""
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        sock.sendall(first)
        greeting = _read_frame(sock, deadline)
    except TimeoutError:
        raise Timeout("The other side did not answer in time", seconds=0) from None
    except ConnectionError as error:
        raise from_os_error("The other side hung up instead of answering", error) from error
    greeting.check_version(host_of(sock))
    if greeting.kind == FrameType.REFUSAL:
        sentence = greeting.payload.decode(errors="replace")[:MAX_SENTENCE]
        refused = RefusedForNow if greeting.is_for_now else RefusedByPeer
        raise refused("The other side refused", cause=printable(sentence))
    return greeting


def understand(greeting: Greeting, reply: type[Reply]) -> Reply:
    """The answer in a frame that opens a connection."""
    if greeting.kind != FrameType.WELCOME:
        raise MalformedFrame(f"A {greeting.kind.name} frame is not an answer to a hello")
    return unpack(greeting.payload, reply)


def _read_frame(sock: OpeningSocket, deadline: float) -> Greeting:
    greeting = Greeting()
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError  # also for a side that sends a byte now and then
        sock.settimeout(remaining)
        data = sock.recv(greeting.wanted)
        if not data:
            raise ConnectionResetError(104, "the connection ended")
        if greeting.receive(data):
            return greeting
