"""Fingerprints: what a rank believes an operation to be, in 32 bytes.

The first frame of every operation on every stream carries one.  All ranks of a group must have the
same; where two differ, both are put into words, so that a person sees which call to mend.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from potluck.collective.compression.codecs import NAMES
from potluck.collective.reduce import BFLOAT16, DTYPES, Dtype, ReduceOp
from potluck.collective.task import Collective
from potluck.runtime.call import Call, Purpose

__all__ = ["SIZE", "Fingerprint", "describe_mismatch"]

_LAYOUT = struct.Struct("<BBBBIQIIII")
SIZE = _LAYOUT.size

_COLLECTIVES = tuple(Collective)
_OPS = tuple(ReduceOp)
_NO_OP = 255
_OTHER_DTYPE = 128
"""A type beyond those that can be reduced."""

_KINDS = {
    "M": "datetime64",
    "m": "timedelta64",
    "S": "bytes",
    "U": "text",
    "V": "structure",
    "f": "float",
    "c": "complex",
}

_COMPOSED: dict[int, str] = {
    Purpose.BROADCAST_OBJECT: "broadcast_object",
    Purpose.ALL_GATHER_OBJECT: "all_gather_object",
    Purpose.GATHER_OBJECT: "gather_object",
    Purpose.SCATTER_OBJECT: "scatter_object",
    Purpose.ALL_GATHER_COUNTS: "all_gather with counts='ask'",
    Purpose.GATHER_COUNTS: "gather with counts='ask'",
    Purpose.ALL_TO_ALL_COUNTS: "all_to_all with send_counts",
    Purpose.AUTO_COMPRESSION: "all_reduce with compression='auto'",
    Purpose.TOP_K: "all_reduce with compression='topk'",
    Purpose.RANDOM_K: "all_reduce with compression='random'",
    Purpose.POWER_SGD: "all_reduce with compression='powersgd'",
    Purpose.ALL_REDUCE_TREE: "all_reduce of a tree",
    Purpose.BROADCAST_TREE: "broadcast of a tree",
    Purpose.RECORDS: "a step of a training",
}
"""Calls that are made of several collectives, as a person would have written them."""


class Fingerprint(NamedTuple):
    """The facts that must agree."""

    collective: int
    op: int
    dtype: int
    purpose: int
    """A :class:`Purpose`."""
    root: int
    elements: int
    """Of all blocks together."""
    counts: int
    """A hash of how the elements are divided."""
    plan: int
    codec: int = 0
    other_dtype: int = 0
    """Of a type beyond those that can be reduced: its kind, its size and a hash."""

    @classmethod
    def of(cls, call: Call, plan: int, codec: int = 0) -> Fingerprint:
        """The fingerprint of a call that is done by a plan."""
        task = call.task
        op = _NO_OP if call.reducer is None else _OPS.index(call.reducer.op)
        counts = 0 if len(task.counts) == 1 else zlib.crc32(repr(task.counts).encode())
        return cls(
            _COLLECTIVES.index(task.collective),
            op,
            _dtype_code(call.source.dtype),
            call.purpose,
            task.root,
            task.total,
            counts,
            plan,
            codec,
            _describe_other(call.source.dtype),
        )

    def pack(self) -> bytes:
        """As bytes."""
        return _LAYOUT.pack(*self)

    @classmethod
    def unpack(cls, data: bytes | memoryview) -> Fingerprint:
        """From bytes that somebody sent."""
        return cls(*_LAYOUT.unpack(data))

    def __str__(self) -> str:
        """The call, as a person would have written it."""
        composed = _COMPOSED.get(self.purpose)
        if composed is not None:
            return composed
        known = self.collective < len(_COLLECTIVES)
        collective = _COLLECTIVES[self.collective] if known else None
        name = collective.value if collective else f"collective {self.collective}"
        if collective is Collective.BARRIER:
            return f"{name}()"
        parts = [] if self.op == _NO_OP else [_name_op(self.op)]
        parts.append(_name_dtype(self.dtype, self.other_dtype))
        parts.append("1 element" if self.elements == 1 else f"{self.elements} elements")
        if collective is not None and collective.has_root:
            parts.append(f"root {self.root}")
        if self.codec:
            parts.append(f"as {NAMES.get(self.codec, 'another format')}")
        return f"{name}({', '.join(parts)})"


def _dtype_code(dtype: Dtype) -> int:
    return DTYPES.index(dtype) if dtype in DTYPES else _OTHER_DTYPE


def _describe_other(dtype: Dtype) -> int:
    """A letter, a size of up to two bytes, and a byte that tells alike ones apart."""
    if dtype in DTYPES:
        return 0
    dtype = np.dtype(dtype)
    described = repr(dtype.descr if dtype.names else dtype.str)
    size, mark = min(dtype.itemsize, 0xFFFF), zlib.crc32(described.encode()) & 0xFF
    return ord(dtype.kind) << 24 | size << 8 | mark


def _name_dtype(code: int, other: int) -> str:
    if code < len(DTYPES):
        return "bfloat16" if DTYPES[code] == BFLOAT16 else DTYPES[code].name
    kind = _KINDS.get(chr(other >> 24), "another type")
    return f"{kind} of {other >> 8 & 0xFFFF} bytes"


def _name_op(code: int) -> str:
    return _OPS[code].value if code < len(_OPS) else f"reduction {code}"


def describe_mismatch(
    here: tuple[int, Fingerprint], there: tuple[int, Fingerprint], hosts: Callable[[int], str]
) -> str:
    """Which two ranks disagree, and about what."""
    (me, mine), (peer, theirs) = here, there
    what = f"rank {me} called {mine}, rank {peer} ({hosts(peer)}) called {theirs}"
    if str(mine) == str(theirs):
        what += _describe_hidden(mine, theirs)
    return what


def _describe_hidden(mine: Fingerprint, theirs: Fingerprint) -> str:
    """How two differ that look the same in words."""
    if mine.purpose != theirs.purpose:
        return ", and one of them is a call ahead of the other"
    if mine.purpose in _COMPOSED:
        if mine.root != theirs.root:
            return f", with roots {mine.root} and {theirs.root}"
        here, there = mine._replace(purpose=Purpose.OWN), theirs._replace(purpose=Purpose.OWN)
        return f"; the one is at its part {here}, the other at {there}"
    if mine.other_dtype != theirs.other_dtype:
        return ", of types that differ in their parts or units"
    if mine.counts != theirs.counts:
        return ", with the elements divided in another way"
    return ", by another strategy"
