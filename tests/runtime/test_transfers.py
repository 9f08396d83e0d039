"""Messages between two ranks, of arrays of any kind."""

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
import torch

from potluck import DistributedContext, SizeMismatch, Timeout
from potluck.backend.operation import Cancelled
from support.contexts import in_group, outcomes_in_group
from support.threads import eventually


@pytest.mark.parametrize(
    "made",
    [
        lambda: np.arange(6.0).reshape(2, 3),
        lambda: np.arange(12.0)[::2],
        lambda: torch.arange(6, dtype=torch.bfloat16),
        lambda: torch.arange(12).reshape(3, 4).t(),
        lambda: bytearray(b"potluck"),
        lambda: np.zeros(0),
    ],
)
def test_an_array_is_received_where_it_lies(made: Any) -> None:
    """Strided arrays and tensors of any type included."""

    def act(context: DistributedContext) -> bool:
        if context.rank == 0:
            context.send(made(), 1, tag=3)
            return True
        into = made()
        into[:] = type(into)(len(into)) if isinstance(into, bytearray) else 0
        context.recv(into, 0, tag=3)
        if isinstance(into, bytearray):
            return bool(into == made())
        return bool((into == made()).all())

    assert in_group(2, act) == [True, True]


def test_what_is_already_here_can_be_awaited() -> None:
    """The coroutine goes on at once."""

    def act(context: DistributedContext) -> Any:
        other = 1 - context.rank
        arriving = context.irecv(bytearray(1), other)
        context.send(b"!", other)
        arriving.wait(30)

        async def receive() -> Any:
            return await arriving

        return asyncio.run(receive())

    assert in_group(2, act) == [b"!", b"!"]


def test_two_ranks_exchange_at_once() -> None:
    """Neither has to begin."""

    def act(context: DistributedContext) -> list[int]:
        other, into = 1 - context.rank, np.zeros(3, int)
        context.sendrecv(np.full(3, context.rank), other, into, other)
        return list(into.tolist())

    assert in_group(2, act) == [[1, 1, 1], [0, 0, 0]]


def test_messages_can_be_started() -> None:
    """Each work gives the array back, in which the message is."""

    def act(context: DistributedContext) -> Any:
        other = 1 - context.rank
        into = torch.zeros((2, 4))[:, ::2]
        arriving = context.irecv(into, other)
        sent = torch.full((2, 2), float(context.rank))
        assert context.isend(sent, other).wait(30) is sent
        assert arriving.wait(30) is into
        assert arriving.done
        assert arriving.result() is into
        assert arriving.exception() is None
        return into.tolist()

    assert in_group(2, act) == [[[1, 1], [1, 1]], [[0, 0], [0, 0]]]


def test_asking_moves_the_message() -> None:
    """Whoever only asks whether it is done will see it done."""

    def act(context: DistributedContext) -> None:
        if context.rank == 0:
            context.send(b"soup", 1)
        else:
            into = bytearray(4)
            arriving = context.irecv(into, 0)
            eventually(lambda: arriving.done)
            assert into == b"soup"

    in_group(2, act)


def test_a_message_can_be_awaited() -> None:
    """A coroutine goes on when it is there."""

    def act(context: DistributedContext) -> Any:
        async def receive() -> Any:
            return await context.irecv(bytearray(4), 0)

        if context.rank == 0:
            return context.send(b"soup", 1)
        return asyncio.run(receive())

    assert in_group(2, act)[1] == b"soup"


def test_a_callback_may_come_when_the_message_has() -> None:
    """Naming one asks nothing of the message, so nothing can end meanwhile."""

    def act(context: DistributedContext) -> list[str]:
        other, called = 1 - context.rank, list[str]()
        arriving = context.irecv(bytearray(1), other)
        context.send(b"!", other)
        context.post_barrier().wait(30)  # the message is here, but nobody has looked
        arriving.add_done_callback(lambda: called.append("first"))
        arriving.wait(30)
        arriving.add_done_callback(lambda: called.append("second"))
        return called

    assert in_group(2, act) == [["first", "second"]] * 2


def test_a_wait_that_is_too_short_can_be_repeated() -> None:
    """The array belongs to the work until it is done or cancelled."""
    waited = threading.Event()

    def act(context: DistributedContext) -> None:
        if context.rank == 0:
            waited.wait(30)
            context.send(b"soup", 1)
            return
        arriving = context.irecv(bytearray(4), 0)
        try:
            with pytest.raises(Timeout):
                arriving.wait(0.01)
        finally:
            waited.set()
        assert arriving.wait(30) == b"soup"

    in_group(2, act)


def test_a_message_that_nobody_sends_can_be_cancelled() -> None:
    """Its array is free again, and whoever waits is told."""

    def act(context: DistributedContext) -> None:
        if context.rank == 0:
            arriving = context.irecv(bytearray(4), 1)
            assert arriving.cancel()
            with pytest.raises(Cancelled):
                arriving.wait()

    in_group(2, act)


def test_a_message_of_another_size_is_an_error() -> None:
    """For the blocking call and for the work alike."""

    def act(context: DistributedContext) -> None:
        if context.rank == 0:
            context.send(np.zeros(2), 1)
            context.send(np.zeros(2), 1)
        else:
            with pytest.raises(SizeMismatch):
                context.recv(np.zeros(3), 0)
            arriving = context.irecv(np.zeros(3), 0)
            with pytest.raises(SizeMismatch):
                arriving.wait(30)
            assert isinstance(arriving.exception(), SizeMismatch)

    in_group(2, act)


def test_what_cannot_be_changed_cannot_receive() -> None:
    """A number or bytes have no place for a message."""
    for outcome in outcomes_in_group(1, lambda context: context.recv(3.5, 0)):
        assert isinstance(outcome, TypeError)


def test_an_exchange_that_fails_gives_both_arrays_back() -> None:
    """The send is cancelled when the receive gives up."""

    def act(context: DistributedContext) -> None:
        if context.rank == 0:
            with pytest.raises(Timeout):
                context.sendrecv(np.zeros(4), 1, np.zeros(4), 1, timeout=0.01)

    in_group(2, act)
