"""Who is who in several dumps: a rank may be another process in every view."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from potluck.apps.cli.trace_reading import Dump

__all__ = ["Cast", "Who"]

Who: TypeAlias = str
"""A process: its id, or its rank where there are no views."""


class Cast:
    """The processes that appear in some dumps, those that left none included."""

    def __init__(self, dumps: Sequence[Dump]) -> None:
        self._views: dict[str, tuple[str, ...]] = {}
        self._names: dict[Who, str] = {}
        self._ranks: dict[Who, str] = {}
        for dump in dumps:
            self._views.update(dump.header.views)
            self._names.update({each.process: each.name for each in dump.header.peers})
        for dump in dumps:
            header = dump.header
            self._names[self.of(dump)] = header.name or header.host
        for view, members in self._views.items():
            for rank, process in enumerate(members):
                self._ranks[process] = f"rank {rank} in view {view.rpartition('/')[2]}"
        for dump in dumps:
            self._ranks[self.of(dump)] = f"rank {dump.header.rank}"
        self.present = [self.of(dump) for dump in dumps]
        """Whose dumps there are."""
        self._sizes = [dump.header.world_size for dump in dumps if not dump.header.views]

    def of(self, dump: Dump) -> Who:
        """The process that wrote a dump."""
        is_member = bool(dump.header.view or dump.header.views)
        return dump.header.process if is_member else f"rank {dump.header.rank}"

    def at(self, view: str, rank: int) -> Who:
        """The process that had a rank in a view."""
        members = self._views.get(view, ())
        return members[rank] if 0 <= rank < len(members) else f"rank {rank}"

    def called(self, who: Who) -> str:
        """A process for people, with its last rank.

        >>> Cast([]).called("rank 3")
        'rank 3'
        """
        name, rank = self._names.get(who), self._ranks.get(who, who)
        return f"{rank} ({name})" if name else rank

    @property
    def missing(self) -> list[Who]:
        """Those who took part and left no dump."""
        everybody = dict.fromkeys(who for members in self._views.values() for who in members)
        most = min(max(self._sizes, default=0), 1 << 16)
        everybody.update(dict.fromkeys(f"rank {rank}" for rank in range(most)))
        return [who for who in everybody if who not in self.present]
