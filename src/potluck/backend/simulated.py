"""SimulatedBackend: all ranks in one process, for tests and for trying things out.

The same mesh as over TCP, on in-memory links.  Delays are drawn from a seed, a rank can be lost at
a given moment or after a given number of writes, so a fault found once can be replayed.
"""

from __future__ import annotations

import random
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from potluck.backend.base import IncomingStreams, PeerStream, check_whole
from potluck.backend.mesh import MeshBackend
from potluck.backend.messages import MessageLimits
from potluck.errors import InvalidWorldSize
from potluck.net.memory import MemoryPoller, MemoryStream, pipe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from potluck.net.transport import Buffer, Poller


UNBOUNDED = 1 << 48
"""Bytes: more than any memory has."""

IN_PROCESS = MessageLimits(eager=UNBOUNDED, credit=UNBOUNDED)
"""In one process a message may be sent and received by the same thread, in that order: so all
travel without asking, however large and however many."""

STREAM_CAPACITY = 1 << 20
"""Bytes a stream for collectives holds, about as many as a socket."""


@dataclass(frozen=True)
class SimulatedFaults:
    """What goes wrong, and when.

    >>> SimulatedFaults(seed=7, delay=(0.0, 0.002), lose={2: 10}).seed
    7
    """

    seed: int = 0
    """Every random choice follows from it."""
    delay: tuple[float, float] = (0.0, 0.0)
    """Each write arrives after a time drawn from this range, in seconds; order is kept."""
    lose: Mapping[int, int] = field(default_factory=dict)
    """Rank -> the number of writes after which it vanishes without a word."""


class SimulatedBackend(MeshBackend):
    """One rank of a group that lives in this process.

    >>> left, right = SimulatedBackend.create_group(2)
    >>> left.send(b"ping", dst=1)
    >>> inbox = bytearray(4)
    >>> right.recv(inbox, src=0)
    >>> bytes(inbox)
    b'ping'
    """

    def __init__(self, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size, MemoryPoller(), IN_PROCESS)
        self._switchboard = IncomingStreams()
        self._streams: weakref.WeakSet[MemoryStream] = weakref.WeakSet()
        self._group: list[SimulatedBackend] = [self]
        self._faults = SimulatedFaults()

    @classmethod
    def create_group(
        cls, world_size: int, *, faults: SimulatedFaults | None = None
    ) -> list[SimulatedBackend]:
        """All ranks of a new group, in order."""
        if check_whole(world_size, "world_size") < 1:
            raise InvalidWorldSize(world_size)
        group = [cls(rank, world_size) for rank in range(world_size)]
        for backend in group:
            backend._group = group  # noqa: SLF001 - they are one thing
            backend._faults = faults or SimulatedFaults()  # noqa: SLF001
        for high in range(world_size):
            for low in range(high):
                right, left = group[high]._make_pipe(group[low], UNBOUNDED)  # noqa: SLF001
                group[low].add_link(high, left)
                group[high].add_link(low, right)
        return group

    def open_stream(
        self, rank: int, purpose: str, deadline: float, look: Callable[[], None]
    ) -> PeerStream:
        """A connection in memory; the higher rank makes it, as it dials over TCP."""
        if rank < self.rank:
            mine, theirs = self._make_pipe(self._group[rank], STREAM_CAPACITY)
            self._group[rank]._switchboard.put(self.rank, purpose, theirs)  # noqa: SLF001
        else:
            mine = cast("MemoryStream", self._switchboard.take(rank, purpose, deadline, look))
        self._streams.add(mine)
        return PeerStream(mine)

    def abandon_streams(self, is_over: Callable[[str], bool]) -> None:
        """Close connections that are not needed here any more."""
        for stream in self._switchboard.abandon(is_over):
            cast("MemoryStream", stream).close()

    def make_poller(self) -> Poller:
        """A poller for streams in memory."""
        return MemoryPoller()

    def _make_pipe(self, low: SimulatedBackend, capacity: int) -> tuple[MemoryStream, MemoryStream]:
        """Both ends of a connection to a lower rank, this one's first."""
        there, back = _delays(self._faults, low, self), _delays(self._faults, self, low)
        names = (low.peer_name(low.rank), self.peer_name(self.rank))
        left, right = pipe(names, capacity=capacity, delay=there, delay_back=back)
        for backend, stream in ((low, left), (self, right)):
            if backend.rank in self._faults.lose:
                _doom(backend, stream, self._faults.lose[backend.rank])
        return right, left

    def lose(self) -> None:
        """Vanish like a process that was killed: no goodbye, every peer sees a reset."""
        for link in self._links.values():
            link.stream.close()
        for stream in list(self._streams):
            stream.close()

    def peer_name(self, rank: int) -> str:
        """Ranks have no address here."""
        return f"simulated rank {rank}"


class _FailingStream:
    """A stream that makes its rank fail after a number of writes."""

    def __init__(self, stream: MemoryStream, countdown: Callable[[], None]) -> None:
        self._sendmsg = stream.sendmsg
        self._countdown = countdown

    def sendmsg(self, buffers: Sequence[Buffer], /) -> int:
        """Count, and maybe vanish."""
        self._countdown()
        return self._sendmsg(buffers)


def _delays(
    faults: SimulatedFaults, src: SimulatedBackend, dst: SimulatedBackend
) -> Callable[[], float] | None:
    """Random numbers for each direction of a pair: no other traffic changes them."""
    shortest, longest = faults.delay
    source = random.Random(f"{faults.seed}/{src.rank}/{dst.rank}")  # noqa: S311 - not for secrets
    return (lambda: source.uniform(shortest, longest)) if longest > 0 else None


def _doom(backend: SimulatedBackend, stream: MemoryStream, writes: int) -> None:
    left: list[int] = backend.__dict__.setdefault("_writes_left", [writes])

    def countdown() -> None:
        left[0] -= 1
        if left[0] < 0:
            backend.lose()

    stream.sendmsg = _FailingStream(stream, countdown).sendmsg  # type: ignore[method-assign]
