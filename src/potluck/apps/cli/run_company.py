"""The launchers of a run stay in touch while their scripts run: each learns how the others ended.

They meet on ports of their own, which they told each other before the scripts began, and are
announced to no other process.  What they tell is bounded and cleaned like every report.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from potluck.apps.cli.run_ending import OUTCOME, RUNNING, UNKNOWN, Ending
from potluck.apps.cli.run_output import Output
from potluck.apps.cli.run_places import LAUNCHER
from potluck.errors import DistributedError
from potluck.runtime.auto_config import AutoDiscoveryConfig
from potluck.runtime.control_reports import Report
from potluck.runtime.observing import STOPPING, Observer

__all__ = ["Company", "open_company"]

FAREWELL = 3.0
"""Seconds to wait at the end for how the others ended, and for a cause where none is known."""

EARLY = 3.0
"""Seconds after which one that ended before the others is worth a line."""

LOOK_EVERY = 0.05


@dataclass
class _Machine:
    """A machine of the run, as this one sees it."""

    label: str
    ending: Ending | None = None
    arguments: str = ""
    ended_at: float = 0.0
    is_connected: bool = False
    was_connected: bool = False
    is_told: bool = False
    """Whether a line has said how it ended."""


@dataclass
class Company:
    """Who takes part, and how each has ended so far; used by one thread."""

    me: str
    """What this machine is called."""
    json: bool = False
    output: Output = field(default_factory=lambda: Output(sys.stderr))
    own_id: str = ""
    order: Sequence[str] = ()
    """The ids of all launchers by rank, ours included; those that come later follow."""
    observer: Observer | None = None
    _others: dict[str, _Machine] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _mine: Ending | None = None

    def expect(self, others: Mapping[str, str]) -> None:
        """Others that begin with us: their launchers' ids, and what they are called."""
        self._others = {key: _Machine(label) for key, label in others.items()}

    @property
    def seconds(self) -> float:
        """Since the script began."""
        return time.monotonic() - self._began

    # -- words -----------------------------------------------------------------------------------

    def say(self, text: str, *, grave: bool = False) -> None:
        """One line on standard error."""
        if self.json:
            line = msgspec.json.encode({"error" if grave else "note": text}).decode()
        else:
            line = f"potluck: {text}"
        self.output.say(line)

    def tell(self, ending: Ending) -> None:
        """Tell the others how we ended; what is known later may be told again."""
        self._mine = ending
        if self.observer is not None:
            self.observer.tell(STOPPING, **ending.facts())

    # -- the others ------------------------------------------------------------------------------

    def look(self) -> None:
        """Learn how others ended, and say so, one line for each that failed."""
        if self.observer is None:
            return
        connected = self.observer.reports
        for each in self._others.values():
            each.is_connected = False
        for report in [*self.observer.parted, *connected]:
            self._take(report, is_connected=report in connected)
        for machine in self._others.values():
            self._mention(machine)

    def _take(self, report: Report, *, is_connected: bool) -> None:
        key = report.facts.get(LAUNCHER, "")
        if report.role != "launcher" or report.job != self.observer_job or not key:
            return
        machine = self._others.setdefault(key, _Machine(report.name or report.node[:8]))
        machine.is_connected = machine.is_connected or is_connected
        machine.was_connected = True
        machine.arguments = report.facts.get("arguments", "")
        if report.facts.get(OUTCOME):
            machine.ended_at = machine.ended_at or time.monotonic()
            machine.ending = Ending.of(report.facts)

    @property
    def observer_job(self) -> str:
        """The job of the run."""
        return "" if self.observer is None else self.observer.job or ""

    def _mention(self, machine: _Machine) -> None:
        ending = machine.ending
        if ending is None or machine.is_told:
            return
        if ending.is_cause:
            machine.is_told = True
            self.say(f"{machine.label}: {ending.cause}", grave=True)
        elif ending.is_ok and self._mine is None and time.monotonic() > machine.ended_at + EARLY:
            machine.is_told = True
            self.say(f"{machine.label}: its script has ended (ok), this machine's still runs.")

    @property
    def _is_over(self) -> bool:
        """Whether all have ended; one that was in touch and is no more has no last word to say."""
        return all(
            each.ending is not None or (each.was_connected and not each.is_connected)
            for each in self._others.values()
        )

    def cause(self) -> str:
        """Why another rank is lost, waiting a moment for its machine to say so; empty if unknown.

        The line itself has been said then.
        """
        deadline = time.monotonic() + FAREWELL
        while True:
            self.look()
            ended = [each for each in self._others.values() if each.ending is not None]
            for each in ended:
                if each.ending is not None and each.ending.is_cause:
                    return each.label
            if self._is_over or time.monotonic() >= deadline:
                early = [each for each in ended if each.ending is not None and each.ending.is_ok]
                return self._blame_early(early[0]) if early else ""
            time.sleep(LOOK_EVERY)

    def _blame_early(self, machine: _Machine) -> str:
        if not machine.is_told:
            machine.is_told = True
            text = f"{machine.label}: its script ended without an error while others needed it."
            if self.observer is not None:
                mine = self.observer.own_report().facts.get("arguments", "")
                if mine != machine.arguments:
                    text = (
                        f"{text[:-1]}; its arguments differ "
                        f"({machine.label}: {machine.arguments or 'none'}; "
                        f"{self.me}: {mine or 'none'})."
                    )
            self.say(text, grave=True)
        return machine.label

    def conclude(self) -> None:
        """Wait a moment for the others to end, and say in one line who ended how."""
        if not self._others or self._mine is None:
            return
        deadline = time.monotonic() + FAREWELL
        self.look()
        while not self._is_over and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)
            self.look()
        parts = {self.own_id: f"{self.me} {self._mine}"}
        for key, each in self._others.items():
            parts[key] = f"{each.label} {self._state_of(each)}"
        keys = [key for key in self.order if key in parts]
        keys += [key for key in parts if key not in keys]
        self.say(f"Finished: {', '.join(parts[key] for key in keys)}.")

    @staticmethod
    def _state_of(machine: _Machine) -> Ending:
        if machine.ending is not None:
            return machine.ending
        return Ending(RUNNING if machine.is_connected else UNKNOWN)


@contextlib.contextmanager
def open_company(
    company: Company, config: AutoDiscoveryConfig, facts: Mapping[str, str], *, port: int
) -> Iterator[Company]:
    """Stay in touch with the launchers at the addresses in ``config`` while a script runs."""
    quiet = replace(config, port=port, multicast=False, neighbours=False, known=False)
    with contextlib.ExitStack() as stack:
        try:
            company.observer = Observer(quiet, job=config.job, facts=facts)
        except DistributedError:  # the port was taken meanwhile: the others can still be dialled
            company.observer = Observer(replace(quiet, port=None), job=config.job, facts=facts)
        stack.enter_context(company.observer)
        company.observer.tell("running")
        yield company
