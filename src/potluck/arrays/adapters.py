"""From any array to flat memory: finds the adapter for it.

A library is asked only if it is imported already: without that, no array can be one of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.arrays.base import (
    Access,
    Adapter,
    Array,
    BufferView,
    Dtype,
    check_dtype,
    fresh,
    memory_as_buffer,
    read_dtype,
    reinterpret,
)

# --------------------------------------------------------------------------------------------------
# numpy arrays, and single numbers of numpy and of Python.

_TYPES: dict[type, Dtype] = {
    bool: np.dtype("bool"),
    int: np.dtype("int64"),
    float: np.dtype("float64"),
    complex: np.dtype("complex128"),
}


class NumpyAdapter:
    """Arrays of numpy."""

    def as_buffer(self, thing: Array, access: Access) -> BufferView:
        """The memory itself, where it is contiguous."""
        if isinstance(thing, np.ma.MaskedArray):
            msg = "A masked array would lose its mask on the way: pass array.filled(value)"
            raise TypeError(msg)
        return memory_as_buffer(np.asarray(thing), thing, access)

    def allocate(self, like: Array, shape: Sequence[int]) -> BufferView:
        """A new array."""
        return fresh(like.dtype, shape)


class ScalarAdapter:
    """Single numbers.  They cannot be changed: a new one comes back."""

    def as_buffer(self, thing: Any, access: Access) -> BufferView:
        """A copy."""
        if access is Access.WRITE:
            msg = f"{type(thing).__name__} is immutable: omit out= and use the return value"
            raise TypeError(msg)
        dtype = self.dtype_of(thing)
        check_dtype(dtype)
        try:
            flat = np.array([thing], dtype)
        except OverflowError:
            msg = f"{thing} does not fit into 64 bits: use the variants for objects"
            raise ValueError(msg) from None
        is_numpy = isinstance(thing, np.generic)
        return BufferView(flat, (), lambda: flat[0] if is_numpy else flat[0].item())

    def allocate(self, like: Any, shape: Sequence[int]) -> BufferView:
        """Several numbers are an array of numpy."""
        return fresh(self.dtype_of(like), shape)

    @staticmethod
    def dtype_of(thing: Any) -> Dtype:
        """The type in which a number travels."""
        return thing.dtype if isinstance(thing, np.generic) else _TYPES[type(thing)]

    @staticmethod
    def knows(thing: Any) -> bool:
        """Whether this is a single number."""
        return isinstance(thing, np.generic) or type(thing) in _TYPES


NUMPY = NumpyAdapter()
SCALAR = ScalarAdapter()


# --------------------------------------------------------------------------------------------------
# Whatever shows its memory by a protocol: buffers, the array interface, DLPack.

_RAW = frozenset({"B", "b", "c", "<B", "<b", "@B", "@b"})
"""Formats of buffers that are bytes and no more."""

ON_HOST = frozenset({1, 3, 11})
"""DLPack's numbers for memory that the processor reaches: plain, and pinned for CUDA or ROCm."""


class GenericAdapter:
    """Objects of any library that speaks one of the protocols.  Results are numpy arrays.

    What DLPack shows can only be read before numpy 2.3.
    """

    def as_buffer(self, thing: Any, access: Access) -> BufferView:
        """The memory itself, where it is contiguous."""
        view = _buffer(thing)
        if view is not None:
            return memory_as_buffer(_from_buffer(view), thing, access, is_raw=view.format in _RAW)
        array = _from_protocol(thing)
        if array is None and not access.writes and hasattr(thing, "__array__"):
            array = np.asarray(thing)  # which may be a copy: so not for writing
        if array is None:
            msg = (
                f"{type(thing).__name__} is not an array: pass one of numpy, torch, jax or mlx, "
                "or an object with a buffer"
            )
            raise TypeError(msg)
        return memory_as_buffer(array, thing, access)

    def allocate(self, like: Any, shape: Sequence[int]) -> BufferView:
        """A numpy array of the same type."""
        return fresh(self.as_buffer(like, Access.READ).flat.dtype, shape)


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


# --------------------------------------------------------------------------------------------------


def as_buffer(thing: Any, access: Access, dtype: Any = None) -> BufferView:
    """A user's array as flat memory; ``dtype`` says what raw bytes mean.

    >>> buffer = as_buffer(bytearray(8), Access.UPDATE, "float32")
    >>> buffer.flat[...] = 1
    >>> buffer.commit().hex()
    '0000803f0000803f'
    """
    adapter = _known.get(type(thing)) or adapter_of(thing)
    buffer = adapter.as_buffer(thing, access)
    return buffer if dtype is None else reinterpret(buffer, read_dtype(dtype))


def allocate(like: Any, shape: Sequence[int], dtype: Any = None) -> BufferView:
    """Memory for a new array of the kind and type of another; raw bytes become a numpy array.

    >>> allocate(b"raw bytes", (2, 2), "int32").commit().shape
    (2, 2)
    """
    if dtype is None:
        return adapter_of(like).allocate(like, shape)
    return fresh(read_dtype(dtype), shape)


def adapter_of(thing: Any) -> Adapter:
    """Who knows this kind of array."""
    known = _known.get(type(thing))
    if known is not None:
        return known
    found = _framework_of(thing)
    if found is not None:
        _known[type(thing)] = found
        return found
    return SCALAR if SCALAR.knows(thing) else GENERIC


_known: dict[type, Adapter] = {np.ndarray: NUMPY}
"""Types of arrays that were met, each with its adapter: looking for it takes microseconds."""


def _framework_of(thing: Any) -> Adapter | None:
    if isinstance(thing, np.ndarray):
        return NUMPY
    if _is_from(thing, "torch", "Tensor"):
        from potluck.arrays.torch import TORCH

        return TORCH
    if _is_from(thing, "jax", "Array"):
        from potluck.arrays.jax import JAX

        return JAX
    if _is_from(thing, "mlx.core", "array"):
        from potluck.arrays.mlx import MLX

        return MLX
    return None


def _is_from(thing: Any, module: str, name: str) -> bool:
    # A module that is just being imported may not have the name yet.
    kind = getattr(sys.modules.get(module), name, None)
    return kind is not None and isinstance(thing, kind)
