"""What the acceptor grants to callers that have not said who they are: seconds and places."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from potluck.net import acceptor_callers as acceptor_module
from potluck.net.frames import MAX_CONTROL, Kind, encode
from potluck.net.opening import hello_frame
from potluck.net.secure_socket import OpeningSocket
from support.reception import HONEST, Reception, last_words, open_reception
from support.threads import Background, eventually

HELLO = hello_frame(HONEST)


@pytest.fixture
def reception() -> Iterator[Reception]:
    """An open door."""
    with open_reception() as one:
        yield one


def test_silent_callers_do_not_delay_an_honest_one(reception: Reception) -> None:
    """Two hundred of them, three times the places there are."""
    for _ in range(200):
        reception.call()
    assert reception.call_honestly() < acceptor_module.PATIENCE / 2
    assert len(reception.acceptor._callers) <= acceptor_module.SLOTS


def test_who_has_waited_longest_makes_room(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The places are bounded; those who came last keep theirs."""
    monkeypatch.setattr(acceptor_module, "SLOTS", 3)
    callers = [reception.call(HELLO[:10]) for _ in range(5)]
    for early in callers[:2]:
        assert last_words(early) == b""
    for late in callers[2:]:
        late.sendall(HELLO[10:])
        assert last_words(late)


def test_a_crowd_costs_nobody_else_a_place(reception: Reception) -> None:
    """Hundreds from other addresses, while one takes its time: it comes in all the same."""
    slow = reception.call(HELLO[:10])
    with contextlib.ExitStack() as lines:
        for number in range(4 * acceptor_module.SLOTS):
            source = (f"127.0.0.{9 + number % 2}", 0)
            line = socket.create_connection(reception.address, 30, source_address=source)
            lines.enter_context(line)
        eventually(lambda: len(reception.acceptor._callers) >= acceptor_module.SLOTS - 1)
        slow.sendall(HELLO[10:])
        assert reception.hellos.get(timeout=30) == HONEST


@pytest.mark.parametrize("words", [b"", HELLO[:10], HELLO[:-1]])
def test_patience_has_an_end(
    reception: Reception, monkeypatch: pytest.MonkeyPatch, words: bytes
) -> None:
    """A caller that does not finish its hello in time is hung up on."""
    monkeypatch.setattr(acceptor_module, "PATIENCE", 0.1)
    begin = time.monotonic()
    assert last_words(reception.call(words)) == b""
    assert 0.1 <= time.monotonic() - begin < 10
    assert reception.acceptor.refused == 1


def test_a_byte_now_and_then_does_not_extend_the_time(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is for the whole hello."""
    monkeypatch.setattr(acceptor_module, "PATIENCE", 0.1)
    caller = reception.call(encode(Kind.HELLO, length=MAX_CONTROL))
    waiting = Background(lambda: last_words(caller))
    begin = time.monotonic()
    while not waiting.ended:
        assert time.monotonic() - begin < 10
        with contextlib.suppress(OSError):  # hung up this instant
            caller.send(b"x")
        time.sleep(0.001)  # one byte at a time is the point


def test_a_caller_that_speaks_as_it_makes_room_does_no_harm(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both news reach the acceptor at once: a new caller, and words of the one that must go."""
    entered, go_on = threading.Event(), threading.Event()
    welcome = reception.acceptor.receive

    def linger(sock: OpeningSocket, payload: bytes) -> None:
        entered.set()
        assert go_on.wait(30)
        welcome(sock, payload)

    early = reception.call()
    eventually(lambda: len(reception.acceptor._callers) == 1)
    reception.acceptor.receive = linger
    reception.call(HELLO)
    assert entered.wait(30)
    reception.acceptor.receive = welcome
    monkeypatch.setattr(acceptor_module, "SLOTS", 1)
    late = reception.call()
    early.sendall(HELLO[:10])
    go_on.set()
    assert last_words(early) == b""
    late.sendall(HELLO)
    assert last_words(late)
    for _ in range(2):
        assert reception.hellos.get(timeout=30) == HONEST


def test_without_free_descriptors_the_acceptor_waits_for_better_times(
    reception: Reception, caplog: pytest.LogCaptureFixture
) -> None:
    """It warns, goes on, and lets callers in as soon as it can."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as caller, caplog.at_level(logging.WARNING):
        caller.settimeout(30)
        free = os.dup(caller.fileno())
        os.close(free)
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
        try:
            caller.connect(reception.address)
            caller.sendall(HELLO)
            eventually(lambda: "could not accept a connection" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert last_words(caller).endswith(b"\xa4rank\0")
    assert reception.hellos.get(timeout=30) == HONEST
