"""The executor of a group: does one call after the other, by plans, over a session's streams.

One thread at a time uses it, except for :meth:`Executor.abort`.
"""

from __future__ import annotations

import contextlib
import struct
import time
from collections import deque
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from potluck._types import LinkMatrix, sharing_air
from potluck.backend.lanes import COLLECTIVES
from potluck.collective.call import Call, Purpose
from potluck.collective.channel import (
    Channel,
    ChannelBroken,
    Disagreement,
    EncryptedChannel,
    PlainChannel,
    SharedChannel,
)
from potluck.collective.failure import FailureMonitor
from potluck.collective.program import (
    CallMemory,
    CodedMemory,
    PlanCache,
    SlotPool,
    confirmation,
)
from potluck.collective.pump import (
    SHORT,
    PipelinedExecutor,
    SequentialExecutor,
    StreamPoller,
)
from potluck.errors import Aborted, NoConnection
from potluck.net.addresses import attachment
from potluck.net.frames import NUMBERS, NUMBERS_AT, FrameType, encode
from potluck.net.transport import Spin
from potluck.schedule.reduce import ReduceOp, Reducer, quiet
from potluck.schedule.task import Collective, Strategy, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from potluck.backend.base import Backend, PeerStream
    from potluck.collective.call import Routine, Turn
    from potluck.collective.fingerprint import Fingerprint
    from potluck.collective.program import CompiledCall
    from potluck.errors import DistributedError
    from potluck.net.transport import Poller
    from potluck.schedule.planner import CollectiveConfig
    from potluck.schedule.reduce import Array


# --------------------------------------------------------------------------------------------------
# The survey: how fast the links of a group are, measured by the ranks and agreed among them.
#
# Before the first large operation the ranks tell each other whether they know their links already,
# and which radio they are on.  Unless all know, each rank sends something to each other rank, in
# rounds in which everybody sends to one and receives from one; what arrives is timed where it
# arrives.  Those on a radio are measured one after the other, since they share it.  Between two
# of one machine there is no link, and how busy its processors are just now says nothing about one,
# so nothing is timed.  Then all ranks exchange what they saw, so all make the same plans.  From
# time to time they compare how long operations take with how long they took at first, and survey
# again when that has changed.

BLOCK = 1 << 17
"""Bytes that are sent at a time."""

TRIES = (2, 8, 24)
"""Blocks that are sent over a link, try by try, until one takes long enough.

The first may be carried by buffers on the way that let a burst pass; its rate is not believed if
there is another.
"""

PATIENCE = 0.025
"""Seconds; a link on which a try takes longer has been measured well enough."""

PINGS = 3
"""Short messages sent there and back; the quickest counts."""

QUICKEST = 1_000_000_000
"""Bytes per second that every link counts for which is not the limit."""

ALIKE = 60
"""Per cent of the best rate from which a link counts as equally fast: closer is chance."""

FAST = 250_000_000
"""Bytes per second from which not the link is taken to be the limit but the machines."""

EVERY = 50
"""Large operations between two comparisons."""

SEEN = 3
"""Numbers that a rank sees of each other one."""

IN_MEMORY = 2
"""The third of them, if they share memory."""

CHANGED = 150
"""Per cent of their first duration from which operations count as having become slower."""

NANOSECONDS = 1_000_000_000

UNMEASURED = -1
"""In place of the rate of a link that is not measured."""


def _air_of_this_machine() -> tuple[int, int]:
    try:
        found = attachment()
    except Exception:  # noqa: BLE001 - what asks the system about its network fails in many ways
        return 0, 0
    return (0, 0) if found is None else found.air


@dataclass(frozen=True, slots=True)
class LinkMemory:
    """What a rank knows of its links before a survey, and whom it tells what the survey found.

    This one knows nothing but the machine, and tells no one; members of a cluster have a map.
    """

    air: Callable[[], tuple[int, int]] = _air_of_this_machine
    """The cell and the network of the radio by which this rank is reached; zeros without."""
    known: Callable[[], Array | None] = lambda: None
    """What :func:`measure` would find; None unless all of it was measured not long ago."""
    measured: Callable[[Array], None] = lambda _: None
    """Told when this rank has measured its links."""
    agreed: Callable[[LinkMatrix], None] = lambda _: None
    """Told when all ranks have told each other what they know."""


def measure(messenger: SequentialExecutor, rank: int, size: int, air: Sequence[int] = ()) -> Array:
    """What this rank sees of each other: its rate towards us, the time to reach it, is it here.

    The third number is 1 within one machine, and 2 in shared memory; there the rate is not measured
    but 0.  A rate is negative where it is left out: of a rank on a radio only the link to one other
    rank is measured, while no other rank uses that radio.
    """
    seen = np.zeros((SEEN, size), np.int64)
    block = memoryview(bytearray(BLOCK))
    on_air = air or (0,) * size
    for distance in range(1, size):
        right, left = (rank + distance) % size, (rank - distance) % size
        seen[1, right] = min(_ping(messenger, right, left) for _ in range(PINGS))
        receives, sends = not (on_air[rank] or on_air[left]), not (on_air[rank] or on_air[right])
        rate = _time_blocks(messenger, right if sends else None, left if receives else None, block)
        seen[2, left] = messenger.is_local(left) + messenger.shares_memory(left)
        seen[0, left] = rate if receives or seen[2, left] else UNMEASURED
    for mobile, partner in radio_turns(on_air):
        for source, target in ((partner, mobile), (mobile, partner)):
            if rank == target:
                messenger.receive(source, block[:1])  # it has come to this turn: start the clock
                seen[0, source] = _time_blocks(messenger, None, source, block)
            elif rank == source:
                messenger.send(target, block[:1])
                _time_blocks(messenger, target, None, block)
    return seen


def radio_turns(air: Sequence[int]) -> list[tuple[int, int]]:
    """In which order ranks on radios are measured, and with whom: best with one on a cable.

    >>> radio_turns([0, 1, 1]), radio_turns([1, 1, 1])
    ([(1, 0), (2, 0)], [(1, 0), (2, 0)])
    """
    partner = next((rank for rank, number in enumerate(air) if not number), 0)
    return [(rank, partner) for rank, number in enumerate(air) if number and rank != partner]


def _ping(messenger: SequentialExecutor, right: int, left: int) -> int:
    """Nanoseconds to the right neighbour, while the left one finds out the same about us."""
    word = memoryview(bytearray(1))
    start = time.perf_counter_ns()
    messenger.send(right, word)
    messenger.receive(left, word)
    messenger.send(left, word)
    messenger.receive(right, word)
    return max(1, (time.perf_counter_ns() - start) // 2)


def _time_blocks(
    messenger: SequentialExecutor, right: int | None, left: int | None, block: memoryview
) -> int:
    """Bytes per second that come from the left, while the right neighbour finds out the same.

    Who receives gives the word, and its clock starts before: a late reader, who would find
    everything in its buffer, cannot take that for a fast link.  So no rate is too high, and the
    highest of several is the best known.  Who receives also says that there is nothing to measure:
    behind a translated address only one end may see that both are on one machine.
    """
    word = memoryview(bytearray(1))
    wanted = [] if left is None else list(TRIES)
    asked = [] if right is None else list(TRIES)
    if left is not None and messenger.is_local(left):
        messenger.send(left, memoryview(bytes([False])))
        wanted.clear()
    rate = took = 0
    while wanted or asked:
        start = time.perf_counter_ns()
        if wanted:
            assert left is not None
            if took >= PATIENCE * NANOSECONDS:
                wanted.clear()
            messenger.send(left, memoryview(bytes([bool(wanted)])))
        if asked:
            assert right is not None
            messenger.receive(right, word)
            if not word[0]:
                asked.clear()
            for _ in range(asked.pop(0) if asked else 0):
                messenger.send(right, block)
        if wanted:
            assert left is not None
            count = wanted.pop(0)
            for _ in range(count):
                messenger.receive(left, block)
            took = max(1, time.perf_counter_ns() - start)
            found = count * BLOCK * NANOSECONDS // took
            rate = max(rate, found) if count > TRIES[1] else found
    return rate


def agree(rows: Array, air: Sequence[int] = ()) -> LinkMatrix:
    """The links, from what all ranks saw; the same on all of them.

    What passes between two on one radio crosses it twice: it could carry twice as much.
    """
    rates, times, machines = rows[:, 0, :].clip(min=0), rows[:, 1, :], sharing(rows)
    if air:
        shared = np.equal.outer(air, air) & (np.array(air) > 0)
        rates = np.where(shared, 2 * rates, rates)
    up, down = rates.max(axis=0), rates.max(axis=1)
    for machine in set(machines):  # its ranks share a cable, which carries what it did for any
        ranks = np.equal(machines, machine)
        up[ranks], down[ranks] = up[ranks].max(), down[ranks].max()
    return LinkMatrix(
        _alike([int(rate) or QUICKEST for rate in up]),
        _alike([int(rate) or QUICKEST for rate in down]),
        tuple(tuple(min(int(time), (1 << 32) - 1) for time in row) for row in times.clip(min=0)),
        machines,
        tuple(air),
        in_memory=bool((rows[:, 2, :] + 2 * np.eye(len(rows), dtype=np.int64) >= IN_MEMORY).all()),
    )


def sharing(rows: Array) -> tuple[int, ...]:
    """For each rank the lowest rank of its machine: those are together that both say so."""
    together = (rows[:, 2, :] * rows[:, 2, :].T).astype(bool)
    machines = list(range(len(rows)))
    for rank in range(len(rows)):
        if machines[rank] == rank:  # not yet on the machine of a lower one
            for other in np.flatnonzero(together[rank, rank + 1 :]) + rank + 1:
                machines[int(other)] = min(machines[int(other)], rank)
    return tuple(machines)


def _alike(rates: Sequence[int]) -> tuple[int, ...]:
    """The same rates, without the differences that are chance."""
    best = max(rates)
    if best >= FAST:
        return tuple(QUICKEST if rate >= FAST else rate for rate in rates)
    return tuple(best if rate * 100 >= best * ALIKE else rate for rate in rates)


def have_changed(changes: Array) -> bool:
    """Whether operations have become so much slower, or faster, that it is worth another look."""
    return bool(changes.max() >= CHANGED or changes.min() <= 100 * 100 // CHANGED)


class OperationTimes:
    """How long large operations took, since the last survey."""

    def __init__(self) -> None:
        self.operations = 0
        self._durations: dict[Task, tuple[list[float], deque[float]]] = {}

    def note(self, task: Task, seconds: float) -> None:
        """One more."""
        self.operations += 1
        first, last = self._durations.setdefault(task, ([], deque(maxlen=10)))
        if len(first) < 10:  # noqa: PLR2004 - enough for a median
            first.append(seconds)
        last.append(seconds)

    @property
    def is_due(self) -> bool:
        """Whether it is time to compare."""
        return self.operations > 0 and self.operations % EVERY == 0

    def change(self, task: Task) -> int:
        """Per cent of their first duration that operations take now."""
        first, last = self._durations.get(task, ([], deque()))
        return round(100 * median(last) / median(first)) if first else 100


# --------------------------------------------------------------------------------------------------
# A session: the streams of a group in one epoch, and the operations that run over them.
#
# Streams are opened when a program first needs them.  Whatever goes wrong ends the session: all its
# streams are closed, so that nothing half-sent can be taken for something else, and the group goes
# on with the next epoch and fresh streams.

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


class EpochStreams:
    """The streams of one group in one epoch."""

    def __init__(self, backend: Backend, vigil: FailureMonitor, pool: SlotPool) -> None:
        self._backend = backend
        self._vigil = vigil
        self._pool = pool
        self._poller: Poller = backend.make_poller()
        self._watch = StreamPoller(self._poller, Spin(), vigil)
        self._channels: dict[int, Channel] = {}
        self._lines: dict[tuple[int, ...], dict[int, Channel]] = {}
        self._number = 0
        self._pace = 0
        self._ended = 0.0
        self._head = encode(FrameType.COLLECTIVE, epoch=vigil.epoch & EPOCHS)[:OPERATION_AT]
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

    def run(self, call: Call, compiled: CompiledCall, deadline: float | None) -> None:
        """Do a call."""
        confirms = compiled.needs_confirming
        peers = compiled.peers + self._confirming if confirms else compiled.peers
        channels = self._begin(compiled.fingerprint, compiled.packed, peers, deadline)
        units, codec, pool = compiled.units, compiled.codec, self._pool
        pool.fit(compiled.slot)
        if codec is None:
            memory = CallMemory(units, call, pool)
        else:
            memory = CodedMemory(units, call, pool, codec)
        try:
            with quiet():
                if compiled.sent <= SHORT:
                    SequentialExecutor(channels, self._watch).run(units, memory, pool)
                else:
                    PipelinedExecutor(units, memory, pool, channels, self._watch).run()
                if confirms:
                    self._confirm(channels)
        except (Disagreement, ChannelBroken) as error:
            raise self._explained(error) from None
        self._ended = time.monotonic()

    def _explained(self, error: Disagreement | ChannelBroken) -> DistributedError:
        """What goes wrong with a stream, as the error of the operation."""
        if isinstance(error, Disagreement):
            return self._vigil.disagree(error)
        return self._vigil.explain(error.peer, error.reason)

    def pace(self, rate: int) -> None:
        """Send no faster than this on each stream, those included that are yet to be opened."""
        self._pace = rate
        for channel in self._channels.values():
            channel.stream.pace(rate)

    def survey(
        self, fingerprint: Fingerprint, deadline: float | None, air: Sequence[int] = ()
    ) -> Array:
        """Measure the links before an operation; what this rank sees."""
        backend = self._backend
        others = tuple(rank for rank in range(backend.world_size) if rank != backend.rank)
        fingerprint = fingerprint._replace(purpose=Purpose.MEASURE_LINKS)
        channels = self._begin(fingerprint, fingerprint.pack(), others, deadline)
        messenger = SequentialExecutor(channels, self._watch)
        try:
            seen = measure(messenger, backend.rank, backend.world_size, air)
            messenger.finish()
        except (Disagreement, ChannelBroken) as error:
            raise self._explained(error) from None
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
        memory = CallMemory(self._confirmation, self._token, self._pool)
        SequentialExecutor(channels, self._watch).run(self._confirmation, memory, self._pool)

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


def _purpose(vigil: FailureMonitor) -> str:
    """What the streams of a group are for; the number of the epoch follows."""
    return f"{COLLECTIVES}.{vigil.instance}/" if vigil.instance else f"{COLLECTIVES}/"


def abandon_streams(backend: Backend, vigil: FailureMonitor) -> None:
    """Close what others have opened for epochs before this one, and we never asked for."""
    mine = _purpose(vigil)

    def is_over(purpose: str) -> bool:
        number = purpose.removeprefix(mine)
        return number != purpose and number.isdecimal() and int(number) < vigil.epoch

    backend.abandon_streams(is_over)


def _make_channel(peer: int, opened: PeerStream) -> Channel:
    if opened.seal is None:
        shared = opened.stream.shared
        if shared is not None:
            return SharedChannel(peer, opened.stream, shared, opened.first)
        return PlainChannel(peer, opened.stream, opened.first)
    return EncryptedChannel(peer, opened.stream, opened.seal, opened.first)


# --------------------------------------------------------------------------------------------------
# The surveyor: runs large operations, and sees to it that the plans fit the links.

PACE = 2
"""How many times its link's rate a stream may send: a short queue, and room for a wrong figure."""

LARGE = 1 << 15
"""Bytes from which an operation is worth a survey."""


class ReplanPolicy:
    """Of one group, in one epoch.

    All it does follows from what the ranks have in common: calls, and what they told each other.
    """

    def __init__(self, plans: PlanCache, rank: int, world_size: int, memory: LinkMemory) -> None:
        self._plans = plans
        self._rank = rank
        self._world_size = world_size
        self._memory = memory
        self.times = OperationTimes()

    def prepare(self, call: Call, session: EpochStreams, deadline: float | None) -> CompiledCall:
        """How to do a large call; before the first, and when things have changed, survey."""
        if self._is_worthwhile(call, session, deadline):
            self._survey(call, session, deadline)
        return self._plans.compiled(call)

    def _is_worthwhile(self, call: Call, session: EpochStreams, deadline: float | None) -> bool:
        if not self._plans.measures_links:
            return False
        if not self._plans.is_surveyed:
            return True
        if not self.times.is_due:
            return False
        change = np.array([self.times.change(call.task)])
        return have_changed(self._gather(change, call, session, deadline))

    def _survey(self, call: Call, session: EpochStreams, deadline: float | None) -> None:
        size, memory = self._world_size, self._memory
        is_first = not self._plans.is_surveyed
        seen = memory.known() if is_first else None  # later, what was known has changed
        mine = np.array([seen is not None, *memory.air()], np.int64)
        told = self._gather(mine, call, session, deadline).reshape(size, 3)
        air = sharing_air([(int(cell), int(network)) for _, cell, network in told])
        if seen is None or not told[:, 0].all():
            seen = session.survey(self._plans.compiled(call).fingerprint, deadline, air)
            memory.measured(seen)
        rows = self._gather(seen.reshape(-1), call, session, deadline).reshape(size, SEEN, size)
        links = agree(rows, air)
        memory.agreed(links)
        self._plans.learn(links, call, self.times.operations)
        up = links.up[self._rank]
        if up < FAST:
            # One rank of a machine may have all of its cable, of which each has seen a part.
            session.pace(PACE * up * links.machines.count(links.machines[self._rank]))
        self.times = OperationTimes()

    def _gather(
        self, mine: Array, before: Call, session: EpochStreams, deadline: float | None
    ) -> Array:
        """What all ranks have to say before a call, in their order."""
        size = self._world_size
        target = np.zeros(size * mine.size, np.int64)
        task = Task.blocks(Collective.ALL_GATHER, (mine.size,) * size)
        call = Call(
            task, mine, target, strategy=Strategy("doubling"), purpose=Purpose.AGREE_ON_LINKS
        )
        # Under the name of the call: whoever is in another one is told of what the user wrote.
        about = self._plans.compiled(before).fingerprint._replace(purpose=Purpose.AGREE_ON_LINKS)
        compiled = replace(self._plans.compiled(call), fingerprint=about, packed=about.pack())
        session.run(call, compiled, deadline)
        return target


# --------------------------------------------------------------------------------------------------
# Collectives that an engine below does itself, where a backend stands on one.


def done_by_engine(backend: Backend, call: Call, deadline: float | None) -> bool:
    """Let the engine do a call; False if it cannot, or if the caller wants it done in our way.

    The answer is the same on all ranks, since it follows from what they agree on.
    """
    if call.strategy is not None or call.codec is not None:
        return False
    timeout = None if deadline is None else max(0.0, deadline - time.monotonic())
    match call.task.collective:
        case Collective.ALL_REDUCE:
            assert call.reducer is not None
            if call.target is not call.source:
                np.copyto(call.target, call.source)
            return backend.all_reduce_by_engine(call.target, call.reducer.op.value, timeout)
        case Collective.BROADCAST:
            root = call.task.root
            if call.target is not call.source and backend.rank == root:
                np.copyto(call.target, call.source)
            return backend.broadcast_by_engine(call.target, root, timeout)
        case _:
            return False


# --------------------------------------------------------------------------------------------------


class Executor:
    """Of one rank in one group."""

    def __init__(self, backend: Backend, config: CollectiveConfig | None) -> None:
        self.plans = PlanCache(backend.rank, backend.world_size, config)
        self.rank = backend.rank
        self._is_alone = backend.world_size == 1
        self._backend = backend
        self.vigil = FailureMonitor(backend)
        self._pool = SlotPool()
        self._session: EpochStreams | None = None
        self._memory = backend.services.of(LinkMemory, LinkMemory)
        self._surveyor = self._make_surveyor()

    def _make_surveyor(self) -> ReplanPolicy:
        backend = self._backend
        return ReplanPolicy(self.plans, backend.rank, backend.world_size, self._memory)

    def execute(self, call: Call, turn: Turn) -> None:
        """Do a call whose turn it is."""
        if call.routine is not None:
            self._follow(call.routine, turn)
            return
        number, asked, deadline = turn
        compiled = self.plans.compiled(call)  # what cannot be done is refused before it begins
        self.vigil.admit(number, asked)
        try:
            if self._backend.has_engine and done_by_engine(self._backend, call, deadline):
                return
            if self._session is None:
                self._session = EpochStreams(self._backend, self.vigil, self._pool)
            session = self._session
            if compiled.nbytes < LARGE or self._is_alone:
                session.run(call, compiled, deadline)
            else:
                compiled = self._surveyor.prepare(call, session, deadline)
                start = time.monotonic()
                session.run(call, compiled, deadline)
                self._surveyor.times.note(call.task, time.monotonic() - start)
        except BaseException as error:
            self._fail(error, number)
            raise

    def _follow(self, routine: Routine, turn: Turn) -> None:
        """Do several calls in one turn; what goes wrong between them ends it on all ranks."""
        number, asked, _ = turn
        self.vigil.admit(number, asked)
        try:
            routine(lambda call: self.execute(call, turn))
        except BaseException as error:
            if self.vigil.epoch < number:  # the others do not know it yet
                self._fail(error, number)
            raise

    def give_up(self, number: int, error: BaseException) -> None:
        """End a call whose caller stopped waiting before its turn."""
        self.vigil.admit(number, 0.0)
        self._fail(error, number)
        raise error

    def _fail(self, error: BaseException, number: int) -> None:
        """Tell the others, close all streams, and continue with the next epoch."""
        session, self._session = self._session, None
        try:
            self.vigil.conclude(error, number)
        finally:  # also after Ctrl-C: nothing may go on over streams that hold half an operation
            if session is not None:
                session.close()
            self._begin_epoch()
        self.vigil.ask_around(error)

    def _begin_epoch(self) -> None:
        abandon_streams(self._backend, self.vigil)
        self.plans.forget()
        self._surveyor = self._make_surveyor()

    def abort(self, error: DistributedError, last_call: int) -> None:
        """End calls up to a number, from any thread; a thread that runs one wakes up and checks."""
        self.vigil.abort(error, last_call)
        session = self._session
        if session is not None:
            session.wake()

    def leave(self, last_call: int) -> None:
        """End calls between two operations; ranks still in the last one are not interrupted."""
        session, self._session = self._session, None
        try:
            self.vigil.leave(last_call)
        finally:
            if session is not None:
                session.finish()
            self._begin_epoch()

    def close(self) -> None:
        """Listen to the others no more."""
        self.vigil.close()


def left(rank: int, reason: str) -> Aborted:
    """The error for calls that a rank has ended."""
    return Aborted(f"Rank {rank} ended the operation: {reason}", rank=rank)
