"""A chronicle: what an observer that stays has learned, of those who are gone as well.

Bounded in every direction, whatever the processes of a namespace tell and however often they come
and go.  Any thread may use it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from potluck.net.addresses import Address
from potluck.runtime.control_reports import Report
from potluck.runtime.io_lane import CLOSED
from potluck.runtime.observing_journal import EpochLine, Journal

if TYPE_CHECKING:
    from potluck.runtime.control_contacts import Contact

__all__ = ["Chronicle", "Gone", "News"]

KEPT_NEWS = 400
"""Events of all processes that are remembered."""

KEPT_EPOCHS = 64
"""Views of each job that are remembered."""

KEPT_JOBS = 32
"""Jobs whose views are remembered: those of which something was heard last."""

KEPT_GONE = 32
"""Processes that are gone and not forgotten."""

SAME_WITHIN = 5.0
"""Seconds within which the same sentence of another process is the same news."""

MAX_PROCESSES = 1024
"""Processes whose last number is remembered."""

Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class News:
    """An event that a process told."""

    number: int
    """Counts what this chronicle has heard, from 1."""
    time: float
    """Seconds since 1970, by the clock of whoever told it."""
    job: str
    who: Key
    name: str
    """Who told it."""
    level: str
    text: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A process that was here."""

    report: Report
    """The last that it said."""
    time: float
    cause: str
    """What was seen of its end from here."""

    @property
    def is_orderly(self) -> bool:
        """Whether it left by itself, as far as can be seen."""
        return self.cause == CLOSED


class Chronicle:
    """What has been heard; ``clock`` gives seconds since 1970."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._journals: dict[Key, Journal] = {}
        self._after: dict[Key, int] = {}
        self._news: deque[News] = deque(maxlen=KEPT_NEWS)
        self._count = 0
        self._epochs: dict[str, dict[tuple[str, int], EpochLine]] = {}
        self._gone: dict[Key, Gone] = {}
        self._since: dict[Key, float] = {}

    # -- the observer writes -------------------------------------------------------------------

    def after(self, key: Key) -> int:
        """The number of the last event of a process that is known."""
        with self._lock:
            return self._after.get(key, 0)

    def arrived(self, key: Key) -> None:
        """A process is here."""
        with self._lock:
            self._gone.pop(key, None)
            if key not in self._since:
                self._since[key] = self._clock()
                _shorten(self._since, MAX_PROCESSES)

    def parted(self, report: Report, cause: str) -> None:
        """It is not any more."""
        with self._lock:
            self._journals.pop(report.key, None)
            self._gone[report.key] = Gone(report, self._clock(), cause)
            _shorten(self._gone, KEPT_GONE)

    def heard(self, report: Report, journal: Journal) -> None:
        """A process has told what happened."""
        with self._lock:
            self._journals[journal.key] = journal
            last = self._after.pop(journal.key, 0)
            for event in journal.events:
                if event.number > last:
                    last = event.number
                    self._add(report, event.time, event.level, event.text)
            self._after[journal.key] = last
            _shorten(self._after, MAX_PROCESSES)
            views = self._epochs.pop(report.job, {})
            for line in journal.epochs:
                known = views.get((line.lineage, line.epoch))
                if known is None or line.time < known.time:
                    views[line.lineage, line.epoch] = line
            in_order = sorted(views.items(), key=lambda each: each[1].time)
            if in_order:
                self._epochs[report.job] = dict(in_order[-KEPT_EPOCHS:])
                _shorten(self._epochs, KEPT_JOBS)

    def _add(self, report: Report, moment: float, level: str, text: str) -> None:
        for known in reversed(self._news):
            is_same = known.text == text and known.job == report.job
            if is_same and abs(known.time - moment) < SAME_WITHIN:
                return  # every member tells of a new view; once is enough
        self._count += 1
        name = report.name or report.node[:8]
        self._news.append(
            News(self._count, moment, report.job, report.key, name, level, text),
        )

    # -- others read ---------------------------------------------------------------------------

    @property
    def last_number(self) -> int:
        """Of the latest news."""
        return self._count

    def news(self, after: int = 0) -> list[News]:
        """What was heard after that number, as far as it is remembered."""
        with self._lock:
            return [each for each in self._news if each.number > after]

    @property
    def journals(self) -> dict[Key, Journal]:
        """The latest journal of each process that is here."""
        with self._lock:
            return dict(self._journals)

    def epochs(self, job: str) -> list[EpochLine]:
        """The views of a job, oldest first."""
        with self._lock:
            return list(self._epochs.get(job, {}).values())

    @property
    def former(self) -> frozenset[str]:
        """Who was here: processes, and where they were."""
        gone = {f"{each.report.node}/{each.report.incarnation}" for each in self.gone}
        return frozenset(
            gone | {str(Address(each.report.host, each.report.port)) for each in self.gone}
        )

    @property
    def left_behind(self) -> frozenset[str]:
        """Processes, and machines, of views before the latest without which that went on."""
        found: set[str] = set()
        with self._lock:
            for views in self._epochs.values():
                *earlier, latest = views.values()
                members = {member for view in earlier for member in view.members}
                gone = members.difference(latest.members)
                here = {member.partition("/")[0] for member in latest.members}
                found |= gone | {member.partition("/")[0] for member in gone} - here
        return frozenset(found)

    def is_no_news(self, contact: Contact) -> bool:
        """Whether everybody knows why somebody cannot be reached.

        A later view says that it went on without it; or nobody listens any more where it was.
        """
        who = contact.key if contact.process else contact.node
        places = {contact.key, *map(str, contact.addresses)}
        is_over = "refused" in contact.trouble and not places.isdisjoint(self.former)
        return who in self.left_behind or is_over

    def since(self, key: Key) -> float:
        """When a process was first seen, in seconds since 1970."""
        with self._lock:
            return self._since.get(key, 0.0)

    @property
    def gone(self) -> list[Gone]:
        """Who was here and is not, the last to go last."""
        with self._lock:
            return list(self._gone.values())


def _shorten(book: dict[Any, Any], most: int) -> None:
    """Forget what was written first."""
    while len(book) > most:
        del book[next(iter(book))]
