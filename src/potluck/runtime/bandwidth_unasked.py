"""Links that are measured without being asked: once for each pair of members, in a quiet moment.

Quiet is a view in which no call has run here for a while.  Of two members the one of the higher
rank begins; the other takes part as soon as it is quiet there too.  A probe takes some tenths of a
second and a few megabytes, and is broken off within 10 ms when a call begins.  Collectives measure
what they need by themselves; this is for whoever wants to know before, or calls nothing large.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from potluck.errors import DistributedError
from potluck.logs import get_logger
from potluck.runtime.bandwidth import Bandwidth, ProbeLimits, measure_bandwidth

if TYPE_CHECKING:
    from potluck.runtime.cluster_building import Builders
    from potluck.runtime.cluster_stage import Stage
    from potluck.vocabulary import ProcessId

__all__ = ["Probes", "Register"]

logger = get_logger(__name__)

PURPOSE = "bandwidth unasked"
"""Of the connections: others than for measurements that a program asks for."""

LIMITS = ProbeLimits(seconds=0.15, octets=1 << 23, patience=3.0)

QUIET = 1.0
"""Seconds without a call that make a moment quiet."""

LOOK_EVERY = 0.5
"""Seconds between two looks."""

TRIES = 3
"""For each link, in one view."""

UNTIL = 120.0
"""Seconds of a view after which the links that are left stay unmeasured."""


class Register(Protocol):
    """Where rates are written down."""

    def is_rated(self, process: ProcessId) -> bool:
        """Whether the link to a process was measured not long ago."""

    def rate(self, process: ProcessId, found: Bandwidth) -> None:
        """It was now."""


class Probes:
    """Has the links of every view measured, on a thread of its own."""

    def __init__(self, builders: Builders, register: Register) -> None:
        self._builders = builders
        self._register = register

    def begin(self, stage: Stage) -> None:
        """A view is connected."""
        if stage.world_size > 1:
            prober = Prober(stage, self._register)
            self._builders.start(prober.run, f"potluck-probe-{stage.view.epoch}")


class Prober:
    """Measures the links of one view."""

    def __init__(self, stage: Stage, register: Register) -> None:
        self._stage = stage
        self._register = register
        self._tries = {rank: TRIES for rank in range(stage.world_size) if rank != stage.rank}

    def run(self) -> None:
        """Until everything is measured, or the view is over, or it takes too long."""
        end = time.monotonic() + UNTIL
        while self._tries and time.monotonic() < end and not self._stage.stopped.wait(LOOK_EVERY):
            for rank in list(self._tries):
                if not self._stage.is_quiet(QUIET):
                    break
                self._look_at(rank)

    def _look_at(self, rank: int) -> None:
        dials = rank < self._stage.rank
        process = self._stage.view.members[rank]
        if dials and self._register.is_rated(process):
            del self._tries[rank]
            return
        try:
            found = self._probe(rank, within=LIMITS.patience if dials else 0.0)
            if found.up and found.down:
                self._register.rate(process, found)
                self._tries[rank] = 1  # the last
        except (DistributedError, OSError) as error:
            logger.debug("the link to rank %d was not measured: %s", rank, error)
            if not dials:
                return  # most likely nobody has called: that is no try
        self._tries[rank] -= 1
        if not self._tries[rank]:
            del self._tries[rank]

    def _probe(self, rank: int, within: float) -> Bandwidth:
        stage = self._stage
        backend = stage.backend
        assert backend is not None  # it was built before this began
        deadline = time.monotonic() + within
        opened = backend.open_stream(rank, PURPOSE, deadline, stage.look)
        try:
            poller = backend.make_poller()
            try:
                return measure_bandwidth(
                    opened, poller, first=stage.rank < rank, limits=LIMITS, is_idle=self._is_idle()
                )
            finally:
                poller.close()
        finally:
            opened.stream.finish(time.monotonic() + LIMITS.patience)

    def _is_idle(self) -> Callable[[], bool]:
        return lambda: self._stage.is_quiet(0.0)
