"""Ballots: once two ranks disagree about an operation, who is the odd one out.

Every rank that ends a call because of a disagreement tells all others what it took its last two
operations for: one rank may have finished what another still waits in, but never more than one.  A
rank counts only what another one told it, or showed it on the stream between them; what a rank says
of a third one counts for nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from potluck.runtime.fingerprint import Fingerprint
from potluck.runtime.notices import Notice, Word

__all__ = ["Ballot"]


@dataclass
class Ballot:
    """What this rank knows of the beliefs of all."""

    world_size: int
    epoch: int
    operation: int
    """The last one of this rank in that epoch."""
    beliefs: Mapping[int, bytes]
    """What this rank takes its last operations for, by their numbers."""
    told: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """By rank: the same of others."""
    reporters: set[int] = field(default_factory=set)
    """Ranks that say they have seen a disagreement themselves."""
    _shown: dict[int, bytes] = field(default_factory=dict)

    def hear(self, rank: int, notice: Notice) -> None:
        """A rank tells what it believes."""
        if notice.word is Word.MISMATCH:
            self.reporters.add(rank)
        if notice.epoch == self.epoch:
            self.told[rank] = beliefs_of(notice.operation, notice.fingerprint, notice.earlier)

    def show(self, rank: int, belief: bytes) -> None:
        """A rank began an operation with us that is not ours, whatever it tells later."""
        self._shown[rank] = belief

    def _differing(self, operation: int) -> dict[int, bytes]:
        mine = self.beliefs[operation]
        found = {
            rank: each[operation]
            for rank, each in self.told.items()
            if each.get(operation, mine) != mine
        }
        if operation == self.operation:
            found |= self._shown
        return found

    def _agreeing(self, operation: int) -> int:
        """How many ranks believe the same as this one, which is one of them."""
        mine = self.beliefs[operation]
        return 1 + sum(
            each.get(operation) == mine and rank not in self._shown
            for rank, each in self.told.items()
        )

    def odd_one(self) -> tuple[int, str, str] | None:
        """A rank that believes something else than most do, and what both believe."""
        for operation in sorted(self.beliefs):
            differing = self._differing(operation)
            if differing and self._is_most(self._agreeing(operation)):
                rank = min(differing)
                mine = self.beliefs[operation]
                return rank, _worded(differing[rank]), _worded(mine)
        return None

    @property
    def has_most(self) -> bool:
        """Whether most ranks believe what this one does, of every operation that it knows of."""
        return all(
            not self._differing(operation) or self._is_most(self._agreeing(operation))
            for operation in self.beliefs
        ) and any(self._is_most(self._agreeing(operation)) for operation in self.beliefs)

    def is_decided(self, silent: Collection[int]) -> bool:
        """Whether more votes would change nothing; the silent ones may still vote."""
        if self.odd_one() is not None or not silent:
            return True
        for operation in self.beliefs:
            differing = self._differing(operation)
            if differing:
                most = max(self._agreeing(operation), *Counter(differing.values()).values())
                undecided = sum(rank not in self._shown for rank in silent)
                return not self._is_most(most + undecided) or self._is_most(most)
        return False

    def _is_most(self, count: int) -> bool:
        return 2 * count > self.world_size


def beliefs_of(operation: int, current: bytes, earlier: bytes) -> dict[int, bytes]:
    """The beliefs of a rank by the numbers of its operations, which begin with 1."""
    return {operation: current} | ({operation - 1: earlier} if operation > 1 else {})


def _worded(belief: bytes) -> str:
    return str(Fingerprint.unpack(belief))
