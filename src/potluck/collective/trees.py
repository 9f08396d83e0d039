"""Collectives on trees: one call for all arrays of a dict, a list or a tuple, of any library.

In its turn such a call first compares the trees of all ranks, then does a few collectives on
buckets of arrays; see :mod:`potluck.collective.trees`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from potluck._decode import printable_lines
from potluck.arrays.adapters import as_buffer
from potluck.arrays.base import Access, Array, BufferView
from potluck.arrays.trees import is_number_or_array, leaves_of, replaced
from potluck.collective import call as collective_call
from potluck.collective.call import Call, CallSite, Op, Purpose, Request
from potluck.collective.compressed import COMPRESSIBLE, CompressedExchange, CompressedReduction
from potluck.collective.group import Group
from potluck.compression.compressor import TensorCompressor
from potluck.errors import CollectiveMismatch
from potluck.schedule.reduce import Dtype
from potluck.schedule.task import Collective, Strategy, Task

# --------------------------------------------------------------------------------------------------
# Buckets: many small arrays travel as few large ones.
#
# An operation costs a round trip however little it carries.  So small arrays of one type are packed
# together, in order; a large one travels by itself and is not copied.

LARGE = 256 << 10
"""Bytes from which on an array travels by itself: copying it would cost more than its latency."""

FULL = 4 << 20
"""Bytes of a bucket that takes no more: the next one is packed while this one is on its way."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Arrays of one type that travel together, by their places in the order of all."""

    dtype: Dtype
    places: tuple[int, ...]
    count: int
    """Elements of all of them."""


def packed(arrays: Sequence[tuple[Dtype, int]]) -> list[Bucket]:
    """Put arrays of given types and numbers of elements into buckets.

    The same arrays give the same buckets everywhere.

    >>> import numpy as np
    >>> single, long = np.dtype("float32"), np.dtype("int64")
    >>> [each.places for each in packed([(single, 3), (long, 1), (single, 1 << 20), (single, 4)])]
    [(0, 3), (1,), (2,)]
    """
    buckets: list[tuple[Dtype, list[int], list[int]]] = []
    filling: dict[Dtype, int] = {}
    for place, (dtype, count) in enumerate(arrays):
        if count * dtype.itemsize >= LARGE:
            buckets.append((dtype, [place], [count]))
            continue
        number = filling.get(dtype)
        if number is None or (sum(buckets[number][2]) + count) * dtype.itemsize > FULL:
            number = filling[dtype] = len(buckets)
            buckets.append((dtype, [], []))
        buckets[number][1].append(place)
        buckets[number][2].append(count)
    return [Bucket(dtype, tuple(places), sum(counts)) for dtype, places, counts in buckets]


# --------------------------------------------------------------------------------------------------

LONGEST = 256 << 10
"""Bytes in which a rank describes its tree to those whose trees are different."""


@dataclass(frozen=True, slots=True)
class TreeUnit:
    """What one collective works on: an array by itself, or several in memory of their own."""

    flat: Array
    shape: tuple[int, ...]
    number: int
    """Which one of the tree it is."""


class Tree:
    """A tree whose arrays are seen as flat memory."""

    def __init__(self, tree: Any, access: Access, dtype: Any = None) -> None:
        self._tree = tree
        self._found = leaves_of(tree, is_number_or_array)
        self._all_buffers = [
            self._as_buffer(path, thing, access, dtype) for path, thing in self._found
        ]
        # By name: dicts that were filled in another order are the same tree.
        order = sorted(range(len(self._found)), key=lambda place: self._found[place][0])
        self.buffers = [self._all_buffers[place] for place in order]
        self.paths = [self._found[place][0] for place in order]
        self.buckets = packed([(each.flat.dtype, each.flat.size) for each in self.buffers])

    @staticmethod
    def _as_buffer(path: str, thing: Any, access: Access, dtype: Any) -> BufferView:
        with _named(path):
            return as_buffer(thing, access, dtype)

    def check(self, test: Callable[[BufferView], object]) -> None:
        """Make a test that raises on every array; the one it refuses is named."""
        for path, buffer in zip(self.paths, self.buffers, strict=True):
            with _named(path):
                test(buffer)

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(buffer.flat.nbytes for buffer in self.buffers)

    def description(self) -> list[str]:
        """One line for each array, such as ``layer.0.bias: float32[4]``."""
        return [
            f"{path}: {buffer.flat.dtype}{list(buffer.shape)}"
            for path, buffer in zip(self.paths, self.buffers, strict=True)
        ]

    def separated(self) -> list[Array]:
        """The memory of each array; a copy of what another one has too, as tied weights do."""
        memory = [buffer.flat for buffer in self.buffers]
        end = 0
        for place in sorted(range(len(memory)), key=lambda place: memory[place].ctypes.data):
            array = memory[place]
            start = array.ctypes.data
            if array.size and start < end:
                memory[place] = array.copy()
            end = max(end, start + array.nbytes)
        return memory

    def commit(self) -> Any:
        """The user's tree; a new one if some of its arrays had to be made anew."""
        made = [buffer.commit() for buffer in self._all_buffers]
        if all(new is old for new, (_, old) in zip(made, self._found, strict=True)):
            return self._tree
        return replaced(self._tree, iter(made), is_number_or_array)


@dataclass(frozen=True, slots=True)
class TreeRoutine:
    """What is done when the turn of a call on a tree has come."""

    tree: Tree
    place: CallSite
    purpose: Purpose
    name_of: Callable[[int], str]
    make: Callable[[TreeUnit], Call]
    """The collective for an array or a bucket of them."""

    def call(self, task: Callable[[int], Task]) -> Call:
        """What a group is to do; its memory only says how much that is."""
        dtypes = {buffer.flat.dtype for buffer in self.tree.buffers}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.uint8)
        size = self.tree.nbytes // dtype.itemsize
        extent = np.broadcast_to(np.zeros((), dtype), (size,))
        return Call(task(size), extent, extent, routine=self, purpose=self.purpose)

    def __call__(self, run: Callable[[Call], None]) -> None:
        """Compare, then work on bucket after bucket."""
        if self.place.world_size > 1:
            self._compare(CompressedExchange(self.place.world_size, run, self.purpose))
        buffers, memory = self.tree.buffers, self.tree.separated()
        for number, bucket in enumerate(self.tree.buckets):
            members = [memory[place] for place in bucket.places]
            if len(members) == 1:
                shape = buffers[bucket.places[0]].shape
                run(self.make(TreeUnit(members[0], shape, number)))
                continue
            together = np.concatenate(members)
            run(self.make(TreeUnit(together, together.shape, number)))
            start = 0
            for member in members:
                _store(together[start : start + member.size], member)
                start += member.size
        for buffer, array in zip(buffers, memory, strict=True):
            if array is not buffer.flat:
                _store(array, buffer.flat)

    def _compare(self, exchange: CompressedExchange) -> None:
        lines = self.tree.description()
        text = "\n".join(lines).encode()
        mark = np.frombuffer(hashlib.sha256(text).digest()[:16], np.uint64)
        marks = exchange.gather(mark).reshape(-1, 2)
        odd = [rank for rank, each in enumerate(marks) if (each != marks[0]).any()]
        if not odd:
            return
        mine = np.frombuffer(text[:LONGEST], np.uint8)
        told_sizes = exchange.gather(np.array([mine.size], np.int64))
        sizes = [max(0, min(int(each), LONGEST)) for each in told_sizes]
        told = exchange.gather(mine, sizes)
        ends = np.cumsum(sizes)
        first, other = (
            printable_lines(
                bytes(told[ends[rank] - sizes[rank] : ends[rank]]).decode(errors="replace")
            )
            for rank in (0, odd[0])
        )
        raise self._mismatch(odd[0], first.split("\n"), other.split("\n"))

    def _mismatch(
        self, rank: int, ours: Sequence[str], theirs: Sequence[str]
    ) -> CollectiveMismatch:
        """The same words on all ranks: rank 0 beside the first that differs from it."""
        here, there = _first_difference(ours, theirs)
        return CollectiveMismatch(
            "Ranks disagree about the tree of an operation",
            rank=rank,
            expected=here,
            got=there,
            cause=f"rank 0 has {here}, rank {rank} ({self.name_of(rank)}) has {there}",
            hint="All ranks must pass trees with the same names, types and shapes.",
        )


def _first_difference(ours: Sequence[str], theirs: Sequence[str]) -> tuple[str, str]:
    """What two trees differ in first, on both sides.

    >>> _first_difference(["a: float32[2]", "b: int64[1]"], ["a: float32[2]", "b: int64[3]"])
    ('b: int64[1]', 'b: int64[3]')
    """
    mine, other = (dict(line.rpartition(": ")[::2] for line in lines) for lines in (ours, theirs))
    for path in sorted(mine.keys() | other.keys()):
        here, there = mine.get(path), other.get(path)
        if here != there:
            missing = f"no {path}"
            return (
                missing if here is None else f"{path}: {here}",
                missing if there is None else f"{path}: {there}",
            )
    return f"{len(ours)} arrays", f"{len(theirs)} arrays"


@contextlib.contextmanager
def _named(path: str) -> Iterator[None]:
    """Say of which array of a tree an error speaks."""
    try:
        yield
    except Exception as error:
        error.add_note(f"It is at {path!r} in the tree.")
        raise


def _store(result: Array, target: Array) -> None:
    if target.flags.writeable:  # the arrays of whoever gives may be read-only, and stay as they are
        np.copyto(target, result)


# --------------------------------------------------------------------------------------------------
# Requests on trees: what a call with a dict, a list or a tuple of arrays means.
#
# The checks that a rank can make alone are made here, before anything moves.


def reduction_request(
    group: Group,
    place: CallSite,
    name_of: Callable[[int], str],
    tree: Tree,
    op: Op,
    *,
    strategy: Strategy | None,
    tensor: TensorCompressor | None,
) -> Request[Any]:
    """Reduce all arrays of a tree, in place where they can be changed."""
    tree.check(
        lambda buffer: collective_call.reducer_for(op, buffer)
    )  # or it would fail in the middle

    def make(unit: TreeUnit) -> Call:
        buffer = BufferView(unit.flat, unit.shape, _nothing)
        reducer = collective_call.reducer_for(op, buffer)
        task = place.whole(Collective.ALL_REDUCE, unit.flat.size)
        if tensor is None or unit.flat.dtype not in COMPRESSIBLE:
            return Call(task, unit.flat, unit.flat, reducer, strategy, purpose=purpose)
        part = TensorCompressor(tensor.compressor, f"{tensor.name}/{unit.number}")
        return CompressedReduction(group, place, buffer, buffer, reducer, part, strategy).call()

    purpose = Purpose.ALL_REDUCE_TREE
    routine = TreeRoutine(tree, place, purpose, name_of, make)
    call = routine.call(lambda size: place.whole(Collective.ALL_REDUCE, size))
    if tree.buffers:
        call = replace(call, reducer=collective_call.reducer_for(op, tree.buffers[0]))
    return Request(call, tree.commit)


def broadcast_request(
    place: CallSite,
    name_of: Callable[[int], str],
    tree: Any,
    root: int,
    strategy: Strategy | None,
) -> Request[Any]:
    """Give all ranks the arrays of one rank's tree, in place where they can be changed."""
    is_root = place.rank == root
    seen = Tree(tree, Access.READ if is_root else Access.UPDATE)

    def make(unit: TreeUnit) -> Call:
        task = place.whole(Collective.BROADCAST, unit.flat.size, root)
        source = unit.flat if is_root else collective_call.nothing(unit.flat.dtype)
        return Call(task, source, unit.flat, None, strategy, purpose=purpose)

    purpose = Purpose.BROADCAST_TREE
    routine = TreeRoutine(seen, place, purpose, name_of, make)
    call = routine.call(lambda size: place.whole(Collective.BROADCAST, size, root))
    return Request(call, seen.commit)


def _nothing() -> None:
    return None
