"""Lanes between two nodes: every connection and direction has keys that no other has."""

from __future__ import annotations

import os
from functools import partial
from unittest import mock

import pytest

from potluck import NetworkNamespace, TcpBackend
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
