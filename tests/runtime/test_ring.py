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
        pytest.raises(IoError, match=f"Rank 1 could not listen on port {port}"),
    ):
        RingBackend(DistributedConfig(peers, 1))


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
