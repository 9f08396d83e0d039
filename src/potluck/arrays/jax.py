"""Arrays of JAX.  They cannot be changed: the result is a new array, on the same devices."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.arrays.base import Access, Array, BufferView, fresh, memory_as_buffer


class JaxAdapter:
    """Arrays of JAX."""

    def as_buffer(self, thing: Any, access: Access) -> BufferView:
        """For reading what JAX shows of its memory, else a copy."""
        if access is Access.WRITE:
            msg = "JAX arrays are immutable: omit out= and use the return value"
            raise TypeError(msg)
        host = _on_host(thing)
        if access is Access.READ:
            return memory_as_buffer(host, thing, access)
        copy = np.array(host, order="C")
        return BufferView(copy.reshape(-1), copy.shape, lambda: _put(copy, thing.sharding))

    def allocate(self, like: Any, shape: Sequence[int]) -> BufferView:
        """An array of the same type, on one of the same devices."""
        buffer = fresh(like.dtype, shape)
        device = min(like.devices(), key=lambda each: each.id)
        return BufferView(buffer.flat, buffer.shape, lambda: _put(buffer.commit(), device))


def _on_host(thing: Any) -> Array:
    try:
        return np.asarray(thing)
    except Exception as error:
        # JAX has its own errors for values that exist only while it compiles, and for arrays of
        # which other processes have parts.
        msg = (
            f"JAX does not show the elements of this {type(thing).__name__}: a collective takes "
            f"arrays that are whole, outside of jit. {error}"
        )
        raise TypeError(msg) from error


def _put(array: Array, where: Any) -> Any:
    return sys.modules["jax"].device_put(array, where)


JAX = JaxAdapter()
