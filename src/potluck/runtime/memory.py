"""The memory of one operation on one rank: the caller's arrays, and the pieces that are staged."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from potluck.collective.schedule import Form, Place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.collective.reduce import Array, Dtype
    from potluck.collective.schedule import Step
    from potluck.runtime.call import Call
    from potluck.runtime.units import Unit, Units

__all__ = ["MARGIN", "Memory", "Pool", "Slot"]

BLOCK = 1 << 16
"""Bytes that are added up at a time: with their operands they fit into the processor's cache."""

MARGIN = 256
"""Bytes around a slot: a sealed frame is received with its header and tag, and opened in place."""

KEPT = 4 << 20
"""Bytes of slots that stay for the next operation: fresh memory is slow to touch."""


def octets_of(array: Array) -> memoryview:
    """The bytes of an array; numpy's own view knows every type, Python's does not."""
    return memoryview(array.view(np.uint8))  # type: ignore[arg-type] # typeshed misses the protocol


class Slot:
    """A piece of memory of our own."""

    __slots__ = ("array", "octets", "size", "wider")

    def __init__(self, size: int) -> None:
        self.size = size
        whole = np.empty(MARGIN + size + MARGIN, np.uint8)
        self.array = whole[MARGIN : MARGIN + size]
        self.octets = octets_of(self.array)
        self.wider = octets_of(whole)
        """With the margins."""

    def view(self, dtype: Dtype, count: int) -> Array:
        """Its front, as elements."""
        return self.array[: count * dtype.itemsize].view(dtype)


class Pool:
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
        if slot.size == self._size and len(self._free) * slot.size < KEPT:
            self._free.append(slot)


class Memory:
    """The arrays of a call, by place and coordinate, and how values are computed in them."""

    def __init__(self, units: Units, call: Call, pool: Pool) -> None:
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
        self._octets: list[memoryview | None] = [None, None, None]

    def octets(self, place: Place, start: int, stop: int) -> memoryview:
        """The bytes of a span."""
        octets = self._octets[place]
        if octets is None:
            octets = self._octets[place] = octets_of(self._arrays[place])
        size, offset = self._arrays[place].itemsize, self._starts[place]
        return octets[(start - offset) * size : (stop - offset) * size]

    def cells(self, place: Place, start: int, stop: int) -> Array:
        """The elements of a span."""
        offset = self._starts[place]
        return self._arrays[place][start - offset : stop - offset]

    def form(self, form: Form) -> Dtype:
        """The type in which elements of a form travel."""
        return self.wide if form is Form.PARTIAL else self.dtype

    def size(self, form: Form, count: int) -> int:
        """Bytes of so many elements on the wire."""
        return count * self.form(form).itemsize

    def value(self, unit: Unit, held: Slot | None) -> memoryview:
        """The bytes of a value that is known, as they travel."""
        step = unit.step
        if held is not None:
            size = (unit.stop - unit.start) * self.form(step.gives).itemsize
            return held.octets[:size]
        place = step.own if step.into is None else step.into
        assert place is not None
        return self.octets(place, unit.start, unit.stop)

    def fold(self, unit: Unit, staged: Sequence[Slot]) -> Slot | None:
        """Compute the value of a unit and store it; or return the slot that holds it, if a relay.

        The staged slots are given back, except the one that is returned.
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
        for slot in staged:
            if slot is not held:
                self._pool.give_back(slot)
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
        if step.final:
            reducer.finish(out, out, world_size=self._world_size)
        self._pool.give_back(slot)

    def _hold(self, staged: Sequence[Slot], operands: Sequence[Array]) -> Slot:
        """A slot for a value that is not stored: that of the first operand, if it may be used."""
        narrow = operands[0].dtype != self.wide
        return self._pool.take() if not staged or narrow else staged[0]

    def _compute(self, step: Step, operands: list[Array], out: Array) -> None:
        reducer = self._reducer
        if reducer is None:
            if len(operands) == 1:
                _copy(operands[0], out)
            return
        if not step.final:
            reducer.fold(operands, out, own_at=step.own_at)
        elif out.dtype == reducer.wide:
            if len(operands) > 1:
                reducer.fold(operands, out, own_at=step.own_at)
            else:
                _copy(operands[0], out)
            reducer.finish(out, out, world_size=self._world_size)
        else:
            slot = self._pool.take()
            partial = slot.view(reducer.wide, out.size)
            reducer.fold(operands, partial)
            reducer.finish(partial, out, world_size=self._world_size)
            self._pool.give_back(slot)


def _copy(source: Array, target: Array) -> None:
    """Copy, unless both are the same memory: then each cell is shared with itself."""
    if not np.may_share_memory(source, target):
        np.copyto(target, source)
