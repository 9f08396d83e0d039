"""Loads: what each rank moves and does, and the least time that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from potluck.collective.costs import Costs

__all__ = ["Load"]


@dataclass(frozen=True)
class Load:
    """What each rank moves and does."""

    up: Sequence[int]
    """Bytes out."""
    down: Sequence[int]
    """Bytes in."""
    pieces: Sequence[int]
    """Pieces out and in."""
    added: Sequence[int]
    """Bytes added to others."""

    def bound(self, costs: Costs) -> int:
        """No schedule with this load is faster, however well it overlaps."""
        return max(
            max(
                costs.up(rank, self.up[rank]),
                costs.down(rank, self.down[rank]),
                self.pieces[rank] * costs.host.piece + costs.adding(self.added[rank]),
            )
            for rank in range(len(self.up))
        )
