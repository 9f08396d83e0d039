"""Collectives of small objects: Python's own values, written down and never pickled.

The lengths travel first and are compared with a limit before anything is allocated.  A rank whose
object cannot travel says so with its length, so that the others need not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np

from potluck.arrays.base import Array
from potluck.collective.task import Collective, Task
from potluck.errors import DistributedError, MalformedFrame
from potluck.runtime.call import Purpose
from potluck.runtime.exchanging import Exchanging
from potluck.runtime.limits import Countdown
from potluck.runtime.object_codec import decode, encode
from potluck.runtime.requests import Place, Request, part_of
from potluck.vocabulary import Seconds

__all__ = ["MAX_OBJECT_BYTES", "Objects"]

MAX_OBJECT_BYTES = 16 << 20
"""What one object may take, written down; larger things are arrays."""

FAILED = -1
"""Instead of a length: there is no object."""


class Objects(Exchanging):
    """What a group can do with objects.

    Objects are None, numbers (integers of any size), str, bytes, dates and times, and lists,
    tuples, dicts and sets of them.  Each is at most ``limit`` bytes when written down.
    """

    def broadcast_object(
        self,
        value: Any = None,
        root: int = 0,
        *,
        limit: int = MAX_OBJECT_BYTES,
        timeout: Seconds | None = None,
    ) -> Any:
        """The root's object, on every rank; the others' ``value`` is ignored."""
        is_root = self._check_rank_of(root) == self.rank
        errand = self._errand(Purpose.BROADCAST_OBJECT, timeout)
        parcel = _Parcel.of([value] if is_root else [], limit)
        length = np.array(parcel.lengths or [0], np.int64)
        errand.broadcast(length, root)
        (count,) = parcel.check(length.tolist(), limit, [root])
        octets = parcel.octets if is_root else np.empty(count, np.uint8)
        errand.broadcast(octets, root)
        return _decode(octets, root)

    def all_gather_object(
        self, value: Any, *, limit: int = MAX_OBJECT_BYTES, timeout: Seconds | None = None
    ) -> list[Any]:
        """Every rank's object, in rank order, on every rank."""
        errand = self._errand(Purpose.ALL_GATHER_OBJECT, timeout)
        parcel, lengths = self._tell_lengths(value, limit, errand)
        octets = np.empty(sum(lengths), np.uint8)
        errand.move(Collective.ALL_GATHER, lengths, 0, parcel.octets, octets)
        return _open(octets, lengths)

    def gather_object(
        self,
        value: Any,
        root: int = 0,
        *,
        limit: int = MAX_OBJECT_BYTES,
        timeout: Seconds | None = None,
    ) -> list[Any] | None:
        """Every rank's object, in rank order, at the root; None on the others."""
        is_root = self._check_rank_of(root) == self.rank
        errand = self._errand(Purpose.GATHER_OBJECT, timeout)
        parcel, lengths = self._tell_lengths(value, limit, errand)
        octets = np.empty(sum(lengths), np.uint8) if is_root else None
        errand.move(Collective.GATHER, lengths, root, parcel.octets, octets)
        return None if octets is None else _open(octets, lengths)

    def scatter_object(
        self,
        values: Sequence[Any] | None = None,
        root: int = 0,
        *,
        limit: int = MAX_OBJECT_BYTES,
        timeout: Seconds | None = None,
    ) -> Any:
        """The object that the root has for this rank; only the root passes ``values``."""
        is_root = self._check_rank_of(root) == self.rank
        errand = self._errand(Purpose.SCATTER_OBJECT, timeout)
        parcel = self._parcel_for_all(values, root, limit) if is_root else _Parcel.of([], limit)
        told = np.array(parcel.lengths or [0] * self.world_size, np.int64)
        errand.broadcast(told, root)
        lengths = parcel.check(told.tolist(), limit, [root] * self.world_size)
        out = np.empty(lengths[self.rank], np.uint8)
        octets = parcel.octets if is_root else None
        errand.move(Collective.SCATTER, lengths, root, octets, out)
        return _decode(out, root)

    def _parcel_for_all(self, values: Sequence[Any] | None, root: int, limit: int) -> _Parcel:
        """One object for each rank; if there are not, all of them must hear of it."""
        count = len(values) if isinstance(values, Sequence) else None
        if count == self.world_size and values is not None:
            return _Parcel.of(values, limit)
        got = f"not {count}" if count is not None else f"not {values!r:.50}"
        msg = f"Rank {root} is the root: it must pass {self.world_size} objects, {got}"
        return _Parcel([], ValueError(msg), self.world_size)

    def _tell_lengths(self, value: Any, limit: int, errand: _Errand) -> tuple[_Parcel, list[int]]:
        parcel = _Parcel.of([value], limit)
        told = self._tell_all(
            np.array(parcel.lengths, np.int64), errand.purpose, errand.countdown.left
        )
        return parcel, parcel.check(told.tolist(), limit, range(self.world_size))

    def _errand(self, purpose: Purpose, timeout: Seconds | None) -> _Errand:
        def run(request: Request[None], seconds: float | None) -> None:
            self._launch(request, seconds, async_op=False)

        return _Errand(self._place, purpose, Countdown(timeout), run)


class _Errand(NamedTuple):
    """The collectives that one call is made of, and the time that they have together."""

    place: Place
    purpose: Purpose
    countdown: Countdown
    run: Callable[[Request[None], float | None], None]

    def broadcast(self, array: Array, root: int) -> None:
        """The root's array, into that of every other rank."""
        task = self.place.whole(Collective.BROADCAST, array.size, root)
        self._do(task, array if self.place.rank == root else None, array)

    def move(
        self,
        collective: Collective,
        counts: Sequence[int],
        root: int,
        source: Array | None,
        target: Array | None,
    ) -> None:
        """Blocks of so many elements, from where they are to where they belong."""
        self._do(self.place.blocks(collective, counts, 1, root), source, target)

    def _do(self, task: Task, source: Array | None, target: Array | None) -> None:
        self.run(part_of(self.purpose, task, source, target), self.countdown.left)


class _Parcel:
    """Objects of this rank, written down, or the reason why they cannot be."""

    def __init__(self, parts: list[bytes], error: Exception | None, count: int) -> None:
        self.error = error
        self.octets: Array = np.frombuffer(b"".join(parts), np.uint8)
        self.lengths = [len(part) for part in parts] if error is None else [FAILED] * count

    @classmethod
    def of(cls, values: Sequence[Any], limit: int) -> _Parcel:
        """Write objects down; what goes wrong is kept until everybody has been told."""
        try:
            parts = [encode(value) for value in values]
            for part in parts:
                if len(part) > limit:
                    msg = f"An object of {len(part)} bytes is larger than the limit of {limit}"
                    raise ValueError(msg)
        except (TypeError, ValueError, RecursionError) as error:
            return cls([], error, len(values))
        return cls(parts, None, len(values))

    def check(self, lengths: list[int], limit: int, senders: Sequence[int]) -> list[int]:
        """Lengths that somebody sent; raise if an object does not exist or is too large."""
        if self.error is not None:
            raise self.error
        for length, sender in zip(lengths, senders, strict=True):
            if length == FAILED:
                raise DistributedError(
                    f"Rank {sender} has an object that cannot travel; its own error says why",
                    rank=sender,
                )
            if not 0 <= length <= limit:
                raise MalformedFrame(
                    f"Rank {sender} announced an object of {length} bytes; {limit} are allowed",
                    rank=sender,
                    expected=limit,
                    got=length,
                )
        return lengths


def _open(octets: Array, lengths: Sequence[int]) -> list[Any]:
    ends = accumulate(lengths, initial=0)
    spans = enumerate(pairwise(ends))
    return [_decode(octets[start:stop], rank) for rank, (start, stop) in spans]


def _decode(octets: Array, sender: int) -> Any:
    try:
        return decode(octets.data)
    except MalformedFrame as error:
        raise MalformedFrame(
            f"Rank {sender} sent an object that cannot be understood",
            rank=sender,
            cause=error.cause or error.message,
        ) from None
