"""A session: the streams of a group in one epoch, and the operations that run over them.

Streams are opened when a program first needs them.  Whatever goes wrong ends the session: all its
streams are closed, so that nothing half-sent can be taken for something else, and the group goes on
with the next epoch and fresh streams.
"""

from __future__ import annotations

import contextlib
import struct
import time
from typing import TYPE_CHECKING

import numpy as np

from potluck.backend.spin import Spin
from potluck.collective.reduce import ReduceOp, Reducer, quiet
from potluck.collective.task import Collective, Task
from potluck.errors import NoConnection
from potluck.net.frames import NUMBERS, NUMBERS_AT, Kind, encode
from potluck.runtime.call import Call, Purpose
from potluck.runtime.channel import Broken, Channel, Disagreement, PlainChannel
from potluck.runtime.coded_memory import memory_for
from potluck.runtime.memory import Memory, Pool
from potluck.runtime.plans import confirmation
from potluck.runtime.pump import Pump
from potluck.runtime.sealed_channel import SealedChannel
from potluck.runtime.straight import SHORT, Messenger, run_straight
from potluck.runtime.survey import measure
from potluck.runtime.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from potluck.backend.base import Backend
    from potluck.backend.streams import PeerStream
    from potluck.collective.reduce import Array
    from potluck.net.transport import Poller
    from potluck.runtime.fingerprint import Fingerprint
    from potluck.runtime.plans import Compiled
    from potluck.runtime.vigil import Vigil

__all__ = ["Session", "abandon_streams"]

OPERATION = struct.Struct("<Q")
OPERATION_AT = NUMBERS_AT - OPERATION.size
"""Where the number of the operation stands: all that differs between the openings of a session."""

NO_NUMBERS = bytes(NUMBERS.size)

EPOCHS = (1 << 32) - 1
"""What of an epoch's number fits into a header; the streams of different ones differ anyway."""

LINGER = 1.0
"""Seconds to wait for what was sent to reach its peers when this rank leaves."""

AWAY = 0.005
"""Seconds between two operations after which others may have given up meanwhile."""

FOREVER = 365 * 86400.0
"""Seconds, for those who set no deadline."""


class _Failures:
    """Around an operation: what goes wrong with its streams is put into words."""

    def __init__(self, vigil: Vigil) -> None:
        self._vigil = vigil

    def __enter__(self) -> None:
        """Nothing yet."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Find the reason."""
        if isinstance(error, Disagreement):
            raise self._vigil.disagree(error) from None
        if isinstance(error, Broken):
            raise self._vigil.explain(error.peer, error.reason) from None


class Session:
    """The streams of one group in one epoch."""

    def __init__(self, backend: Backend, vigil: Vigil, pool: Pool) -> None:
        self._backend = backend
        self._vigil = vigil
        self._pool = pool
        self._poller: Poller = backend.make_poller()
        self._watch = Watch(self._poller, Spin(), vigil)
        self._channels: dict[int, Channel] = {}
        self._lines: dict[tuple[int, ...], dict[int, Channel]] = {}
        self._number = 0
        self._pace = 0
        self._ended = 0.0
        self._failures = _Failures(vigil)
        self._head = encode(Kind.COLLECTIVE, epoch=vigil.epoch & EPOCHS)[:OPERATION_AT]
        self._confirmation = confirmation(backend.rank, backend.world_size)
        self._confirming = (*self._confirmation.incoming, *self._confirmation.outgoing)
        byte = np.zeros(1, np.uint8)
        self._token = Call(
            Task.whole(Collective.BARRIER, backend.world_size, 1),
            byte,
            byte,
            Reducer.of(ReduceOp.BIT_OR, np.uint8),
        )

    def wake(self) -> None:
        """Let the waiting thread look up."""
        self._poller.wake()

    def run(self, call: Call, compiled: Compiled, deadline: float | None) -> None:
        """Do a call."""
        confirms = compiled.needs_confirming
        peers = compiled.peers + self._confirming if confirms else compiled.peers
        channels = self._begin(compiled.fingerprint, compiled.packed, peers, deadline)
        self._pool.fit(compiled.slot)
        memory = memory_for(compiled.units, call, self._pool, compiled.codec)
        with self._failures, quiet():
            if compiled.sent <= SHORT:
                messenger = Messenger(channels, self._watch)
                run_straight(compiled.units, memory, self._pool, messenger)
            else:
                Pump(compiled.units, memory, self._pool, channels, self._watch).run()
            if confirms:
                self._confirm(channels)
        self._ended = time.monotonic()

    def pace(self, rate: int) -> None:
        """Send no faster than this on each stream, those included that are yet to be opened."""
        self._pace = rate
        for channel in self._channels.values():
            channel.stream.pace(rate)

    def survey(self, fingerprint: Fingerprint, deadline: float | None) -> Array:
        """Measure the links before an operation; what this rank sees."""
        backend = self._backend
        others = tuple(rank for rank in range(backend.world_size) if rank != backend.rank)
        fingerprint = fingerprint._replace(purpose=Purpose.MEASURE_LINKS)
        channels = self._begin(fingerprint, fingerprint.pack(), others, deadline)
        with self._failures:
            messenger = Messenger(channels, self._watch)
            seen = measure(messenger, backend.rank, backend.world_size)
            messenger.finish()
        return seen

    def _begin(
        self,
        fingerprint: Fingerprint,
        packed: bytes,
        peers: tuple[int, ...],
        deadline: float | None,
    ) -> Mapping[int, Channel]:
        """The streams of one more operation."""
        self._number += 1
        self._watch.slept = self._vigil.slept
        self._vigil.begin(self._number, fingerprint, deadline)
        if self._vigil.asked - self._ended > AWAY:
            self._vigil.catch_up()
        channels = self._lines.get(peers)
        if channels is None:
            # All ranks open them in the same order, so that nobody waits in a circle.
            channels = {peer: self._channel(peer, deadline) for peer in sorted({*peers})}
            self._lines[peers] = channels
        opening = self._head + OPERATION.pack(self._number) + NO_NUMBERS + packed
        for channel in channels.values():
            channel.begin(opening)
        return channels

    def _confirm(self, channels: Mapping[int, Channel]) -> None:
        """Make sure that all ranks were in the same operation."""
        memory = Memory(self._confirmation, self._token, self._pool)
        messenger = Messenger(channels, self._watch)
        run_straight(self._confirmation, memory, self._pool, messenger)

    def _channel(self, peer: int, deadline: float | None) -> Channel:
        channel = self._channels.get(peer)
        if channel is None:
            opened = self._open(peer, deadline)
            channel = self._channels[peer] = _make_channel(peer, opened)
            self._watch.add(channel)
            if self._pace:
                channel.stream.pace(self._pace)
        return channel

    def _open(self, peer: int, deadline: float | None) -> PeerStream:
        purpose, vigil = f"{_purpose(self._vigil)}{self._vigil.epoch}", self._vigil
        end = time.monotonic() + FOREVER if deadline is None else deadline
        try:
            return self._backend.open_stream(peer, purpose, end, lambda: vigil.look((peer,)))
        except NoConnection as error:
            if time.monotonic() < end:
                raise
            raise vigil.late((peer,), f"{error.message}: {error.cause}") from None

    def finish(self) -> None:
        """Close every stream after what was sent has arrived: others may still need it."""
        deadline = time.monotonic() + LINGER
        for channel in self._channels.values():
            self._poller.unregister(channel.stream)
            with contextlib.suppress(OSError):
                channel.stream.finish(deadline)
        self._poller.close()

    def close(self) -> None:
        """Close every stream at once."""
        for channel in self._channels.values():
            self._poller.unregister(channel.stream)
            with contextlib.suppress(OSError):
                channel.stream.close()
        self._poller.close()


def _purpose(vigil: Vigil) -> str:
    """What the streams of a group are for; the number of the epoch follows."""
    return f"collectives.{vigil.instance}/" if vigil.instance else "collectives/"


def abandon_streams(backend: Backend, vigil: Vigil) -> None:
    """Close what others have opened for epochs before this one, and we never asked for."""
    mine = _purpose(vigil)

    def is_over(purpose: str) -> bool:
        number = purpose.removeprefix(mine)
        return number != purpose and number.isdecimal() and int(number) < vigil.epoch

    backend.abandon_streams(is_over)


def _make_channel(peer: int, opened: PeerStream) -> Channel:
    if opened.seal is None:
        return PlainChannel(peer, opened.stream, opened.first)
    return SealedChannel(peer, opened.stream, opened.seal, opened.first)
