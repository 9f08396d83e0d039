"""The world in which simulated processes live: clock, network, machines, and whoever looks on.

It starts processes, lets them reach each other, shows everything they do to the invariants, and
writes the trace.  :class:`~potluck.testing.cluster.SimulatedCluster` adds what a test does to it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from random import Random
from typing import Any

import msgspec

from potluck.core import cluster_effects as effects
from potluck.core.cluster import ClusterConfig, ClusterCore
from potluck.core.cluster_cards import ProcessCard, Role
from potluck.core.cluster_messages import Commit, Relayed, decode
from potluck.testing.clock import Appointment, VirtualClock
from potluck.testing.dialling import Dialling
from potluck.testing.invariants import Bounds, Invariants
from potluck.testing.network import LinkQuality, LossyNetwork
from potluck.testing.process import CoreFactory, SimulatedProcess
from potluck.testing.trace import in_short
from potluck.testing.trainer import Checkpoint, SimulatedTrainer
from potluck.testing.trainer_state import States
from potluck.vocabulary import NodeId, ProcessId

__all__ = ["SimulatedWorld"]

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"


class SimulatedWorld:
    """Machines, what runs on them, and the links between them."""

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

    def start(self, *names: str, role: Role = Role.MEMBER) -> None:
        """Start new processes, each on a machine of its own."""
        for name in names:
            self.start_on(name, name, role=role)

    def start_on(self, name: str, host: str, *, role: Role = Role.MEMBER, node: str = "") -> None:
        """Start a new process on the machine of another; ``node``: with the key of that one."""
        if name in self.places:
            msg = f"There is a process {name!r} already; restart() starts it again."
            raise ValueError(msg)
        slot = sum(place.host == host for place in self.places.values())
        card = ProcessCard(
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
        self.places[name] = SimulatedProcess(self, card, host, name)
        self._begin(self.places[name])

    def set_wanted(self, name: str, count: int) -> None:
        """Let a process that starts under this name ask for at least so many founders."""
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
        if self.has_trainers and card.role is Role.MEMBER:
            self._begin_training(place, None if before is None else before.saved)
        self.dialling.begin(place)

    def _begin_training(self, place: SimulatedProcess, saved: Checkpoint | None) -> None:
        trainer = SimulatedTrainer(
            place, self.network, self._states, self.invariants.ledger, self._trainers.get
        )
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

    def wants(self, process: SimulatedProcess, effect: effects.Probe | effects.Meet) -> None:
        """A core asks for a probe or an acquaintance."""
        if isinstance(effect, effects.Probe):
            self.dialling.probe(process, effect)
        else:
            self.dialling.meet(process, effect)

    def counts(self, process: SimulatedProcess, sent: int) -> None:
        """A process has sent this many messages within a second."""
        self.invariants.calm.counted(process, sent)

    def lost_lane(self, process: SimulatedProcess, peer: ProcessId) -> None:
        """A lane of a process has ended."""
        if self._tell is not None:
            self.tell(process.name, f"has lost its lane to {self.invariants.names.who(peer)}")
        self.dialling.hasten(process)

    def tells(self, process: SimulatedProcess, effect: effects.Effect) -> None:
        """A core has decided something."""
        if self._tell is not None:
            self.tell(process.name, getattr(effect, "event", effect))
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


def _node_id(name: str) -> NodeId:
    """32 letters that begin with the name, so that the order of names is the order of ids."""
    digest = hashlib.sha256(name.encode()).digest()
    return NodeId((name.lower() + "".join(_ALPHABET[byte % 32] for byte in digest))[:32])
