"""A forked child lets go of its parent's agent."""

import threading

from potluck import RpcAgent
from support.forks import in_child
from support.place import Place
from support.ranks import Ranks
from support.threads import PATIENCE


def fork(place: Place) -> list[str]:
    """What a call gives in the child, and afterwards in the parent."""
    with place.join() as backend, RpcAgent(backend) as agent:
        agent.register("echo", lambda payload: payload)
        backend.barrier(PATIENCE)
        other = place.others[0]

        def call() -> str:
            return agent.rpc_sync(other, "echo", b"alive", timeout=PATIENCE).decode()

        go = threading.Event()
        agent.register("hang", lambda payload: payload if go.wait(PATIENCE) else b"")
        pending = [agent.rpc_async(rank, "hang", b"late") for rank in range(place.world_size)]

        def wait() -> str:
            for future in pending:
                failure = place.failure_of(future.wait, PATIENCE)
                assert "belongs to the parent process" in failure["text"], failure
            agent.close()
            return "told"

        found = [call(), in_child(call), in_child(wait), call()]
        backend.barrier(PATIENCE)
        go.set()
        found += [future.wait(PATIENCE).decode() for future in pending]
        backend.barrier(PATIENCE)
        return found


def test_a_forked_child_has_no_agent_and_the_parent_goes_on(ranks: Ranks) -> None:
    """As a data loader, which is forked and knows nothing of it."""
    for before, inside, waiting, after, *late in ranks.run(fork, 2):
        assert (before, after) == ("alive", "alive")
        assert inside.startswith("RpcNoConnection(")
        assert waiting == "told"
        assert late == ["late", "late"]
