"""Receiving from whoever sends first: each message once, in turn, or why none will come."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from potluck import DistributedContext, SimulatedBackend, SizeMismatch
from potluck import Timeout as potluck_Timeout
from potluck.backend.operation import Cancelled
from potluck.collective import p2p as module
from potluck.collective.p2p import AnySource, AnyTransfer, ProgressThread
from potluck.errors import PeerLost, Timeout, UnsupportedOperation
from support.contexts import in_group, outcomes_in_group
from support.threads import eventually, together


def receive(source: AnySource, tag: int = 0) -> tuple[AnyTransfer, bytearray]:
    """A receive that is under way, and its buffer."""
    into = bytearray(1)
    return AnyTransfer(source, into, tag, lambda: into), into


def test_each_message_is_received_once_and_in_turn() -> None:
    """Nobody who sends much keeps the others waiting; tags are kept apart."""
    zero, one, two = SimulatedBackend.create_group(3)
    for number in range(3):
        one.send(bytes([10 + number]), 0)
    two.send(bytes([20]), 0)
    two.send(bytes([99]), 0, tag=5)
    source = AnySource(zero)
    found = []
    for _ in range(4):
        transfer, into = receive(source)
        transfer.wait(20)
        found.append((transfer.source, into[0]))
    assert found == [(1, 10), (2, 20), (1, 11), (1, 12)]
    assert bytes(receive(source, tag=5)[0].wait(20)) == bytes([99])
    assert zero.has_message(1) is False
    for backend in (zero, one, two):
        backend.close()


def test_receives_are_served_in_the_order_they_were_posted() -> None:
    """Also when a later one is looked at first; a certain sender can still be named."""
    zero, one = SimulatedBackend.create_group(2)
    source = AnySource(zero)
    (first, into), (second, later) = receive(source), receive(source)
    assert not second.done
    one.send(b"a", 0)
    one.send(b"b", 0)
    together(lambda: second.wait(20), lambda: first.wait(20))
    assert (into, later) == (bytearray(b"a"), bytearray(b"b"))
    one.send(b"c", 0)
    letter = bytearray(1)
    source.post(letter, 1, 0).wait(20)
    assert letter == b"c"
    zero.close()
    one.close()


def test_waiting_ends_with_a_limit_a_cancellation_or_a_loss() -> None:
    """The array is free again after the last two."""
    zero, one, two = SimulatedBackend.create_group(3)
    source = AnySource(zero)
    transfer, _ = receive(source)
    with pytest.raises(Timeout, match="any rank within"):
        transfer.wait(0.01)
    assert transfer.cancel()
    other, _ = receive(source)
    two.lose()
    with pytest.raises(PeerLost) as caught:
        other.wait(20)
    assert caught.value.rank == 2
    one.send(b"x", 0)  # a message that is here counts all the same
    assert bytes(receive(source)[0].wait(20)) == b"x"
    zero.close()
    one.close()


def test_a_message_of_another_size_is_an_error() -> None:
    """As for every receive."""
    zero, one = SimulatedBackend.create_group(2)
    one.send(b"too long", 0)
    transfer, _ = receive(AnySource(zero))
    with pytest.raises(ValueError, match="8 bytes but the buffer"):
        transfer.wait(20)
    assert not transfer.cancel()
    zero.close()
    one.close()


def test_a_backend_without_a_mailbox_says_so() -> None:
    """Only those that keep messages can look for them."""
    from potluck.backend.base import Backend

    with pytest.raises(UnsupportedOperation, match="cannot check for messages"):
        Backend.has_message(SimulatedBackend.create_group(1)[0], 0)


# --------------------------------------------------------------------------------------------------
# The courier moves what nobody waits for, and steps aside for those who do.


@pytest.fixture
def pair() -> Iterator[list[DistributedContext]]:
    """Two ranks in this process."""
    made = [DistributedContext(backend) for backend in SimulatedBackend.create_group(2)]
    yield made
    for each in made:
        each.close()


def couriers() -> int:
    """How many threads of this kind there are."""
    return sum(thread.name == "potluck-courier" for thread in threading.enumerate())


def test_a_message_arrives_though_nobody_waits(pair: list[DistributedContext]) -> None:
    """Its receive comes true by itself, more than once."""
    left, right = pair
    courier = ProgressThread(right.progress)
    for number in (1, 2):
        into = np.zeros(3)
        receive = right.irecv(into, 0)
        come = threading.Event()
        receive.add_done_callback(come.set)
        courier.carry(receive)
        left.send(np.full(3, float(number)), 1)
        assert come.wait(20)
        assert into.tolist() == [number] * 3
    courier.close()
    courier.carry(right.irecv(np.zeros(3), 0))  # nothing happens any more
    assert couriers() == 0


def test_the_thread_ends_when_there_is_nothing_to_do(
    pair: list[DistributedContext], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And begins again when there is."""
    monkeypatch.setattr(module, "IDLE", 0.01)
    left, right = pair
    courier = ProgressThread(right.progress)
    for _ in range(2):
        receive = right.irecv(np.zeros(1), 0)
        courier.carry(receive)
        left.send(np.ones(1), 1)
        receive.wait(20)
        eventually(lambda: couriers() == 0)
    courier.close()


def test_a_backend_that_closes_ends_the_errands(pair: list[DistributedContext]) -> None:
    """What was awaited has failed, and the courier is idle again."""
    _, right = pair
    courier = ProgressThread(right.progress)
    receive = right.irecv(np.zeros(1), 0)
    courier.carry(receive)
    right.close()
    eventually(lambda: not courier._errands)
    courier.close()
    assert receive.exception() is not None


# --------------------------------------------------------------------------------------------------
# Messages between two ranks, of arrays of any kind.


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
            with pytest.raises(potluck_Timeout):
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


def test_a_message_of_another_size_is_an_error_transfers() -> None:
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
            with pytest.raises(potluck_Timeout):
                context.sendrecv(np.zeros(4), 1, np.zeros(4), 1, timeout=0.01)

    in_group(2, act)
