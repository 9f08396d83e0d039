"""Calls that take too long, and calls that nobody waits for any more."""

import threading
import time

import pytest

from potluck import RpcAgent, RpcCancelled, RpcError, RpcTimeout, SimulatedBackend
from support.agents import Hold, Notes, agents
from support.threads import PATIENCE, Background, eventually, interrupted_when


def test_a_call_ends_at_its_deadline() -> None:
    """On time, with an error that says so; the connection goes on."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        server.register("echo", lambda payload: payload)
        began = time.monotonic()
        with pytest.raises(RpcTimeout, match=r"'hold' on rank 1 gave no answer within 0.2 s"):
            caller.rpc_sync(1, "hold", timeout=0.2)
        assert 0.15 < time.monotonic() - began < PATIENCE
        assert caller.rpc_sync(1, "echo", b"on") == b"on"
        hold.go.set()


def test_a_future_that_nobody_waits_for_ends_too() -> None:
    """Somebody may have asked to be told."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        ended = threading.Event()
        future = caller.rpc_async(1, "hold", timeout=0.1)
        future.add_done_callback(ended.set)
        assert ended.wait(PATIENCE)
        assert isinstance(future.exception(), RpcTimeout)
        hold.go.set()


def test_the_deadline_is_carried_to_the_function() -> None:
    """And to the calls that it makes itself."""
    with agents(3) as group:
        remaining: list[float] = []

        @group[2].register("look")
        def look(_: bytes) -> bytes:
            call = RpcAgent.current_call()
            assert call is not None
            remaining.append(call.remaining)
            return b""

        group[1].register("pass", lambda _: group[1].rpc_sync(2, "look", timeout=1000))
        group[0].rpc_sync(1, "pass", timeout=7)
        assert 0 < remaining[0] <= 7


def test_a_call_that_found_no_worker_in_time_is_told_so() -> None:
    """All workers were busy: that is the reason, not the network."""
    with agents(workers=2) as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        held = [caller.rpc_async(1, "hold") for _ in range(2)]
        eventually(lambda: hold.running == 2)
        with pytest.raises(RpcTimeout, match="all its 2 workers were busy"):
            caller.rpc_sync(1, "hold", timeout=2)
        hold.go.set()
        assert [future.wait(PATIENCE) for future in held] == [b"", b""]


def test_a_peer_without_an_agent_is_a_timeout() -> None:
    """It may still come: the call waits for it."""
    left, right = SimulatedBackend.create_group(2)
    with left, right, RpcAgent(left) as caller:
        with pytest.raises(RpcTimeout):
            caller.rpc_sync(1, "echo", timeout=0.1)
        waiting = Background(lambda: caller.rpc_sync(1, "echo", b"x", timeout=PATIENCE))
        with RpcAgent(right) as late:
            late.register("echo", lambda payload: payload)
            assert waiting.result() == b"x"


# --- cancellation ---


def test_cancelling_reaches_the_function() -> None:
    """Which may look and give up; and the calls that it waits for are cancelled too."""
    with agents(3) as group:
        hold, outcome = Hold(), []
        group[2].register("hold", hold)

        @group[1].register("pass")
        def pass_on(payload: bytes) -> bytes:
            try:
                return group[1].rpc_sync(2, "hold", payload)
            except RpcError as error:
                outcome.append(type(error))
                raise

        future = group[0].rpc_async(1, "pass")
        eventually(lambda: hold.running == 1)
        assert future.cancel()
        with pytest.raises(RpcCancelled):
            future.wait(PATIENCE)
        assert not future.cancel()
        eventually(lambda: outcome == [RpcCancelled])
        eventually(lambda: hold.calls[0].cancelled)
        hold.go.set()


def test_a_cancelled_call_that_has_not_begun_never_does() -> None:
    """It waits behind others, and is gone."""
    with agents(workers=1) as (caller, server):
        hold, ran = Hold(), Notes()
        server.register("hold", hold)
        server.register("mark", ran)
        held = caller.rpc_async(1, "hold")
        eventually(lambda: hold.running == 1)
        futures = [caller.rpc_async(1, "mark", b"%d" % number) for number in range(3)]
        assert futures[1].cancel()
        connection = server._office.peers[0].connection
        assert connection is not None
        eventually(lambda: len(connection.received) == 3)
        hold.go.set()
        assert [held.wait(PATIENCE), futures[0].wait(PATIENCE), futures[2].wait(PATIENCE)]
        assert ran.taken == [b"0", b"2"]


def test_a_long_call_that_is_cancelled_half_way_never_runs() -> None:
    """Its memory is the caller's again, so what has arrived may be torn."""
    with agents() as (caller, server):
        ran = Notes()
        server.register("mark", ran)
        server.register("echo", lambda payload: payload)
        caller.rpc_sync(1, "echo")
        connection = server._office.peers[0].connection
        assert connection is not None
        payload = bytearray(8 << 20)
        with connection.reading:  # the server reads nothing meanwhile
            begun = caller.rpc_async(1, "mark", payload)
            behind = caller.rpc_async(1, "mark", bytearray(60 << 20))
            assert begun.cancel()
            assert behind.cancel()
        server._office._loop._call()
        payload[:] = b"x" * len(payload)
        assert caller.rpc_sync(1, "echo", b"on") == b"on"
        ours = caller._office.peers[1].connection
        assert ours is not None
        eventually(lambda: not ours.sent)
        assert ran.taken == []


def test_a_callback_that_fails_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and the thread that called it goes on."""
    with agents() as (caller, server):
        server.register("echo", lambda payload: payload)
        future = caller.rpc_async(1, "echo", b"x")
        go = threading.Event()
        server.register("hold", lambda payload: payload if go.wait(PATIENCE) else b"")
        held = caller.rpc_async(1, "hold")
        held.add_done_callback(lambda: 1 / 0)  # type: ignore[arg-type]
        go.set()
        assert held.wait(PATIENCE) == future.wait(PATIENCE)[:0]
        eventually(lambda: "ZeroDivisionError" in caplog.text)
        assert caller.rpc_sync(1, "echo", b"on") == b"on"


def test_an_interrupt_cancels_the_call() -> None:
    """Ctrl-C ends the waiting, the other side learns so, and the agent can be used on."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        server.register("echo", lambda payload: payload)
        with pytest.raises(KeyboardInterrupt), interrupted_when(lambda: hold.running == 1):
            caller.rpc_sync(1, "hold", timeout=PATIENCE)
        eventually(lambda: hold.calls[0].cancelled)
        hold.go.set()
        assert caller.rpc_sync(1, "echo", b"on") == b"on"
