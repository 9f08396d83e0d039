"""Packets of full size: that they arrive is seen without the other program's help."""

from __future__ import annotations

import socket

import pytest

from potluck.net.addresses import Address
from potluck.runtime.diagnosis import packets
from potluck.runtime.diagnosis.packets import Passage, measure_passage


def test_what_arrives_has_passed() -> None:
    """The other side's kernel says so, even if its program never looks."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        passage = measure_passage(Address(*door.getsockname()))
    assert passage is not None
    assert passage.passes == passage.packet > 1500


def test_the_largest_size_that_passes_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way that loses the larger ones; one that loses all tells nothing of their size."""
    limit = 1300

    def lose(_address: Address, size: int) -> tuple[int, bool | None]:
        return size or 1500, 0 < size <= limit

    monkeypatch.setattr(packets, "_try", lose)
    assert measure_passage(Address("10.0.0.2", 1)) == Passage(1500, 1280)
    limit = 100
    assert measure_passage(Address("10.0.0.2", 1)) is None


def test_where_nobody_listens_nothing_is_told() -> None:
    """And no error leaves the door."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        address = Address(*door.getsockname())
    assert measure_passage(address) is None
