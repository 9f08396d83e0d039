"""The acceptor: whoever says hello comes in, whoever does not holds up nobody."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import queue
import resource
import socket
import ssl
import subprocess
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple, Self
from unittest import mock

import msgspec
import psutil
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck._version import THIS_BUILD, Build
from potluck.errors import DistributedError, HandshakeRefused
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.node import NodeIdentity, machine_name
from potluck.net import listener as acceptor_module
from potluck.net import tcp
from potluck.net.addresses import Address
from potluck.net.frames import HEADER_SIZE, MAX_CONTROL, FrameType, encode, encode_opening
from potluck.net.listener import (
    ADDRESS,
    MEMBERS,
    SLOTS,
    SLOTS_PER_HOST,
    STRANGERS,
    THREADS,
    Acceptor,
    Handshakes,
    IncomingConnection,
    source_of,
    whom_to_drop,
)
from potluck.net.opening import (
    Greeting,
    HandshakeAction,
    HandshakeStep,
    answer,
    ask,
    exchange_hello,
    hello_frame,
    opening_frame,
)
from potluck.net.secure_socket import OpeningSocket, SecureSocket, Security
from potluck.net.tls import Authority, KeyGroup, TlsChannel, peer_public_key, read_hello
from potluck.trust.pairing_net import SERVICE, _Answers
from potluck.wire_messages import Join, OpenReply, OpenRequest, RankEndpoint, Sync
from support.hellos import drop
from support.hostile_hellos import EXPENSIVE, hostile_hello, kinds
from support.reception import HONEST, Reception, bare, last_words, open_reception
from support.threads import Background, eventually
from support.tls_pair import CALLED, CALLER, client_hello, open_pair, pair, stranger
from support.tls_pair import LAB as TLS_PAIR_LAB

HELLO = hello_frame(HONEST)


@pytest.fixture
def reception() -> Iterator[Reception]:
    """An open door."""
    with open_reception() as one:
        yield one


def refusal(data: bytes) -> str:
    """The sentence of a refusal frame."""
    assert data[3] == FrameType.REFUSAL
    return data[HEADER_SIZE:].decode()


# -- callers who come in ---------------------------------------------------------------------------


def test_whoever_says_hello_comes_in(reception: Reception) -> None:
    """Its message is handed on as it was sent."""
    join = Join(rank=1, world_size=2, peer=RankEndpoint(["10.0.0.5"], 29500, "desk"))
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


def test_a_fault_in_a_conversation_closes_the_door_to_nobody(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That caller is forgotten at once."""
    monkeypatch.setattr(acceptor_module, "PATIENCE", 60)
    with hall() as one:  # it has nothing to say
        with contextlib.closing(one.call()) as sock:
            sock.sendall(ACCEPTOR_CONVERSATIONS_HELLO)
            assert last_words(bare(sock.hand_over()[0])) == b""
        eventually(lambda: not one.acceptor._callers)
        one.turns = (HandshakeStep(HandshakeAction.GRANT),)
        with contextlib.closing(one.call()) as sock:
            assert listen(sock, ACCEPTOR_CONVERSATIONS_HELLO).kind is FrameType.WELCOME
    assert "IndexError: pop from empty list" in caplog.text


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
        encode(FrameType.HELLO, length=MAX_CONTROL + 1),
        encode(FrameType.HELLO, length=2**32 - 1),
        encode(FrameType.DATA, length=1 << 20),
        encode(FrameType.EAGER, length=1),
        encode(FrameType.TOKEN),
        encode(FrameType.WELCOME),
        encode(FrameType.REFUSAL, length=2) + b"no",
        encode(FrameType.GOODBYE),
    ],
)
def test_garbage_is_hung_up_on_at_once(reception: Reception, data: bytes) -> None:
    """Without an answer, and before what it announces has come."""
    begin = time.monotonic()
    assert last_words(reception.call(data)) == b""
    assert time.monotonic() - begin < acceptor_module.PATIENCE
    assert reception.hellos.empty()
    reception.call_honestly()


def test_another_version_gets_a_sentence(reception: Reception) -> None:
    """It names both versions, and the machine to upgrade."""
    newer = Build("9.8.7", THIS_BUILD.protocol + 2, THIS_BUILD.protocol + 1)
    hello = encode_opening(FrameType.HELLO, piece=0, length=3, build=newer) + b"???"
    sentence = refusal(last_words(reception.call(hello)))
    me = machine_name()
    assert f"{me} runs {THIS_BUILD}, 127.0.0.1 Potluck 9.8.7 (protocols 2 to 3)" in sentence
    assert f"Upgrade {me}: type `pip install --upgrade potluck` there." in sentence
    reception.call_honestly()


@pytest.mark.parametrize("layout", [0, 2, 255])
def test_a_hello_in_another_layout_is_understood(reception: Reception, layout: int) -> None:
    """What opens a connection looks the same in every version."""
    data = bytearray(hello_frame(HONEST))
    data[2] = layout
    reception.call(bytes(data))
    assert reception.hellos.get(timeout=30) == HONEST


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xc1", HELLO[HEADER_SIZE:] + b"\0", b"\x82\xa4type\xa4join\xa1x" + b"\x91" * 60_000],
)
def test_a_hello_that_makes_no_sense_gets_a_sentence(reception: Reception, payload: bytes) -> None:
    """Half a message, too much of one, or brackets without end; the acceptor goes on."""
    caller = reception.call(encode(FrameType.HELLO, length=len(payload)) + payload)
    assert refusal(last_words(caller)) == "this hello cannot be understood"
    reception.call_honestly()


def test_what_a_stranger_says_cannot_forge_the_log(
    reception: Reception, caplog: pytest.LogCaptureFixture
) -> None:
    """Some errors quote him; each refusal stays one printable line."""
    caplog.set_level("INFO")
    evil = msgspec.msgpack.encode({"type": "x\nrefused nobody: \x1b[2J"})
    for data in (
        encode(FrameType.HELLO, length=len(evil)) + evil,
        b"\x1b[2J\nGET / HTTP/1.1\n\n" * 3,
    ):
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


# --------------------------------------------------------------------------------------------------
# Callers at the door: who makes room for whom.


@pytest.fixture
def line() -> Iterator[socket.socket]:
    """Something to be connected by."""
    one, other = socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        yield one


def crowd(line: socket.socket, **sizes: int) -> list[IncomingConnection]:
    """So many callers from each address."""
    return [
        IncomingConnection(line, host, port)
        for host, count in sizes.items()
        for port in range(count)
    ]


def newcomer(line: socket.socket, host: str, *, is_known: bool = False) -> IncomingConnection:
    """One more."""
    return IncomingConnection(line, host, 99, is_known=is_known)


def test_nobody_goes_while_there_is_room(line: socket.socket) -> None:
    """Up to the last place, also when many come from one address."""
    callers = crowd(line, desk=SLOTS_PER_HOST - 1, lamp=SLOTS - SLOTS_PER_HOST)
    assert whom_to_drop(callers, newcomer(line, "desk")) is None
    assert whom_to_drop(callers, newcomer(line, "sofa")) is None


def test_one_address_has_a_bounded_number_of_places(line: socket.socket) -> None:
    """Its next caller takes the place of its first."""
    callers = crowd(line, lamp=1, desk=SLOTS_PER_HOST)
    assert whom_to_drop(callers, newcomer(line, "desk")) == (
        callers[1],
        "too many callers from its address",
    )
    assert whom_to_drop(callers, newcomer(line, "lamp")) is None


def test_the_address_with_most_callers_makes_room(line: socket.socket) -> None:
    """Not the one who has waited longest of all: that may be an honest one with a slow link."""
    callers = crowd(line, sofa=1, desk=SLOTS // 2 - 1, lamp=SLOTS // 2)
    assert whom_to_drop(callers, newcomer(line, "attic")) == (
        callers[SLOTS // 2],
        "too many callers at once",
    )
    assert whom_to_drop(callers, newcomer(line, "lamp")) == (
        callers[SLOTS // 2],
        "too many callers at once",
    )


def test_whoever_adds_to_a_crowd_pays_for_it(line: socket.socket) -> None:
    """Of two equal crowds the one that grows."""
    callers = crowd(line, desk=SLOTS // 2, lamp=SLOTS // 2)
    assert whom_to_drop(callers, newcomer(line, "lamp")) == (
        callers[SLOTS // 2],
        "too many callers at once",
    )


def test_whoever_has_come_far_stays(line: socket.socket) -> None:
    """Those who drip go before those who shake hands, and these before members."""
    callers = crowd(line, desk=SLOTS_PER_HOST)
    member, half, drip = open_pair()[1], pair()[1], pair()[1]
    half.receive(client_hello())
    for caller in callers:
        caller.channel = member
    assert whom_to_drop(callers, newcomer(line, "desk")) == (
        callers[0],
        "too many callers from its address",
    )
    callers[5].channel = half
    callers[5].send_pending()
    assert whom_to_drop(callers, newcomer(line, "desk")) == (
        callers[5],
        "too many callers from its address",
    )
    callers[7].channel = drip
    assert whom_to_drop(callers, newcomer(line, "desk")) == (
        callers[7],
        "too many callers from its address",
    )


def test_an_address_of_members_gives_up_a_place_last(line: socket.socket) -> None:
    """Strangers from as many addresses as they like take nothing from it, nor does its crowd."""
    strangers = [IncomingConnection(line, f"10.0.0.{number}", 1) for number in range(SLOTS - 9)]
    members = [IncomingConnection(line, "desk", port, is_known=True) for port in range(9)]
    for one in ("10.0.1.1", "desk"):
        excess = whom_to_drop([*members, *strangers], newcomer(line, one))
        assert excess is not None
        assert excess[0] in strangers


def test_a_stranger_takes_no_place_from_members(line: socket.socket) -> None:
    """Where only members wait, the stranger itself is sent away."""
    members = [
        IncomingConnection(line, f"10.0.0.{number}", 1, is_known=True) for number in range(SLOTS)
    ]
    stranger = newcomer(line, "lamp")
    assert whom_to_drop(members, stranger) == (stranger, "too many callers at once")


# --------------------------------------------------------------------------------------------------
# Between hello and answer: a conversation with a member, which never holds up anybody else.

LAB = NetworkNamespace("lab", b"l" * 32, home=Path("/nowhere"))
ACCEPTOR_CONVERSATIONS_HELLO = hello_frame(Sync())
LONG = 60_000  # bytes of a roster


def roster(size: int = LONG) -> bytes:
    """A frame as long as they come."""
    return encode(FrameType.ROSTER, length=size) + bytes(size)


class Hall:
    """Says one thing after another, whatever it hears."""

    def __init__(self, *turns: HandshakeStep) -> None:
        self.turns = turns
        self.heard: queue.SimpleQueue[FrameType] = queue.SimpleQueue()
        self.granted: list[bytes] = []
        self.acceptor = Acceptor(
            tcp.listen("127.0.0.1", 0), self._receive, Security(LAB, CALLED), self._begin
        )

    def _receive(self, sock: OpeningSocket, payload: bytes) -> None:
        self.granted.append(payload)
        with contextlib.closing(sock):
            answer(sock, OpenReply(rank=3))

    def _begin(self, channel: TlsChannel, where: str) -> Talk:
        assert channel.peer == CALLER.id
        assert where.startswith("127.0.0.1:")
        return Talk(self)

    def call(self) -> SecureSocket:
        """Come in as far as TLS."""
        sock = socket.create_connection(("127.0.0.1", self.acceptor.port), timeout=30)
        try:
            secure = Security(LAB, CALLER).dial(sock, "hall", time.monotonic() + 30)
        except BaseException:
            sock.close()
            raise
        assert isinstance(secure, SecureSocket)
        return secure


class Talk:
    """With one caller."""

    def __init__(self, hall: Hall) -> None:
        self._hall = hall
        self._turns = list(hall.turns)

    def receive(self, kind: FrameType, payload: bytes) -> HandshakeStep:
        """Say what is next."""
        self._hall.heard.put(kind)
        return self._turns.pop(0)


@contextlib.contextmanager
def hall(*turns: HandshakeStep) -> Iterator[Hall]:
    """Open for the length of a test."""
    one = Hall(*turns)
    with contextlib.closing(one.acceptor):
        yield one


def listen(sock: OpeningSocket, said: bytes = b"") -> Greeting:
    """The next frame."""
    return ask(sock, time.monotonic() + 30, said)


def test_frames_go_to_and_fro_until_it_is_granted() -> None:
    """The hello is handed on as it was, and answered by whoever serves it."""
    with hall(
        HandshakeStep(HandshakeAction.LISTEN, roster()), HandshakeStep(HandshakeAction.GRANT)
    ) as one:
        with contextlib.closing(one.call()) as sock:
            greeting = listen(sock, ACCEPTOR_CONVERSATIONS_HELLO)
            assert (greeting.kind, len(greeting.payload)) == (FrameType.ROSTER, LONG)
            assert listen(sock, roster()).kind is FrameType.WELCOME
        assert one.granted == [ACCEPTOR_CONVERSATIONS_HELLO[36:]]
        assert [one.heard.get(), one.heard.get()] == [FrameType.HELLO, FrameType.ROSTER]


def test_who_is_refused_in_the_middle_is_told_why() -> None:
    """The connection ends after the sentence."""
    with hall(
        HandshakeStep(HandshakeAction.LISTEN, roster()),
        HandshakeStep(HandshakeAction.REFUSE, sentence="because"),
    ) as one:
        with contextlib.closing(one.call()) as sock:
            listen(sock, ACCEPTOR_CONVERSATIONS_HELLO)
            with pytest.raises(HandshakeRefused, match="because"):
                listen(sock, roster())
        assert one.granted == []


def test_the_last_word_arrives_before_the_end() -> None:
    """However long it is, and however late it is read."""
    last = b"".join(roster() for _ in range(100))
    with (
        hall(HandshakeStep(HandshakeAction.CLOSE, last)) as one,
        contextlib.closing(one.call()) as sock,
    ):
        sock.sendall(ACCEPTOR_CONVERSATIONS_HELLO)
        assert one.heard.get(timeout=30) is FrameType.HELLO
        for _ in range(100):
            assert len(listen(sock).payload) == LONG
        with pytest.raises(ConnectionError):
            listen(sock)


def test_who_does_not_read_holds_up_nobody() -> None:
    """What it was told waits for it alone, and it is forgotten when its time is over."""
    flood = HandshakeStep(HandshakeAction.LISTEN, b"".join(roster() for _ in range(200)))
    with hall(flood) as one, contextlib.ExitStack() as lines:
        for _ in range(3):
            deaf = lines.enter_context(contextlib.closing(one.call()))
            deaf.sendall(ACCEPTOR_CONVERSATIONS_HELLO)
            assert one.heard.get(timeout=30) is FrameType.HELLO
        eventually(lambda: len(one.acceptor._callers) == 3)
        one.turns = (HandshakeStep(HandshakeAction.GRANT),)
        with contextlib.closing(one.call()) as sock:
            assert listen(sock, ACCEPTOR_CONVERSATIONS_HELLO).kind is FrameType.WELCOME
        eventually(lambda: not one.acceptor._callers)


def test_who_reads_late_gets_all_that_was_said() -> None:
    """What found no room is sent when there is some, and the conversation goes on."""
    flood = HandshakeStep(HandshakeAction.LISTEN, b"".join(roster() for _ in range(300)))
    with (
        hall(flood, HandshakeStep(HandshakeAction.GRANT)) as one,
        contextlib.closing(one.call()) as sock,
    ):
        sock.sendall(ACCEPTOR_CONVERSATIONS_HELLO)
        assert one.heard.get(timeout=30) is FrameType.HELLO
        for _ in range(300):
            assert len(listen(sock).payload) == LONG
        assert listen(sock, roster()).kind is FrameType.WELCOME


def test_who_declines_instead_of_saying_hello_is_heard() -> None:
    """The dialler may not accept whom it has reached."""
    with hall(HandshakeStep(HandshakeAction.REFUSE, sentence="as you like")) as one:
        told = pytest.raises(HandshakeRefused, match="as you like")
        with contextlib.closing(one.call()) as sock, told:
            listen(sock, encode(FrameType.REFUSAL, length=2) + b"no")
        assert one.heard.get() is FrameType.REFUSAL


@pytest.mark.parametrize("kind", [FrameType.ROSTER, FrameType.WELCOME])
def test_no_conversation_begins_with_anything_else(kind: FrameType) -> None:
    """A roster before the hello, an answer without a question."""
    with hall() as one, contextlib.closing(one.call()) as sock:
        with pytest.raises(ConnectionError):
            listen(sock, opening_frame(kind, Sync()))
        assert one.heard.empty()


# --------------------------------------------------------------------------------------------------
# Fuzzing a live listener: whatever strangers send and however they leave, honest callers come in.
#
# Memory and sockets stay within the places the acceptor has for strangers.

ACCEPTOR_FUZZ_HELLO = hello_frame(HONEST)
BRACKETS = b"\x82\xa4type\xa4join\xa1x" + b"\x91" * 1500
NESTED = encode(FrameType.HELLO, length=len(BRACKETS)) + BRACKETS  # deeper than Python's stack
TCP_REPAIR = 19  # from <linux/tcp.h>


class Stranger(NamedTuple):
    """One that calls, says something and leaves in its way."""

    words: list[bytes]
    ending: str


headers = st.builds(
    lambda kind, length, version: (
        bytes([*b"PL", version, kind]) + encode(FrameType.HELLO, length=length)[4:]
    ),
    st.sampled_from([int(kind) for kind in FrameType]) | st.integers(0, 255),
    st.integers(0, 100) | st.integers(MAX_CONTROL - 1, MAX_CONTROL + 1) | st.integers(0, 2**32 - 1),
    st.sampled_from([1, 1, 1, 0, 2, 255]),
)
truncated = st.integers(0, len(ACCEPTOR_FUZZ_HELLO)).map(lambda size: ACCEPTOR_FUZZ_HELLO[:size])
damaged = st.tuples(st.integers(0, len(ACCEPTOR_FUZZ_HELLO) - 1), st.integers(1, 255)).map(
    lambda change: bytes(
        byte ^ (change[1] if index == change[0] else 0)
        for index, byte in enumerate(ACCEPTOR_FUZZ_HELLO)
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
        @example([Stranger([encode(FrameType.HELLO, length=2**32 - 1), bytes(1000)], "reset")])
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
                visit(
                    reception,
                    Stranger([ACCEPTOR_FUZZ_HELLO[: number % len(ACCEPTOR_FUZZ_HELLO)]], "stay"),
                )
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
    nearly = encode(FrameType.HELLO, length=MAX_CONTROL) + bytes(MAX_CONTROL - 1)
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
        for size in [*sizes, len(ACCEPTOR_FUZZ_HELLO)]:
            sock.sendall(ACCEPTOR_FUZZ_HELLO[place : place + size])
            place += size
        assert reception.hellos.get(timeout=30) == HONEST


# --------------------------------------------------------------------------------------------------
# What the acceptor grants to callers that have not said who they are: seconds and places.

ACCEPTOR_LIMITS_HELLO = hello_frame(HONEST)


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
    callers = [reception.call(ACCEPTOR_LIMITS_HELLO[:10]) for _ in range(5)]
    for early in callers[:2]:
        assert last_words(early) == b""
    for late in callers[2:]:
        late.sendall(ACCEPTOR_LIMITS_HELLO[10:])
        assert last_words(late)


def test_a_crowd_costs_nobody_else_a_place(reception: Reception) -> None:
    """Hundreds from other addresses, while one takes its time: it comes in all the same."""
    slow = reception.call(ACCEPTOR_LIMITS_HELLO[:10])
    with contextlib.ExitStack() as lines:
        for number in range(4 * acceptor_module.SLOTS):
            source = (f"127.0.0.{9 + number % 2}", 0)
            line = socket.create_connection(reception.address, 30, source_address=source)
            lines.enter_context(line)
        eventually(lambda: len(reception.acceptor._callers) >= acceptor_module.SLOTS - 1)
        slow.sendall(ACCEPTOR_LIMITS_HELLO[10:])
        assert reception.hellos.get(timeout=30) == HONEST


@pytest.mark.parametrize("words", [b"", ACCEPTOR_LIMITS_HELLO[:10], ACCEPTOR_LIMITS_HELLO[:-1]])
def test_patience_has_an_end(
    reception: Reception, monkeypatch: pytest.MonkeyPatch, words: bytes
) -> None:
    """A caller that does not finish its hello in time is hung up on."""
    monkeypatch.setattr(acceptor_module, "PATIENCE", 0.1)
    begin = time.monotonic()
    assert last_words(reception.call(words)) == b""
    assert 0.1 <= time.monotonic() - begin < 10
    assert reception.acceptor.refused == 1


def test_every_caller_that_was_sent_away_is_counted(reception: Reception) -> None:
    """One that says nonsense, one that leaves; not the one that came in."""
    assert last_words(reception.call(b"x" * HEADER_SIZE)) == b""
    reception.call().close()
    reception.call_honestly()
    eventually(lambda: reception.acceptor.refused >= 2)
    reception.acceptor.close()
    assert reception.acceptor.refused == 2


def test_a_newcomer_without_a_place_is_counted_and_costs_no_place(
    reception: Reception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where all places belong to callers of this machine, one from elsewhere is sent away."""
    caplog.set_level("INFO")
    monkeypatch.setattr(acceptor_module, "PATIENCE", 60)
    monkeypatch.setattr(acceptor_module, "SLOTS", 2)
    waiting = [reception.call() for _ in range(2)]
    eventually(lambda: len(reception.acceptor._callers) == 2)
    with socket.create_connection(reception.address, 30, ("127.0.0.9", 0)) as newcomer:
        assert last_words(newcomer) == b""
    eventually(lambda: reception.acceptor.refused == 1)
    assert "too many callers at once" in caplog.text
    for caller in waiting:
        caller.sendall(ACCEPTOR_LIMITS_HELLO)
        assert last_words(caller)


def test_callers_that_may_cost_nothing_are_turned_away_with_one_line_in_ten_seconds(
    reception: Reception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The line says how many there were since the last one."""
    clock = Clock()
    times = SimpleNamespace(monotonic=clock, thread_time=time.thread_time)
    monkeypatch.setattr(acceptor_module, "time", times)
    monkeypatch.setattr(Handshakes, "admit", lambda *_, **__: False)
    for count, pause in enumerate((0, 3, 6, 1, 9.5, 0.5), start=1):
        clock.now += pause
        with contextlib.suppress(ConnectionResetError):
            assert last_words(reception.call()) == b""
        eventually(lambda: reception.acceptor.refused == count)  # noqa: B023
    lines = [line for line in caplog.messages if line.startswith("turned away")]
    assert [line.split(",")[0] for line in lines] == [
        "turned away 1 callers",
        "turned away 3 callers",
        "turned away 2 callers",
    ]
    assert "127.0.0.1" in lines[0]


@pytest.mark.parametrize("what", ["a call", "a word"])
def test_an_address_pays_for_what_its_callers_cost(
    what: str, reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its next caller is turned away; one from elsewhere is heard."""
    cost, spent = 0.0, 0.0

    def thread_time() -> float:
        nonlocal spent
        spent += cost
        return spent

    times = SimpleNamespace(monotonic=time.monotonic, thread_time=thread_time)
    monkeypatch.setattr(acceptor_module, "time", times)
    monkeypatch.setattr(acceptor_module, "PATIENCE", 60.0)  # nobody is refused for being slow

    def call(host: str) -> socket.socket:
        return socket.create_connection(reception.address, 30, source_address=(host, 0))

    with contextlib.ExitStack() as calls:
        caller = calls.enter_context(call("127.0.0.2"))
        reception.call_honestly()  # from here on the other one has been let in
        cost = 100.0
        if what == "a call":
            calls.enter_context(call("127.0.0.2"))
        else:
            caller.sendall(ACCEPTOR_LIMITS_HELLO[:1])
        reception.call_honestly()
        cost = 0.0
        with contextlib.suppress(ConnectionResetError), call("127.0.0.2") as late:
            assert late.recv(1) == b""
        eventually(lambda: reception.acceptor.refused == 1)
        with call("127.0.0.3") as other:
            other.sendall(ACCEPTOR_LIMITS_HELLO)
            assert other.recv(1)


def test_a_byte_now_and_then_does_not_extend_the_time(
    reception: Reception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time is for the whole hello."""
    monkeypatch.setattr(acceptor_module, "PATIENCE", 0.1)
    caller = reception.call(encode(FrameType.HELLO, length=MAX_CONTROL))
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
    reception.call(ACCEPTOR_LIMITS_HELLO)
    assert entered.wait(30)
    reception.acceptor.receive = welcome
    monkeypatch.setattr(acceptor_module, "SLOTS", 1)
    late = reception.call()
    early.sendall(ACCEPTOR_LIMITS_HELLO[:10])
    go_on.set()
    assert last_words(early) == b""
    late.sendall(ACCEPTOR_LIMITS_HELLO)
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
            caller.sendall(ACCEPTOR_LIMITS_HELLO)
            eventually(lambda: "could not accept a connection" in caplog.text)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert last_words(caller).endswith(b"\xa4rank\0")
    assert reception.hellos.get(timeout=30) == HONEST


# --------------------------------------------------------------------------------------------------
# Everything that reads what a stranger sent: whatever he sends, it is refused in our own words.
#
# The parsers, and where each is fed with arbitrary and with damaged bytes:
#
# * TLS records and handshakes: ``test_tls.py``; the name a caller gives in them: here
# * certificates: here
# * frame headers: ``test_frames.py``; the first frame of a connection: ``test_opening.py``,
#   ``test_acceptor_fuzz.py``; refusals, as whoever dials reads them: ``test_opening_refusals.py``
# * hellos and the answers to them: ``tests/test_wire_messages.py``
# * messages of a pairing: ``tests/trust/test_pairing_protocol.py``, ``test_pairing.py``
# * answers to a search: ``test_pairing_discovery.py`` and here
# * rosters: ``tests/trust/test_roster_records.py``

CERTIFICATE = (
    Authority.of(TLS_PAIR_LAB)
    .issue(Ed25519PublicKey.from_public_bytes(CALLER.public_key))
    .public_bytes(Encoding.DER)
)


def spliced(data: bytes) -> st.SearchStrategy[bytes]:
    """The same bytes with others put in their place, or added, or some left out."""
    places = st.tuples(st.integers(0, len(data)), st.integers(0, 40))
    return st.builds(
        lambda place, noise: data[: place[0]] + noise + data[place[0] + place[1] :],
        places,
        st.binary(max_size=40),
    )


@given(st.binary(max_size=600) | spliced(CERTIFICATE))
@example(b"")
@example(b"\x30\x84\xff\xff\xff\xff")  # a length of four gigabytes
def test_any_certificate_is_ours_or_refused(der: bytes) -> None:
    """A key of 32 bytes, or our error; whatever the bytes claim to be."""
    conversation = mock.Mock(spec=ssl.SSLObject)
    conversation.getpeercert.return_value = der
    with warnings.catch_warnings(), contextlib.suppress(HandshakeRefused):
        warnings.simplefilter("ignore")  # of the library, about certificates it calls unusual
        assert len(peer_public_key(conversation)) == 32


def first_flight(name: str | None) -> bytes:
    """How a stranger opens TLS when he names a server; b"" if no program would say it."""
    outgoing = ssl.MemoryBIO()
    try:
        tls = stranger(server_side=False).wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname=name)
    except (TypeError, ValueError):
        return b""
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    return outgoing.read()


names = st.text(max_size=300) | st.text("0123456789abcdef.-", min_size=1, max_size=250)


@given(names)
@example(TLS_PAIR_LAB.discovery_tag)
@example(TLS_PAIR_LAB.discovery_tag[:-1])
@example("a" * 255)
def test_whatever_server_a_stranger_names_he_has_to_prove_himself(name: str) -> None:
    """The tag only says which secret he means; naming ours does not show that he has it."""
    channel = Security(TLS_PAIR_LAB, CALLED).answer_channel("somebody")
    assert channel is not None
    with contextlib.suppress(DistributedError):
        channel.receive(first_flight(name))
    assert not channel.handshake_done
    with pytest.raises(DistributedError):
        channel.receive_eof()


BEFORE_MEMBERSHIP_HELLO = first_flight(TLS_PAIR_LAB.discovery_tag)


@given(spliced(BEFORE_MEMBERSHIP_HELLO))
def test_a_damaged_opening_is_refused_in_our_words(data: bytes) -> None:
    """The name, its length, the extension around it: nothing else is raised, nothing granted."""
    channel = Security(TLS_PAIR_LAB, CALLED).answer_channel("somebody")
    assert channel is not None
    with contextlib.suppress(DistributedError):
        channel.receive(data)
    assert not channel.handshake_done


labels_like_ours = st.builds(
    "{}-{}".format, st.text("0123456789٣", max_size=3), st.text("0123456789abcdef", max_size=13)
)


@given(st.lists(st.text(max_size=80) | labels_like_ours, max_size=5))
def test_any_name_may_answer_a_search(labels: list[str]) -> None:
    """Only those of our form come through, with a number that can be compared."""
    answers = _Answers()
    for label in labels:
        answers(name=f"{label}.{SERVICE}", service_type=SERVICE)
    while (found := answers.next_label(0)) is not None:
        assert 0 <= int(found[1][1]) < 1 << 32


# --------------------------------------------------------------------------------------------------
# Strangers at the door: what each may cost, and that no member waits behind them.

HANDSHAKES_HELLO = OpenRequest(session=b"s" * 16, rank=1, to=0)


@contextlib.contextmanager
def open_door() -> Iterator[Acceptor]:
    """A door of the namespace ``LAB`` that lets in all members."""

    def welcome(sock: OpeningSocket, _: bytes) -> None:
        answer(sock, OpenReply(rank=0))
        sock.close()

    with contextlib.closing(
        Acceptor(tcp.listen("127.0.0.1", 0), welcome, Security(TLS_PAIR_LAB, CALLED))
    ) as door:
        yield door


def come_in(door: Acceptor, source: str = "127.0.0.1", within: float = 30.0) -> None:
    """Connect as a member does, once."""
    deadline = time.monotonic() + within
    with socket.create_connection(
        ("127.0.0.1", door.port), within, source_address=(source, 0)
    ) as sock:
        secure = Security(TLS_PAIR_LAB, CALLER).dial(sock, "door", deadline)
        assert exchange_hello(secure, HANDSHAKES_HELLO, OpenReply, deadline) == OpenReply(rank=0)


class Flood:
    """Callers from some addresses that send hellos as fast as they can, until it is over."""

    def __init__(self, port: int, sources: list[str], hellos: list[bytes]) -> None:
        self._target = Address("127.0.0.1", port)
        self._hellos = itertools.cycle(hellos)
        self._over = threading.Event()
        self.sent = 0
        self._threads = [threading.Thread(target=self._run, args=[one]) for one in sources]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _run(self, source: str) -> None:
        while not self._over.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection(self._target, 5, source_address=(source, 0)) as sock,
            ):
                sock.sendall(next(self._hellos))
                self.sent += 1
                sock.settimeout(5)
                sock.recv(1 << 16)


def cpu_of_hello(hello: bytes) -> float:
    """Seconds of CPU that a server spends on one first message: the least of a few."""
    security = Security(TLS_PAIR_LAB, CALLED)
    for group in KeyGroup:  # the contexts are there, as in a process that has been called before
        security._find(read_hello(hostile_hello({KeyGroup.X25519: "X25519"}.get(group, "P-256"))))
    return min(_cpu_once(security, hello) for _ in range(5))


def _cpu_once(security: Security, hello: bytes) -> float:
    channel = security.answer_channel("stranger")
    assert channel is not None
    begin = time.thread_time()
    with contextlib.suppress(Exception):
        channel.receive(hello)
    return time.thread_time() - begin


def test_no_hello_costs_more_than_one_that_a_member_sends() -> None:
    """Whatever group, list or extension a stranger chooses: it is cheap or it is refused."""
    usual = max(cpu_of_hello(hostile_hello(name)) for name in ("X25519", "P-256"))
    for name, hello in kinds():
        assert cpu_of_hello(hello) < 3 * usual + 0.0005, name


@pytest.mark.parametrize("group", EXPENSIVE)
def test_a_group_other_than_x25519_and_p256_is_refused(group: str) -> None:
    """With a share of it, and with a hello that asks to be asked for one."""
    with open_door() as door:
        for has_share in (True, False):
            with socket.create_connection(("127.0.0.1", door.port), 30) as sock:
                sock.sendall(hostile_hello(group, has_share=has_share))
                sock.settimeout(30)
                said = sock.recv(1 << 16)
                assert said[0] == 21, "an alert, not an answer"
                assert sock.recv(100) == b""


@pytest.mark.parametrize(
    ("groups", "is_spoken_to"),
    [
        ("X25519", True),
        ("P-256", True),
        ("ffdhe8192:X25519", True),
        ("P-521:P-256", True),
        ("ffdhe8192", False),
        ("ffdhe2048", False),
        ("P-521", False),
        ("P-384", False),
        ("X448", False),
    ],
)
def test_openssl_gets_the_group_that_we_choose_or_none(groups: str, *, is_spoken_to: bool) -> None:
    """The client of OpenSSL, which knows all groups; it has no certificate and comes no further."""
    with open_door() as door:
        said = subprocess.run(
            ["openssl", "s_client", "-connect", f"127.0.0.1:{door.port}", "-groups", groups],
            input=b"",
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert (b"Server Temp Key" in said.stdout) == is_spoken_to, said.stdout
        assert b"DH, " not in said.stdout.replace(b"ECDH, ", b"")
        come_in(door)


def test_every_member_comes_in_while_strangers_flood_the_door() -> None:
    """Members that were here before, and ones that come for the first time, on the first try."""
    with open_door() as door:
        come_in(door, "127.0.0.30")
        hellos = [hello for _, hello in kinds()]
        sources = [f"127.0.0.{number}" for number in range(9, 13)]
        with Flood(door.port, sources, hellos) as flood:
            eventually(lambda: flood.sent > 50)
            for number in range(6):
                come_in(door, "127.0.0.30")
                come_in(door, f"127.0.0.{40 + number}")
        assert door.refused > 0


def test_one_expensive_caller_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should cryptography take long after all, it takes long for that caller."""
    stuck, go_on = threading.Event(), threading.Event()
    take = acceptor_module.IncomingConnection.take

    def take_long(caller: acceptor_module.IncomingConnection, data: bytes) -> None:
        if caller.host == "127.0.0.9":
            stuck.set()
            assert go_on.wait(60)
        take(caller, data)

    monkeypatch.setattr(acceptor_module.IncomingConnection, "take", take_long)
    with open_door() as door, contextlib.ExitStack() as lines:
        for _ in range(2 * THREADS):
            line = socket.create_connection(
                ("127.0.0.1", door.port), 30, source_address=("127.0.0.9", 0)
            )
            lines.enter_context(line).sendall(hostile_hello("X25519"))
        assert stuck.wait(30)
        come_in(door)
        come_in(door, "127.0.0.31")
        go_on.set()


def test_a_caller_that_waits_for_its_turn_too_long_is_hung_up_on(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With the reason in the log: its handshake was not made in time."""
    caplog.set_level("INFO")
    stuck, go_on, clock = threading.Event(), threading.Event(), Clock()
    times = SimpleNamespace(monotonic=clock, thread_time=time.thread_time)
    monkeypatch.setattr(acceptor_module, "time", times)

    def take(*_: object) -> None:
        stuck.set()
        _pass(go_on)

    monkeypatch.setattr(IncomingConnection, "take", take)
    with open_door() as door:
        where = ("127.0.0.1", door.port)
        with socket.create_connection(where, 30, ("127.0.0.9", 0)) as line:
            line.sendall(hostile_hello("X25519"))
            assert stuck.wait(30)
            clock.now += acceptor_module.PATIENCE
            socket.create_connection(where, 30).close()  # so that the acceptor looks
            assert last_words(line) == b""
        go_on.set()
    assert "its address used more CPU time than strangers may have" in caplog.text


# -- allowances ------------------------------------------------------------------------------------


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """What time it is."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The time of the allowances."""
    one = Clock()
    monkeypatch.setattr("potluck.net.listener.time.monotonic", one)
    return one


@pytest.fixture
def desk() -> Iterator[Handshakes]:
    """Handshakes without workers: nothing is submitted."""
    with contextlib.closing(Handshakes(lambda: None)) as one:
        yield one


def test_an_address_that_has_cost_too_much_waits(desk: Handshakes, clock: Clock) -> None:
    """And is heard again when it has earned it."""
    desk.charge("10.0.0.9", ADDRESS.burst * 0.9)
    assert desk.admit("10.0.0.9")
    desk.charge("10.0.0.9", ADDRESS.burst * 0.2)
    assert not desk.admit("10.0.0.9")
    assert desk.admit("10.0.0.8")
    clock.now += 0.5 * ADDRESS.burst / ADDRESS.share
    assert desk.admit("10.0.0.9")


def test_strangers_together_have_an_allowance_that_newcomers_do_not_wait_for(
    desk: Handshakes, clock: Clock
) -> None:
    """Those who made it run out wait; one who has cost next to nothing does not."""
    crowd = [f"10.0.1.{number}" for number in range(20)]
    for one in crowd:
        desk.charge(one, STRANGERS.burst / 15)
    assert not any(desk.admit(one) for one in crowd)
    assert desk.admit("10.0.0.8")


def test_whoever_proves_itself_gets_back_what_it_paid(desk: Handshakes, clock: Clock) -> None:
    """A hundred members from one address use up nothing."""
    for _ in range(100):
        desk.charge("10.0.0.5", ADDRESS.burst / 20)
        desk.proved("10.0.0.5", ADDRESS.burst / 20)
    assert desk.admit("10.0.0.5")
    assert desk.admit("10.0.0.9")
    desk.charge("10.0.0.9", STRANGERS.burst * 0.9)  # nothing of it was used by the members
    assert desk.admit("10.0.0.8")


def test_nothing_is_saved_up_by_costing_nothing(desk: Handshakes, clock: Clock) -> None:
    """Neither by time nor by what is given back: the next burst is as short as the first."""
    desk.charge("10.0.0.9", -100.0)
    clock.now += 1000
    desk.charge("10.0.0.9", ADDRESS.burst)
    assert desk.admit("10.0.0.9")
    desk.charge("10.0.0.9", 0.01)
    assert not desk.admit("10.0.0.9")
    for number in range(10):
        desk.charge(f"10.0.1.{number}", STRANGERS.burst / 10)
    assert not desk.admit("10.0.1.0")


def test_an_allowance_is_earned_again_as_time_passes(desk: Handshakes, clock: Clock) -> None:
    """At its share: not sooner, not later."""
    desk.charge("10.0.0.9", 2 * ADDRESS.burst)
    clock.now += 0.99 * ADDRESS.burst / ADDRESS.share
    assert not desk.admit("10.0.0.9")
    clock.now += 0.02 * ADDRESS.burst / ADDRESS.share
    assert desk.admit("10.0.0.9")


def test_an_address_of_members_is_always_heard(desk: Handshakes, clock: Clock) -> None:
    """Also when strangers call from it, and when others have used up everything."""
    desk.proved("10.0.0.5", 0.0)
    desk.charge("10.0.0.9", 100.0)
    desk.charge("10.0.0.5", 100 * MEMBERS.burst)
    assert desk.admit("10.0.0.5")
    assert not desk.admit("10.0.0.9")


def test_a_machine_that_calls_itself_frees_none_of_its_neighbours(
    desk: Handshakes, clock: Clock
) -> None:
    """Of IPv6 a network counts as one address, and this machine is in one."""
    own, neighbour = "fd00:1::7", "fd00:1::8"
    assert desk.admit(source_of(own, called=own), is_local=True)
    desk.charge(source_of(neighbour, called=own), 10.0)
    assert not desk.admit(source_of(neighbour, called=own))
    assert desk.admit(source_of(own, called=own), is_local=True)


def test_what_is_remembered_of_addresses_is_bounded(desk: Handshakes, clock: Clock) -> None:
    """Strangers are forgotten before members."""
    desk.proved("10.0.0.5", 0.0)
    for number in range(3 * acceptor_module.SOURCES):
        desk.charge(f"stranger {number}", 0.0)
    assert len(desk._sources) <= acceptor_module.SOURCES
    assert desk.is_known("10.0.0.5")


def _pass(gate: threading.Event) -> None:
    assert gate.wait(30)


def run_all(order: list[str], steps: list[tuple[str, Callable[[], None]]]) -> list[str]:
    """Let a worker take steps in its order, all waiting before the first one is taken."""
    gate = threading.Event()
    with contextlib.closing(Handshakes(lambda: None)) as desk:
        desk.proved("member", 0.0)
        desk.charge("flood", ADDRESS.burst * 0.9)
        for number in range(acceptor_module.THREADS):
            desk.admit(f"gate {number}", is_local=True)
            desk.submit(f"gate {number}", None, lambda: _pass(gate))
        eventually(lambda: not desk._queue)
        for source, work in steps:
            desk.submit(source, source, work)
        gate.set()
        eventually(lambda: len(order) == len(steps))
    return order


def test_members_come_first_then_who_has_cost_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order in which they called."""
    monkeypatch.setattr(acceptor_module, "THREADS", 2)  # so that strangers have one worker
    order: list[str] = []
    lock = threading.Lock()

    def note(name: str) -> Callable[[], None]:
        def work() -> None:
            with lock:
                order.append(name)

        return work

    steps = [("flood", note("flood"))] * 3 + [("newcomer", note("newcomer"))]
    seen = run_all(order, [*steps, ("member", note("member"))])
    assert set(seen[:2]) == {"member", "newcomer"}
    assert seen[2:] == ["flood"] * 3


def test_strangers_leave_one_worker_free_for_members() -> None:
    """However many of them call, and from however many addresses."""
    gate, done = threading.Event(), threading.Event()
    begun: list[str] = []

    def hold(name: str) -> Callable[[], None]:
        def work() -> None:
            begun.append(name)
            _pass(gate)

        return work

    with contextlib.closing(Handshakes(lambda: None)) as desk:
        desk.proved("member", 0.0)
        for number in range(2 * THREADS):
            desk.submit(f"stranger {number}", None, hold(f"stranger {number}"))
        eventually(lambda: len(begun) == THREADS - 1)
        desk.submit("member", None, done.set)
        assert done.wait(30)
        assert len(begun) == THREADS - 1
        gate.set()
        eventually(lambda: len(begun) == 2 * THREADS)


def test_one_unknown_address_has_one_worker_at_a_time() -> None:
    """Its next step waits for the one before, while another address is served."""
    gate, other = threading.Event(), threading.Event()
    begun: list[str] = []

    def note(name: str) -> Callable[[], None]:
        def work() -> None:
            begun.append(name)
            _pass(gate)

        return work

    with contextlib.closing(Handshakes(lambda: None)) as desk:
        for name in ("first", "second"):
            desk.submit("10.0.0.9", None, note(name))
        eventually(lambda: begun == ["first"])
        desk.submit("10.0.0.8", None, other.set)
        assert other.wait(30)
        assert begun == ["first"]
        gate.set()
        eventually(lambda: begun == ["first", "second"])


def test_two_workers_never_choose_the_same_unknown_address() -> None:
    """However they are woken."""
    running, most = 0, 0
    lock = threading.Lock()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.001)  # so that another one could begin meanwhile
        with lock:
            running -= 1

    done: list[object] = []
    with contextlib.closing(Handshakes(lambda: done.append(None))) as desk:
        for count in range(2, 101, 2):
            for _ in range(2):
                desk.submit("10.0.0.9", None, work)
            eventually(lambda: len(done) == count)  # noqa: B023
    assert most == 1


def test_workers_without_work_end_and_others_take_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As often as it happens."""
    monkeypatch.setattr(acceptor_module, "IDLE", 0.01)
    workers: list[threading.Thread] = []
    with contextlib.closing(Handshakes(lambda: None)) as desk:
        for number in range(2 * THREADS):
            desk.submit("10.0.0.9", number, lambda: workers.append(threading.current_thread()))
            eventually(lambda: len(workers) > number and not workers[-1].is_alive())  # noqa: B023
        assert [step.owner for step in desk.finished()] == [*range(2 * THREADS)]
    assert len(set(workers)) == 2 * THREADS


def test_what_goes_wrong_in_a_step_comes_back_with_it() -> None:
    """To be judged by the one who attends to the caller."""
    woken = threading.Event()
    with contextlib.closing(Handshakes(woken.set)) as desk:
        desk.submit("10.0.0.9", "caller", [].pop)
        assert woken.wait(30)
        (step,) = desk.finished()
        assert step.owner == "caller"
        assert isinstance(step.error, IndexError)
        assert desk.finished() == []


def test_an_address_pays_for_the_steps_that_are_made_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the CPU time of the worker; one of this machine pays nothing."""
    ticks = itertools.count()
    times = SimpleNamespace(monotonic=lambda: 1000.0, thread_time=lambda: next(ticks) * 0.3)
    monkeypatch.setattr(acceptor_module, "time", times)
    woken = threading.Semaphore(0)
    with contextlib.closing(Handshakes(woken.release)) as desk:
        desk.admit("here", is_local=True)
        for source in ("10.0.0.9", "10.0.0.9", "here", "here", "here"):
            assert desk.admit(source)
            desk.submit(source, None, lambda: None)
            assert woken.acquire(timeout=30)
        assert not desk.admit("10.0.0.9")
        assert desk.admit("here")
        assert [round(step.cpu, 3) for step in desk.finished()] == [0.3] * 5


def test_a_step_that_was_forgotten_is_not_made() -> None:
    """The caller has gone; what waits for others at its address is done."""
    gate = threading.Event()
    done: list[str] = []
    with contextlib.closing(Handshakes(lambda: None)) as desk:
        desk.submit("10.0.0.9", "first", lambda: _pass(gate))
        desk.submit("10.0.0.9", "gone", lambda: done.append("gone"))
        desk.submit("10.0.0.9", "stays", lambda: done.append("stays"))
        desk.forget("10.0.0.9", "gone")
        desk.forget("10.0.0.8", "unknown")
        gate.set()
        eventually(lambda: done == ["stays"])
    assert [step.owner for step in desk.finished()] == ["first", "stays"]
