"""Whatever shows its memory by a protocol: buffers, the array interface, DLPack."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.arrays.base import Access, Array, Lease
from potluck.arrays.memory import fresh, lend_memory

__all__ = ["GENERIC", "GenericAdapter"]

_RAW = frozenset({"B", "b", "c", "<B", "<b", "@B", "@b"})
"""Formats of buffers that are bytes and no more."""

ON_HOST = frozenset({1, 3, 11})
"""DLPack's numbers for memory that the processor reaches: plain, and pinned for CUDA or ROCm."""


class GenericAdapter:
    """Objects of any library that speaks one of the protocols.  Results are numpy arrays.

    What DLPack shows can only be read before numpy 2.3.
    """

    def lend(self, thing: Any, access: Access) -> Lease:
        """The memory itself, where it is contiguous."""
        view = _buffer(thing)
        if view is not None:
            return lend_memory(_from_buffer(view), thing, access, is_raw=view.format in _RAW)
        array = _from_protocol(thing)
        if array is None and not access.writes and hasattr(thing, "__array__"):
            array = np.asarray(thing)  # which may be a copy: so not for writing
        if array is None:
            msg = (
                f"{type(thing).__name__} is no array: pass one of numpy, torch, jax or mlx, "
                "or anything with a buffer"
            )
            raise TypeError(msg)
        return lend_memory(array, thing, access)

    def allocate(self, like: Any, shape: Sequence[int]) -> Lease:
        """A numpy array of the same type."""
        return fresh(self.lend(like, Access.READ).flat.dtype, shape)


def _buffer(thing: Any) -> memoryview | None:
    try:
        return memoryview(thing)
    except (TypeError, ValueError, BufferError):
        return None


def _from_buffer(view: memoryview) -> Array:
    try:
        return np.asarray(view)
    except (TypeError, ValueError) as error:
        msg = f"A buffer of format {view.format!r} holds no numbers: {error}"
        raise TypeError(msg) from None


def _from_protocol(thing: Any) -> Array | None:
    if hasattr(thing, "__array_interface__"):
        return np.asarray(thing)
    if not hasattr(thing, "__dlpack__"):
        return None
    device = thing.__dlpack_device__()
    if device[0] not in ON_HOST:
        msg = f"This {type(thing).__name__} is not in the memory of the host: copy it there first"
        raise TypeError(msg)
    try:
        return np.from_dlpack(thing)
    except (BufferError, RuntimeError, TypeError) as error:
        msg = f"numpy cannot see into this {type(thing).__name__}: {error}"
        raise TypeError(msg) from None


GENERIC = GenericAdapter()
