"""What an adapter does: show a user's array as flat memory, and write results back into it.

An adapter never keeps anything.  It says clearly what it cannot do, before anything has moved.
"""

from __future__ import annotations

import re
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


class BufferView(NamedTuple):
    """A user's array as flat memory, while it is read or written."""

    flat: Array
    """All elements in C order, one-dimensional and contiguous, in this machine's byte order."""
    shape: tuple[int, ...]
    commit: Callable[[], Any]
    """Call it once after the last write: it copies the elements back if they are in a temporary
    array, and returns the user's object, or a new one if that is immutable."""
    is_raw: bool = False
    """Whether it is bytes of which nothing says what they mean."""


class Adapter(Protocol):
    """Knows one kind of array."""

    def as_buffer(self, thing: Any, access: Access) -> BufferView:
        """Show an array as flat memory, its own wherever possible."""

    def allocate(self, like: Any, shape: Sequence[int]) -> BufferView:
        """Memory for a new array of the same kind and type."""


def check_dtype(dtype: Dtype) -> None:
    """Refuse types that cannot travel."""
    if dtype.hasobject:
        msg = "An array of Python objects cannot travel: use the variants for objects"
        raise TypeError(msg)
    if dtype.itemsize == 0:
        msg = f"An array of type {dtype} has elements without any content"
        raise TypeError(msg)


_NUMERIC = re.compile(r"bool|(?:u?int|b?float|complex)[0-9]{1,3}(?:_[a-z0-9]{1,12})?")
_OTHER = re.compile(r"[|<>][SUV][0-9]{1,4}|(?:datetime|timedelta)64\[[0-9]{0,6}[A-Za-z]{1,2}\]")


def is_numeric_name(name: str) -> bool:
    """Whether a name that came from a peer is that of a numeric type, as numpy writes it.

    Ask before ``np.dtype(name)``, which parses whole descriptions and warns of old names.

    >>> is_numeric_name("bfloat16"), is_numeric_name("a"), is_numeric_name("f4,(9,)u1")
    (True, False, False)
    """
    return _NUMERIC.fullmatch(name) is not None


def is_type_name(name: str) -> bool:
    """The same, for text, raw bytes and dates too.

    >>> is_type_name("<U5"), is_type_name("datetime64[ns]"), is_type_name("a5")
    (True, True, False)
    """
    return is_numeric_name(name) or _OTHER.fullmatch(name) is not None


def read_dtype(dtype: Any) -> Dtype:
    """A type given by a user: a name, or what numpy, torch or jax call a type.

    >>> read_dtype("bfloat16"), read_dtype(np.float32)
    (dtype(bfloat16), dtype('float32'))
    """
    name = str(dtype)
    try:
        found = np.dtype(name.removeprefix("torch.") if name.startswith("torch.") else dtype)
    except TypeError:
        msg = f"{dtype!r} is not a numeric type such as float32, bfloat16 or int64"
        raise TypeError(msg) from None
    check_dtype(found)
    if not found.isnative:
        msg = f"Raw bytes are in this machine's order; {found.newbyteorder('=')} would be"
        raise ValueError(msg)
    return found


def reinterpret(buffer: BufferView, dtype: Dtype) -> BufferView:
    """Raw bytes as what the caller says they are."""
    flat = buffer.flat
    if flat.dtype == dtype:
        return buffer._replace(is_raw=False)
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
    return buffer._replace(flat=seen, shape=seen.shape, is_raw=False)


# --------------------------------------------------------------------------------------------------
# Memory that numpy can see; the way of every adapter on a host.


def memory_as_buffer(
    array: Array, thing: Any, access: Access, *, is_raw: bool = False
) -> BufferView:
    """Show an array that shares its memory with ``thing``.

    Where the elements do not lie one after the other, or in another byte order, a temporary array
    stands in for them.
    """
    flags = array.flags
    check_dtype(array.dtype)
    if access.writes and not flags.carray:
        _check_writable(array, thing)
    if flags.c_contiguous and array.dtype.isnative:
        return BufferView(array.reshape(-1), array.shape, lambda: thing, is_raw)
    temporary = np.empty(array.shape, array.dtype.newbyteorder("="))
    if access.reads:
        np.copyto(temporary, array)

    def commit() -> Any:
        if access.writes:
            np.copyto(array, temporary)
        return thing

    return BufferView(temporary.reshape(-1), array.shape, commit, is_raw)


def fresh(dtype: Any, shape: Sequence[int]) -> BufferView:
    """A new numpy array; in the other byte order only at its end."""
    array = np.empty(tuple(shape), np.dtype(dtype).newbyteorder("="))
    return BufferView(array.reshape(-1), array.shape, lambda: array.astype(dtype, copy=False))


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
