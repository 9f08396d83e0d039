"""A member that does not keep to the protocol harms only its own connection."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from potluck import RpcAgent, RpcConfig, SimulatedBackend
from potluck.core.calls_encoding import RpcRequest, RpcResponse
from potluck.core.calls_frames import FrameKind, Hello, Mark, pack_frame
from potluck.net.transport import Stream
from potluck.runtime.rpc_opening import PURPOSE
from support.threads import PATIENCE, eventually


def frame(kind: int, number: int, body: bytes, **more: int) -> bytes:
    """A frame with its body."""
    return pack_frame(kind, number, len(body), **more) + body


HELLO = frame(FrameKind.HELLO, 0, Hello(10, 1 << 20, 1 << 20).pack())


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
    + pack_frame(FrameKind.REQUEST, 1, 1, marks=Mark.MORE, total=(1 << 20) + 1),
    "two halves of too much": HELLO
    + frame(FrameKind.REQUEST, 1, b"x", marks=Mark.MORE, total=900_000)
    + frame(FrameKind.REQUEST, 2, b"x", marks=Mark.MORE, total=900_000),
    "too many calls": HELLO + b"".join(request(number, name="hold") for number in range(50)),
    "too many bytes": HELLO
    + b"".join(request(number, bytes(30_000), name="hold") for number in range(50)),
    "a piece of nothing": HELLO + frame(FrameKind.REQUEST, 9, b"x", marks=Mark.LATER, total=5),
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
        eventually(lambda: agent._office.peers[2].connection is None)


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
        connection = agent._office.peers[1]
        eventually(lambda: connection.connection is not None and connection.connection.is_congested)
        eventually(lambda: len(agent._office._workers) > 90)
        assert len(runs) < 10
        stream.close()
        eventually(lambda: connection.connection is None)
