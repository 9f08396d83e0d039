"""Callers at the door: who makes room for whom."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from potluck.net.acceptor_callers import SLOTS, SLOTS_PER_HOST, Caller, whom_to_drop
from support.tls_pair import client_hello, open_pair, pair


@pytest.fixture
def line() -> Iterator[socket.socket]:
    """Something to be connected by."""
    one, other = socket.socketpair()
    with contextlib.closing(one), contextlib.closing(other):
        yield one


def crowd(line: socket.socket, **sizes: int) -> list[Caller]:
    """So many callers from each address."""
    return [Caller(line, host, port) for host, count in sizes.items() for port in range(count)]


def test_nobody_goes_while_there_is_room(line: socket.socket) -> None:
    """Up to the last place, also when many come from one address."""
    callers = crowd(line, desk=SLOTS_PER_HOST - 1, lamp=SLOTS - SLOTS_PER_HOST)
    assert whom_to_drop(callers, "desk") is None
    assert whom_to_drop(callers, "sofa") is None


def test_one_address_has_a_bounded_number_of_places(line: socket.socket) -> None:
    """Its next caller takes the place of its first."""
    callers = crowd(line, lamp=1, desk=SLOTS_PER_HOST)
    assert whom_to_drop(callers, "desk") == (callers[1], "too many callers from its address")
    assert whom_to_drop(callers, "lamp") is None


def test_the_address_with_most_callers_makes_room(line: socket.socket) -> None:
    """Not the one who has waited longest of all: that may be an honest one with a slow link."""
    callers = crowd(line, sofa=1, desk=SLOTS // 2 - 1, lamp=SLOTS // 2)
    assert whom_to_drop(callers, "attic") == (callers[SLOTS // 2], "too many callers at once")
    assert whom_to_drop(callers, "lamp") == (callers[SLOTS // 2], "too many callers at once")


def test_whoever_adds_to_a_crowd_pays_for_it(line: socket.socket) -> None:
    """Of two equal crowds the one that grows."""
    callers = crowd(line, desk=SLOTS // 2, lamp=SLOTS // 2)
    assert whom_to_drop(callers, "lamp") == (callers[SLOTS // 2], "too many callers at once")


def test_whoever_has_come_far_stays(line: socket.socket) -> None:
    """Those who drip go before those who shake hands, and these before members."""
    callers = crowd(line, desk=SLOTS_PER_HOST)
    member, half, drip = open_pair()[1], pair()[1], pair()[1]
    half.receive(client_hello())
    for caller in callers:
        caller.channel = member
    assert whom_to_drop(callers, "desk") == (callers[0], "too many callers from its address")
    callers[5].channel = half
    callers[5].send_pending()
    assert whom_to_drop(callers, "desk") == (callers[5], "too many callers from its address")
    callers[7].channel = drip
    assert whom_to_drop(callers, "desk") == (callers[7], "too many callers from its address")
