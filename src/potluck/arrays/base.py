"""What an adapter does: lend a user's array as flat memory, and give it back.

An adapter never keeps anything.  It says clearly what it cannot do, before anything has moved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeAlias

import ml_dtypes  # noqa: F401 - gives numpy the names bfloat16 and float8_*
import numpy as np
import numpy.typing as npt

__all__ = ["Access", "Adapter", "Array", "Dtype", "Lease", "read_dtype", "reinterpret"]

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
