"""Shares: who owns how much of the vector in the direct form, so that no link is the last alone.

An owner of a share *s* of a vector of one moves, both out and in, its own contribution and the
results of others (1 − s) and the contributions and results of its share ((N − 1)·s): together
1 + (N − 2)·s.  The time of all is shortest when 1 + (N − 2)·s is proportional to the rate for
all who own anything, and those own nothing whose link is busy with their own contribution anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

__all__ = ["besides", "of_all_reduce", "rounded"]

STEPS = 64
"""Shares are multiples of the largest divided by this: finer than any measurement is."""


def rounded(weights: Sequence[int]) -> tuple[int, ...]:
    """The same proportions in small numbers.

    >>> rounded([1000, 990, 502, 0])
    (64, 63, 32, 0)
    >>> rounded([7, 7, 7])
    (1, 1, 1)
    """
    most = max(weights)
    steps = [(2 * STEPS * weight + most) // (2 * most) for weight in weights]
    common = gcd(*steps)
    return tuple(step // common for step in steps)


def of_all_reduce(rates: Sequence[int]) -> tuple[int, ...]:
    """The shares of an all-reduce, given the slower direction of each rank's link.

    >>> of_all_reduce([125, 125, 125, 25]), of_all_reduce([125, 125, 125, 100])
    ((1, 1, 1, 0), (64, 64, 64, 29))
    """
    size = len(rates)
    if size <= 2:  # noqa: PLR2004 - with two, both move the whole vector whatever the shares
        return (1,) * size
    among = sorted(rates, reverse=True)
    # With k owners of the rates r: 1 + (N − 2)·s = r·(N − 2 + k) / Σr, and s must not be negative.
    owners = max(
        count
        for count in range(1, size + 1)
        if among[count - 1] * (size - 2 + count) >= sum(among[:count])
    )
    whole = sum(among[:owners])
    return rounded([max(0, rate * (size - 2 + owners) - whole) for rate in rates])


def besides(root: int, rates: Sequence[int]) -> tuple[int, ...]:
    """The shares of all but ``root``, which has to move every result (or share) in any case.

    For a reduction the rates are those on the way in, for a broadcast those on the way out.

    >>> besides(0, [100, 100, 50])
    (0, 2, 1)
    """
    if len(rates) <= 2:  # noqa: PLR2004 - nobody is left to share with
        return tuple(int(rank == root) for rank in range(len(rates)))
    return rounded([0 if rank == root else rate for rank, rate in enumerate(rates)])
