"""A simulated process: a real cluster core with a clock of its own, and connections to its peers.

The process carries out what its core decides and tells it what happens, as the control thread of a
real one does.  It can be stopped (it does nothing, and finds all that came meanwhile when it
continues), suspended (the same, and its clock stood still), killed (its machine says so) and lose
its power (silently).  A restart is a new core in the same place, one incarnation later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf
from typing import Any

from potluck._types import ProcessId, View
from potluck.membership import events as effects
from potluck.membership.core import ClusterCore
from potluck.membership.events import ClusterConfig, ClusterState, ConnectTo, ProbePort
from potluck.membership.health import HealthEvent, HealthStatus
from potluck.membership.messages import Commit, Heartbeat, ProcessInfo, Relayed, decode, encode
from potluck.testing.clock import Appointment, LocalClock, VirtualClock
from potluck.testing.network import Flow, LossyNetwork

CoreFactory = Callable[[ProcessInfo, ClusterConfig, float], ClusterCore]

LATENESS = 0.0005  # seconds by which a loop wakes up late at most
PERMITTED_RETURNS = 10  # of a core that wants to be woken at once; more would burn a processor
MANY = 80  # messages within a second; each further one is looked at
WORK = 0.0005  # seconds that a whole processor takes for one input, where its share is limited
ROUNDING = 1e-6  # seconds; a deadline turned into simulated time and back must have passed


@dataclass(frozen=True, slots=True)
class ProcessEnvironment:
    """What a process needs of the world around it, and whom it tells what it does."""

    clock: VirtualClock
    draw: Callable[[], float]
    """A number between 0 and 1, by lot."""
    sends: Callable[[SimulatedProcess, ProcessId, Any], None]
    """A message other than a heartbeat is about to leave."""
    receives: Callable[[SimulatedProcess, Any], None]
    """A process takes in a commit, or something that was relayed."""
    wants: Callable[[SimulatedProcess, ProbePort | ConnectTo], None]
    """The core asks for a probe or an acquaintance."""
    counts: Callable[[SimulatedProcess, int], None]
    """A process has sent this many messages within a second."""
    lost_connection: Callable[[SimulatedProcess, ProcessId], None]
    """A connection of the process has ended."""
    tells: Callable[[SimulatedProcess, effects.Effect], None]
    """The core has decided something that is neither a message nor a probe."""
    changed: Callable[[SimulatedProcess], None]
    """The view or the state of the core has changed."""
    restless: Callable[[SimulatedProcess], None]
    """The core was woken, and wants to be woken again at once."""


class SimulatedProcess:
    """A place where processes run, one after the other; the core of the present one, if any."""

    def __init__(self, world: ProcessEnvironment, card: ProcessInfo, host: str, name: str) -> None:
        self.name = name
        self.host = host
        self.card = card
        self.process = card.process
        """The id of the present process, or of the last one."""
        self.core: ClusterCore | None = None
        """None while it is dead."""
        self.is_powered = True
        self.is_stopped = False
        """Stopped by a signal, or suspended: it does nothing until it is woken."""
        self.share = 1.0
        """Of a processor; with less than all of it, inputs queue up and each takes its time."""
        self.clock = LocalClock(world.clock, 1000.0 * world.draw())
        self.died_at: float | None = None
        self.touched_at = -inf
        """When something was last done to it from outside."""
        self.woke_at = -inf
        """When it continued after a stop or suspension."""
        self.connections: dict[ProcessId, ConnectionEnd] = {}
        self.past: set[ProcessId] = set()
        """All processes that ran here."""
        self.barred: set[ProcessId] = set()
        """With whom the core wants no connection any more."""
        self.writes_bytes = False
        """Whether its messages are written as bytes and read again, which takes its time."""
        self.inputs = 0
        """Messages and ticks that it has worked on."""
        self.told: list[effects.Effect] = []
        """What its core decided since the start, beside messages and probes."""
        self.seen: tuple[View | None, ClusterState] = (None, ClusterState.JOINING)
        """View and state of the core when it was last looked at."""
        self.entered: View | None = None
        """The view that it entered last, unless it was removed since."""
        self._world = world
        self._backlog: list[tuple[Callable[..., list[effects.Effect]], tuple[Any, ...]]] = []
        self._alarm: Appointment | None = None
        self._due = 0.0  # when it goes off, but for the lateness of the loop
        self._is_working = False  # on an input, with a share of a processor
        self._second = 0  # of the simulated time
        self._sent = 0  # messages within that
        self._restless = 0  # times in a row that the core wanted to be woken at once

    # --- questions ---

    @property
    def is_alive(self) -> bool:
        """Whether a process runs here; a stopped one does."""
        return self.core is not None

    @property
    def is_running(self) -> bool:
        """Whether it runs and is not stopped."""
        return self.core is not None and not self.is_stopped

    # --- life ---

    def start(self, core: ClusterCore) -> None:
        """A process begins here."""
        self.core = core
        self.card = core.me
        self.process = core.me.process
        self.is_powered = True
        self.is_stopped = self._is_working = False
        self.died_at = None
        self.woke_at = -inf
        self.clock.thaw()
        self.past.add(self.process)
        self.barred.clear()
        self.told.clear()
        self.seen = core.view, core.state
        self.entered = None
        self._arm()

    def end(self, cause: str, *, silently: bool = False) -> None:
        """The process dies; silently: with its machine, so that no connection is closed."""
        self.core = None
        self.is_powered = not silently
        self.died_at = self._world.clock.now
        self._backlog.clear()
        for connection in self.connections.values():
            if silently:
                connection.drop()
            else:
                connection.close(cause)
        self.connections.clear()
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def stop(self, *, clock_too: bool = False) -> None:
        """Do nothing until woken; ``clock_too``: as a suspended machine, whose clock stands."""
        self.is_stopped = True
        if clock_too:
            self.clock.freeze()

    def wake(self) -> None:
        """Continue, late, with all that came meanwhile; the alarm may go off before or after it."""
        if not self.is_stopped or self.core is None:
            return
        self.is_stopped = False
        self.woke_at = self._world.clock.now
        self.clock.thaw()
        backlog, self._backlog = self._backlog, []
        place = int(self._world.draw() * (len(backlog) + 1))
        for stimulus, arguments in backlog[:place]:
            self._take_in(stimulus, arguments)
        self._ring()
        for stimulus, arguments in backlog[place:]:
            self._take_in(stimulus, arguments)
        self._arm()

    def slow_down(self, share: float) -> None:
        """Have this share of a processor from now on; what has queued up is worked off."""
        self.share = share
        self._work()

    def jump(self, seconds: float) -> None:
        """Its clock leaps ahead."""
        self.clock.jump(seconds)
        self._arm()

    def drift(self, rate: float) -> None:
        """Its clock runs faster or slower from now on, without a leap."""
        self.clock.drift(rate)
        self._arm()

    # --- what happens to it ---

    def connection_opened(self, end: ConnectionEnd) -> None:
        """A connection is open at this end."""
        self._stimulate(self._connected, end)

    def connection_closed(self, end: ConnectionEnd, cause: str) -> None:
        """The other side has closed a connection."""
        self._stimulate(self._disconnected, end, cause)

    def connection_delivers(self, end: ConnectionEnd, message: Any) -> None:
        """A message has arrived."""
        self._stimulate(self._received, end, message)

    def drop_stale_connection(self, peer: ProcessId) -> bool:
        """Drop a connection whose other end is gone; whether the core still uses it.

        The core of a slow process may not have been told of it yet.
        """
        end = self.connections.get(peer)
        if end is None or not end.is_open:
            return False
        end.drop()
        return end.is_known

    def give_up(self, peer: ProcessId, reason: str) -> None:
        """Close a connection that has been silent for too long, as if it had broken."""
        end = self.connections.get(peer)
        if end is not None and end.is_open:
            end.close(reason)
            self.connection_closed(end, reason)

    def probed(self, peer: ProcessId, what: str, *, has_ended: bool) -> None:
        """A probe was refused, or it proved nothing; one with a connection needs no probe."""
        if peer in self.connections and self.connections[peer].is_open:
            return
        self._stimulate(
            lambda core: (core.ended if has_ended else core.unreachable)(peer, what, self.clock.now)
        )

    def ask(self, request: Callable[[ClusterCore, float], list[effects.Effect]]) -> None:
        """Have its user ask the core for something: to leave, to step down."""
        self._stimulate(lambda core: request(core, self.clock.now))

    def _stimulate(self, stimulus: Callable[..., list[effects.Effect]], *arguments: Any) -> None:
        if self.core is None:
            return
        if self.is_stopped:
            self._backlog.append((stimulus, arguments))
        elif self.share < 1 or self._is_working:
            self._backlog.append((stimulus, arguments))
            self._work()
        else:
            self._take_in(stimulus, arguments)
            self._arm()

    def _work(self) -> None:
        """Take in what has queued up, one after the other, each in its time."""
        if self._backlog and not self._is_working and self.is_running:
            self._is_working = True
            self._world.clock.after(WORK / self.share, self._worked, self.core)

    def _worked(self, core: ClusterCore) -> None:
        if self.core is not core:
            return
        self._is_working = False
        if self._backlog and not self.is_stopped:
            self._take_in(*self._backlog.pop(0))
            self._arm()
            self._work()

    def _take_in(
        self, stimulus: Callable[..., list[effects.Effect]], arguments: tuple[Any, ...]
    ) -> None:
        if self.core is not None:
            core = self.core
            self.inputs += 1
            outcome = stimulus(core, *arguments)
            if outcome:
                self._carry_out(outcome)
            view, state = self.seen
            if core.view is not view or core.state is not state:
                self.seen = core.view, core.state
                self._world.changed(self)

    def _connected(self, core: ClusterCore, end: ConnectionEnd) -> list[effects.Effect]:
        if end.is_known or not end.is_open:
            return []
        end.is_known = True
        return core.connected(end.card, self.clock.now)

    def _disconnected(
        self, core: ClusterCore, end: ConnectionEnd, cause: str
    ) -> list[effects.Effect]:
        if self.connections.get(end.peer) is not end:
            return []  # a newer connection has taken its place
        del self.connections[end.peer]
        self._world.lost_connection(self, end.peer)
        return core.disconnected(end.peer, cause, self.clock.now)

    def _received(
        self, core: ClusterCore, end: ConnectionEnd, message: Any
    ) -> list[effects.Effect]:
        if self.connections.get(end.peer) is not end:
            return []
        if type(message) is Commit or type(message) is Relayed:
            self._world.receives(self, message)
        return core.receive(end.peer, message, self.clock.now)

    def _ticked(self, core: ClusterCore) -> list[effects.Effect]:
        return core.tick(self.clock.now)

    # --- what it does ---

    def _carry_out(self, outcome: Iterable[effects.Effect]) -> None:
        world, connections, core = self._world, self.connections, self.core
        if (second := int(world.clock.now)) != self._second:
            self._second, self._sent = second, 0
        for effect in outcome:
            if self.core is not core:
                return  # it died of what the story does when this message leaves
            if isinstance(effect, effects.SendMessage):
                message = effect.message
                self._sent += 1
                if type(message) is not Heartbeat:
                    world.sends(self, effect.to, message)
                connection = connections.get(effect.to)
                if connection is not None and connection.is_open:
                    connection.send(decode(encode(message)) if self.writes_bytes else message)
                if self._sent > MANY:
                    world.counts(self, self._sent)
            elif isinstance(effect, effects.ProbePort | effects.ConnectTo):
                world.wants(self, effect)
            else:
                self._decided(effect)

    def _decided(self, effect: effects.Effect) -> None:
        """The core has decided something that is neither a message nor a question."""
        if isinstance(effect, effects.Disconnect):
            self._bar(effect.peer, effect.reason)
        elif isinstance(effect, effects.Note) and isinstance(effect.event, HealthEvent):
            self._judged(effect.event)
        self.told.append(effect)
        self._world.tells(self, effect)
        if isinstance(effect, effects.Installed):
            self.entered = effect.view
        elif isinstance(effect, effects.Removed):
            self.entered = None

    def _judged(self, event: HealthEvent) -> None:
        """What waits in a connection that was silent for long comes late: begin with a new one."""
        if event.status is HealthStatus.DEAD:
            self._world.clock.after(0.0, self.give_up, event.peer, event.reason)

    def _bar(self, peer: ProcessId, reason: str) -> None:
        self.barred.add(peer)
        if (end := self.connections.pop(peer, None)) is not None:
            end.close(reason)

    def _arm(self, *, was_woken: bool = False) -> None:
        """Wake up at the core's deadline; an alarm that goes off too early is set anew then."""
        core = self.core
        if core is None or self.is_stopped or (deadline := core.next_deadline) is None:
            return
        if was_woken:
            self._restless = self._restless + 1 if deadline <= self.clock.now else 0
            if self._restless > PERMITTED_RETURNS:
                self._world.restless(self)
        due = self.clock.world_time(deadline) + ROUNDING
        alarm = self._alarm
        if alarm is not None:
            if self._due <= due:
                return
            alarm.cancel()
        self._due = due
        late = LATENESS * self._world.draw()
        self._alarm = self._world.clock.at(due + late, self._go_off)

    def _go_off(self) -> None:
        self._alarm = None
        if not self.is_running:
            return
        if self.share < 1 or self._is_working:
            self._backlog.append((self._late_tick, ()))
            self._work()
        else:
            self._arm(was_woken=self._ring())

    def _late_tick(self, core: ClusterCore) -> list[effects.Effect]:
        due = core.next_deadline
        return core.tick(self.clock.now) if due is not None and due <= self.clock.now else []

    def _ring(self) -> bool:
        """Tick, if that is due; whether it was."""
        core = self.core
        deadline = None if core is None else core.next_deadline
        if deadline is None or deadline > self.clock.now:
            return False
        self._take_in(self._ticked, ())
        return True


# --------------------------------------------------------------------------------------------------
# Control connections between simulated processes, with the manners of TCP connections.
#
# A connection has two ends.  What is sent at one end arrives at the other in order.  An end that
# closes says so, and the other hears it if the network lets it through; an end whose machine lost
# its power says nothing, and a process that keeps sending to it learns of it only when that machine
# is back and answers with a reset.


class ConnectionEnd:
    """One end of a connection, in the hands of one start of one process."""

    __slots__ = (
        "_flow",
        "card",
        "is_known",
        "is_open",
        "is_opening",
        "other",
        "owner",
        "peer",
    )

    other: ConnectionEnd

    def __init__(self, owner: SimulatedProcess, peer: ProcessId, card: Any, flow: Flow) -> None:
        self.owner = owner
        self.peer = peer
        self.card = card
        """What the other side said of itself in its hello."""
        self.is_open = False
        self.is_opening = True
        self.is_known = False
        """Whether the core has been told of it, or of the connection whose place it took."""
        self._flow = flow

    @property
    def is_in_use(self) -> bool:
        """Whether it is open, or about to be."""
        return self.is_open or self.is_opening

    def send(self, message: Any) -> None:
        """Post a message to the other end."""
        self._flow.send(self.other.receive, message)

    def receive(self, message: Any) -> None:
        """A message arrives; a closed end answers with a reset, a machine without power not."""
        if self.is_open:
            self.owner.connection_delivers(self, message)
        elif self.owner.is_powered:
            self._flow.send(self.other.hang_up, "the connection was reset", certain=True)

    def open(self, _: None = None) -> None:
        """Take it into use, unless its owner has ended meanwhile."""
        if self.is_opening:
            self.is_opening = False
            self.is_open = True
            self.owner.connection_opened(self)
        elif self.owner.is_powered:
            self._flow.send(self.other.hang_up, "the connection was reset", certain=True)

    def open_other(self) -> None:
        """Let the answer to the other side's hello travel there."""
        self._flow.send(self.other.open, None, certain=True)

    def close(self, cause: str) -> None:
        """End it here, and tell the other side."""
        if self.is_in_use:
            self.drop()
            self._flow.send(self.other.hang_up, cause, certain=True)

    def drop(self) -> None:
        """End it here without a word."""
        self.is_open = self.is_opening = False

    def hang_up(self, cause: str) -> None:
        """The other side has closed."""
        if self.is_in_use:
            was_open = self.is_open
            self.drop()
            if was_open:
                self.owner.connection_closed(self, cause)


def join_ends(
    network: LossyNetwork,
    dialler: tuple[SimulatedProcess, ProcessId, Any],
    acceptor: tuple[SimulatedProcess, ProcessId, Any],
) -> tuple[ConnectionEnd, ConnectionEnd]:
    """A new connection, open at neither end yet; each side is (owner, process id, card)."""
    (one, one_id, one_card), (two, two_id, two_card) = dialler, acceptor
    here = ConnectionEnd(one, two_id, two_card, network.flow(one.host, two.host))
    there = ConnectionEnd(two, one_id, one_card, network.flow(two.host, one.host))
    here.other, there.other = there, here
    return here, there


# --------------------------------------------------------------------------------------------------
# How simulated processes find and reach each other: dialling, accepting, and probing a port.
#
# Every process knows where the others may be, as discovery would tell it, and dials those to whom
# it has no connection, again and again.  A dead process's port refuses if its machine is up; a
# stopped process's port accepts and then says nothing; what is cut off, or without power, does not
# answer.

FIRST_LOOK = 0.05  # seconds after the start of a process at most
LOOK_AROUND = 0.3  # seconds from one look at who is missing to the next
HASTE = 0.1  # seconds at most from the loss of a connection to the next look
TIMEOUT = 0.4  # seconds after which a dialler gives up


class PortOutcome(Enum):
    """What became of knocking at a port."""

    ANSWERED = "it answers"
    REFUSED = "its port refuses connections"
    SILENT = "no answer"
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
        """A connection has ended: look around soon."""
        self._clock.after(HASTE * self._draw(), self._look_once, process, process.process)

    def meet(self, process: SimulatedProcess, effect: ConnectTo) -> None:
        """Dial a process of which another one told."""
        place = self._place_of(effect.card.process)
        if place is not None and place is not process and not self._is_linked(process, place):
            self._knock(process, place, None)

    def probe(self, process: SimulatedProcess, effect: ProbePort) -> None:
        """Try a port and tell the core what came of it."""
        place = self._place_of(effect.peer)
        who = process.process
        if place is None:
            return

        def answer(outcome: PortOutcome) -> None:
            if process.process == who:
                is_proof = outcome is PortOutcome.REFUSED and not self.is_routed
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
        linked = {
            connection.other.owner
            for connection in process.connections.values()
            if connection.is_in_use
        }
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
        return any(
            connection.is_in_use and connection.other.owner is place
            for connection in process.connections.values()
        )

    def _knock(
        self,
        process: SimulatedProcess,
        place: SimulatedProcess,
        answer: Callable[[PortOutcome], None] | None,
    ) -> None:
        delay = self._network.delay(process.host, place.host)
        self._clock.after(delay, self._arrive, process, process.process, place, answer)

    def _arrive(
        self,
        process: SimulatedProcess,
        who: ProcessId,
        place: SimulatedProcess,
        answer: Callable[[PortOutcome], None] | None,
    ) -> None:
        if process.core is None or process.process != who:
            return
        outcome = self._outcome(process, place)
        if outcome is PortOutcome.ANSWERED and not self._is_linked(process, place):
            self._open(process, place)
        if answer is not None:
            back = self._network.delay(place.host, process.host)
            self._clock.after(TIMEOUT if outcome is PortOutcome.SILENT else back, answer, outcome)

    def _outcome(self, process: SimulatedProcess, place: SimulatedProcess) -> PortOutcome:
        if not self._network.is_open(process.host, place.host) or not place.is_powered:
            return PortOutcome.SILENT
        if place.core is None:
            is_dropped = place.host in self.firewalls and process.host != place.host
            return PortOutcome.SILENT if is_dropped else PortOutcome.REFUSED
        if place.is_stopped or not process.is_running:
            return PortOutcome.SILENT
        if place.process in process.barred or process.process in place.barred:
            return PortOutcome.BARRED
        return PortOutcome.ANSWERED

    def _open(self, process: SimulatedProcess, place: SimulatedProcess) -> None:
        is_known = place.drop_stale_connection(process.process)
        here, there = join_ends(
            self._network,
            (process, process.process, process.card),
            (place, place.process, place.card),
        )
        process.connections[place.process] = here
        place.connections[process.process] = there
        there.is_known = is_known
        there.open_other()  # first: it travels before whatever the core has to say
        there.open()


# --------------------------------------------------------------------------------------------------
# What is raised when a cluster breaks a rule, and names for processes and views in its words.


class Violation(AssertionError):
    """A cluster did what no cluster may do."""


class Names:
    """Processes and views in words."""

    def __init__(self, places: Mapping[str, SimulatedProcess]) -> None:
        self._places = places

    def who(self, process: ProcessId) -> str:
        """The name of a process, with the number of its start."""
        for place in self._places.values():
            if process in place.past:
                return f"{place.name}/{process.incarnation}"
        return str(process)

    def all(self, processes: Iterable[ProcessId]) -> str:
        """Several names."""
        return "{" + " ".join(map(self.who, processes)) + "}"

    def view(self, view: View | None) -> str:
        """A view: lineage, epoch, and who is in."""
        if view is None:
            return "no view"
        return f"view {view.lineage[:8]}.{view.epoch} {self.all(view.members)}"
