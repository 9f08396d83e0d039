"""Shortcuts: who gets one, who does not, and that nobody else gets in between."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from potluck.net import unix_socket
from potluck.net.unix_socket import UnixSocketOffer
from potluck.wire_messages import UnixSocketHint
from support.doors import LOOPBACKS, socket_pair
from support.shortcuts import shortcuts
from support.threads import Background

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture(params=LOOPBACKS)
def line(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """A TCP connection within this machine: the dialler's end, and the other."""
    dialler, called = socket_pair(request.param)
    with shortcuts(), dialler, called:
        yield dialler, called


def soon() -> float:
    """A deadline."""
    return time.monotonic() + 10


@contextlib.contextmanager
def offered(dialler: socket.socket) -> Iterator[UnixSocketOffer]:
    """An offer over this connection, which there must be."""
    offer = UnixSocketOffer.over(dialler)
    assert offer is not None
    with contextlib.closing(offer):
        yield offer


def test_both_ends_of_a_connection_meet_at_a_local_socket(line: Pair) -> None:
    """And what one writes there, the other reads."""
    dialler, called = line
    with offered(dialler) as offer:
        there = unix_socket.take(offer.message, called)
        assert there is not None
        with there, offer.accept() as here:
            unix_socket.await_dialler(there, called, soon())
            assert here.family == there.family == socket.AF_UNIX
            here.sendall(b"hello")
            assert there.recv(10) == b"hello"


def test_the_dialler_is_awaited_until_the_deadline(line: Pair) -> None:
    """It may be busy; but not for ever, and not for less than was granted."""
    dialler, called = line
    with offered(dialler) as offer:
        there = unix_socket.take(offer.message, called)
        assert there is not None
        deadline = time.monotonic() + 0.3
        with there, pytest.raises(TimeoutError, match="did not come to its shortcut"):
            unix_socket.await_dialler(there, called, deadline)
        assert time.monotonic() >= deadline


def test_a_connection_from_another_address_gets_no_offer() -> None:
    """The other end may be another machine."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sock = socket.create_connection(listener.getsockname(), source_address=("127.0.0.2", 0))
        with shortcuts(), sock:
            assert UnixSocketOffer.over(sock) is None


def test_turned_off_nobody_offers_and_nobody_takes(line: Pair) -> None:
    """One end is enough: they stay with TCP."""
    dialler, called = line
    with offered(dialler) as offer, shortcuts("off"):
        assert UnixSocketOffer.over(dialler) is None
        assert unix_socket.take(offer.message, called) is None


def test_where_there_is_no_offer_nothing_is_taken(line: Pair) -> None:
    """As with every connection between machines."""
    assert unix_socket.take(None, line[1]) is None


def test_a_relay_stays_between_the_two() -> None:
    """What the dialler sees is not what the other end sees: somebody wants to be on the way."""
    (dialler, relay_in), (relay_out, called) = socket_pair(), socket_pair()
    with shortcuts(), dialler, relay_in, relay_out, called, offered(dialler) as offer:
        assert unix_socket.take(offer.message, called) is None


def test_another_user_of_the_machine_gets_no_shortcut(
    line: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel says who is at the other end."""
    dialler, called = line
    with offered(dialler) as offer:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        assert unix_socket.take(offer.message, called) is None


def test_an_offer_that_leads_nowhere_is_left(line: Pair) -> None:
    """The dialler may be in another network namespace, or gone."""
    dialler, called = line
    with offered(dialler) as offer:
        message = offer.message
    assert unix_socket.take(message, called) is None


@pytest.mark.parametrize("word", [b"", b"x", bytes(32)], ids=["nothing", "a letter", "zeros"])
def test_strangers_at_the_listener_hold_up_nobody(line: Pair, word: bytes) -> None:
    """Its name can be read by every user of the machine; the token cannot."""
    dialler, called = line
    with offered(dialler) as offer, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(offer.message.name)
        stranger.sendall(word)
        stranger.shutdown(socket.SHUT_WR)
        there = unix_socket.take(offer.message, called)
        assert there is not None
        with there, offer.accept() as here:
            here.sendall(b"hello")
            assert there.recv(1) + there.recv(10) == b"\x01hello"
        assert stranger.recv(10) == b""


def test_a_stranger_who_says_nothing_holds_up_nobody(line: Pair) -> None:
    """Who was called has sent the token before it says so: whoever has not is somebody else."""
    dialler, called = line
    with offered(dialler) as offer, socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(offer.message.name)
        there = unix_socket.take(offer.message, called)
        assert there is not None
        with there, offer.accept():
            unix_socket.await_dialler(there, called, soon())


def test_a_shortcut_that_was_not_taken_is_not_waited_for(line: Pair) -> None:
    """The other side says that it is there, and is not: it is dialled again."""
    with offered(line[0]) as offer, pytest.raises(ConnectionError, match="not where"):
        offer.accept()


def test_a_full_listener_is_no_shortcut(line: Pair) -> None:
    """Whoever is called never waits for room."""
    dialler, called = line
    with offered(dialler) as offer, contextlib.ExitStack() as crowd:
        for _ in range(unix_socket.BACKLOG + 1):
            stranger = crowd.enter_context(socket.socket(socket.AF_UNIX))
            stranger.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                stranger.connect(offer.message.name)
        assert unix_socket.take(offer.message, called) is None


def test_a_dialler_that_leaves_is_noticed(line: Pair) -> None:
    """Whoever is called does not wait for its deadline."""
    dialler, called = line
    with offered(dialler) as offer:
        there = unix_socket.take(offer.message, called)
        assert there is not None
    with there, pytest.raises(ConnectionError):
        unix_socket.await_dialler(there, called, soon())


def test_another_process_at_the_end_of_a_shortcut_is_not_the_dialler(line: Pair) -> None:
    """It would have said so."""
    _, called = line
    with pretended(called) as (listener, message):
        there = unix_socket.take(message, called)
        assert there is not None
        with there, listener.accept()[0] as other:
            other.sendall(b"x")
            with pytest.raises(ConnectionError, match="another process"):
                unix_socket.await_dialler(there, called, soon())


@contextlib.contextmanager
def pretended(
    called: socket.socket, name: bytes | str = ""
) -> Iterator[tuple[socket.socket, UnixSocketHint]]:
    """A listener of our own user, and an offer that leads there and is in order otherwise."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(name)
        listener.listen()
        bound = listener.getsockname()
        ends = unix_socket._ends(called.getpeername(), called.getsockname())
        assert ends is not None
        yield listener, UnixSocketHint(os.fsencode(bound), bytes(32), ends)


@pytest.mark.parametrize("name", [b"door", b"\0/tmp/.X11-unix/X99", b"\0abcdef", b"\0ABCDE"])
def test_nobody_is_sent_to_a_listener_of_another_kind(
    line: Pair, name: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither to a file such as a daemon's socket, nor to a name that a program has chosen."""
    monkeypatch.chdir(tmp_path)
    with pretended(line[1], name) as (listener, message):
        assert message.name == name
        assert unix_socket.take(message, line[1]) is None
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize("name", [b"", b"\0", b"\0" * 6, b"\0abcde\n", bytes(32), b"\xff" * 32])
def test_odd_names_lead_nowhere(line: Pair, name: bytes) -> None:
    """They are not even dialled."""
    with offered(line[0]) as offer:
        message = structs.replace(offer.message, name=name)
        assert not unix_socket._is_sound(message)
        assert unix_socket.take(message, line[1]) is None


@pytest.mark.parametrize("token", [b"", bytes(31)], ids=["none", "short"])
def test_a_token_has_its_size(line: Pair, token: bytes) -> None:
    """There is nothing to choose about it."""
    with offered(line[0]) as offer:
        assert unix_socket.take(structs.replace(offer.message, token=token), line[1]) is None


@pytest.mark.parametrize("count", [0, 1])
def test_an_offer_without_both_ends_is_left(line: Pair, count: int) -> None:
    """So is one that tells others than there are."""
    with offered(line[0]) as offer:
        ends = offer.message.ends[:count]
        assert unix_socket.take(structs.replace(offer.message, ends=ends), line[1]) is None


def test_a_member_elsewhere_sends_nobody_to_a_listener_here() -> None:
    """It tells the true ends of its connection, and they are not of one machine."""
    with socket.create_server(("127.0.0.1", 0)) as door, shortcuts():
        dialler = socket.create_connection(door.getsockname(), source_address=("127.0.0.2", 0))
        with dialler, door.accept()[0] as called, socket.socket(socket.AF_UNIX) as listener:
            listener.bind("")
            listener.listen()
            ends = [f"{host}:{port}" for host, port in (dialler.getsockname(), door.getsockname())]
            message = UnixSocketHint(listener.getsockname(), bytes(32), ends)
            assert unix_socket.take(message, called) is None


@pytest.mark.parametrize("end", [0, 1], ids=["there", "here"])
def test_the_end_of_the_tcp_connection_ends_the_wait_for_the_dialler(line: Pair, end: int) -> None:
    """It has died, or this side is closing: the local socket alone would not tell."""
    dialler, called = line
    with offered(dialler) as offer:
        there = unix_socket.take(offer.message, called)
        assert there is not None
        with there:
            waiting = Background(lambda: unix_socket.await_dialler(there, called, soon()))
            line[end].shutdown(socket.SHUT_RDWR)
            with pytest.raises(ConnectionError, match="the connection ended"):
                waiting.result()


def test_a_dialler_that_has_left_tcp_already_is_at_the_shortcut(line: Pair) -> None:
    """It says so first, and then closes."""
    dialler, called = line
    with offered(dialler) as offer:
        there = unix_socket.take(offer.message, called)
        assert there is not None
        with there, offer.accept():
            dialler.close()
            unix_socket.await_dialler(there, called, soon())


def test_a_silent_dialler_costs_the_deadline_and_no_more(line: Pair) -> None:
    """Its process may have been stopped."""
    dialler, called = line
    with offered(dialler) as offer:
        there = unix_socket.take(offer.message, called)
        assert there is not None
        with there, pytest.raises(TimeoutError):
            unix_socket.await_dialler(there, called, time.monotonic() + 0.05)


def test_without_descriptors_there_is_no_shortcut(
    line: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TCP is there already."""
    dialler, called = line
    with offered(dialler) as offer:

        def refuse(*_: object) -> None:
            raise OSError(24, "Too many open files")

        monkeypatch.setattr(socket, "socket", refuse)
        assert UnixSocketOffer.over(dialler) is None
        assert unix_socket.take(offer.message, called) is None
