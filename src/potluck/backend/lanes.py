"""Opening a data lane: both sides give half of its keys inside TLS, then leave TLS behind."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import dataclass

from msgspec import structs

from potluck.backend.introduction import say_hello
from potluck.backend.membership import Membership
from potluck.errors import MalformedFrame
from potluck.messages import Lane, LaneOpened, Speeds
from potluck.net import shortcut
from potluck.net.ciphers import CipherSpeeds, choose_cipher, local_speeds
from potluck.net.opening import answer
from potluck.net.sealing import SECRET_SIZE, Opener, Sealer, derive_keys, seal_context
from potluck.net.secure_socket import OpeningSocket, SecureSocket
from potluck.net.shortcut import Offer
from potluck.net.tcp import LocalStream, SocketStream, TcpStream, peer_address

__all__ = ["OpenLane", "answer_lane", "dial_lane"]


@dataclass(frozen=True, slots=True)
class OpenLane:
    """A connection that is open for frames."""

    sock: socket.socket
    seal: tuple[Sealer, Opener] | None = None
    """None on a connection in clear, and within one machine."""
    first: bytes = b""
    """What came right behind the end of TLS."""
    where: str = ""
    """On a shortcut, whose socket does not tell: the address of the other end."""

    def stream(self) -> SocketStream:
        """Its bytes."""
        return LocalStream(self.sock, self.where) if self.where else TcpStream(self.sock)


def dial_lane(sock: OpeningSocket, hello: Lane, members: Membership, deadline: float) -> OpenLane:
    """Ask for a lane on a connection we made, and offer a shortcut if there may be one."""
    if isinstance(sock, SecureSocket):
        hello = structs.replace(hello, share=os.urandom(SECRET_SIZE), speeds=_speeds())
    offer = Offer.over(sock)
    if offer is None:
        return _dial(sock, hello, members, deadline, None)
    with contextlib.closing(offer):
        hello = structs.replace(hello, shortcut=offer.message)
        return _dial(sock, hello, members, deadline, offer)


def _dial(
    sock: OpeningSocket, hello: Lane, members: Membership, deadline: float, offer: Offer | None
) -> OpenLane:
    opened = say_hello(sock, hello, LaneOpened, members, deadline)
    if opened.by_shortcut:
        if offer is None:
            raise MalformedFrame("The other side took a shortcut that was not offered")
        return _leave(sock, offer.accept())
    if not isinstance(sock, SecureSocket):
        return OpenLane(sock)
    bare, first = sock.release(deadline)
    return OpenLane(bare, _keys(hello, opened, (members.me, sock.peer), initiator=True), first)


def answer_lane(sock: OpeningSocket, hello: Lane, members: Membership, deadline: float) -> OpenLane:
    """Grant a lane on a connection that came in, to somebody who belongs."""
    sock.settimeout(max(0.001, deadline - time.monotonic()))
    local = shortcut.take(hello.shortcut, sock)
    if local is not None:
        try:
            answer(sock, LaneOpened(hello.to, by_shortcut=True))
            shortcut.await_dialler(local, sock, deadline)
        except BaseException:
            local.close()
            raise
        return _leave(sock, local)
    if not isinstance(sock, SecureSocket):
        answer(sock, LaneOpened(rank=hello.to))
        return OpenLane(sock)
    opened = LaneOpened(hello.to, os.urandom(SECRET_SIZE), _speeds())
    answer(sock, opened)
    keys = _keys(hello, opened, (sock.peer, members.me), initiator=False)
    bare, first = sock.release(deadline)
    return OpenLane(bare, keys, first)


def _leave(sock: OpeningSocket, local: socket.socket) -> OpenLane:
    """Both are at the shortcut: the connection over which they met has done its part."""
    where = peer_address(sock)
    sock.close()
    return OpenLane(local, where=where)


def _speeds() -> Speeds:
    mine = local_speeds()
    return Speeds(mine.aes_256_gcm, mine.chacha20_poly1305, mine.aes_128_ocb)


def _keys(
    hello: Lane, opened: LaneOpened, nodes: tuple[str, str], *, initiator: bool
) -> tuple[Sealer, Opener]:
    """The lane's keys, bound to the group, to both nodes and ranks, and to the purpose."""
    if not len(hello.share) == len(opened.share) == SECRET_SIZE:
        raise MalformedFrame("The other side gave no half of the keys")
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
