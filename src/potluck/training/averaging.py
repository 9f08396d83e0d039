"""Gradients in and out of the one extra buffer in which they are averaged, bucket by bucket."""

from __future__ import annotations

import hashlib
import struct
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from potluck.arrays import trees
from potluck.arrays.adapters import adapter_of, as_buffer
from potluck.arrays.base import Access, Array
from potluck.collective.call import Work
from potluck.collective.collectives import DistributedBackend
from potluck.compression.compressor import GradientCompressor
from potluck.errors import CollectiveMismatch
from potluck.metrics.registry import DistributedMetrics
from potluck.training.peer_messages import check_intervals, malformed
from potluck.training.sampler import MAX_PIECES, Intervals
from potluck.training.steps import Position, StepHistory, explain

# --------------------------------------------------------------------------------------------------
# What members tell each other about a step before they average it: a few numbers each.
#
# All members check the same numbers, so all continue, or all raise the same error.

WHAT = "its part in a step"

HEAVIEST = 1e30
"""The largest weight: sums of them stay finite in single precision."""

_HEAD = 6
LENGTH = _HEAD + 2 * MAX_PIECES
"""Numbers in a record."""


@dataclass(frozen=True, slots=True)
class StepContribution:
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
    def decode(cls, row: Sequence[int], rank: int) -> StepContribution:
        """From numbers of another member, which is named if they make no sense."""
        step, signature, weight, speed, epoch, pieces = row[:_HEAD]
        (value,) = struct.unpack("<d", struct.pack("<q", weight))
        wrong = ""
        if not 0 <= pieces <= MAX_PIECES:
            wrong = f"{pieces} intervals, more than {MAX_PIECES}"
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


def check_records(records: Sequence[StepContribution], me: int | None = None) -> None:
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
            "No rank has samples for this step",
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


# --------------------------------------------------------------------------------------------------

_WIDE = np.dtype(np.float64)

Room = dict[int, Array]
"""Buffers by the number of their bucket, kept from step to step: fresh memory is slow to touch."""


class Leaf(NamedTuple):
    """What is known of an array before it is there."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    size: int


class _Bucket(NamedTuple):
    """Arrays that are averaged in one operation."""

    leaves: tuple[int, ...]
    size: int
    """Elements."""
    is_wide: bool


class Buckets:
    """How the arrays of a model are divided into operations, and the memory for them.

    Without ``limit`` (in bytes) there is one bucket for each precision.  With it they are made
    from the last array to the first, the order in which a backward pass gives them.  Types
    narrower than float32 are added up in float32.  Behind the last element of each bucket stands
    the weight, so that Σw·g and Σw are the results of the same operation.

    >>> leaves = [Leaf(name, (8,), "float32", 8) for name in "abc"]
    >>> [each.leaves for each in Buckets(leaves, limit=64).all]
    [(2, 1), (0,)]
    """

    def __init__(
        self, leaves: Sequence[Leaf], *, limit: int | None = None, room: Room | None = None
    ) -> None:
        if not leaves:
            msg = "There are no arrays in these gradients"
            raise ValueError(msg)
        self.leaves = tuple(leaves)
        self.all = _divided(self.leaves, limit)
        self.signature = signature_of([(*leaf[:3], limit or 0) for leaf in leaves])
        self._room = {} if room is None else room
        self._places: dict[int, tuple[int, int]] = {}  # of each leaf: its bucket, and where there
        for number, bucket in enumerate(self.all):
            place = 0
            for leaf in bucket.leaves:
                self._places[leaf] = number, place
                place += self.leaves[leaf].size

    @property
    def nbytes(self) -> int:
        """What is averaged in a step, uncompressed."""
        return sum(bucket.size * (8 if bucket.is_wide else 4) for bucket in self.all)

    def pack(self, number: int, flats: Sequence[Array], weight: float) -> Array:
        """Write w·g and w into a bucket; the gradients, given for its leaves, stay as they are."""
        bucket = self.all[number]
        dtype = np.dtype(np.float64 if bucket.is_wide else np.float32)
        buffer = self._room.get(number)
        if buffer is None or buffer.size != bucket.size + 1 or buffer.dtype != dtype:
            buffer = self._room[number] = np.empty(bucket.size + 1, dtype)
        place = 0
        for flat in flats:
            into = buffer[place : place + flat.size]
            if weight:
                np.multiply(flat, weight, out=into, casting="unsafe", dtype=dtype)
            else:
                into[:] = 0  # whatever is there counts nothing, not even NaN
            place += flat.size
        buffer[-1] = weight
        return buffer

    def start(
        self,
        number: int,
        group: DistributedBackend,
        compressor: GradientCompressor | None,
        total: float,
    ) -> Work[Array]:
        """Begin to add up a packed bucket; ``total`` is the weight of all, for compression."""
        buffer = self._room[number]
        if compressor is None or self.all[number].is_wide:
            return group.all_reduce(buffer, async_op=True)
        part = buffer[:-1]  # what is compressed is the part of the mean; weights are known exactly
        np.divide(part, np.float32(total), out=part)
        name = "gradients" if len(self.all) == 1 else f"gradients.{number}"
        return group.all_reduce(part, compression=compressor.tensor(name), async_op=True)

    def finish(self, number: int, *, is_compressed: bool) -> None:
        """Make the mean of the sum."""
        if not is_compressed or self.all[number].is_wide:
            buffer = self._room[number]
            np.divide(buffer[:-1], buffer[-1], out=buffer[:-1])

    def values(self, leaf: int) -> Array:
        """The memory in which the mean of an array is."""
        number, place = self._places[leaf]
        return self._room[number][place : place + self.leaves[leaf].size]

    def forget(self) -> None:
        """Use other memory: what is under way may still write into this."""
        self._room.clear()


def _divided(leaves: Sequence[Leaf], limit: int | None) -> list[_Bucket]:
    made: list[tuple[list[int], bool]] = []
    filling: dict[bool, tuple[list[int], int]] = {}
    order = range(len(leaves)) if limit is None else reversed(range(len(leaves)))
    for number in order:
        wide = leaves[number].dtype == str(_WIDE)
        members, nbytes = filling.get(wide, ([], 0))
        more = leaves[number].size * (8 if wide else 4)
        if not members or (limit is not None and nbytes + more > limit):
            members, nbytes = [], 0
            made.append((members, wide))
        members.append(number)
        filling[wide] = members, nbytes + more
    return [
        _Bucket(tuple(members), sum(leaves[each].size for each in members), wide)
        for members, wide in made
    ]


class Gradients:
    """A tree of gradients: kept as it is, averaged elsewhere."""

    def __init__(
        self,
        tree: Any,
        room: Room | None = None,
        *,
        limit: int | None = None,
        buckets: Buckets | None = None,
    ) -> None:
        self.tree = tree
        found = trees.leaves_of(tree)
        self._arrays = [array for _, array in found]
        self._flats = [as_buffer(array, Access.READ).flat for array in self._arrays]
        for flat in self._flats:
            if flat.dtype.kind not in "fV" or flat.dtype.itemsize > _WIDE.itemsize:
                msg = f"Gradients must be floating-point numbers, got {flat.dtype}"
                raise TypeError(msg)
        leaves = tuple(
            Leaf(name, tuple(int(side) for side in array.shape), str(flat.dtype), flat.size)
            for (name, array), flat in zip(found, self._flats, strict=True)
        )
        if buckets is not None and buckets.leaves != leaves:
            msg = "These are not the gradients whose averaging was started"
            raise ValueError(msg)
        self.buckets = buckets or Buckets(leaves, limit=limit, room=room)

    def pack(self, number: int, weight: float) -> None:
        """Write w·g and w into a bucket."""
        flats = [self._flats[leaf] for leaf in self.buckets.all[number].leaves]
        self.buckets.pack(number, flats, weight)

    def mean(self) -> Any:
        """The tree of the averages, of the kinds of arrays that the gradients are.

        Arrays of numpy show the buffer itself, which the next step uses again.
        """
        made = []
        for number, array in enumerate(self._arrays):
            values = self.buckets.values(number)
            if type(array) is np.ndarray and array.dtype == values.dtype:
                made.append(values.reshape(array.shape))
                continue
            buffer = adapter_of(array).allocate(array, tuple(array.shape))
            np.copyto(buffer.flat, values, casting="unsafe")
            made.append(buffer.commit())
        return trees.replaced(self.tree, iter(made))


# --------------------------------------------------------------------------------------------------
# A step under way, and how a step went.


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How a step went.

    >>> StepOutcome(step=3, counted=True, world_size=2, weight=64.0, tries=1).step
    3
    """

    step: int
    """Steps that are committed now."""
    counted: bool
    """Whether this member's gradients are in it.

    If not, they were for a state it no longer has, or for samples that others have now.
    """
    world_size: int
    """How many members there are now."""
    weight: float
    """Of all gradients in it together."""
    tries: int
    """How often its averaging was begun."""


def count_step(metrics: DistributedMetrics | None, step: Callable[[], StepOutcome]) -> StepOutcome:
    """Do a step, and count how it went."""
    if metrics is None:
        return step()
    training = metrics.training
    began = time.perf_counter()
    try:
        outcome = step()
    except BaseException as error:
        training.steps.note(time.perf_counter() - began, 0, type(error).__name__)
        raise
    training.steps.note(time.perf_counter() - began, 0)
    training.commit(outcome.step, outcome.weight, outcome.tries, counted=outcome.counted)
    return outcome


@dataclass(frozen=True, slots=True)
class DiscardedWork:
    """Committed steps of this machine that are not in the state with which the cluster continues.

    >>> apart, together = Position("a" * 32, 1, 157), Position("b" * 32, 4, 120)
    >>> lost = DiscardedWork(37, 1480, apart, together, "both sides met", 37, 1480)
    >>> str(lost).partition("made on")[0], str(lost).partition(": ")[2]
    ('37 steps (1,480 samples) ', 'the cluster continues from step 120. Reason: both sides met.')
    """

    steps: int
    samples: int
    before: Position
    """The last step that this machine had applied."""
    after: Position
    """The step from which the cluster continues."""
    reason: str
    total_steps: int
    """Steps discarded by this trainer so far, these included."""
    total_samples: int
    is_loaded: bool = False
    """Whether the steps come from a checkpoint that this machine loaded."""

    def __str__(self) -> str:
        """One sentence for people, and the reason."""
        source = "made on this machine while it was apart from the others"
        if self.is_loaded:
            source = "that this machine loaded from a checkpoint"
        return (
            f"{self.steps:,} step{'s' * (self.steps != 1)} ({self.samples:,} "
            f"sample{'s' * (self.samples != 1)}) {source} "
            f"{'is' if self.steps == 1 else 'are'} discarded: the cluster continues from "
            f"step {self.after.step}. Reason: {self.reason}."
        )


def compare_states(
    mine: StepHistory, target: StepHistory, lineage: str, last: DiscardedWork | None
) -> DiscardedWork | None:
    """What is discarded when the target replaces my state in a view of a lineage, if anything.

    ``last`` is what was discarded before.
    """
    lost = mine.discarded_by(target)
    if lost is None:
        return None
    steps, samples = lost
    reason = explain(mine, target, lineage)
    before = (0, 0) if last is None else (last.total_steps, last.total_samples)
    return DiscardedWork(
        steps,
        samples,
        mine.position,
        target.position,
        reason,
        before[0] + steps,
        before[1] + samples,
    )


@dataclass(slots=True)
class PendingStep:
    """A step under way: what went into it stays as it is until the step is applied."""

    gradients: Gradients
    weight: float
    tries: int = 0
    records: tuple[StepContribution, ...] = ()
    """Of all members, for the try that this member holds."""
