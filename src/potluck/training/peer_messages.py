"""Messages between the members of a training: typed, bounded, and blamed on their sender.

What arrives is decoded as one type, with bounds on every part of it.  A member whose message does
not fit that type, or contradicts what all members know, is named in a
:class:`~potluck.MalformedFrame` with its rank.  In a cluster that removes it from the view, on all
members alike, and the others continue.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from potluck._decode import decode_msgpack
from potluck.collective.collectives import MAX_OBJECT_BYTES, DistributedBackend
from potluck.errors import DistributedError, MalformedFrame
from potluck.training.sampler import MAX_PIECES

SMALL = 64 << 10
"""Bytes of a message whose size does not depend on the model."""

Place = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Bounds = tuple[Place, Place]
Shares = Annotated[tuple[Bounds, ...], msgspec.Meta(max_length=MAX_PIECES)]
"""Samples that a member has in hand."""

T = TypeVar("T")


def malformed(rank: int, what: str, cause: str) -> MalformedFrame:
    """The error that names a member, what it sent, and what was wrong with that.

    >>> str(malformed(2, "its report", "a step of -1"))
    'Rank 2 sent its report in a form that is not valid: a step of -1'
    """
    return MalformedFrame(
        f"Rank {rank} sent {what} in a form that is not valid", rank=rank, cause=cause
    )


def gather(
    group: DistributedBackend, message: object, kind: type[T], what: str, *, limit: int = SMALL
) -> list[T]:
    """Every member's message, in rank order; all members raise the same if one is not valid."""
    try:
        told = group.all_gather_object(msgspec.msgpack.encode(message), limit=limit)
    except DistributedError as error:
        raise _blamed(error, group.rank, what) from None
    return [_read(each, kind, rank, what) for rank, each in enumerate(told)]


def broadcast(
    group: DistributedBackend,
    message: object | None,
    kind: type[T],
    what: str,
    root: int,
    *,
    limit: int = MAX_OBJECT_BYTES,
) -> T:
    """The root's message; the others pass None."""
    data = None if message is None else msgspec.msgpack.encode(message)
    try:
        told = group.broadcast_object(data, root, limit=limit)
    except DistributedError as error:
        raise _blamed(error, group.rank, what) from None
    return _read(told, kind, root, what)


def _read(data: object, kind: type[T], rank: int, what: str) -> T:
    if not isinstance(data, bytes):
        raise malformed(rank, what, f"a {type(data).__name__} where bytes were expected")
    try:
        return decode_msgpack(data, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise malformed(rank, what, str(error)) from None


def _blamed(error: DistributedError, me: int, what: str) -> DistributedError:
    """A member says that it has no message: here each of them has one."""
    if type(error) is DistributedError and error.rank not in {None, me}:
        return malformed(error.rank or 0, what, "it announced none")
    return error


def check_intervals(pieces: tuple[tuple[int, int], ...], size: int | None) -> str:
    """What is wrong with samples that a member says it has, in words; empty if nothing is.

    >>> check_intervals(((0, 4), (6, 9)), 9), check_intervals(((4, 2),), 9)
    ('', 'the samples 4 to 2')
    """
    end = 0
    for start, stop in pieces:
        if not end <= start < stop:
            return f"the samples {start} to {stop}"
        end = stop
    if size is not None and end > size:
        return f"samples up to {end} of {size}"
    return ""
