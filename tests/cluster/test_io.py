"""The I/O thread over real TLS: order, bounds, ends, and nobody held up by anybody."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from potluck.cluster.io import MAX_OUTBOX, MAX_UNREAD, ControlConnection, ControlFrame, IoThread
from potluck.net.frames import MAX_CONTROL, FrameType, encode
from potluck.net.secure_socket import OpeningSocket
from support.control_connections import bare_sockets, secure_sockets
from support.threads import Background, eventually


class Ears:
    """Keeps what it hears; looks at messages only if told to."""

    def __init__(self) -> None:
        self.heard: list[tuple[ControlConnection, ControlFrame]] = []
        self.over: list[tuple[ControlConnection, str]] = []
        self.reason: str | None = None

    def arrived(self, connection: ControlConnection, frame: ControlFrame) -> None:
        """Keep it."""
        self.heard.append((connection, frame))

    def ended(self, connection: ControlConnection, cause: str) -> None:
        """Keep it."""
        self.over.append((connection, cause))

    def silenced(self, reason: str) -> None:
        """Keep it."""
        self.reason = reason


@pytest.fixture
def ears() -> Ears:
    """Of the node under test."""
    return Ears()


@pytest.fixture
def io(ears: Ears) -> Iterator[IoThread]:
    """The thread under test."""
    thread = IoThread(ears.arrived, ears.ended, ears.silenced)
    yield thread
    thread.close(0.2)


def frame(payload: bytes, tag: int = 0) -> bytes:
    """A control message as it travels."""
    return encode(FrameType.CONTROL, tag=tag, length=len(payload)) + payload


def pair(kind: str) -> tuple[OpeningSocket, OpeningSocket]:
    """Two ends of a connection, in TLS or in clear."""
    return secure_sockets() if kind == "tls" else bare_sockets()


@pytest.mark.parametrize("kind", ["tls", "clear"])
def test_messages_arrive_in_order_and_whole(io: IoThread, ears: Ears, kind: str) -> None:
    """Small ones and the largest, both ways, each with its tag."""
    others = Ears()
    there = IoThread(others.arrived, others.ended, others.silenced)
    left, right = (
        ControlConnection(end, name)
        for end, name in zip(pair(kind), ("left", "right"), strict=True)
    )
    io.add(left)
    there.add(right)
    sizes = [0, 1, MAX_CONTROL, 7, 30_000]
    for number, size in enumerate(sizes):
        assert io.send(left, bytes([number]) * size, tag=number)
        assert there.send(right, bytes([number]) * size, tag=number)
    for heard, connection in ((ears.heard, left), (others.heard, right)):
        eventually(lambda heard=heard: len(heard) == len(sizes))  # type: ignore[misc]
        assert [(each, message.tag, len(message.payload)) for each, message in heard] == [
            (connection, number, size) for number, size in enumerate(sizes)
        ]
    there.close()
    eventually(lambda: len(ears.over) == 1)


def test_an_end_is_told_at_once_with_its_cause(io: IoThread, ears: Ears) -> None:
    """A peer whose kernel closes its sockets has died; one that ends TLS has closed."""
    left, right = secure_sockets()
    io.add(ControlConnection(left, "peer"))
    right.close()
    eventually(lambda: len(ears.over) == 1)
    assert "crashed or was killed" in ears.over[0][1]
    left, right = secure_sockets()
    mute = Ears()
    others = IoThread(mute.arrived, mute.ended, mute.silenced)
    io.add(ControlConnection(left, "peer"))
    others.add(ControlConnection(right, "me"))
    others.close()
    eventually(lambda: len(ears.over) == 2)
    assert ears.over[1][1] == "it closed the connection"


def test_a_stopped_peer_fills_its_own_outbox_alone(io: IoThread, ears: Ears) -> None:
    """What does not fit is dropped and counted; another connection moves meanwhile."""
    stopped, unread = secure_sockets()
    going, echo = secure_sockets()
    first, second = ControlConnection(stopped, "stopped"), ControlConnection(going, "going")
    io.add(first)
    io.add(second)
    while io.send(first, bytes(MAX_CONTROL)):
        pass
    assert first.dropped == 1
    io.send(second, b"are you there")
    echo.settimeout(10)
    assert echo.recv(1000).endswith(b"are you there")
    echo.sendall(frame(b"yes"))
    eventually(lambda: [message.payload for _, message in ears.heard] == [b"yes"])
    assert first._queued_bytes <= MAX_OUTBOX
    for end in (unread, echo):
        end.close()


def test_who_sends_faster_than_anybody_looks_is_not_read(io: IoThread, ears: Ears) -> None:
    """Memory stays bounded, and reading goes on as soon as somebody has looked."""
    left, right = secure_sockets()
    connection = ControlConnection(left, "talker")
    io.add(connection)
    total = 4 * MAX_UNREAD + 3
    sender = Background(lambda: right.sendall(frame(b"x" * 500) * total))
    eventually(lambda: connection.is_deaf)
    assert len(ears.heard) < 2 * MAX_UNREAD
    seen = 0
    while seen < total:
        eventually(lambda: len(ears.heard) > seen)  # noqa: B023 - called at once
        io.looked_at(connection)
        seen += 1
    sender.result()
    assert len(ears.heard) == total
    right.close()


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 3,
        encode(FrameType.CONTROL, length=MAX_CONTROL)[:-4] + b"\xff" * 4,
        encode(FrameType.DATA, length=10),
    ],
    ids=["another protocol", "too long", "another connection's frame"],
)
def test_a_member_that_sends_nonsense_loses_its_connection(
    io: IoThread, ears: Ears, data: bytes
) -> None:
    """And nothing was allocated for it; nobody else's connection is touched."""
    left, right = secure_sockets()
    other, _ = ends = secure_sockets()
    io.add(ControlConnection(left, "odd"))
    io.add(ControlConnection(other, "fine"))
    right.sendall(data)
    eventually(lambda: len(ears.over) == 1)
    assert "invalid message" in ears.over[0][1]
    ends[1].sendall(frame(b"still here"))
    eventually(lambda: len(ears.heard) == 1)
    right.close()
    ends[1].close()


def test_dropping_a_connection_sends_what_was_queued_first(io: IoThread, ears: Ears) -> None:
    """A goodbye arrives, and we are not told that the connection we closed has ended."""
    left, right = secure_sockets()
    connection = ControlConnection(left, "friend")
    io.add(connection)
    io.send(connection, b"goodbye")
    io.drop(connection)
    right.settimeout(10)
    assert right.recv(1000).endswith(b"goodbye")
    assert right.recv(1000) == b""
    eventually(lambda: connection.is_over)
    assert not io.send(connection, b"too late")
    assert ears.over == []
    right.close()


def test_a_retired_connection_stays_open_while_the_other_side_uses_it(
    io: IoThread, ears: Ears
) -> None:
    """Two sides that choose differently between two connections must not cut each other off."""
    others = Ears()
    there = IoThread(others.arrived, others.ended, others.silenced)
    left, right = (ControlConnection(end, "connection") for end in secure_sockets())
    io.add(left)
    there.add(right)
    io.retire(left, after=0.3)
    until = time.monotonic() + 1.0
    sent = 0
    while time.monotonic() < until:
        assert there.send(right, b"beat", tag=0)
        sent += 1
        eventually(lambda: len(ears.heard) == sent)  # noqa: B023
        time.sleep(0.02)  # the rhythm of the other side
    assert not others.over
    eventually(lambda: len(others.over) == 1)  # it has fallen silent on this connection
    there.close()


def test_a_fault_in_the_thread_is_told(
    io: IoThread, ears: Ears, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever listens must know that nothing will come any more."""

    def burst() -> None:
        raise ZeroDivisionError

    caught: list[threading.ExceptHookArgs] = []
    before, threading.excepthook = threading.excepthook, caught.append
    try:
        io._ask(burst)
        eventually(lambda: ears.reason is not None)
        io.close()
    finally:
        threading.excepthook = before
    assert "ZeroDivisionError" in str(ears.reason)
    assert "The I/O thread failed" in caplog.text
