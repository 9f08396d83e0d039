"""Ranks can be addressed by their machines, wherever that is known."""

import socket
from collections.abc import Iterator

import pytest

from potluck import RpcAgent, RpcNoConnection, SimulatedBackend, SubBackend, TcpBackend
from potluck.identity.node import NodeIdentity
from potluck.rpc.connection import name_of, places_of
from support.ports import free_port
from support.threads import PATIENCE, together


@pytest.fixture
def pair() -> Iterator[list[TcpBackend]]:
    """Two ranks on this machine."""
    master = f"127.0.0.1:{free_port()}"
    backends = together(
        lambda: TcpBackend(0, 2, master, timeout=PATIENCE),
        lambda: TcpBackend(1, 2, master, timeout=PATIENCE),
    )
    yield backends
    together(*(backend.close for backend in backends))


def test_every_rank_has_a_name_and_the_node_it_has_proved_to_be(pair: list[TcpBackend]) -> None:
    """Our own as well, and in a subgroup."""
    node = NodeIdentity.load_or_generate().id
    for backend in (*pair, SubBackend(pair[0], [0, 1])):
        for place in places_of(backend).values():
            assert place.name.partition(" at ")[0] == socket.gethostname()
            assert place.node == node
            assert place.start is None


def test_what_stands_for_several_ranks_is_refused_with_a_list_of_them(
    pair: list[TcpBackend],
) -> None:
    """A name or an id that two processes of one machine share; an address is unique."""
    with RpcAgent(pair[0]) as caller, RpcAgent(pair[1]) as server:
        server.register("echo", lambda payload: payload)
        node = NodeIdentity.load_or_generate().id
        for name in (socket.gethostname(), node, node[:4]):
            with pytest.raises(RpcNoConnection, match=r"several ranks: 0, 1 \("):
                caller.rpc_sync(name, "echo")
        there = name_of(pair[0], 1)
        assert there is not None
        assert caller.rpc_sync(there, "echo", b"soup") == b"soup"


def test_where_nothing_is_known_there_is_no_node() -> None:
    """Ranks in one process prove nothing."""
    left, right = SimulatedBackend.create_group(2)
    with left, right:
        assert [place.node for place in places_of(left).values()] == ["", ""]
