"""What members tell each other about a step before they average it: a few numbers each.

Everybody checks the same numbers, so all go on, or all raise the same error.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from potluck.errors import CollectiveMismatch
from potluck.training.sampler import MAX_PIECES
from potluck.training.sampler_intervals import Intervals

__all__ = ["LENGTH", "Record", "check_records", "signature_of"]

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
    def decode(cls, row: Sequence[int]) -> Record:
        """From numbers of another member."""
        step, signature, weight, speed, epoch, pieces = row[:_HEAD]
        if not 0 <= pieces <= MAX_PIECES:
            raise CollectiveMismatch(f"A member claims {pieces} intervals; {MAX_PIECES} can be")
        bounds = row[_HEAD : _HEAD + 2 * pieces]
        share = tuple(zip(bounds[::2], bounds[1::2], strict=True))
        (value,) = struct.unpack("<d", struct.pack("<q", weight))
        return cls(step, signature, value, speed, epoch, share)


def check_records(records: Sequence[Record]) -> None:
    """Raise unless all are about the same step and the same arrays; the same on all ranks."""
    for rank, record in enumerate(records):
        first = next(each for each in records if each.signature or each is records[-1])
        if record.step != records[0].step:
            raise CollectiveMismatch(
                f"Rank {rank} is at step {record.step}, rank 0 at step {records[0].step}",
                rank=rank,
                hint="Every rank calls step() once for each step.",
            )
        if record.signature not in (0, first.signature):
            raise CollectiveMismatch(
                f"Rank {rank} brings other gradients than rank {records.index(first)}: "
                "their names, shapes or types differ",
                rank=rank,
                hint="All ranks train the same model, with the same code.",
            )
        if not 0 <= record.weight < float("inf"):
            raise CollectiveMismatch(f"Rank {rank} gives its gradients the weight {record.weight}")
    if len({record.epoch for record in records if record.share}) > 1:
        raise CollectiveMismatch("The ranks are in different epochs of their samples")
    if not any(record.weight for record in records):
        raise CollectiveMismatch(
            "No rank brings anything to this step",
            hint="A weight is the number of samples; at least one rank needs some.",
        )


def signature_of(leaves: Sequence[tuple[object, ...]]) -> int:
    """A number for names, shapes and types of gradients; never 0.

    >>> signature_of([("w", (2, 3), "float32")]) == signature_of([("w", (3, 2), "float32")])
    False
    """
    digest = hashlib.blake2b(repr(list(leaves)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1 | 1
