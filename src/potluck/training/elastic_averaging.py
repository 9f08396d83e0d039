"""Gradients in and out of the one extra buffer in which they are averaged, bucket by bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from potluck.arrays.base import Access, Array
from potluck.arrays.lending import adapter_of, lend
from potluck.collective.compression.compressor import GradientCompressor
from potluck.runtime.distributed import DistributedBackend
from potluck.runtime.work import Work
from potluck.training import trees
from potluck.training.elastic_record import signature_of

__all__ = ["Buckets", "Gradients", "Leaf"]

_WIDE = np.dtype(np.float64)

Room = dict[int, Array]
"""Buffers by the number of their bucket, kept from step to step: fresh memory is slow to touch."""


class Leaf(NamedTuple):
    """What is known of an array before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int


class _Bucket(NamedTuple):
    """Arrays that are averaged in one operation."""

    leaves: tuple[int, ...]
    size: int
    """Elements."""
    is_wide: bool


class Buckets:
    """How the arrays of a model are divided into operations, and the memory for them.

    Without ``limit`` (in bytes) there is one bucket for each precision.  With it they are made
    from the last array to the first, the order in which a backward pass gives them.  Types
    narrower than float32 are added up in float32.  Behind the last element of each bucket stands
    the weight, so that Σw·g and Σw are the results of the same operation.

    >>> leaves = [Leaf(name, (8,), "float32", 8) for name in "abc"]
    >>> [each.leaves for each in Buckets(leaves, limit=64).all]
    [(2, 1), (0,)]
    """

    def __init__(
        self, leaves: Sequence[Leaf], *, limit: int | None = None, room: Room | None = None
    ) -> None:
        if not leaves:
            msg = "There are no arrays in these gradients"
            raise ValueError(msg)
        self.leaves = tuple(leaves)
        self.all = _divided(self.leaves, limit)
        self.signature = signature_of([(*leaf[:3], limit or 0) for leaf in leaves])
        self._room = {} if room is None else room
        self._places: dict[int, tuple[int, int]] = {}  # of each leaf: its bucket, and where there
        for number, bucket in enumerate(self.all):
            place = 0
            for leaf in bucket.leaves:
                self._places[leaf] = number, place
                place += self.leaves[leaf].size

    @property
    def nbytes(self) -> int:
        """What is averaged in a step, uncompressed."""
        return sum(bucket.size * (8 if bucket.is_wide else 4) for bucket in self.all)

    def pack(self, number: int, flats: Sequence[Array], weight: float) -> Array:
        """Write w·g and w into a bucket; the gradients, given for its leaves, stay as they are."""
        bucket = self.all[number]
        dtype = np.dtype(np.float64 if bucket.is_wide else np.float32)
        buffer = self._room.get(number)
        if buffer is None or buffer.size != bucket.size + 1 or buffer.dtype != dtype:
            buffer = self._room[number] = np.empty(bucket.size + 1, dtype)
        place = 0
        for flat in flats:
            into = buffer[place : place + flat.size]
            if weight:
                np.multiply(flat, weight, out=into, casting="unsafe", dtype=dtype)
            else:
                into[:] = 0  # whatever is there counts nothing, not even if it is no number
            place += flat.size
        buffer[-1] = weight
        return buffer

    def start(
        self,
        number: int,
        group: DistributedBackend,
        compressor: GradientCompressor | None,
        total: float,
    ) -> Work[Array]:
        """Begin to add up a packed bucket; ``total`` is the weight of all, for compression."""
        buffer = self._room[number]
        if compressor is None or self.all[number].is_wide:
            return group.all_reduce(buffer, async_op=True)
        part = buffer[:-1]  # what is compressed is the part of the mean; weights are known exactly
        np.divide(part, np.float32(total), out=part)
        name = "gradients" if len(self.all) == 1 else f"gradients.{number}"
        return group.all_reduce(part, compression=compressor.tensor(name), async_op=True)

    def finish(self, number: int, *, is_compressed: bool) -> None:
        """Make the mean of the sum."""
        if not is_compressed or self.all[number].is_wide:
            buffer = self._room[number]
            np.divide(buffer[:-1], buffer[-1], out=buffer[:-1])

    def values(self, leaf: int) -> Array:
        """The memory in which the mean of an array is."""
        number, place = self._places[leaf]
        return self._room[number][place : place + self.leaves[leaf].size]

    def forget(self) -> None:
        """Use other memory: what is under way may still write into this."""
        self._room.clear()


def _divided(leaves: Sequence[Leaf], limit: int | None) -> list[_Bucket]:
    made: list[tuple[list[int], bool]] = []
    filling: dict[bool, tuple[list[int], int]] = {}
    order = range(len(leaves)) if limit is None else reversed(range(len(leaves)))
    for number in order:
        wide = leaves[number].dtype == str(_WIDE)
        members, nbytes = filling.get(wide, ([], 0))
        more = leaves[number].size * (8 if wide else 4)
        if not members or (limit is not None and nbytes + more > limit):
            members, nbytes = [], 0
            made.append((members, wide))
        members.append(number)
        filling[wide] = members, nbytes + more
    return [
        _Bucket(tuple(members), sum(leaves[each].size for each in members), wide)
        for members, wide in made
    ]


class Gradients:
    """A tree of gradients: kept as it is, averaged elsewhere."""

    def __init__(
        self,
        tree: Any,
        room: Room | None = None,
        *,
        limit: int | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        self.tree = tree
        found = trees.leaves_of(tree)
        self._arrays = [array for _, array in found]
        self._flats = [lend(array, Access.READ).flat for array in self._arrays]
        for flat in self._flats:
            if flat.dtype.kind not in "fV" or flat.dtype.itemsize > _WIDE.itemsize:
                msg = f"Gradients are floating-point numbers, not {flat.dtype}"
                raise TypeError(msg)
        leaves = tuple(
            Leaf(name, tuple(int(side) for side in array.shape), str(flat.dtype), flat.size)
            for (name, array), flat in zip(found, self._flats, strict=True)
        )
        if buckets is not None and buckets.leaves != leaves:
            msg = "These gradients are not those whose averaging was begun"
            raise ValueError(msg)
        self.buckets = buckets or Buckets(leaves, limit=limit, room=room)

    def pack(self, number: int, weight: float) -> None:
        """Write w·g and w into a bucket."""
        flats = [self._flats[leaf] for leaf in self.buckets.all[number].leaves]
        self.buckets.pack(number, flats, weight)

    def mean(self) -> Any:
        """The tree of the averages, of the kinds of arrays that the gradients are.

        Arrays of numpy show the buffer itself, which the next step uses again.
        """
        made = []
        for number, array in enumerate(self._arrays):
            values = self.buckets.values(number)
            if type(array) is np.ndarray and array.dtype == values.dtype:
                made.append(values.reshape(array.shape))
                continue
            lease = adapter_of(array).allocate(array, tuple(array.shape))
            np.copyto(lease.flat, values, casting="unsafe")
            made.append(lease.give_back())
        return trees.replaced(self.tree, iter(made))
