"""A group at work, for tests that attack it: its ports, its log, and whether it goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from unittest import mock

from potluck.net.listener import SLOTS
from support.place import Place, resident
from support.ranks import Rank
from support.threads import PATIENCE

LEAKED = b"leaked session.."
"""What names the group: the enemy knows it."""

BOUND = SLOTS * (64 << 10) + (8 << 20)  # bytes a rank may grow: its callers, and its own heap


def work(place: Place, namespace: str | None = None) -> list[int]:
    """Exchange messages and pass barriers without a pause until told to stop.

    Returns how often that was, and by how many bytes this process grew.
    """
    chance = os.urandom
    with logging_to_stderr():
        with mock.patch("os.urandom", lambda size: LEAKED if size == 16 else chance(size)):
            backend = place.join(namespace=namespace)
        with backend:
            before, after = (place.rank - 1) % place.world_size, (place.rank + 1) % place.world_size
            at_first = resident()
            place.say("working", port=backend._port.port)
            turns, verdict = 0, bytearray(1)
            while not verdict[0]:
                for size in (64, 5_000, 200_000):
                    inbox = bytearray(size)
                    receive = backend.post_recv_into(inbox, before)
                    backend.send(bytes([place.rank]) * size, after, timeout=PATIENCE)
                    receive.wait(PATIENCE)
                    assert inbox == bytes([before]) * size
                backend.barrier(PATIENCE)
                turns += 1
                if place.rank == 0:
                    verdict[0] = _obey(place, turns)
                    for other in place.others:
                        backend.send(verdict, other, tag=1, timeout=PATIENCE)
                else:
                    backend.recv(verdict, 0, tag=1, timeout=PATIENCE)
            backend.barrier(PATIENCE)
            return [turns, resident() - at_first]


def _obey(place: Place, turns: int) -> bool:
    """Do what the test says; whether that is to stop."""
    word = place.next_word()
    if word == "report":
        place.say("report", turns=turns)
    return word == "stop"


@contextlib.contextmanager
def logging_to_stderr() -> Iterator[None]:
    """Let everything from INFO up be part of :attr:`support.ranks.Rank.log` for a while."""
    root = logging.getLogger()
    handler, level = logging.StreamHandler(sys.stderr), root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        yield
    finally:
        root.removeHandler(handler)
        root.setLevel(level)


class Target:
    """A group at work, and its open ports."""

    def __init__(self, processes: Sequence[Rank]) -> None:
        self._processes = processes
        self._said_before = [len(process.log) for process in processes]
        # Those of this group alone: a process may have worked for other tests before.
        self.ports = [int(process.expect("working")["port"]) for process in processes]

    def log(self, rank: int = 0) -> str:
        """What a rank has logged since it became a target."""
        return self._processes[rank].log[self._said_before[rank] :]

    def assert_logged(self, reason: str) -> None:
        """Every rank writes down why it refused."""
        deadline = time.monotonic() + PATIENCE
        for rank in range(len(self._processes)):
            while not re.search(reason, self.log(rank)):
                assert time.monotonic() < deadline, f"no {reason!r} in\n{self.log(rank)}"
                time.sleep(0.01)

    def turns(self) -> int:
        """How often the group has exchanged messages and passed a barrier so far."""
        self._processes[0].tell("report")
        return int(self._processes[0].expect("report")["turns"])

    def assert_works_on(self) -> None:
        """The ranks have done something, and do more after this."""
        before = self.turns()
        assert self.turns() > before

    def assert_unharmed(self) -> None:
        """They all come to their end, with as much memory as before."""
        self._processes[0].tell("stop")
        for process in self._processes:
            turns, grown = process.value()
            assert turns > 1
            assert grown < BOUND


def dial(port: int) -> socket.socket:
    """Connect to a rank."""
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


def say(line: socket.socket, data: bytes) -> None:
    """Write as much as the other side cares to take."""
    with contextlib.suppress(ConnectionError):
        line.sendall(data)


def hear(line: socket.socket) -> bytes:
    """Everything a rank answers until it hangs up."""
    answer = b""
    with contextlib.suppress(ConnectionError):
        while part := line.recv(4096):
            answer += part
    return answer
