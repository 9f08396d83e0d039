"""A session: the streams of a group in one epoch, and the operations that run over them.

Streams are opened when a program first needs them.  Whatever goes wrong ends the session: all its
streams are closed, so that nothing half-sent can be taken for something else, and the group goes on
with the next epoch and fresh streams.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING

import numpy as np

from potluck.backend.spin import Spin
from potluck.collective.reduce import ReduceOp, Reducer, quiet
from potluck.collective.task import Collective, Task
from potluck.net.frames import Kind, encode
from potluck.runtime.call import Call
from potluck.runtime.channel import Broken, Channel, Disagreement, PlainChannel, SealedChannel
from potluck.runtime.memory import Memory, Pool
from potluck.runtime.plans import confirmation
from potluck.runtime.pump import Pump
from potluck.runtime.straight import SHORT, Messenger, run_straight
from potluck.runtime.survey import measure
from potluck.runtime.watch import Watch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from potluck.backend.base import Backend
    from potluck.backend.streams import PeerStream
    from potluck.collective.reduce import Array
    from potluck.net.transport import Poller
    from potluck.runtime.fingerprint import Fingerprint
    from potluck.runtime.plans import Compiled
    from potluck.runtime.vigil import Vigil

__all__ = ["Session"]

_SYNCHRONISING = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
        Collective.BARRIER,
    }
)
"""Collectives in which every rank needs something from every other, if there is anything at all."""

SURVEY = 1
"""The purpose of an operation that measures links."""

FOREVER = 365 * 86400.0
"""Seconds, for those who set no deadline."""


class _Head:
    """The header of every operation of a session, of which only the number differs."""

    def __init__(self, group: int, epoch: int) -> None:
        self._group, self._epoch = group, epoch

    def pack(self, number: int) -> bytes:
        """With a number."""
        return encode(Kind.COLLECTIVE, group=self._group, epoch=self._epoch, operation=number)


class Session:
    """The streams of one group in one epoch."""

    def __init__(self, backend: Backend, group: int, vigil: Vigil, pool: Pool) -> None:
        self._backend = backend
        self._group = group
        self._vigil = vigil
        self._pool = pool
        self._poller: Poller = backend.make_poller()
        self._watch = Watch(self._poller, Spin(), vigil)
        self._channels: dict[int, Channel] = {}
        self._number = 0
        self._head = _Head(group, vigil.epoch)
        self._confirmation = confirmation(backend.rank, backend.world_size)
        self._confirming_peers = {*self._confirmation.incoming, *self._confirmation.outgoing}
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
        confirms = _needs_confirming(call.task)
        peers = self._confirming_peers.union(compiled.peers) if confirms else compiled.peers
        with self._operation(compiled.fingerprint, peers, deadline) as channels:
            self._pool.fit(compiled.slot)
            memory = Memory(compiled.units, call, self._pool)
            if compiled.sent <= SHORT:
                messenger = Messenger(channels, self._watch)
                run_straight(compiled.units, memory, self._pool, messenger)
            else:
                Pump(compiled.units, memory, self._pool, channels, self._watch).run()
            if confirms:
                self._confirm(channels)

    def survey(self, fingerprint: Fingerprint, deadline: float | None) -> Array:
        """Measure the links before an operation; what this rank sees."""
        backend = self._backend
        others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        fingerprint = fingerprint._replace(purpose=SURVEY)
        with self._operation(fingerprint, others, deadline) as channels:
            messenger = Messenger(channels, self._watch)
            seen = measure(messenger, backend.rank, backend.world_size)
            messenger.finish()
        return seen

    @contextlib.contextmanager
    def _operation(
        self, fingerprint: Fingerprint, peers: Iterable[int], deadline: float | None
    ) -> Iterator[dict[int, Channel]]:
        """The streams of one more operation; what goes wrong with them is put into words."""
        self._number += 1
        self._vigil.begin(self._number, fingerprint, deadline)
        opening = self._head.pack(self._number) + fingerprint.pack()
        channels = {peer: self._channel(peer, deadline) for peer in sorted(peers)}
        for channel in channels.values():
            channel.begin(opening)
        try:
            with quiet():
                yield channels
        except Disagreement as found:
            raise self._vigil.disagree(found) from None
        except Broken as found:
            raise self._vigil.explain(found.peer, found.reason) from None

    def _confirm(self, channels: dict[int, Channel]) -> None:
        """Make sure that all ranks were in the same operation."""
        memory = Memory(self._confirmation, self._token, self._pool)
        messenger = Messenger(channels, self._watch)
        run_straight(self._confirmation, memory, self._pool, messenger)

    def _channel(self, peer: int, deadline: float | None) -> Channel:
        channel = self._channels.get(peer)
        if channel is None:
            purpose = f"collectives/{self._vigil.epoch}"
            end = time.monotonic() + FOREVER if deadline is None else deadline
            opened = self._backend.open_stream(
                peer, purpose, end, lambda: self._vigil.look((peer,))
            )
            channel = self._channels[peer] = _make_channel(peer, opened)
            self._watch.add(channel)
        return channel

    def close(self) -> None:
        """Close every stream."""
        for channel in self._channels.values():
            self._poller.unregister(channel.stream)
            with contextlib.suppress(OSError):
                channel.stream.close()
        self._poller.close()


def _needs_confirming(task: Task) -> bool:
    """Whether an operation may end on one rank while another has not begun."""
    return task.world_size > 1 and (task.collective not in _SYNCHRONISING or not all(task.counts))


def _make_channel(peer: int, opened: PeerStream) -> Channel:
    if opened.seal is None:
        return PlainChannel(peer, opened.stream, opened.first)
    return SealedChannel(peer, opened.stream, opened.seal, opened.first)
