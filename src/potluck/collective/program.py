"""Units: a program cut into pieces, with everything decided that can be decided beforehand.

A *unit* is one piece of one step.  Both ends of a stream cut a span at the same places, so a stream
is a list of units on either side.  What a step may wait for (see ``collective.schedule``) becomes
counts: a unit *waits* for a number of events, and every event names the units that it helps.  There
are two: the **value** of a unit is known (stored, or held by a relay), and the unit is **done**
(its value has also been handed to all its streams).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from potluck._types import LinkMatrix
from potluck.collective.call import Purpose
from potluck.collective.fingerprint import Fingerprint
from potluck.compression.codecs import codec_for
from potluck.compression.compressor import forget_the_unreal
from potluck.errors import MalformedFrame
from potluck.schedule import planner
from potluck.schedule.planner import Plan, Planner, keeps
from potluck.schedule.reduce import ReduceOp
from potluck.schedule.schedule import Form, Operand, Program, ScheduleStep
from potluck.schedule.task import AlgorithmSettings, Collective, Strategy, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from potluck.collective.call import Call
    from potluck.compression.base import Codec, Floats
    from potluck.compression.strategy import QuantizationType
    from potluck.schedule.planner import CollectiveConfig
    from potluck.schedule.reduce import Array, Dtype


STAGED = 2
"""Pieces held for each source of a step that combines: one comes in while another is waited for."""

NOBODY = -1


class UnitKind(IntEnum):
    """How the value of a unit comes about."""

    SEND = 0
    """It lies in memory."""
    MOVE = 1
    """It comes in, straight to where it belongs."""
    FOLD = 2
    """It is computed from operands."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One piece of one step."""

    kind: UnitKind
    step: ScheduleStep
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Arrival:
    """A unit on the stream of one of its sources."""

    unit: int
    operand: int
    """Which of the unit's sources the stream is."""
    after_value: int = NOBODY
    """The unit whose value must be known before there is room for this one."""
    after_done: int = NOBODY
    """The unit that must be done before there is room for this one."""


@dataclass(frozen=True)
class CompiledProgram:
    """A program, ready to be run."""

    program: Program
    units: tuple[Unit, ...]
    """In the order in which they could be worked off one by one."""
    waits: tuple[int, ...]
    """How many events each unit waits for: its arrivals (unless it moves), and what it reads or
    overwrites."""
    on_value: tuple[tuple[int, ...], ...]
    on_done: tuple[tuple[int, ...], ...]
    incoming: dict[int, tuple[Arrival, ...]]
    outgoing: dict[int, tuple[int, ...]]


class _Compiler:
    """Cuts one program."""

    def __init__(self, program: Program, piece: int, *, stages_all: bool) -> None:
        self._program = program
        self._piece = piece
        self._stages_all = stages_all
        self.units: list[Unit] = []
        self._first: list[int] = []
        for step in program.steps:
            self._first.append(len(self.units))
            moves = self._moves(step)
            kind = UnitKind.SEND if step.only_sends else UnitKind.MOVE if moves else UnitKind.FOLD
            self.units += [
                Unit(kind, step, start, min(start + piece, step.stop))
                for start in range(step.start, step.stop, piece)
            ]
        self.waits = [0] * len(self.units)
        self.on_value: list[list[int]] = [[] for _ in self.units]
        self.on_done: list[list[int]] = [[] for _ in self.units]

    def _moves(self, step: ScheduleStep) -> bool:
        return step.moves and not self._stages_all

    def units_of(self, index: int) -> range:
        """The units of a step."""
        steps = self._program.steps
        count = -(-steps[index].length // self._piece)
        return range(self._first[index], self._first[index] + count)

    def connect(self) -> None:
        """Write down who waits for whom."""
        for index, step in enumerate(self._program.steps):
            previous = NOBODY
            for unit in self.units_of(index):
                stop = self.units[unit].stop
                for other in step.reads:
                    self._await(unit, self._reaching(other, stop), self.on_value)
                for other in step.overwrites:
                    self._await(unit, self._reaching(other, stop), self.on_done)
                if not step.sources and step.into is not None and previous != NOBODY:
                    self._await(unit, previous, self.on_value)  # memory fills from the front
                if not self._moves(step):
                    self.waits[unit] += len(step.sources)
                previous = unit

    def _reaching(self, index: int, stop: int) -> int:
        """The unit with which a step has got as far as ``stop``, or to its end; maybe none."""
        step = self._program.steps[index]
        if stop <= step.start:
            return NOBODY
        last = min(stop, step.stop) - 1
        return self._first[index] + (last - step.start) // self._piece

    def _await(self, unit: int, other: int, events: list[list[int]]) -> None:
        if other != NOBODY:
            events[other].append(unit)
            self.waits[unit] += 1

    def arrivals(self, peer: int, indices: tuple[int, ...]) -> tuple[Arrival, ...]:
        """What comes in on a peer's stream."""
        found: list[Arrival] = []
        for index in indices:
            step = self._program.steps[index]
            operand = step.sources.index(peer)
            for place, unit in enumerate(self.units_of(index)):
                freed = unit - STAGED if place >= STAGED and not self._moves(step) else NOBODY
                if step.into is None:
                    found.append(Arrival(unit, operand, after_done=freed))
                else:
                    found.append(Arrival(unit, operand, after_value=freed))
        return tuple(found)


def compile_program(program: Program, piece: int, *, stages_all: bool = False) -> CompiledProgram:
    """Cut a program into units of ``piece`` elements.

    With ``stages_all`` nothing is received straight into its destination: it has to be decoded.
    """
    cutter = _Compiler(program, piece, stages_all=stages_all)
    cutter.connect()
    incoming = {peer: cutter.arrivals(peer, steps) for peer, steps in program.incoming.items()}
    outgoing = {
        peer: tuple(unit for index in steps for unit in cutter.units_of(index))
        for peer, steps in program.outgoing.items()
    }
    return CompiledProgram(
        program,
        tuple(cutter.units),
        tuple(cutter.waits),
        tuple(map(tuple, cutter.on_value)),
        tuple(map(tuple, cutter.on_done)),
        incoming,
        outgoing,
    )


# --------------------------------------------------------------------------------------------------
# The memory of one operation on one rank: the caller's arrays, and the pieces that are staged.

BLOCK = 1 << 16
"""Bytes that are added up at a time: with their operands they fit into the processor's cache."""

MARGIN = 256
"""Bytes around a slot: a sealed frame is received with its header and tag, and opened in place."""

KEPT = 4 << 20
"""Bytes of slots that stay for the next operation: fresh memory is slow to touch."""


def bytes_of(array: Array) -> memoryview:
    """The bytes of an array; numpy's own view knows every type, Python's does not."""
    return memoryview(array.view(np.uint8))  # type: ignore[arg-type] # typeshed misses the protocol


class Slot:
    """A piece of memory of our own; or one that a peer wrote and we may read for a while."""

    __slots__ = ("_give_back", "_own", "array", "is_borrowed", "raw", "size", "wider")

    def __init__(self, size: int) -> None:
        self.size = size
        whole = np.empty(MARGIN + size + MARGIN, np.uint8)
        self.array = self._own = whole[MARGIN : MARGIN + size]
        self._give_back: Callable[[], None] | None = None
        self.is_borrowed = False
        """Whether it is the memory of a peer, who may change it at any time."""
        self.raw = bytes_of(self.array)
        self.wider = bytes_of(whole)
        """With the margins."""

    def view(self, dtype: Dtype, count: int) -> Array:
        """Its front, as elements."""
        return self.array[: count * dtype.itemsize].view(dtype)

    def borrow(self, array: Array, give_back: Callable[[], None]) -> None:
        """Stand for the memory of a peer until :meth:`release`; ``raw`` stay our own."""
        self.array, self._give_back, self.is_borrowed = array, give_back, True

    def release(self) -> None:
        """Stand for our own memory, with any content."""
        if self._give_back is not None:
            self._give_back()
            self.array, self._give_back, self.is_borrowed = self._own, None, False

    def make_own(self) -> None:
        """Copy the content to our own memory, where nothing else changes it."""
        if self._give_back is not None:
            size = min(self._own.size, self.array.size)
            self._own[:size] = self.array[:size]
            self.release()


class SlotPool:
    """Slots that are used again; all of one size, which may grow."""

    def __init__(self) -> None:
        self._size = 0
        self._free: list[Slot] = []

    def fit(self, size: int) -> None:
        """Have slots of at least ``size`` bytes from now on, and not of many times that."""
        if not size <= self._size <= 4 * size:
            self._size = size
            self._free.clear()

    def take(self) -> Slot:
        """A slot, with any content."""
        return self._free.pop() if self._free else Slot(self._size)

    def give_back(self, slot: Slot) -> None:
        """Have a slot back."""
        if slot.is_borrowed:
            slot.release()
        if slot.size == self._size and len(self._free) * slot.size < KEPT:
            self._free.append(slot)


class CallMemory:
    """The arrays of a call, by place and coordinate, and how values are computed in them."""

    def __init__(self, units: CompiledProgram, call: Call, pool: SlotPool) -> None:
        program, reducer = units.program, call.reducer
        self._reducer = reducer
        self._world_size = call.task.world_size
        self._pool = pool
        self._folds_simply = reducer is not None and not reducer.is_wide
        self.dtype: Dtype = call.target.dtype
        self.wide: Dtype = self.dtype
        summed = call.target
        if reducer is not None and reducer.is_wide:
            self.wide = reducer.wide
            if program.needs_sum:
                summed = np.empty(call.target.size, self.wide)
        self._arrays = (call.source, call.target, summed)
        self._starts = (program.input.start, program.output.start, program.output.start)
        self._raw: list[memoryview | None] = [None, None, None]
        self._spare: Array | None = None

    def raw(self, place: Operand, start: int, stop: int) -> memoryview:
        """The bytes of a span."""
        raw = self._raw[place]
        if raw is None:
            raw = self._raw[place] = bytes_of(self._arrays[place])
        size, offset = self._arrays[place].itemsize, self._starts[place]
        return raw[(start - offset) * size : (stop - offset) * size]

    def cells(self, place: Operand, start: int, stop: int) -> Array:
        """The elements of a span."""
        offset = self._starts[place]
        return self._arrays[place][start - offset : stop - offset]

    def form(self, form: Form) -> Dtype:
        """The type in which elements of a form travel."""
        return self.wide if form is Form.PARTIAL else self.dtype

    def size(self, form: Form, count: int) -> int:
        """Bytes that ``count`` elements take on the wire."""
        return count * (self.wide if form is Form.PARTIAL else self.dtype).itemsize

    def value(self, unit: Unit, held: Slot | None) -> memoryview:
        """The bytes of a value that is known, as they travel."""
        step = unit.step
        if held is not None:
            size = (unit.stop - unit.start) * self.form(step.gives).itemsize
            return held.raw[:size]
        place = step.own if step.into is None else step.into
        assert place is not None
        return self.raw(place, unit.start, unit.stop)

    def fold(self, unit: Unit, staged: Sequence[Slot]) -> Slot | None:
        """Compute the value of a unit and store it; or return the slot that holds it, if a relay.

        That may be one of those staged; the others are the caller's to give back.
        """
        step, count = unit.step, unit.stop - unit.start
        if (
            len(staged) == 1
            and self._folds_simply
            and step.own is not None
            and step.into is not None
        ):
            self._fold_two(unit, staged[0])
            return None
        operands = [
            slot.view(self.form(form), count) for slot, form in zip(staged, step.takes, strict=True)
        ]
        if step.own is not None:
            operands.insert(step.own_at, self.cells(step.own, unit.start, unit.stop))
        held: Slot | None = None
        if step.into is None:
            held = self._hold(staged, operands)
            out = held.view(self.form(step.gives), count)
        else:
            out = self.cells(step.into, unit.start, unit.stop)
        if len(operands) == 1 or out.nbytes <= BLOCK:
            self._compute(step, operands, out)
        else:  # what is added up block by block is still in the cache for the next operand
            length = BLOCK // self.wide.itemsize
            for at in range(0, count, length):
                parts = [operand[at : at + length] for operand in operands]
                self._compute(step, parts, out[at : at + length])
        return held

    def _fold_two(self, unit: Unit, slot: Slot) -> None:
        """The commonest case, as short as can be: what came and what is here become one."""
        step, start, stop = unit.step, unit.start, unit.stop
        reducer = self._reducer
        assert reducer is not None
        assert step.own is not None
        assert step.into is not None
        came = slot.view(self.dtype, stop - start)
        mine, out = self.cells(step.own, start, stop), self.cells(step.into, start, stop)
        first, second = (came, mine) if step.own_at else (mine, came)
        reducer.ufunc(first, second, out=out)
        if step.final and reducer.op is ReduceOp.MEAN:  # else it is finished
            reducer.finish(out, out, world_size=self._world_size)

    def _hold(self, staged: Sequence[Slot], operands: Sequence[Array]) -> Slot:
        """A slot for a value that is not stored: that of the first operand, if it may be used."""
        narrow = operands[0].dtype != self.wide
        unfit = not staged or narrow or staged[0].is_borrowed
        return self._pool.take() if unfit else staged[0]

    def _compute(self, step: ScheduleStep, operands: list[Array], out: Array) -> None:
        reducer = self._reducer
        if reducer is None:
            if len(operands) == 1:
                _copy(operands[0], out)
            return
        spare = self._spare_for(out) if step.own_at > 1 else None
        if not step.final:
            reducer.fold(operands, out, own_at=step.own_at, spare=spare)
        elif out.dtype == reducer.wide:
            if len(operands) > 1:
                reducer.fold(operands, out, own_at=step.own_at, spare=spare)
            else:
                _copy(operands[0], out)
            reducer.finish(out, out, world_size=self._world_size)
        else:
            slot = self._pool.take()
            partial = slot.view(reducer.wide, out.size)
            reducer.fold(operands, partial)
            reducer.finish(partial, out, world_size=self._world_size)
            self._pool.give_back(slot)

    def _spare_for(self, out: Array) -> Array:
        """Room for what is added up before the own operand, which ``out`` may still hold."""
        if self._spare is None:
            self._spare = np.empty(BLOCK, np.uint8)
        return self._spare[: out.nbytes].view(out.dtype)


def _copy(source: Array, target: Array) -> None:
    """Copy, unless both are the same memory: then each cell is shared with itself."""
    if not np.may_share_memory(source, target):
        np.copyto(target, source)


# --------------------------------------------------------------------------------------------------
# The memory of an operation whose values travel encoded.
#
# A contribution is encoded when its stream has room for it.  The rank at which a sum is final
# decodes what came, adds it up in the order of ranks in float32, encodes the result once, keeps the
# decoded form and sends the encoded one: so all ranks end with the same bits, and the error does
# not grow with the number of hops.

FLOAT32 = np.dtype(np.float32)


class CodedMemory(CallMemory):
    """The arrays of a call, and what becomes of them on the wire.

    What the codec leaves behind is written to ``call.residual``: for a contribution where it is
    encoded, for a result at its owner, as much as the owner would have to add to its own part.
    """

    def __init__(self, units: CompiledProgram, call: Call, pool: SlotPool, codec: Codec) -> None:
        super().__init__(units, call, pool)
        self._codec = codec
        self._residual = call.residual
        self._factor = call.task.world_size if self._is_mean(call) else 1
        self._outgoing: dict[int, Slot] = {}

    @staticmethod
    def _is_mean(call: Call) -> bool:
        return call.reducer is not None and call.reducer.op is ReduceOp.MEAN

    def size(self, form: Form, count: int) -> int:  # noqa: ARG002 - there is one form only
        """Bytes that ``count`` elements take on the wire."""
        return self._codec.size(count)

    # -- out -----------------------------------------------------------------------------------

    def value(self, unit: Unit, held: Slot | None) -> memoryview:
        """The bytes of a value that is known; a contribution is encoded now."""
        count = unit.stop - unit.start
        slot = held
        if slot is None:
            step = unit.step
            assert step.own is not None
            slot = self._slot_for(step.to)
            left = None if self._residual is None else self._residual[unit.start : unit.stop]
            self._encode(self.cells(step.own, unit.start, unit.stop), slot, left)
        return slot.raw[: self._codec.size(count)]

    def _slot_for(self, to: tuple[int, ...]) -> Slot:
        """Each stream has one: a pump asks for its next value when the last is on its way."""
        (peer,) = to
        slot = self._outgoing.get(peer)
        if slot is None:
            slot = self._outgoing[peer] = self._pool.take()
        return slot

    def _encode(self, values: Floats, slot: Slot, left: Floats | None = None) -> None:
        """Encode values; write what that leaves out to ``left``, if it is given."""
        out = slot.array[: self._codec.size(values.size)]
        if left is None:
            self._codec.encode(values, out)
            return
        try:
            is_finite = self._codec.encode_leaving(values, out, left)
        except MalformedFrame as error:
            raise _undecodable(None, error) from None
        if not is_finite:
            forget_the_unreal(left)

    # -- in ------------------------------------------------------------------------------------

    def fold(self, unit: Unit, staged: Sequence[Slot]) -> Slot | None:
        """Decode what came; add it up where the sum is final, and encode the result."""
        step = unit.step
        assert step.into is not None
        for slot in staged:  # what is checked must not change afterwards
            slot.make_own()
        out = self.cells(step.into, unit.start, unit.stop)
        if not step.final:
            (slot,), (source,) = staged, step.sources
            self._decode(slot, out, source)
            return slot if step.to else None
        total = self._pool.take()
        sums = total.view(FLOAT32, out.size)
        self._add_up(unit, staged, sums)
        assert self._reducer is not None
        self._reducer.finish(sums, sums, world_size=self._world_size)
        coded = self._pool.take()
        self._encode(sums, coded)
        self._decode(coded, out, None)
        if self._residual is not None:
            left = self._residual[unit.start : unit.stop]
            np.subtract(sums, out, out=left)
            left *= self._factor
            forget_the_unreal(left)
        self._pool.give_back(total)
        if step.to:
            return coded
        self._pool.give_back(coded)
        return None

    def _add_up(self, unit: Unit, staged: Sequence[Slot], sums: Floats) -> None:
        """All operands from left to right, the own one as it is."""
        step = unit.step
        assert step.own is not None
        own = self.cells(step.own, unit.start, unit.stop)
        spare = self._pool.take()
        decoded = spare.view(FLOAT32, sums.size)
        before = step.own_at
        for index, (slot, source) in enumerate(zip(staged, step.sources, strict=True)):
            if index or not before:
                self._decode(slot, decoded, source)
                np.add(sums if index else own, decoded, out=sums)
            else:
                self._decode(slot, sums, source)
            if index + 1 == before:
                sums += own
        if not staged:
            np.copyto(sums, own)
        self._pool.give_back(spare)

    def _decode(self, slot: Slot, out: Floats, source: int | None) -> None:
        try:
            self._codec.decode(slot.array[: self._codec.size(out.size)], out)
        except MalformedFrame as error:
            raise _undecodable(source, error) from None


def _undecodable(source: int | None, error: MalformedFrame) -> MalformedFrame:
    """The error for a piece that a rank sent, or that this one made."""
    who = "This rank made" if source is None else f"Rank {source} sent"
    return MalformedFrame(f"{who} a piece that cannot be decoded", rank=source, cause=error)


# --------------------------------------------------------------------------------------------------
# Plans of a group: for each kind of call, how it is done; the same on all ranks.
#
# A plan follows from the task, the configuration and the links as the ranks have agreed on them, so
# every rank makes it alone and all make the same.  What was compiled for a plan is kept.

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

PLANS_KEPT = 256
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
class CompiledCall:
    """Everything about a call that does not depend on its memory."""

    plan: Plan
    units: CompiledProgram
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


class PlanCache:
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
        self._planner = Planner(self._links, config=self._config)
        self._compiled: dict[Key, CompiledCall] = {}
        self._known: dict[tuple[int, ...], tuple[CompiledCall, Key]] = {}
        self.is_surveyed = False

    @property
    def links(self) -> LinkMatrix:
        """The links that plans are made for; zero where a link was not measured."""
        return self._links

    @property
    def measures_links(self) -> bool:
        """Whether links are to be measured."""
        return self._config is None or self._config.measure_links

    def learn(self, links: LinkMatrix, call: Call, operations: int) -> None:
        """Use other links, if that makes a difference for a call like this.

        All ranks do so with the same links, at the same operation.
        """
        planner = Planner(links, config=self._config)
        itemsize = call.target.itemsize
        if self.is_surveyed:
            current, best = self.plan(call), self._plan(planner, call)
            price = planner.reprice(current, call.task, itemsize=itemsize)
            if keeps(price, best.price, operations):
                return
        self.is_surveyed = True
        self._links, self._planner = links, planner
        self._compiled.clear()
        self._known.clear()

    def compiled(self, call: Call) -> CompiledCall:
        """How to do a call."""
        # Most calls are made of the very objects of an earlier one, which is found out sooner.
        dtype = call.target.dtype
        parts = call.task, dtype, call.reducer, call.strategy, call.codec, call.purpose
        identity = tuple(map(id, parts))
        known = self._known.get(identity)
        if known is None:
            if len(self._known) >= PLANS_KEPT:
                self._known.clear()
            # The parts are kept as well: no other object can get their numbers meanwhile.
            known = self._known[identity] = (self._find(call), parts)
        return known[0]

    def _find(self, call: Call) -> CompiledCall:
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
            if len(self._compiled) >= PLANS_KEPT:
                del self._compiled[next(iter(self._compiled))]
            found = self._compiled[key] = self._compile(call)
        return found

    def plan(self, call: Call) -> Plan:
        """The plan of a call."""
        return self._plan(self._planner, call)

    def _plan(self, planner: Planner, call: Call) -> Plan:
        itemsize = call.target.itemsize
        wide = itemsize if call.reducer is None else call.reducer.wide.itemsize
        strategy = call.strategy
        if call.codec:
            strategy = DIRECT
        elif call.purpose in _UNRELAYED and not call.task.collective.reduces:
            is_direct = call.task.collective is Collective.ALL_GATHER
            strategy = DIRECT if is_direct else CENTRAL
        return planner.plan(call.task, itemsize=itemsize, wide=wide, strategy=strategy)

    def _codec(self, kind: QuantizationType) -> Codec:
        """One of each is enough: a group does one operation at a time."""
        if kind not in self._codecs:
            self._codecs[kind] = codec_for(kind)
        return self._codecs[kind]

    def _compile(self, call: Call) -> CompiledCall:
        plan = self.plan(call)
        itemsize = call.target.itemsize
        wide = itemsize if call.reducer is None else call.reducer.wide.itemsize
        codec = None if call.codec is None else self._codec(call.codec)
        # The fewer bytes a value has, the more a piece may hold before it is long on the wire.
        layout = plan.layout(wide if codec is None else max(1, codec.size(_MANY) // _MANY))
        schedule = planner.schedule(plan.algorithm, call.task, layout)
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
            if unit.kind is UnitKind.FOLD or codec is not None
        )
        longest = max(staged, default=0)
        sent = sum(
            size(units.units[index].stop - units.units[index].start)
            for queue in units.outgoing.values()
            for index in queue
        )
        nbytes = call.task.total * itemsize
        return CompiledCall(
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


def confirmation(rank: int, world_size: int) -> CompiledProgram:
    """A barrier, as the end of an operation in which not every rank hears of every other."""
    task = Task.whole(Collective.BARRIER, world_size, 1)
    program = planner.schedule("doubling", task, AlgorithmSettings.plain(world_size)).program(rank)
    return compile_program(program, 1)
