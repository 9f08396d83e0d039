"""Lineages this process has been in: its last word in each, and the newest view known of each.

Whoever asks about a lineage that we left gets the same answer for ever, so that nobody counts on us
there, and nobody stays behind in a view that has a successor.
"""

from __future__ import annotations

from typing import TypeVar

from potluck.core.cluster_messages import Commit, Departed

__all__ = ["Archive"]

T = TypeVar("T")

_LIMIT = 64  # lineages; a process leaves one when it is removed, merged or cut off


class Archive:
    """Last words and newest views, by lineage; the oldest are dropped."""

    def __init__(self) -> None:
        self._words: dict[str, Departed] = {}
        self._commits: dict[str, Commit] = {}

    def depart(self, word: Departed) -> None:
        """We have left a lineage."""
        _put(self._words, word.lineage, word)

    def record(self, commit: Commit) -> None:
        """A view was agreed."""
        known = self._commits.get(commit.lineage)
        if known is None or commit.epoch >= known.epoch:
            _put(self._commits, commit.lineage, commit)

    def last_word(self, lineage: str) -> Departed | None:
        """What we said when we left."""
        return self._words.get(lineage)

    def newest(self, lineage: str) -> Commit | None:
        """The newest view that we know."""
        return self._commits.get(lineage)

    def is_closed(self, lineage: str, epoch: int) -> bool:
        """Whether we may not enter this view: we have left it or a later one, or know of one."""
        word, newest = self._words.get(lineage), self._commits.get(lineage)
        is_left = word is not None and epoch <= word.epoch
        return is_left or (newest is not None and epoch < newest.epoch)


def _put(table: dict[str, T], key: str, value: T) -> None:
    table.pop(key, None)
    table[key] = value
    while len(table) > _LIMIT:
        del table[next(iter(table))]
