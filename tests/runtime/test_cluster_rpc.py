"""Remote calls in a cluster: the same agent in every view, by rank or by name of a node."""

from __future__ import annotations

import contextlib
import threading

import pytest

from potluck import Cluster, RpcAgent, RpcError, RpcNoConnection
from support.clusters import clusters, join, new_job
from support.threads import PATIENCE, Background, eventually


def agent_on(cluster: Cluster) -> RpcAgent:
    """An agent that can say who it is."""
    agent = RpcAgent(cluster)
    agent.expose(lambda: cluster.rank, name="rank")
    agent.expose(lambda: [cluster.process.node, cluster.process.incarnation], name="process")
    return agent


def test_calls_work_across_views_and_functions_stay() -> None:
    """A node leaves and one comes: the agents of those who stay are the same."""
    job = new_job()
    with clusters(3, job) as nodes:
        agents = [agent_on(node) for node in nodes]
        assert agents[0].call(2, "rank") == 2
        nodes[1].close()
        eventually(lambda: nodes[0].world_size == 2 and nodes[2].world_size == 2)
        nodes[0].wait_until_active(PATIENCE)
        assert agents[0].call(1, "rank") == 1
        assert agents[0].call(1, "process") == list(nodes[2].process)
        with join(3, job) as newcomer, contextlib.closing(agent_on(newcomer)) as newest:
            nodes[0].wait_for_peers(2, PATIENCE)
            assert newest.call(0, "process") == list(nodes[0].process)
            assert agents[2].call(newcomer.rank, "rank") == newcomer.rank


def test_a_node_is_found_by_its_id() -> None:
    """With its start where several processes of one machine take part."""
    with clusters(2) as nodes:
        agents = [agent_on(node) for node in nodes]
        assert agents[0].call(str(nodes[1].process), "rank") == 1
        assert agents[1].call(str(nodes[1].process), "rank") == 1
        with pytest.raises(Exception, match="several ranks: 0, 1"):
            agents[0].call(nodes[1].process.node, "rank")


def test_calls_under_way_to_a_lost_node_fail_at_once() -> None:
    """Nobody waits for the answer of somebody who is gone; those who stay can be called again."""
    with clusters(2) as nodes:
        caller, other = (agent_on(node) for node in nodes)
        begun, release = threading.Event(), threading.Event()

        def slow() -> None:
            begun.set()
            release.wait(PATIENCE)

        other.expose(slow, name="slow")
        waiting = Background(lambda: caller.call(1, "slow"))
        assert begun.wait(PATIENCE)
        leaving = Background(nodes[1].close)
        with pytest.raises(RpcNoConnection):
            waiting.result()
        release.set()
        leaving.result()
        nodes[0].wait_until_active(PATIENCE)
        assert caller.call(0, "rank") == 0
        with pytest.raises((RpcError, ValueError)):
            caller.call(1, "rank")
