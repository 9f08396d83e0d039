"""A dialler that says hello over a socket, frames of all sorts, and a rude way to leave."""

from __future__ import annotations

import socket
import struct
import time

from potluck.net.frames import Kind, encode
from potluck.net.opening import exchange_hello
from potluck.wire_messages import Lane, LaneOpened

HELLO = Lane(session=bytes(16), rank=1, to=0)


def frame(kind: Kind, payload: bytes = b"", *, version: int | None = None) -> bytes:
    """A frame, of another version if told so."""
    data = bytearray(encode(kind, length=len(payload)) + payload)
    if version is not None:
        data[2] = version
    return bytes(data)


def ask(sock: socket.socket, seconds: float = 30.0) -> LaneOpened:
    """Say hello and wait for the answer."""
    return exchange_hello(sock, HELLO, LaneOpened, time.monotonic() + seconds)


def drop(sock: socket.socket) -> None:
    """End a connection with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
