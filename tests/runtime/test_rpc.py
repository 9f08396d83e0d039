"""Functions of one rank are called by another, by name, with bytes and with values."""

import asyncio
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from potluck import (
    DistributedContext,
    RpcAgent,
    RpcInvalidMessage,
    RpcNoConnection,
    SimulatedBackend,
    SubBackend,
    Timeout,
)
from support.agents import Hold, agents
from support.threads import PATIENCE, eventually, together


def echo(payload: bytes) -> bytes:
    """What came in."""
    return payload


# --- registering ---


def test_rpc_agent_register_lookup() -> None:
    """A registered function is found and can be called."""
    with SimulatedBackend.create_group(1)[0] as backend, RpcAgent(backend) as agent:
        agent.register("echo", echo)
        handler = agent.lookup("echo")
        assert handler is not None
        assert handler(b"hello") == b"hello"


def test_rpc_agent_lookup_missing() -> None:
    """A name that nobody registered is None."""
    with SimulatedBackend.create_group(1)[0] as backend, RpcAgent(backend) as agent:
        assert agent.lookup("nonexistent") is None


def test_registering_is_also_a_decorator() -> None:
    """Which gives the function back as it was."""
    with agents() as (caller, server):

        @server.register("double")
        def double(payload: bytes) -> bytes:
            return payload * 2

        @server.expose
        def add(a: int, b: int) -> int:
            return a + b

        @server.expose(name="minus")
        def subtract(a: int, b: int) -> int:
            return a - b

        assert double(b"a") == b"aa"
        assert caller.rpc_sync(1, "double", b"soup") == b"soupsoup"
        assert caller.call(1, "add", 2, b=3) == add(2, 3) == 5
        assert caller.service(1).minus(2, 3) == subtract(2, 3) == -1
        assert caller.service(1).minus.later(5, 3).wait(PATIENCE) == 2


def test_only_functions_can_be_registered() -> None:
    """And they need a name."""
    with agents(1) as (agent,):
        with pytest.raises(TypeError):
            agent.register("x", 5)  # type: ignore[call-overload]
        with pytest.raises(ValueError, match="1 to 1024 bytes"):
            agent.register("", echo)
        with pytest.raises(TypeError, match="a str"):
            agent.register(7, echo)  # type: ignore[call-overload]


# --- calling ---


def test_any_rank_calls_any_rank_and_itself() -> None:
    """All at once."""
    with agents(4) as group:
        for agent in group:
            agent.register("who", lambda payload, rank=agent.rank: payload + b"%d" % rank)

        def call_all(agent: RpcAgent) -> list[bytes]:
            return [agent.rpc_sync(dst, "who", b"r") for dst in range(agent.world_size)]

        found = together(*(lambda agent=agent: call_all(agent) for agent in group))
        assert found == [[b"r0", b"r1", b"r2", b"r3"]] * 4
        assert [agent.rank for agent in group] == [0, 1, 2, 3]


def test_many_calls_are_in_flight_at_once() -> None:
    """Each future gets the answer to its own call."""
    with agents() as (caller, server):
        server.register("echo", echo)
        futures = [caller.rpc_async(1, "echo", b"%d" % number) for number in range(2000)]
        assert [future.wait(PATIENCE) for future in futures] == [b"%d" % n for n in range(2000)]
        assert all(future.done and future.exception() is None for future in futures)


def test_payloads_of_any_size_arrive_whole() -> None:
    """Around every limit at which something changes."""
    with agents() as (caller, server):
        server.register("echo", echo)
        for size in (0, 1, 32 << 10, (32 << 10) + 1, 256 << 10, 300_001, 3_000_000):
            payload = bytes(np.random.default_rng(size).integers(0, 256, size, np.uint8))
            assert caller.rpc_sync(1, "echo", payload) == payload
            assert caller.rpc_sync(1, "echo", bytearray(payload)) == payload


def test_a_function_may_call_others_and_its_caller() -> None:
    """While the caller waits."""
    with agents(3) as group:
        group[0].register("finish", lambda payload: payload + b"0")
        group[1].register("next", lambda payload: group[1].rpc_sync(2, "last", payload + b"1"))
        group[2].register("last", lambda payload: group[2].rpc_sync(0, "finish", payload + b"2"))
        assert group[0].rpc_sync(1, "next", b"") == b"120"


def test_a_future_can_be_waited_for_again() -> None:
    """After a short wait that was not enough."""
    with agents() as (caller, server):
        go = threading.Event()
        server.register("wait", lambda _: b"done" if go.wait(PATIENCE) else b"")
        future = caller.rpc_async(1, "wait")
        with pytest.raises(Timeout):
            future.wait(0.01)
        with pytest.raises(Timeout):
            future.result()
        with pytest.raises(Timeout):
            future.exception()
        ended = threading.Event()
        future.add_done_callback(ended.set)
        go.set()
        assert future.wait(PATIENCE) == b"done"
        assert ended.wait(PATIENCE)
        future.add_done_callback(ended.clear)
        assert not ended.is_set()


def test_a_future_can_be_awaited() -> None:
    """From a coroutine."""
    with agents() as (caller, server):
        server.register("echo", echo)

        async def main() -> bytes:
            return await caller.rpc_async(1, "echo", b"soup")

        assert asyncio.run(main()) == b"soup"


def test_a_task_that_is_cancelled_cancels_its_call() -> None:
    """The function learns it, and no answer comes for nobody."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)

        async def main() -> bool:
            future = caller.rpc_async(1, "hold")

            async def wait() -> bytes:
                return await future

            task = asyncio.ensure_future(wait())
            await asyncio.to_thread(eventually, lambda: hold.running == 1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return future.done

        assert asyncio.run(main())
        eventually(lambda: all(call.cancelled for call in hold.calls))
        hold.go.set()


def test_a_node_can_be_named() -> None:
    """Instead of a rank."""
    with agents(3) as group:
        group[2].register("echo", echo)
        assert group[0].rpc_sync("simulated rank 2", "echo", b"soup") == b"soup"
        with pytest.raises(RpcNoConnection, match="no connection to 'attic': no rank runs there"):
            group[0].rpc_sync("attic", "echo")
        for nonsense in (2.0, True, None, [2]):
            with pytest.raises(TypeError, match="A rank is a whole number"):
                group[0].rpc_sync(nonsense, "echo")  # type: ignore[arg-type]


def test_subgroups_have_agents_of_their_own() -> None:
    """Beside those of the whole, with ranks of their own."""
    parents = SimulatedBackend.create_group(3)
    subs = [SubBackend(parent, [0, 2]) for parent in (parents[0], parents[2])]
    with (
        RpcAgent(parents[0]) as whole,
        RpcAgent(parents[2]) as other,
        RpcAgent(subs[0]) as part,
        RpcAgent(subs[1]) as rest,
    ):
        other.register("which", lambda _: b"whole")
        rest.register("which", lambda _: b"part")
        assert whole.rpc_sync(2, "which") == b"whole"
        assert part.rpc_sync(1, "which") == b"part"
    for parent in parents:
        parent.close()


def test_an_agent_stands_on_a_context_too_and_leaves_collectives_alone() -> None:
    """Calls and all-reduces run at the same time."""
    contexts = [DistributedContext(each) for each in SimulatedBackend.create_group(2)]
    with contexts[0], contexts[1], RpcAgent(contexts[0]) as caller, RpcAgent(contexts[1]) as server:
        server.register("echo", echo)

        def add_up(context: DistributedContext) -> list[float]:
            return [context.all_reduce(float(step)) for step in range(20)]

        def call(agent: RpcAgent) -> list[float]:
            return [float(caller.rpc_sync(1, "echo", b"%d" % step)) for step in range(20)]

        added = together(
            lambda: add_up(contexts[0]), lambda: add_up(contexts[1]), lambda: call(caller)
        )
        assert added == [[2.0 * n for n in range(20)]] * 2 + [[float(n) for n in range(20)]]


# --- values ---


@dataclass
class Update:
    """Something with an array inside."""

    step: int
    gradient: np.ndarray


def test_arrays_and_dataclasses_travel() -> None:
    """Also large ones, and inside other things."""
    with agents() as (caller, server):

        @server.expose
        def apply(update: Update, rates: dict[str, float]) -> Update:
            return Update(update.step + 1, update.gradient * rates["lr"])

        gradient = np.arange(200_000, dtype=np.float32).reshape(100, -1)
        result = caller.call(1, "apply", Update(3, gradient), {"lr": 0.5})
        assert isinstance(result, Update)
        assert result.step == 4
        np.testing.assert_array_equal(result.gradient, gradient / 2)


def test_bytes_and_values_are_not_mixed_up() -> None:
    """The error says how to call the function."""
    with agents() as (caller, server):
        server.register("raw", echo)
        server.expose(lambda: 1, name="typed")
        with pytest.raises(RpcInvalidMessage, match="'typed' is a function of values: use call"):
            caller.rpc_sync(1, "typed")
        with pytest.raises(RpcInvalidMessage, match="'raw' is a function of bytes: use rpc_sync"):
            caller.call(1, "raw")
