"""Messages on a pairing's connection: whole, bounded, and never waited for."""

from __future__ import annotations

import contextlib
import errno
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
from potluck.net.tcp import listen
from potluck.trust import pairing_net
from potluck.trust.pairing_net import (
    Closed,
    Connected,
    Event,
    PairingLine,
    PairingListener,
    Received,
    dial,
)
from support.homes import framed
from support.ports import free_port
from support.threads import PATIENCE, eventually


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


# --------------------------------------------------------------------------------------------------
# The door of a pairing: a few places, and nobody who keeps silent keeps others out.

LIMIT = 1000
NEIGHBOUR = "127.0.0.2"


class Door:
    """A listener, everything that has happened at it, and callers."""

    def __init__(self, stack: contextlib.ExitStack, places: int) -> None:
        self.listener = stack.enter_context(PairingListener(port=0, places=places))
        self.events: list[Event] = []
        self._stack = stack

    def call(self, source: str = "127.0.0.1") -> tuple[int, socket.socket]:
        """Somebody calls, and is let in; the number of the call."""
        caller = self.dial(source)
        before = self.count(Connected)
        self.until(lambda: self.count(Connected) > before)
        last = next(event for event in reversed(self.events) if isinstance(event, Connected))
        return last.link, caller

    def dial(self, source: str = "127.0.0.1") -> socket.socket:
        """Somebody calls."""
        address = ("127.0.0.1", self.listener.port)
        caller = socket.create_connection(address, timeout=10, source_address=(source, 0))
        return self._stack.enter_context(caller)

    def until(self, condition: Callable[[], bool]) -> None:
        """Answer the door until something is true."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, self.events
            self.events += self.listener.wait(0.02, lambda _: LIMIT)

    def count(self, kind: type[Event]) -> int:
        """How many events of a kind there were."""
        return sum(isinstance(event, kind) for event in self.events)

    def messages(self, link: int) -> list[bytes]:
        """What a call has said."""
        return [
            event.message
            for event in self.events
            if isinstance(event, Received) and event.link == link
        ]

    def closed(self) -> list[int]:
        """The calls that have ended."""
        return [event.link for event in self.events if isinstance(event, Closed)]


@pytest.fixture
def door() -> Iterator[Door]:
    """A door with eight places."""
    with contextlib.ExitStack() as stack:
        yield Door(stack, 8)


def test_calls_have_numbers_and_messages(door: Door) -> None:
    """Each call is told apart, and both directions work."""
    first, one = door.call()
    second, other = door.call(NEIGHBOUR)
    assert first != second
    other.sendall(framed(b"soup"))
    one.sendall(framed(b"salad"))
    door.until(lambda: door.count(Received) == 2)
    assert (door.messages(first), door.messages(second)) == ([b"salad"], [b"soup"])
    assert [event.peer.host for event in door.events if isinstance(event, Connected)] == [
        "127.0.0.1",
        NEIGHBOUR,
    ]
    door.listener.send(second, b"thanks")
    assert other.recv(100) == framed(b"thanks")


def test_one_message_at_a_time(door: Door) -> None:
    """The second is read only after whoever drives the door has seen the first."""
    link, caller = door.call()
    caller.sendall(framed(b"1") + framed(b"2"))
    door.until(lambda: door.count(Received) == 1)
    assert door.messages(link) == [b"1"]
    door.until(lambda: door.count(Received) == 2)
    assert door.messages(link) == [b"1", b"2"]


def test_whoever_hangs_up_is_reported(door: Door) -> None:
    """With a reason in words; sending to him afterwards does nothing."""
    link, caller = door.call()
    caller.close()
    door.until(lambda: door.closed() == [link])
    door.listener.send(link, b"hello?")
    door.listener.hang_up(link)
    assert "closed the connection" in str(door.events[-1])


def test_a_message_that_is_too_long_ends_the_call(door: Door) -> None:
    """At its announcement."""
    link, caller = door.call()
    caller.sendall((LIMIT + 1).to_bytes(4, "big"))
    door.until(lambda: door.closed() == [link])
    assert "1 to 1000 are allowed" in str(door.events[-1])
    assert caller.recv(10) == b""


def test_our_last_words_are_out_before_the_line_is_closed(door: Door) -> None:
    """Also when they do not fit into the kernel's buffers and the other side reads late."""
    words = bytes(20_000_000)
    link, caller = door.call()
    caller.sendall(b"something that nobody will read")
    door.listener.send(link, words)
    door.listener.hang_up(link)
    got = 0
    while data := caller.recv(1 << 20):
        got += len(data)
        door.events += door.listener.wait(0, lambda _: LIMIT)
    assert got == len(framed(words))
    assert door.count(Received) == 0


def test_what_does_not_fit_goes_out_while_the_call_goes_on(door: Door) -> None:
    """Sending waits for nobody, and the other side may go on talking."""
    words = bytes(20_000_000)
    link, caller = door.call()
    door.listener.send(link, words)
    caller.sendall(framed(b"go on"))
    got = bytearray()
    while len(got) < len(framed(words)):
        door.events += door.listener.wait(0, lambda _: LIMIT)
        got += caller.recv(1 << 20)
    assert bytes(got) == framed(words)
    door.until(lambda: door.messages(link) == [b"go on"])


def test_finish_waits_for_last_words_but_not_for_ever(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who does not listen is left after a moment; nobody is let in any more."""
    monkeypatch.setattr(pairing_net, "LINGER", 0.3)
    words = bytes(20_000_000)
    link, deaf = door.call()
    polite_link, polite = door.call()
    waiting = door.dial()
    door.listener.send(link, words)
    door.listener.send(polite_link, b"bye")
    door.listener.hang_up(link)
    door.listener.hang_up(polite_link)
    door.listener.finish()
    assert polite.recv(100) == framed(b"bye")
    got = 0
    with contextlib.suppress(ConnectionResetError):
        while data := deaf.recv(1 << 20):
            got += len(data)
    assert got < len(words)
    with contextlib.suppress(ConnectionResetError):
        assert waiting.recv(10) == b""


def test_a_newcomer_takes_the_place_of_the_longest_silent(door: Door) -> None:
    """Of his own address, if that has its share; whoever has spoken keeps his place."""
    links = [door.call()[0] for _ in range(pairing_net.PER_ADDRESS)]
    neighbours = [door.call(NEIGHBOUR) for _ in range(pairing_net.PER_ADDRESS)]
    neighbours[0][1].sendall(framed(b"I am somebody"))
    door.until(lambda: door.count(Received) == 1)
    door.call(NEIGHBOUR)
    assert door.closed() == [neighbours[1][0]]
    door.call()
    assert door.closed() == [neighbours[1][0], links[0]]
    door.call("127.0.0.3")  # all places are taken, by others
    assert door.closed() == [neighbours[1][0], links[0], links[1]]
    assert "had to make room" in str(door.events[-2])


def test_where_all_have_spoken_a_newcomer_is_turned_away() -> None:
    """Nobody who is talking to us is thrown out."""
    with contextlib.ExitStack() as stack:
        door = Door(stack, 2)
        for _ in range(2):
            door.call()[1].sendall(framed(b"hello"))
        door.until(lambda: door.count(Received) == 2)
        late = door.dial()
        late.settimeout(0.01)

        def is_over() -> bool:
            try:
                return late.recv(1) == b""
            except TimeoutError:
                return False

        door.until(is_over)
        assert door.count(Connected) == 2
        assert door.closed() == []


def test_two_hundred_silent_callers_cost_little_and_stop_nobody(door: Door) -> None:
    """They fill the places, never more, and somebody with a message gets through at once."""
    tracemalloc.start()
    try:
        for number in range(200):
            door.call(f"127.0.1.{number % 5 + 1}")
        link, caller = door.call(NEIGHBOUR)
        caller.sendall(framed(b"I have something to say"))
        door.until(lambda: door.messages(link) != [])
        open_calls = door.count(Connected) - door.count(Closed)
        assert open_calls == len(door.listener._calls) == 8
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()


def test_those_who_are_seen_off_are_few_as_well(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hanging up politely is no way to keep our descriptors busy."""
    monkeypatch.setattr(pairing_net, "LEAVING", 3)
    for _ in range(6):
        link, _ = door.call()
        door.listener.hang_up(link)
    assert len(door.listener._leaving) == 3
    monkeypatch.setattr(pairing_net, "LINGER", 0)
    door.listener.hang_up(door.call()[0])
    door.until(lambda: len(door.listener._leaving) == 2)


def test_somebody_who_never_stops_sending_is_left_too(
    door: Door, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What he sends after the end is dropped, for a moment."""
    monkeypatch.setattr(pairing_net, "LINGER", 0.1)
    link, caller = door.call()
    door.listener.hang_up(link)
    caller.settimeout(0.01)
    with pytest.raises(ConnectionError):  # noqa: PT012 - he sends until it fails
        for _ in range(100_000):
            with contextlib.suppress(TimeoutError):
                caller.sendall(bytes(1 << 16))
            door.events += door.listener.wait(0, lambda _: LIMIT)
    assert door.listener._leaving == {}


def test_a_port_that_is_taken_is_replaced() -> None:
    """Two people may pair on one machine at once."""
    port = free_port()
    with PairingListener(port=port) as first, PairingListener(port=port) as second:
        assert first.port == port
        assert second.port not in {0, port}


def test_a_port_that_may_not_be_used_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told with the number and a hint."""

    def forbidden(_host: str, _port: int) -> socket.socket:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(pairing_net, "listen", forbidden)
    with pytest.raises(IoError, match=r"listen on port 80: Permission denied\. Ports below"):
        PairingListener(port=80)


def test_running_out_of_descriptors_is_survived(
    door: Door, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The caller waits in the kernel until there is room again."""
    problems = [OSError(errno.EMFILE, "Too many open files"), BlockingIOError()]
    real = door.listener._listener

    class Failing:
        def accept(self) -> tuple[socket.socket, object]:
            if problems:
                raise problems.pop(0)
            return real.accept()

        def __getattr__(self, name: str) -> object:
            return getattr(real, name)

    monkeypatch.setattr(door.listener, "_listener", Failing())
    door.call()
    assert "Too many open files" in caplog.text
    assert problems == []
