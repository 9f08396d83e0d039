"""What ``compression="auto"`` means for a group: chosen by each rank, agreed among all.

Each rank proposes what pays on the links as they were measured, with the speed of its own encoder;
of the proposals the gentlest is taken.  The ranks ask each other once in a while, at the same call
on all of them; in between they go by what they agreed on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from potluck.collective.compression.choice import CANDIDATES, SMALL, Choice, choose
from potluck.collective.compression.strategy import CompressionStrategy
from potluck.runtime.compressed import Exchange
from potluck.runtime.encoder_speed import encoder_speeds
from potluck.runtime.group import Group
from potluck.vocabulary import LinkMatrix

__all__ = ["Choices"]

LASTING = 50
"""Calls for which an agreement holds; as long as a plan at least."""

UNKNOWN = -1
"""The proposal of a rank that knows nothing of the links yet."""

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Agreement:
    strategy: CompressionStrategy
    left: int


class Choices:
    """The agreements of one group; the same on all its ranks."""

    def __init__(self) -> None:
        self._epoch = -1
        self._agreements: dict[tuple[int, bool], _Agreement] = {}

    @classmethod
    def of(cls, group: Group) -> Choices:
        """The choices of a group: always the same ones."""
        found = vars(group).setdefault("_choices", cls())
        assert isinstance(found, cls)
        return found

    def settle(
        self, group: Group, exchange: Exchange, count: int, *, has_feedback: bool
    ) -> CompressionStrategy:
        """How to compress so many values; every rank calls this at the same time."""
        if 4 * count < SMALL:
            return CompressionStrategy.NONE
        if self._epoch != group.epoch:  # others may have lost what was agreed
            self._epoch = group.epoch
            self._agreements.clear()
        return self.agreed(
            exchange,
            (count, has_feedback),
            lambda: propose(group.links, count, has_feedback=has_feedback),
        )

    def agreed(
        self, exchange: Exchange, key: tuple[int, bool], proposal: Callable[[], Choice]
    ) -> CompressionStrategy:
        """What was agreed on not long ago, or is now."""
        known = self._agreements.get(key)
        if known is not None and known.left:
            known.left -= 1
            return known.strategy
        mine = proposal()
        number = CANDIDATES.index(mine.strategy) if mine.is_known else UNKNOWN
        gentlest = int(exchange.gather(np.array([number], np.int64)).min())
        if gentlest == UNKNOWN:
            return CompressionStrategy.NONE  # this call finds out about the links
        chosen = CANDIDATES[gentlest]
        if known is None or known.strategy != chosen:
            others = "" if chosen == mine.strategy else f"; others prefer {chosen}"
            _logger.info("Compression: %s%s", mine.reason, others)
        self._agreements[key] = _Agreement(chosen, LASTING)
        return chosen


def propose(links: LinkMatrix, count: int, *, has_feedback: bool) -> Choice:
    """What pays for this rank."""
    return choose(links, count, encoder_speeds(), has_feedback=has_feedback)
