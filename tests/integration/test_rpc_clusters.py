"""Remote calls in a cluster of real processes: a member is killed, and another one comes."""

from __future__ import annotations

import threading
from typing import cast

import potluck
from potluck import Cluster, RpcAgent, RpcNoConnection
from potluck._types import ProcessId
from support.clusters import OPTIONS, new_job
from support.place import Failure, Place
from support.ranks import Ranks
from support.threads import PATIENCE, eventually

AT_LATEST = 5.0  # seconds until a caller knows; far less unless other work shares these cores


def offer(cluster: Cluster, number: int) -> RpcAgent:
    """An agent with functions that say who this is, and that hang."""
    agent, begun, go = RpcAgent(cluster), [], threading.Event()

    @agent.register("hang")
    def hang(payload: bytes) -> bytes:
        begun.append(payload)
        go.wait(PATIENCE)
        return payload

    agent.expose(lambda: number, name="who")
    agent.expose(lambda: sorted(begun), name="begun")
    agent.expose(go.set, name="go")
    return agent


def members_of(cluster: Cluster) -> set[ProcessId]:
    """Who is here now."""
    view = cluster.view
    assert view is not None
    return set(view.members)


def begun_at(agent: RpcAgent, process: ProcessId) -> list[bytes]:
    """What has begun there; nothing while one of the two has not gone on to the next view."""
    try:
        begun: list[bytes] = agent.call(process, "begun")
    except RpcNoConnection:
        return []
    return begun


def take_part(place: Place, job: str, min_nodes: int) -> list[int]:
    """Serve until the test says "leave"; a newcomer calls everybody first."""
    with potluck.join(min_nodes, job=job, timeout=PATIENCE, **OPTIONS) as cluster:
        agent = offer(cluster, place.rank)
        numbers = [agent.call(rank, "who") for rank in range(min_nodes)]
        place.say("serving")
        place.hear("leave")
    return sorted(numbers)


def call(place: Place, job: str) -> None:
    """Call the two others while one of them is killed, and the one that comes instead."""
    with potluck.join(3, job=job, timeout=PATIENCE, **OPTIONS) as cluster:
        agent = offer(cluster, 0)
        found = {agent.call(process, "who"): process for process in members_of(cluster)}
        survivor, victim = found[1], found[2]
        lost = agent.rpc_async(victim, "hang", timeout=1000)
        once = agent.rpc_async(survivor, "hang", b"once", timeout=1000)
        again = agent.rpc_async(survivor, "hang", b"again", timeout=1000, idempotent=True)
        mine = agent.rpc_async(cluster.process, "hang", b"mine", timeout=1000)
        eventually(lambda: len(agent.call(survivor, "begun")) == 2)
        place.say("waiting")
        place.say("lost", **place.failure_of(lost.wait, PATIENCE))
        place.say("changed", **place.failure_of(once.wait, PATIENCE))
        eventually(lambda: begun_at(agent, survivor) == [b"again", b"again", b"once"])
        for process in (survivor, cluster.process):
            agent.call(process, "go")
        assert again.wait(PATIENCE) == b"again"
        assert mine.wait(PATIENCE) == b"mine"
        place.say("gone", **place.failure_of(agent.call, victim, "who"))
        cluster.wait_for_peers(2, PATIENCE)
        (newcomer,) = members_of(cluster) - {survivor, cluster.process}
        assert agent.call(newcomer, "who") == 3
        for start in (newcomer.node, newcomer.node[:5]):  # of an id the beginning will do
            assert agent.call(f"{start}/{newcomer.incarnation}", "who") == 3
        place.say("met", **place.failure_of(agent.call, newcomer.node, "who"))
        place.hear("leave")


def test_calls_survive_what_happens_to_a_cluster(ranks: Ranks) -> None:
    """Those to a killed member fail at once, those that may be repeated are, and newcomers come."""
    job = new_job()
    caller, survivor, victim, newcomer = (ranks.take() for _ in range(4))
    caller.begin(call, 0, 3, "", job)
    survivor.begin(take_part, 1, 3, "", job, 3)
    victim.begin(take_part, 2, 3, "", job, 3)
    for process in (survivor, victim):
        process.expect("serving")
    caller.expect("waiting")
    killed = victim.kill()
    lost = cast("Failure", caller.expect("lost"))
    assert lost["kind"] == "RpcNoConnection"
    assert lost["at"] - killed < AT_LATEST
    changed = cast("Failure", caller.expect("changed"))
    assert changed["kind"] == "RpcNoConnection"
    words = ("the members of the job have changed", "or it is already in the next view")
    assert any(each in changed["text"] for each in words), changed
    assert "A new call uses the current members" in changed["text"]
    assert "no rank runs there" in caller.expect("gone")["text"]
    newcomer.begin(take_part, 3, 3, "", job, 3)
    newcomer.expect("serving")
    assert "several ranks: 0, 1, 2 (" in caller.expect("met")["text"]
    for process in (newcomer, survivor, caller):
        process.tell("leave")
    assert newcomer.value() == [0, 1, 3]
    assert survivor.value() == [0, 1, 2]
    caller.value()
