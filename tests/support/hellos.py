"""A dialler that says hello over a socket, frames of all sorts, and a rude way to leave."""

from __future__ import annotations

import socket
import struct
import time

from potluck.net.frames import FrameType, encode
from potluck.net.opening import exchange_hello
from potluck.wire_messages import OpenReply, OpenRequest

HELLO = OpenRequest(session=bytes(16), rank=1, to=0)


def frame(kind: FrameType, payload: bytes = b"", *, version: int | None = None) -> bytes:
    """A frame, of another version if told so."""
    data = bytearray(encode(kind, length=len(payload)) + payload)
    if version is not None:
        data[2] = version
    return bytes(data)


def ask(sock: socket.socket, seconds: float = 30.0) -> OpenReply:
    """Say hello and wait for the answer."""
    return exchange_hello(sock, HELLO, OpenReply, time.monotonic() + seconds)


def drop(sock: socket.socket) -> None:
    """End a connection with a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
