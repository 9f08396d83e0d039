"""numpy arrays, and single numbers of numpy and of Python."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.arrays.base import Access, Array, Dtype, Lease, check_dtype
from potluck.arrays.memory import fresh, lend_memory

__all__ = ["NUMPY", "SCALAR", "NumpyAdapter", "ScalarAdapter"]

_TYPES: dict[type, Dtype] = {
    bool: np.dtype("bool"),
    int: np.dtype("int64"),
    float: np.dtype("float64"),
    complex: np.dtype("complex128"),
}


class NumpyAdapter:
    """Arrays of numpy."""

    def lend(self, thing: Array, access: Access) -> Lease:
        """The memory itself, where it is contiguous."""
        if isinstance(thing, np.ma.MaskedArray):
            msg = "A masked array would lose its mask on the way: pass array.filled(value)"
            raise TypeError(msg)
        return lend_memory(np.asarray(thing), thing, access)

    def allocate(self, like: Array, shape: Sequence[int]) -> Lease:
        """A new array."""
        return fresh(like.dtype, shape)


class ScalarAdapter:
    """Single numbers.  They cannot be changed: a new one comes back."""

    def lend(self, thing: Any, access: Access) -> Lease:
        """A copy."""
        if access is Access.WRITE:
            msg = f"A {type(thing).__name__} cannot be changed: leave out= away, use the result"
            raise TypeError(msg)
        dtype = self.dtype_of(thing)
        check_dtype(dtype)
        try:
            flat = np.array([thing], dtype)
        except OverflowError:
            msg = f"{thing} does not fit into 64 bits: use the variants for objects"
            raise ValueError(msg) from None
        is_numpy = isinstance(thing, np.generic)
        return Lease(flat, (), lambda: flat[0] if is_numpy else flat[0].item())

    def allocate(self, like: Any, shape: Sequence[int]) -> Lease:
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
