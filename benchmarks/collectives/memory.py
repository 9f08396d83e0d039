"""The buffers of a case: every contender works on the same memory, with the same numbers in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["ALL_GATHER", "ALL_REDUCE", "ALL_TO_ALL", "BROADCAST", "REDUCE_SCATTER", "Memory"]

Array = npt.NDArray[Any]

ALL_REDUCE, BROADCAST, REDUCE_SCATTER = "all_reduce", "broadcast", "reduce_scatter"
ALL_GATHER, ALL_TO_ALL = "all_gather", "all_to_all"


@dataclass(frozen=True)
class Memory:
    """What one rank brings along and what it gets; the same memory where that is usual."""

    collective: str
    rank: int
    world_size: int
    source: Array
    target: Array

    @classmethod
    def of(cls, collective: str, octets: int, rank: int, world_size: int) -> Memory:
        """Memory for a vector of ``octets`` bytes of float32, or for blocks that make up one."""
        whole = np.zeros(max(1, octets // 4), np.float32)
        block = np.zeros(max(1, whole.size // world_size), np.float32)
        source, target = {
            REDUCE_SCATTER: (whole, block),
            ALL_GATHER: (block, whole),
            ALL_TO_ALL: (whole, whole.copy() if collective == ALL_TO_ALL else whole),
        }.get(collective, (whole, whole))
        return cls(collective, rank, world_size, source, target)

    def fill(self) -> None:
        """Put the numbers there with which an operation begins."""
        if self.collective == ALL_TO_ALL:
            for other, block in enumerate(self._blocks(self.source)):
                block.fill(1 + self.rank * self.world_size + other)
        elif self.collective == BROADCAST:
            self.source.fill(0 if self.rank else 7)
        else:
            self.source.fill(1 + self.rank)

    def check(self) -> None:
        """Stop if an operation that began with :meth:`fill` gave anything else than it should."""
        size, total = self.world_size, self.world_size * (self.world_size + 1) // 2
        match self.collective:
            case "all_gather":
                wanted = [1 + rank for rank in range(size)]
            case "all_to_all":
                wanted = [1 + rank * size + self.rank for rank in range(size)]
            case "broadcast":
                wanted = [7] * size
            case _:
                wanted = [total] * size
        for value, block in zip(wanted, self._blocks(self.target), strict=True):
            if not (block == value).all():
                msg = f"A wrong {self.collective} on rank {self.rank}: not {value} everywhere"
                raise SystemExit(msg)

    def _blocks(self, array: Array) -> list[Array]:
        return np.array_split(array, self.world_size)
