"""Calls under way when the view of a cluster ends, and agents of clusters that are over."""

import contextlib
import threading
import time

import pytest

from potluck import Cluster, InvalidRank, RpcAgent, RpcConfig, RpcNoConnection, RpcTimeout
from support.agents import Hold
from support.clusters import clusters
from support.threads import PATIENCE, eventually


def test_only_calls_that_may_be_repeated_go_on_in_the_next_view() -> None:
    """To the same process, whatever its rank; the others fail and say what happened."""
    with clusters(3) as nodes:
        agents = [RpcAgent(node) for node in nodes]
        holds = [Hold() for _ in nodes]
        for agent, hold in zip(agents, holds, strict=True):
            agent.register("hold", hold)
        survivor = nodes[2].process
        once = agents[0].rpc_async(survivor, "hold", b"once", timeout=1000)
        again = agents[0].rpc_async(2, "hold", b"again", timeout=1000, idempotent=True)
        lost = agents[0].rpc_async(1, "hold", b"lost", timeout=1000, idempotent=True)
        mine = agents[0].rpc_async(0, "hold", b"mine", timeout=1000)
        eventually(lambda: [hold.running for hold in holds] == [1, 1, 2])
        holds[1].go.set()
        nodes[1].close()
        with pytest.raises(RpcNoConnection) as caught:
            once.wait(PATIENCE)
        assert caught.value.recoverable
        words = ("the cluster changed meanwhile: ", "or it has gone on to the next view")
        assert any(each in str(caught.value) for each in words)  # whoever learns of it first
        assert "Whether the function ran is not known" in str(caught.value)
        with contextlib.suppress(RpcNoConnection):  # unless it is answered before it is gone
            assert lost.wait(PATIENCE) == b"lost"
        eventually(lambda: holds[2].running == 3)
        holds[2].go.set()
        assert again.wait(PATIENCE) == b"again"
        assert nodes[2].rank == 1
        assert not mine.done
        holds[0].go.set()
        assert mine.wait(PATIENCE) == b"mine"


def close_both(nodes: list[Cluster]) -> None:
    """Leave the cluster on all nodes."""
    for node in nodes:
        node.close()


def test_a_cluster_that_was_left_has_no_calls() -> None:
    """Neither to others nor to itself."""
    with clusters(2) as nodes:
        agent = RpcAgent(nodes[0])
        close_both(nodes)
        assert agent.is_closed
        for rank in (0, 1):
            with pytest.raises(RpcNoConnection, match="the agent of this rank was closed"):
                agent.rpc_sync(rank, "echo")


def test_waiting_for_a_view_is_part_of_the_time_of_a_call() -> None:
    """A cluster that is paused does not make a call wait twice as long as it may."""
    with clusters(2) as nodes:
        agent = RpcAgent(nodes[0], RpcConfig(timeout=0.2))
        stages = nodes[0]._stages
        stages.pause("half of the members are away")
        try:
            began = time.monotonic()
            with pytest.raises(RpcTimeout, match="half of the members are away") as caught:
                agent.rpc_sync(1, "echo")
            assert caught.value.seconds == 0.2
            assert time.monotonic() - began >= 0.2
        finally:
            stages.pause(None)


def test_a_call_that_is_started_during_a_pause_returns_at_once() -> None:
    """Its future waits: for the end of the pause, or for its own deadline."""
    with clusters(2) as nodes:
        agents = [RpcAgent(node) for node in nodes]
        for agent in agents:
            agent.register("echo", lambda payload: payload)
        agent, stages = agents[0], nodes[0]._stages
        stages.pause("half of the members are away")
        try:
            ends = [agent.rpc_async(rank, "echo", b"on", timeout=PATIENCE) for rank in (0, 1)]
            missing = agent.rpc_async(7, "echo", timeout=PATIENCE)
            unwanted = agent.rpc_async(1, "echo", timeout=PATIENCE)
            late = agent.rpc_async(1, "echo", timeout=0.05)
            heard = threading.Event()
            late.add_done_callback(heard.set)
            assert agent.in_flight == 5
            with pytest.raises(RpcTimeout, match="half of the members are away"):
                late.wait(PATIENCE)
            assert heard.wait(PATIENCE)  # also if no thread waits for it
            assert unwanted.cancel()
            assert not any(future.done for future in ends)
        finally:
            stages.pause(None)
        assert [future.wait(PATIENCE) for future in ends] == [b"on", b"on"]
        with pytest.raises(InvalidRank):
            missing.wait(PATIENCE)
        stages.pause("again")
        left = agent.rpc_async(1, "echo", timeout=PATIENCE)
        agent.close()
        with pytest.raises(RpcNoConnection, match="the agent of this rank was closed"):
            left.wait(PATIENCE)
        stages.pause(None)


def test_an_agent_can_be_closed_and_made_anew_within_a_view() -> None:
    """The cluster goes on, and the next agent takes over."""
    with clusters(2) as nodes:
        with RpcAgent(nodes[1]) as server:
            server.register("word", lambda _: b"first")
            caller = RpcAgent(nodes[0])
            with pytest.raises(ValueError, match="has an agent already"):
                RpcAgent(nodes[0])
            assert caller.rpc_sync(1, "word") == b"first"
        with RpcAgent(nodes[1]) as server:
            server.register("word", lambda _: b"second")
            assert caller.rpc_sync(1, "word", timeout=PATIENCE, idempotent=True) == b"second"
        assert nodes[0].world_size == 2
