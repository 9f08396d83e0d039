"""Agents that are closed and made anew on the same group: no call of a new one is lost."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial

import pytest

from potluck import Backend, RpcAgent, RpcNoConnection, RpcTimeout, SimulatedBackend, TcpBackend
from support.ports import free_port
from support.threads import PATIENCE, eventually, together

Begin = Callable[[int], list[Backend]]


def simulated(count: int) -> list[Backend]:
    """A group in memory."""
    return list(SimulatedBackend.create_group(count))


def over_tcp(count: int) -> list[Backend]:
    """A group of sockets, in threads of this process."""
    master = f"127.0.0.1:{free_port()}"
    return together(
        *(partial(TcpBackend, rank, count, master, timeout=PATIENCE) for rank in range(count))
    )


def cycle(backend: Backend, count: int, *, barriers: bool, pause: float) -> list[bytes]:
    """Make an agent, call all others, be called by all others, close; so many times.

    Returns the answers that were not those of the same cycle.
    """
    wrong, rng = [], random.Random(backend.rank)
    others = [rank for rank in range(backend.world_size) if rank != backend.rank]
    for number in range(count):
        called = threading.Semaphore(0)

        def word(_: bytes, number: int = number, called: threading.Semaphore = called) -> bytes:
            called.release()
            return b"%d" % number

        with RpcAgent(backend) as agent:
            agent.register("word", word)
            if barriers:
                backend.barrier(PATIENCE)
            time.sleep(pause * (1 + backend.rank) * rng.random())  # at a speed of its own
            answers = [agent.rpc_sync(rank, "word", timeout=PATIENCE) for rank in others]
            wrong += [answer for answer in answers if answer != b"%d" % number]
            for _ in others:
                assert called.acquire(timeout=PATIENCE)
            if barriers:
                backend.barrier(PATIENCE)
    return wrong


def assert_cycles_work(begin: Begin, world_size: int, count: int, *, barriers: bool) -> None:
    """Each call of each agent is answered by an agent of the same cycle."""
    backends = begin(world_size)
    try:
        runs = [partial(cycle, each, count, barriers=barriers, pause=0.002) for each in backends]
        assert together(*runs, within=PATIENCE + count) == [[]] * world_size
    finally:
        together(*(backend.close for backend in backends))


@pytest.mark.parametrize("barriers", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("begin", [simulated, over_tcp])
def test_the_calls_of_a_new_agent_reach_the_new_agents(
    begin: Begin, world_size: int, barriers: bool
) -> None:
    """However far the ranks are apart, and whether they wait for each other or not."""
    assert_cycles_work(begin, world_size, 15, barriers=barriers)


@pytest.mark.soak
@pytest.mark.parametrize("barriers", [True, False])
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("begin", [simulated, over_tcp])
def test_the_same_hundreds_of_times(begin: Begin, world_size: int, barriers: bool) -> None:
    """What goes wrong rarely."""
    assert_cycles_work(begin, world_size, 300, barriers=barriers)


@pytest.mark.parametrize("closing", [0, 1])
def test_an_agent_that_closed_and_was_not_made_anew_is_named_at_once(closing: int) -> None:
    """Whichever of the two dials; a new one can be called again."""
    backends = SimulatedBackend.create_group(2)
    with backends[0], backends[1], RpcAgent(backends[1 - closing]) as caller:
        peer = caller._office.peers[closing]
        for word in (b"first", b"second"):
            with RpcAgent(backends[closing]) as server:
                server.register("word", lambda _, word=word: word)
                assert caller.rpc_sync(closing, "word", timeout=PATIENCE, idempotent=True) == word
            eventually(lambda: peer.connection is None or peer.connection.allowance is None)
            for _ in range(2):
                with pytest.raises(RpcNoConnection, match="it has closed its agent"):
                    caller.rpc_sync(closing, "word", timeout=1000)
                eventually(lambda: closing == 1 or peer.connection is not None)  # it has dialled


def test_a_call_waits_for_the_agent_of_its_own_generation() -> None:
    """While the other rank has closed the one before, or has not closed it yet."""
    left, right = SimulatedBackend.create_group(2)
    with left, right:
        old = RpcAgent(right)
        old.register("word", lambda _: b"old")
        with RpcAgent(left) as first:
            assert first.rpc_sync(1, "word", timeout=PATIENCE) == b"old"
        with RpcAgent(left) as second:
            early = second.rpc_async(1, "word", timeout=PATIENCE)
            peer = second._office.peers[1]
            eventually(lambda: bool(peer.connection and peer.connection.allowance))
            assert not early.done
            old.close()
            later = second.rpc_async(1, "word", timeout=PATIENCE)
            with pytest.raises(RpcTimeout, match="rank 1"):
                second.rpc_sync(1, "word", timeout=0.05)
            with RpcAgent(right) as new:
                new.register("word", lambda _: b"new")
                assert early.wait(PATIENCE) == later.wait(PATIENCE) == b"new"


def test_a_rank_that_keeps_its_agent_is_called_by_new_ones() -> None:
    """From a call's half time on at the latest; and the agent that calls can be called back."""
    left, right = SimulatedBackend.create_group(2)
    with left, right, RpcAgent(right) as server:
        server.register("word", lambda _: b"kept")
        RpcAgent(left).close()
        with RpcAgent(left) as client:
            client.register("back", lambda _: client.rpc_sync(1, "word", timeout=PATIENCE))
            assert server.rpc_sync(0, "back", timeout=PATIENCE, idempotent=True) == b"kept"
            assert client.rpc_sync(1, "word", timeout=2.0) == b"kept"


def test_what_was_answered_arrives_although_the_agent_closes() -> None:
    """Also a long answer, which takes some time, and that of a function that closes it."""
    left, right = SimulatedBackend.create_group(2)
    with left, right, RpcAgent(left) as caller:
        server = RpcAgent(right)
        begun = threading.Event()

        def give(_: bytes) -> bytes:
            begun.set()
            return bytes(8 << 20)

        server.register("give", give)
        large = caller.rpc_async(1, "give", timeout=PATIENCE)
        assert begun.wait(PATIENCE)
        server.close()
        assert large.wait(PATIENCE) == bytes(8 << 20)
