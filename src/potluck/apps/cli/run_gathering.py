"""Who is here for a run: launchers find each other, compare notes, and begin together.

A launcher first *waits* for as many as are wanted, then is *ready*, and *starts* when all of them
are ready.  Machines whose script already runs count as started, so one that was restarted comes in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from potluck.apps.cli.run_places import ROLL, WAITED, Crew, Rolls, group_of
from potluck.runtime.control_reports import Report
from potluck.runtime.presence import FIXED

__all__ = ["BLOCKING", "COMPARED", "Difference", "Gathering", "differences", "labels"]

COMPARED = {
    "script_sha256": "the script",
    "arguments": "the arguments",
    "python": "the version of Python",
    "potluck": "the version of Potluck",
    "numpy": "the version of numpy",
    "torch": "the version of PyTorch",
}
"""What must be alike, and what it is called."""

BLOCKING = frozenset({"script_sha256"})
"""What a run does not begin with."""

LAST_WORDS = frozenset({"starting", "stopping"})
"""A launcher that has said one of these has seen that everybody is here."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something in which machines of a run differ."""

    fact: str
    values: Mapping[str, tuple[str, ...]]
    """For each value the machines that have it, most machines first."""

    @property
    def is_grave(self) -> bool:
        """Whether the run must not begin."""
        return self.fact in BLOCKING

    def __str__(self) -> str:
        """One sentence that names who differs."""
        if self.fact == "script_sha256":
            most, *others = map(_list, self.values.values())
            return f"The script on {' and on '.join(others)} differs from the one on {most}"
        parts = [f"{_list(names)}: {value or 'none'}" for value, names in self.values.items()]
        verb = "are" if self.fact == "arguments" else "is"
        what = f"{COMPARED[self.fact].capitalize()} {verb} not the same everywhere"
        return f"{what} ({'; '.join(parts)})"


def differences(reports: Iterable[Report]) -> list[Difference]:
    """In what the machines differ, and who."""
    found = []
    known = [report for report in reports if report.facts]
    names = labels(known)
    for fact in COMPARED:
        values: dict[str, list[str]] = {}
        for report in known:
            values.setdefault(report.facts.get(fact, ""), []).append(names[report.key])
        if len(values) > 1:
            ordered = sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
            found.append(Difference(fact, {value: tuple(sorted(who)) for value, who in ordered}))
    return found


def labels(reports: Sequence[Report]) -> dict[tuple[str, int], str]:
    """What to call each: its machine's name; with its port where several have that name."""
    short = {report.key: report.name or report.node[:8] for report in reports}
    count = Counter(short.values())
    return {
        report.key: f"{name}:{report.port}" if count[name] > 1 else name
        for report in reports
        if (name := short[report.key])
    }


class Gathering:
    """The state of one launcher's wait: who is here, and whether to begin."""

    def __init__(self, me: Report, wanted: int, expected: Mapping[str, str]) -> None:
        self._wanted = wanted
        self._expected = dict(expected)
        self._here: dict[tuple[str, int], Report] = {me.key: me}
        self._me = me.key
        self._started: dict[tuple[str, int], Report] = {}
        self._rolls = Rolls()
        self.hosts: dict[tuple[str, int], str] = {}
        """By which addresses the others are, or were, connected with us."""

    def look(self, reports: Iterable[Report]) -> None:
        """What is known now; a launcher that has begun counts until its script is seen."""
        mine = self._here[self._me]
        seen = {
            report.key: report
            for report in reports
            if report.key != self._me
            and report.job == mine.job  # an address may lead to a process of another job
            and report.role in {"launcher", "member"}
            and report.facts.get("world") != FIXED  # whose ranks are given out
        }
        for report in seen.values():
            if report.role == "launcher" and report.state in LAST_WORDS:
                self._started[report.key] = report
        running = {report.node for report in seen.values() if report.role == "member"}
        pending = {
            key: report for key, report in self._started.items() if report.node not in running
        }
        self._here = {self._me: mine, **pending, **seen}

    def expect(self, expected: Mapping[str, str]) -> None:
        """All machines of the namespace are wanted; it may have turned out that there are more."""
        self._expected = dict(expected)
        self._wanted = max(self._wanted, len(expected))

    def say(self, age: float) -> tuple[str, dict[str, str]]:
        """Our own state and facts; the command was typed ``age`` seconds ago."""
        import msgspec

        mine = self._here[self._me]
        told = mine.facts.get(WAITED) or f"{age * 1000:.0f}" if self.is_complete else ""
        mine = msgspec.structs.replace(
            mine,
            state="ready" if self.is_complete else "waiting",
            facts={**mine.facts, WAITED: told},
        )
        self._here[self._me] = mine
        roll = self._rolls.call(self.here) if self.is_complete else ""
        facts = {WAITED: told, ROLL: roll}
        self._here[self._me] = msgspec.structs.replace(mine, facts={**mine.facts, **facts})
        return mine.state, facts

    @property
    def here(self) -> list[Report]:
        """Everybody who is here, ourselves first."""
        mine = self._here[self._me]
        others = [report for key, report in self._here.items() if key != self._me]
        return [mine, *sorted(others, key=lambda each: (each.name, each.key))]

    @property
    def wanted(self) -> int:
        """How many there must be."""
        return self._wanted

    @property
    def expected(self) -> Mapping[str, str]:
        """The machines of the namespace, by id."""
        return self._expected

    @property
    def missing(self) -> list[str]:
        """Names of machines that belong to the namespace and are not here."""
        nodes = {report.node for report in self._here.values()}
        return sorted(name for node, name in self._expected.items() if node not in nodes)

    @property
    def is_complete(self) -> bool:
        """Whether as many are here as are wanted."""
        return self.count >= self._wanted

    @property
    def count(self) -> int:
        """How many are here; workers of one launcher count once."""
        return len(set(map(group_of, self._here.values())))

    @property
    def crew(self) -> Crew | None:
        """Who takes part and with how many workers, if everybody who is here says the same."""
        return self._rolls.agreed(self.here[1:]) if self.is_complete else None

    @property
    def may_start(self) -> bool:
        """Whether everybody who is here knows that all are here."""
        others = [report for key, report in self._here.items() if key != self._me]
        return self.is_complete and all(
            report.role == "member" or report.state in {"ready", *LAST_WORDS} for report in others
        )

    @property
    def differences(self) -> list[Difference]:
        """In what those who are here differ."""
        return differences(self.here)

    def status_line(self) -> str:
        """Who is here and who is missing, in one line."""
        names = _list(list(labels(self.here).values()))
        count = self.count
        text = f"{count} of {self._wanted} {'is' if count == 1 else 'are'} here: {names}"
        if not self.is_complete and self.missing:
            text += f"; missing: {_list(self.missing)}"
        return text


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
