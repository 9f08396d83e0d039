"""Receiving from whoever sends first: each message once, in turn, or why none will come."""

from __future__ import annotations

import pytest

from potluck import SimulatedBackend
from potluck.errors import PeerLost, Timeout, UnsupportedOperation
from potluck.runtime.any_source import AnySource, AnyTransfer
from support.threads import together


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

    with pytest.raises(UnsupportedOperation, match="cannot look for messages"):
        Backend.has_message(SimulatedBackend.create_group(1)[0], 0)
