"""How simulated processes find and reach each other: dialling, accepting, and probing a port.

Every process knows where the others may be, as discovery would tell it, and dials those to whom it
has no lane, again and again.  A dead process's port refuses if its machine is up; a stopped
process's port accepts and then says nothing; what is cut off, or without power, does not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum

from potluck.core.cluster_effects import Meet, Probe
from potluck.testing.lanes import join_ends
from potluck.testing.network import LossyNetwork
from potluck.testing.process import SimulatedProcess
from potluck.vocabulary import ProcessId

__all__ = ["Dialling", "Outcome"]

FIRST_LOOK = 0.05  # seconds after the start of a process at most
LOOK_AROUND = 0.3  # seconds from one look at who is missing to the next
HASTE = 0.1  # seconds at most from the loss of a lane to the next look
TIMEOUT = 0.4  # seconds after which a dialler gives up


class Outcome(Enum):
    """What became of knocking at a port."""

    ANSWERED = "it answers"
    REFUSED = "its port refuses connections"
    SILENT = "nobody answers"
    BARRED = "it wants no connection"


class Dialling:
    """The dialler of all processes of a simulated cluster."""

    def __init__(
        self,
        network: LossyNetwork,
        places: Mapping[str, SimulatedProcess],
        draw: Callable[[], float],
    ) -> None:
        self.is_routed = False
        """Whether a router is between the machines, so that a refusal proves nothing."""
        self.firewalls: set[str] = set()
        """Machines that drop what comes from elsewhere to a port of a dead process."""
        self._clock = network.clock
        self._network = network
        self._places = places
        self._draw = draw

    def is_provable(self, place: SimulatedProcess) -> bool:
        """Whether the port of a dead process says so to others."""
        return place.is_powered and not self.is_routed and place.host not in self.firewalls

    def begin(self, process: SimulatedProcess) -> None:
        """A process has started: let it look around from now on."""
        self._clock.after(FIRST_LOOK * self._draw(), self._look, process, process.process)

    def hasten(self, process: SimulatedProcess) -> None:
        """A lane has ended: look around soon."""
        self._clock.after(HASTE * self._draw(), self._look_once, process, process.process)

    def meet(self, process: SimulatedProcess, effect: Meet) -> None:
        """Dial somebody of whom an acquaintance told."""
        place = self._place_of(effect.card.process)
        if place is not None and place is not process and not self._is_linked(process, place):
            self._knock(process, place, None)

    def probe(self, process: SimulatedProcess, effect: Probe) -> None:
        """Try a port and tell the core what came of it."""
        place = self._place_of(effect.peer)
        who = process.process
        if place is None:
            return

        def answer(outcome: Outcome) -> None:
            if process.process == who:
                is_proof = outcome is Outcome.REFUSED and not self.is_routed
                process.probed(effect.peer, outcome.value, has_ended=is_proof)

        self._knock(process, place, answer)

    def _look(self, process: SimulatedProcess, who: ProcessId) -> None:
        if process.core is None or process.process != who:
            return
        self._look_once(process, who)
        self._clock.after(LOOK_AROUND * (0.5 + self._draw()), self._look, process, who)

    def _look_once(self, process: SimulatedProcess, who: ProcessId) -> None:
        if not process.is_running or process.process != who:
            return
        linked = {lane.other.owner for lane in process.lanes.values() if lane.is_in_use}
        if len(linked) + 1 < len(self._places):
            for place in self._places.values():
                if place is not process and place not in linked:
                    self._knock(process, place, None)

    def _place_of(self, who: ProcessId) -> SimulatedProcess | None:
        for place in self._places.values():
            if who in place.past:
                return place
        return None

    def _is_linked(self, process: SimulatedProcess, place: SimulatedProcess) -> bool:
        return any(lane.is_in_use and lane.other.owner is place for lane in process.lanes.values())

    def _knock(
        self,
        process: SimulatedProcess,
        place: SimulatedProcess,
        answer: Callable[[Outcome], None] | None,
    ) -> None:
        delay = self._network.delay(process.host, place.host)
        self._clock.after(delay, self._arrive, process, process.process, place, answer)

    def _arrive(
        self,
        process: SimulatedProcess,
        who: ProcessId,
        place: SimulatedProcess,
        answer: Callable[[Outcome], None] | None,
    ) -> None:
        if process.core is None or process.process != who:
            return
        outcome = self._outcome(process, place)
        if outcome is Outcome.ANSWERED and not self._is_linked(process, place):
            self._open(process, place)
        if answer is not None:
            back = self._network.delay(place.host, process.host)
            self._clock.after(TIMEOUT if outcome is Outcome.SILENT else back, answer, outcome)

    def _outcome(self, process: SimulatedProcess, place: SimulatedProcess) -> Outcome:
        if not self._network.is_open(process.host, place.host) or not place.is_powered:
            return Outcome.SILENT
        if place.core is None:
            is_dropped = place.host in self.firewalls and process.host != place.host
            return Outcome.SILENT if is_dropped else Outcome.REFUSED
        if place.is_stopped or not process.is_running:
            return Outcome.SILENT
        if place.process in process.barred or process.process in place.barred:
            return Outcome.BARRED
        return Outcome.ANSWERED

    def _open(self, process: SimulatedProcess, place: SimulatedProcess) -> None:
        is_replaced = place.drop_stale_lane(process.process)
        here, there = join_ends(
            self._network,
            (process, process.process, process.card),
            (place, place.process, place.card),
        )
        process.lanes[place.process] = here
        place.lanes[process.process] = there
        there.is_replacement = is_replaced
        there.open_other()  # first: it travels before whatever the core has to say
        there.open()
