"""The door of a complete group: further lanes for its members, and not any number of them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from unittest import mock

import pytest
from msgspec import structs

from potluck import NetworkNamespace, SecurityWarning, TcpBackend
from potluck._platform import CAN_SHARE_MEMORY
from potluck.backend import lanes
from potluck.backend.lanes import OpenConnection, answer_lane, dial_lane
from potluck.errors import HandshakeRefused, MalformedFrame
from potluck.net import unix_socket
from potluck.net.addresses import Address
from potluck.net.opening import RefusedForNow, answer, await_answer, exchange_hello
from potluck.net.secure_socket import OpeningSocket, Security
from potluck.net.unix_socket import UnixSocketOffer
from potluck.trust.connect import OutgoingCall, dial
from potluck.trust.membership_store import TrustStore
from potluck.wire_messages import OpenReply, OpenRequest, Table, UnixSocketHint
from support.doors import socket_pair
from support.group_machines import soon
from support.ranks import new_master
from support.sealed_pair import record_keys
from support.shortcuts import shortcuts
from support.threads import eventually, together


class Group:
    """Two ranks in this process, and a program of rank 1's node that knows their session."""

    def __init__(self, backends: list[TcpBackend], namespace: NetworkNamespace) -> None:
        self.zero, self.one = backends
        self.table: Table = self.one.table
        self.members = TrustStore(Security(namespace))

    def dial(self) -> OpeningSocket:
        """A connection to rank 0 that has asked for nothing yet."""
        where = Address("127.0.0.1", self.table.peers[0].port)
        return dial(self.members, OutgoingCall(where, soon()))

    def hello(self, purpose: str) -> OpenRequest:
        """Rank 1 asks for a lane."""
        return OpenRequest(self.table.session, 1, 0, purpose)

    def open(self, purpose: str) -> OpenConnection:
        """Rank 1 opens a lane."""
        line = self.dial()
        try:
            return dial_lane(line, self.hello(purpose), self.members, soon())
        except BaseException:
            line.close()
            raise

    @contextlib.contextmanager
    def half_open(self, purpose: str) -> Iterator[OpeningSocket]:
        """A lane that rank 0 has granted, and of which rank 1 says nothing more."""
        with contextlib.closing(self.dial()) as line:
            hello = OpenRequest(self.table.session, 1, 0, purpose, bytes(32))
            exchange_hello(line, hello, OpenReply, soon())
            yield line


@pytest.fixture
def group() -> Iterator[Group]:
    """A group that works."""
    namespace, master = NetworkNamespace.generate("lab"), new_master()
    backends = together(*[partial(TcpBackend, n, 2, master, namespace=namespace) for n in (0, 1)])
    with contextlib.ExitStack() as stack:
        for backend in backends:
            stack.enter_context(backend)
        yield Group(backends, namespace)


def answering() -> int:
    """How many threads are busy with lanes."""
    return sum(thread.name == "potluck-lane" for thread in threading.enumerate())


def test_a_rank_that_is_far_ahead_is_sent_away_and_comes_again(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a lane is granted: none is open on one side alone, and nothing is lost by waiting."""
    monkeypatch.setattr(lanes, "AHEAD", 3)
    with contextlib.ExitStack() as stack:
        for number in range(3):
            stack.callback(group.open(f"{number}").sock.close)
        with pytest.raises(RefusedForNow, match="too many connections of rank 1 are waiting"):
            group.open("3")
        taken = group.zero.open_stream(1, "0", soon(), lambda: None)
        stack.callback(taken.stream.close)
        stack.callback(group.open("3").sock.close)


def test_whoever_stalls_takes_few_threads_and_hinders_nobody(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that begins lanes and never finishes them."""
    monkeypatch.setattr(lanes, "AT_ONCE", 4)
    with contextlib.ExitStack() as stack:
        for number in range(4):
            stack.enter_context(group.half_open(f"{number}"))
        assert answering() == 4
        with pytest.raises(RefusedForNow, match="too many"), group.half_open("4"):
            pass
        assert answering() == 4
        group.zero.send(b"soup", 1)
        dish = bytearray(4)
        group.one.recv(dish, 0)
        assert dish == b"soup"
    eventually(lambda: answering() == 0)
    group.open("5").sock.close()


def test_a_lane_that_is_granted_after_the_end_is_closed(group: Group) -> None:
    """Nobody will ever ask for it."""
    with group.half_open("late") as line:
        group.zero.close()
        bare, _ = line.release(soon())  # type: ignore[union-attr]
        bare.settimeout(30)
        assert bare.recv(1) == b""


def test_a_system_without_threads_to_give_is_no_reason_to_close_the_door(
    group: Group, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller may come again."""
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", _no_thread)
        with pytest.raises(RefusedForNow, match="cannot start another thread"):
            group.open("first")
    group.open("second").sock.close()


def _no_thread(_: threading.Thread) -> None:
    msg = "can't start new thread"
    raise RuntimeError(msg)


def test_a_stranger_to_the_group_gets_no_lane(group: Group) -> None:
    """A member that does not know its session, or asks for what the group has already."""
    for session, purpose, reason in (
        (bytes(16), "more", "another group"),
        (group.table.session, "messages", "already connected"),
    ):
        with (
            contextlib.closing(group.dial()) as line,
            pytest.raises(HandshakeRefused, match=reason),
        ):
            dial_lane(line, OpenRequest(session, 1, 0, purpose), group.members, soon())


# --------------------------------------------------------------------------------------------------
# Lanes between two nodes: keys that no other has, and shortcuts that both sides have taken.

SESSION = b"the same session"  # what names a group; otherwise it is new each time


def form(namespace: NetworkNamespace, size: int) -> None:
    """Let a group form, pass a barrier and end, all in this process."""
    master = new_master()

    def take_part(rank: int) -> None:
        with TcpBackend(rank, size, master, namespace=namespace) as backend:
            backend.barrier()

    together(*[partial(take_part, rank) for rank in range(size)])


def test_every_connection_and_direction_has_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same nodes, ranks, secret and group, twice: the two ends of a direction share one."""
    keys = record_keys(monkeypatch)
    namespace, chance = NetworkNamespace.generate("lab"), os.urandom
    drawn = mock.patch("os.urandom", lambda size: SESSION if size == len(SESSION) else chance(size))
    with shortcuts("off"), drawn:
        for _ in range(2):
            form(namespace, 3)
    connections = 2 * 3
    assert len(keys) == connections * 2 * 2
    assert all(keys.count(key) == 2 for key in keys)
    assert len(set(keys)) == connections * 2


HELLO = OpenRequest(session=SESSION, rank=1, to=0)


@pytest.fixture
def nobody() -> TrustStore:
    """In clear nobody is asked who it is."""
    with pytest.warns(SecurityWarning):
        return TrustStore(Security(NetworkNamespace.insecure()))


@pytest.mark.parametrize(
    ("setting", "expected", "words"),
    [("on", ConnectionError, "not where"), ("off", MalformedFrame, "not offered")],
    ids=["offered", "not offered"],
)
def test_a_dialler_waits_for_nobody_who_only_says_that_it_took_the_shortcut(
    nobody: TrustStore, setting: str, expected: type[Exception], words: str
) -> None:
    """The lie costs the liar its lane, and the dialler no time."""
    dialler, called = socket_pair()
    with shortcuts(setting), dialler, called:
        answer(called, OpenReply(0, by_shortcut=True))
        with pytest.raises(expected, match=words):
            dial_lane(dialler, HELLO, nobody, time.monotonic() + 3600)


def test_an_odd_offer_changes_nothing(nobody: TrustStore) -> None:
    """The lane is opened over TCP."""
    dialler, called = socket_pair()
    hello = structs.replace(HELLO, shortcut=UnixSocketHint(b"/run/some.sock", bytes(32), []))
    with shortcuts(), dialler, called:
        assert answer_lane(called, hello, nobody, time.monotonic() + 30).sock is called


@pytest.mark.skipif(not CAN_SHARE_MEMORY, reason="this platform shares no memory")
@pytest.mark.parametrize(
    ("purpose", "setting", "shares"),
    [("collectives/0", "on", True), ("collectives/0", "off", False), ("messages", "on", False)],
)
def test_only_connections_for_collectives_share_memory(
    nobody: TrustStore, purpose: str, setting: str, *, shares: bool
) -> None:
    """Whatever a dialler asks for, and only if neither side has turned it off."""
    dialler, called = socket_pair()
    switch = mock.patch.dict(os.environ, {unix_socket.MEMORY_SWITCH: setting})
    with shortcuts(), switch, dialler, called, contextlib.ExitStack() as stack:
        offer = UnixSocketOffer.over(dialler)
        assert offer is not None
        stack.callback(offer.close)
        hello = structs.replace(HELLO, purpose=purpose, shortcut=offer.message, shares_memory=True)

        def dial_by_hand() -> bool:
            opened = await_answer(dialler, OpenReply, soon())
            local = stack.enter_context(offer.accept())
            if opened.shares_memory:
                shared = unix_socket.share_memory(local, soon(), is_dialler=True)
                assert shared is not None
                shared.close()
            return opened.shares_memory

        def answer_by_hand() -> bool:
            opened = answer_lane(called, hello, nobody, soon())
            stack.callback(opened.close)
            return opened.shared is not None

        assert together(dial_by_hand, answer_by_hand) == [shares, shares]
