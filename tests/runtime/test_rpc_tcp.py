"""Whole messages for remote calls travel apart from all others."""

from unittest import mock

import pytest

from potluck import RpcInvalidMessage, RpcNoConnection, SimulatedBackend, SubBackend, TcpRpcBackend
from potluck.runtime import rpc_tcp
from support.threads import PATIENCE


def test_messages_for_calls_do_not_meet_others() -> None:
    """Nor those of a subgroup."""
    left, right = SimulatedBackend.create_group(2)
    subs = [SubBackend(each, [0, 1]) for each in (left, right)]
    with left, right:
        left.send(b"mine", 1)
        TcpRpcBackend(subs[0]).send(b"part", 1)
        TcpRpcBackend(left).send(b"call", 1)
        inbox = bytearray(4)
        for receive, expected in (
            (TcpRpcBackend(right), b"call"),
            (TcpRpcBackend(subs[1]), b"part"),
        ):
            receive.recv(inbox, 0, timeout=PATIENCE)
            assert inbox == expected
        right.recv(inbox, 0, timeout=PATIENCE)
        assert inbox == b"mine"


def test_it_knows_its_place() -> None:
    """As the backend does."""
    with SimulatedBackend.create_group(3)[2] as backend:
        assert (TcpRpcBackend(backend).rank, TcpRpcBackend(backend).world_size) == (2, 3)


def test_a_message_over_the_limit_is_refused() -> None:
    """In both directions, before anything moves."""
    with (
        SimulatedBackend.create_group(1)[0] as backend,
        mock.patch.object(rpc_tcp, "MAX_RPC_MSG_SIZE", 10),
    ):
        messages = TcpRpcBackend(backend)
        with pytest.raises(RpcInvalidMessage, match=r"RPC message size 11 exceeds maximum"):
            messages.send(bytes(11), 0)
        with pytest.raises(RpcInvalidMessage, match=r"RPC message size 11 exceeds maximum"):
            messages.recv(bytearray(11), 0)


def test_a_rank_that_is_gone_is_no_connection() -> None:
    """Whether something is sent or awaited."""
    left, right = SimulatedBackend.create_group(2)
    right.close()
    with left:
        messages = TcpRpcBackend(left)
        with pytest.raises(RpcNoConnection, match="no connection to rank 1"):
            messages.recv(bytearray(1), 1, timeout=PATIENCE)
        with pytest.raises(RpcNoConnection, match="no connection to rank 1"):
            messages.send(b"x", 1, timeout=PATIENCE)
