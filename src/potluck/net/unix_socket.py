"""Shortcuts: two processes of one user on one machine continue over a local socket.

Within a machine TCP is the slower way by far: the same bytes through a Unix socket take a third of
the time, and they need no encryption, because no user can read them who could not read the memory
of both processes as well.  So the two meet over TCP as always, prove who they are, and then the
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
connection must see each other under the same addresses, both of this machine, so that a
relay stays between them.  Where any of this fails, the TCP connection is used.  A member that
lies can have no other program called: only names that the kernel gives are dialled.

Linux only: its abstract names vanish with the process, and are not seen from other network
namespaces, which count as other machines.

A local socket still copies every byte twice, into the kernel and out of it.  So connections for
collectives share memory as well: see :class:`SharedMemory`.
"""

from __future__ import annotations

import contextlib
import hmac
import mmap
import os
import re
import selectors
import socket
import time
from typing import TYPE_CHECKING

from potluck import _process
from potluck._platform import (
    CAN_SHARE_MEMORY,
    DONT_WAIT,
    HAS_LOCAL_SOCKETS,
    is_local_stream,
    is_of_same_user,
    local_socket,
    map_sealed_memory,
    receive_descriptors,
    sealed_memory,
    send_descriptors,
)
from potluck.net.addresses import Address, unmapped
from potluck.wire_messages import UnixSocketHint

if TYPE_CHECKING:
    from typing import Self

    from potluck.net.secure_socket import OpeningSocket


SWITCH = "POTLUCK_SHORTCUTS"
"""The variable of the environment that turns them off, for a comparison or a capture: ``off``."""

TOKEN_SIZE = 32

NAME = re.compile(rb"\0[0-9a-f]{5}")
"""What Linux calls a listener that leaves it the choice: never a path, nor a name of renown."""

BACKLOG = 8
"""Callers that may wait, and Linux lets one more: strangers are sent away and delay no other."""

_HERE = b"\x01"


def is_wanted() -> bool:
    """Whether this process takes shortcuts at all."""
    return HAS_LOCAL_SOCKETS and os.environ.get(SWITCH, "").strip().lower() != "off"


class UnixSocketOffer:
    """The dialler's side: a listener that only the other end of a connection knows."""

    def __init__(self, listener: socket.socket, message: UnixSocketHint) -> None:
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
            listener = local_socket()
            _process.track(listener)
            try:
                listener.bind("")  # the kernel finds a free abstract name
                listener.listen(BACKLOG)
                message = UnixSocketHint(listener.getsockname(), os.urandom(TOKEN_SIZE), ends)
            except BaseException:
                listener.close()
                raise
            return cls(listener, message)
        return None

    def accept(self) -> socket.socket:
        """The local socket, after the other end has said that it took the shortcut.

        By then it has called and sent the token, so there is nothing to wait for.
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
                if is_of_same_user(sock) and hmac.compare_digest(
                    sock.recv(TOKEN_SIZE), self.message.token
                ):
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


def take(offered: UnixSocketHint | None, sock: OpeningSocket) -> socket.socket | None:
    """The side that is called: the local socket, with the token on its way; None if it cannot be.

    Never waits.
    """
    if offered is None or not is_wanted() or not _is_sound(offered):
        return None
    with contextlib.suppress(OSError):
        if offered.ends != _ends(sock.getpeername(), sock.getsockname()):
            return None
        local = local_socket()
        _process.track(local)
        try:
            local.setblocking(False)
            local.connect(offered.name)
            if is_of_same_user(local):
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

    That connection still counts: when it ends, on either side, no peer will come.
    """
    local.setblocking(False)
    is_over = False
    with selectors.DefaultSelector() as both:
        for end in (local, sock):
            both.register(end.fileno(), selectors.EVENT_READ)
        while (word := _word(local)) is None:
            left = deadline - time.monotonic()
            if is_over:
                raise ConnectionResetError(104, "the connection ended")
            if left <= 0:
                raise TimeoutError(110, "the dialler did not come to its shortcut")
            is_over = any(key.fd == sock.fileno() for key, _ in both.select(left))
    if word != _HERE:
        raise ConnectionResetError(104, "the shortcut leads to another process")


def _word(local: socket.socket) -> bytes | None:
    """The dialler's word, if it is there."""
    try:
        return local.recv(len(_HERE))
    except BlockingIOError:
        return None


def _is_sound(offered: UnixSocketHint) -> bool:
    return NAME.fullmatch(offered.name) is not None and len(offered.token) == TOKEN_SIZE


def _ends(dialler: tuple[object, ...], called: tuple[object, ...]) -> list[str] | None:
    """Both ends of a TCP connection, in words: the same on both sides, unless it is relayed.

    None if they have different addresses, and may be two machines.
    """
    if dialler[0] != called[0]:
        return None
    return [str(Address(unmapped(str(end[0])), int(str(end[1])))) for end in (dialler, called)]


# --------------------------------------------------------------------------------------------------
# Shared memory: large pieces between two processes of one user, without a copy by the kernel.
#
# Each of the two writes into memory of its own, which the other can only read.  It is cut into
# slots.  To hand over a piece, its owner copies it into a free slot and sends the number of the
# slot over the local socket; the reader uses it in place, and sends the number back, over a second
# socket, when the slot is free again.
#
# Only data travels in memory: no length, no address, no counter.  Its owner may change it at any
# time, so a reader that has to check something copies it first.
#
#     each side                                              each side
#        |  a byte: there is memory, with its descriptor         |
#        | ====================================================> |
#        |  a byte: it was found good and mapped                 |
#        | ====================================================> |
#
# If one of the two bytes is 0 on either side, both use the local socket alone.  The second socket
# comes with the memory of the dialler.

SLOT_SIZE = 1 << 20
"""Bytes of a slot: the longest piece of a plan within a machine."""

SLOTS = 8
"""Slots in each direction: what is written, what waits, and what the reader holds."""

SHARED_SIZE = SLOTS * SLOT_SIZE

MEMORY_SWITCH = "POTLUCK_SHARED_MEMORY"
"""The variable of the environment that turns shared memory off, for a comparison: ``off``."""

_YES, _NO = b"\x01", b"\x00"


def may_share_memory() -> bool:
    """Whether this process shares memory at all."""
    return CAN_SHARE_MEMORY and os.environ.get(MEMORY_SWITCH, "").strip().lower() != "off"


class SharedMemory:
    """What two processes share: the slots of this one, those of the other, and a second socket."""

    def __init__(self, mine: mmap.mmap, theirs: mmap.mmap, credits_: socket.socket) -> None:
        self.mine = _slots(mine)
        """To write to."""
        self.theirs = _slots(theirs)
        """To read from."""
        self.held: set[int] = set()
        """Slots of the other side that are in use here."""
        self.credits = credits_
        """Can be read when the other side has given slots back."""
        _process.track(self)

    def give_back(self, slot: int) -> None:
        """Say that a slot of the other side is free.

        If that side has left, nothing happens; that it is lost shows where data is read from it.
        The other side may have kept a descriptor of our socket and made it block: so this call says
        that it must not.
        """
        self.held.discard(slot)
        with contextlib.suppress(OSError):
            self.credits.send(bytes((slot,)), DONT_WAIT)

    def take_back(self) -> bytes:
        """Our slots that became free; empty if the other side left.

        Raises ``BlockingIOError`` if none became free.
        """
        return self.credits.recv(SLOTS, DONT_WAIT)

    def close(self) -> None:
        """Close the second socket.  The memory is freed when no piece in it is used any more."""
        self.credits.close()
        self.mine.clear()
        self.theirs.clear()


def _slots(memory: mmap.mmap) -> list[memoryview]:
    whole = memoryview(memory)
    return [whole[start : start + SLOT_SIZE] for start in range(0, SHARED_SIZE, SLOT_SIZE)]


def share_memory(local: socket.socket, deadline: float, *, is_dialler: bool) -> SharedMemory | None:
    """Share memory with the other end of a local socket; None if one of the two cannot.

    Raises ``OSError`` when the other end leaves, or says nothing until the deadline.
    """
    with contextlib.ExitStack() as stack:
        mine, given, credits_ = _offer_memory(stack, is_dialler=is_dialler)
        send_descriptors(local, _NO if mine is None else _YES, given)
        word, got = _receive(local, deadline, 1 if is_dialler else 2)
        for descriptor in got:
            stack.callback(os.close, descriptor)
        theirs: mmap.mmap | None = None
        if mine is not None and word == _YES:
            with contextlib.suppress(OSError, ValueError, IndexError):  # not what it should be
                theirs = map_sealed_memory(got[0], SHARED_SIZE)
                credits_ = credits_ or stack.enter_context(_adopt_credits(got[1]))
        is_good = theirs is not None and credits_ is not None
        send_descriptors(local, _YES if is_good else _NO, ())
        word, _ = _receive(local, deadline, 0)
        if word != _YES or mine is None or theirs is None or credits_ is None:
            return None
        return SharedMemory(mine, theirs, credits_.dup())


def _offer_memory(
    stack: contextlib.ExitStack, *, is_dialler: bool
) -> tuple[mmap.mmap | None, list[int], socket.socket | None]:
    """Memory of ours, the descriptors to give away, and the dialler's end of the second socket."""
    with contextlib.suppress(OSError, ValueError):  # the system gives none
        descriptor, memory = sealed_memory(SHARED_SIZE)
        stack.callback(os.close, descriptor)
        if not is_dialler:
            return memory, [descriptor], None
        here, there = map(stack.enter_context, socket.socketpair())
        for end in (here, there):
            _process.track(end)
        return memory, [descriptor, there.fileno()], here
    return None, [], None


def _adopt_credits(descriptor: int) -> socket.socket:
    """The socket that came with the dialler's memory; raises ``OSError`` if it is another kind."""
    sock = socket.socket(fileno=os.dup(descriptor))
    _process.track(sock)
    if not is_local_stream(sock):
        sock.close()
        raise OSError("another kind of socket")
    return sock


def _receive(local: socket.socket, deadline: float, most: int) -> tuple[bytes, list[int]]:
    """Wait for a byte and the descriptors that come with it."""
    with selectors.DefaultSelector() as selector:
        selector.register(local.fileno(), selectors.EVENT_READ)
        if not selector.select(deadline - time.monotonic()):
            raise TimeoutError(110, "the other side did not say whether it shares memory")
    word, descriptors = receive_descriptors(local, 1, most)
    if not word:
        for each in descriptors:
            os.close(each)
        raise ConnectionResetError(104, "the other side left")
    return word, descriptors
