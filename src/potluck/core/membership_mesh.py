"""The largest set of processes that all hear each other.

Finding it exactly is exponential in the worst case, so the search has a budget; what it has found
by then is mutually connected, though perhaps not the largest.  A mesh with few missing links, which
is what real networks have, is solved long before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from typing import TypeVar

__all__ = ["largest_linked", "largest_mutual"]

_BUDGET = 5_000  # sets looked at; some 10 ms

P = TypeVar("P")


def largest_mutual(
    people: Sequence[P], is_linked: Callable[[P, P], bool], must: Sequence[P] = ()
) -> tuple[P, ...]:
    """The largest mutually linked part of ``people`` with all of ``must``, in the same order.

    Among equally large ones, the one whose members come first.

    >>> broken = {("b", "c"), ("c", "b")}
    >>> largest_mutual("abcd", lambda one, other: (one, other) not in broken)
    ('a', 'b', 'd')
    """
    size = len(people)
    links = [0] * size
    for i, j in combinations(range(size), 2):
        if is_linked(people[i], people[j]) and is_linked(people[j], people[i]):
            links[i] |= 1 << j
            links[j] |= 1 << i
    return largest_linked(people, links, must)


def largest_linked(people: Sequence[P], links: list[int], must: Sequence[P] = ()) -> tuple[P, ...]:
    """The same where ``links`` says for each, in bits, to whom it is linked in both directions.

    >>> largest_linked("abc", [0b110, 0b101, 0b011])
    ('a', 'b', 'c')
    """
    size = len(people)
    chosen, candidates = 0, (1 << size) - 1
    for one in must:
        index = people.index(one)
        chosen |= 1 << index
        candidates &= links[index]
    best = _Search(links).run(chosen, candidates & ~chosen)
    return tuple(people[i] for i in range(size) if best >> i & 1)


class _Search:
    """Branch and bound over sets kept as bits; lower bits are tried first, so they win ties."""

    def __init__(self, links: list[int]) -> None:
        self._links = links
        self._best = 0
        self._budget = _BUDGET

    def run(self, chosen: int, candidates: int) -> int:
        self._extend(chosen, candidates)
        return self._best

    def _extend(self, chosen: int, candidates: int) -> None:
        self._budget -= 1
        if not candidates and chosen.bit_count() > self._best.bit_count():
            self._best = chosen
        while candidates:
            if self._budget < 0 and self._best:
                return
            if chosen.bit_count() + candidates.bit_count() <= self._best.bit_count():
                return
            lowest = candidates & -candidates
            links = self._links[lowest.bit_length() - 1]
            candidates &= ~lowest
            self._extend(chosen | lowest, candidates & links)
