"""Long operations: the pump that keeps all streams of a program busy at once.

A unit is received as soon as there is room for it, folded as soon as its operands are there, and
handed on as soon as its value is known: the steps of a ring overlap by themselves.  All
decisions were made when the program was compiled; here events are counted down.
"""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Protocol

from potluck.collective.program import NOBODY, UnitKind

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from potluck.collective.channel import Channel
    from potluck.collective.program import (
        Arrival,
        CallMemory,
        CompiledProgram,
        Slot,
        SlotPool,
    )
    from potluck.net.transport import Event, Poller, Spin, Stream


MOST_EXPECTED = 1 << 17
"""Bytes that may have to arrive before we are woken: less than senders have on the way at once."""

MOST_UNITS = 16
"""Units that are received at once."""

UNITS_PER_TURN = 2
"""Units read from one stream before the others get their turn."""


class _Reader:
    """The receiving end of one stream."""

    __slots__ = ("arrivals", "channel", "count", "place", "slot", "stalled_at", "target")

    def __init__(self, channel: Channel, arrivals: tuple[Arrival, ...]) -> None:
        self.channel = channel
        self.arrivals = arrivals
        self.place = 0
        self.slot: Slot | None = None
        self.target: memoryview | None = None
        self.count = 1
        """Units that the target has room for."""
        self.stalled_at = 0
        """How much had happened when there was no room."""


class _Writer:
    """The sending end of one stream."""

    __slots__ = ("channel", "is_blocked", "is_busy", "place", "units")

    def __init__(self, channel: Channel, units: tuple[int, ...]) -> None:
        self.channel = channel
        self.units = units
        self.place = 0
        self.is_busy = False
        self.is_blocked = False


class PipelinedExecutor:
    """One program under way."""

    def __init__(
        self,
        units: CompiledProgram,
        memory: CallMemory,
        pool: SlotPool,
        channels: Mapping[int, Channel],
        watch: StreamPoller,
    ) -> None:
        self._program = units
        self._units = units.units
        self._memory = memory
        self._pool = pool
        self._watch = watch
        self._waits = list(units.waits)
        self._unsent = [len(unit.step.to) for unit in units.units]
        self._is_known = [False] * len(units.units)
        self._is_done = [False] * len(units.units)
        self._staged: dict[int, list[Slot | None]] = {}
        self._held: dict[int, Slot] = {}
        self._left = len(units.units)
        self._agenda: list[int] = []  # units whose value can be had now
        self._readers = {
            peer: _Reader(channels[peer], arrivals) for peer, arrivals in units.incoming.items()
        }
        self._writers = {
            peer: _Writer(channels[peer], queue) for peer, queue in units.outgoing.items()
        }
        self._stalled: list[_Reader] = []  # no room for what comes next
        self._again: list[_Reader] = []  # had their turn, and more to read
        self._happened = 0  # events so far: values known, units done

    def run(self) -> None:
        """Work until every unit is done."""
        for index, unit in enumerate(self._units):
            if not self._waits[index] and unit.kind is not UnitKind.MOVE:
                self._agenda.append(index)
        self._agenda.reverse()  # the earlier is the more urgent
        self._settle()
        ready = list(self._readers.values())
        while True:
            for reader in ready:
                for _ in range(UNITS_PER_TURN):
                    if not self._read(reader):
                        break
                    self._settle()
                else:
                    if reader.place < len(reader.arrivals):
                        self._again.append(reader)
            if not self._left:
                break
            ready = self._await_readers()
        for reader in self._readers.values():
            reader.channel.stream.expect(1)

    def _await_readers(self) -> list[_Reader]:
        """Sleep until bytes can move; write where there is room, and return who may read."""
        again, self._again = self._again, []
        again += self._take_unstalled()
        awaited = self._awaited()
        events = self._watch.events(awaited, at_once=bool(again))
        if not events and not again:
            return [self._readers[peer] for peer in awaited]  # there may be less than expected
        ready: list[_Reader] = []
        for peer, readable, writable in events:
            if writable and peer in self._writers:
                self._write(self._writers[peer])
                self._settle()
            if readable and peer in self._readers:
                reader = self._readers[peer]
                if reader not in again and reader not in self._stalled:
                    ready.append(reader)
        return ready + again

    def _take_unstalled(self) -> list[_Reader]:
        """Readers for whom there may be room now."""
        if not self._stalled:
            return []
        freed = [reader for reader in self._stalled if reader.stalled_at < self._happened]
        self._stalled = [reader for reader in self._stalled if reader.stalled_at == self._happened]
        return freed

    def _awaited(self) -> list[int]:
        """From whom bytes can come now."""
        return [
            peer
            for peer, reader in self._readers.items()
            if reader.place < len(reader.arrivals) and reader not in self._stalled
        ]

    # -- in ------------------------------------------------------------------------------------

    def _read(self, reader: _Reader) -> bool:
        """Receive what comes next; False if it is not here yet, or there is no room."""
        if reader.target is None and not self._prepare(reader):
            return False
        assert reader.target is not None
        if not reader.channel.pull(reader.target, reader.slot):
            reader.channel.stream.expect(min(reader.channel.missing, MOST_EXPECTED))
            return False
        self._arrive(reader)
        return True

    def _prepare(self, reader: _Reader) -> bool:
        """Find room for what comes next; False if there is nothing to come, or no room yet."""
        if reader.place == len(reader.arrivals):
            return False
        arrival = reader.arrivals[reader.place]
        unit = self._units[arrival.unit]
        if (
            (arrival.after_value != NOBODY and not self._is_known[arrival.after_value])
            or (arrival.after_done != NOBODY and not self._is_done[arrival.after_done])
            or (unit.kind is UnitKind.MOVE and self._waits[arrival.unit])
        ):
            reader.stalled_at = self._happened
            self._stalled.append(reader)
            return False
        step = unit.step
        if unit.kind is UnitKind.MOVE:
            assert step.into is not None
            reader.count = self._count_moving(reader)
            last = reader.arrivals[reader.place + reader.count - 1].unit
            stop = self._units[last].stop
            reader.target = self._memory.raw(step.into, unit.start, stop)
        else:
            reader.slot = self._pool.take()
            size = self._memory.size(step.takes[arrival.operand], unit.stop - unit.start)
            reader.target = reader.slot.raw[:size]
        return True

    def _count_moving(self, reader: _Reader) -> int:
        """How many adjacent units can be received at once: those that wait for nothing else."""
        first = self._units[reader.arrivals[reader.place].unit]
        count, most = 1, reader.channel.joins
        if first.step.to:
            return count
        itemsize = self._memory.dtype.itemsize
        for arrival in reader.arrivals[reader.place + 1 : reader.place + MOST_UNITS]:
            unit = self._units[arrival.unit]
            is_next = unit.step is first.step and not self._waits[arrival.unit]
            if not is_next or (unit.start - first.start) * itemsize >= most:
                break
            count += 1
        return count

    def _arrive(self, reader: _Reader) -> None:
        reader.target = None
        if reader.slot is None:
            for arrival in reader.arrivals[reader.place : reader.place + reader.count]:
                self._agenda.append(arrival.unit)
            reader.place += reader.count
            return
        arrival = reader.arrivals[reader.place]
        index = arrival.unit
        reader.place += 1
        operands = self._staged.get(index)
        if operands is None:
            operands = self._staged[index] = [None] * len(self._units[index].step.sources)
        operands[arrival.operand], reader.slot = reader.slot, None
        self._count_down(index)

    # -- values --------------------------------------------------------------------------------

    def _count_down(self, index: int) -> None:
        self._waits[index] -= 1
        if not self._waits[index] and self._units[index].kind is not UnitKind.MOVE:
            self._agenda.append(index)

    def _settle(self) -> None:
        """Work out every value that can be had, and hand it on."""
        agenda = self._agenda
        while agenda:
            index = agenda.pop()
            unit = self._units[index]
            if unit.kind is UnitKind.FOLD:
                staged: list[Slot] = self._staged.pop(index, [])  # type: ignore[assignment]
                held = self._memory.fold(unit, staged)
                for slot in staged:
                    if slot is not held:
                        self._pool.give_back(slot)
                if held is not None:
                    self._held[index] = held
            self._is_known[index] = True
            self._happened += 1
            for other in self._program.on_value[index]:
                self._count_down(other)
            if not unit.step.to:
                self._finish(index)
            for peer in unit.step.to:
                writer = self._writers[peer]
                if not writer.is_busy:
                    self._write(writer)

    def _finish(self, index: int) -> None:
        self._is_done[index] = True
        self._happened += 1
        self._left -= 1
        for other in self._program.on_done[index]:
            self._count_down(other)
        held = self._held.pop(index, None)
        if held is not None:
            self._pool.give_back(held)

    # -- out -----------------------------------------------------------------------------------

    def _write(self, writer: _Writer) -> None:
        """Hand on what is known, in order, until the stream is full."""
        channel = writer.channel
        while True:
            if writer.is_busy:
                sent = channel.flush()
            elif writer.place < len(writer.units) and self._is_known[writer.units[writer.place]]:
                writer.is_busy = True
                index = writer.units[writer.place]
                sent = channel.push(self._memory.value(self._units[index], self._held.get(index)))
            else:
                break
            if not sent:
                writer.is_blocked = True
                self._watch.want_write(channel, wanted=True)
                return
            writer.is_busy = False
            index = writer.units[writer.place]
            writer.place += 1
            self._unsent[index] -= 1
            if not self._unsent[index]:
                self._finish(index)
        if writer.is_blocked:
            writer.is_blocked = False
            self._watch.want_write(channel, wanted=False)


# --------------------------------------------------------------------------------------------------
# Short operations: a program worked off from top to bottom.
#
# Where the bytes of an operation fit into the buffers between the ranks there is nothing to gain
# from doing several things at once, and every microsecond of book-keeping counts.  What a full
# buffer refuses is kept and sent while we wait for something else, so the order is always possible:
# see "No deadlock" in ``collective.schedule``.

SHORT = 1 << 16
"""Bytes up to which an operation counts as short."""


class SequentialExecutor:
    """Sends and receives in a given order, over the streams of one operation."""

    def __init__(self, channels: Mapping[int, Channel], watch: StreamPoller) -> None:
        self._channels = channels
        self._watch = watch
        self._unsent: list[Channel] = []  # those with something left to send

    def shares_memory(self, peer: int) -> bool:
        """Whether what is large is exchanged with it in memory."""
        return self._channels[peer].stream.shared is not None

    def is_local(self, peer: int) -> bool:
        """Whether it is known to be on this machine."""
        return self._channels[peer].stream.is_local

    def send(self, peer: int, view: memoryview) -> None:
        """Send; the memory may be changed afterwards."""
        channel = self._channels[peer]
        if not channel.push(view):
            channel.keep()
            if channel not in self._unsent:
                self._unsent.append(channel)

    def receive(self, peer: int, target: memoryview) -> None:
        """Return when the target is full; pending data continues to be sent meanwhile."""
        channel = self._channels[peer]
        if channel.pull(target):
            return
        unsent = self._flush()
        if not unsent and self._watch.spin.until(lambda: channel.pull(target)):
            return
        while not channel.pull(target):
            self._watch.wait_to_read(channel, self._flush())

    def run(self, units: CompiledProgram, memory: CallMemory, pool: SlotPool) -> None:
        """Do what a program says, one unit after the other."""
        for unit in units.units:
            step, held = unit.step, None
            staged: list[Slot] = []
            if unit.kind is UnitKind.MOVE:
                assert step.into is not None
                self.receive(step.sources[0], memory.raw(step.into, unit.start, unit.stop))
            elif unit.kind is UnitKind.FOLD:
                for source, form in zip(step.sources, step.takes, strict=True):
                    slot = pool.take()
                    staged.append(slot)
                    self.receive(source, slot.raw[: memory.size(form, unit.stop - unit.start)])
                held = memory.fold(unit, staged)
            if step.to:
                view = memory.value(unit, held)
                for peer in step.to:
                    self.send(peer, view)
            for slot in staged:
                pool.give_back(slot)
            if held is not None and held not in staged:
                pool.give_back(held)
        if self._unsent:
            self.finish()

    def finish(self) -> None:
        """Return when everything is sent."""
        while self._flush():
            self._watch.wait_to_write(self._unsent)

    def _flush(self) -> list[Channel]:
        if self._unsent:
            self._unsent = [channel for channel in self._unsent if not channel.flush()]
        return self._unsent


# --------------------------------------------------------------------------------------------------
# Waiting for the streams of a group: awake for a moment, then asleep, then asking what is wrong.
#
# A stream that has something for a later operation, or something for which there is no room yet, is
# muted: its bytes stay in the socket until they are wanted.

SLICE = 0.02
"""Seconds of one sleep; after a sleep without an event one asks what may be wrong."""


class CancellationCheck(Protocol):
    """Looks whether waiting still makes sense."""

    def look(self, awaited: Sequence[int]) -> None:
        """Raise if an abort, a loss, a disagreement or the deadline ends the operation."""

    def check(self, awaited: Sequence[int]) -> None:
        """Raise if an abort or the deadline does, although bytes move."""


class StreamPoller:
    """Sleeps until a stream of a group can move bytes."""

    def __init__(self, poller: Poller, spin: Spin, patrol: CancellationCheck) -> None:
        self._poller = poller
        self.spin = spin
        self._patrol = patrol
        self._channels: dict[int, Channel] = {}
        self._muted: set[int] = set()
        self._starving: dict[int, Stream] = {}  # the credits of those who have none left
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
        if self._starving:
            found = [event if event[0] >= 0 else (~event[0], False, True) for event in found]
        return [event for event in found if self._is_wanted(event, awaited)]

    def _sleep(self, awaited: Sequence[int]) -> list[Event]:
        """Sleep, and count it for every rank of which something is missing.

        The sleep before this one is counted now: a thread that is about to sleep has time for
        that, and one that wakes up has not.
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
        peer, credits_ = channel.peer, channel.credits if wanted else None
        if credits_ is None and peer in self._starving:
            self._poller.unregister(self._starving.pop(peer))
        elif credits_ is not None and peer not in self._starving:
            self._starving[peer] = credits_
            self._poller.register(credits_, ~peer)
        self._poller.want_write(channel.stream, peer, wanted and credits_ is None)

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
