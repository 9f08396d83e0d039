"""A server is killed, or attacked: its callers learn at once, and everybody else goes on."""

import contextlib
import random
import socket
import threading
import time
from typing import cast
from unittest import mock

from potluck import NetworkNamespace, RpcAgent, RpcTimeout, TcpBackend
from potluck.rpc.connection import PURPOSE
from potluck.rpc.protocol import FrameFlag, FrameKind, RpcHello, pack_frame
from support.place import Failure, Place, resident
from support.ranks import Ranks
from support.threads import PATIENCE

AT_LATEST = 5.0  # seconds until a caller knows; far less unless other work shares these cores


def call_the_victim(place: Place) -> None:
    """Rank 2 serves until it is killed; the others wait for its answers."""
    with place.join() as backend, RpcAgent(backend) as agent:
        never = threading.Event()
        agent.register("hang", lambda payload: payload if never.wait(PATIENCE) else b"")
        agent.register("echo", lambda payload: payload)
        backend.barrier(PATIENCE)
        if place.rank == 2:
            place.say("serving")
            never.wait(PATIENCE)
            return
        futures = [agent.rpc_async(2, "hang", timeout=1000) for _ in range(5)]
        agent.rpc_sync(2, "echo", b"x")
        place.say("waiting")
        failures = [place.failure_of(future.wait, PATIENCE) for future in futures]
        assert {failure["kind"] for failure in failures} == {"RpcNoConnection"}
        later = place.failure_of(agent.rpc_sync, 2, "echo", b"x", 1000)
        assert later["kind"] == "RpcNoConnection"
        other = 1 - place.rank
        assert agent.rpc_sync(other, "echo", b"on") == b"on"
        place.say("lost", **failures[-1])
        place.hear("leave")
        never.set()


def test_a_killed_server_fails_its_calls_at_once(ranks: Ranks) -> None:
    """Those under way and later ones; the survivors go on calling each other."""
    processes = ranks.start(call_the_victim, 3)
    victim, others = processes[2], processes[:2]
    victim.expect("serving")
    for process in others:
        process.expect("waiting")
    moment = victim.kill()
    failures = [cast("Failure", process.expect("lost")) for process in others]
    for process in others:
        process.tell("leave")
    for failure in failures:
        assert failure["rank"] == 2
        assert failure["at"] - moment < AT_LATEST
    for process in others:
        process.value()


def be_attacked(place: Place) -> list[int]:
    """Rank 2 has no agent but speaks to the others' in every wrong way; they call each other."""
    plain = NetworkNamespace.insecure()
    with TcpBackend(
        place.rank, place.world_size, place.master, timeout=PATIENCE, namespace=plain
    ) as backend:
        if place.rank == 2:
            backend.barrier(PATIENCE)
            _attack(backend)
            backend.barrier(PATIENCE)
            backend.barrier(PATIENCE)
            return [0, 0]
        with RpcAgent(backend) as agent:
            agent.register("echo", lambda payload: payload)
            backend.barrier(PATIENCE)
            before, right = resident(), 0
            arrived = backend.post_barrier()
            while not arrived.done:
                right += agent.rpc_sync(1 - place.rank, "echo", b"x") == b"x"
                backend.progress(0)
            backend.barrier(PATIENCE)  # the other may be in its last call
            return [right, resident() - before]


def _attack(backend: TcpBackend) -> None:
    draw = random.Random(5)
    hello = RpcHello(1000, 1 << 30, 1 << 30).pack()
    good = pack_frame(FrameKind.HELLO, 0, len(hello)) + hello
    for number in range(40):
        huge = b"".join(
            pack_frame(FrameKind.REQUEST, call, 1, marks=FrameFlag.MORE, total=60 << 20) + b"x"
            for call in range(50)
        )
        noise = draw.choice([draw.randbytes(5000), good + draw.randbytes(5000), good + huge])
        deadline = time.monotonic() + PATIENCE
        lane = backend.open_stream(number % 2, PURPOSE, deadline, lambda: None)
        sock = cast("socket.socket", lane.stream._sock)  # type: ignore[attr-defined]
        sock.settimeout(PATIENCE)
        try:
            sock.sendall(noise)
            while sock.recv(1 << 16):
                pass
        except OSError:
            pass
        lane.stream.close()


def test_a_fuzzed_connection_harms_nobody(ranks: Ranks) -> None:
    """A member sends noise and announces gigabytes; the others' calls and memory are as before."""
    (right, grown), (right_there, grown_there), _ = ranks.run(be_attacked, 3)
    assert right > 10
    assert right_there > 10
    assert max(grown, grown_there) < 96 << 20


def interrupt(place: Place) -> list[str]:
    """Rank 0 is interrupted while it waits for an answer, and once while it reads one."""
    from support.threads import interrupted_when

    with place.join() as backend, RpcAgent(backend) as agent:
        go = threading.Event()
        agent.register("hang", lambda payload: payload if go.wait(PATIENCE) else b"")
        agent.register("echo", lambda payload: payload)
        backend.barrier(PATIENCE)
        found = []
        if place.rank == 0:
            peer = agent._endpoint.peers[1]
            try:
                with interrupted_when(lambda: bool(peer.is_busy)):
                    agent.rpc_sync(1, "hang", timeout=PATIENCE)
            except KeyboardInterrupt:
                found.append(agent.rpc_sync(1, "echo", b"on").decode())
            found.append(_interrupt_reading(agent))
            found.append(agent.rpc_sync(1, "echo", b"again", idempotent=True).decode())
        backend.barrier(PATIENCE)
        go.set()
        return found


def _interrupt_reading(agent: RpcAgent) -> str:
    """Whether the connection is open after the main thread, and no other, was interrupted in it.

    Usually the agent's own thread reads if it is faster than whoever waits; here it must not be.
    """
    connection = agent._endpoint.peers[1].connection
    assert connection is not None
    main = threading.get_ident()

    def read(*_: object) -> int:
        if threading.get_ident() == main:
            raise KeyboardInterrupt
        raise BlockingIOError

    with connection.reading:  # the agent's thread has read what it was about to read
        connection.watch_reading(wanted=False)
    with mock.patch.object(connection._reader, "read", read):
        for _ in range(int(PATIENCE)):
            with contextlib.suppress(RpcTimeout):  # it had one more look, in that very moment
                try:
                    agent.rpc_sync(1, "echo", b"half", timeout=1)
                except KeyboardInterrupt:
                    return str(connection.is_open)
                return "was not interrupted"
    return "never had its turn"


def test_an_interrupt_while_waiting_costs_nothing_and_while_reading_the_connection(
    ranks: Ranks,
) -> None:
    """Half-read bytes are not guessed at: the connection is made anew."""
    assert ranks.run(interrupt, 2) == [["on", "False", "again"], []]
