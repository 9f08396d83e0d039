"""Collectives on trees: one call for all arrays of a dict, a list or a tuple, of any library.

In its turn such a call first compares the trees of all ranks, then does a few collectives on
buckets of arrays; see :mod:`potluck.collective.buckets`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck.arrays.base import Access, Array, Lease
from potluck.arrays.lending import lend
from potluck.arrays.trees import is_number_or_array, leaves_of, replaced
from potluck.collective.buckets import packed
from potluck.collective.task import Task
from potluck.decoding import printable_lines
from potluck.errors import CollectiveMismatch
from potluck.runtime.call import Call, Purpose
from potluck.runtime.compressed import Exchange
from potluck.runtime.requests import Place

__all__ = ["Tree", "TreeRoutine", "Unit"]

LONGEST = 256 << 10
"""Bytes in which a rank describes its tree to those whose trees are different."""


@dataclass(frozen=True, slots=True)
class Unit:
    """What one collective works on: an array by itself, or several in memory of their own."""

    flat: Array
    shape: tuple[int, ...]
    number: int
    """Which one of the tree it is."""


class Tree:
    """A tree whose arrays are lent."""

    def __init__(self, tree: Any, access: Access, dtype: Any = None) -> None:
        self._tree = tree
        self._found = leaves_of(tree, is_number_or_array)
        self._lent = [self._lend(path, thing, access, dtype) for path, thing in self._found]
        # By name: dicts that were filled in another order are the same tree.
        order = sorted(range(len(self._found)), key=lambda place: self._found[place][0])
        self.leases = [self._lent[place] for place in order]
        self.paths = [self._found[place][0] for place in order]
        self.buckets = packed([(each.flat.dtype, each.flat.size) for each in self.leases])

    @staticmethod
    def _lend(path: str, thing: Any, access: Access, dtype: Any) -> Lease:
        with _named(path):
            return lend(thing, access, dtype)

    def check(self, test: Callable[[Lease], object]) -> None:
        """Make a test that raises on every array; the one it refuses is named."""
        for path, lease in zip(self.paths, self.leases, strict=True):
            with _named(path):
                test(lease)

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        return sum(lease.flat.nbytes for lease in self.leases)

    def description(self) -> list[str]:
        """One line for each array, such as ``layer.0.bias: float32[4]``."""
        return [
            f"{path}: {lease.flat.dtype}{list(lease.shape)}"
            for path, lease in zip(self.paths, self.leases, strict=True)
        ]

    def separated(self) -> list[Array]:
        """The memory of each array; a copy of what another one has too, as tied weights do."""
        memory = [lease.flat for lease in self.leases]
        end = 0
        for place in sorted(range(len(memory)), key=lambda place: memory[place].ctypes.data):
            array = memory[place]
            start = array.ctypes.data
            if array.size and start < end:
                memory[place] = array.copy()
            end = max(end, start + array.nbytes)
        return memory

    def give_back(self) -> Any:
        """The user's tree; a new one if some of its arrays had to be made anew."""
        made = [lease.give_back() for lease in self._lent]
        if all(new is old for new, (_, old) in zip(made, self._found, strict=True)):
            return self._tree
        return replaced(self._tree, iter(made), is_number_or_array)


@dataclass(frozen=True, slots=True)
class TreeRoutine:
    """What is done when the turn of a call on a tree has come."""

    tree: Tree
    place: Place
    purpose: Purpose
    name_of: Callable[[int], str]
    make: Callable[[Unit], Call]
    """The collective for an array or a bucket of them."""

    def call(self, task: Callable[[int], Task]) -> Call:
        """What a group is to do; its memory only says how much that is."""
        dtypes = {lease.flat.dtype for lease in self.tree.leases}
        dtype = dtypes.pop() if len(dtypes) == 1 else np.dtype(np.uint8)
        size = self.tree.nbytes // dtype.itemsize
        extent = np.broadcast_to(np.zeros((), dtype), (size,))
        return Call(task(size), extent, extent, routine=self, purpose=self.purpose)

    def __call__(self, run: Callable[[Call], None]) -> None:
        """Compare, then work on bucket after bucket."""
        if self.place.world_size > 1:
            self._compare(Exchange(self.place.world_size, run, self.purpose))
        leases, memory = self.tree.leases, self.tree.separated()
        for number, bucket in enumerate(self.tree.buckets):
            members = [memory[place] for place in bucket.places]
            if len(members) == 1:
                shape = leases[bucket.places[0]].shape
                run(self.make(Unit(members[0], shape, number)))
                continue
            together = np.concatenate(members)
            run(self.make(Unit(together, together.shape, number)))
            start = 0
            for member in members:
                _store(together[start : start + member.size], member)
                start += member.size
        for lease, array in zip(leases, memory, strict=True):
            if array is not lease.flat:
                _store(array, lease.flat)

    def _compare(self, exchange: Exchange) -> None:
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
