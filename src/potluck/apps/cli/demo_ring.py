"""Adding up an array over all ranks, with nothing but messages between neighbours.

The array is cut into as many parts as there are ranks.  In the first half of the rounds each part
travels once around the ring and collects every rank's share; in the second half the finished sums
travel around.  Each part is added up in one order and then copied, so all ranks end with the same
bits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from potluck import Backend, Operation, Timeout
from potluck.apps.cli.demo_model import Array

__all__ = ["Ring", "Traffic"]

WATCH_TAG = 1
"""Nobody ever sends with this tag: such a receive ends only when its peer does."""

PATIENCE = 20.0
"""Seconds without an answer from a neighbour after which the demo gives up."""


@dataclass
class Traffic:
    """What a process has sent, in all its groups."""

    messages: int = 0
    sent: int = 0
    """Bytes."""

    def add(self, array: Array) -> None:
        """Count one message."""
        self.messages += 1
        self.sent += array.nbytes


class Ring:
    """The ranks of a backend in a circle, and a watch on each of them.

    >>> from potluck import SimulatedBackend
    >>> alone = Ring(SimulatedBackend.create_group(1)[0], Traffic())
    >>> numbers = np.array([1.0, 2.0])
    >>> alone.add_up(numbers); numbers
    array([1., 2.])
    """

    def __init__(self, backend: Backend, traffic: Traffic) -> None:
        self._backend = backend
        self._traffic = traffic
        rank, world = backend.rank, backend.world_size
        self._right, self._left = (rank + 1) % world, (rank - 1) % world
        # A loss must be noticed by all, not only by the neighbours: one receive for each peer waits
        # for nothing but that.
        self._watch = [
            backend.post_recv_into(bytearray(1), peer, tag=WATCH_TAG)
            for peer in range(world)
            if peer != rank
        ]

    def add_up(self, array: Array) -> None:
        """Replace the array by its sum over all ranks; a lost rank raises :class:`PeerLost`."""
        rank, world = self._backend.rank, self._backend.world_size
        parts = np.array_split(array, world)
        inbox = np.empty_like(parts[0])  # the first part is among the longest
        for turn in range(2 * (world - 1)):
            leaving, coming = parts[(rank - turn) % world], parts[(rank - turn - 1) % world]
            summing = turn < world - 1
            target = inbox[: coming.size] if summing else coming
            self._exchange(leaving, target)
            if summing:
                coming += target

    def share(self, array: Array, source: int) -> None:
        """Give everybody the array of one rank."""
        if self._backend.rank == source:
            others = [peer for peer in range(self._backend.world_size) if peer != source]
            self._finish([self._send(array, peer) for peer in others])
        else:
            self._finish([self._backend.post_recv_into(array, source)])

    def _exchange(self, leaving: Array, target: Array) -> None:
        arriving = self._backend.post_recv_into(target, self._left)
        self._finish([arriving, self._send(leaving, self._right)])

    def _send(self, array: Array, peer: int) -> Operation:
        self._traffic.add(array)
        return self._backend.post_send(array, peer)

    def _finish(self, operations: Sequence[Operation]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not all(operation.done for operation in operations):
            self._backend.progress(0.1)
            for operation in self._watch:
                if operation.error is not None:
                    raise operation.error
            if time.monotonic() > deadline:
                raise Timeout(f"The neighbours did nothing for {PATIENCE:g} s", seconds=PATIENCE)
        for operation in operations:
            if operation.error is not None:
                raise operation.error
