"""A whole cluster in one thread: real cluster cores, a virtual clock, and a network with faults.

Everything that happens follows from the seed, so that whatever goes wrong goes wrong again.  The
invariants of :mod:`potluck.testing.invariants` are checked all along.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from random import Random
from typing import Any, Protocol, cast

import msgspec

from potluck._types import NodeId, ProcessId, View
from potluck.membership import events as effects
from potluck.membership.core import ClusterCore
from potluck.membership.events import ClusterConfig, ClusterState
from potluck.membership.messages import Commit, ProcessInfo, ProcessRole, Relayed, decode
from potluck.testing.clock import Appointment, VirtualClock
from potluck.testing.invariants import Bounds, Invariants
from potluck.testing.network import LinkQuality, LossyNetwork
from potluck.testing.process import (
    CoreFactory,
    Dialling,
    ProcessEnvironment,
    SimulatedProcess,
    Violation,
)
from potluck.testing.trainer import SimulatedCheckpoint, SimulatedTrainer, States, TrainerWatch

# --------------------------------------------------------------------------------------------------
# Messages and processes in few words, for the trace of a simulated cluster.

Naming = Callable[[ProcessId], str]

_LINEAGE_DIGITS = 8


def in_short(thing: Any, who: Naming) -> str:
    """A message, or a field of one, with names instead of ids and without what is empty."""
    if isinstance(thing, ProcessId):
        return who(thing)
    if isinstance(thing, ProcessInfo):
        return who(thing.process)
    if isinstance(thing, msgspec.Struct):
        fields = ((name, getattr(thing, name)) for name in thing.__struct_fields__)
        said = [_field(name, value, who) for name, value in fields if value not in ("", (), None)]
        return f"{type(thing).__name__}({', '.join(said)})"
    if isinstance(thing, tuple):
        return "{" + " ".join(in_short(item, who) for item in thing) + "}"
    if isinstance(thing, Enum):
        return thing.name.lower()
    return str(thing)


def _field(name: str, value: Any, who: Naming) -> str:
    if name in {"lineage", "into"}:
        return f"{name}={value[:_LINEAGE_DIGITS]}"
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return f"{name}={in_short(value, who)}"


_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


def _node_id(name: str) -> NodeId:
    """32 letters that begin with the name, so that the order of names is the order of ids."""
    digest = hashlib.sha256(name.encode()).digest()
    return NodeId((name.lower() + "".join(_ALPHABET[byte % 32] for byte in digest))[:32])


STAYING = 0.5  # seconds for which a view must hold that everything was settled into


class _ContinueCheck(Protocol):
    def continue_without_missing(self, now: float) -> list[effects.Effect]: ...


class SimulatedCluster:
    """Processes that find each other, agree on who is in, and suffer what a test does to them.

    It has a clock, a network and machines, shows everything that processes do to the invariants,
    and writes the trace.

    >>> cluster = SimulatedCluster(seed=7)
    >>> cluster.start("a", "b", "c")
    >>> cluster.run_until(lambda: cluster.in_one_view("a", "b", "c"), within=5)
    True
    >>> cluster.kill("c")
    >>> cluster.run_until(lambda: cluster.in_one_view("a", "b"), within=5)
    True
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        config: ClusterConfig | None = None,
        quality: LinkQuality | None = None,
        core: CoreFactory = ClusterCore,
        tell: Callable[[str], None] | None = None,
        chance: Random | None = None,
    ) -> None:
        chance = chance or Random(seed)  # noqa: S311 - chance that shall repeat
        self.config = config or ClusterConfig()
        self.clock = VirtualClock()
        self.network = LossyNetwork(self.clock, chance, quality)
        self.places: dict[str, SimulatedProcess] = {}
        self.draw = chance.random
        self.dialling = Dialling(self.network, self.places, chance.random)
        self.invariants = Invariants(
            self.places,
            self.network,
            Bounds.of(self.config),
            is_one_at_work=self.config.quorum == "majority",
        )
        self.changes = 0
        """Counts whatever could make an expectation true."""
        self.settled_in: float | None = None
        """Seconds that the cluster needed to come together after the last fault, if it did."""
        self.needed_the_dead = False
        """Whether it came together only when the dead were started again."""
        self._environment = ProcessEnvironment(
            clock=self.clock,
            draw=self.draw,
            sends=self.sends,
            receives=self.receives,
            wants=self.wants,
            counts=self.counts,
            lost_connection=self.lost_connection,
            tells=self.tells,
            changed=self.changed,
            restless=self.restless,
        )
        self._core = core
        self._tell = tell
        self.triggers: list[tuple[str, str, Callable[[], None]]] = []
        self.has_trainers = False
        """Whether processes that start from now on train."""
        self.saves_checkpoints = False
        self._states = States()
        self._trainers: dict[ProcessId, SimulatedTrainer] = {}
        self._flaps: list[Appointment] = []
        self._wanted: dict[str, int] = {}  # min_nodes of those that have a setting of their own
        self._boots: dict[str, int] = {}
        self._incarnations: dict[str, int] = {}

    # --- who is there ---

    def start(self, *names: str, role: ProcessRole = ProcessRole.MEMBER) -> None:
        """Start new processes, each on a machine of its own."""
        for name in names:
            self.start_on(name, name, role=role)

    def start_on(
        self, name: str, host: str, *, role: ProcessRole = ProcessRole.MEMBER, node: str = ""
    ) -> None:
        """Start a new process on the machine of another; ``node``: with the key of that one."""
        if name in self.places:
            msg = f"There is a process {name!r} already; restart() starts it again."
            raise ValueError(msg)
        slot = sum(place.host == host for place in self.places.values())
        card = ProcessInfo(
            node=_node_id(node or host),
            incarnation=0,
            slot=slot,
            machine=f"machine-{host}",
            name=name,
            hosts=(f"{host}.local",),
            port=7000 + slot,
            role=role,
            pause_after=self.config.health.pause_after,
            quorum=self.config.quorum,
        )
        self.places[name] = SimulatedProcess(self._environment, card, host, name)
        self._begin(self.places[name])

    def set_wanted(self, name: str, count: int) -> None:
        """Let a process that starts under this name ask for at least this many founders."""
        self._wanted[name] = count

    def restart(self, *names: str) -> None:
        """Start again, in the same place, what has died; switches its machine on."""
        for place in self.named(names):
            if place.core is None:
                for other in self.on_machine(place.host):
                    other.is_powered = True
                self._begin(place)

    def _begin(self, place: SimulatedProcess) -> None:
        self._incarnations[place.card.node] = self._incarnations.get(place.card.node, 0) + 1
        card = msgspec.structs.replace(
            place.card,
            incarnation=self._incarnations[place.card.node],
            boot=f"{place.host}-{self._boots.get(place.host, 0)}",
        )
        before = self._trainers.pop(place.process, None)
        self.disturbed(f"{place.name} starts as {card.process}", place)
        config = self.config
        if place.name in self._wanted:
            config = replace(config, min_nodes=self._wanted[place.name])
        place.start(self._core(card, config, place.clock.now))
        if self.has_trainers and card.role is ProcessRole.MEMBER:
            self._begin_training(place, None if before is None else before.saved)
        self.dialling.begin(place)

    def _begin_training(self, place: SimulatedProcess, saved: SimulatedCheckpoint | None) -> None:
        step_log = self.invariants.step_log
        watch = TrainerWatch(step_log.settled, step_log.applied, step_log.replaced, step_log.lost)
        trainer = SimulatedTrainer(place, self.network, self._states, watch, self._trainers.get)
        trainer.saves = self.saves_checkpoints
        self._trainers[place.process] = trainer
        if saved is not None:
            trainer.load(saved)

    def trainer_of(self, name: str) -> SimulatedTrainer | None:
        """The trainer of a process, or of the last one in its place."""
        return self._trainers.get(self.place(name).process)

    def place(self, name: str) -> SimulatedProcess:
        """The place of this name."""
        if name not in self.places:
            msg = f"There is no process {name!r}; there are: {', '.join(self.places) or 'none'}."
            raise ValueError(msg)
        return self.places[name]

    def named(self, names: Iterable[str]) -> list[SimulatedProcess]:
        """The places of these names."""
        return [self.place(name) for name in names]

    def on_machine(self, host: str) -> list[SimulatedProcess]:
        """All places of one machine."""
        return [place for place in self.places.values() if place.host == host]

    # --- what processes need of their surroundings ---

    def disturbed(self, what: str, place: SimulatedProcess | None = None) -> None:
        """Something happens to the cluster from outside; to one process, or to the network."""
        self.changes += 1
        if place is not None:
            place.touched_at = self.clock.now
        self.invariants.disturbed()
        if self._tell is not None:
            self.tell("", what)

    def tell(self, who: str, what: object) -> None:
        """Add a line to the trace, if there is one."""
        if self._tell is not None:
            self._tell(f"{self.clock.now:8.4f}  {who:<3} {what}")

    def sends(self, process: SimulatedProcess, to: ProcessId, message: Any) -> None:
        """A message is about to leave."""
        self.invariants.sends(process, to, message)
        if self._tell is not None:
            who = self.invariants.names.who
            self.tell(process.name, f"→ {in_short(to, who)}: {in_short(message, who)}")
        if self.triggers:
            kind = type(message).__name__
            for trigger in [t for t in self.triggers if t[:2] == (process.name, kind)]:
                self.triggers.remove(trigger)
                trigger[2]()

    def receives(self, process: SimulatedProcess, message: Commit | Relayed) -> None:
        """A process takes in a commit, perhaps by way of another."""
        if isinstance(message, Relayed):
            content = decode(message.content) if message.to == process.process else None
            if not isinstance(content, Commit):
                return
            message = content
        self.invariants.families.receives(process.process, message)

    def wants(
        self, process: SimulatedProcess, effect: effects.ProbePort | effects.ConnectTo
    ) -> None:
        """A core asks for a probe or an acquaintance."""
        if isinstance(effect, effects.ProbePort):
            self.dialling.probe(process, effect)
        else:
            self.dialling.meet(process, effect)

    def counts(self, process: SimulatedProcess, sent: int) -> None:
        """A process has sent this many messages within a second."""
        self.invariants.calm.counted(process, sent)

    def lost_connection(self, process: SimulatedProcess, peer: ProcessId) -> None:
        """A connection of a process has ended."""
        if self._tell is not None:
            self.tell(process.name, f"has lost its connection to {self.invariants.names.who(peer)}")
        self.dialling.hasten(process)

    def tells(self, process: SimulatedProcess, effect: effects.Effect) -> None:
        """A core has decided something."""
        if self._tell is not None:
            self.tell(process.name, effect.event if isinstance(effect, effects.Note) else effect)
        self.changes += 1
        self.invariants.tells(process, effect)
        trainer = self._trainers.get(process.process)
        if trainer is not None:
            trainer.tells(effect)

    def changed(self, process: SimulatedProcess) -> None:
        """The view or state of a core has changed."""
        self.changes += 1
        self.invariants.changed(process)

    def restless(self, process: SimulatedProcess) -> None:
        """A core wants to be woken again and again."""
        self.invariants.restless(process)

    # --- who does what ---

    def train(self, *, saving: bool = False) -> None:
        """Let processes that start from now on train; ``saving``: and write checkpoints."""
        self.has_trainers, self.saves_checkpoints = True, saving

    # --- faults ---

    def kill(self, *names: str) -> None:
        """End processes at once; their machines close the connections and refuse new ones."""
        for place in self.named(names):
            if place.core is not None:
                self.disturbed(f"{place.name} is killed", place)
                place.end("the connection was closed")

    def unplug(self, *names: str) -> None:
        """Take the power from machines: everything on them is gone, silently."""
        for place in self.named(names):
            self.disturbed(f"the machine of {place.name} loses its power", place)
            self._boots[place.host] = self._boots.get(place.host, 0) + 1
            for other in self.on_machine(place.host):
                other.end("", silently=True)

    def pause(self, *names: str) -> None:
        """Stop processes as SIGSTOP does; connections stay."""
        for place in self.named(names):
            if place.is_running:
                self.disturbed(f"{place.name} is stopped", place)
                place.stop()

    def suspend(self, *names: str) -> None:
        """Stop processes and their clocks, as a closed laptop does."""
        for place in self.named(names):
            if place.is_running:
                self.disturbed(f"{place.name} is suspended", place)
                place.stop(clock_too=True)

    def wake(self, *names: str) -> None:
        """Let stopped or suspended processes continue."""
        for place in self.named(names):
            if place.is_alive and place.is_stopped:
                self.disturbed(f"{place.name} continues", place)
                self.invariants.ran_late()
                place.wake()
                self.invariants.woke(place)

    def cut(
        self, left: Iterable[str], right: Iterable[str], *, one_way: bool = False, keep: bool = True
    ) -> None:
        """Let nothing pass between machines; ``keep``: what is sent arrives after all, later."""
        others = [place.host for place in self.named(right)]
        for place in self.named(left):
            for host in others:
                if host != place.host:
                    self.network.cut(place.host, host, keep=keep)
                    if not one_way:
                        self.network.cut(host, place.host, keep=keep)
        self.disturbed("a cut")

    def heal(self, left: Iterable[str] = (), right: Iterable[str] = ()) -> None:
        """Mend the cuts between these machines, or all."""
        others = [place.host for place in self.named(right)]
        for place in self.named(left):
            for host in others:
                self.network.heal(place.host, host)
                self.network.heal(host, place.host)
        if not others:
            self.network.heal_all()
        self.disturbed("a cut is mended")

    def jump(self, name: str, seconds: float) -> None:
        """Let the clock of a process leap ahead."""
        self.disturbed(f"the clock of {name} leaps ahead by {seconds:g} s", self.place(name))
        self.invariants.ran_late()
        self.place(name).jump(seconds)

    def drift(self, name: str, rate: float) -> None:
        """Let the clock of a process run faster or slower from now on."""
        self.disturbed(f"the clock of {name} runs at {rate:g} times the speed", self.place(name))
        self.place(name).drift(rate)

    def flap(
        self, left: Iterable[str], right: Iterable[str], *, down: float, up: float, times: int
    ) -> None:
        """Cut links, mend them and so on, from now on, until ``calm`` or the last mending."""
        sides = tuple(left), tuple(right)
        for count in range(times):
            begin = count * (down + up)
            self._flaps.append(self.clock.after(begin, self.cut, *sides))
            self._flaps.append(self.clock.after(begin + down, self.heal, *sides))

    def lag(self, source: str, target: str, shortest: float, longest: float) -> None:
        """Let what one machine sends to another take this long, in this direction only."""
        quality = LinkQuality(shortest, longest, self.network.quality.loss)
        self.disturbed(f"from {source} to {target}: {quality}")
        self.network.shape(self.place(source).host, self.place(target).host, quality)

    def slow(self, name: str, share: float) -> None:
        """Give a process this share of a processor."""
        self.disturbed(f"{name} has {share:g} of a processor", self.place(name))
        self.invariants.ran_late()
        self.place(name).slow_down(share)

    def firewall(self, *names: str) -> None:
        """Let machines drop connections to ports of the dead instead of refusing them."""
        for place in self.named(names):
            self.dialling.firewalls.add(place.host)

    def continue_without_missing(self, name: str) -> None:
        """Let a person tell a process to continue without those it misses."""
        self.disturbed(f"{name} is asked to continue without the missing", self.place(name))
        self.invariants.families.told_to_continue(self.place(name).process)
        self.place(name).ask(
            lambda core, now: cast("_ContinueCheck", core).continue_without_missing(now)
        )

    def shape(self, quality: LinkQuality) -> None:
        """Give all links this quality from now on."""
        self.disturbed(f"links: {quality}")
        self.network.quality = quality

    def leave(self, *names: str) -> None:
        """Let processes leave and end."""
        for place in self.named(names):
            if place.is_running:
                self.disturbed(f"{place.name} leaves", place)
                place.ask(ClusterCore.leave)
                place.end("the process has left")

    def step_down(self, name: str) -> None:
        """Let a process hand over rank 0, if it has it."""
        self.disturbed(f"{name} is asked to step down", self.place(name))
        # Not within whatever it is doing just now: this may happen as it sends a message.
        self.clock.after(0.0, self.place(name).ask, ClusterCore.step_down)

    def set_steps(self, name: str, steps: int) -> None:
        """Let a process have committed this many training steps."""
        core = self.place(name).core
        if core is not None:
            core.samples = steps

    def when_sends(self, name: str, message: str, action: Callable[[], None]) -> None:
        """Do something, once, just before a process sends a message of this kind."""
        self.triggers.append((name, message, action))

    def calm(self) -> None:
        """End all faults: mend, wake, forget what was to happen; the dead stay dead."""
        self.triggers.clear()
        for flap in self._flaps:
            flap.cancel()
        self._flaps.clear()
        self.network.heal_all()
        self.network.shape_alike()
        self.shape(LinkQuality())
        for place in self.places.values():
            place.drift(1.0)
            if place.share < 1:
                self.invariants.ran_late()
            place.slow_down(1.0)
            self.wake(place.name)

    def settle(self) -> None:
        """Demand that all who live find together, and stay so; raises a Violation otherwise.

        Where some are dead, the others may also wait, if they say for whom, in a view or without
        one; then the dead are started again, and all must find together.
        """
        patience = self.invariants.patience
        if self._settles(self.invariants.bounds.settling + patience):
            self._settle_training()
            return
        may_wait = any(not place.is_alive for place in self.places.values())
        if not (may_wait and self.invariants.why_not_waiting(self.dialling) is None):
            bounds = self.invariants.bounds
            if self._settles(bounds.converging - bounds.settling):
                self._settle_training()
                return
            why = self.invariants.why_not_waiting(self.dialling) if may_wait else ""
            if why is not None:
                raise Violation(
                    f"{bounds.converging:g} s after the last fault "
                    f"{self.invariants.why_not_converged()}; {why}; {self.summary()}"
                )
        self._restart_the_dead()

    def _settle_training(self) -> None:
        """Demand that all in the view train, if need be after the dead are started again."""
        if not self._check_training():
            self._restart_the_dead()

    def _restart_the_dead(self) -> None:
        self.needed_the_dead = True
        self.restart(*self.places)
        self.settle()

    def _settles(self, within: float) -> bool:
        begun = self.clock.now
        end = begun + within
        while self.run_until(self._is_converged, within=end - self.clock.now):
            self.settled_in = self.clock.now - begun
            if not self.run_until(lambda: not self._is_converged(), within=STAYING):
                return True
        return False

    def _check_training(self) -> bool:
        """Demand that all who are in the view make a step, unless the state of one is lost.

        False if they rightly wait for processes that are dead, which no process can know.
        """
        names = [name for name, place in self.places.items() if place.is_alive]
        trainers = [each for name in names if (each := self.trainer_of(name)) is not None]
        begun = [(trainer, trainer.value) for trainer in trainers]
        end = self.clock.now + self.invariants.bounds.settling
        while idle := [trainer for trainer, value in begun if trainer.value is value]:
            if any(trainer.is_lost for trainer in trainers):
                return True
            if self.clock.now >= end:
                unknown = self.invariants.unknown_deaths(self.dialling)
                if all(each.awaited and unknown.issuperset(each.awaited) for each in idle):
                    return False
                who = ", ".join(trainer.process.name for trainer in idle)
                raise Violation(
                    f"{who} made no step within {self.invariants.bounds.settling:g} s in one view "
                    f"with all others; {self.summary()}"
                )
            self.run(STAYING / 2)
        return True

    def _is_converged(self) -> bool:
        return self.invariants.why_not_converged() is None

    # --- time ---

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self.clock.advance(seconds)

    def run_until(self, condition: Callable[[], bool], *, within: float) -> bool:
        """Let time pass until something is so; False if it is not within this many seconds."""
        end = self.clock.now + within
        while not condition():
            seen = self.changes
            while self.changes == seen:  # nothing that a condition could ask about is new
                if not self.clock.step(end):
                    self.clock.advance_to(end)
                    return condition()
        return True

    # --- questions ---

    def state_of(self, name: str) -> ClusterState:
        """Where a process stands; one that is dead counts as LEFT."""
        core = self.place(name).core
        return ClusterState.LEFT if core is None else core.state

    def view_of(self, name: str) -> View | None:
        """The view of a process; None if it is in none."""
        core = self.place(name).core
        return None if core is None else core.view

    def in_one_view(self, *names: str) -> bool:
        """Whether exactly these are at work in one view."""
        places = self.named(names)
        view = self.view_of(names[0])
        return (
            view is not None
            and set(view.members) == {place.process for place in places}
            and all(self.view_of(name) == view for name in names)
            and all(self.state_of(name) is ClusterState.ACTIVE for name in names)
        )

    def summary(self) -> str:
        """Where everybody stands, in one line."""
        words = []
        for place in self.places.values():
            view = self.view_of(place.name)
            where = f" in {self.invariants.names.view(view)}" if view else ""
            stopped = ", stopped" if place.is_alive and place.is_stopped else ""
            words.append(f"{place.name} {self.state_of(place.name).value}{where}{stopped}")
        return "; ".join(words)
