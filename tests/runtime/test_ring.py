"""RingBackend: a group written down by hand."""

import contextlib
import socket
from collections.abc import Iterator

import numpy as np
import pytest

from potluck import (
    AllReduceStrategy,
    Backend,
    CollectiveConfig,
    DistributedConfig,
    DistributedContext,
    DistributedError,
    InvalidRank,
    IoError,
    PeerLost,
    RingBackend,
    TcpBackend,
    Timeout,
)
from potluck.runtime.group import Group
from support.ports import free_port
from support.threads import together


@contextlib.contextmanager
def ring(size: int, collectives: CollectiveConfig | None = None) -> Iterator[list[RingBackend]]:
    """All ranks of a group on this machine, over sealed TCP."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(size)]
    ranks = together(
        *(
            lambda rank=rank: RingBackend(DistributedConfig(peers, rank), collectives)
            for rank in range(size)
        )
    )
    with contextlib.ExitStack() as stack:
        for rank in ranks:
            stack.enter_context(rank)
        yield ranks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_ring_has_collectives_of_its_own(size: int) -> None:
    """The same as a context has, and a context on top uses them."""
    with ring(size) as ranks:
        assert [rank.config.rank for rank in ranks] == list(range(size))

        def act(rank: RingBackend) -> tuple[float, int]:
            array = np.ones(5)
            rank.all_reduce(array)
            rank.barrier()
            return array[0], DistributedContext(rank).all_reduce(rank.rank)

        results = together(*(lambda rank=rank: act(rank) for rank in ranks))
        assert results == [(size, sum(range(size)))] * size


def test_a_ring_can_be_asked_for() -> None:
    """Unless told so the algorithm follows from the links."""
    config = CollectiveConfig(local_all_reduce=AllReduceStrategy.RING)
    with ring(3, config) as ranks:
        results = together(*(lambda rank=rank: rank.all_reduce(2.0) for rank in ranks))
        assert results == [6.0] * 3


def test_every_rank_listens_where_the_others_expect_it() -> None:
    """At the port of its own address, so that a firewall can be told."""
    with ring(3) as ranks:
        ports = [address.port for address in ranks[0].config.addresses]
        for rank in ranks:
            backend = rank.backend
            assert isinstance(backend, TcpBackend)
            assert backend._acceptor.port == ports[rank.rank]


def test_a_port_that_is_taken_is_named() -> None:
    """At once, and not as if rank 0 could not be reached."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    port = int(peers[1].rpartition(":")[2])
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(IoError, match=rf"Rank 1 could not listen on 127.0.0.1:{port} \(peers\[1\]"),
    ):
        RingBackend(DistributedConfig(peers, 1))


@pytest.mark.parametrize("rank", [0, 1])
def test_an_address_of_another_machine_is_refused_where_it_is_wrong(rank: int) -> None:
    """That rank says which entry it is; it does not listen elsewhere and blame another rank."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    peers[rank] = "203.0.113.77:29500"  # of a range that no machine has
    said = rf"Rank {rank} could not listen on {peers[rank]} \(peers\[{rank}\]\)"
    with pytest.raises(IoError, match=said) as caught:
        RingBackend(DistributedConfig(peers, rank))
    assert f"Start rank {rank} on the machine that has it" in str(caught.value.hint)


def test_every_rank_is_reached_at_its_own_entry() -> None:
    """Also where ranks have different addresses; each listens there and nowhere else."""
    peers = [(f"127.0.0.{rank + 1}", free_port()) for rank in range(3)]
    ranks = together(
        *(lambda rank=rank: RingBackend(DistributedConfig(peers, rank)) for rank in range(3))
    )
    with contextlib.ExitStack() as stack:
        for each in ranks:
            stack.enter_context(each)
        assert "127.0.0.2" in ranks[2].peer_name(1)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", peers[1][1]))
        socket.create_connection(peers[1]).close()


def test_lists_that_differ_are_refused_by_the_entry() -> None:
    """Rank 0 tells the rank that came from elsewhere, and knows it when its time is up."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    other = [peers[0], f"127.0.0.1:{free_port()}"]

    def start(rank: int, listed: list[str]) -> str:
        with pytest.raises(DistributedError) as caught:
            RingBackend(DistributedConfig(listed, rank, timeout=1.5))
        return str(caught.value)

    first, second = together(lambda: start(0, peers), lambda: start(1, other))
    assert "peers[1] is 127.0.0.1, port" in first
    assert "peers[1] is 127.0.0.1, port" in second
    assert "give every rank the same list of peers" in second


def test_a_third_rank_with_another_list_is_refused_by_the_entry() -> None:
    """Rank 0 cannot see the lists of the others; each rank compares where all are."""
    peers = [f"127.0.0.1:{free_port()}" for _ in range(3)]
    other = [peers[0], f"127.0.0.1:{free_port()}", peers[2]]

    def start(rank: int, listed: list[str]) -> str:
        with pytest.raises(DistributedError) as caught:
            RingBackend(DistributedConfig(listed, rank, timeout=1.5))
        return str(caught.value)

    said = together(lambda: start(0, peers), lambda: start(1, peers), lambda: start(2, other))
    assert "peers[1] is 127.0.0.1, port" in said[2]
    assert "on rank 2, but rank 1 listens on 127.0.0.1" in said[2]


def test_a_rank_that_does_not_come_is_named_with_its_entry() -> None:
    """So that a wrong address in all lists is found."""
    peers = [f"127.0.0.1:{free_port()}", "203.0.113.77:29500"]
    with pytest.raises(Timeout, match=r"rank 1 \(peers\[1\], 203.0.113.77:29500\)"):
        RingBackend(DistributedConfig(peers, 0, timeout=0.3))
    peers.reverse()
    peers[0] = f"127.0.0.1:{free_port()}"
    with pytest.raises(Timeout, match=rf"rank 0 at {peers[0]} \(peers\[0\]\)"):
        RingBackend(DistributedConfig(peers, 1, timeout=0.3))


def test_a_group_that_cannot_be_made_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connections are closed before the error is passed on."""
    made = []

    def refuse(backend: Backend, config: object) -> Group:
        made.append(backend)
        raise PeerLost("gone already")

    monkeypatch.setattr(Group, "of", refuse)
    with pytest.raises(PeerLost):
        RingBackend(DistributedConfig(["127.0.0.1:9"], 0))
    (backend,) = made
    with pytest.raises(DistributedError):
        backend.post_send(b"", 0)


def test_a_wrong_configuration_opens_nothing() -> None:
    """It is looked at first."""
    with pytest.raises(InvalidRank):
        RingBackend(DistributedConfig(["127.0.0.1:1"], rank=4))
