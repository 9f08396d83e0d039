"""Whereabouts: what a process says of where it is, and what others make of it."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.errors import MalformedFrame
from potluck.net.whereabouts import LONGEST, Whereabouts, free_ports


def test_it_survives_the_way() -> None:
    """The same comes out at the other end, with as many ports as were asked for."""
    here = Whereabouts.here(3)
    assert Whereabouts.from_bytes(here.to_bytes(), "rank 1") == here
    assert len(set(here.ports)) == 3
    assert here.machine == Whereabouts.here().machine


def test_addresses_fit_who_asks() -> None:
    """Loopback among processes of one machine, or where there is nothing else."""
    there = Whereabouts("m", ["10.0.0.5", "fe80::1"], [7, 8])
    assert there.addresses(is_local=True) == ["127.0.0.1:7", "127.0.0.1:8"]
    assert there.addresses(is_local=False)[:3] == ["10.0.0.5:7", "[fe80::1]:7", "10.0.0.5:8"]
    assert there.addresses(is_local=False, also="desk.vpn")[0] == "desk.vpn:7"
    assert there.addresses(is_local=True, also="desk.vpn") == ["127.0.0.1:7", "127.0.0.1:8"]
    odd = Whereabouts("m", ["evil.example", "10.0.0.5:1", "a b", "fe80::1%eth0"], [7])
    assert odd.addresses(is_local=False) == ["[fe80::1%eth0]:7"]
    assert Whereabouts("m", [], [7]).addresses(is_local=False) == ["127.0.0.1:7"]


@pytest.mark.parametrize(
    "data",
    [
        *(b"", b"{}", b"null", b"\xff", b'{"machine": 1, "hosts": [], "ports": []}'),
        *(b'{"machine": "", "hosts": [], "ports": [0]}', b" " * (LONGEST + 1)),
        b'{"machine": "", "hosts": [' + b'"a",' * 30 + b'"a"], "ports": []}',
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    """A store is open to everybody: what is in it may be anything."""
    with pytest.raises(MalformedFrame, match="What is said of rank 3"):
        Whereabouts.from_bytes(data, "rank 3")


GOOD = Whereabouts("machine", ["10.0.0.5"], [29500]).to_bytes()


@given(st.binary(max_size=64), st.integers(0, len(GOOD)), st.integers(0, 64))
def test_noise_is_refused_or_means_something(noise: bytes, start: int, length: int) -> None:
    """Also in the middle of what would be right."""
    for data in (noise, GOOD[:start] + noise + GOOD[start + length :]):
        with contextlib.suppress(MalformedFrame):
            found = Whereabouts.from_bytes(data, "rank 0")
            assert all(0 < port < 65536 for port in found.ports)


def test_ports_are_free() -> None:
    """And none is proposed twice."""
    assert len(set(free_ports(8))) == 8
