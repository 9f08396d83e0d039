"""Strangers at the master's port while the group forms: nobody waits for them, nobody is hurt."""

import contextlib
import os
import signal
import socket
from collections.abc import Iterator

import msgspec

from potluck.net import listener
from potluck.net.frames import FrameType, encode
from potluck.net.listener import SLOTS, SLOTS_PER_HOST
from potluck.wire_messages import Join, OpenRequest, RankEndpoint, pack
from support.newcomers import dial, meet, start_rank_0
from support.ranks import Ranks, new_master, start_together
from support.threads import eventually

NESTED = b"\x81\xa1x" + b"\x91" * 60_000  # a list in a list in a list …


def frame(kind: FrameType, payload: bytes) -> bytes:
    """A frame that is well formed as such."""
    return encode(kind, length=len(payload)) + payload


def hello(message: msgspec.Struct) -> bytes:
    """A hello that is well formed as such."""
    return frame(FrameType.HELLO, pack(message))


def peculiar_greetings() -> Iterator[bytes]:
    """What a port scanner, a browser, an old version or an enemy might send first."""
    me = RankEndpoint(hosts=["127.0.0.1"], port=1, name="stranger")
    yield b"GET / HTTP/1.1\r\nHost: example\r\n\r\n"
    yield b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + os.urandom(500)  # TLS
    yield os.urandom(100_000)
    yield b"PL"
    yield encode(FrameType.HELLO, length=1000)  # and then nothing
    yield b"PL\x01\x01" + b"\xff" * 32  # an oversized length
    yield frame(FrameType.HELLO, b"")
    yield frame(FrameType.HELLO, os.urandom(1000))
    yield frame(FrameType.HELLO, NESTED)
    yield frame(FrameType.HELLO, msgspec.msgpack.encode({"type": "join", "rank": NESTED.hex()}))
    yield frame(FrameType.DATA, bytes(10))
    yield frame(FrameType.GOODBYE, b"")
    yield hello(OpenRequest(session=os.urandom(16), rank=1, to=0))
    yield hello(Join(rank=0, world_size=3, peer=me))
    yield hello(Join(rank=3, world_size=3, peer=me))
    yield pack(Join(rank=1, world_size=3, peer=me))


def test_garbage_at_the_master_port_delays_nobody(ranks: Ranks) -> None:
    """Whatever it is, and whether the stranger hangs up or stays on the line."""
    send_garbage(ranks, None)
    send_garbage(ranks, "insecure")  # in clear, where it gets further


def send_garbage(ranks: Ranks, namespace: str | None) -> None:
    """Form a group while strangers talk to its rank 0."""
    master = new_master()
    zero = start_rank_0(ranks, master, 3, namespace)
    with contextlib.ExitStack() as lines:
        for greeting in peculiar_greetings():
            for stays in (True, False):
                line = dial(master)
                with contextlib.suppress(ConnectionError):
                    line.sendall(greeting)
                if stays:
                    lines.enter_context(line)
                else:
                    line.close()
        started = ranks.start(meet, 3, namespace, ranks=[1, 2], master=master)
        start_together(started)
        for process in started:
            assert process.value() < listener.PATIENCE  # what a silent caller has
        zero.value()


def test_silent_strangers_in_great_number_keep_nobody_out(ranks: Ranks) -> None:
    """When all places are taken, the one who has been silent longest makes room."""
    master = new_master()
    zero = start_rank_0(ranks, master, 3)
    with contextlib.ExitStack() as lines:
        for _ in range(3 * SLOTS):
            lines.enter_context(dial(master))
        started = ranks.start(meet, 3, ranks=[1, 2], master=master)
        start_together(started)
        for process in started:
            assert process.value() < listener.PATIENCE
        zero.value()


def test_a_stranger_who_speaks_while_making_room_does_no_harm(ranks: Ranks) -> None:
    """The acceptor learns of a new caller and of a word of the oldest one in the same instant."""
    master = new_master()
    zero = start_rank_0(ranks, master, 2)
    with contextlib.ExitStack() as lines:
        silent = [lines.enter_context(dial(master)) for _ in range(2 * SLOTS_PER_HOST)]
        eventually(lambda: is_closed(silent[SLOTS_PER_HOST - 1]))  # so the next is the oldest
        zero.send_signal(signal.SIGSTOP)
        lines.enter_context(dial(master))
        silent[SLOTS_PER_HOST].sendall(b"P")
        zero.send_signal(signal.SIGCONT)
        (one,) = ranks.start(meet, 2, ranks=[1], master=master)
        start_together([one])
        assert one.value() < listener.PATIENCE
        zero.value()


def is_closed(line: socket.socket) -> bool:
    """Whether the other side has hung up."""
    line.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        try:
            return line.recv(1) == b""
        except ConnectionError:
            return True
    return False
