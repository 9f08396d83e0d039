"""Refusals: they arrive, they are sentences, and they cannot steer anybody's terminal."""

from __future__ import annotations

import contextlib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import HandshakeRefused
from potluck.net.frames import MAX_CONTROL, Kind
from potluck.net.opening import MAX_SENTENCE, RefusedByPeer, RefusedForNow, refuse
from support.doors import socket_pair
from support.hellos import ask, drop, frame

EVIL = "\x1b]0;owned\x07\x1b[2Jrank 1\r\nis \u202efine\x9b1m\x00"


def refused(sentence: str | bytes) -> HandshakeRefused:
    """What the dialler learns when it is refused in these words."""
    dialler, dialled = socket_pair()
    with dialler, dialled:
        if isinstance(sentence, str):
            refuse(dialled, sentence)
        else:
            dialled.sendall(frame(Kind.REFUSAL, sentence))
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
        assert dialler.recv(1000) == frame(Kind.REFUSAL, b"no")


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
        assert dialler.recv(1000) == frame(Kind.REFUSAL, b"no")
    assert caplog.messages[0].endswith(": it knows too much")
