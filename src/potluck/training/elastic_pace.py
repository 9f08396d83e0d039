"""Pace: how fast each member is, who holds up the others, and what each takes of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from potluck.logs import get_logger
from potluck.training.elastic_record import Record
from potluck.training.shares import (
    Condition,
    Speedometer,
    Straggler,
    find_slow_link,
    find_straggler,
    shares_of,
)

__all__ = ["Pace"]

logger = get_logger(__name__)

LASTING = 5
"""Steps for which a member has been slower before it is named."""

AGAIN = 1000
"""Steps before the same member is named again."""


class Pace:
    """What a member knows of all members' speeds; the same on all of them.

    ``tell`` gets a warning about a slow member as well, for those who look on.
    """

    def __init__(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self.meter = Speedometer()
        """This member's own."""
        self.speeds: tuple[int, ...] = ()
        self.conditions: tuple[Condition, ...] = ()
        self.straggler: Straggler | None = None
        """The member that is much slower than the others, if there is one, and likely why."""
        self._tell = tell
        self._steps = 0
        self._named: dict[str | int, int] = {}  # after which step each was named last
        self._suspects: list[int] = []  # who was much slower in each of the last steps, or -1

    def note(self, records: Sequence[Record], rates: Sequence[int] = (), nbytes: int = 0) -> None:
        """What members have told with a step that counts, in which so many bytes were averaged.

        ``rates`` are those of their links, in bytes per second.
        """
        self._steps += 1
        self.speeds = tuple(record.speed for record in records)
        if len(self.conditions) != len(self.speeds):
            return  # of a view that is over
        if len(rates) == len(self.speeds):
            self.conditions = tuple(
                replace(each, link=rate) for each, rate in zip(self.conditions, rates, strict=True)
            )
        found = find_straggler(self.speeds, self.conditions)
        found = found or find_slow_link(self.conditions, nbytes, self._seconds(records, nbytes))
        self._suspects = [*self._suspects[1 - LASTING :], -1 if found is None else found.rank]
        if found is not None and self._suspects != [found.rank] * LASTING:
            found = None  # once is chance
        if found is not None and self.straggler is None:
            self._warn(found)
        self.straggler = found

    def _seconds(self, records: Sequence[Record], nbytes: int) -> float:
        """How long a step takes, by what all know: all come to the same conclusion."""
        computing = [1000 * each.weight / each.speed for each in records if each.speed]
        links = [nbytes / each.link for each in self.conditions if each.link]
        return max(computing, default=0.0) + max(links, default=0.0)

    def _warn(self, found: Straggler) -> None:
        """Name a slow member; one that is slow now and then is not named each time."""
        who = found.name or found.rank
        if self._steps - self._named.get(who, -AGAIN) < AGAIN:
            return
        self._named[who] = self._steps
        sentence = f"{found}. {found.remedy}"
        logger.warning("%s", sentence)
        self._tell(sentence)

    def counts(self, batch: int, size: int) -> list[int]:
        """How many samples of a batch each of so many members takes."""
        return shares_of(batch, self.speeds if len(self.speeds) == size else (0,) * size)
