"""Plans of a group: for each kind of call, how it is done; the same on all ranks.

A plan follows from the task, the configuration and the links as the ranks have agreed on them, so
every rank makes it alone and all make the same.  What was compiled for a plan is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from potluck.collective import registry
from potluck.collective.compression.codecs import codec_for
from potluck.collective.planner import Plan, Planner, keeps
from potluck.collective.strategies import Strategy
from potluck.collective.task import Collective, Layout, Task
from potluck.runtime.call import Purpose
from potluck.runtime.fingerprint import Fingerprint
from potluck.runtime.units import Kind, Units, compile_program
from potluck.vocabulary import LinkMatrix

if TYPE_CHECKING:
    from potluck.collective.compression.base import Codec
    from potluck.collective.compression.strategy import QuantizationType
    from potluck.collective.config import CollectiveConfig
    from potluck.runtime.call import Call

__all__ = ["Compiled", "Plans"]

DIRECT = Strategy("direct")
"""What a codec goes with: every contribution and every result is encoded once."""

CENTRAL = Strategy("central")
"""Straight from the root, or to it."""

_UNRELAYED = frozenset(
    {
        Purpose.BROADCAST_OBJECT,
        Purpose.ALL_GATHER_OBJECT,
        Purpose.GATHER_OBJECT,
        Purpose.SCATTER_OBJECT,
        Purpose.AUTO_COMPRESSION,
        Purpose.TOP_K,
        Purpose.RANDOM_K,
        Purpose.POWER_SGD,
        Purpose.RECORDS,
    }
)
"""Calls in which a rank is blamed for what came from it: so nothing passes through another rank."""

KEPT = 256
"""Compiled operations that are kept; those not used for longest are dropped."""

_SYNCHRONISING = frozenset(
    {
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
        Collective.BARRIER,
    }
)
"""Collectives in which every rank needs something from every other, if there is anything at all."""

_VARIED = frozenset(range(18, 23))
"""numpy's numbers for text, structures and times, of which there are many each."""

_MANY = 1 << 16
"""Values whose size tells what one takes, about."""

Key: TypeAlias = tuple[object, ...]


def needs_confirming(task: Task) -> bool:
    """Whether an operation may end on one rank while another has not begun."""
    return task.world_size > 1 and (task.collective not in _SYNCHRONISING or not all(task.counts))


@dataclass(frozen=True, slots=True)
class Compiled:
    """Everything about a call that does not depend on its memory."""

    plan: Plan
    units: Units
    fingerprint: Fingerprint
    packed: bytes
    """The fingerprint as bytes."""
    needs_confirming: bool
    peers: tuple[int, ...]
    nbytes: int
    """Bytes of all blocks together: the same on all ranks."""
    sent: int
    """Bytes that this rank sends, all streams together."""
    slot: int
    """Bytes of the longest piece, in the wider type."""
    codec: Codec | None = None
    """How values are written on the wire, unless as they are."""


class Plans:
    """Makes and keeps plans."""

    def __init__(self, rank: int, world_size: int, config: CollectiveConfig | None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._config = config
        self._codecs: dict[QuantizationType, Codec] = {}
        self.forget()

    def forget(self) -> None:
        """Know nothing of the links, as at first: others may not know what we do."""
        self._links = LinkMatrix.uniform(self._world_size, rate=0, latency=0)
        self._planner = Planner(self._links)
        self._compiled: dict[Key, Compiled] = {}
        self._known: dict[tuple[int, ...], tuple[Compiled, Key]] = {}
        self.is_surveyed = False

    @property
    def links(self) -> LinkMatrix:
        """The links that plans are made for; zero where nobody has measured."""
        return self._links

    def learn(self, links: LinkMatrix, call: Call, operations: int) -> None:
        """Use other links, if that makes a difference for a call like this.

        All ranks do so with the same links, at the same operation.
        """
        planner, itemsize = Planner(links), call.target.itemsize
        if self.is_surveyed:
            current, best = self.plan(call), self._plan(planner, call)
            price = planner.reprice(current, call.task, itemsize=itemsize)
            if keeps(price, best.price, operations):
                return
        self.is_surveyed = True
        self._links, self._planner = links, planner
        self._compiled.clear()
        self._known.clear()

    def compiled(self, call: Call) -> Compiled:
        """How to do a call."""
        # Most calls are made of the very objects of an earlier one, which is found out sooner.
        dtype = call.target.dtype
        parts = call.task, dtype, call.reducer, call.strategy, call.codec, call.purpose
        identity = tuple(map(id, parts))
        known = self._known.get(identity)
        if known is None:
            if len(self._known) >= KEPT:
                self._known.clear()
            # The parts are kept as well: no other object can get their numbers meanwhile.
            known = self._known[identity] = (self._find(call), parts)
        return known[0]

    def _find(self, call: Call) -> Compiled:
        reducer, dtype = call.reducer, call.target.dtype
        key = (
            call.task,
            dtype.num,
            dtype.itemsize,
            dtype if dtype.num in _VARIED else dtype.isnative,
            None if reducer is None else reducer.op,
            call.strategy,
            call.codec,
            call.purpose,
        )
        found = self._compiled.get(key)
        if found is None:
            if len(self._compiled) >= KEPT:
                del self._compiled[next(iter(self._compiled))]
            found = self._compiled[key] = self._compile(call)
        return found

    def plan(self, call: Call) -> Plan:
        """The plan of a call."""
        return self._plan(self._planner, call)

    def _plan(self, planner: Planner, call: Call) -> Plan:
        itemsize = call.target.itemsize
        wide = itemsize if call.reducer is None else call.reducer.wide.itemsize
        strategy = call.strategy or self._configured(call.task)
        if call.codec:
            strategy = DIRECT
        elif call.purpose in _UNRELAYED and not call.task.collective.reduces:
            is_direct = call.task.collective is Collective.ALL_GATHER
            strategy = DIRECT if is_direct else CENTRAL
        return planner.plan(call.task, itemsize=itemsize, wide=wide, strategy=strategy)

    def _configured(self, task: Task) -> Strategy | None:
        """What the configuration asks for, if it asks for anything."""
        if self._config is None:
            return None
        config, many = self._config, task.world_size > self._config.num_devices
        chosen: Strategy | None = None
        match task.collective:
            case Collective.ALL_REDUCE:
                chosen = config.global_all_reduce if many else None
                chosen = chosen or config.local_all_reduce
            case Collective.REDUCE:
                chosen = (config.global_reduce if many else None) or config.local_reduce
            case Collective.BROADCAST:
                chosen = (config.global_broadcast if many else None) or config.local_broadcast
        return None if chosen is None or chosen.is_auto else chosen

    def _codec(self, kind: QuantizationType) -> Codec:
        """One of each is enough: a group does one operation at a time."""
        if kind not in self._codecs:
            self._codecs[kind] = codec_for(kind)
        return self._codecs[kind]

    def _compile(self, call: Call) -> Compiled:
        plan = self.plan(call)
        itemsize = call.target.itemsize
        wide = itemsize if call.reducer is None else call.reducer.wide.itemsize
        codec = None if call.codec is None else self._codec(call.codec)
        # The fewer bytes a value has, the more a piece may hold before it is long on the wire.
        layout = plan.layout(wide if codec is None else max(1, codec.size(_MANY) // _MANY))
        schedule = registry.schedule(plan.algorithm, call.task, layout)
        units = compile_program(
            schedule.program(self._rank), layout.piece, stages_all=codec is not None
        )
        peers = tuple(sorted({*units.incoming, *units.outgoing}))
        number = 0 if codec is None else codec.number
        size = codec.size if codec is not None else lambda count: count * wide
        fingerprint = Fingerprint.of(call, plan.identity, codec=number)
        staged = (
            unit.stop - unit.start
            for unit in units.units
            if unit.kind is Kind.FOLD or codec is not None
        )
        longest = max(staged, default=0)
        sent = sum(
            size(units.units[index].stop - units.units[index].start)
            for queue in units.outgoing.values()
            for index in queue
        )
        nbytes = call.task.total * itemsize
        return Compiled(
            plan,
            units,
            fingerprint,
            fingerprint.pack(),
            needs_confirming(call.task),
            peers,
            nbytes,
            sent,
            max(1, longest * wide, size(longest)),
            codec,
        )


def confirmation(rank: int, world_size: int) -> Units:
    """A barrier, as the end of an operation in which not every rank hears of every other."""
    task = Task.whole(Collective.BARRIER, world_size, 1)
    program = registry.schedule("doubling", task, Layout.plain(world_size)).program(rank)
    return compile_program(program, 1)
