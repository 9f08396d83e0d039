"""Gradients in and out of the one extra buffer in which they are averaged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.arrays.base import Access, Array
from potluck.arrays.lending import adapter_of, lend
from potluck.collective.compression.compressor import GradientCompressor
from potluck.runtime.distributed import DistributedBackend
from potluck.training import trees
from potluck.training.elastic_record import Record, signature_of

__all__ = ["Gradients"]

_WIDE = np.dtype(np.float64)


class Gradients:
    """A tree of gradients: kept as it is, averaged elsewhere.

    Types narrower than float32 are added up in float32.  Behind the last element of each buffer
    stands the weight, so that Σw·g and Σw are the results of the same operation.
    """

    def __init__(self, tree: Any, room: dict[bool, Array] | None = None) -> None:
        self.tree = tree
        self._leaves = [leaf for _, leaf in trees.leaves_of(tree)]
        if not self._leaves:
            msg = "There are no arrays in these gradients"
            raise ValueError(msg)
        flats = self._flats = [lend(leaf, Access.READ).flat for leaf in self._leaves]
        for flat in flats:
            if flat.dtype.kind not in "fV" or flat.dtype.itemsize > _WIDE.itemsize:
                msg = f"Gradients are floating-point numbers, not {flat.dtype}"
                raise TypeError(msg)
        self._wide = [flat.dtype == _WIDE for flat in flats]
        self._sizes = [flat.size for flat in flats]
        names = [path for path, _ in trees.leaves_of(tree)]
        shapes = [tuple(int(side) for side in leaf.shape) for leaf in self._leaves]
        kinds = [str(flat.dtype) for flat in flats]
        self.signature = signature_of(list(zip(names, shapes, kinds, strict=True)))
        self._room = {} if room is None else room  # fresh memory is slow to touch
        self._buffers: dict[bool, Array] = {}

    def pack(self, weight: float) -> None:
        """Write w·g and w into the buffers; the gradients stay as they are."""
        for wide in sorted(set(self._wide)):
            size = sum(self._of(wide, self._sizes))
            dtype = np.float64 if wide else np.float32
            buffer = self._room.get(wide)
            if buffer is None or buffer.size != size + 1:
                buffer = self._room[wide] = np.empty(size + 1, dtype)
            self._buffers[wide] = buffer
            place = 0
            for flat in self._of(wide, self._flats):
                into = buffer[place : place + flat.size]
                if weight:
                    np.multiply(flat, weight, out=into, casting="unsafe", dtype=dtype)
                else:
                    into[:] = 0  # whatever is there counts nothing, not even if it is no number
                place += flat.size
            buffer[-1] = weight

    def reduce(
        self,
        group: DistributedBackend,
        compressor: GradientCompressor | None,
        records: Sequence[Record],
    ) -> None:
        """Make the weighted mean of all ranks in the buffers."""
        total = sum(record.weight for record in records)
        for wide, buffer in self._buffers.items():
            if compressor is None or wide:
                group.all_reduce(buffer)
                np.divide(buffer[:-1], buffer[-1], out=buffer[:-1])
            else:  # what is compressed is the part of the mean; weights are known exactly
                part = buffer[:-1]
                np.divide(part, np.float32(total), out=part)
                group.all_reduce(part, compression=compressor.tensor("gradients"))

    def mean(self) -> Any:
        """The tree of the averages, of the kinds of arrays that the gradients are.

        Arrays of numpy show the buffer itself, which the next step uses again.
        """
        places = dict.fromkeys(self._buffers, 0)
        made = []
        for leaf, wide, size in zip(self._leaves, self._wide, self._sizes, strict=True):
            place = places[wide]
            places[wide] += size
            values = self._buffers[wide][place : place + size]
            if type(leaf) is np.ndarray and leaf.dtype == values.dtype:
                made.append(values.reshape(leaf.shape))
                continue
            lease = adapter_of(leaf).allocate(leaf, tuple(leaf.shape))
            np.copyto(lease.flat, values, casting="unsafe")
            made.append(lease.give_back())
        return trees.replaced(self.tree, iter(made))

    def _of(self, wide: bool, things: list[Any]) -> list[Any]:  # noqa: FBT001 - a kind of buffer
        return [thing for thing, each in zip(things, self._wide, strict=True) if each is wide]
