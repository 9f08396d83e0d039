"""Attacks on a group that forms: crowds that drip and stall, members that pose as others."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from potluck import HandshakeRefused, NetworkNamespace, NodeIdentity, TcpBackend
from potluck._types import NodeId
from potluck.backend.lanes import OpenConnection, dial_lane
from potluck.backend.mesh import MeshBackend
from potluck.net.opening import await_answer, exchange_hello
from potluck.net.secure_socket import OpeningSocket, Security
from potluck.net.tcp import make_poller
from potluck.net.tls import NodeMismatch
from potluck.trust.membership_store import TrustStore
from potluck.wire_messages import Join, OpenReply, OpenRequest, RankEndpoint, Table
from support.newcomers import dial, is_open, meet, start_rank_0
from support.place import Place
from support.ranks import Ranks, new_master, start_together
from support.threads import PATIENCE, Background, eventually
from support.tls_pair import client_hello
from support.victims import logging_to_stderr

CROWD = 200
PAUSE = 0.05  # seconds between two turns of the crowd
USUALLY = 3  # at most so many times as long as without a crowd …
AND = 2.0  # … and so many seconds: both sides of the comparison share a busy machine


def join_two(ranks: Ranks, master: str) -> float:
    """Let ranks 1 and 2 come."""
    started = ranks.start(meet, 3, ranks=[1, 2], master=master)
    start_together(started)
    return max(float(process.value()) for process in started)


class Caller:
    """One of a crowd: says a few bytes each turn; hung up on, it calls again."""

    def __init__(self, master: str, source: str, step: int) -> None:
        self._address, self._port = master.rsplit(":", 1)
        self._source = source
        self._step = step
        self._line = self._dial()

    def _dial(self) -> socket.socket:
        self._rest = client_hello()
        there = self._address, int(self._port)
        line = socket.create_connection(there, PATIENCE, source_address=(self._source, 0))
        line.setblocking(False)
        return line

    def take_turn(self) -> None:
        """Say the next bytes, or call again."""
        try:
            self._line.sendall(self._rest[: self._step])
            self._rest = self._rest[self._step :]
            if self._line.recv(1 << 16):  # our part of the handshake, to which nothing is said
                return
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        self.hang_up()
        with contextlib.suppress(ConnectionError):  # the group is complete and gone
            self._line = self._dial()

    def hang_up(self) -> None:
        """Leave."""
        self._line.close()


@contextlib.contextmanager
def crowd(master: str, step: int) -> Iterator[None]:
    """Two hundred callers, half of them from the honest ranks' own address, until this is left."""
    over = threading.Event()
    callers = [Caller(master, f"127.0.0.{1 + 8 * (n % 2)}", step) for n in range(CROWD)]

    def misbehave() -> None:
        while not over.wait(PAUSE):
            for caller in callers:
                caller.take_turn()

    background = Background(misbehave)
    try:
        yield
    finally:
        over.set()
        background.result()
        for caller in callers:
            caller.hang_up()


@pytest.mark.parametrize("step", [1, 1000], ids=["a byte at a time", "half a handshake"])
def test_a_crowd_does_not_keep_honest_ranks_waiting(ranks: Ranks, step: int) -> None:
    """They join within their usual time; rank 0 says whom it sent away, and why."""
    master = new_master()
    zero = start_rank_0(ranks, master, 3)
    quiet = join_two(ranks, master)
    zero.value()
    master = new_master()
    zero = start_rank_0(ranks, master, 3)
    before = len(zero.log)
    with crowd(master, step):
        taken = join_two(ranks, master)
        zero.value()
    assert taken < USUALLY * quiet + AND
    assert "too many callers" in zero.log[before:]


# --- members that pose as others ---

WORDS = "eleven blue kettles hum beside a frozen lake"


def lab() -> NetworkNamespace:
    """A namespace in which whoever knows the passphrase may take part, whatever its key."""
    return NetworkNamespace.from_passphrase("lab", WORDS)


def receive_from_1(place: Place) -> str:
    """Form a group, and show that rank 1 is the one who can send as rank 1."""
    with (
        logging_to_stderr(),
        TcpBackend(0, 3, place.master, timeout=PATIENCE, namespace=lab()) as backend,
    ):
        inbox = bytearray(6)
        backend.recv(inbox, 1, timeout=PATIENCE)
        return inbox.decode()


class Member:
    """A member with a key of its own that says what the test wants."""

    def __init__(self, master: str) -> None:
        self._master = master
        self.security = Security(lab(), NodeIdentity.ephemeral())
        self.id = self.security.me

    def dial(self, expected: str = "") -> OpeningSocket:
        """A connection to rank 0 on which both have proved who they are."""
        line = dial(self._master)
        with closed_on_error(line):
            return self.security.dial(line, "rank 0", soon(), NodeId(expected) or None)

    def join(self, rank: int, claimed: str) -> OpeningSocket:
        """Ask for a rank, in the name of some node."""
        peer = RankEndpoint(hosts=["127.0.0.1"], port=1, name="somewhere", node=claimed)
        line = self.dial()
        with closed_on_error(line):
            exchange_hello(line, Join(rank=rank, world_size=3, peer=peer), OpenReply, soon())
        return line

    def open_lane(self, table: Table, rank: int, purpose: str = "messages") -> OpenConnection:
        """Connect as a rank."""
        line = self.dial(table.peers[0].node)
        lane = OpenRequest(table.session, rank, 0, purpose)
        with closed_on_error(line):
            return dial_lane(line, lane, TrustStore(self.security), soon())


@contextlib.contextmanager
def closed_on_error(line: OpeningSocket) -> Iterator[None]:
    """Whoever is refused leaves."""
    try:
        yield
    except BaseException:
        line.close()
        raise


def soon() -> float:
    """A deadline that only something that hangs misses."""
    return time.monotonic() + PATIENCE


def test_a_member_cannot_pose_as_another(ranks: Ranks) -> None:
    """Neither take its rank nor its id, nor speak in its place; the group forms all the same."""
    master = new_master()
    (zero,) = ranks.start(receive_from_1, 3, ranks=[0], master=master)
    eventually(lambda: is_open(master))
    honest, double = Member(master), Member(master)
    with contextlib.closing(honest.join(1, honest.id)) as waiting:
        with pytest.raises(HandshakeRefused, match="rank 1 is already here"):
            double.join(1, honest.id)
        with contextlib.closing(double.join(2, claimed=honest.id)):
            table = await_answer(waiting, Table, soon())
    assert [peer.node for peer in table.peers[1:]] == [honest.id, double.id]
    with pytest.raises(HandshakeRefused, match="another node joined as rank 1"):
        double.open_lane(table, 1)
    with pytest.raises(NodeMismatch, match=f"instead of .*{honest.id}"):
        double.dial(expected=honest.id)
    first, second = honest.open_lane(table, 1), double.open_lane(table, 2)
    with pytest.raises(HandshakeRefused, match=r"another node joined as rank|is complete"):
        double.open_lane(table, 1, "everything")
    with contextlib.closing(second.sock), MeshBackend(1, 3, make_poller()) as mesh:
        mesh.add_link(0, first.stream(), first.seal, first.first)
        mesh.send(b"honest", 0, timeout=PATIENCE)
        assert zero.value() == "honest"
    for reason in ("rank 1 is already here", "another node joined as rank 1"):
        assert re.search(f"refused .*{double.id}.*{reason}", zero.log)
    assert f"node {honest.id}" not in zero.log
