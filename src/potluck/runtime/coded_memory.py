"""The memory of an operation whose values travel encoded.

A contribution is encoded when its stream has room for it.  The rank at which a sum is final decodes
what came, adds it up in the order of ranks in float32, encodes the result once, keeps the decoded
form and sends the encoded one: so all ranks end with the same bits, and the error does not grow
with the number of hops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from potluck.collective.compression.feedback import forget_the_unreal
from potluck.collective.reduce import ReduceOp
from potluck.errors import MalformedFrame
from potluck.runtime.memory import Memory, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.collective.compression.base import Codec, Floats
    from potluck.collective.schedule import Form
    from potluck.runtime.call import Call
    from potluck.runtime.memory import Pool
    from potluck.runtime.units import Unit, Units

__all__ = ["CodedMemory", "memory_for"]

FLOAT32 = np.dtype(np.float32)


def memory_for(units: Units, call: Call, pool: Pool, codec: Codec | None) -> Memory:
    """The memory for a call."""
    return Memory(units, call, pool) if codec is None else CodedMemory(units, call, pool, codec)


class CodedMemory(Memory):
    """The arrays of a call, and what becomes of them on the wire.

    What the codec leaves behind is written to ``call.residual``: for a contribution where it is
    encoded, for a result at its owner, as much as the owner would have to add to its own part.
    """

    def __init__(self, units: Units, call: Call, pool: Pool, codec: Codec) -> None:
        super().__init__(units, call, pool)
        self._codec = codec
        self._residual = call.residual
        self._factor = call.task.world_size if self._is_mean(call) else 1
        self._outgoing: dict[int, Slot] = {}

    @staticmethod
    def _is_mean(call: Call) -> bool:
        return call.reducer is not None and call.reducer.op is ReduceOp.MEAN

    def size(self, form: Form, count: int) -> int:  # noqa: ARG002 - there is one form only
        """Bytes of so many elements on the wire."""
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
        return slot.octets[: self._codec.size(count)]

    def _slot_for(self, to: tuple[int, ...]) -> Slot:
        """Each stream has one: a pump asks for its next value when the last is on its way."""
        (peer,) = to
        slot = self._outgoing.get(peer)
        if slot is None:
            slot = self._outgoing[peer] = self._pool.take()
        return slot

    def _encode(self, values: Floats, slot: Slot, left: Floats | None = None) -> None:
        """Encode values; what that leaves behind is written to ``left``, if somebody wants it."""
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
        out = self.cells(step.into, unit.start, unit.stop)
        if not step.final:
            (slot,), (source,) = staged, step.sources
            self._decode(slot, out, source)
            return self._keep(unit, slot)
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
        for slot in (*staged, total):
            self._pool.give_back(slot)
        return self._keep(unit, coded)

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

    def _keep(self, unit: Unit, slot: Slot) -> Slot | None:
        """Hold an encoded value for those who shall get it."""
        if unit.step.to:
            return slot
        self._pool.give_back(slot)
        return None

    def _decode(self, slot: Slot, out: Floats, source: int | None) -> None:
        try:
            self._codec.decode(slot.array[: self._codec.size(out.size)], out)
        except MalformedFrame as error:
            raise _undecodable(source, error) from None


def _undecodable(source: int | None, error: MalformedFrame) -> MalformedFrame:
    """The error for a piece that a rank sent, or that this one made."""
    who = "This rank made" if source is None else f"Rank {source} sent"
    return MalformedFrame(f"{who} a piece that cannot be decoded", rank=source, cause=error)
