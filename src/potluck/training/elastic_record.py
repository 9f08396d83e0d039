"""What members tell each other about a step before they average it: a few numbers each.

Everybody checks the same numbers, so all go on, or all raise the same error.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from potluck.errors import CollectiveMismatch
from potluck.training.peer_messages import check_intervals, malformed
from potluck.training.sampler import MAX_PIECES
from potluck.training.sampler_intervals import Intervals

__all__ = ["LENGTH", "Record", "check_records", "signature_of"]

WHAT = "its part in a step"

HEAVIEST = 1e30
"""The largest weight: sums of them stay finite in single precision."""

_HEAD = 6
LENGTH = _HEAD + 2 * MAX_PIECES
"""Numbers in a record."""


@dataclass(frozen=True, slots=True)
class Record:
    """One member's part in a step."""

    step: int
    signature: int
    """Which arrays it brings; 0 for nothing."""
    weight: float
    """How much they count: usually the number of samples."""
    speed: int
    """Thousandths of a sample per second."""
    epoch: int
    """Of the sampler."""
    share: Intervals = ()

    def encode(self) -> npt.NDArray[np.int64]:
        """As numbers."""
        (weight,) = struct.unpack("<q", struct.pack("<d", self.weight))
        flat = [bound for piece in self.share for bound in piece]
        head = [self.step, self.signature, weight, self.speed, self.epoch, len(self.share)]
        return np.array([*head, *flat, *[0] * (LENGTH - _HEAD - len(flat))], np.int64)

    @classmethod
    def decode(cls, row: Sequence[int], rank: int) -> Record:
        """From numbers of another member, which is named if they make no sense."""
        step, signature, weight, speed, epoch, pieces = row[:_HEAD]
        (value,) = struct.unpack("<d", struct.pack("<q", weight))
        wrong = ""
        if not 0 <= pieces <= MAX_PIECES:
            wrong = f"{pieces} intervals, where {MAX_PIECES} are possible"
            pieces = 0
        bounds = row[_HEAD : _HEAD + 2 * pieces]
        share = tuple(zip(bounds[::2], bounds[1::2], strict=True))
        wrong = wrong or check_intervals(share, None)
        if not 0 <= value <= HEAVIEST:
            wrong = f"a weight of {value:g}"
        if min(step, signature, speed, epoch) < 0:
            wrong = f"step {step}, epoch {epoch}, speed {speed}"
        if wrong:
            raise malformed(rank, WHAT, wrong)
        return cls(step, signature, value, speed, epoch, share)


def check_records(records: Sequence[Record], me: int | None = None) -> None:
    """Raise unless all are about the same step and the same arrays; the same on all ranks.

    Where most members agree, the error names one that does not; in a cluster the others continue
    without it.  ``me`` is this rank: if it is the odd one out, it must not blame the others.
    """
    _check_majority([record.step for record in records], me, "of step {}")
    signed = [record for record in records if record.signature]
    for rank, record in enumerate(records):
        first = signed[0] if signed else record
        if record.step != records[0].step:
            raise CollectiveMismatch(
                f"Rank {rank} is at step {record.step}, rank 0 at step {records[0].step}",
                rank=rank,
                hint="Every rank calls step() once for each step.",
            )
        if record.signature not in (0, first.signature):
            _check_majority(
                [each.signature or None for each in records],
                me,
                "about other gradients: their names, shapes or types differ",
            )
            raise CollectiveMismatch(
                f"Rank {rank} brings other gradients than rank {records.index(first)}: "
                "their names, shapes or types differ",
                rank=rank,
                hint="All ranks train the same model, with the same code.",
            )
    epochs = [record.epoch if record.share else None for record in records]
    _check_majority(epochs, me, "of epoch {} of the samples")
    if len({epoch for epoch in epochs if epoch is not None}) > 1:
        raise CollectiveMismatch("The ranks are in different epochs of their samples")
    if not any(record.weight for record in records):
        raise CollectiveMismatch(
            "No rank brings anything to this step",
            hint="A weight is the number of samples; at least one rank needs some.",
        )


def _check_majority(values: Sequence[int | None], me: int | None, what: str) -> None:
    """Raise for a member that differs from most members, unless that is this one.

    A member that says nothing (None) differs from none.
    """
    if me is None:
        return
    counts = Counter(value for value in values if value is not None)
    usual, count = counts.most_common(1)[0] if counts else (0, 0)
    if 2 * count <= len(values) or values[me] not in (None, usual):
        return
    for rank, value in enumerate(values):
        if value not in (None, usual):
            raise malformed(rank, WHAT, what.format(value))


def signature_of(leaves: Sequence[tuple[object, ...]]) -> int:
    """A number for names, shapes and types of gradients; never 0.

    >>> signature_of([("w", (2, 3), "float32")]) == signature_of([("w", (3, 2), "float32")])
    False
    """
    digest = hashlib.blake2b(repr(list(leaves)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1
