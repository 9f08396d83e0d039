"""What an adapter does: lend a user's array as flat memory, and give it back.

An adapter never keeps anything.  It says clearly what it cannot do, before anything has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Dtype: TypeAlias = "np.dtype[Any]"


class Access(Enum):
    """What will be done with the memory."""

    READ = (True, False)
    WRITE = (False, True)
    UPDATE = (True, True)

    def __init__(self, reads: bool, writes: bool) -> None:  # noqa: FBT001 - as in the lines above
        self.reads = reads
        """Whether what is there counts."""
        self.writes = writes
        """Whether something else may be there afterwards."""


class Lease(NamedTuple):
    """A user's array while it is worked on."""

    flat: Array
    """All elements in C order, one-dimensional and contiguous, in this machine's byte order."""
    shape: tuple[int, ...]
    give_back: Callable[[], Any]
    """Call it once after the last write: brings the elements home, and returns the user's object,
    or a new one of its kind where that kind cannot be changed."""
    is_raw: bool = False
    """Whether it is bytes of which nothing says what they mean."""


class Adapter(Protocol):
    """Knows one kind of array."""

    def lend(self, thing: Any, access: Access) -> Lease:
        """Show an array as flat memory, its own wherever possible."""

    def allocate(self, like: Any, shape: Sequence[int]) -> Lease:
        """Memory for a new array of the same kind and type."""


def check_dtype(dtype: Dtype) -> None:
    """Refuse types that cannot travel."""
    if dtype.hasobject:
        msg = "An array of Python objects cannot travel: use the variants for objects"
        raise TypeError(msg)
    if dtype.itemsize == 0:
        msg = f"An array of type {dtype} has elements without any content"
        raise TypeError(msg)


def read_dtype(dtype: Any) -> Dtype:
    """A type given by a user: a name, or what numpy, torch or jax call a type.

    >>> read_dtype("bfloat16"), read_dtype(np.float32)
    (dtype(bfloat16), dtype('float32'))
    """
    name = str(dtype)
    try:
        found = np.dtype(name.removeprefix("torch.") if name.startswith("torch.") else dtype)
    except TypeError:
        msg = f"{dtype!r} is no type of numbers; float32, bfloat16 or int64 are"
        raise TypeError(msg) from None
    check_dtype(found)
    if not found.isnative:
        msg = f"Raw bytes are in this machine's order; {found.newbyteorder('=')} would be"
        raise ValueError(msg)
    return found


def reinterpret(lease: Lease, dtype: Dtype) -> Lease:
    """Raw bytes as what the caller says they are."""
    flat = lease.flat
    if flat.dtype == dtype:
        return lease._replace(is_raw=False)
    if flat.dtype.itemsize != 1 or flat.dtype.kind not in "ui":
        msg = (
            f"dtype={dtype} is for raw bytes, but this array says itself that it holds "
            f"{flat.dtype}: convert it first"
        )
        raise TypeError(msg)
    if flat.nbytes % dtype.itemsize:
        msg = f"{flat.nbytes} bytes are no whole number of {dtype} ({dtype.itemsize} bytes each)"
        raise ValueError(msg)
    seen = flat.view(dtype)
    return lease._replace(flat=seen, shape=seen.shape, is_raw=False)


# --------------------------------------------------------------------------------------------------
# Lending memory that numpy can see; the way of every adapter on a host.


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
