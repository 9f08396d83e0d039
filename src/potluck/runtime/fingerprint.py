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
from potluck.runtime.call import Call

__all__ = ["SIZE", "Fingerprint", "describe_mismatch"]

_LAYOUT = struct.Struct("<BBBBIQIII4x")
SIZE = _LAYOUT.size

_COLLECTIVES = tuple(Collective)
_OPS = tuple(ReduceOp)
_NO_OP = 255
_OTHER_DTYPE = 128
"""Types beyond those that can be reduced are told apart by a hash in the seven lower bits."""


class Fingerprint(NamedTuple):
    """The facts that must agree."""

    collective: int
    op: int
    dtype: int
    purpose: int
    """0: the caller's own operation.  Others are those that the group adds."""
    root: int
    elements: int
    """Of all blocks together."""
    counts: int
    """A hash of how the elements are divided."""
    plan: int
    codec: int = 0

    @classmethod
    def of(cls, call: Call, plan: int, purpose: int = 0, codec: int = 0) -> Fingerprint:
        """The fingerprint of a call that is done by a plan."""
        task = call.task
        op = _NO_OP if call.reducer is None else _OPS.index(call.reducer.op)
        counts = 0 if len(task.counts) == 1 else zlib.crc32(repr(task.counts).encode())
        return cls(
            _COLLECTIVES.index(task.collective),
            op,
            _dtype_code(call.source.dtype),
            purpose,
            task.root,
            task.total,
            counts,
            plan,
            codec,
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
        known = self.collective < len(_COLLECTIVES)
        collective = _COLLECTIVES[self.collective] if known else None
        name = collective.value if collective else f"collective {self.collective}"
        parts = [] if self.op == _NO_OP else [_name_op(self.op)]
        parts += [_name_dtype(self.dtype), f"{self.elements} elements"]
        if collective is not None and collective.has_root:
            parts.append(f"root {self.root}")
        if self.codec:
            parts.append(f"as {NAMES.get(self.codec, 'another format')}")
        return f"{name}({', '.join(parts)})"


def _dtype_code(dtype: Dtype) -> int:
    if dtype in DTYPES:
        return DTYPES.index(dtype)
    return _OTHER_DTYPE | zlib.crc32(repr(np.dtype(dtype)).encode()) & 127


def _name_dtype(code: int) -> str:
    if code >= len(DTYPES):
        return "another type"
    return "bfloat16" if DTYPES[code] == BFLOAT16 else DTYPES[code].name


def _name_op(code: int) -> str:
    return _OPS[code].value if code < len(_OPS) else f"reduction {code}"


def describe_mismatch(
    here: tuple[int, Fingerprint], there: tuple[int, Fingerprint], hosts: Callable[[int], str]
) -> str:
    """Which two ranks disagree, and about what."""
    (me, mine), (peer, theirs) = here, there
    what = f"rank {me} called {mine}, rank {peer} ({hosts(peer)}) called {theirs}"
    if str(mine) == str(theirs):
        if mine.counts != theirs.counts:
            what += ", with the elements divided in another way"
        elif mine.purpose != theirs.purpose:
            what += ", and one of them is a call ahead of the other"
        else:
            what += ", by another strategy"
    return what
