"""Opening a data lane: both sides give half of its keys inside TLS, then leave TLS behind."""

from __future__ import annotations

import collections
import contextlib
import os
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from msgspec import structs

from potluck._types import NodeId
from potluck.errors import MalformedFrame, NoConnection
from potluck.net import unix_socket
from potluck.net.addresses import Address
from potluck.net.aead import (
    SECRET_SIZE,
    CipherSpeeds,
    Decryptor,
    Encryptor,
    choose_cipher,
    derive_keys,
    local_speeds,
    seal_context,
)
from potluck.net.opening import answer, refuse
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.tcp import LocalStream, SocketStream, TcpStream, peer_address
from potluck.net.unix_socket import SharedMemory, UnixSocketOffer
from potluck.trust.admission import AdmissionRefused
from potluck.trust.connect import Declined, open_any, say_hello
from potluck.trust.membership_store import TrustStore
from potluck.wire_messages import CipherRates, OpenReply, OpenRequest, RankEndpoint

COLLECTIVES = "collectives"
"""What the purposes of lanes begin with that carry arrays: they may share memory."""


@dataclass(frozen=True, slots=True)
class OpenConnection:
    """A connection that is open for frames."""

    sock: socket.socket
    seal: tuple[Encryptor, Decryptor] | None = None
    """None on a connection in clear, and within one machine."""
    first: bytes = b""
    """What came right behind the end of TLS."""
    where: str = ""
    """On a shortcut, whose socket does not tell: the address of the other end."""
    shared: SharedMemory | None = None
    """On a shortcut: memory for what is large."""

    def stream(self) -> SocketStream:
        """Its bytes."""
        if not self.where:
            return TcpStream(self.sock)
        return LocalStream(self.sock, self.where, self.shared)

    def close(self) -> None:
        """Close it, unused."""
        self.sock.close()
        if self.shared is not None:
            self.shared.close()


def dial_lane(
    sock: OpeningSocket, hello: OpenRequest, members: TrustStore, deadline: float
) -> OpenConnection:
    """Ask for a lane on a connection we made, and offer a shortcut if there may be one."""
    if isinstance(sock, SecureSocket):
        hello = structs.replace(hello, share=os.urandom(SECRET_SIZE), speeds=_speeds())
    offer = UnixSocketOffer.over(sock)
    if offer is None:
        return _dial(sock, hello, members, deadline, None)
    with contextlib.closing(offer):
        shares = _may_share_memory(hello)
        hello = structs.replace(hello, shortcut=offer.message, shares_memory=shares)
        return _dial(sock, hello, members, deadline, offer)


def _dial(
    sock: OpeningSocket,
    hello: OpenRequest,
    members: TrustStore,
    deadline: float,
    offer: UnixSocketOffer | None,
) -> OpenConnection:
    opened = say_hello(sock, hello, OpenReply, members, deadline)
    if opened.by_shortcut:
        if offer is None:
            raise MalformedFrame("The peer accepted a shortcut that was not offered")
        local, shares = offer.accept(), hello.shares_memory and opened.shares_memory
        return _leave(sock, local, _share(local, deadline, is_dialler=True) if shares else None)
    if not isinstance(sock, SecureSocket):
        return OpenConnection(sock)
    bare, first = sock.release(deadline)
    return OpenConnection(
        bare, _keys(hello, opened, (members.me, sock.peer), initiator=True), first
    )


def answer_lane(
    sock: OpeningSocket, hello: OpenRequest, members: TrustStore, deadline: float
) -> OpenConnection:
    """Accept an incoming connection of a peer that belongs to the group."""
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    local = unix_socket.take(hello.shortcut, sock)
    if local is not None:
        try:
            shares = hello.shares_memory and _may_share_memory(hello)
            answer(sock, OpenReply(hello.to, by_shortcut=True, shares_memory=shares))
            unix_socket.await_dialler(local, sock, deadline)
        except BaseException:
            local.close()
            raise
        return _leave(sock, local, _share(local, deadline, is_dialler=False) if shares else None)
    if not isinstance(sock, SecureSocket):
        answer(sock, OpenReply(rank=hello.to))
        return OpenConnection(sock)
    opened = OpenReply(hello.to, os.urandom(SECRET_SIZE), _speeds())
    answer(sock, opened)
    keys = _keys(hello, opened, (sock.peer, members.me), initiator=False)
    bare, first = sock.release(deadline)
    return OpenConnection(bare, keys, first)


def _may_share_memory(hello: OpenRequest) -> bool:
    return hello.purpose.startswith(COLLECTIVES) and unix_socket.may_share_memory()


def _share(local: socket.socket, deadline: float, *, is_dialler: bool) -> SharedMemory | None:
    try:
        return unix_socket.share_memory(local, deadline, is_dialler=is_dialler)
    except BaseException:
        local.close()
        raise


def _leave(
    sock: OpeningSocket, local: socket.socket, shared: SharedMemory | None
) -> OpenConnection:
    """Both are at the shortcut: the connection over which they met has done its part."""
    where = peer_address(sock)
    sock.close()
    return OpenConnection(local, where=where, shared=shared)


def _speeds() -> CipherRates:
    mine = local_speeds()
    return CipherRates(mine.aes_256_gcm, mine.chacha20_poly1305, mine.aes_128_ocb)


def _keys(
    hello: OpenRequest, opened: OpenReply, nodes: tuple[str, str], *, initiator: bool
) -> tuple[Encryptor, Decryptor]:
    """The lane's keys, bound to the group, to both nodes and ranks, and to the purpose."""
    if not len(hello.share) == len(opened.share) == SECRET_SIZE:
        raise MalformedFrame("The peer did not send its half of the keys")
    context = seal_context(
        connection=hello.session,
        epoch=0,
        initiator=f"{nodes[0]}/{hello.rank}",
        responder=f"{nodes[1]}/{hello.to}",
        lane=hello.purpose,
    )
    speeds = [CipherSpeeds(*structs.astuple(side.speeds)) for side in (hello, opened)]
    return derive_keys(
        hello.share,
        opened.share,
        context=context,
        initiator=initiator,
        cipher=choose_cipher(*speeds),
    )


# --------------------------------------------------------------------------------------------------
# The way to a rank: its addresses are dialled, again and again, until it opens a lane.

ANSWER_WITHIN = 8.0
"""Seconds for the answer to a hello: longer than a lane may wait for its view to be known."""

PAUSE, LONGEST_PAUSE = 0.02, 0.25
"""Seconds between two rounds through a peer's addresses: doubling, with jitter."""


@dataclass(frozen=True, slots=True)
class DialTarget:
    """Whom to dial, and for how long."""

    members: TrustStore
    peer: RankEndpoint
    """Where it is, best address first; its node has to answer, unless that is empty."""
    deadline: float
    look: Callable[[], None] = lambda: None
    """Called while waiting; raises when trying makes no sense any more."""
    hold: Callable[[OpeningSocket], None] = lambda _: None
    """Gets the connection while it opens, to be able to end it from another thread."""

    @property
    def addresses(self) -> list[Address]:
        """Where to try."""
        return [Address(host, self.peer.port) for host in self.peer.hosts]


def open_lane(hello: OpenRequest, route: DialTarget) -> OpenConnection:
    """Open a lane to the rank that ``hello`` names; the one way to do so, for every purpose."""
    failure: Exception | None = None
    pause = PAUSE
    while time.monotonic() < route.deadline:
        try:
            return _open_once(hello, route)
        except Declined:
            raise
        except (OSError, MalformedFrame) as error:
            if failure is None or not isinstance(error, TimeoutError):
                failure = error  # that the last try had no time left tells nobody anything
        route.look()
        time.sleep(pause * random.uniform(0.5, 1.5))  # noqa: S311 - jitter
        pause = min(LONGEST_PAUSE, pause * 2)
    peer, where = route.peer, ", ".join(map(str, route.addresses))
    raise NoConnection(
        f"Rank {hello.rank} could not connect to rank {hello.to} on {peer.name} ({where})",
        rank=hello.to,
        host=peer.name,
        cause=str(failure) if failure else "the time ran out",
        hint="Check that the two machines can reach each other and no firewall blocks them.",
    )


def _open_once(hello: OpenRequest, route: DialTarget) -> OpenConnection:
    def say(sock: OpeningSocket) -> OpenConnection:
        route.hold(sock)
        soon = min(route.deadline, time.monotonic() + ANSWER_WITHIN)
        return dial_lane(sock, hello, route.members, soon)

    node = NodeId(route.peer.node) if route.peer.node else None
    return open_any(route.members, route.addresses, route.deadline, node, route.look, say)


# --------------------------------------------------------------------------------------------------
# The door of a complete group: its members may open further lanes, and nobody else anything.

MESSAGES = "messages"
"""The purpose of the first lane between two ranks."""

AHEAD = 64
"""Lanes that a rank may open ahead of us, one for each group that it uses before we do."""

AT_ONCE = 16
"""Lanes of one rank that are answered at the same time, each by a thread."""

Deliver: TypeAlias = Callable[[int, str, OpenConnection], None]
"""(rank, purpose, the lane it has opened)"""


class ConnectionAcceptor:
    """Answers hellos for further connections.

    Each hello is answered on a short-lived thread of its own, so that no peer delays another.  A
    rank that is too far ahead of us is refused before it is answered, and asks again.
    ``judge`` decides which peers may connect, ``answer`` accepts the connection, and ``waiting``
    returns how many connections of a rank have not been asked for yet.
    """

    def __init__(
        self,
        judge: Callable[[OpeningSocket, OpenRequest], AdmissionRefused | None],
        answer: Callable[[OpeningSocket, OpenRequest], OpenConnection],
        deliver: Deliver,
        waiting: Callable[[int], int],
    ) -> None:
        self._judge = judge
        self._grant = answer
        self._deliver = deliver
        self._waiting = waiting
        self._answering: collections.Counter[int] = collections.Counter()  # lanes of each rank
        self._lock = threading.Lock()

    def offer(self, sock: OpeningSocket, lane: OpenRequest) -> None:
        """Take a lane, if its dialler may have it; never waits for it."""
        refused = self._judge(sock, lane)
        if refused is not None:
            refuse(sock, refused.sentence)
        elif not self._has_room(lane.rank):
            refuse(sock, f"too many connections of rank {lane.rank} are waiting", for_now=True)
        else:
            self._begin(sock, lane)

    def _has_room(self, rank: int) -> bool:
        with self._lock:
            answering = self._answering[rank]
        return answering < AT_ONCE and answering + self._waiting(rank) < AHEAD

    def _begin(self, sock: OpeningSocket, lane: OpenRequest) -> None:
        self._count(lane.rank, 1)
        thread = threading.Thread(
            target=self._answer, args=(sock, lane), name="potluck-lane", daemon=True
        )
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads
            self._count(lane.rank, -1)
            refuse(sock, "this machine cannot start another thread", for_now=True)

    def _answer(self, sock: OpeningSocket, lane: OpenRequest) -> None:
        try:
            opened = self._grant(sock, lane)
        except (OSError, MalformedFrame):
            sock.close()  # it gave up this instant, and may dial again
        else:
            self._deliver(lane.rank, lane.purpose, opened)
        finally:
            self._count(lane.rank, -1)

    def _count(self, rank: int, change: int) -> None:
        with self._lock:
            self._answering[rank] += change
