"""Lanes between two nodes: keys that no other has, and shortcuts that both sides have taken."""

from __future__ import annotations

import os
import time
from functools import partial
from unittest import mock

import pytest
from msgspec import structs

from potluck import NetworkNamespace, SecurityWarning, TcpBackend
from potluck.backend.lanes import answer_lane, dial_lane
from potluck.backend.membership import Membership
from potluck.errors import MalformedFrame
from potluck.messages import Lane, LaneOpened, Shortcut
from potluck.net.opening import answer
from potluck.net.security import Security
from support.doors import socket_pair
from support.ranks import new_master
from support.sealed_pair import record_keys
from support.shortcuts import shortcuts
from support.threads import together

SESSION = b"the same session"  # what names a group; otherwise it is new each time


def form(namespace: NetworkNamespace, size: int) -> None:
    """Let a group form, pass a barrier and end, all in this process."""
    master = new_master()

    def take_part(rank: int) -> None:
        with TcpBackend(rank, size, master, namespace=namespace) as backend:
            backend.barrier()

    together(*[partial(take_part, rank) for rank in range(size)])


def test_every_connection_and_direction_has_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same nodes, ranks, secret and group, twice: the two ends of a direction share one."""
    keys = record_keys(monkeypatch)
    namespace, chance = NetworkNamespace.generate("lab"), os.urandom
    drawn = mock.patch("os.urandom", lambda size: SESSION if size == len(SESSION) else chance(size))
    with shortcuts("off"), drawn:
        for _ in range(2):
            form(namespace, 3)
    connections = 2 * 3
    assert len(keys) == connections * 2 * 2
    assert all(keys.count(key) == 2 for key in keys)
    assert len(set(keys)) == connections * 2


HELLO = Lane(session=SESSION, rank=1, to=0)


@pytest.fixture
def nobody() -> Membership:
    """In clear nobody is asked who it is."""
    with pytest.warns(SecurityWarning):
        return Membership(Security(NetworkNamespace.insecure()))


@pytest.mark.parametrize(
    ("setting", "expected", "words"),
    [("on", ConnectionError, "not where"), ("off", MalformedFrame, "not offered")],
    ids=["offered", "not offered"],
)
def test_a_dialler_waits_for_nobody_who_only_says_that_it_took_the_shortcut(
    nobody: Membership, setting: str, expected: type[Exception], words: str
) -> None:
    """The lie costs the liar its lane, and the dialler no time."""
    dialler, called = socket_pair()
    with shortcuts(setting), dialler, called:
        answer(called, LaneOpened(0, by_shortcut=True))
        with pytest.raises(expected, match=words):
            dial_lane(dialler, HELLO, nobody, time.monotonic() + 3600)


def test_an_odd_offer_changes_nothing(nobody: Membership) -> None:
    """The lane is opened over TCP."""
    dialler, called = socket_pair()
    hello = structs.replace(HELLO, shortcut=Shortcut(b"/run/some.sock", bytes(32), []))
    with shortcuts(), dialler, called:
        assert answer_lane(called, hello, nobody, time.monotonic() + 30).sock is called
