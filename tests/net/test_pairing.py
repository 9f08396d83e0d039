"""Messages on a pairing's connection: whole, bounded, and never waited for."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import Disconnected, IoError, MalformedFrame, NoConnection
from potluck.net.addresses import Address
from potluck.net.pairing import PairingLine, dial
from potluck.net.tcp import listen
from support.homes import framed
from support.ports import free_port
from support.threads import eventually


@contextlib.contextmanager
def connection() -> Iterator[tuple[PairingLine, socket.socket]]:
    """A line, and the bare socket at its other end."""
    with contextlib.closing(listen("127.0.0.1", 0)) as door:
        caller = socket.create_connection(door.getsockname())
        door.setblocking(True)
        line = PairingLine(door.accept()[0])
        with contextlib.closing(line), caller:
            yield line, caller


def received(line: PairingLine, limit: int = 100) -> bytes:
    """The next message, waited for."""
    got: list[bytes | None] = []

    def arrived() -> bool:
        got.append(line.receive(limit))
        return got[-1] is not None

    eventually(arrived)
    assert got[-1] is not None
    return got[-1]


@given(
    st.lists(st.binary(min_size=1, max_size=100), min_size=1, max_size=4),
    st.lists(st.integers(0, 400), max_size=6),
)
def test_messages_arrive_whole_however_they_are_cut(messages: list[bytes], cuts: list[int]) -> None:
    """TCP may cut anywhere; the messages come out as they went in, one at a time."""
    stream = b"".join(map(framed, messages))
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    with connection() as (line, caller):
        got: list[bytes] = []
        for start, end in itertools.pairwise(edges):
            caller.sendall(stream[start:end])
        while len(got) < len(messages):
            got.append(received(line))
        assert got == messages
        assert line.receive(100) is None


@pytest.mark.parametrize("length", [0, 101, 1 << 31, (1 << 32) - 1])
def test_a_length_out_of_bounds_is_refused_before_the_message(length: int) -> None:
    """Only the four bytes have been read, and nothing was allocated for it."""
    with connection() as (line, caller):
        caller.sendall(length.to_bytes(4, "big"))
        tracemalloc.start()
        try:
            with pytest.raises(MalformedFrame, match="1 to 100 are allowed"):
                received(line)
            assert tracemalloc.get_traced_memory()[1] < 100_000
        finally:
            tracemalloc.stop()


def test_what_is_allocated_follows_what_has_arrived() -> None:
    """Whoever announces much and sends little costs little."""
    with connection() as (line, caller):
        caller.sendall((1 << 24).to_bytes(4, "big") + b"x")
        tracemalloc.start()
        try:
            eventually(lambda: line.receive(1 << 24) is None and len(line._input) == 1)
            assert tracemalloc.get_traced_memory()[1] < 200_000
        finally:
            tracemalloc.stop()


def test_the_limit_may_change_between_two_messages() -> None:
    """Both may be there already: the second one is judged when it is asked for."""
    with connection() as (line, caller):
        caller.sendall(framed(b"a") + framed(bytes(50)))
        assert received(line, limit=1) == b"a"
        with pytest.raises(MalformedFrame):
            line.receive(49)
    with connection() as (line, caller):
        caller.sendall(framed(b"a") + framed(bytes(50)))
        assert received(line, limit=1) == b"a"
        assert received(line, limit=50) == bytes(50)


def _hang_up(caller: socket.socket) -> None:
    caller.shutdown(socket.SHUT_WR)


def _reset(caller: socket.socket) -> None:
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    caller.close()


@pytest.mark.parametrize("end", [_hang_up, _reset], ids=["end", "reset"])
@pytest.mark.parametrize("sent", [b"", b"\0", framed(b"ab")[:-1]], ids=["none", "part", "most"])
def test_the_end_of_a_connection_is_an_error(
    end: Callable[[socket.socket], None], sent: bytes
) -> None:
    """In the middle of a message too, and whichever way it ends."""
    with connection() as (line, caller):
        caller.sendall(sent)
        end(caller)
        with pytest.raises(Disconnected):
            received(line)


def test_sending_never_waits_for_the_other_side() -> None:
    """What does not fit is kept and sent later, in order."""
    messages = [bytes([number]) * 1_000_000 for number in range(8)]
    with connection() as (line, caller):
        for message in messages:
            line.send(message)
        assert line.has_output
        caller.settimeout(10)
        stream = b"".join(map(framed, messages))
        got = bytearray()
        while len(got) < len(stream):
            got += caller.recv(1 << 20)
            line.flush()
        assert bytes(got) == stream
        assert not line.has_output


def test_sending_to_somebody_who_is_gone_is_silent() -> None:
    """That he is gone is seen when reading; until then nothing piles up."""
    with connection() as (line, caller):
        _reset(caller)
        eventually(line.drain)
        for _ in range(3):
            line.send(b"hello")
        assert not line.has_output
        line.end()


def test_drain_tells_when_the_other_side_has_ended() -> None:
    """What it sent is dropped, up to its end."""
    with connection() as (line, caller):
        assert not line.drain()
        caller.sendall(bytes(10_000))
        assert not line.drain()
        caller.close()
        eventually(line.drain)


def test_dialling_a_closed_port_says_what_to_do() -> None:
    """The hint is about pairing."""
    address = Address("127.0.0.1", free_port())
    with pytest.raises(NoConnection, match=r"No connection to 127.* `potluck pair` is waiting"):
        dial(address, time.monotonic() + 5)


@pytest.mark.parametrize("host", ["no.such.machine.invalid", "x" * 70])
def test_dialling_a_name_nobody_has(host: str) -> None:
    """Also one that could not be a name at all."""
    with pytest.raises((IoError, NoConnection), match="No connection to"):
        dial(Address(host, 1), time.monotonic() + 5)


def test_dialling_makes_a_line() -> None:
    """It knows whom it talks to."""
    with contextlib.closing(listen("127.0.0.1", 0)) as door:
        address = Address(*door.getsockname()[:2])
        with contextlib.closing(dial(address, time.monotonic() + 5)) as line:
            assert line.peer == address
