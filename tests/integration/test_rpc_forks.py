"""A forked child lets go of its parent's agent."""

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

        found = [call(), in_child(call), call()]
        backend.barrier(PATIENCE)
        return found


def test_a_forked_child_has_no_agent_and_the_parent_goes_on(ranks: Ranks) -> None:
    """As a data loader, which is forked and knows nothing of it."""
    for before, inside, after in ranks.run(fork, 2):
        assert (before, after) == ("alive", "alive")
        assert inside.startswith("RpcNoConnection(")
