"""Large arguments and results between real processes: others are served meanwhile."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import potluck
from potluck import Cluster, RpcAgent
from support.clusters import OPTIONS, new_job
from support.place import Place
from support.ranks import Ranks
from support.threads import PATIENCE, eventually

MIB = 1 << 20
SIZE = 256 * MIB  # more than may be unanswered at a time


def peak() -> int:
    """Bytes that this process has used at most since the last time this was asked, or began."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return found


def serve(agent: RpcAgent) -> None:
    """What takes and gives much."""
    agent.register("echo", lambda payload: payload)
    agent.register("count", lambda payload: b"%d" % (len(payload) + payload[-1]))
    agent.expose(lambda value: len(value) + int(value[-1]), name="take")
    agent.expose(lambda size: np.ones(size, np.uint8), name="give")
    agent.expose(lambda size: b"\1" * size, name="give_bytes")
    agent.expose(peak)


def ones(size: int) -> bytes:
    """Many bytes, made without the GIL; a product would stop all threads for a second."""
    return b"".join([b"\1" * MIB] * (size // MIB))


def start(agent: RpcAgent, kind: str, size: int) -> Any:
    """A large call, whose answer says that all has arrived."""
    if kind == "payload":
        return agent.rpc_async(1, "count", ones(size), timeout=PATIENCE)
    if kind.startswith("give"):
        return agent.call_async(1, kind, size)
    return agent.call_async(1, "take", np.ones(size, np.uint8) if kind == "array" else ones(size))


def amount(result: Any) -> int:
    """What it says: the bytes, and the last of them, which is 1."""
    if isinstance(result, np.ndarray) or (isinstance(result, bytes) and len(result) > MIB):
        return len(result) + int(result[-1])
    return int(result)


def call_beside(place: Place, kind: str) -> list[Any]:
    """Rank 0 makes small calls while a large one is under way: how many end before that does."""
    with place.join() as backend, RpcAgent(backend) as agent:
        serve(agent)
        backend.barrier(PATIENCE)
        found: list[Any] = []
        if place.rank == 0:
            agent.call(1, "peak")
            before = agent.call(1, "peak")
            small, large = 0, start(agent, kind, SIZE)
            while not large.done:
                agent.rpc_sync(1, "echo", b"small", timeout=PATIENCE)
                small += 1
            found = [small, amount(large.wait()), agent.call(1, "peak") - before]
        backend.barrier(PATIENCE)
    return found


@pytest.mark.parametrize("kind", ["payload", "array", "bytes", "give", "give_bytes"])
def test_small_calls_are_answered_while_a_large_one_is_under_way(ranks: Ranks, kind: str) -> None:
    """Many of them; and what is large is in the memory of the other side once."""
    (small, received, used), _ = ranks.run(call_beside, 2, kind)
    assert received == SIZE + 1
    assert small >= 10
    assert used <= 1.2 * SIZE


def call_with_two(place: Place) -> list[int]:
    """Two large calls at once, small ones beside them; then one that is cancelled on its way."""
    with place.join() as backend, RpcAgent(backend) as agent:
        serve(agent)
        backend.barrier(PATIENCE)
        found: list[int] = []
        if place.rank == 0:
            both = [start(agent, kind, SIZE) for kind in ("array", "payload")]
            middle = agent.call_async(1, "take", np.ones(MIB, np.uint8))
            assert middle.wait() == MIB + 1
            assert not all(future.done for future in both)
            found = [amount(future.wait()) for future in both]
            unwanted = start(agent, "array", SIZE)
            agent.rpc_sync(1, "echo")
            assert unwanted.cancel()
            found.append(amount(start(agent, "array", SIZE).wait()))
        backend.barrier(PATIENCE)
    return found


def test_two_large_calls_and_one_that_is_cancelled_arrive_whole(ranks: Ranks) -> None:
    """One after the other; what is of moderate size does not wait for them."""
    found, _ = ranks.run(call_with_two, 2)
    assert found == [SIZE + 1] * 3


# --- in a cluster ---


def take_part(place: Place, job: str) -> list[int]:
    """Send almost as much as there may be in one message, several times."""
    with potluck.join(2, job=job, timeout=PATIENCE, **OPTIONS) as cluster:
        agent = RpcAgent(cluster)
        serve(agent)
        first = epoch_of(cluster)
        if cluster.rank == 0:
            for kind in ("payload", "array", "bytes"):
                assert amount(start(agent, kind, 1000 * MIB).wait(PATIENCE)) == 1000 * MIB + 1
            agent.expose(lambda: None, name="finished")
            eventually(lambda: agent.call(1, "finish") is None)
        else:
            done: list[float] = []
            agent.expose(lambda: done.append(time.monotonic()), name="finish")
            eventually(lambda: bool(done), 2 * PATIENCE)
        return [first, epoch_of(cluster)]


def epoch_of(cluster: Cluster) -> int:
    """The number of its view."""
    view = cluster.view
    assert view is not None
    return view.epoch


@pytest.mark.soak
def test_no_member_is_lost_while_the_largest_argument_arrives(ranks: Ranks) -> None:
    """Heartbeats go on: the view stays the same."""
    job = new_job()
    members = [ranks.take() for _ in range(2)]
    for number, member in enumerate(members):
        member.begin(take_part, number, 2, "", job)
    for member in members:
        before, after = member.value(4 * PATIENCE)
        assert before == after
