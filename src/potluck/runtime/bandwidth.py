"""Bandwidth: a short measurement of one link, both directions, that keeps out of training's way.

First one side sends and the other counts, then the other way round.  The receiver acknowledges what
came, and no more is on its way than arrived within the last moments: the queue in front of a slow
link stays short, so that whoever needs the link next does not wait.  The rate is that of the second
half of the time: in the first, connections speed up and shapers let a burst pass.  Time and bytes
are bounded, and either side stops as soon as it has something better to do.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from potluck.runtime.bandwidth_talk import BLOCK, Talk, Word

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.backend.streams import PeerStream
    from potluck.net.transport import Poller

__all__ = [
    "Bandwidth",
    "ProbeLimits",
    "measure_bandwidth",
    "pairings",
    "probe_link",
    "probe_links",
    "steady_rate",
]

PURPOSE = "bandwidth"
"""Of the connections that are opened for a probe."""

MOMENT = 0.02
"""Seconds; twice what came within the last moment may be on its way."""

LEAST_WINDOW = 2 * BLOCK

NEVER_MORE = 1 << 28
"""Bytes; a peer that sends more in one direction, whatever its limits, is refused."""


@dataclass(frozen=True, slots=True)
class ProbeLimits:
    """What one direction of a probe may take."""

    seconds: float = 0.4
    octets: int = 1 << 25
    """Bytes: 32 MiB, a quarter of a second at 1 Gbit/s."""
    patience: float = 10.0
    """Seconds after which a peer that takes no part is given up."""

    def __post_init__(self) -> None:
        """Refuse what measures nothing or is no short measurement."""
        if not (self.seconds > 0 and 4 * BLOCK <= self.octets <= NEVER_MORE):
            msg = (
                f"A probe needs some time and {4 * BLOCK} to {NEVER_MORE} bytes; "
                f"got seconds={self.seconds}, octets={self.octets}"
            )
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """What a probe found, in bytes per second; 0 where it was broken off."""

    up: int
    """From here to the peer."""
    down: int
    """From the peer to here."""


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
    circle = size - 1 + size % 2  # an even number of ranks: the last one stays aside
    if rank == circle:
        return next(one for one in range(circle) if (turn - one) % circle == one)
    partner = (turn - rank) % circle
    if partner != rank:
        return partner
    return None if size % 2 else circle


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
    talk = Talk(opened, poller, limits.patience)
    try:
        up = _send(talk, limits, is_idle) if first else None
        down = _receive(talk, is_idle)
        return Bandwidth(_send(talk, limits, is_idle) if up is None else up, down)
    finally:
        talk.end()


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


def _send(talk: Talk, limits: ProbeLimits, is_idle: Callable[[], bool]) -> int:
    """Send for a while; the rate at which it arrived, as the peer tells."""
    block = os.urandom(BLOCK)  # nothing on the way can make it shorter
    begin = time.monotonic()
    window, sent, calm = _Window(begin), 0, True
    while calm and sent < limits.octets and time.monotonic() < begin + limits.seconds:
        if sent - window.arrived < window.size:
            talk.say(Word.BLOCK, len(block), block)
            sent += len(block)
            talk.look()
        else:
            talk.wait()
        for word, value in talk.heard():
            if word is Word.ARRIVED:
                window.answer(time.monotonic(), value)
            calm = calm and word is not Word.STOP
        calm = calm and is_idle()
    talk.say(Word.END, int(calm))
    while True:
        for word, value in talk.heard():
            if word is Word.RATE:
                return value
        talk.wait()


def _receive(talk: Talk, is_idle: Callable[[], bool]) -> int:
    """Count what arrives until the peer ends; the rate, which the peer is told as well."""
    told, calm = 0, True
    while True:
        for word, value in talk.heard():
            if word is Word.END:
                rate = steady_rate(talk.arrivals) if value and calm else 0
                talk.say(Word.RATE, rate)
                talk.finish()
                return rate
        if talk.received > NEVER_MORE:
            talk.refuse(f"more than {NEVER_MORE} bytes in one probe")
        if talk.received > told:
            told = talk.received
            talk.say(Word.ARRIVED, told)
        if calm and not is_idle():
            calm = False
            talk.say(Word.STOP)
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
