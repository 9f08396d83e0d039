"""Lending memory that numpy can see; the way of every adapter on a host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from potluck.arrays.base import Access, Array, Lease, check_dtype

__all__ = ["check_no_overlap", "fresh", "lend_memory"]


def lend_memory(array: Array, thing: Any, access: Access, *, is_raw: bool = False) -> Lease:
    """Lend an array that shares its memory with ``thing``.

    Where the elements do not lie one after the other, or in another byte order, a temporary array
    stands in for them.
    """
    check_dtype(array.dtype)
    if access.writes:
        _check_writable(array, thing)
    if array.flags.c_contiguous and array.dtype.isnative:
        return Lease(array.reshape(-1), array.shape, lambda: thing, is_raw)
    temporary = np.empty(array.shape, array.dtype.newbyteorder("="))
    if access.reads:
        np.copyto(temporary, array)

    def give_back() -> Any:
        if access.writes:
            np.copyto(array, temporary)
        return thing

    return Lease(temporary.reshape(-1), array.shape, give_back, is_raw)


def fresh(dtype: Any, shape: Sequence[int]) -> Lease:
    """A new numpy array; in the other byte order only at its end."""
    array = np.empty(tuple(shape), np.dtype(dtype).newbyteorder("="))
    return Lease(array.reshape(-1), array.shape, lambda: array.astype(dtype, copy=False))


def check_no_overlap(shape: Sequence[int], strides: Sequence[int]) -> None:
    """Refuse to write to an array of which two elements are one place in memory.

    >>> check_no_overlap((3, 2), (0, 4))
    Traceback (most recent call last):
    ...
    ValueError: Several elements of this array are the same memory: make a copy of it first
    """
    reach = 0  # bytes from the first element to the last one, of the dimensions seen so far
    for stride, length in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            msg = "Several elements of this array are the same memory: make a copy of it first"
            raise ValueError(msg)
        reach += stride * (length - 1)


def _check_writable(array: Array, thing: Any) -> None:
    if not array.flags.writeable:
        msg = (
            f"This {type(thing).__name__} is read-only, so no result can be put into it: "
            "pass a copy of it, or give the result a place of its own with out="
        )
        raise ValueError(msg)
    if not array.flags.c_contiguous:
        check_no_overlap(array.shape, array.strides)
