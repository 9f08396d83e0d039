"""Ranks of one process, connected by real sockets, and a peer whose every byte the test writes."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from potluck.backend.base import Backend
from potluck.backend.mesh import MeshBackend
from potluck.backend.messages import MessageLimits
from potluck.backend.operation import Operation
from potluck.net.frames import HEADER_SIZE, MAX_PIECE, FrameType, Header, decode, encode
from potluck.net.memory import MemoryPoller, pipe
from potluck.net.tcp import TcpStream, make_poller
from potluck.net.transport import Poller
from support import sealed_pair
from support.threads import PATIENCE

SMALL = MessageLimits(eager=256, credit=4096, courtesy=1 << 20)
"""Bounds that a short test can reach."""


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected sockets on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right, _ = listener.accept()
    return left, right


@contextlib.contextmanager
def mesh_group(
    size: int,
    limits: MessageLimits | None = None,
    *,
    sealed: bool = False,
    poller: Callable[[], Poller] = make_poller,
) -> Iterator[list[MeshBackend]]:
    """All ranks of a group, each connected to each by TCP, closed at the end."""
    with contextlib.ExitStack() as stack:
        group = [
            stack.enter_context(MeshBackend(rank, size, poller(), limits)) for rank in range(size)
        ]
        for high in range(size):
            for low in range(high):
                left, right = tcp_pair()
                keys = sealed_pair.connect() if sealed else None
                group[low].add_link(
                    high, TcpStream(left), (keys.a_seals, keys.a_opens) if keys else None
                )
                group[high].add_link(
                    low, TcpStream(right), (keys.b_seals, keys.b_opens) if keys else None
                )
        yield group


@contextlib.contextmanager
def memory_group(
    size: int, limits: MessageLimits | None = None, *, capacity: int = 1 << 16
) -> Iterator[list[MeshBackend]]:
    """The same over in-memory pipes that hold ``capacity`` bytes in each direction."""
    with contextlib.ExitStack() as stack:
        group = [
            stack.enter_context(MeshBackend(rank, size, MemoryPoller(), limits))
            for rank in range(size)
        ]
        for high in range(size):
            for low in range(high):
                left, right = pipe((f"rank {low}", f"rank {high}"), capacity=capacity)
                group[low].add_link(high, left)
                group[high].add_link(low, right)
        yield group


class RawPeer:
    """The far end of a link, in the hands of the test."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.sock.settimeout(PATIENCE)

    def send(self, *frames: bytes) -> None:
        """Write bytes, whole frames or not."""
        self.sock.sendall(b"".join(frames))

    def read(self, count: int) -> bytes:
        """Read exactly so many bytes."""
        data = bytearray(count)
        rest = memoryview(data)
        while rest:
            got = self.sock.recv_into(rest)
            assert got, "the connection ended"
            rest = rest[got:]
        return bytes(data)

    def read_frame(self) -> tuple[Header, bytes]:
        """Read one frame."""
        header = decode(self.read(HEADER_SIZE), 0, MAX_PIECE)
        return header, self.read(header.length)

    def read_large_frame(self) -> tuple[Header, bytes]:
        """Read one frame whose length the usual limits do not allow."""
        raw = self.read(HEADER_SIZE)
        length = int.from_bytes(raw[-4:], "little")
        return decode(raw, 0, length), self.read(length)

    def close(self) -> None:
        """Hang up without a word."""
        self.sock.close()


@contextlib.contextmanager
def raw_peer(
    limits: MessageLimits | None = None, *, honest: int = 0
) -> Iterator[tuple[RawPeer, list[MeshBackend]]]:
    """Rank 1 by hand, against rank 0 and ``honest`` further ranks (numbered from 2)."""
    size = 2 + honest
    left, right = tcp_pair()
    peer = RawPeer(right)
    with contextlib.ExitStack() as stack:
        meshes = {
            rank: stack.enter_context(MeshBackend(rank, size, make_poller(), limits))
            for rank in range(size)
            if rank != 1
        }
        meshes[0].add_link(1, TcpStream(left))
        for high in range(2, size):
            for low in range(high):
                if low != 1:
                    a, b = tcp_pair()
                    meshes[low].add_link(high, TcpStream(a))
                    meshes[high].add_link(low, TcpStream(b))
        try:
            yield peer, list(meshes.values())
        finally:
            peer.close()


def frame(kind: FrameType, payload: bytes = b"", **fields: Any) -> bytes:
    """A whole frame."""
    return encode(kind, length=len(payload), **fields) + payload


def pump_until(mesh: MeshBackend, condition: Callable[[], bool]) -> None:
    """Let one rank take in what has arrived until something is true."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "did not come true"
        mesh.progress(0.001)


def received(backend: Backend, src: int, size: int, **options: Any) -> bytes:
    """The next message of that size from a rank."""
    inbox = bytearray(size)
    backend.recv(inbox, src, **options)
    return bytes(inbox)


def wait_all(operations: Iterable[Operation]) -> None:
    """Wait for one after the other."""
    for operation in operations:
        operation.wait()


def kept_bytes(mesh: MeshBackend) -> int:
    """Bytes of messages that nobody has asked for yet."""
    waiting = mesh._inbox._mailbox.waiting_messages()
    return sum(len(message.buffer) for message in waiting if message.buffer is not None)


def kept_messages(mesh: MeshBackend) -> int:
    """Messages known and not yet asked for, offers included."""
    return len(mesh._inbox._mailbox.waiting_messages())


def half_here(mesh: MeshBackend, rank: int) -> int | None:
    """How much of the payload now arriving from a rank is here; None between two frames."""
    arriving = mesh._links[rank].reader.arriving()
    return None if arriving is None else arriving[1]
