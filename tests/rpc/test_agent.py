"""Remote calls in a cluster: the same agent in every view, by rank or by name of a node."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from unittest import mock

import numpy as np
import pytest

from potluck import (
    Cluster,
    DistributedContext,
    InvalidRank,
    RpcAgent,
    RpcBusy,
    RpcCancelled,
    RpcConfig,
    RpcError,
    RpcFunctionNotFound,
    RpcInvalidMessage,
    RpcNoConnection,
    RpcRemoteError,
    RpcTimeout,
    RpcTooLarge,
    SimulatedBackend,
    SubBackend,
    TcpRpcBackend,
    Timeout,
    _values,
)
from potluck.net.transport import Stream
from potluck.rpc import agent
from potluck.rpc.calls import IncomingCall
from potluck.rpc.connection import PURPOSE
from potluck.rpc.protocol import (
    FrameFlag,
    FrameKind,
    RpcFrame,
    RpcHello,
    RpcRequest,
    RpcResponse,
    pack_frame,
)
from support.agents import Hold, Notes, agents
from support.clusters import clusters, join, new_job
from support.threads import PATIENCE, Background, eventually, interrupted_when, together


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


# --------------------------------------------------------------------------------------------------
# Functions of one rank are called by another, by name, with bytes and with values.


def echo(payload: bytes) -> bytes:
    """What came in."""
    return payload


def test_a_value_with_endless_copies_is_refused_where_it_is_packed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the caller as an argument, by the server as a result; both go on working."""
    monkeypatch.setattr(_values, "MAX_CONTAINERS", 10_000)

    def bomb() -> list[object]:
        value: list[object] = [1]
        for _ in range(60):
            value = [value, value]
        return value

    with agents() as (caller, server):
        server.expose(bomb)
        server.expose(len, name="length")
        with pytest.raises(ValueError, match="more than 10,000 containers"):
            caller.call(1, "length", bomb())
        with pytest.raises(RpcError, match="more than 10,000 containers"):
            caller.call(1, "bomb")
        assert caller.call(1, "length", [1, 2]) == 2


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
            with pytest.raises(TypeError, match="rank must be an integer"):
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
        with pytest.raises(RpcInvalidMessage, match=r"'typed' is a function of values. Use call"):
            caller.rpc_sync(1, "typed")
        with pytest.raises(RpcInvalidMessage, match=r"'raw' is a function of bytes. Use rpc_sync"):
            caller.call(1, "raw")


# --------------------------------------------------------------------------------------------------
# Whatever peers and callers do, an agent keeps no more than it has said.

MIB = 1 << 20


def frame(kind: int, number: int, body: bytes, **more: int) -> bytes:
    """A frame with its body."""
    return pack_frame(kind, number, len(body), **more) + body


HELLO = frame(FrameKind.HELLO, 0, RpcHello(1 << 20, 1 << 30, 1 << 30).pack())


def request(number: int, name: str, payload: bytes = b"", patience: int = 600_000) -> bytes:
    """A request in one frame."""
    body = RpcRequest(number, name, payload).serialize()
    return frame(FrameKind.REQUEST, number, body, patience=patience)


def cancel(number: int) -> bytes:
    """Nobody waits for it any more."""
    return pack_frame(FrameKind.CANCEL, number, 0)


class Flood:
    """A member that keeps to the limits at first, but reads nothing."""

    def __init__(self, backend: SimulatedBackend, agent: RpcAgent) -> None:
        deadline = time.monotonic() + PATIENCE
        self._stream: Stream = backend.open_stream(0, PURPOSE, deadline, lambda: None).stream
        self._peer = agent._endpoint.peers[1]
        self.write(HELLO)
        eventually(lambda: self._peer.connection is not None)
        connection = self._peer.connection
        assert connection is not None
        self.connection = connection
        self._accept = connection.accept
        self._last = 0  # the number of the last call that the agent has seen
        connection.accept = self._note  # type: ignore[method-assign]

    def _note(self, frame: RpcFrame, data: bytes | memoryview) -> IncomingCall:
        self._last = frame.number
        return self._accept(frame, data)

    def write(self, data: bytes) -> None:
        """All of it, unless the other side hangs up."""
        deadline = time.monotonic() + PATIENCE
        while data and time.monotonic() < deadline:
            try:
                data = data[self._stream.sendmsg([data]) :]
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                return

    @property
    def is_welcome(self) -> bool:
        """Whether the agent has not hung up."""
        return self._peer.connection is self.connection

    def is_answered(self, number: int) -> bool:
        """Whether the agent answers the calls up to this one, or none for a while."""
        connection, since = self.connection, time.monotonic()
        while connection.is_open and (self._last != number or connection.received):
            if connection.is_congested and time.monotonic() > since + 0.3:
                return False
            time.sleep(0.001)
        return connection.is_open

    def stop(self) -> None:
        """No more."""
        self._stream.close()


@pytest.mark.parametrize("kind", ["quick", "missing", "cancelled", "late"])
def test_a_peer_that_takes_no_answers_gets_no_more_of_them(kind: str) -> None:
    """Neither values nor refusals: what it may call before they are taken is little."""
    victim, enemy = SimulatedBackend.create_group(2)
    with victim, enemy, RpcAgent(victim, RpcConfig(octets=MIB // 4, calls=500)) as agent:
        hold = Hold()
        agent.register("hold", hold)
        agent.register("echo", lambda payload: payload)
        for _ in range(10):  # it shows to be quick
            agent.rpc_sync(0, "echo")
        flood = Flood(enemy, agent)
        name = {"quick": "echo", "missing": "nobody"}.get(kind, "hold")
        payload = bytes(16_000 if kind == "quick" else 1)
        most = number = 0
        while most < 2 * MIB and flood.is_answered(number):
            data = b""
            for _ in range(10 if kind == "quick" else 250):
                number += 1
                data += request(number, name, payload, patience=1 if kind == "late" else 600_000)
                data += cancel(number) if kind == "cancelled" else b""
            flood.write(data)
            most = max(most, flood.connection._outbox.owed)
        assert flood.connection.is_congested
        flood.stop()
        hold.go.set()
    assert most < MIB


def test_calls_that_were_cancelled_do_not_pile_up_behind_busy_workers() -> None:
    """Their bytes are let go at once, and their places soon."""
    with agents(workers=1, calls=100) as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        first = caller.rpc_async(1, "hold")
        eventually(lambda: hold.running == 1)
        for _ in range(1000):
            assert caller.rpc_async(1, "hold", bytes(1000)).cancel()
        connection = caller._endpoint.peers[1].connection
        assert connection is not None
        eventually(lambda: len(connection.sent) == 1)
        assert len(server._endpoint._workers) <= 200
        hold.go.set()
        assert first.wait(PATIENCE) == b""
        eventually(lambda: len(server._endpoint._workers) == 0)
        assert len(hold.calls) == 1  # what nobody wants is not run


def test_a_call_that_waited_and_was_cancelled_is_not_run() -> None:
    """Not even with an empty payload, when its turn comes."""
    with agents(1, workers=1) as (agent,):
        hold = Hold()
        agent.register("hold", hold)
        first = agent.rpc_async(0, "hold")
        eventually(lambda: hold.running == 1)
        assert agent.rpc_async(0, "hold", b"second").cancel()
        hold.go.set()
        assert first.wait(PATIENCE) == b""
        eventually(lambda: len(agent._endpoint._workers) == 0)
        assert len(hold.calls) == 1


def test_a_peer_cannot_begin_any_number_of_tiny_messages() -> None:
    """Each would take memory of its own."""
    victim, enemy = SimulatedBackend.create_group(2)
    with victim, enemy, RpcAgent(victim) as agent:
        flood = Flood(enemy, agent)
        flood.write(frame(FrameKind.REQUEST, 1, b"x", marks=FrameFlag.MORE, total=2))
        eventually(lambda: not flood.is_welcome)
        flood.stop()


def test_calls_to_oneself_are_bounded_too() -> None:
    """Whoever makes too many waits, or is told."""
    with agents(1, workers=1, calls=4) as (agent,):
        hold = Hold()
        agent.register("hold", hold)
        futures = [agent.rpc_async(0, "hold") for _ in range(4)]
        with pytest.raises(RpcBusy, match="4 calls of rank 0 to itself are already waiting"):
            agent.rpc_async(0, "hold", timeout=0.05)
        one_more = Background(lambda: agent.rpc_async(0, "hold").wait(PATIENCE))
        hold.go.set()
        assert one_more.result() == b""
        assert [future.wait(PATIENCE) for future in futures] == [b""] * 4


def test_a_long_error_does_not_cost_a_connection_with_a_small_limit() -> None:
    """Words are left out; other calls on the connection go on."""
    with agents(max_message=600) as (caller, server):

        @server.register("fail")
        def fail(payload: bytes) -> bytes:
            raise ValueError("long words " * 1000)

        server.register("echo", lambda payload: payload)
        assert caller.rpc_sync(1, "echo", b"x") == b"x"
        connection = caller._endpoint.peers[1].connection
        with pytest.raises(RpcRemoteError, match="ValueError on rank 1"):
            caller.rpc_sync(1, "fail")
        assert caller.rpc_sync(1, "echo", b"x") == b"x"
        assert caller._endpoint.peers[1].connection is connection


def test_functions_that_call_back_do_not_hold_up_the_end_of_a_connection() -> None:
    """A caller is lost while the function that it called waits for an answer of that caller."""
    with agents() as (caller, server):
        hold = Hold()
        caller.register("back", hold)
        failures = []

        @server.register("there")
        def there(payload: bytes) -> bytes:
            try:
                return server.rpc_sync(0, "back", payload)
            except Exception as error:
                failures.append(error)
                raise

        server.register("echo", lambda payload: payload)
        lost = caller.rpc_async(1, "there")
        eventually(lambda: hold.running == 1)
        connection = caller._endpoint.peers[1].connection
        assert connection is not None
        connection.wire.stream.close()
        with pytest.raises(RpcNoConnection):
            lost.wait(PATIENCE)
        eventually(lambda: len(failures) == 1)
        assert isinstance(failures[0], RpcNoConnection)
        assert caller.rpc_sync(1, "echo", b"on", PATIENCE, idempotent=True) == b"on"
        hold.go.set()


def test_a_rank_without_an_agent_is_named_when_time_is_up() -> None:
    """Whoever forgot to make one over there shall not look for the fault here."""
    left, right = SimulatedBackend.create_group(2)
    words = r"within 0\.05 s: no RpcAgent of rank 1 is connected"
    with left, right, RpcAgent(left) as caller, pytest.raises(RpcTimeout, match=words):
        caller.rpc_sync(1, "echo", timeout=0.05)


def test_an_agent_closes_while_everything_is_under_way() -> None:
    """Every future ends with an error that says so, and no thread is left behind."""
    before = set(threading.enumerate())
    with agents(workers=2, calls=8, backlog=8) as (caller, server):
        hold = Hold()
        for agent in (caller, server):
            agent.register("hold", hold)
        futures = [
            caller.rpc_async(dst, "hold", bytes(100_000)) for dst in (0, 1) for _ in range(8)
        ]
        blocked = Background(lambda: [caller.rpc_async(1, "hold") for _ in range(20)])
        eventually(lambda: hold.running >= 2)
        caller.close()
        with pytest.raises(RpcNoConnection, match="closed"):
            blocked.result()
        for future in futures:
            with pytest.raises(RpcNoConnection, match="the agent of this rank was closed"):
                future.wait(PATIENCE)
        hold.go.set()
    eventually(lambda: set(threading.enumerate()) <= before)


def test_a_connection_that_has_ended_is_not_congested() -> None:
    """Or calls of a peer that is gone would wait in the queue for ever."""
    victim, enemy = SimulatedBackend.create_group(2)
    with victim, enemy, RpcAgent(victim, RpcConfig(octets=MIB // 4, workers=1)) as agent:
        agent.register("give", lambda _: bytes(600_000))
        flood = Flood(enemy, agent)
        flood.write(b"".join(request(number, "give") for number in range(100)))
        eventually(lambda: flood.connection.is_congested)
        flood.stop()
        eventually(lambda: len(agent._endpoint._workers) == 0)
        assert not flood.connection.is_congested


def test_a_callback_may_call_and_close() -> None:
    """It runs on no thread that others wait for."""
    with agents() as (caller, server):
        server.register("echo", lambda payload: payload)
        answers, ended = [], threading.Event()

        def go_on() -> None:
            answers.append(caller.rpc_sync(1, "echo", b"second", timeout=PATIENCE))
            caller.close()
            ended.set()

        hold = Hold()
        server.register("hold", hold)
        first = caller.rpc_async(1, "hold", b"first")
        first.add_done_callback(go_on)
        hold.go.set()
        assert first.wait(PATIENCE) == b"first"
        assert ended.wait(PATIENCE)
        assert answers == [b"second"]
        assert caller.is_closed


# --------------------------------------------------------------------------------------------------
# Calls that take too long, and calls that nobody waits for any more.


def test_a_call_ends_at_its_deadline() -> None:
    """On time, with an error that says so; the connection goes on."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        server.register("echo", lambda payload: payload)
        began = time.monotonic()
        with pytest.raises(RpcTimeout, match=r"'hold' on rank 1 did not answer within 0.2 s"):
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
        connection = server._endpoint.peers[0].connection
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
        connection = server._endpoint.peers[0].connection
        assert connection is not None
        payload = bytearray(8 << 20)
        with connection.reading:  # the server reads nothing meanwhile
            begun = caller.rpc_async(1, "mark", payload)
            behind = caller.rpc_async(1, "mark", bytearray(60 << 20))
            assert begun.cancel()
            assert behind.cancel()
        server._endpoint._loop._call()
        payload[:] = b"x" * len(payload)
        assert caller.rpc_sync(1, "echo", b"on") == b"on"
        ours = caller._endpoint.peers[1].connection
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


# --------------------------------------------------------------------------------------------------
# What goes wrong with a call is told in words, and how agents begin and end.

# --- errors ---


def test_a_missing_function_is_named_with_its_neighbours() -> None:
    """Somebody mistyped it."""
    with agents() as (caller, server):
        server.register("gradient", echo)
        with pytest.raises(RpcFunctionNotFound, match="Did you mean 'gradient'") as caught:
            caller.rpc_sync(1, "gradent")
        assert caught.value.near == ("gradient",)
        assert caught.value.rank == 1


def test_what_a_function_raises_is_told_with_its_traceback() -> None:
    """And the next call finds everything in order."""
    with agents() as (caller, server):
        server.register("echo", echo)

        @server.register("fail")
        def fail(payload: bytes) -> bytes:
            raise KeyError(payload.decode())

        with pytest.raises(RpcRemoteError, match="remote RPC error: KeyError on rank 1") as caught:
            caller.rpc_sync(1, "fail", b"soup")
        assert caught.value.remote_type == "KeyError"
        assert caught.value.remote_message == "'soup'"
        assert "in fail" in caught.value.remote_traceback
        assert caller.rpc_sync(1, "echo", b"on") == b"on"


def test_a_function_of_bytes_must_return_bytes() -> None:
    """The caller is told what it returned."""
    with agents() as (caller, server):
        server.register("odd", lambda _: "text")
        with pytest.raises(RpcRemoteError, match="must return bytes, not str"):
            caller.rpc_sync(1, "odd")


def test_a_rank_that_does_not_exist_is_refused() -> None:
    """At once."""
    with agents() as (caller, _):
        with pytest.raises(InvalidRank):
            caller.rpc_sync(7, "echo")
        with pytest.raises(ValueError, match="timeout"):
            caller.rpc_sync(1, "echo", timeout=-1)


def test_a_backend_has_one_agent_at_a_time() -> None:
    """The next may come after it."""
    with SimulatedBackend.create_group(1)[0] as backend:
        with RpcAgent(backend), pytest.raises(ValueError, match="already has an RpcAgent"):
            RpcAgent(backend)
        with RpcAgent(backend) as agent:
            agent.register("echo", echo)
            assert agent.rpc_sync(0, "echo", b"x") == b"x"
        with pytest.raises(RpcNoConnection, match="closed"):
            agent.rpc_sync(0, "echo", b"x")
        agent.close()
    with pytest.raises(TypeError, match=r"needs a potluck\.Backend"):
        RpcAgent("backend")  # type: ignore[arg-type]


def test_the_agent_ends_with_its_backend() -> None:
    """Whoever calls it learns so at once."""
    left, right = SimulatedBackend.create_group(2)
    with left, RpcAgent(left) as caller:
        server = RpcAgent(right)
        server.register("echo", echo)
        assert caller.rpc_sync(1, "echo", b"x") == b"x"
        right.close()
        assert server.is_closed
        eventually(lambda: caller._endpoint.peers[1].connection is None)
        with pytest.raises(RpcNoConnection, match="no connection to rank 1"):
            caller.rpc_sync(1, "echo", b"x")


def test_an_agent_may_come_back() -> None:
    """A new one on the same backend takes over its calls."""
    left, right = SimulatedBackend.create_group(2)
    with left, right, RpcAgent(left) as caller:
        for word in (b"first", b"second"):
            with RpcAgent(right) as server:
                server.register("word", lambda _, word=word: word)
                assert caller.rpc_sync(1, "word", timeout=PATIENCE, idempotent=True) == word
            eventually(lambda: caller._endpoint.peers[1].connection is None)


def test_limits_that_cannot_work_are_refused() -> None:
    """When they are given."""
    with pytest.raises(ValueError, match="workers must be more than 0"):
        RpcConfig(workers=0)
    with pytest.raises(ValueError, match="max_message must be"):
        RpcConfig(max_message=1 << 33)
    with pytest.raises(ValueError, match="max_message must be"):
        RpcConfig(max_message=100)
    with pytest.raises(ValueError, match="at most"):
        RpcConfig(calls=1 << 32)
    with pytest.raises(TypeError, match="octets must be an integer"):
        RpcConfig(octets=1e6)  # type: ignore[arg-type]


# --- requests that came as messages ---


def test_a_request_in_a_message_is_answered_with_two() -> None:
    """Eight bytes of length, then the response; also when there is no such function."""
    left, right = SimulatedBackend.create_group(2)
    with left, right, RpcAgent(right, RpcConfig(max_message=1000)) as server:
        server.register("shout", lambda payload: payload.upper())
        server.register("pour", lambda payload: payload * 1000)
        mail = TcpRpcBackend(left)

        def ask(number: int, name: str) -> bytes:
            server.handle_request(0, RpcRequest(number, name, b"soup").serialize())
            length = bytearray(8)
            mail.recv(length, 1, timeout=PATIENCE)
            reply = bytearray(int.from_bytes(length, "little"))
            mail.recv(reply, 1, timeout=PATIENCE)
            return bytes(reply)

        assert ask(5, "shout") == bytes([2, 5, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0]) + b"SOUP"
        reply = RpcResponse.deserialize(ask(6, "whisper"))
        assert reply.request_id == 6
        assert reply.error == "function 'whisper' not registered on rank 1"
        reply = RpcResponse.deserialize(ask(7, "pour"))
        assert reply.error == "RPC response size 4014 exceeds maximum 1000"
        with pytest.raises(RpcInvalidMessage, match="expected request tag 0x01"):
            server.handle_request(0, b"no request")


def test_a_function_knows_its_caller_and_the_time_that_is_left() -> None:
    """Outside of one there is nothing to know."""
    with agents(3) as group:
        seen = []

        @group[2].register("look")
        def look(_: bytes) -> bytes:
            call = RpcAgent.current_call()
            assert call is not None
            seen.append((call.source, 0 < call.remaining <= 5, call.cancelled))
            return b""

        group[1].rpc_sync(2, "look", timeout=5)
        assert seen == [(1, True, False)]
        assert RpcAgent.current_call() is None


def test_calls_to_oneself_have_deadlines_and_limits_too() -> None:
    """And can be cancelled, and fail, like all others."""
    with agents(1, max_message=1000) as (agent,):
        hold = Hold()
        agent.register("hold", hold)
        agent.register("give", lambda payload: bytes(int(payload)))
        with pytest.raises(RpcTimeout):
            agent.rpc_sync(0, "hold", timeout=0.05)
        future = agent.rpc_async(0, "hold")
        eventually(lambda: hold.running == 2)
        assert future.cancel()
        eventually(lambda: all(call.cancelled for call in hold.calls))
        with pytest.raises(RpcTooLarge, match="RPC response size 2000"):
            agent.rpc_sync(0, "give", b"2000")
        with pytest.raises(RpcFunctionNotFound):
            agent.rpc_sync(0, "nobody")
        with pytest.raises(RpcRemoteError, match="ValueError"):
            agent.rpc_sync(0, "give", b"much")
        left_over = agent.rpc_async(0, "hold")
        eventually(lambda: hold.running == 3)
        hold.go.set()
        assert left_over.wait(PATIENCE) == b""


def test_long_words_of_an_error_arrive() -> None:
    """In as many pieces as it takes, up to a limit."""
    with agents() as (caller, server):

        @server.register("rant")
        def rant(payload: bytes) -> bytes:
            raise ValueError("no! " * 50_000)

        with pytest.raises(RpcRemoteError) as caught:
            caller.rpc_sync(1, "rant")
        assert len(caught.value.remote_message) == 64 << 10


def test_closing_fails_what_is_under_way() -> None:
    """With a reason, here and there."""
    left, right = SimulatedBackend.create_group(2)
    hold = Hold()
    with left, right, RpcAgent(right) as server:
        server.register("hold", hold)
        caller = RpcAgent(left)
        future = caller.rpc_async(1, "hold")
        eventually(lambda: hold.running == 1)
        caller.close()
        with pytest.raises(RpcNoConnection, match="the agent of this rank was closed"):
            future.wait(PATIENCE)
        eventually(lambda: all(call.cancelled for call in hold.calls))
        hold.go.set()


# --- whatever a function does ---


class Mute(Exception):
    """One that cannot say what it is."""

    def __str__(self) -> str:
        raise SystemExit(1)


class OddText(str):
    """Text that cannot be cut."""

    __slots__ = ()
    __getitem__ = None  # type: ignore[assignment]


class Odd(Exception):
    """One whose text is of another kind, and whose class has no plain name."""

    def __str__(self) -> str:
        return OddText("odd")


Odd.__qualname__ = "O\ud800dd"


def doubled(depth: int) -> Exception:
    """A group that stands for two errors to the power of its depth."""
    error: Exception = ValueError("one")
    for _ in range(depth):
        error = ExceptionGroup("two", [error, error])
    return error


def recurse() -> None:
    """For ever."""
    recurse()


class Explosive:
    """A result that cannot be looked at."""

    @property
    def __array__(self) -> None:
        raise MemoryError


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("a file called \udcff"),
        ValueError("x" * 10_000_000),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        MemoryError(),
        BaseException("base"),
        Mute(),
        Odd(),
        RpcInvalidMessage("one of its own"),
        ExceptionGroup("several", [ValueError("\ud800"), Mute()]),
        doubled(60),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_function_raises_its_caller_is_told(raised: BaseException) -> None:
    """By workers, by the thread that reads, and by the rank itself; all of them go on."""
    with agents(workers=1) as (caller, server):

        def fail(_: bytes) -> bytes:
            raise raised

        for agent in (caller, server):
            agent.register("echo", echo)
            agent.register("fail", fail)
        for rank in [1] * 8 + [0]:  # first on a worker, then where it was read
            with pytest.raises(RpcRemoteError) as caught:
                caller.rpc_sync(rank, "fail", timeout=PATIENCE)
            str(caught.value).encode()
        assert caller.rpc_sync(1, "echo", b"on", timeout=PATIENCE) == b"on"


@pytest.mark.parametrize(
    "function",
    [recurse, Explosive, object, lambda: {"a": [object()]}, lambda: "\ud800", lambda: 1 << 70],
)
def test_whatever_a_function_returns_its_caller_gets_an_answer(
    function: Callable[[], object],
) -> None:
    """A value, or an error."""
    with agents(workers=1) as (caller, server):
        server.expose(function, name="odd")
        server.register("echo", echo)
        for _ in range(5):
            with contextlib.suppress(RpcRemoteError):
                caller.call_async(1, "odd").wait(PATIENCE)
        assert caller.rpc_sync(1, "echo", b"on", timeout=PATIENCE) == b"on"


# --- several who wait ---


def test_all_threads_that_wait_for_a_call_get_its_value() -> None:
    """The same one; also of a long answer, which is turned into a value once."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        payload = bytes(range(256)) * (20 << 10)
        future = caller.rpc_async(1, "hold", payload, timeout=PATIENCE)
        waiting = [Background(lambda: future.wait(PATIENCE)) for _ in range(12)]
        eventually(lambda: hold.running == 1)
        hold.go.set()
        assert all(each.result() == payload for each in waiting)


def test_looking_at_a_call_again_and_again_leaves_nothing_behind() -> None:
    """Neither waiting for a moment nor asking for its result."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        for rank in (0, 1):
            caller.register("hold", hold)
            future = caller.rpc_async(rank, "hold", timeout=PATIENCE)
            for _ in range(100):
                for ask in (future.wait, future.result, future.exception):
                    with pytest.raises(Timeout, match=r"timed out after|is not done yet"):
                        ask(0.0001)
            assert future._sleepers == ()
            hold.go.set()
            assert future.result(PATIENCE) == b""
            hold.go.clear()


# --------------------------------------------------------------------------------------------------
# Whole messages for remote calls travel apart from all others.


def test_messages_for_calls_do_not_meet_others() -> None:
    """Nor those of a subgroup."""
    left, right = SimulatedBackend.create_group(2)
    subs = [SubBackend(each, [0, 1]) for each in (left, right)]
    with left, right:
        left.send(b"mine", 1)
        TcpRpcBackend(subs[0]).send(b"part", 1)
        TcpRpcBackend(left).send(b"call", 1)
        inbox = bytearray(4)
        for receive, expected in (
            (TcpRpcBackend(right), b"call"),
            (TcpRpcBackend(subs[1]), b"part"),
        ):
            receive.recv(inbox, 0, timeout=PATIENCE)
            assert inbox == expected
        right.recv(inbox, 0, timeout=PATIENCE)
        assert inbox == b"mine"


def test_it_knows_its_place() -> None:
    """As the backend does."""
    with SimulatedBackend.create_group(3)[2] as backend:
        assert (TcpRpcBackend(backend).rank, TcpRpcBackend(backend).world_size) == (2, 3)


def test_a_message_over_the_limit_is_refused() -> None:
    """In both directions, before anything moves."""
    with (
        SimulatedBackend.create_group(1)[0] as backend,
        mock.patch.object(agent, "MAX_RPC_MSG_SIZE", 10),
    ):
        messages = TcpRpcBackend(backend)
        with pytest.raises(RpcInvalidMessage, match=r"RPC message size 11 exceeds maximum"):
            messages.send(bytes(11), 0)
        with pytest.raises(RpcInvalidMessage, match=r"RPC message size 11 exceeds maximum"):
            messages.recv(bytearray(11), 0)


def test_a_rank_that_is_gone_is_no_connection() -> None:
    """Whether something is sent or awaited."""
    left, right = SimulatedBackend.create_group(2)
    right.close()
    with left:
        messages = TcpRpcBackend(left)
        with pytest.raises(RpcNoConnection, match="no connection to rank 1"):
            messages.recv(bytearray(1), 1, timeout=PATIENCE)
        with pytest.raises(RpcNoConnection, match="no connection to rank 1"):
            messages.send(b"x", 1, timeout=PATIENCE)
