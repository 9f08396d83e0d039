"""Silence: who has not answered an observer's questions for too long.

A cut cable is no news to a connection: it stays open for minutes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Generic, TypeVar

__all__ = ["SILENT_AFTER", "Silence"]

SILENT_AFTER = 12
"""Questions without an answer after which somebody counts as silent.

Questions, not seconds: who slept himself has asked nothing meanwhile.
"""

Key = TypeVar("Key", bound=Hashable)


class Silence(Generic[Key]):
    """Counts questions that were not answered.

    >>> silence = Silence[str]()
    >>> [silence.asked(["attic"]) for _ in range(SILENT_AFTER)][-2:]
    [[], ['attic']]
    """

    def __init__(self) -> None:
        self._unanswered: dict[Key, int] = {}

    def asked(self, everybody: Collection[Key]) -> list[Key]:
        """All of these were asked once more; those who have fallen silent with this question."""
        before = self._unanswered
        self._unanswered = {each: before.get(each, 0) + 1 for each in everybody}
        return [each for each, count in self._unanswered.items() if count == SILENT_AFTER]

    def answered(self, who: Key) -> None:
        """Somebody has said something."""
        self._unanswered.pop(who, None)
