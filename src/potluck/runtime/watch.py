"""Waiting for the streams of a group: awake for a moment, then asleep, then asking what is wrong.

A stream that has something for a later operation, or something for which there is no room yet, is
muted: its bytes stay in the socket until they are wanted.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.backend.spin import Spin
    from potluck.net.transport import Event, Poller
    from potluck.runtime.channel import Channel

__all__ = ["SLICE", "Patrol", "Watch"]

SLICE = 0.02
"""Seconds of one sleep; after a sleep without an event one asks what may be wrong."""


class Patrol(Protocol):
    """Looks whether waiting still makes sense."""

    def look(self, awaited: Sequence[int]) -> None:
        """Raise if an abort, a loss, a disagreement or the deadline ends the operation."""

    def check(self, awaited: Sequence[int]) -> None:
        """Raise if an abort or the deadline does, although bytes move."""


class Watch:
    """Sleeps until a stream of a group can move bytes."""

    def __init__(self, poller: Poller, spin: Spin, patrol: Patrol) -> None:
        self._poller = poller
        self.spin = spin
        self._patrol = patrol
        self._channels: dict[int, Channel] = {}
        self._muted: set[int] = set()
        self.slept: dict[int, float] | None = None
        """Where to count for whom we sleep, if anywhere."""
        self._last_sleep: tuple[Sequence[int], float] = (), 0.0

    def add(self, channel: Channel) -> None:
        """Watch one more stream."""
        self._channels[channel.peer] = channel
        self._poller.register(channel.stream, channel.peer)

    def events(self, awaited: Sequence[int], *, at_once: bool = False) -> list[Event]:
        """What can move; possibly nothing.  Reading is of interest from ``awaited`` only."""
        if self._muted:
            for peer in self._muted.intersection(awaited):
                self._hear(peer, wanted=True)
        if at_once:
            found = self._poller.wait(0)
            self._patrol.check(awaited)
        else:
            found = self._poller.wait(SLICE) if self.slept is None else self._sleep(awaited)
            if found:
                self._patrol.check(awaited)
            else:
                self._patrol.look(awaited)
        return [event for event in found if self._is_wanted(event, awaited)]

    def _sleep(self, awaited: Sequence[int]) -> list[Event]:
        """Sleep, and count it for everybody of whom something is missing.

        The sleep before this one is counted now: whoever is about to sleep has time for that, and
        whoever wakes up has not.
        """
        slept = self.slept
        assert slept is not None
        others, seconds = self._last_sleep
        for peer in others:
            slept[peer] = slept.get(peer, 0.0) + seconds
        began = perf_counter()
        found = self._poller.wait(SLICE)
        self._last_sleep = awaited, perf_counter() - began
        return found

    def _is_wanted(self, event: Event, awaited: Sequence[int]) -> bool:
        peer, readable, writable = event
        if readable and peer not in awaited:
            self._hear(peer, wanted=False)
            return writable
        return True

    def _hear(self, peer: int, *, wanted: bool) -> None:
        channel = self._channels[peer]
        if not wanted and peer in self._muted:
            # Muted and yet here: it is broken, which whoever reads from it next will find.
            self._poller.unregister(channel.stream)
            return
        (self._muted.discard if wanted else self._muted.add)(peer)
        self._poller.want_read(channel.stream, peer, wanted)

    def want_write(self, channel: Channel, *, wanted: bool) -> None:
        """Also watch for room to write, or stop."""
        self._poller.want_write(channel.stream, channel.peer, wanted)

    def wait_to_read(self, channel: Channel, unsent: Sequence[Channel]) -> None:
        """Return when a stream may have bytes, or one of those with something unsent has room."""
        if unsent:
            self._wait((channel.peer,), unsent)
        else:
            self.events((channel.peer,))

    def wait_to_write(self, unsent: Sequence[Channel]) -> None:
        """Return when one of some streams may have room."""
        self._wait((), unsent)

    def _wait(self, awaited: Sequence[int], unsent: Sequence[Channel]) -> None:
        for channel in unsent:
            self.want_write(channel, wanted=True)
        try:
            self.events(awaited)
        finally:
            for channel in unsent:
                self.want_write(channel, wanted=False)
