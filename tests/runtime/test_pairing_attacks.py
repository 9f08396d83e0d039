"""Attacks on a pairing, as real clients on real sockets: nobody gets in, and nobody is kept out."""

from __future__ import annotations

import contextlib
import os
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from potluck.core.pairing_messages import PUBLIC_LIMIT, VERSION, Hello, encode
from potluck.net.addresses import Address
from potluck.runtime.pairing import PairingFailed
from support.homes import WRONG, Home, Hosting, call, framed, hello_of
from support.threads import Background, eventually

STRANGER = "127.0.0.9"
CODE_WORDS = (b"guitar", b"harbor")
MESSAGES = 7  # of a whole pairing, in both directions


@pytest.fixture
def desk(tmp_path: Path) -> Home:
    """The machine that shows a code."""
    return Home(tmp_path, "desk")


@pytest.fixture
def laptop(tmp_path: Path) -> Home:
    """The machine on which it is typed."""
    return Home(tmp_path, "laptop")


# --- in the middle ---

Tamper = Callable[[int, bytes], bytes]


class Relay:
    """A machine between guest and host that sees every message, and may change it."""

    def __init__(self, host: Address, tamper: Tamper) -> None:
        self.seen: list[bytes] = []
        self._tamper = tamper
        self._door = socket.create_server(("127.0.0.1", 0))
        self._door.settimeout(10)
        self.where = Address(*self._door.getsockname())
        self._working = Background(lambda: self._serve(host))

    def _serve(self, host: Address) -> None:
        with self._door, self._door.accept()[0] as guest, call(host) as upstream:
            there = Background(lambda: self._forward(guest, upstream))
            self._forward(upstream, guest)
            there.result()

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError), source.makefile("rb") as file:
            while head := file.read(4):
                message = file.read(int.from_bytes(head, "big"))
                self.seen.append(message)
                changed = self._tamper(len(self.seen), message)
                target.sendall(framed(changed))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        """Wait for both directions to end."""
        self._working.result()


@contextlib.contextmanager
def in_the_middle(hosting: Hosting, tamper: Tamper) -> Iterator[Relay]:
    """A relay in front of a host."""
    relay = Relay(hosting.where, tamper)
    yield relay
    relay.end()


def test_who_only_relays_learns_nothing(desk: Home, laptop: Home) -> None:
    """The pairing succeeds, between the two, and nothing secret has passed by."""
    with Hosting(desk) as hosting, in_the_middle(hosting, lambda _, message: message) as relay:
        circle = laptop.join(relay.where)
        hosting.outcome.result()
    assert circle.namespace == desk.namespace()
    assert len(relay.seen) == MESSAGES
    seen = b"".join(relay.seen)
    for hidden in (desk.namespace().secret, *CODE_WORDS, b"home", circle.roster.to_bytes()[:40]):
        assert hidden not in seen
    for public in (b"desk", b"laptop"):  # which is why the line above means something
        assert public in seen


@pytest.mark.parametrize("number", range(1, MESSAGES + 1))
def test_who_changes_anything_ends_it(desk: Home, laptop: Home, number: int) -> None:
    """A bit in any of the messages: the guest is not in, and nothing is stored there."""

    def flip(index: int, message: bytes) -> bytes:
        return message[:-1] + bytes([message[-1] ^ 1]) if index == number else message

    with (
        Hosting(desk) as hosting,
        in_the_middle(hosting, flip) as relay,
        pytest.raises(PairingFailed),
    ):
        laptop.join(relay.where)
    assert not (laptop.path / "namespaces").exists()
    # The last message says that the guest is written down; before it, nobody was.
    assert desk.members() == (["desk", "laptop"] if number == MESSAGES else ["desk"])


def test_who_stands_in_for_both_sides_has_one_guess(
    desk: Home, laptop: Home, tmp_path: Path
) -> None:
    """A machine that plays host to the guest and guest to the host, with a guess at the code."""
    middle = Home(tmp_path, "middle")
    with Hosting(desk) as hosting, Hosting(middle, WRONG) as fake:
        with pytest.raises(PairingFailed, match="did not accept the code"):
            laptop.join(fake.where)
        with pytest.raises(PairingFailed):
            middle.join(hosting.where, WRONG)
        eventually(lambda: len(hosting.failures) == len(fake.failures) == 1)
        laptop.join(hosting.where)
        hosting.outcome.result()
    assert desk.members() == ["desk", "laptop"]


def test_a_recorded_pairing_cannot_be_repeated(desk: Home, laptop: Home) -> None:
    """Even if a code should come twice: the other side's share is new."""
    sent: list[bytes] = []

    def record(_index: int, message: bytes) -> bytes:
        sent.append(message)
        return message

    with Hosting(desk) as hosting, in_the_middle(hosting, record) as relay:
        laptop.join(relay.where)
        hosting.outcome.result()
    before = desk.circle().roster
    with Hosting(desk) as hosting, call(hosting.where) as replay:
        for message in (sent[0], sent[2], sent[5]):  # what the guest said
            with contextlib.suppress(ConnectionError):
                replay.sendall(framed(message))
        eventually(lambda: hosting.failures == ['"laptop" does not know the code.'])
    assert desk.circle().roster == before


# --- crowds ---


def test_two_hundred_silent_callers_do_not_delay_a_guest(
    desk: Home, laptop: Home, caplog: pytest.LogCaptureFixture
) -> None:
    """From another address, or from the guest's own; each refusal is logged with a reason."""
    caplog.set_level("INFO")
    for source in (STRANGER, "127.0.0.1"):
        with Hosting(desk) as hosting, contextlib.ExitStack() as crowd:
            for _ in range(200):
                crowd.enter_context(call(hosting.where, source))
            begin = time.monotonic()
            laptop.join(hosting.where)
            assert time.monotonic() - begin < 5
            crowd.close()
            hosting.outcome.result()
            assert hosting.failures == []
    assert f"{STRANGER}:" in caplog.text
    assert "made room for others" in caplog.text


def test_a_crowd_that_keeps_coming_costs_little_memory(desk: Home) -> None:
    """Each announces as much as is allowed and sends all but the last byte."""
    piece = (PUBLIC_LIMIT).to_bytes(4, "big") + bytes(PUBLIC_LIMIT - 1)
    tracemalloc.start()
    try:
        with Hosting(desk) as hosting, contextlib.ExitStack() as crowd:
            for number in range(200):
                caller = crowd.enter_context(call(hosting.where, f"127.0.1.{number % 50 + 1}"))
                with contextlib.suppress(ConnectionError):
                    caller.sendall(piece)
            eventually(lambda: len(hosting.listener._calls) == 8)
            assert tracemalloc.get_traced_memory()[1] < 5_000_000
            assert hosting.failures == []
    finally:
        tracemalloc.stop()


CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(190)
GARBAGE = {
    "nothing": b"",
    "http": b"GET / HTTP/1.1\r\nHost: desk\r\n\r\n",
    "tls": CLIENT_HELLO,
    "huge": b"\xff\xff\xff\xff" + bytes(1000),
    "empty": bytes(4),
    "not ours": (20).to_bytes(4, "big") + bytes(20),
    "half": (100).to_bytes(4, "big") + b"half",
    "noise": os.urandom(5000),
    "wrong slot": encode(Hello(VERSION, 8, "a" * 32, "x", bytes(33))),  # type: ignore[arg-type]
    "wrong version": encode(Hello(99, 7, "a" * 32, "x", bytes(33))),  # type: ignore[arg-type]
    "no point": encode(Hello(VERSION, 7, "a" * 32, "x", b"A" + b"\xff" * 32)),  # type: ignore[arg-type]
}


def test_garbage_costs_no_try(desk: Home, laptop: Home) -> None:
    """Programs that knock at every port cannot use up a code; the guest comes after them all."""
    with Hosting(desk) as hosting:
        for name, data in GARBAGE.items():
            is_message = name in {"wrong slot", "wrong version", "no point"}
            with call(hosting.where, STRANGER) as caller, contextlib.suppress(OSError):
                caller.sendall(framed(data) if is_message else data)
                caller.shutdown(socket.SHUT_WR)  # fails if he was hung up on already
                while caller.recv(1000):
                    pass
        laptop.join(hosting.where)
        hosting.outcome.result()
        assert hosting.failures == []
    assert desk.members() == ["desk", "laptop"]


def test_a_hello_that_is_never_followed_up_costs_a_try(desk: Home, laptop: Home) -> None:
    """Our share is out, so it was a guess; three of those, and a new code is needed."""
    with Hosting(desk) as hosting:
        for _ in range(2):
            before = len(hosting.failures)
            with call(hosting.where) as caller:
                caller.sendall(hello_of(laptop))
                assert caller.recv(1000)
            eventually(lambda before=before: len(hosting.failures) > before)  # type: ignore[misc]
        laptop.join(hosting.where)
        hosting.outcome.result()
        assert set(hosting.failures) == {'"laptop" hung up before the end.'}


def test_a_proof_that_does_not_come_in_five_seconds_costs_a_try(desk: Home, laptop: Home) -> None:
    """He who makes us wait blocks others for that long, and three times at most."""
    with Hosting(desk) as hosting, call(hosting.where) as caller:
        caller.sendall(hello_of(laptop))
        assert caller.recv(1000)
        hosting.clock.push(5.1)
        eventually(lambda: len(hosting.failures) == 1)
        assert hosting.failures == ['"laptop" took too long to send a proof of the code.']
