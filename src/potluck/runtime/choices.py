"""What ``compression="auto"`` means for a group: chosen by each rank, agreed among all.

Each rank proposes what pays on the links as they were measured, with the speed of its own encoder;
of the proposals the gentlest is taken.  The ranks ask each other once in a while, at the same call
on all of them; in between they go by what they agreed on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from potluck.collective.compression.choice import CANDIDATES, SMALL, Choice, choose
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.errors import MalformedFrame
from potluck.logs import get_logger
from potluck.runtime.compressed import Exchange
from potluck.runtime.encoder_speed import encoder_speeds
from potluck.runtime.group import Group

__all__ = ["Choices"]

LASTING = 50
"""Calls for which an agreement holds; as long as a plan at least."""

UNKNOWN = -1
"""The proposal of a rank that knows nothing of the links yet."""

Key: TypeAlias = tuple[int, int, bool, bool]
"""How many values, how many bytes each, whether with error feedback, and whether aggressive."""

_logger = get_logger(__name__)


@dataclass(slots=True)
class _Agreement:
    choice: Choice
    left: int


class Choices:
    """The agreements of one group; the same on all its ranks."""

    def __init__(self) -> None:
        self._epoch = -1
        self._agreements: dict[Key, _Agreement] = {}
        self._told: set[CompressionStrategy] = set()

    @classmethod
    def of(cls, group: Group) -> Choices:
        """The choices of a group: always the same ones."""
        found = vars(group).setdefault("_choices", cls())
        assert isinstance(found, cls)
        return found

    @property
    def made(self) -> list[Choice]:
        """What was agreed on, with reasons; the latest last."""
        return [agreement.choice for agreement in list(self._agreements.values())]

    def settle(self, group: Group, exchange: Exchange, key: Key) -> CompressionStrategy:
        """How to compress so many values; every rank calls this at the same time."""
        count, itemsize, has_feedback, aggressive = key
        if itemsize * count < SMALL:
            return CompressionStrategy.NONE
        if self._epoch != group.epoch:  # others may have lost what was agreed
            self._epoch = group.epoch
            self._agreements.clear()

        def proposal() -> Choice:
            speeds = encoder_speeds()
            return choose(
                *(group.links, count, speeds),
                has_feedback=has_feedback,
                aggressive=aggressive,
                itemsize=itemsize,
            )

        return self.agreed(exchange, key, proposal)

    def agreed(
        self, exchange: Exchange, key: Key, proposal: Callable[[], Choice]
    ) -> CompressionStrategy:
        """What was agreed on not long ago, or is now."""
        known = self._agreements.get(key)
        if known is not None and known.left:
            known.left -= 1
            return known.choice.strategy
        mine = proposal()
        number = CANDIDATES.index(mine.strategy) if mine.is_known else UNKNOWN
        gentlest = min(_checked(exchange.gather(np.array([number], np.int64)).tolist()))
        if gentlest == UNKNOWN:
            return CompressionStrategy.NONE  # this call finds out about the links
        chosen = mine
        if mine.strategy != CANDIDATES[gentlest]:
            preferred = CANDIDATES[gentlest]
            reason = f"{preferred}, because another rank prefers it; here: {mine.reason}"
            chosen = replace(mine, strategy=preferred, reason=reason)
        has_changed = known is not None and known.choice.strategy != chosen.strategy
        if has_changed or chosen.strategy not in self._told:  # once, not for each size
            self._told.add(chosen.strategy)
            _logger.info("Compression: %s", chosen.reason)
        self._agreements.pop(key, None)  # the latest last
        self._agreements[key] = _Agreement(chosen, LASTING)
        return chosen.strategy


def _checked(proposals: list[int]) -> list[int]:
    """Numbers that others sent."""
    for rank, number in enumerate(proposals):
        if not UNKNOWN <= number < len(CANDIDATES):
            raise MalformedFrame(
                f"Rank {rank} proposes a compression that does not exist: {number}", rank=rank
            )
    return proposals
