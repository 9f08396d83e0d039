"""Opening a connection: a hello, and an answer that opens it, refuses it or is nonsense."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck._version import THIS_BUILD, Build, VersionMismatch
from potluck.errors import HandshakeRefused, MalformedFrame, PeerLost, Timeout
from potluck.net.frames import HEADER_SIZE, MAX_CONTROL, FrameType, encode, encode_opening
from potluck.net.opening import (
    MAX_SENTENCE,
    Greeting,
    RefusedByPeer,
    RefusedForNow,
    answer,
    await_answer,
    hello_frame,
    refuse,
)
from potluck.net.opening import ask as opening_ask
from potluck.wire_messages import OpenReply, OpenRequest, pack, unpack
from support.doors import TimedSocket, socket_pair
from support.hellos import HELLO, ask, drop, frame
from support.threads import Background, eventually

OPENING = [FrameType.HELLO, FrameType.WELCOME, FrameType.REFUSAL, FrameType.ROSTER]


WELCOME = frame(FrameType.WELCOME, pack(OpenReply(0)))


# -- collecting the first frame --------------------------------------------------------------------


@given(st.sampled_from(OPENING), st.binary(max_size=200), st.lists(st.integers(1, 60)))
def test_a_greeting_takes_one_frame_and_not_a_byte_more(
    kind: FrameType, payload: bytes, sizes: list[int]
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
@example(encode(FrameType.HELLO, length=MAX_CONTROL + 1))
@example(encode(FrameType.DATA, length=1 << 20))
def test_any_header_is_refused_or_promises_little(data: bytes) -> None:
    """A stranger makes us keep 64 KiB at most, whatever it announces."""
    greeting = Greeting()
    try:
        greeting.receive(data)
    except MalformedFrame:
        return
    assert greeting.kind in OPENING
    assert greeting.wanted <= MAX_CONTROL


@pytest.mark.parametrize("kind", [kind for kind in FrameType if kind not in OPENING])
def test_no_other_frame_opens_a_connection(kind: FrameType) -> None:
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
    assert unpack(got[HEADER_SIZE:], OpenRequest) == HELLO
    answer(dialled, OpenReply(0))
    dialled.sendall(b"the first frame of the connection")
    assert asking.result() == OpenReply(0)
    assert dialler.recv(100) == b"the first frame of the connection"


def test_a_second_answer_can_be_awaited(ends: tuple[socket.socket, socket.socket]) -> None:
    """Without another hello."""
    dialler, dialled = ends
    answer(dialled, OpenReply(0))
    answer(dialled, OpenReply(1))
    assert ask(dialler) == OpenReply(0)
    assert await_answer(dialler, OpenReply, time.monotonic() + 30) == OpenReply(1)


def test_a_slow_answer_is_an_answer(ends: tuple[socket.socket, socket.socket]) -> None:
    """Byte by byte, as a bad link may bring it."""
    dialler, dialled = ends
    dialled.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    asking = Background(lambda: ask(dialler))
    for byte in WELCOME:
        dialled.sendall(bytes([byte]))
    assert asking.result() == OpenReply(0)


def test_every_wait_for_an_answer_has_only_the_time_that_is_left(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Or a side that says a little and stops would be given as long again."""
    dialler, dialled = ends
    with TimedSocket(fileno=dialler.detach()) as timed:
        asking = Background(lambda: ask(timed))
        for part in (WELCOME[:3], WELCOME[3:5], WELCOME[5:]):
            before = len(timed.waits)
            dialled.sendall(part)
            if part is not WELCOME[5:]:
                eventually(lambda before=before: len(timed.waits) > before)  # type: ignore[misc]
        assert asking.result() == OpenReply(0)
    assert len(timed.waits) > 2
    assert all(later < earlier for earlier, later in pairwise(timed.waits))


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        (b"HTTP/1.1 400 Bad Request\r\n" + bytes(20), "no Potluck frame"),
        (frame(FrameType.HELLO, pack(HELLO)), "A HELLO frame is not an answer"),
        (frame(FrameType.TOKEN), "TOKEN"),
        (frame(FrameType.WELCOME, b"\xc1"), "cannot be understood"),
        (frame(FrameType.WELCOME, pack(HELLO)), "cannot be understood"),
        (encode(FrameType.WELCOME, length=MAX_CONTROL + 1), "over the limit"),
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


@pytest.mark.parametrize("kind", [FrameType.REFUSAL, FrameType.WELCOME, FrameType.ROSTER])
def test_an_answer_in_another_version_is_a_refusal(
    ends: tuple[socket.socket, socket.socket], kind: FrameType
) -> None:
    """Whatever it says: its contents mean nothing here, so the sentence is ours."""
    dialler, dialled = ends
    newer = Build("9.8.7", THIS_BUILD.protocol + 2, THIS_BUILD.protocol + 1)
    dialled.sendall(encode_opening(kind, piece=0, length=8, build=newer) + b"whatever")
    with pytest.raises(VersionMismatch) as caught:
        ask(dialler)
    assert "Potluck 9.8.7 (protocols 2 to 3): they cannot work together" in str(caught.value)
    assert "pip install --upgrade potluck" in str(caught.value)
    assert caught.value.is_ours_older


def test_an_answer_of_a_later_version_that_speaks_ours_is_understood(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """Both then speak the version that is the newest of the older one."""
    dialler, dialled = ends
    newer = Build("9.8.7", THIS_BUILD.protocol + 5, THIS_BUILD.protocol)
    dialled.sendall(encode_opening(FrameType.WELCOME, piece=0, length=0, build=newer))
    deadline = time.monotonic() + 30
    assert opening_ask(dialler, deadline).build == newer


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
    drips = iter(encode(FrameType.WELCOME, length=MAX_CONTROL) + bytes(MAX_CONTROL))

    class Dripping(socket.socket):
        def recv(self, *_: int) -> bytes:
            return bytes([next(drips)])

    with Dripping(fileno=ends[0].detach()) as dialler, pytest.raises(Timeout):
        ask(dialler, 0.01)
    assert next(drips) == 0, "it should have given up long before"


# --------------------------------------------------------------------------------------------------
# Refusals: they arrive, they are sentences, and they cannot steer anybody's terminal.

EVIL = "\x1b]0;owned\x07\x1b[2Jrank 1\r\nis \u202efine\x9b1m\x00"


def refused(sentence: str | bytes) -> HandshakeRefused:
    """What the dialler learns when it is refused in these words."""
    dialler, dialled = socket_pair()
    with dialler, dialled:
        if isinstance(sentence, str):
            refuse(dialled, sentence)
        else:
            dialled.sendall(frame(FrameType.REFUSAL, sentence))
        with pytest.raises(HandshakeRefused) as caught:
            ask(dialler)
        return caught.value


def test_a_refusal_arrives_in_its_own_words() -> None:
    """The one who is refused learns why."""
    error = refused("rank 1 is already here (on desk)")
    assert str(error) == "The other side refused: rank 1 is already here (on desk)"


@pytest.mark.parametrize("evil", [EVIL, EVIL.encode(), b"\xff\xfe\x1b[2J"])
def test_a_refusal_cannot_steer_the_terminal(evil: str | bytes) -> None:
    """Escapes, new lines and invisible marks become blanks; broken text stays readable."""
    error = refused(evil)
    assert str(error).isprintable()


@given(st.binary(max_size=300))
@settings(max_examples=50)
def test_any_refusal_is_a_printable_sentence(sentence: bytes) -> None:
    """Whatever a stranger sends."""
    assert str(refused(sentence)).isprintable()


def test_a_refusal_may_be_for_now() -> None:
    """Then asking again may help, and the error says so."""
    for for_now, kind in ((True, RefusedForNow), (False, RefusedByPeer)):
        dialler, dialled = socket_pair()
        with dialler:
            refuse(dialled, "not yet", for_now=for_now)
            with pytest.raises(HandshakeRefused, match="not yet") as caught:
                ask(dialler)
        assert type(caught.value) is kind
        assert caught.value.recoverable is for_now


def test_an_endless_refusal_is_cut() -> None:
    """By the reader, whatever was sent, and by the writer, so that it fits into a frame."""
    for sentence in ("x" * 100_000, b"x" * MAX_CONTROL, "\U0001f40b" * 100_000):
        cause = refused(sentence).cause
        assert cause is not None
        assert len(cause) == MAX_SENTENCE


def test_a_refusal_with_an_unspeakable_name_is_still_sent() -> None:
    """Host names may hold bytes that are no text."""
    assert "on desk" in str(refused("rank 1 is already here (on desk\udcff)"))


def test_a_refusal_arrives_although_more_was_said_than_read() -> None:
    """Unread bytes must not turn the close into a reset that overtakes the sentence."""
    dialler, dialled = socket_pair()
    with dialler:
        dialler.sendall(bytes(100_000))
        assert dialled.recv(1)
        refuse(dialled, "no")
        assert dialled.fileno() == -1
        assert dialler.recv(1000) == encode_opening(FrameType.REFUSAL, piece=0, length=2) + b"no"


def test_refusing_one_that_left_or_does_not_read_is_no_trouble() -> None:
    """It never waits and never raises."""
    for gone in (False, True):
        dialler, dialled = socket_pair()
        with dialler:
            if gone:
                drop(dialler)
            else:
                dialled.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    while True:
                        dialled.send(bytes(1 << 16))
            begin = time.monotonic()
            refuse(dialled, "no")
            assert time.monotonic() - begin < 10
            assert dialled.fileno() == -1


def test_a_refusal_is_one_line_in_our_log(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever it is about cannot add lines of his own, nor steer the terminal that shows it."""
    caplog.set_level("INFO")
    refused(f"{EVIL}\nrefused 192.168.1.1:80: nothing of the sort")
    (line,) = caplog.messages
    assert line.isprintable()
    assert line.startswith("refused 127.0.0.1:")


def test_the_reason_that_is_not_told_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """A stranger gets a general sentence, the owner of the machine what happened."""
    caplog.set_level("INFO")
    dialler, dialled = socket_pair()
    with dialler:
        refuse(dialled, "no", reason="it knows too much")
        assert dialler.recv(1000) == encode_opening(FrameType.REFUSAL, piece=0, length=2) + b"no"
    assert caplog.messages[0].endswith(": it knows too much")
