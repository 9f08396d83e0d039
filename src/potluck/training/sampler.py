"""ElasticSampler: every sample exactly once per epoch, whoever comes and goes.

What counted is a set of committed intervals of the epoch's order.  A share that was handed out
counts when its step is committed, and returns to the pool when it is not; so the state is the same
on all members, is a few numbers long, and any number of members can go on from it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from potluck.training.sampler_intervals import Intervals, overlap, subtract, take, total, union
from potluck.training.sampler_order import Indices, shuffled

__all__ = ["MAX_PIECES", "ElasticSampler", "divided"]

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
            msg = f"A sampler hands out at least one sample, not {size}"
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
        """What is needed to go on from here, on any number of members: plain values."""
        return {
            "size": self.size,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "committed": [list(interval) for interval in self.committed],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what was saved, for data of the same size."""
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
