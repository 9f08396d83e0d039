"""Arrays of MLX.  They are evaluated, copied to numpy, and assigned to afterwards."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from potluck.arrays.base import Access, Array, BufferView, fresh

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class MlxAdapter:
    """Arrays of MLX."""

    def as_buffer(self, thing: Any, access: Access) -> BufferView:
        """A copy: the memory of an array may be shared with others, and is not ours to write."""
        copy = _to_numpy(thing)

        def commit() -> Any:
            if access.writes:
                thing[...] = _from_numpy(copy)
            return thing

        return BufferView(copy.reshape(-1), copy.shape, commit)

    def allocate(self, like: Any, shape: Sequence[int]) -> BufferView:
        """An array of the same type."""
        buffer = fresh(_to_numpy(like.reshape(-1)[:0]).dtype, shape)
        return BufferView(buffer.flat, buffer.shape, lambda: _from_numpy(buffer.commit()))


def _core() -> Any:
    return sys.modules["mlx.core"]


def _to_numpy(thing: Any) -> Array:
    if thing.dtype == _core().bfloat16:  # has no name in the buffer protocol
        return np.array(thing.view(_core().uint16), order="C").view(_BFLOAT16)
    return np.array(thing, order="C")


def _from_numpy(array: Array) -> Any:
    if array.dtype == _BFLOAT16:
        return _core().array(array.view(np.uint16)).view(_core().bfloat16)
    return _core().array(array)


MLX = MlxAdapter()
