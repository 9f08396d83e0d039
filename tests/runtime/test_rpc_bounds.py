"""Whatever peers and callers do, an agent keeps no more than it has said."""

import threading
import time

import pytest

from potluck import (
    RpcAgent,
    RpcBusy,
    RpcConfig,
    RpcNoConnection,
    RpcRemoteError,
    RpcTimeout,
    SimulatedBackend,
)
from potluck.core.calls_encoding import RpcRequest
from potluck.core.calls_frames import Frame, FrameKind, Hello, Mark, pack_frame
from potluck.net.transport import Stream
from potluck.runtime.rpc_calls import Incoming
from potluck.runtime.rpc_opening import PURPOSE
from support.agents import Hold, agents
from support.threads import PATIENCE, Background, eventually

MIB = 1 << 20


def frame(kind: int, number: int, body: bytes, **more: int) -> bytes:
    """A frame with its body."""
    return pack_frame(kind, number, len(body), **more) + body


HELLO = frame(FrameKind.HELLO, 0, Hello(1 << 20, 1 << 30, 1 << 30).pack())


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
        self._peer = agent._office.peers[1]
        self.write(HELLO)
        eventually(lambda: self._peer.connection is not None)
        connection = self._peer.connection
        assert connection is not None
        self.connection = connection
        self._accept = connection.accept
        self._last = 0  # the number of the last call that the agent has seen
        connection.accept = self._note  # type: ignore[method-assign]

    def _note(self, frame: Frame, data: bytes | memoryview) -> Incoming:
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
            most = max(most, flood.connection._outbox.octets)
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
        connection = caller._office.peers[1].connection
        assert connection is not None
        eventually(lambda: len(connection.sent) == 1)
        assert len(server._office._workers) <= 200
        hold.go.set()
        assert first.wait(PATIENCE) == b""
        eventually(lambda: len(server._office._workers) == 0)
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
        eventually(lambda: len(agent._office._workers) == 0)
        assert len(hold.calls) == 1


def test_a_peer_cannot_begin_any_number_of_tiny_messages() -> None:
    """Each would take memory of its own."""
    victim, enemy = SimulatedBackend.create_group(2)
    with victim, enemy, RpcAgent(victim) as agent:
        flood = Flood(enemy, agent)
        flood.write(frame(FrameKind.REQUEST, 1, b"x", marks=Mark.MORE, total=2))
        eventually(lambda: not flood.is_welcome)
        flood.stop()


def test_calls_to_oneself_are_bounded_too() -> None:
    """Whoever makes too many waits, or is told."""
    with agents(1, workers=1, calls=4) as (agent,):
        hold = Hold()
        agent.register("hold", hold)
        futures = [agent.rpc_async(0, "hold") for _ in range(4)]
        with pytest.raises(RpcBusy, match="4 calls of rank 0 to itself wait already"):
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
        connection = caller._office.peers[1].connection
        with pytest.raises(RpcRemoteError, match="ValueError on rank 1"):
            caller.rpc_sync(1, "fail")
        assert caller.rpc_sync(1, "echo", b"x") == b"x"
        assert caller._office.peers[1].connection is connection


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
        connection = caller._office.peers[1].connection
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
        eventually(lambda: len(agent._office._workers) == 0)
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
