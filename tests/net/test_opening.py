"""Opening a connection: a hello, and an answer that opens it, refuses it or is nonsense."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.errors import HandshakeRefused, MalformedFrame, PeerLost, Timeout
from potluck.messages import Lane, LaneOpened, pack, unpack
from potluck.net.frames import HEADER_SIZE, MAX_CONTROL, Kind, encode
from potluck.net.opening import (
    Greeting,
    answer,
    await_answer,
    hello_frame,
)
from support.doors import socket_pair
from support.hellos import HELLO, ask, drop, frame
from support.threads import Background

OPENING = [Kind.HELLO, Kind.WELCOME, Kind.REFUSAL, Kind.ROSTER]


WELCOME = frame(Kind.WELCOME, pack(LaneOpened(0)))


# -- collecting the first frame --------------------------------------------------------------------


@given(st.sampled_from(OPENING), st.binary(max_size=200), st.lists(st.integers(1, 60)))
def test_a_greeting_takes_one_frame_and_not_a_byte_more(
    kind: Kind, payload: bytes, sizes: list[int]
) -> None:
    """However the bytes come, it always says how many it still wants, and never reads ahead."""
    greeting, data, place = Greeting(), frame(kind, payload), 0
    for size in [*sizes, *[60] * 10]:
        wanted = greeting.wanted
        if not wanted:
            break
        assert place + wanted <= len(data)
        chunk = data[place : place + min(size, wanted)]
        place += len(chunk)
        assert greeting.receive(chunk) is (place == len(data))
    assert place == len(data)
    assert (greeting.kind, greeting.payload, greeting.wanted) == (kind, payload, 0)


@given(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE))
@example(encode(Kind.HELLO, length=MAX_CONTROL + 1))
@example(encode(Kind.DATA, length=1 << 20))
def test_any_header_is_refused_or_promises_little(data: bytes) -> None:
    """A stranger makes us keep 64 KiB at most, whatever it announces."""
    greeting = Greeting()
    try:
        greeting.receive(data)
    except MalformedFrame:
        return
    assert greeting.kind in OPENING
    assert greeting.wanted <= MAX_CONTROL


@pytest.mark.parametrize("kind", [kind for kind in Kind if kind not in OPENING])
def test_no_other_frame_opens_a_connection(kind: Kind) -> None:
    """It is refused at its header, before its payload is awaited."""
    with pytest.raises(MalformedFrame, match=kind.name):
        Greeting().receive(encode(kind))


# -- asking ----------------------------------------------------------------------------------------


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    """The dialler's socket and the one it reached."""
    left, right = socket_pair()
    right.settimeout(30)
    with left, right:
        yield left, right


def test_a_hello_is_answered(ends: tuple[socket.socket, socket.socket]) -> None:
    """The other side gets our message, we get its answer, and what follows stays in the socket."""
    dialler, dialled = ends
    asking = Background(lambda: ask(dialler))
    expected = hello_frame(HELLO)
    got = dialled.recv(len(expected), socket.MSG_WAITALL)
    assert got == expected
    assert unpack(got[HEADER_SIZE:], Lane) == HELLO
    answer(dialled, LaneOpened(0))
    dialled.sendall(b"the first frame of the connection")
    assert asking.result() == LaneOpened(0)
    assert dialler.recv(100) == b"the first frame of the connection"


def test_a_second_answer_can_be_awaited(ends: tuple[socket.socket, socket.socket]) -> None:
    """Without another hello."""
    dialler, dialled = ends
    answer(dialled, LaneOpened(0))
    answer(dialled, LaneOpened(1))
    assert ask(dialler) == LaneOpened(0)
    assert await_answer(dialler, LaneOpened, time.monotonic() + 30) == LaneOpened(1)


def test_a_slow_answer_is_an_answer(ends: tuple[socket.socket, socket.socket]) -> None:
    """Byte by byte, as a bad link may bring it."""
    dialler, dialled = ends
    dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    asking = Background(lambda: ask(dialler))
    for byte in WELCOME:
        dialled.sendall(bytes([byte]))
    assert asking.result() == LaneOpened(0)


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" + bytes(20), "no Potluck frame"),
        (frame(Kind.HELLO, pack(HELLO)), "A HELLO frame is no answer"),
        (frame(Kind.TOKEN), "TOKEN"),
        (frame(Kind.WELCOME, b"\xc1"), "cannot be understood"),
        (frame(Kind.WELCOME, pack(HELLO)), "cannot be understood"),
        (encode(Kind.WELCOME, length=MAX_CONTROL + 1), "over the limit"),
    ],
)
def test_nonsense_is_not_taken_for_an_answer(
    ends: tuple[socket.socket, socket.socket], reply: bytes, words: str
) -> None:
    """It is noticed at once, also when more is announced than will ever come."""
    dialler, dialled = ends
    dialled.sendall(reply)
    with pytest.raises(MalformedFrame, match=words):
        ask(dialler)


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_is_a_refusal(
    ends: tuple[socket.socket, socket.socket], version: int
) -> None:
    """Its kinds mean nothing here, so the sentence is ours."""
    dialler, dialled = ends
    dialled.sendall(frame(Kind.REFUSAL, b"whatever", version=version))
    with pytest.raises(HandshakeRefused, match=f"version {version}, this side 1.*same version"):
        ask(dialler)


@pytest.mark.parametrize("ending", [socket.socket.close, drop])
@pytest.mark.parametrize("before", [b"", WELCOME[:-1]])
def test_hanging_up_is_not_an_answer(
    ends: tuple[socket.socket, socket.socket],
    ending: Callable[[socket.socket], None],
    before: bytes,
) -> None:
    """Whether politely or not, before or in the middle of the answer."""
    dialler, dialled = ends
    dialled.sendall(before)
    ending(dialled)
    with pytest.raises(PeerLost, match="hung up instead of answering"):
        ask(dialler)


@pytest.mark.parametrize("before", [b"", WELCOME[:-1]])
@pytest.mark.parametrize("seconds", [0.05, -1.0])
def test_silence_ends_at_the_deadline(
    ends: tuple[socket.socket, socket.socket], before: bytes, seconds: float
) -> None:
    """Also after half an answer, and when the deadline is over already."""
    dialler, dialled = ends
    dialled.sendall(before)
    begin = time.monotonic()
    with pytest.raises(Timeout, match="did not answer in time"):
        ask(dialler, seconds)
    assert time.monotonic() - begin < 10


def test_an_answer_that_never_ends_ends_at_the_deadline(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """A byte now and then does not extend the time."""
    drips = iter(encode(Kind.WELCOME, length=MAX_CONTROL) + bytes(MAX_CONTROL))

    class Dripping(socket.socket):
        def recv(self, *_: int) -> bytes:
            return bytes([next(drips)])

    with Dripping(fileno=ends[0].detach()) as dialler, pytest.raises(Timeout):
        ask(dialler, 0.01)
    assert next(drips) == 0, "it should have given up long before"
