"""From any array to flat memory: finds the adapter for it.

A library is asked only if it has been imported already: whoever has an array of it has done so.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.arrays.base import Access, Adapter, Lease, read_dtype, reinterpret
from potluck.arrays.generic import GENERIC
from potluck.arrays.memory import fresh
from potluck.arrays.numpy import NUMPY, SCALAR

__all__ = ["adapter_of", "allocate", "lend"]


def lend(thing: Any, access: Access, dtype: Any = None) -> Lease:
    """A user's array as flat memory; ``dtype`` says what raw bytes mean.

    >>> lease = lend(bytearray(8), Access.UPDATE, "float32")
    >>> lease.flat[...] = 1
    >>> lease.give_back().hex()
    '0000803f0000803f'
    """
    lease = adapter_of(thing).lend(thing, access)
    return lease if dtype is None else reinterpret(lease, read_dtype(dtype))


def allocate(like: Any, shape: Sequence[int], dtype: Any = None) -> Lease:
    """Memory for a new array of the kind and type of another; raw bytes become a numpy array.

    >>> allocate(b"raw bytes", (2, 2), "int32").give_back().shape
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
