"""Lineages this process has been in: its last word in each, and the newest views known of each.

Whoever asks about a lineage that we left gets the same answer for ever, so that nobody counts on us
there, and nobody stays behind in a view that has a successor.  Several views are kept, so that a
process that missed some of them also learns what followed its own.
"""

from __future__ import annotations

from typing import TypeVar

from potluck.core.cluster_messages import Commit, Departed, Proposal

__all__ = ["Archive"]

T = TypeVar("T")

_LIMIT = 64  # lineages; a process leaves one when it is removed, merged or cut off
_VIEWS = 16  # of one lineage


class Archive:
    """Last words and newest views, by lineage; the oldest are dropped."""

    def __init__(self) -> None:
        self._words: dict[str, Departed] = {}
        self._commits: dict[str, tuple[Commit, ...]] = {}  # oldest first

    def depart(self, word: Departed) -> None:
        """We have left a lineage."""
        _put(self._words, word.lineage, word)

    def record(self, commit: Commit) -> None:
        """A view was agreed."""
        others = [c for c in self._commits.get(commit.lineage, ()) if c.epoch != commit.epoch]
        known = sorted([*others, commit], key=lambda each: each.epoch)
        _put(self._commits, commit.lineage, tuple(known[-_VIEWS:]))

    def last_word(self, lineage: str) -> Departed | None:
        """What we said when we left."""
        return self._words.get(lineage)

    def newest(self, lineage: str) -> Commit | None:
        """The newest view that we know."""
        known = self._commits.get(lineage)
        return known[-1] if known else None

    def following(self, lineage: str, epoch: int) -> tuple[Commit, ...]:
        """The views known that came after one, oldest first."""
        return tuple(c for c in self._commits.get(lineage, ()) if c.epoch > epoch)

    def successor(self, lineage: str, epoch: int) -> Commit | None:
        """Where a process that knows this view should go: a later one, or one of a child."""
        newest = self.newest(lineage)
        if newest is not None and newest.epoch > epoch:
            return newest
        for known in reversed(self._commits.values()):
            if known[-1].proposal.into == lineage:
                continue  # a child that has come back leads nowhere else
            branches = known[-1].charter.ancestry
            if any(each.lineage == lineage and each.epoch >= epoch for each in branches):
                return known[-1]
        return None

    def has_come_back(self, lineage: str, epoch: int) -> bool:
        """Whether we left this view for a child, and that has dissolved into the lineage again."""
        word = self._words.get(lineage)
        return (
            word is not None
            and word.epoch == epoch
            and any(known[-1].proposal.into == lineage for known in self._commits.values())
        )

    def followed(self, terminal: Commit) -> Commit:
        """Where a lineage that has ended in another one leads: the newest view known there."""
        commit = terminal
        for _ in range(_LIMIT):
            proposal = commit.proposal
            if not proposal.into:
                break
            charter = proposal.into_charter or commit.charter
            there = Proposal(proposal.into_members)
            told = Commit(proposal.into, proposal.into_epoch, there, charter)
            known = self.newest(proposal.into)
            commit = told if known is None or known.epoch < told.epoch else known
        return commit

    def is_closed(self, lineage: str, epoch: int) -> bool:
        """Whether we may not enter this view: we have left it or a later one, or know of one."""
        word, newest = self._words.get(lineage), self.newest(lineage)
        is_left = word is not None and epoch <= word.epoch
        return is_left or (newest is not None and epoch < newest.epoch)


def _put(table: dict[str, T], key: str, value: T) -> None:
    table.pop(key, None)
    table[key] = value
    while len(table) > _LIMIT:
        del table[next(iter(table))]
