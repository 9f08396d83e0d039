"""Calls that are too many or too large, and calls to somebody who is gone."""

from unittest import mock

import numpy as np
import pytest

from potluck import (
    RpcAgent,
    RpcBusy,
    RpcConfig,
    RpcNoConnection,
    RpcRemoteError,
    RpcTooLarge,
    SimulatedBackend,
)
from support.agents import Hold, agents
from support.threads import PATIENCE, Background, eventually, together


def test_a_request_over_the_limit_is_not_sent() -> None:
    """Neither over our own limit nor over the other side's."""
    left, right = SimulatedBackend.create_group(2)
    with (
        left,
        right,
        RpcAgent(left, RpcConfig(max_message=100_000)) as caller,
        RpcAgent(right, RpcConfig(max_message=1_000)) as server,
    ):
        server.register("size", lambda payload: b"%d" % len(payload))
        with pytest.raises(RpcTooLarge, match="maximum allowed size 100000"):
            caller.rpc_sync(1, "size", bytes(100_000))
        with pytest.raises(RpcTooLarge, match="maximum allowed size 1000"):
            caller.rpc_sync(1, "size", bytes(1_000))
        assert caller.rpc_sync(1, "size", bytes(900)) == b"900"
        with pytest.raises(RpcTooLarge, match="maximum allowed size 1000"):
            caller.rpc_sync(1, "size", bytes(50_000))


def test_a_response_over_the_limit_is_an_error() -> None:
    """Of the caller's limit; the connection goes on."""
    with agents(max_message=10_000) as (caller, server):
        server.register("give", lambda payload: bytes(int(payload)))
        with pytest.raises(RpcTooLarge, match="RPC response size"):
            caller.rpc_sync(1, "give", b"20000")
        assert caller.rpc_sync(1, "give", b"5") == bytes(5)
        with pytest.raises(RpcTooLarge, match="RPC response size"):
            server.rpc_sync(1, "give", b"20000")


def test_whoever_makes_too_many_calls_waits() -> None:
    """Or is told, when the time is up: memory does not grow."""
    with agents(workers=1, calls=2, backlog=4) as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        futures = [caller.rpc_async(1, "hold") for _ in range(6)]
        with pytest.raises(RpcBusy, match="4 calls to rank 1 wait already"):
            caller.rpc_async(1, "hold", timeout=0.05)
        one_more = Background(lambda: caller.rpc_async(1, "hold").wait(PATIENCE))
        hold.go.set()
        assert one_more.result() == b""
        assert [future.wait(PATIENCE) for future in futures] == [b""] * 6


def test_large_payloads_do_not_block_small_calls() -> None:
    """A small call returns while a large one is still under way."""
    with agents() as (caller, server):
        server.register("echo", lambda payload: payload)
        server.expose(lambda array: array, name="same")
        array = np.ones(24 << 20, np.uint8)
        large = [caller.call_async(1, "same", array) for _ in range(4)]
        assert caller.rpc_sync(1, "echo", b"small") == b"small"
        assert not all(future.done for future in large)
        for future in large:
            assert future.wait(PATIENCE).nbytes == array.nbytes


# --- losses ---


def test_a_lost_rank_fails_its_calls_at_once() -> None:
    """Those under way and those that are made later; others go on."""
    backends = SimulatedBackend.create_group(3)
    group = [RpcAgent(backend) for backend in backends]
    hold = Hold()
    for agent in group:
        agent.register("hold", hold)
        agent.register("echo", lambda payload: payload)
    pending = [group[0].rpc_async(1, "hold", timeout=1000) for _ in range(5)]
    eventually(lambda: hold.running == 5)
    backends[1].lose()
    for future in pending:
        with pytest.raises(RpcNoConnection, match="no connection to rank 1"):
            future.wait(PATIENCE)
    with pytest.raises(RpcNoConnection):
        group[0].rpc_sync(1, "echo", timeout=1000)
    assert group[0].rpc_sync(2, "echo", b"on") == b"on"
    hold.go.set()
    together(*(backend.close for backend in backends))


def test_only_idempotent_calls_are_made_again() -> None:
    """When the connection breaks but the rank is still there."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        once = caller.rpc_async(1, "hold", b"once")
        again = caller.rpc_async(1, "hold", b"again", idempotent=True)
        eventually(lambda: hold.running == 2)
        connection = caller._office.peers[1].connection
        assert connection is not None
        connection.wire.stream.close()
        with pytest.raises(RpcNoConnection):
            once.wait(PATIENCE)
        eventually(lambda: hold.running == 3)
        hold.go.set()
        assert again.wait(PATIENCE) == b"again"


def test_whatever_interrupts_the_reading_thread_costs_one_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It reads for all ranks: were it to end, no call would ever be answered again."""
    with agents(3) as (caller, server, other):
        for agent in (server, other):
            agent.register("echo", lambda payload: payload)
        assert caller.rpc_sync(1, "echo", b"on") == b"on"
        connection = caller._office.peers[1].connection
        assert connection is not None
        ended = mock.patch.object(connection._reader, "read", side_effect=SystemExit)
        with ended, pytest.raises(RpcNoConnection):
            caller.rpc_sync(1, "echo", b"lost", timeout=PATIENCE)
        assert "Reading from rank 1 failed" in caplog.text
        assert caller.rpc_sync(2, "echo", b"on", timeout=PATIENCE) == b"on"
        again = caller.rpc_sync(1, "echo", b"again", timeout=PATIENCE, idempotent=True)
        assert again == b"again"


def test_an_exit_in_a_function_ends_only_the_call() -> None:
    """The process and its workers go on."""
    with agents() as (caller, server):

        @server.register("leave")
        def leave(_: bytes) -> bytes:
            raise SystemExit(3)

        with pytest.raises(RpcRemoteError, match="SystemExit"):
            caller.rpc_sync(1, "leave")
        with pytest.raises(RpcRemoteError, match="SystemExit"):
            caller.rpc_sync(1, "leave")
