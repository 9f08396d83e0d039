"""A member that sends what no correct process sends: removed, with one error on all others."""

from __future__ import annotations

from typing import Any

import pytest

from potluck import Cluster, MalformedFrame, PeerLost, _values
from potluck.cluster.connections import CLUSTER
from potluck.collective import collectives
from support.clusters import clusters, everywhere
from support.threads import PATIENCE


def check_removal(others: list[Cluster], errors: list[PeerLost], words: str) -> None:
    """All have the same error, which names the culprit, and the next call runs among them."""
    (text,) = {str(error) for error in errors}
    assert text.startswith("Rank 2 (")
    assert "was removed: " in text
    assert words in text
    assert {(error.rank, bool(error.host)) for error in errors} == {(2, True)}
    assert everywhere(others, lambda node: node.all_gather_object(node.rank)) == [[0, 1]] * 2


def test_a_control_message_that_cannot_be_understood() -> None:
    """It comes on an authenticated connection: its sender is a member, and is removed."""
    with clusters(3) as nodes:
        everywhere(nodes, lambda node: node.barrier(PATIENCE))
        below: Any = nodes[2].innermost
        control = below._node.control

        def send() -> None:
            for opened in control.links.opened_connections:
                control.links.io.send(opened.connection, b"\xff\xfe", CLUSTER)

        control.post(send)

        def learn(node: Cluster) -> PeerLost:
            with pytest.raises(PeerLost) as told:
                node.barrier(PATIENCE)
            return told.value

        errors = everywhere(nodes[:2], learn)
        check_removal(nodes[:2], errors, "it sent an invalid message")


def test_an_object_that_cannot_be_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a call of the program, whose error names the rank instead of ending with a parser's."""
    encode = _values.encode
    monkeypatch.setattr(
        collectives, "encode", lambda value: b"\xc1" if value == "garbage" else encode(value)
    )
    with clusters(3) as nodes:

        def call(node: Cluster) -> Exception:
            value = "garbage" if node is nodes[2] else "honest"
            with pytest.raises((PeerLost, MalformedFrame)) as told:
                node.all_gather_object(value, timeout=PATIENCE)
            return told.value

        *errors, own = everywhere(nodes, call)
        assert isinstance(own, MalformedFrame)
        assert all(isinstance(error, PeerLost) for error in errors)
        check_removal(nodes[:2], errors, "Rank 2 sent an object that cannot be decoded")  # type: ignore[arg-type]
