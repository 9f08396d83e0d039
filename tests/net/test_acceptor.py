"""The acceptor: whoever says hello comes in, whoever does not holds up nobody."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from potluck.messages import Join, Peer
from potluck.net import acceptor as acceptor_module
from potluck.net import tcp
from potluck.net.acceptor import Acceptor
from potluck.net.frames import HEADER_SIZE, MAX_CONTROL, Kind, encode
from potluck.net.identity import NodeIdentity
from potluck.net.namespace import NetworkNamespace
from potluck.net.opening import hello_frame
from potluck.net.secure_socket import OpeningSocket
from potluck.net.security import Security
from support.reception import HONEST, Reception, bare, last_words, open_reception
from support.threads import eventually

HELLO = hello_frame(HONEST)


@pytest.fixture
def reception() -> Iterator[Reception]:
    """An open door."""
    with open_reception() as one:
        yield one


def refusal(data: bytes) -> str:
    """The sentence of a refusal frame."""
    assert data[3] == Kind.REFUSAL
    return data[HEADER_SIZE:].decode()


# -- callers who come in ---------------------------------------------------------------------------


def test_whoever_says_hello_comes_in(reception: Reception) -> None:
    """Its message is handed on as it was sent."""
    join = Join(rank=1, world_size=2, peer=Peer(["10.0.0.5"], 29500, "desk"))
    reception.call(hello_frame(join))
    assert reception.hellos.get(timeout=30) == join
    reception.call_honestly()


def test_a_slow_hello_is_a_hello(reception: Reception) -> None:
    """Byte by byte, while others come and go."""
    slow = reception.call()
    for index, byte in enumerate(HELLO):
        slow.sendall(bytes([byte]))
        if index % 20 == 0:
            reception.call_honestly()
    assert reception.hellos.get(timeout=30) == HONEST
    assert last_words(slow)[HEADER_SIZE:]


def test_what_follows_a_hello_is_left_to_its_owner() -> None:
    """The acceptor reads the first frame and not a byte more."""
    taken: list[socket.socket] = []
    arrived = threading.Event()

    def receive(sock: OpeningSocket, _: bytes) -> None:
        taken.append(bare(sock))
        arrived.set()

    with contextlib.closing(Acceptor(tcp.listen("127.0.0.1", 0), receive)) as acceptor:
        with socket.create_connection(("127.0.0.1", acceptor.port)) as caller:
            caller.sendall(HELLO + b"and more")
            assert arrived.wait(30)
        with taken[0] as sock:
            sock.settimeout(30)
            assert last_words(sock) == b"and more"


def test_the_connection_survives_the_acceptor() -> None:
    """Closing the door does not throw out those who are in."""
    taken: list[socket.socket] = []
    acceptor = Acceptor(tcp.listen("127.0.0.1", 0), lambda sock, _: taken.append(bare(sock)))
    with socket.create_connection(("127.0.0.1", acceptor.port), timeout=30) as caller:
        caller.sendall(HELLO)
        eventually(lambda: bool(taken))
        acceptor.close()
        with taken[0] as sock:
            sock.sendall(b"still here")
            assert caller.recv(100) == b"still here"


# -- faults of our own -----------------------------------------------------------------------------


def test_a_fault_in_answering_one_caller_closes_the_door_to_nobody(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is logged in full, that caller is hung up on, and the next one comes in."""
    came: list[bytes] = []

    def receive(sock: OpeningSocket, hello: bytes) -> None:
        came.append(hello)
        if len(came) == 1:
            raise KeyError("soup")
        bare(sock).close()

    with contextlib.closing(Acceptor(tcp.listen("127.0.0.1", 0), receive)) as acceptor:
        for _ in range(2):
            with socket.create_connection(("127.0.0.1", acceptor.port), timeout=30) as caller:
                caller.sendall(HELLO)
                assert last_words(caller) == b""
        eventually(lambda: len(came) == 2)
    assert "KeyError: 'soup'" in caplog.text


def test_a_caller_that_cannot_be_answered_is_hung_up_on(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of descriptors, for instance; the door stays open."""

    def refused(*_: object) -> None:
        raise OSError(24, "Too many open files")

    security = Security(NetworkNamespace.generate("lab"), NodeIdentity.ephemeral())
    notes: list[str] = []
    door = Acceptor(
        tcp.listen("127.0.0.1", 0),
        lambda *_: None,
        security,
        note=lambda error: notes.append(error.message),
    )
    with contextlib.closing(door) as acceptor:
        where = ("127.0.0.1", acceptor.port)
        with monkeypatch.context() as patch:
            patch.setattr(security, "answer_channel", refused)
            with socket.create_connection(where, timeout=30) as caller:
                assert last_words(caller) == b""
        with socket.create_connection(where, timeout=30) as caller:
            caller.sendall(b"no TLS")
            assert last_words(caller) == b""
    assert "could not answer" in caplog.text
    assert "does not speak TLS" in "".join(notes)


# -- callers who do not ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n   ",
        bytes(HEADER_SIZE),
        b"\xff" * 1000,
        encode(Kind.HELLO, length=MAX_CONTROL + 1),
        encode(Kind.HELLO, length=2**32 - 1),
        encode(Kind.DATA, length=1 << 20),
        encode(Kind.EAGER, length=1),
        encode(Kind.TOKEN),
        encode(Kind.WELCOME),
        encode(Kind.REFUSAL, length=2) + b"no",
        encode(Kind.GOODBYE),
    ],
)
def test_garbage_is_hung_up_on_at_once(reception: Reception, data: bytes) -> None:
    """Without an answer, and before what it announces has come."""
    begin = time.monotonic()
    assert last_words(reception.call(data)) == b""
    assert time.monotonic() - begin < acceptor_module.PATIENCE
    assert reception.hellos.empty()
    reception.call_honestly()


@pytest.mark.parametrize("version", [0, 2, 255])
def test_another_version_gets_a_sentence(reception: Reception, version: int) -> None:
    """It names both versions as the caller sees them, and the remedy."""
    data = bytearray(HELLO)
    data[2] = version
    sentence = refusal(last_words(reception.call(bytes(data))))
    assert f"this node speaks protocol version 1, you speak {version};" in sentence
    assert "install the same version" in sentence


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", HELLO[HEADER_SIZE:] + b"\0", b"\x82\xa4type\xa4join\xa1x" + b"\x91" * 60_000],
)
def test_a_hello_that_makes_no_sense_gets_a_sentence(reception: Reception, payload: bytes) -> None:
    """Half a message, too much of one, or brackets without end; the acceptor goes on."""
    caller = reception.call(encode(Kind.HELLO, length=len(payload)) + payload)
    assert refusal(last_words(caller)) == "this hello cannot be understood"
    reception.call_honestly()


def test_what_a_stranger_says_cannot_forge_the_log(
    reception: Reception, caplog: pytest.LogCaptureFixture
) -> None:
    """Some errors quote him; each refusal stays one printable line."""
    caplog.set_level("INFO")
    evil = msgspec.msgpack.encode({"type": "x\nrefused nobody: \x1b[2J"})
    for data in (encode(Kind.HELLO, length=len(evil)) + evil, b"\x1b[2J\nGET / HTTP/1.1\n\n" * 3):
        last_words(reception.call(data))
    eventually(lambda: len(caplog.messages) >= 2)
    assert all(line.isprintable() for line in caplog.messages)


def test_a_receiver_that_meets_a_broken_connection_harms_nobody_else(
    reception: Reception,
) -> None:
    """A caller may vanish between its hello and the answer."""
    welcome = reception.acceptor.receive

    def receive(sock: OpeningSocket, _: bytes) -> None:
        reception.acceptor.receive = welcome
        sock.shutdown(socket.SHUT_WR)
        sock.sendall(b"welcome")

    reception.acceptor.receive = receive
    assert last_words(reception.call(HELLO)) == b""
    reception.call_honestly()


def test_callers_that_hang_up_leave_no_trace(reception: Reception) -> None:
    """Before a word, or in the middle of one."""
    for words in (b"", HELLO[:10], HELLO[:-1]):
        reception.call(words).close()
    reception.call_honestly()
    eventually(lambda: not reception.acceptor._callers)


# -- closing ---------------------------------------------------------------------------------------


def test_closing_ends_the_thread_and_every_socket(reception: Reception) -> None:
    """Those in the middle of a hello are hung up on, and the port is free again."""
    callers = [reception.call(HELLO[:size]) for size in (0, 10, 40)]
    eventually(lambda: len(reception.acceptor._callers) == len(callers))
    open_sockets = [caller.sock for caller in reception.acceptor._callers.values()]
    reception.acceptor.close()
    assert not reception.acceptor._thread.is_alive()
    assert all(last_words(caller) == b"" for caller in callers)
    assert all(sock.fileno() == -1 for sock in open_sockets)
    assert reception.acceptor._listener.fileno() == -1
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(reception.address)
    tcp.listen(*reception.address).close()
    reception.acceptor.close()  # again does nothing


@pytest.mark.parametrize("calls", [0, 3])
def test_closing_leaves_no_descriptor_behind(calls: int) -> None:
    """A node that joins and leaves all day does not run out of them."""
    process = psutil.Process()
    before = process.num_fds()
    with open_reception() as one:
        for _ in range(calls):
            one.call_honestly()
    assert process.num_fds() == before


def test_the_receiver_can_be_exchanged(reception: Reception) -> None:
    """Who answers may change while the door is open."""
    seen: list[bytes] = []

    def receive(sock: OpeningSocket, payload: bytes) -> None:
        seen.append(payload)
        sock.close()

    reception.acceptor.receive = receive
    caller = reception.call(HELLO)
    assert last_words(caller) == b""
    assert seen == [HELLO[HEADER_SIZE:]]
