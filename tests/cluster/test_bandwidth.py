"""Probes of a link: right, bounded, polite, and robust against the other side."""

import functools
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from potluck import MalformedFrame, PeerLost, SimulatedBackend, Timeout
from potluck.backend.base import PeerStream
from potluck.cluster.bandwidth import (
    BLOCK,
    NEVER_MORE,
    PINGS,
    Bandwidth,
    ProbeLimits,
    ProbeMessage,
    measure_bandwidth,
    probe_link,
    probe_links,
    steady_rate,
)
from potluck.net.tcp import TcpStream, make_poller
from support.sealed_pair import connect
from support.threads import Background, together

SHORT = ProbeLimits(seconds=0.05, max_bytes=1 << 22)
HEAD = struct.Struct("<BQ")


@contextmanager
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of a connection over TCP."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        left = socket.create_connection(listener.getsockname())
        right = listener.accept()[0]
    with left, right:
        yield left, right


def answer_pings(sock: socket.socket) -> int:
    """Say of each ping that it came, as the other side of a probe; the latency that was found."""
    while True:
        word, value = HEAD.unpack(sock.recv(HEAD.size, socket.MSG_WAITALL))
        if word == ProbeMessage.LATENCY:
            return int(value)
        sock.sendall(HEAD.pack(ProbeMessage.PING, value))


def ping(sock: socket.socket) -> None:
    """Time the link, as the first side of a probe."""
    for number in range(PINGS):
        sock.sendall(HEAD.pack(ProbeMessage.PING, number))
        assert HEAD.unpack(sock.recv(HEAD.size, socket.MSG_WAITALL)) == (ProbeMessage.PING, number)
    sock.sendall(HEAD.pack(ProbeMessage.LATENCY, 1000))


def measure(opened: PeerStream, *, first: bool, limits: ProbeLimits = SHORT) -> Bandwidth:
    """One side of a probe."""
    poller = make_poller()
    try:
        return measure_bandwidth(opened, poller, first=first, limits=limits)
    finally:
        poller.close()


@pytest.mark.parametrize("sealed", [False, True])
def test_both_sides_find_the_same(sealed: bool) -> None:
    """What the one sends is what the other receives; encrypted or in clear."""
    pair = connect()
    seals = [(pair.a_seals, pair.a_opens), (pair.b_seals, pair.b_opens)]
    with sockets() as ends:
        opened = [
            PeerStream(TcpStream(end), seal if sealed else None)
            for end, seal in zip(ends, seals, strict=True)
        ]
        here, there = together(
            lambda: measure(opened[0], first=True), lambda: measure(opened[1], first=False)
        )
    assert (here.up, here.down, here.latency) == (there.down, there.up, there.latency)
    assert 0 < here.latency < 1_000_000_000
    assert min(here.up, here.down) > 1_000_000


def test_ranks_of_any_backend_can_be_probed() -> None:
    """The lower rank begins; the stream is opened and closed for the purpose."""
    backends = SimulatedBackend.create_group(2)
    try:
        here, there = together(
            lambda: probe_link(backends[0], 1, limits=SHORT),
            lambda: probe_link(backends[1], 0, limits=SHORT),
        )
        assert (here.up, here.down) == (there.down, there.up)
        assert here.up > 0
    finally:
        for backend in backends:
            backend.close()


@pytest.mark.parametrize("size", [1, 3, 4])
def test_all_links_of_a_group_are_probed_in_turns(size: int) -> None:
    """Each rank with each other, with nobody twice, and both find the same."""
    backends = SimulatedBackend.create_group(size)
    limits = ProbeLimits(seconds=0.02, max_bytes=1 << 20)
    try:
        found = together(
            *(functools.partial(probe_links, backend, limits=limits) for backend in backends)
        )
    finally:
        for backend in backends:
            backend.close()
    for rank, links in enumerate(found):
        assert sorted([*links, rank]) == list(range(size))
        assert all(link.up == found[other][rank].down for other, link in links.items())


@pytest.mark.parametrize("busy", [0, 1])
def test_a_probe_ends_when_the_link_is_needed(busy: int) -> None:
    """Whichever side it is; what was broken off has no result, and no bytes follow."""
    backends = SimulatedBackend.create_group(2)
    limits = ProbeLimits(seconds=20, max_bytes=NEVER_MORE, patience=20)
    begin = time.monotonic()
    try:
        found = together(
            lambda: probe_link(backends[0], 1, limits=limits, is_idle=lambda: busy != 0),
            lambda: probe_link(backends[1], 0, limits=limits, is_idle=lambda: busy != 1),
        )
        assert {(each.up, each.down) for each in found} == {(0, 0)}
        assert time.monotonic() - begin < 10
    finally:
        for backend in backends:
            backend.close()


def test_bytes_are_bounded() -> None:
    """A fast link is not filled for longer than the bytes last."""
    with sockets() as (left, right):
        other = Background(lambda: measure(PeerStream(TcpStream(left)), first=True))
        latency = answer_pings(right)
        received = bytearray()
        while HEAD.pack(ProbeMessage.END, 1) not in received[-64:]:
            received += right.recv(1 << 20)
            right.sendall(HEAD.pack(ProbeMessage.ARRIVED, len(received)))
        assert len(received) <= SHORT.max_bytes + SHORT.max_bytes // BLOCK * 64
        right.sendall(HEAD.pack(ProbeMessage.RATE, 77) + HEAD.pack(ProbeMessage.END, 1))
        assert other.result() == Bandwidth(77, 0, latency)


def test_no_more_is_on_its_way_than_is_answered() -> None:
    """Without an answer two blocks are sent, so a slow link has no long queue."""
    with sockets() as (left, right):
        other = Background(lambda: measure(PeerStream(TcpStream(left)), first=True))
        latency = answer_pings(right)
        received = bytearray()
        while HEAD.pack(ProbeMessage.END, 1) not in received[-64:]:
            received += right.recv(1 << 20)
        assert len(received) == 2 * (BLOCK + HEAD.size) + HEAD.size
        right.sendall(HEAD.pack(ProbeMessage.RATE, 1) + HEAD.pack(ProbeMessage.END, 0))
        assert other.result() == Bandwidth(1, 0, latency)


@pytest.mark.parametrize(
    "said",
    [
        HEAD.pack(9, 0),
        HEAD.pack(ProbeMessage.BLOCK, BLOCK + 1),
        HEAD.pack(ProbeMessage.RATE, 1 << 63),
        HEAD.pack(ProbeMessage.STOP, 0) * 5000,
        b"GET / HTTP/1.1\r\n\r\n",
        HEAD.pack(ProbeMessage.BLOCK, 1) + b"x",
        HEAD.pack(ProbeMessage.LATENCY, 1),
    ],
    ids=["word", "block", "number", "flood", "stranger", "early-block", "early-latency"],
)
def test_nonsense_is_refused(said: bytes) -> None:
    """Words that do not exist, numbers out of bounds, a flood of words."""
    with sockets() as (left, right):
        right.sendall(said)
        with pytest.raises(MalformedFrame, match="broke the protocol of bandwidth probes"):
            measure(PeerStream(TcpStream(left)), first=False)


def test_a_peer_that_sends_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever limits it believes in."""
    monkeypatch.setattr("potluck.cluster.bandwidth.NEVER_MORE", 4 * BLOCK)
    with sockets() as (left, right):
        other = Background(lambda: measure(PeerStream(TcpStream(left)), first=False))
        ping(right)
        right.sendall((HEAD.pack(ProbeMessage.BLOCK, BLOCK) + bytes(BLOCK)) * 5)
        with pytest.raises(MalformedFrame, match="more than 262144 bytes"):
            other.result()


def test_a_peer_that_takes_no_part_is_given_up() -> None:
    """After the patience of the limits."""
    limits = ProbeLimits(seconds=0.01, patience=0.2)
    with (
        sockets() as (left, _),
        pytest.raises(Timeout, match=r"did not respond to the bandwidth probe for 0\.2 s"),
    ):
        measure(PeerStream(TcpStream(left)), first=True, limits=limits)


@pytest.mark.parametrize("first", [True, False])
def test_a_peer_that_goes_away_is_noticed_at_once(first: bool) -> None:
    """Whether it closes properly or breaks the connection."""
    with sockets() as (left, right):
        right.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", first, 0))
        right.close()
        with pytest.raises(PeerLost, match="disconnected during the bandwidth probe"):
            measure(PeerStream(TcpStream(left)), first=first)


@pytest.mark.parametrize("wrong", [{"seconds": 0.0}, {"max_bytes": 1}, {"max_bytes": 1 << 40}])
def test_limits_that_are_none_are_refused(wrong: dict[str, float]) -> None:
    """A probe is short, but not nothing."""
    with pytest.raises(ValueError, match="A probe needs some time"):
        ProbeLimits(**wrong)  # type: ignore[arg-type]


def test_the_second_half_counts() -> None:
    """Not the burst at the beginning; too little to tell is 0."""
    assert steady_rate([]) == 0
    assert steady_rate([(1.0, 5)]) == 0
    assert steady_rate([(1.0, 5), (2.0, 15)]) == 10
    steps = [(0.0, 1000), *((n / 10, 1000 + 10 * n) for n in range(1, 11))]
    assert steady_rate(steps) == 100
