"""A leash: connections that another thread can cut."""

from __future__ import annotations

import contextlib
import gc
import socket
from functools import partial

from potluck.backend.stream_backend import AbortableSockets
from support.control_connections import bare_sockets, secure_sockets
from support.threads import Background


def test_both_ends_of_a_connection_wake_up_when_it_is_cut() -> None:
    """In TLS or not."""
    for left, right in (bare_sockets(), secure_sockets()):
        with contextlib.closing(left), contextlib.closing(right):
            leash = AbortableSockets()
            leash.hold(left)
            waiting = [Background(partial(end.recv, 1, socket.MSG_PEEK)) for end in (left, right)]
            leash.cut()
            assert [one.result() for one in waiting] == [b"", b""]


def test_what_comes_after_the_cut_is_cut_as_well() -> None:
    """It was on its way while somebody ended the group."""
    left, right = bare_sockets()
    with left, right:
        leash = AbortableSockets()
        leash.cut()
        leash.hold(left)
        assert right.recv(1) == b""


def test_what_was_let_go_stays() -> None:
    """Its owner has another way to end it."""
    left, right = bare_sockets()
    with left, right:
        leash = AbortableSockets()
        leash.hold(left)
        leash.let_go(left)
        leash.cut()
        left.sendall(b"x")
        assert right.recv(1) == b"x"


def test_connections_that_nobody_keeps_are_forgotten() -> None:
    """A leash is no reason for them to live on; one that is closed does no harm."""
    left, right = bare_sockets()
    leash = AbortableSockets()
    leash.hold(left)
    leash.hold(right)
    left.close()
    right.close()
    del left
    gc.collect()
    assert len(leash._held) == 1
    leash.cut()
