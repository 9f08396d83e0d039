"""One link, measured in a moment: latency and both rates, and always out of training's way.

Short words go there and back.  Then one side sends and the other counts, then the other way round.
The receiver acknowledges what came, and no more is on its way than arrived within the last moments:
the queue in front of a slow link stays short, so that the next user of the link does not wait.  The
rate is that of the second half of the time: in the first, connections speed up and shapers let a
burst pass.  Time and bytes are bounded, and either side stops when it has something better to do.
"""

from __future__ import annotations

import os
import struct
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NoReturn

from potluck.errors import DistributedError, MalformedFrame, PeerLost, Timeout
from potluck.logs import get_logger
from potluck.net.records import buffered

if TYPE_CHECKING:
    from potluck._types import ProcessId
    from potluck.backend.base import Backend, PeerStream
    from potluck.cluster.views import ViewConnector, ViewSession
    from potluck.net.transport import Poller


# --------------------------------------------------------------------------------------------------
# How two sides of a bandwidth probe talk: words with a number, and blocks that are only counted.
#
# Each word is one byte and a number of eight; a block is followed by that many bytes, which are
# read and dropped.  On an encrypted stream all of it is encrypted and authenticated, as real
# traffic is.

BLOCK = 1 << 16
"""Bytes of a block."""

_HEAD = struct.Struct("<BQ")
_KEY = 0  # of the only stream in the poller
_READS = 8  # before something else has its turn
_LOOK_EVERY = 0.01  # seconds: how long it takes at most to notice that one is needed elsewhere
_GRAIN = 0.002  # seconds; what comes within is one arrival: packets come in bundles of 64 KiB
_MOST_WAITING = 4096  # words that were not read yet


class ProbeMessage(IntEnum):
    """What can be said."""

    BLOCK = 1
    """This many bytes follow."""
    ARRIVED = 2
    """This many bytes of blocks have come so far."""
    END = 3
    """No more blocks; 0 if it was broken off."""
    RATE = 4
    """Bytes per second at which they came."""
    STOP = 5
    """I am needed elsewhere."""
    PING = 6
    """Answer this at once with the same."""
    LATENCY = 7
    """Nanoseconds that a word takes one way."""


_KNOWN = frozenset(int(word) for word in ProbeMessage)


class ProbeSession:
    """One end of the conversation, on the thread that measures."""

    def __init__(self, opened: PeerStream, poller: Poller, patience: float) -> None:
        self._wire = buffered(opened.stream, opened.seal, opened.first)
        self._stream = opened.stream
        self._poller = poller
        self._patience = patience
        self._deadline = time.monotonic() + patience
        self._buffer = memoryview(bytearray(4 * BLOCK))
        self._head = b""  # the beginning of a word that has not come whole
        self._skip = 0  # bytes of a block that are still to come
        self._words: deque[tuple[ProbeMessage, int]] = deque()
        self._bundle = float("-inf")  # when the first of the last arrival came
        self._ended = False
        self.received = 0
        """Bytes of blocks that have come."""
        self.arrivals: list[tuple[float, int]] = []
        """Moments, and what had been received by then."""
        poller.register(opened.stream, _KEY)

    def end(self) -> None:
        """Leave the stream to its owner, who closes it."""
        self._poller.unregister(self._stream)

    def say(self, word: ProbeMessage, value: int = 0, payload: bytes = b"") -> None:
        """Send a word, after what was sent before."""
        self.finish()
        try:
            self._wire.send([_HEAD.pack(word, value), payload])
        except OSError as error:
            self._lost(error)

    def finish(self) -> None:
        """Return when everything said is on its way."""
        while not self._flush():
            self._poller.want_write(self._stream, _KEY, True)
            self._sleep()
            self._poller.want_write(self._stream, _KEY, False)

    def _flush(self) -> bool:
        try:
            return self._wire.flush()
        except OSError as error:
            self._lost(error)

    def heard(self) -> Iterator[tuple[ProbeMessage, int]]:
        """What was said to us, one after the other; what is not taken stays for the next time."""
        while self._words:
            yield self._words.popleft()

    def wait(self) -> None:
        """Sleep until something comes, but not for long."""
        if not self._words:
            self._sleep()

    def _sleep(self) -> None:
        if self._ended:
            self._lost(None)
        if time.monotonic() >= self._deadline:
            raise Timeout(
                f"{self._stream.peer_name} did not respond to the bandwidth probe "
                f"for {self._patience:g} s",
                seconds=self._patience,
            )
        if not self._wire.has_more:
            self._poller.wait(_LOOK_EVERY)
        self.look()

    def look(self) -> None:
        """Take in what has come."""
        for _ in range(_READS):
            try:
                count = self._wire.recv_into(self._buffer)
            except BlockingIOError:
                return
            except OSError as error:
                self._lost(error)
            if not count:
                self._ended = True  # what was said before is still to be heard
                return
            self._take(self._buffer[:count])

    def _take(self, data: memoryview) -> None:
        while data:
            if self._skip:
                count = min(self._skip, len(data))
                self._skip -= count
                self.received += count
                self._note()
                data = data[count:]
                continue
            missing = _HEAD.size - len(self._head)
            self._head += bytes(data[:missing])
            data = data[missing:]
            if len(self._head) == _HEAD.size:
                self._understand(*_HEAD.unpack(self._head))
                self._head = b""

    def _note(self) -> None:
        now = time.monotonic()
        if len(self.arrivals) > 1 and now - self._bundle < _GRAIN:
            self.arrivals[-1] = (now, self.received)
        else:
            self._bundle = now
            self.arrivals.append((now, self.received))

    def _understand(self, word: int, value: int) -> None:
        if word == ProbeMessage.BLOCK:
            if value > BLOCK:
                self.refuse(f"a block of {value} bytes")
            self._skip = value
        elif word in _KNOWN and value < 1 << 63 and len(self._words) < _MOST_WAITING:
            self._words.append((ProbeMessage(word), value))
        else:
            self.refuse(f"message {word} with {value}")

    def refuse(self, what: str) -> NoReturn:
        """The peer does not keep to the protocol."""
        raise MalformedFrame(
            f"{self._stream.peer_name} broke the protocol of bandwidth probes: {what}",
            hint="Check that both machines run the same version of Potluck.",
        )

    def _lost(self, error: OSError | None) -> NoReturn:
        raise PeerLost(
            f"{self._stream.peer_name} disconnected during the bandwidth probe",
            cause=str(error) if error else "it closed the connection",
        ) from error


# --------------------------------------------------------------------------------------------------

PURPOSE = "bandwidth"
"""Of the connections that are opened for a probe."""

MOMENT = 0.02
"""Seconds; twice what came within the last moment may be on its way."""

LEAST_WINDOW = 2 * BLOCK

PINGS = 9
"""Words there and back; the quickest counts, since any other had to wait for something."""

FASTEST = 1 << 40
"""Bytes per second; a peer that tells more is not believed."""

LONGEST = 10_000_000_000
"""Nanoseconds of a latency that is believed; more than any patience."""

NEVER_MORE = 1 << 28
"""Bytes; a peer that sends more in one direction, whatever its limits, is refused."""


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """What one direction of a probe may take."""

    seconds: float = 0.4
    max_bytes: int = 1 << 25
    """Bytes: 32 MiB, a quarter of a second at 1 Gbit/s."""
    patience: float = 10.0
    """Seconds after which a peer that takes no part is given up."""

    def __post_init__(self) -> None:
        """Refuse what measures nothing or takes long."""
        if not (self.seconds > 0 and 4 * BLOCK <= self.max_bytes <= NEVER_MORE):
            msg = (
                f"A probe needs some time and {4 * BLOCK} to {NEVER_MORE} bytes; "
                f"got seconds={self.seconds}, max_bytes={self.max_bytes}"
            )
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What a probe found, in bytes per second; 0 where it was broken off."""

    up: int
    """From here to the peer."""
    down: int
    """From the peer to here."""
    latency: int = 0
    """Nanoseconds of a short message, one way; 0 if it was not measured."""


def probe_link(
    backend: Backend,
    rank: int,
    *,
    limits: ProbeLimits | None = None,
    is_idle: Callable[[], bool] = lambda: True,
) -> Bandwidth:
    """Measure the link to a rank; both ranks must call this at about the same time."""
    limits = limits or ProbeLimits()
    deadline = time.monotonic() + limits.patience
    opened = backend.open_stream(rank, PURPOSE, deadline, lambda: None)
    try:
        poller = backend.make_poller()
        try:
            return measure_bandwidth(
                opened, poller, first=backend.rank < rank, limits=limits, is_idle=is_idle
            )
        finally:
            poller.close()
    finally:
        opened.stream.finish(deadline)


def probe_links(
    backend: Backend,
    *,
    limits: ProbeLimits | None = None,
    is_idle: Callable[[], bool] = lambda: True,
) -> dict[int, Bandwidth]:
    """Measure the links to all ranks, one after the other; all ranks must call this together.

    In each round every rank has one partner, so that no probe shares a machine's link with another.
    """
    found = {}
    for partner in pairings(backend.rank, backend.world_size):
        if partner is not None:
            found[partner] = probe_link(backend, partner, limits=limits, is_idle=is_idle)
    return found


def pairings(rank: int, size: int) -> list[int | None]:
    """With whom a rank is paired in each round of a tournament in which all meet once.

    >>> pairings(0, 4), pairings(2, 3)
    ([3, 1, 2], [1, None, 0])
    """
    return [_partner(rank, size, turn) for turn in range(size - 1 + size % 2)]


def _partner(rank: int, size: int, turn: int) -> int | None:
    """Who it is in a turn of a tournament in which all meet once; None is a pause.

    >>> [[_partner(rank, 4, turn) for rank in range(4)] for turn in range(3)]
    [[3, 2, 1, 0], [1, 0, 3, 2], [2, 3, 0, 1]]
    """
    ring = size - 1 + size % 2  # an even number of ranks: the last one stays aside
    if rank == ring:
        return next(one for one in range(ring) if (turn - one) % ring == one)
    partner = (turn - rank) % ring
    if partner != rank:
        return partner
    return None if size % 2 else ring


def measure_bandwidth(
    opened: PeerStream,
    poller: Poller,
    *,
    first: bool,
    limits: ProbeLimits | None = None,
    is_idle: Callable[[], bool] = lambda: True,
) -> Bandwidth:
    """Measure over an open stream; exactly one side is ``first``.

    As soon as ``is_idle`` says no the probe is broken off, and the other side learns it.
    """
    limits = limits or ProbeLimits()
    talk = ProbeSession(opened, poller, limits.patience)
    try:
        latency = _ping(talk) if first else _answer_pings(talk)
        up = _send(talk, limits, is_idle) if first else None
        down = _receive(talk, is_idle)
        return Bandwidth(_send(talk, limits, is_idle) if up is None else up, down, latency)
    finally:
        talk.end()


def _ping(talk: ProbeSession) -> int:
    """Nanoseconds of a word, one way, which the peer is told as well."""
    trips = []
    for number in range(PINGS):
        began = time.perf_counter_ns()
        talk.say(ProbeMessage.PING, number)
        talk.finish()
        _next_word(talk, ProbeMessage.PING)
        trips.append(time.perf_counter_ns() - began)
    latency = max(1, min(trips) // 2)
    talk.say(ProbeMessage.LATENCY, latency)
    talk.finish()
    return latency


def _answer_pings(talk: ProbeSession) -> int:
    """Send back what comes until the peer has seen enough; what it found."""
    for _ in range(PINGS):
        talk.say(ProbeMessage.PING, _next_word(talk, ProbeMessage.PING))
        talk.finish()
    return min(_next_word(talk, ProbeMessage.LATENCY), LONGEST)


def _next_word(talk: ProbeSession, expected: ProbeMessage) -> int:
    """The number of the next word, which must be this one."""
    while True:
        for word, value in talk.heard():
            if word is not expected:
                talk.refuse(f"{word.name} before the link was timed")
            return value
        if talk.received:
            talk.refuse("a block before the link was timed")
        talk.wait()


class _Window:
    """How much may be on its way: twice what came within the last moment."""

    def __init__(self, begin: float) -> None:
        self._begin = begin
        self._moment = 0.0  # until the first answer has shown how long one takes
        self._answers: deque[tuple[float, int]] = deque([(begin, 0)])
        self.arrived = 0
        self.size = LEAST_WINDOW

    def answer(self, now: float, arrived: int) -> None:
        self._moment = self._moment or max(MOMENT, 2 * (now - self._begin))
        self.arrived = max(self.arrived, arrived)
        self._answers.append((now, self.arrived))
        while len(self._answers) > 1 and self._answers[1][0] <= now - self._moment:
            self._answers.popleft()
        self.size = max(LEAST_WINDOW, 2 * (self.arrived - self._answers[0][1]))


def _send(talk: ProbeSession, limits: ProbeLimits, is_idle: Callable[[], bool]) -> int:
    """Send for a while; the rate at which it arrived, as the peer tells."""
    block = os.urandom(BLOCK)  # nothing on the way can make it shorter
    begin = time.monotonic()
    window, sent, calm = _Window(begin), 0, True
    while calm and sent < limits.max_bytes and time.monotonic() < begin + limits.seconds:
        if sent - window.arrived < window.size:
            talk.say(ProbeMessage.BLOCK, len(block), block)
            sent += len(block)
            talk.look()
        else:
            talk.wait()
        for word, value in talk.heard():
            if word is ProbeMessage.ARRIVED:
                window.answer(time.monotonic(), value)
            calm = calm and word is not ProbeMessage.STOP
        calm = calm and is_idle()
    talk.say(ProbeMessage.END, int(calm))
    while True:
        for word, value in talk.heard():
            if word is ProbeMessage.RATE:
                return min(value, FASTEST)
        talk.wait()


def _receive(talk: ProbeSession, is_idle: Callable[[], bool]) -> int:
    """Count what arrives until the peer ends; the rate, which the peer is told as well."""
    told, calm = 0, True
    while True:
        for word, value in talk.heard():
            if word is ProbeMessage.END:
                rate = steady_rate(talk.arrivals) if value and calm else 0
                talk.say(ProbeMessage.RATE, rate)
                talk.finish()
                return rate
        if talk.received > NEVER_MORE:
            talk.refuse(f"more than {NEVER_MORE} bytes in one probe")
        if talk.received > told:
            told = talk.received
            talk.say(ProbeMessage.ARRIVED, told)
        if calm and not is_idle():
            calm = False
            talk.say(ProbeMessage.STOP)
        talk.wait()


def steady_rate(arrivals: Sequence[tuple[float, int]]) -> int:
    """Bytes per second in the second half of the time; from moments and what had come by then.

    >>> steady_rate([(0.0, 0), (0.1, 500), (1.0, 600), (1.5, 650), (2.0, 700)])
    100
    """
    if not arrivals:
        return 0
    (begin, _), (end, last) = arrivals[0], arrivals[-1]
    middle = next(arrival for arrival in arrivals if arrival[0] >= (begin + end) / 2)
    for moment, count in (middle, arrivals[0]):  # all of it where that is too short to be halved
        if end > moment:
            return int((last - count) / (end - moment))
    return 0


# --------------------------------------------------------------------------------------------------
# Links that are measured without being asked, in quiet moments: what has not been for ten minutes.
#
# Quiet is a view in which no call has run here for a while.  Of two members the one of the higher
# rank begins; the other takes part as soon as it is quiet there too.  A probe takes some tenths of
# a second and a few megabytes, and is broken off within 10 ms when a call begins.  Collectives
# measure what they need by themselves, and take over what is known already.

logger = get_logger(__name__)

UNASKED_PURPOSE = "bandwidth unasked"
"""Of the connections: others than for measurements that a program asks for."""

LIMITS = ProbeLimits(seconds=0.15, max_bytes=1 << 23, patience=3.0)

QUIET = 1.0
"""Seconds without a call that make a moment quiet."""

LOOK_EVERY = 0.5
"""Seconds between two looks."""

AGAIN = 5.0
"""Seconds after which a probe that failed is tried again; twice as long after each failure."""

SHARE = 0.01
"""Of its time a process probes at most: after a probe of a second it rests for 99."""


class ProbeBudget:
    """Keeps a process from probing for more than its share of the time; its views have one in all.

    >>> budget = ProbeBudget()
    >>> budget.spend(0.3, now=100.0)
    >>> budget.allows(129.0), budget.allows(130.0)
    (False, True)
    """

    def __init__(self) -> None:
        self._free_at = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether a probe may begin."""
        return now >= self._free_at

    def spend(self, seconds: float, now: float) -> None:
        """A probe has ended that took this long."""
        self._free_at = now + seconds * (1 / SHARE - 1)


class Probes:
    """Has the links of every view measured, on a thread of its own."""

    def __init__(
        self,
        connector: ViewConnector,
        is_rated: Callable[[ProcessId], bool],
        rate: Callable[[ProcessId, Bandwidth], None],
    ) -> None:
        self._connector = connector
        self._is_rated = is_rated
        self._rate = rate
        self._budget = ProbeBudget()

    def begin(self, session: ViewSession) -> None:
        """A view is connected."""
        if session.world_size > 1:
            prober = Prober(session, self._is_rated, self._rate, self._budget)
            self._connector.start(prober.run, f"potluck-probe-{session.view.epoch}")


class Prober:
    """Measures the links of one view that were not rated lately, and rates them."""

    def __init__(
        self,
        session: ViewSession,
        is_rated: Callable[[ProcessId], bool],
        rate: Callable[[ProcessId, Bandwidth], None],
        budget: ProbeBudget | None = None,
    ) -> None:
        self._session = session
        self._is_rated = is_rated
        self._rate = rate
        self._budget = budget or ProbeBudget()
        self._failures = dict.fromkeys(range(session.world_size), 0)
        self._not_before = dict.fromkeys(range(session.world_size), 0.0)

    def run(self) -> None:
        """Until the view is over."""
        others = [rank for rank in range(self._session.world_size) if rank != self._session.rank]
        while not self._session.stopped.wait(LOOK_EVERY):
            for rank in others:
                now = time.monotonic()
                if not (self._session.is_quiet(QUIET) and self._budget.allows(now)):
                    break
                self._look_at(rank, now)

    def _look_at(self, rank: int, now: float) -> None:
        dials = rank < self._session.rank
        process = self._session.view.members[rank]
        if dials and (now < self._not_before[rank] or self._is_rated(process)):
            return
        try:
            found = self._probe(rank, within=LIMITS.patience if dials else 0.0)
            if found.up and found.down:
                self._rate(process, found)
                self._failures[rank] = 0
                return
        except (DistributedError, OSError) as error:
            logger.debug("the link to rank %d was not measured: %s", rank, error)
        if dials:
            self._not_before[rank] = time.monotonic() + AGAIN * 2 ** self._failures[rank]
            self._failures[rank] = min(self._failures[rank] + 1, 7)

    def _probe(self, rank: int, within: float) -> Bandwidth:
        session = self._session
        backend = session.backend
        assert backend is not None  # it was built before this began
        deadline = time.monotonic() + within
        opened = backend.open_stream(rank, UNASKED_PURPOSE, deadline, session.look)
        takes_part = True
        try:
            poller = backend.make_poller()
            try:
                return measure_bandwidth(
                    opened,
                    poller,
                    first=session.rank < rank,
                    limits=LIMITS,
                    is_idle=self._is_idle(),
                )
            except Timeout:  # it is busy: hardly a byte was sent
                takes_part = False
                raise
            finally:
                poller.close()
        finally:
            now = time.monotonic()
            if takes_part:
                self._budget.spend(2 * LIMITS.seconds, now)
            opened.stream.finish(now + LIMITS.patience)

    def _is_idle(self) -> Callable[[], bool]:
        return lambda: self._session.is_quiet(0.0)
