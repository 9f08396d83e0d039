"""ElasticSampler: every sample exactly once per epoch, while members come and go.

What counted is a set of committed intervals of the epoch's order.  A share that was handed out
counts when its step is committed, and returns to the pool when it is not; so the state is the same
on all members, is a few numbers long, and any number of members can continue from it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# --------------------------------------------------------------------------------------------------
# Sets of whole numbers as intervals: which samples counted, which are taken, which are left.

Intervals: TypeAlias = tuple[tuple[int, int], ...]
"""Half-open, ascending, with gaps between them: ``((0, 4), (6, 9))`` is 0 to 3 and 6 to 8."""


def union(*sets: Iterable[tuple[int, int]]) -> Intervals:
    """Everything that is in any of them; also puts a single one in order.

    >>> union([(4, 6)], [(0, 4), (9, 9)], [(8, 9)])
    ((0, 6), (8, 9))
    """
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(each for one in sets for each in one if each[0] < each[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return tuple(merged)


def subtract(these: Iterable[tuple[int, int]], those: Iterable[tuple[int, int]]) -> Intervals:
    """What is in the first and not in the second.

    >>> subtract([(0, 10)], [(2, 3), (8, 12)])
    ((0, 2), (3, 8))
    """
    left: list[tuple[int, int]] = []
    holes = union(those)
    for start, stop in union(these):
        begin = start
        for low, high in holes:
            if high <= begin or low >= stop:
                continue
            if low > begin:
                left.append((begin, low))
            begin = high
        if begin < stop:
            left.append((begin, stop))
    return tuple(left)


def overlap(these: Iterable[tuple[int, int]], those: Iterable[tuple[int, int]]) -> Intervals:
    """What is in both.

    >>> overlap([(0, 10)], [(2, 3), (8, 12)])
    ((2, 3), (8, 10))
    """
    first = union(these)
    return subtract(first, subtract(first, those))


def total(intervals: Iterable[tuple[int, int]]) -> int:
    """How many numbers.

    >>> total([(0, 4), (6, 9)])
    7
    """
    return sum(stop - start for start, stop in intervals)


def take(
    pool: Sequence[tuple[int, int]], count: int, pieces: int | None = None
) -> tuple[Intervals, Intervals]:
    """The first ``count`` numbers of a pool, in at most ``pieces`` intervals, and the rest.

    >>> take(((0, 4), (6, 9)), 5)
    (((0, 4), (6, 7)), ((7, 9),))
    """
    taken: list[tuple[int, int]] = []
    for place, (start, stop) in enumerate(pool):
        if count <= 0 or len(taken) == pieces:
            return tuple(taken), tuple(pool[place:])
        end = min(stop, start + count)
        taken.append((start, end))
        count -= end - start
        if end < stop:
            return tuple(taken), ((end, stop), *pool[place + 1 :])
    return tuple(taken), ()


# --------------------------------------------------------------------------------------------------
# The order of samples in an epoch: a permutation that needs no memory.
#
# A Feistel network over the smallest square of two that covers the size, walked along its cycles
# until it lands inside: every position has exactly one sample, in an order that seed and epoch
# alone decide, on every machine alike.

Indices: TypeAlias = npt.NDArray[np.int64]

ROUNDS = 6
"""Four make a Feistel network hard to tell from chance; two more cost little."""

_MASK = (1 << 64) - 1


def shuffled(positions: Indices, size: int, seed: int, epoch: int) -> Indices:
    """The samples that stand at these positions of an epoch's order.

    >>> order = shuffled(np.arange(10), 10, seed=1, epoch=0)
    >>> sorted(order.tolist()) == list(range(10)), order.tolist() == list(range(10))
    (True, False)
    """
    half = ((size - 1).bit_length() + 1) // 2  # bits of each half
    keys = _keys(seed, epoch)
    found = positions.astype(np.uint64)
    outside = np.ones(found.shape, bool)
    while outside.any():  # at most three of four places of the square are outside
        found[outside] = _encrypt(found[outside], half, keys)
        outside = found >= size
    return found.astype(np.int64)


def _encrypt(values: npt.NDArray[np.uint64], half: int, keys: list[int]) -> npt.NDArray[np.uint64]:
    bits, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ np.uint64(key)) & mask)
    return (left << bits) | right


def _mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64; overflow is meant."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _keys(seed: int, epoch: int) -> list[int]:
    source = np.random.SeedSequence([seed & _MASK, epoch & _MASK])
    return [int(key) for key in source.generate_state(ROUNDS, np.uint64)]


# --------------------------------------------------------------------------------------------------

MAX_PIECES = 8
"""Intervals of one share: what members tell each other about a step has a fixed size."""


class ElasticSampler:
    """Hands out the samples 0 to ``size - 1``, each once per epoch.

    Members with the same state hand out the same shares, so no two of them get the same sample.

    >>> sampler = ElasticSampler(10, shuffle=False)
    >>> shares = sampler.assign([2, 4])
    >>> [sampler.indices(share).tolist() for share in shares]
    [[0, 1], [2, 3, 4, 5]]
    >>> sampler.commit([shares[1]])
    >>> [sampler.indices(share).tolist() for share in sampler.assign([3, 3])]
    [[0, 1, 6], [7, 8, 9]]
    """

    def __init__(self, size: int, *, seed: int = 0, shuffle: bool = True) -> None:
        self.size = operator.index(size)
        if self.size < 1:
            msg = f"A sampler needs at least one sample, got {size}"
            raise ValueError(msg)
        self.seed = operator.index(seed)
        self.shuffle = shuffle
        self.epoch = 0
        """Epochs that are complete."""
        self.committed: Intervals = ()
        """Positions in this epoch's order that have counted."""

    def __repr__(self) -> str:
        """How far it is, for people."""
        done = total(self.committed)
        return f"<ElasticSampler, epoch {self.epoch}, {done} of {self.size} samples>"

    @property
    def counted(self) -> int:
        """Samples that have counted, over all epochs."""
        return self.epoch * self.size + total(self.committed)

    @property
    def remaining(self) -> int:
        """Samples of this epoch that have not counted yet."""
        return self.size - total(self.committed)

    def pool(self, reserved: Iterable[tuple[int, int]] = ()) -> Intervals:
        """Positions that have neither counted nor are reserved."""
        return subtract([(0, self.size)], union(self.committed, reserved))

    def assign(
        self, counts: Sequence[int], reserved: Iterable[tuple[int, int]] = ()
    ) -> list[Intervals]:
        """A share for each member, of about these sizes; the same for all who ask alike.

        ``reserved`` is what members have in hand already.  Where fewer samples are left than asked
        for, everybody gets a part of them; a share that would be in too many pieces is smaller.
        """
        wanted = [operator.index(count) for count in counts]
        if any(count < 0 for count in wanted):
            msg = f"Shares cannot be negative: {wanted}"
            raise ValueError(msg)
        pool = self.pool(reserved)
        if sum(wanted) > (left := total(pool)):
            wanted = divided(left, wanted)
        shares = []
        for count in wanted:
            share, pool = take(pool, count, MAX_PIECES)
            shares.append(share)
        return shares

    def indices(self, share: Iterable[tuple[int, int]]) -> Indices:
        """The samples of a share of this epoch."""
        pieces = [np.arange(start, stop, dtype=np.int64) for start, stop in share]
        positions = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
        if positions.size and not 0 <= positions.min() <= positions.max() < self.size:
            msg = f"A share goes beyond the {self.size} samples there are"
            raise ValueError(msg)
        if not self.shuffle:
            return positions
        return shuffled(positions, self.size, self.seed, self.epoch)

    def commit(self, shares: Iterable[Iterable[tuple[int, int]]]) -> None:
        """These shares have counted; when none is left, the next epoch begins.

        Raises ``ValueError`` and changes nothing if a sample would count twice.
        """
        counted = self.committed
        for share in shares:
            ordered = union(share)
            if overlap(ordered, counted):
                msg = f"The samples at {overlap(ordered, counted)} would count twice"
                raise ValueError(msg)
            if subtract(ordered, [(0, self.size)]):
                msg = f"There are no samples at {subtract(ordered, [(0, self.size)])}"
                raise ValueError(msg)
            counted = union(counted, ordered)
        self.committed = counted
        if not self.remaining:
            self.epoch, self.committed = self.epoch + 1, ()

    def state_dict(self) -> dict[str, Any]:
        """What is needed to continue from here, on any number of members: plain values."""
        return {
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "committed": [list(interval) for interval in self.committed],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what was saved, for data of the same size."""
        if state["size"] != self.size:
            msg = f"Saved for {state['size']} samples, but there are {self.size}"
            raise ValueError(msg)
        committed = union((int(start), int(stop)) for start, stop in state["committed"])
        if subtract(committed, [(0, self.size)]):
            msg = f"Saved intervals {committed} go beyond the {self.size} samples there are"
            raise ValueError(msg)
        self.seed, self.shuffle = int(state["seed"]), bool(state["shuffle"])
        self.epoch, self.committed = int(state["epoch"]), committed


def divided(amount: int, weights: Sequence[int]) -> list[int]:
    """Divide a number as these weights are to each other; what is left goes to the first largest.

    >>> divided(10, [1, 1, 2]), divided(1, [1, 1]), divided(3, [0, 0])
    ([3, 2, 5], [1, 0], [0, 0])
    """
    whole = sum(weights)
    if not whole:
        return [0] * len(weights)
    parts = [amount * weight // whole for weight in weights]
    owed = sorted(range(len(weights)), key=lambda i: (-(amount * weights[i] % whole), i))
    for place in owed[: amount - sum(parts)]:
        parts[place] += 1
    return parts
