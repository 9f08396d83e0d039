"""Short operations: a program worked off from top to bottom.

Where the bytes of an operation fit into the buffers between the ranks there is nothing to gain from
doing several things at once, and every microsecond of book-keeping counts.  What a full buffer
refuses is kept and sent while we wait for something else, so the order is always possible: see
"No deadlock" in ``collective.schedule``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.runtime.units import Kind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from potluck.runtime.channel import Channel
    from potluck.runtime.memory import Memory, Pool, Slot
    from potluck.runtime.units import Unit, Units
    from potluck.runtime.watch import Watch

__all__ = ["SHORT", "Messenger", "run_straight"]

SHORT = 1 << 16
"""Bytes up to which an operation counts as short."""


class Messenger:
    """Sends and receives in a given order, over the streams of one operation."""

    def __init__(self, channels: Mapping[int, Channel], watch: Watch) -> None:
        self._channels = channels
        self._watch = watch

    def is_local(self, peer: int) -> bool:
        """Whether it is known to be on this machine."""
        return self._channels[peer].stream.is_local

    def send(self, peer: int, view: memoryview) -> None:
        """Send; the memory may be changed afterwards."""
        channel = self._channels[peer]
        if not channel.push(view):
            channel.keep()

    def receive(self, peer: int, target: memoryview) -> None:
        """Return when the target is full; what could not be sent yet goes on meanwhile."""
        channel = self._channels[peer]
        if channel.pull(target):
            return
        unsent = self._flush()
        if not unsent and self._watch.spin.until(lambda: channel.pull(target)):
            return
        while not channel.pull(target):
            self._watch.wait_to_read(channel, self._flush())

    def finish(self) -> None:
        """Return when everything is sent."""
        while waiting := self._flush():
            self._watch.wait_to_write(waiting)

    def _flush(self) -> list[Channel]:
        return [
            channel
            for channel in self._channels.values()
            if not channel.is_flushed and not channel.flush()
        ]


def run_straight(units: Units, memory: Memory, pool: Pool, messenger: Messenger) -> None:
    """Do what a program says, one unit after the other."""
    for unit in units.units:
        step, held = unit.step, None
        if unit.kind is Kind.MOVE:
            assert step.into is not None
            target = memory.octets(step.into, unit.start, unit.stop)
            messenger.receive(step.sources[0], target)
        elif unit.kind is Kind.FOLD:
            held = memory.fold(unit, _stage(unit, memory, pool, messenger))
        if step.to:
            view = memory.value(unit, held)
            for peer in step.to:
                messenger.send(peer, view)
            if held is not None:
                pool.give_back(held)
    messenger.finish()


def _stage(unit: Unit, memory: Memory, pool: Pool, messenger: Messenger) -> list[Slot]:
    step, count = unit.step, unit.stop - unit.start
    staged: list[Slot] = []
    for source, form in zip(step.sources, step.takes, strict=True):
        slot = pool.take()
        messenger.receive(source, slot.octets[: memory.size(form, count)])
        staged.append(slot)
    return staged
