"""How much a cluster may do and wait: pauses, views and messages, each with its bound.

* A quorum of a view whose members are healthy and hear each other all the time is not paused for
  longer than ``Bounds.settling``, whatever happens to the others.
* When nothing has happened for ``Bounds.converging``, no view follows another.  A story has at most
  ``VIEWS_PER_FAULT`` views for each process, and for each thing that happens in it.
* A process sends at most ``BEATS_PER_PEER`` messages a second to each other process, and
  ``ERRANDS`` beside that.
"""

from __future__ import annotations

from collections.abc import Mapping

from potluck.core.cluster_events import ClusterState
from potluck.testing.network import LossyNetwork
from potluck.testing.process import SimulatedProcess
from potluck.testing.violation import Names, Violation
from potluck.vocabulary import ProcessId, View

__all__ = ["BEATS_PER_PEER", "ERRANDS", "VIEWS_PER_FAULT", "Calm"]

VIEWS_PER_FAULT = 2
BEATS_PER_PEER = 40
"""Messages a second: beats that come early, and campaigns and relays where links are missing."""
ERRANDS = 40
_QUICK = 0.05  # seconds; a network on which messages take longer may delay any decision


class Calm:
    """Watches that a cluster neither waits nor works without need."""

    def __init__(
        self,
        places: Mapping[str, SimulatedProcess],
        network: LossyNetwork,
        names: Names,
        settling: float,
        converging: float,
    ) -> None:
        self._places = places
        self._network = network
        self._clock = network.clock
        self._names = names
        self._settling = settling
        self._converging = converging
        self._disturbed_at = 0.0
        self.disturbances = 0
        self.views = 0
        self._newest: dict[str, View] = {}
        self._paused: dict[ProcessId, tuple[View, float]] = {}  # in which view, since when

    def disturbed(self) -> None:
        """Something happens to the cluster from outside."""
        self.disturbances += 1
        self._disturbed_at = self._clock.now

    # --- views ---

    def agreed(self, view: View) -> None:
        """A view was agreed."""
        self.views += 1
        if self._newest.get(view.lineage, view).epoch <= view.epoch:
            self._newest[view.lineage] = view
        quiet = self._clock.now - self._disturbed_at
        if quiet > self._converging and self._is_orderly():
            raise Violation(
                f"{self._names.view(view)} follows although nothing has happened for {quiet:.1f} s"
            )
        if self.views > VIEWS_PER_FAULT * (self.disturbances + len(self._places)):
            raise Violation(
                f"{self._names.view(view)} is number {self.views} after only "
                f"{self.disturbances} things that happened"
            )

    def _is_orderly(self) -> bool:
        """Whether the network and all processes do what they do in time."""
        return self._network.is_quick(_QUICK) and all(
            place.share == 1 for place in self._places.values()
        )

    # --- pauses ---

    def changed(self, process: SimulatedProcess) -> None:
        """The state of a process has changed."""
        core = process.core
        who = process.process
        if core is None or core.state is not ClusterState.PAUSED:
            self._paused.pop(who, None)
        elif core.view is not None:
            known = self._paused.get(who)
            if known is None or known[0] is not core.view:
                self._watch(process, core.view)

    def _watch(self, process: SimulatedProcess, view: View) -> None:
        now = self._clock.now
        self._paused[process.process] = view, now
        self._clock.after(self._settling, self._check_paused, process, now, view)

    def _check_paused(self, process: SimulatedProcess, since: float, view: View) -> None:
        if self._paused.get(process.process) != (view, since) or process.core is None:
            return
        newest = self._newest.get(view.lineage, view)
        healthy = self._healthy(process, view, since - self._settling)
        if process.process in newest.members and _is_quorum(view, healthy & set(newest.members)):
            raise Violation(
                f"{process.name} has been paused in {self._names.view(view)} for "
                f"{self._clock.now - since:.1f} s, although {self._names.all(sorted(healthy))} "
                f"hear each other: {process.core.reason}"
            )

    def _healthy(self, process: SimulatedProcess, view: View, since: float) -> set[ProcessId]:
        """Members to whom nothing has happened, and who all hear each other; none if unclear."""
        if not self._network.is_quick(_QUICK):
            return set()
        members = [
            place
            for place in self._places.values()
            if place.core is not None
            and place.process in view.members
            and place.is_running
            and place.share == 1
            and place.touched_at < since
        ]
        if process not in members:
            return set()
        steady = self._network.is_steady
        heard = [place for place in members if steady(process.host, place.host, since)]
        if not all(steady(one.host, other.host, since) for one in heard for other in heard):
            return set()
        return {place.process for place in heard}

    # --- messages ---

    def counted(self, process: SimulatedProcess, sent: int) -> None:
        """A process has sent this many messages within a second."""
        if sent > BEATS_PER_PEER * (len(self._places) - 1) + ERRANDS:
            raise Violation(f"{process.name} has sent {sent} messages within a second")


def _is_quorum(view: View, present: set[ProcessId]) -> bool:
    twice = 2 * len(present)
    size = len(view.members)
    return twice > size or (twice == size and view.members[0] in present)
