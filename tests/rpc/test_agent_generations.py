"""Agents that are closed and made anew on the same group: no call of a new one is lost."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import numpy as np
import pytest

from potluck import (
    Backend,
    Cluster,
    InvalidRank,
    RpcAgent,
    RpcBusy,
    RpcConfig,
    RpcNoConnection,
    RpcRemoteError,
    RpcTimeout,
    RpcTooLarge,
    SimulatedBackend,
    TcpBackend,
)
from potluck.net.transport import Stream
from potluck.rpc.connection import PURPOSE
from potluck.rpc.protocol import FrameFlag, FrameKind, RpcHello, RpcRequest, RpcResponse, pack_frame
from support.agents import Hold, agents
from support.clusters import clusters
from support.ports import free_port
from support.threads import PATIENCE, Background, eventually, together

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
        peer = caller._endpoint.peers[closing]
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
            peer = second._endpoint.peers[1]
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


# --------------------------------------------------------------------------------------------------
# A member that does not keep to the protocol harms only its own connection.


def frame(kind: int, number: int, body: bytes, **more: int) -> bytes:
    """A frame with its body."""
    return pack_frame(kind, number, len(body), **more) + body


HELLO = frame(FrameKind.HELLO, 0, RpcHello(10, 1 << 20, 1 << 20).pack())


def request(number: int, payload: bytes = b"", name: str = "echo") -> bytes:
    """A request in one frame."""
    body = RpcRequest(number, name, payload).serialize()
    return frame(FrameKind.REQUEST, number, body, patience=60_000)


ATTACKS: dict[str, bytes] = {
    "nonsense": random.Random(1).randbytes(1000),
    "no hello": request(1),
    "two hellos": HELLO + HELLO,
    "a hello of another protocol": frame(FrameKind.HELLO, 0, bytes(len(HELLO) - 24)),
    "an answer to nothing": HELLO + frame(FrameKind.RESPONSE, 5, RpcResponse(5, b"x").serialize()),
    "the same call twice": HELLO + request(1, name="hold") + request(1, name="hold"),
    "a request with two numbers": HELLO
    + frame(FrameKind.REQUEST, 1, RpcRequest(2, "echo", b"").serialize()),
    "a request that is none": HELLO + frame(FrameKind.REQUEST, 1, b"hello"),
    "more than is allowed": HELLO
    + pack_frame(FrameKind.REQUEST, 1, 1, marks=FrameFlag.MORE, total=(1 << 20) + 1),
    "two halves of too much": HELLO
    + frame(FrameKind.REQUEST, 1, b"x", marks=FrameFlag.MORE, total=900_000)
    + frame(FrameKind.REQUEST, 2, b"x", marks=FrameFlag.MORE, total=900_000),
    "too many calls": HELLO + b"".join(request(number, name="hold") for number in range(50)),
    "too many bytes": HELLO
    + b"".join(request(number, bytes(30_000), name="hold") for number in range(50)),
    "a piece of nothing": HELLO + frame(FrameKind.REQUEST, 9, b"x", marks=FrameFlag.LATER, total=5),
}


def write(stream: Stream, data: bytes) -> None:
    """All of it, unless the other side hangs up."""
    deadline = time.monotonic() + PATIENCE
    while data and time.monotonic() < deadline:
        try:
            data = data[stream.sendmsg([data]) :]
        except BlockingIOError:
            time.sleep(0.001)
        except OSError:
            return


def is_over(stream: Stream) -> Callable[[], bool]:
    """Whether the other side has hung up."""
    view = memoryview(bytearray(1 << 16))

    def look() -> bool:
        try:
            return stream.recv_into(view) == 0
        except BlockingIOError:
            return False
        except OSError:
            return True

    return look


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_an_attack_ends_its_own_connection_only(attack: bytes) -> None:
    """The agent hangs up on the attacker and serves the others."""
    victim, friend, enemy = SimulatedBackend.create_group(3)
    limits = RpcConfig(max_message=1 << 20, octets=1 << 20, calls=20, workers=30)
    with victim, friend, enemy, RpcAgent(victim, limits) as agent, RpcAgent(friend) as other:
        agent.register("echo", lambda payload: payload)
        go = threading.Event()
        agent.register("hold", lambda payload: payload if go.wait(PATIENCE) else b"")
        assert other.rpc_sync(0, "echo", b"before") == b"before"
        stream = enemy.open_stream(0, PURPOSE, time.monotonic() + PATIENCE, lambda: None).stream
        write(stream, attack)
        try:
            eventually(is_over(stream))
            assert other.rpc_sync(0, "echo", b"after") == b"after"
        finally:
            go.set()
            stream.close()


def test_noise_of_every_kind_is_survived() -> None:
    """Valid beginnings with random ends, again and again."""
    victim, friend, enemy = SimulatedBackend.create_group(3)
    draw = random.Random(7)
    with victim, friend, enemy, RpcAgent(victim) as agent, RpcAgent(friend) as other:
        agent.register("echo", lambda payload: payload)
        for _ in range(25):
            good = HELLO + request(1) + request(2, bytes(100))
            cut = good[: draw.randrange(len(good))]
            flipped = bytearray(good)
            flipped[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
            stream = enemy.open_stream(0, PURPOSE, time.monotonic() + PATIENCE, lambda: None).stream
            write(stream, draw.choice([cut, bytes(flipped), cut + draw.randbytes(200)]))
            stream.close()
            assert other.rpc_sync(0, "echo", b"x", timeout=PATIENCE) == b"x"
        eventually(lambda: agent._endpoint.peers[2].connection is None)


@pytest.mark.parametrize("_", range(5))  # whether the calls are read at once is up to chance
def test_a_peer_that_takes_no_answers_gets_no_functions_run(_: int) -> None:
    """Its calls wait in the queue, and memory stays bounded."""
    victim, enemy = SimulatedBackend.create_group(2)
    limits = RpcConfig(octets=1 << 20, workers=2)
    with victim, enemy, RpcAgent(victim, limits) as agent:
        runs: list[bytes] = []

        @agent.register("give")
        def give(payload: bytes) -> bytes:
            runs.append(payload)
            return bytes(600_000)

        stream = enemy.open_stream(0, PURPOSE, time.monotonic() + PATIENCE, lambda: None).stream
        write(stream, HELLO + b"".join(request(number, name="give") for number in range(100)))
        connection = agent._endpoint.peers[1]
        eventually(lambda: connection.connection is not None and connection.connection.is_congested)
        eventually(lambda: len(agent._endpoint._workers) > 90)
        assert len(runs) < 10
        stream.close()
        eventually(lambda: connection.connection is None)


# --------------------------------------------------------------------------------------------------
# Calls that are too many or too large, and calls to somebody who is gone.


def test_a_request_over_the_limit_is_not_sent() -> None:
    """Neither over our own limit nor over the other side's."""
    left, right = SimulatedBackend.create_group(2)
    with (
        left,
        right,
        RpcAgent(left, RpcConfig(max_message=100_000)) as caller,
        RpcAgent(right, RpcConfig(max_message=1_000)) as server,
    ):
        server.register("size", lambda payload: b"%d" % len(payload))
        with pytest.raises(RpcTooLarge, match="maximum allowed size 100000"):
            caller.rpc_sync(1, "size", bytes(100_000))
        with pytest.raises(RpcTooLarge, match="maximum allowed size 1000"):
            caller.rpc_sync(1, "size", bytes(1_000))
        assert caller.rpc_sync(1, "size", bytes(900)) == b"900"
        with pytest.raises(RpcTooLarge, match="maximum allowed size 1000"):
            caller.rpc_sync(1, "size", bytes(50_000))


def test_a_response_over_the_limit_is_an_error() -> None:
    """Of the caller's limit; the connection goes on."""
    with agents(max_message=10_000) as (caller, server):
        server.register("give", lambda payload: bytes(int(payload)))
        with pytest.raises(RpcTooLarge, match="RPC response size"):
            caller.rpc_sync(1, "give", b"20000")
        assert caller.rpc_sync(1, "give", b"5") == bytes(5)
        with pytest.raises(RpcTooLarge, match="RPC response size"):
            server.rpc_sync(1, "give", b"20000")


def test_whoever_makes_too_many_calls_waits() -> None:
    """Or is told, when the time is up: memory does not grow."""
    with agents(workers=1, calls=2, backlog=4) as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        futures = [caller.rpc_async(1, "hold") for _ in range(6)]
        with pytest.raises(RpcBusy, match="4 calls to rank 1 are already waiting"):
            caller.rpc_async(1, "hold", timeout=0.05)
        one_more = Background(lambda: caller.rpc_async(1, "hold").wait(PATIENCE))
        hold.go.set()
        assert one_more.result() == b""
        assert [future.wait(PATIENCE) for future in futures] == [b""] * 6


def test_large_payloads_do_not_block_small_calls() -> None:
    """A small call returns while a large one is still under way."""
    with agents() as (caller, server):
        server.register("echo", lambda payload: payload)
        server.expose(lambda array: array, name="same")
        array = np.ones(24 << 20, np.uint8)
        large = [caller.call_async(1, "same", array) for _ in range(4)]
        assert caller.rpc_sync(1, "echo", b"small") == b"small"
        assert not all(future.done for future in large)
        for future in large:
            assert future.wait(PATIENCE).nbytes == array.nbytes


# --- losses ---


def test_a_lost_rank_fails_its_calls_at_once() -> None:
    """Those under way and those that are made later; others go on."""
    backends = SimulatedBackend.create_group(3)
    group = [RpcAgent(backend) for backend in backends]
    hold = Hold()
    for agent in group:
        agent.register("hold", hold)
        agent.register("echo", lambda payload: payload)
    pending = [group[0].rpc_async(1, "hold", timeout=1000) for _ in range(5)]
    eventually(lambda: hold.running == 5)
    backends[1].lose()
    for future in pending:
        with pytest.raises(RpcNoConnection, match="no connection to rank 1"):
            future.wait(PATIENCE)
    with pytest.raises(RpcNoConnection):
        group[0].rpc_sync(1, "echo", timeout=1000)
    assert group[0].rpc_sync(2, "echo", b"on") == b"on"
    hold.go.set()
    together(*(backend.close for backend in backends))


def test_only_idempotent_calls_are_made_again() -> None:
    """When the connection breaks but the rank is still there."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        once = caller.rpc_async(1, "hold", b"once")
        again = caller.rpc_async(1, "hold", b"again", idempotent=True)
        eventually(lambda: hold.running == 2)
        connection = caller._endpoint.peers[1].connection
        assert connection is not None
        connection.wire.stream.close()
        with pytest.raises(RpcNoConnection):
            once.wait(PATIENCE)
        eventually(lambda: hold.running == 3)
        hold.go.set()
        assert again.wait(PATIENCE) == b"again"


def test_whatever_interrupts_the_reading_thread_costs_one_connection(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It reads for all ranks: were it to end, no call would ever be answered again."""
    with agents(3) as (caller, server, other):
        for agent in (server, other):
            agent.register("echo", lambda payload: payload)
        assert caller.rpc_sync(1, "echo", b"on") == b"on"
        connection = caller._endpoint.peers[1].connection
        assert connection is not None
        ended = mock.patch.object(connection._reader, "read", side_effect=SystemExit)
        with ended, pytest.raises(RpcNoConnection):
            caller.rpc_sync(1, "echo", b"lost", timeout=PATIENCE)
        assert "Reading from rank 1 failed" in caplog.text
        assert caller.rpc_sync(2, "echo", b"on", timeout=PATIENCE) == b"on"
        again = caller.rpc_sync(1, "echo", b"again", timeout=PATIENCE, idempotent=True)
        assert again == b"again"


def test_an_exit_in_a_function_ends_only_the_call() -> None:
    """The process and its workers go on."""
    with agents() as (caller, server):

        @server.register("leave")
        def leave(_: bytes) -> bytes:
            raise SystemExit(3)

        with pytest.raises(RpcRemoteError, match="SystemExit"):
            caller.rpc_sync(1, "leave")
        with pytest.raises(RpcRemoteError, match="SystemExit"):
            caller.rpc_sync(1, "leave")


# --------------------------------------------------------------------------------------------------
# Calls under way when the view of a cluster ends, and agents of clusters that are over.


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
        words = ("the members of the job have changed: ", "or it is already in the next view")
        assert any(each in str(caught.value) for each in words)  # whoever learns of it first
        assert "not known whether the function ran" in str(caught.value)
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
        sessions = nodes[0]._sessions
        sessions.pause("half of the members are away")
        try:
            began = time.monotonic()
            with pytest.raises(RpcTimeout, match="half of the members are away") as caught:
                agent.rpc_sync(1, "echo")
            assert caught.value.seconds == 0.2
            assert time.monotonic() - began >= 0.2
        finally:
            sessions.pause(None)


def test_a_call_that_is_started_during_a_pause_returns_at_once() -> None:
    """Its future waits: for the end of the pause, or for its own deadline."""
    with clusters(2) as nodes:
        agents = [RpcAgent(node) for node in nodes]
        for agent in agents:
            agent.register("echo", lambda payload: payload)
        agent, sessions = agents[0], nodes[0]._sessions
        sessions.pause("half of the members are away")
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
            sessions.pause(None)
        assert [future.wait(PATIENCE) for future in ends] == [b"on", b"on"]
        with pytest.raises(InvalidRank):
            missing.wait(PATIENCE)
        sessions.pause("again")
        left = agent.rpc_async(1, "echo", timeout=PATIENCE)
        agent.close()
        with pytest.raises(RpcNoConnection, match="the agent of this rank was closed"):
            left.wait(PATIENCE)
        sessions.pause(None)


def test_an_agent_can_be_closed_and_made_anew_within_a_view() -> None:
    """The cluster goes on, and the next agent takes over."""
    with clusters(2) as nodes:
        with RpcAgent(nodes[1]) as server:
            server.register("word", lambda _: b"first")
            caller = RpcAgent(nodes[0])
            with pytest.raises(ValueError, match="already has an RpcAgent"):
                RpcAgent(nodes[0])
            assert caller.rpc_sync(1, "word") == b"first"
        with RpcAgent(nodes[1]) as server:
            server.register("word", lambda _: b"second")
            assert caller.rpc_sync(1, "word", timeout=PATIENCE, idempotent=True) == b"second"
        assert nodes[0].world_size == 2
