"""Ranks of a run: launchers that agree on who takes part give every worker its place.

Each launcher says which launchers it sees, as a *roll*: a hash of them all and of how many workers
each will start.  When all of them say the same roll, everybody knows everybody's place.  Whoever
has seen that begins; those who then hear that it began follow, even if more have come meanwhile.

Rank 0 is on the machine where the command was typed first.  Clocks of machines differ, so each says
how long it had waited when all were there, which is at about the same moment everywhere.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from potluck.runtime.control_reports import Report

__all__ = ["PER_NODE", "ROLL", "Crew", "Rolls", "environments", "group_of", "port_in"]

ROLL, PER_NODE, LAUNCHER, MEETING = "roll", "per_node", "launcher", "meeting_port"
WAITED, COMPANY = "waited", "company_port"
"""What a launcher says beside what is compared."""

DIGITS = 16
"""Hexadecimal digits of a roll."""

LOOPBACK = "127.0.0.1"

RANKED = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What holds only where everybody's place is known."""

MOST_WORKERS = 1024
"""Of one machine; what a peer says beyond that is no number of workers."""


def workers_of(report: Report) -> int:
    """How many workers a launcher will start, as it says."""
    text = report.facts.get(PER_NODE, "1")
    is_number = text.isascii() and text.isdecimal() and len(text) < 5  # noqa: PLR2004
    return min(max(1, int(text)), MOST_WORKERS) if is_number else 1


def meeting_port_of(report: Report) -> int:
    """Where rank 0 listens if it is a worker of this launcher."""
    return port_in(report, MEETING) or report.port


def port_in(report: Report, fact: str) -> int:
    """The port that a launcher tells under a name; 0 if it tells none."""
    text = report.facts.get(fact, "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= 5  # noqa: PLR2004
    return int(text) if is_number and int(text) < 1 << 16 else 0


def waited_of(report: Report) -> int:
    """For how many milliseconds a launcher had waited when all were there, as it says."""
    text = report.facts.get(WAITED, "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= 12  # noqa: PLR2004
    return int(text) if is_number else 0


def group_of(report: Report) -> str:
    """What to count as one: a launcher, or the workers that one has started."""
    return report.facts.get(LAUNCHER, "") or f"{report.node}:{report.incarnation}"


@dataclass(frozen=True, slots=True)
class Crew:
    """Launchers in the order of their machines' places; the first one's first worker is rank 0."""

    launchers: tuple[Report, ...]

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Crew:
        """In the same order on all machines: the one that has waited longest comes first."""
        return cls(tuple(sorted(reports, key=lambda each: (-waited_of(each), each.key))))

    @property
    def roll(self) -> str:
        """Stands for who takes part, and with how many."""
        lines = [
            f"{each.node}:{each.incarnation}:{meeting_port_of(each)}:{workers_of(each)}"
            f":{waited_of(each)}\n"
            for each in self.launchers
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:DIGITS]

    @property
    def world_size(self) -> int:
        """Workers of all."""
        return sum(map(workers_of, self.launchers))

    @property
    def is_local(self) -> bool:
        """Whether all are on one machine."""
        return len({each.node for each in self.launchers}) == 1

    def first_rank(self, key: tuple[str, int]) -> tuple[int, int]:
        """Of a launcher: its place among the launchers, and the rank of its first worker."""
        before = 0
        for place, each in enumerate(self.launchers):
            if each.key == key:
                return place, before
            before += workers_of(each)
        msg = f"{key} is not in the crew"
        raise KeyError(msg)


class Rolls:
    """What was said about who takes part, by us and by the others."""

    def __init__(self) -> None:
        self._said: dict[str, Crew] = {}
        self._current = ""

    def call(self, here: Sequence[Report]) -> str:
        """The roll of those who are here; empty where scripts already run, whose ranks change."""
        self._current = ""
        if all(report.role == "launcher" for report in here):
            crew = Crew.of(here)
            self._current = crew.roll
            self._said[self._current] = crew
        return self._current

    def agreed(self, others: Sequence[Report]) -> Crew | None:
        """Those who take part, once everybody has said so, or somebody has begun who had seen it.

        >>> desk, attic = (Report(node=name, incarnation=1, role="launcher") for name in "da")
        >>> rolls = Rolls()
        >>> roll = rolls.call([desk, attic])
        >>> rolls.agreed([attic]) is None
        True
        >>> told = Report(node="a", incarnation=1, role="launcher", facts={"roll": roll})
        >>> [each.node for each in rolls.agreed([told]).launchers]
        ['a', 'd']
        """
        for report in others:
            if report.state == "starting" and report.facts.get(ROLL, "") in self._said:
                return self._said[report.facts[ROLL]]
        if self._current and all(each.facts.get(ROLL) == self._current for each in others):
            return self._said[self._current]
        return None


def environments(
    common: Mapping[str, str], me: Report, crew: Crew | None, master: str, ports: Sequence[int]
) -> list[dict[str, str]]:
    """The environment of each of our workers, in the words of torchrun.

    ``master`` is where rank 0's machine can be reached from here, and each worker has a port.
    Where others already run, ranks are for ``potluck.join()`` to find out.
    """
    count = len(ports)
    shared = {name: value for name, value in common.items() if name not in RANKED}
    shared |= {"LOCAL_WORLD_SIZE": str(count)}
    if count > 1:
        each = max(1, (os.cpu_count() or 1) // count)  # or they would fight for the processors
        shared = {"OMP_NUM_THREADS": str(each), "PYTHONUNBUFFERED": "1", **shared}
    first = 0
    if crew is not None:
        place, first = crew.first_rank(me.key)
        shared |= {
            "WORLD_SIZE": str(crew.world_size),
            "GROUP_RANK": str(place),
            "GROUP_WORLD_SIZE": str(len(crew.launchers)),
            "MASTER_ADDR": LOOPBACK if crew.is_local else master,
            "MASTER_PORT": str(meeting_port_of(crew.launchers[0])),
        }
    made = []
    for local, port in enumerate(ports):
        own = {**shared, "LOCAL_RANK": str(local), "POTLUCK_PORT": str(port)}
        if crew is not None:
            own["RANK"] = str(first + local)
        made.append(own)
    return made
