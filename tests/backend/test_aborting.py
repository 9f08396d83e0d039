"""Aborting a mesh: everything ends at once, with the error given, for good."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest

from potluck import SimulatedBackend
from potluck.backend.operation import Operation
from potluck.errors import Aborted, ChannelClosed, DistributedError, PeerLost
from support.threads import PATIENCE, Background, eventually, together

OVER = Aborted("the view is over")


def post_everything(backend: SimulatedBackend) -> list[Operation]:
    """Operations that do not end by themselves."""
    return [
        backend.post_recv_into(bytearray(4), 1),
        backend.post_recv_into(bytearray(4), backend.rank),
        backend.post_barrier(),
    ]


def test_all_operations_end_with_the_error_given() -> None:
    """Those that somebody waits for, those that nobody does, and later ones."""
    with SimulatedBackend.create_group(3)[0] as backend:
        posted = post_everything(backend)
        waiting = [Background(partial(one.wait, PATIENCE)) for one in posted[:2]]
        backend.abort(OVER)
        for one in waiting:
            with pytest.raises(Aborted, match="the view is over"):
                one.result()
        for operation in posted:
            assert operation.done
            assert isinstance(operation.error, Aborted)
        laters: list[Callable[[], None]] = [
            partial(backend.send, b"more", 1),
            partial(backend.recv, bytearray(4), 1),
            backend.barrier,
            backend.progress,
        ]
        for later in laters:
            with pytest.raises(Aborted, match="the view is over"):
                later()
        assert isinstance(backend.loss_of(1), Aborted)


def test_the_peers_see_a_rank_that_has_closed() -> None:
    """They are not told that it crashed; what it said before still arrives."""
    left, right = SimulatedBackend.create_group(2)
    with left, right:
        left.send(b"last", 1)
        left.abort(OVER)
        inbox = bytearray(4)
        right.recv(inbox, 0)
        assert inbox == b"last"
        with pytest.raises(PeerLost, match="it closed its backend"):
            right.recv(inbox, 0, timeout=PATIENCE)


def test_the_first_ending_counts() -> None:
    """Whether that is an abort or a close, and however many threads try."""
    left, right = SimulatedBackend.create_group(2)
    errors = [Aborted(f"reason {number}") for number in range(8)]
    together(*(lambda error=error: left.abort(error) for error in errors))
    with pytest.raises(Aborted, match="reason ") as caught:
        left.barrier()
    first = str(caught.value)
    left.close()
    left.abort(OVER)
    with pytest.raises(Aborted, match=first):
        left.barrier()
    right.close()
    right.abort(OVER)
    with pytest.raises(ChannelClosed, match="has closed"):
        right.barrier()


def test_abort_and_close_at_once_leave_nobody_waiting() -> None:
    """Whichever is first, all who wait are woken."""
    for _ in range(20):
        left, right = SimulatedBackend.create_group(2)
        waiting = Background(partial(left.recv, bytearray(4), 1))
        gate = threading.Barrier(2)

        def abort(left: SimulatedBackend = left, gate: threading.Barrier = gate) -> None:
            gate.wait(PATIENCE)
            left.abort(OVER)

        def close(left: SimulatedBackend = left, gate: threading.Barrier = gate) -> None:
            gate.wait(PATIENCE)
            left.close()

        eventually(left._turns._turn.locked)
        together(abort, close)
        with pytest.raises(DistributedError):
            waiting.result()
        right.close()
