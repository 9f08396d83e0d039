"""Shortcuts: two processes of one user on one machine go on over a local socket.

Within a machine TCP is the slower way by far: the same bytes through a Unix socket take a third of
the time, and they need no encryption, because nobody can read them who could not read the memory of
both processes as well.  So the two meet over TCP as always, prove who they are, and then the
dialler offers a shortcut:

::

    dialler                                          who is called
       │  in its hello: where it listens, a token           │
       │ ─────────────────────────────────────────────────► │
       │                       the token, on a local socket │
       │ ◄═════════════════════════════════════════════════ │
       │                 the answer: the shortcut was taken │
       │ ◄───────────────────────────────────────────────── │
       │  one byte: both are here                           │
       │ ═════════════════════════════════════════════════► │

Everything is checked that could make it another connection than it seems: hello and token travel
inside TLS; both ends must be of one user, which the kernel says; and the two ends of the TCP
connection must see each other under the same addresses, both of this machine, so that whoever
relays it stays between them.  Where any of this fails, the TCP connection is used.  A member that
lies can have nobody else called: only names that the kernel gives are dialled.

Linux only: its abstract names vanish with the process, and are not seen from other network
namespaces, which count as other machines.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import re
import select
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING

from potluck import _process
from potluck.net.addresses import Address, unmapped
from potluck.wire_messages import Shortcut

if TYPE_CHECKING:
    from typing import Self

    from potluck.net.secure_socket import OpeningSocket


SWITCH = "POTLUCK_SHORTCUTS"
"""The variable of the environment that turns them off, for a comparison or a capture: ``off``."""

TOKEN_SIZE = 32

NAME = re.compile(rb"\0[0-9a-f]{5}")
"""What Linux calls a listener that leaves it the choice: never a path, nor a name of renown."""

BACKLOG = 8
"""Callers that may wait, and Linux lets one more: strangers are sent away and hold up nobody."""

CREDENTIALS = struct.Struct("3i")
"""Linux's ``ucred``: process, user and group."""

_HERE = b"\x01"


def is_wanted() -> bool:
    """Whether this process takes shortcuts at all."""
    return sys.platform == "linux" and os.environ.get(SWITCH, "").strip().lower() != "off"


class Offer:
    """The dialler's side: a listener that only the other end of a connection knows."""

    def __init__(self, listener: socket.socket, message: Shortcut) -> None:
        self._listener = listener
        self.message = message
        """What the hello says about it."""

    @classmethod
    def over(cls, sock: OpeningSocket) -> Self | None:
        """An offer to the other end of a connection, if that may be on this machine."""
        if not is_wanted():
            return None
        with contextlib.suppress(OSError):  # no shortcut, then
            ends = _ends(sock.getsockname(), sock.getpeername())
            if ends is None:
                return None
            listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            _process.track(listener)
            try:
                listener.bind("")  # the kernel finds a free abstract name
                listener.listen(BACKLOG)
                message = Shortcut(listener.getsockname(), os.urandom(TOKEN_SIZE), ends)
            except BaseException:
                listener.close()
                raise
            return cls(listener, message)
        return None

    def accept(self) -> socket.socket:
        """The local socket, after the other end has said that it took the shortcut.

        By then it has called and sent the token, so nobody is waited for.
        """
        self._listener.setblocking(False)
        for _ in range(BACKLOG + 1):
            try:
                sock = self._listener.accept()[0]
            except BlockingIOError:
                break
            _process.track(sock)
            try:
                sock.setblocking(False)
                if _is_own(sock) and hmac.compare_digest(sock.recv(TOKEN_SIZE), self.message.token):
                    sock.sendall(_HERE)
                    return sock
            except OSError:  # a stranger who says nothing, or who has left
                pass
            except BaseException:
                sock.close()
                raise
            sock.close()
        raise ConnectionResetError(104, "the other side is not where the shortcut leads")

    def close(self) -> None:
        """Listen no more."""
        self._listener.close()


def take(offered: Shortcut | None, sock: OpeningSocket) -> socket.socket | None:
    """The side that is called: the local socket, with the token on its way; None if it cannot be.

    Never waits.
    """
    if offered is None or not is_wanted() or not _is_sound(offered):
        return None
    with contextlib.suppress(OSError):
        if offered.ends != _ends(sock.getpeername(), sock.getsockname()):
            return None
        local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _process.track(local)
        try:
            local.setblocking(False)
            local.connect(offered.name)
            if _is_own(local):
                local.sendall(offered.token)
                return local
        except OSError:  # another network namespace, or it has left
            pass
        except BaseException:
            local.close()
            raise
        local.close()
    return None


def await_dialler(local: socket.socket, sock: OpeningSocket, deadline: float) -> None:
    """Return when the dialler has the shortcut too: its TCP connection may be closed.

    That connection still counts: when it ends, on either side, nobody will come.
    """
    poll = select.poll()
    for end in (local, sock):
        poll.register(end.fileno(), select.POLLIN)
    local.setblocking(False)
    is_over = False
    while (word := _word(local)) is None:
        left = deadline - time.monotonic()
        if is_over:
            raise ConnectionResetError(104, "the connection ended")
        if left <= 0:
            raise TimeoutError(110, "the dialler did not come to its shortcut")
        is_over = any(number == sock.fileno() for number, _ in poll.poll(left * 1000))
    if word != _HERE:
        raise ConnectionResetError(104, "the shortcut leads to somebody else")


def _word(local: socket.socket) -> bytes | None:
    """The dialler's word, if it is there."""
    try:
        return local.recv(len(_HERE))
    except BlockingIOError:
        return None


def _is_sound(offered: Shortcut) -> bool:
    return NAME.fullmatch(offered.name) is not None and len(offered.token) == TOKEN_SIZE


def _is_own(sock: socket.socket) -> bool:
    """Whether a process of the same user is at the other end."""
    said = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size)
    return bool(CREDENTIALS.unpack(said)[1] == os.geteuid())


def _ends(dialler: tuple[object, ...], called: tuple[object, ...]) -> list[str] | None:
    """Both ends of a TCP connection, in words: the same on both sides, unless it is relayed.

    None if they have different addresses, and may be two machines.
    """
    if dialler[0] != called[0]:
        return None
    return [str(Address(unmapped(str(end[0])), int(str(end[1])))) for end in (dialler, called)]
