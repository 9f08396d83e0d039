"""The order of samples in an epoch: a permutation that needs no memory.

A Feistel network over the smallest square of two that covers the size, walked along its cycles
until it lands inside: every position has exactly one sample, in an order that seed and epoch alone
decide, on every machine alike.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

__all__ = ["Indices", "shuffled"]

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
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits of each half
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
