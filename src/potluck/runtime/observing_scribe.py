"""The scribe of a node: writes its journal when an observer asks.

Runs on the control thread, so it only copies what others keep; it neither waits nor computes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from potluck.runtime.control_reports import sentence
from potluck.runtime.observing_journal import (
    MAX_EPOCHS,
    MAX_EVENTS,
    MAX_NUMBERS,
    MAX_RANKS,
    EpochLine,
    EventLine,
    Journal,
    bounded,
)

if TYPE_CHECKING:
    from potluck.runtime.cluster_events import Bulletin, ViewChange
    from potluck.runtime.cluster_stages import Stages
    from potluck.vocabulary import LinkMatrix, ProcessId

__all__ = ["Scribe", "sensible"]

_LARGEST = 1e300  # beyond, a figure is no measurement


class Scribe:
    """Writes the journal of one node; ``figures`` are what it has counted, by name."""

    def __init__(
        self,
        me: ProcessId,
        bulletin: Bulletin,
        stages: Stages,
        figures: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._me = me
        self._bulletin = bulletin
        self._stages = stages
        self._figures = figures

    def journal(self, after: int) -> Journal:
        """What happened after the event of this number, and what is known now."""
        events = [each for each in self._bulletin.events if each.number > after]
        links, rank = self._links()
        return bounded(
            Journal(
                node=self._me.node,
                incarnation=self._me.incarnation,
                events=[
                    EventLine(each.number, each.time, sentence(str(each)), _word(each.level))
                    for each in events[:MAX_EVENTS]
                ],
                epochs=[_epoch(*each) for each in self._bulletin.views[-MAX_EPOCHS:]],
                up=links.up[rank] if links else 0,
                down=links.down[rank] if links else 0,
                latency=list(links.latency[rank][:MAX_RANKS]) if links else [],
                figures=sensible(self._figures()),
            )
        )

    def _links(self) -> tuple[LinkMatrix | None, int]:
        stage = self._stages.latest
        if stage is None or stage.group is None:
            return None, 0
        return stage.group.links, stage.rank


def _epoch(time: float, change: ViewChange) -> EpochLine:
    view = change.view
    members = [f"{each.node}/{each.incarnation}" for each in view.members[:MAX_RANKS]]
    return EpochLine(view.epoch, time, members, sentence(change.reason), view.lineage)


def _word(level: int) -> str:
    return logging.getLevelName(level).lower()


def sensible(figures: Mapping[str, float]) -> dict[str, float]:
    """Finite numbers alone, and not too many."""
    kept = [(key[:255], float(value)) for key, value in figures.items() if abs(value) <= _LARGEST]
    return dict(kept[:MAX_NUMBERS])
