"""Fuzzing a live listener: whatever strangers send and however they leave, honest callers come in.

Memory and sockets stay within the places the acceptor has for strangers.
"""

from __future__ import annotations

import contextlib
import gc
import socket
import tracemalloc
from typing import NamedTuple

import psutil
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.net import acceptor as acceptor_module
from potluck.net.acceptor import SLOTS, SLOTS_PER_HOST
from potluck.net.frames import HEADER_SIZE, MAX_CONTROL, Kind, encode
from potluck.net.opening import hello_frame
from support.hellos import drop
from support.reception import HONEST, Reception, last_words, open_reception
from support.threads import eventually

HELLO = hello_frame(HONEST)
BRACKETS = b"\x82\xa4type\xa4join\xa1x" + b"\x91" * 1500
NESTED = encode(Kind.HELLO, length=len(BRACKETS)) + BRACKETS  # deeper than Python's stack
TCP_REPAIR = 19  # from <linux/tcp.h>


class Stranger(NamedTuple):
    """One that calls, says something and leaves in its way."""

    words: list[bytes]
    ending: str


headers = st.builds(
    lambda kind, length, version: (
        bytes([*b"PL", version, kind]) + encode(Kind.HELLO, length=length)[4:]
    ),
    st.sampled_from([int(kind) for kind in Kind]) | st.integers(0, 255),
    st.integers(0, 100) | st.integers(MAX_CONTROL - 1, MAX_CONTROL + 1) | st.integers(0, 2**32 - 1),
    st.sampled_from([1, 1, 1, 0, 2, 255]),
)
truncated = st.integers(0, len(HELLO)).map(lambda size: HELLO[:size])
damaged = st.tuples(st.integers(0, len(HELLO) - 1), st.integers(1, 255)).map(
    lambda change: bytes(
        byte ^ (change[1] if index == change[0] else 0) for index, byte in enumerate(HELLO)
    )
)
words = st.lists(
    st.binary(max_size=200) | headers | truncated | damaged | st.just(NESTED), max_size=4
)
endings = st.sampled_from(["stay", "close", "reset", "end of words", "vanish"])
strangers = st.builds(Stranger, words, endings)


def visit(reception: Reception, stranger: Stranger) -> None:
    """Call, speak and leave."""
    sock = reception.call()
    with contextlib.suppress(OSError):  # it hung up on us in the middle
        for word in stranger.words:
            sock.sendall(word)
        if stranger.ending == "end of words":
            sock.shutdown(socket.SHUT_WR)
    if stranger.ending == "reset":
        drop(sock)
    if stranger.ending == "vanish":  # without a word on the wire; needs root, else it just stays
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, 1)
            sock.close()
    if stranger.ending == "close":
        sock.close()


def test_no_stranger_keeps_an_honest_caller_out() -> None:
    """Random and damaged bytes, truncated and oversized lengths, connections left half open."""
    with open_reception() as reception:

        @given(st.lists(strangers, min_size=1, max_size=5))
        @example([Stranger([NESTED], "stay")])
        @example([Stranger([encode(Kind.HELLO, length=2**32 - 1), bytes(1000)], "reset")])
        def fuzz(callers: list[Stranger]) -> None:
            for stranger in callers:
                visit(reception, stranger)
            assert reception.call_honestly() < acceptor_module.PATIENCE / 2
            assert len(reception.acceptor._callers) <= SLOTS
            reception.hang_up()

        fuzz()


@pytest.mark.parametrize("hangs_up", [True, False])
def test_memory_and_sockets_come_back(hangs_up: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """After hundreds of strangers there is nothing left of them, whether they left or not."""
    monkeypatch.setattr(acceptor_module, "PATIENCE", 0.2)
    process = psutil.Process()
    with open_reception() as reception:
        reception.call_honestly()
        before = process.num_fds()
        tracemalloc.start()
        try:
            for number in range(300):
                visit(reception, Stranger([HELLO[: number % len(HELLO)]], "stay"))
                if hangs_up and number % 50 == 0:
                    reception.hang_up()
            eventually(lambda: not reception.acceptor._callers)
            reception.hang_up()
            reception.call_honestly()
            eventually(lambda: process.num_fds() == before)
            gc.collect()
            assert tracemalloc.get_traced_memory()[0] < 1 << 20
        finally:
            tracemalloc.stop()


def test_what_strangers_can_make_us_keep_is_bounded() -> None:
    """Twice as many as there are places, each with the longest hello there is, less one byte."""
    nearly = encode(Kind.HELLO, length=MAX_CONTROL) + bytes(MAX_CONTROL - 1)
    process = psutil.Process()
    with open_reception() as reception:
        callers = []
        before = process.num_fds()
        tracemalloc.start()
        try:
            for _ in range(2 * SLOTS):
                callers.append(reception.call(nearly))
                assert process.num_fds() <= before + len(callers) + SLOTS + 1
            for early in callers[:SLOTS]:
                assert last_words(early) == b""
            places = reception.acceptor._callers
            eventually(lambda: all(one.greeting.wanted == 1 for one in places.values()))
            assert len(places) == SLOTS_PER_HOST
            each = HEADER_SIZE + MAX_CONTROL
            assert tracemalloc.get_traced_memory()[1] < 2 * SLOTS * each
            assert reception.call_honestly() < acceptor_module.PATIENCE / 2
        finally:
            tracemalloc.stop()


@settings(max_examples=25)
@given(words=st.lists(st.binary(min_size=1, max_size=40), min_size=1, max_size=10))
def test_any_way_of_cutting_a_hello_is_a_hello(words: list[bytes]) -> None:
    """The pieces in which TCP brings it mean nothing."""
    sizes = [len(word) for word in words]
    with open_reception() as reception:
        sock, place = reception.call(), 0
        for size in [*sizes, len(HELLO)]:
            sock.sendall(HELLO[place : place + size])
            place += size
        assert reception.hellos.get(timeout=30) == HONEST
