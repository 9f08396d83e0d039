"""Functions run on so many threads, fairly, and wait for each other no longer than they can."""

import threading
import time

import pytest

from potluck import RpcAgent, RpcError
from potluck.rpc.calls import IncomingCall
from potluck.rpc.server import Workers
from support.agents import Hold, Notes, agents
from support.threads import PATIENCE, eventually


def test_functions_of_many_peers_share_the_workers_fairly() -> None:
    """One with many calls does not hold up another with one."""
    with agents(3, workers=1) as group:
        hold, order = Hold(), Notes()
        group[2].register("hold", hold)
        group[2].register("note", order)
        first = group[0].rpc_async(2, "hold")
        eventually(lambda: hold.running == 1)
        many = [group[0].rpc_async(2, "note", b"many") for _ in range(50)]
        eventually(lambda: len(group[2]._endpoint._workers) == 50)
        one = group[1].rpc_async(2, "note", b"one")
        eventually(lambda: len(group[2]._endpoint._workers) == 51)
        hold.go.set()
        for future in (first, one, *many):
            future.wait(PATIENCE)
        assert order.taken.index(b"one") <= 1


def test_no_more_functions_run_than_there_are_workers() -> None:
    """However many are called."""
    with agents(workers=3) as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        futures = [caller.rpc_async(1, "hold") for _ in range(20)]
        eventually(lambda: hold.running == 3 and len(server._endpoint._workers) == 17)
        names = [thread.name for thread in threading.enumerate()]
        assert names.count("potluck-rpc-work") == 3
        hold.go.set()
        for future in futures:
            future.wait(PATIENCE)


def test_calls_within_calls_need_workers_and_the_error_says_so() -> None:
    """Two ranks that call each other to and fro, deeper than there are workers."""
    with agents(workers=2) as (left, right):

        def bounce(agent: RpcAgent, other: int) -> None:
            def down(payload: bytes) -> bytes:
                depth = int(payload)
                return b"end" if not depth else agent.rpc_sync(other, "bounce", b"%d" % (depth - 1))

            agent.register("bounce", down)

        bounce(left, 1)
        bounce(right, 0)
        assert left.rpc_sync(1, "bounce", b"3") == b"end"
        with pytest.raises(RpcError) as caught:
            left.rpc_sync(1, "bounce", b"10", timeout=PATIENCE)
        assert "workers of rank" in str(caught.value)
        assert left.rpc_sync(1, "bounce", b"3") == b"end"


def test_a_quick_function_that_once_takes_long_holds_up_nobody() -> None:
    """It may even wait for what another call brings."""
    with agents(3) as group:
        server = group[2]
        go, is_slow = threading.Event(), threading.Event()

        def sometimes(payload: bytes) -> bytes:
            if payload == b"wait":
                is_slow.set()
                assert go.wait(PATIENCE)
            return payload

        server.register("sometimes", sometimes)

        @server.register("go")
        def let_go(payload: bytes) -> bytes:
            go.set()
            return payload

        for _ in range(20):
            group[0].rpc_sync(2, "sometimes", b"x")
            group[1].rpc_sync(2, "sometimes", b"x")
        slow = group[0].rpc_async(2, "sometimes", b"wait")
        assert is_slow.wait(PATIENCE)
        assert group[1].rpc_sync(2, "sometimes", b"quick", timeout=PATIENCE) == b"quick"
        group[1].rpc_sync(2, "go", timeout=PATIENCE)
        assert slow.wait(PATIENCE) == b"wait"


class Caller:
    """Who has made a call, as far as the workers ask."""

    rank, is_congested = 1, False


def test_nothing_begins_after_closing() -> None:
    """Neither what waited in the queue nor what comes later; what runs may end."""
    begun, go, ran = threading.Event(), threading.Event(), Notes()

    def run(call: IncomingCall) -> None:
        begun.set()
        go.wait(PATIENCE)
        ran(call.name.encode())

    def call(name: str) -> IncomingCall:
        return IncomingCall(Caller(), 1, name, b"", 60_000)  # type: ignore[arg-type]

    workers = Workers(1, run)
    workers.add(call("first"))
    assert begun.wait(PATIENCE)
    workers.add(call("queued"))
    assert len(workers) == 1
    workers.close(time.monotonic())  # nobody is waited for
    workers.add(call("late"))
    assert len(workers) == 0
    go.set()
    workers.close(time.monotonic() + PATIENCE)
    assert ran.taken == [b"first"]
