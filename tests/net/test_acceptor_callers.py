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


def newcomer(line: socket.socket, host: str, *, is_known: bool = False) -> Caller:
    """One more."""
    return Caller(line, host, 99, is_known=is_known)


def test_nobody_goes_while_there_is_room(line: socket.socket) -> None:
    """Up to the last place, also when many come from one address."""
    callers = crowd(line, desk=SLOTS_PER_HOST - 1, lamp=SLOTS - SLOTS_PER_HOST)
    assert whom_to_drop(callers, newcomer(line, "desk")) is None
    assert whom_to_drop(callers, newcomer(line, "sofa")) is None


def test_one_address_has_a_bounded_number_of_places(line: socket.socket) -> None:
    """Its next caller takes the place of its first."""
    callers = crowd(line, lamp=1, desk=SLOTS_PER_HOST)
    assert whom_to_drop(callers, newcomer(line, "desk")) == (
        callers[1],
        "too many callers from its address",
    )
    assert whom_to_drop(callers, newcomer(line, "lamp")) is None


def test_the_address_with_most_callers_makes_room(line: socket.socket) -> None:
    """Not the one who has waited longest of all: that may be an honest one with a slow link."""
    callers = crowd(line, sofa=1, desk=SLOTS // 2 - 1, lamp=SLOTS // 2)
    assert whom_to_drop(callers, newcomer(line, "attic")) == (
        callers[SLOTS // 2],
        "too many callers at once",
    )
    assert whom_to_drop(callers, newcomer(line, "lamp")) == (
        callers[SLOTS // 2],
        "too many callers at once",
    )


def test_whoever_adds_to_a_crowd_pays_for_it(line: socket.socket) -> None:
    """Of two equal crowds the one that grows."""
    callers = crowd(line, desk=SLOTS // 2, lamp=SLOTS // 2)
    assert whom_to_drop(callers, newcomer(line, "lamp")) == (
        callers[SLOTS // 2],
        "too many callers at once",
    )


def test_whoever_has_come_far_stays(line: socket.socket) -> None:
    """Those who drip go before those who shake hands, and these before members."""
    callers = crowd(line, desk=SLOTS_PER_HOST)
    member, half, drip = open_pair()[1], pair()[1], pair()[1]
    half.receive(client_hello())
    for caller in callers:
        caller.channel = member
    assert whom_to_drop(callers, newcomer(line, "desk")) == (
        callers[0],
        "too many callers from its address",
    )
    callers[5].channel = half
    callers[5].send_pending()
    assert whom_to_drop(callers, newcomer(line, "desk")) == (
        callers[5],
        "too many callers from its address",
    )
    callers[7].channel = drip
    assert whom_to_drop(callers, newcomer(line, "desk")) == (
        callers[7],
        "too many callers from its address",
    )


def test_an_address_of_members_gives_up_a_place_last(line: socket.socket) -> None:
    """Strangers from as many addresses as they like take nothing from it, nor does its crowd."""
    strangers = [Caller(line, f"10.0.0.{number}", 1) for number in range(SLOTS - 9)]
    members = [Caller(line, "desk", port, is_known=True) for port in range(9)]
    for one in ("10.0.1.1", "desk"):
        excess = whom_to_drop([*members, *strangers], newcomer(line, one))
        assert excess is not None
        assert excess[0] in strangers


def test_a_stranger_takes_no_place_from_members(line: socket.socket) -> None:
    """Where only members wait, the stranger itself is sent away."""
    members = [Caller(line, f"10.0.0.{number}", 1, is_known=True) for number in range(SLOTS)]
    stranger = newcomer(line, "lamp")
    assert whom_to_drop(members, stranger) == (stranger, "too many callers at once")
