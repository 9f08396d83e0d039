"""Meeting at rank 0: what every rank learns there."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest

from potluck import TcpBackend
from potluck.backend import tcp
from support.meshes import received
from support.ports import free_port
from support.threads import together


def test_the_table_of_a_large_group_comes_in_several_frames(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A frame holds the addresses of some hundred ranks; the group may have more."""
    monkeypatch.setattr(tcp, "TABLE_PART", 1)  # a frame for each rank
    master = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        group = together(*[partial(TcpBackend, rank, 4, master) for rank in range(4)])
        for backend in group:
            stack.enter_context(backend)
        group[3].send(b"here", 1)
        assert received(group[1], 3, 4) == b"here"


def test_the_name_of_a_machine_steers_nobodys_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names are shown in errors, and everybody chooses its own."""
    monkeypatch.setattr(tcp, "machine_name", lambda: "desk\x1b[2J\n")
    master = f"127.0.0.1:{free_port()}"
    with contextlib.ExitStack() as stack:
        group = together(*[partial(TcpBackend, rank, 3, master) for rank in range(3)])
        for backend in group:
            stack.enter_context(backend)
        for backend in group:
            for rank in {0, 1, 2} - {backend.rank}:
                assert backend.peer_name(rank).startswith("desk [2J  at 127.0.0.1:")
