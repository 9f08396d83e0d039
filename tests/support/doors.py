"""The doors to the network, real and in memory, made alike for tests that hold for all of them."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeAlias

from potluck._platform import HAS_EPOLL
from potluck.net import memory, tcp
from potluck.net.transport import Event, Poller, Stream

CAPACITY = 1 << 16

LOOPBACKS = ["127.0.0.1"]
"""The addresses of this machine that nobody else reaches; a container may lack the second."""

with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
    LOOPBACKS.append("::1")

Pair: TypeAlias = tuple[Stream, Stream]


def socket_pair(host: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
    """Two connected TCP sockets, as they come from the kernel."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        left = socket.create_connection(listener.getsockname()[:2])
        right, _ = listener.accept()
    return left, right


class Door:
    """Makes pollers and connected pairs of one sort, and closes them all in the end."""

    def __init__(self, make_poller: Callable[[], Poller], make_pair: Callable[[], Pair]) -> None:
        self._make_poller = make_poller
        self._make_pair = make_pair
        self._made = contextlib.ExitStack()

    def poller(self) -> Poller:
        """A poller."""
        poller = self._make_poller()
        self._made.callback(poller.close)
        return poller

    def pair(self) -> Pair:
        """Two ends of one connection."""
        pair = self._make_pair()
        for end in pair:
            self._made.callback(end.close)
        return pair

    def close(self) -> None:
        """Close whatever a test has left open."""
        self._made.close()


def tcp_pair() -> Pair:
    """Two ends over loopback."""
    left, right = socket_pair()
    return tcp.TcpStream(left), tcp.TcpStream(right)


def memory_pair() -> Pair:
    """Two ends in this process."""
    return memory.pipe(("left", "right"), capacity=CAPACITY)


class TimedSocket(socket.socket):
    """Remembers how long it was told to wait."""

    def __init__(self, fileno: int) -> None:
        super().__init__(fileno=fileno)
        self.waits: list[float] = []

    def settimeout(self, value: float | None, /) -> None:
        """Wait so many seconds at most."""
        super().settimeout(value)
        if value is not None:
            self.waits.append(value)


DOORS: dict[str, tuple[Callable[[], Poller], Callable[[], Pair]]] = {
    "selector": (tcp.SelectorPoller, tcp_pair),
    "memory": (memory.MemoryPoller, memory_pair),
}
if HAS_EPOLL:
    DOORS["epoll"] = (tcp.EpollPoller, tcp_pair)


@contextlib.contextmanager
def open_door(name: str) -> Iterator[Door]:
    """A door by name."""
    with contextlib.closing(Door(*DOORS[name])) as door:
        yield door


def wait_for_event(poller: Poller, within: float = 30.0) -> list[Event]:
    """The next events; a wait may also end without any."""
    deadline = time.monotonic() + within
    while not (events := poller.wait(max(0.0, deadline - time.monotonic()))):
        assert time.monotonic() < deadline, "no event came"
    return events


def read(stream: Stream, count: int, within: float = 30.0) -> bytes:
    """Exactly ``count`` bytes, or fewer if the stream ends before."""
    data, deadline = bytearray(), time.monotonic() + within
    while len(data) < count:
        chunk = bytearray(count - len(data))
        try:
            got = stream.recv_into(memoryview(chunk))
        except BlockingIOError:
            assert time.monotonic() < deadline, f"{len(data)} of {count} bytes came"
            time.sleep(0.001)
            continue
        if not got:
            break
        data += chunk[:got]
    return bytes(data)


def fill(stream: Stream) -> int:
    """Write until the stream takes no more; how much it took."""
    total, chunk = 0, bytes(1 << 16)
    with contextlib.suppress(BlockingIOError):
        while True:
            total += stream.sendmsg([chunk])
    return total
