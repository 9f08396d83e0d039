"""Why a run waits: what is known of the machines that are missing, and what to type."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from potluck.runtime.control_reports import Report
from potluck.runtime.observing import Observer

if TYPE_CHECKING:
    from potluck.apps.cli.run_gathering import Gathering
    from potluck.runtime.auto_config import AutoDiscoveryConfig

__all__ = ["Lookout", "reasons"]

FIRST_LOOK = 1.5
"""Seconds after which machines that are missing are looked for under other jobs."""

FIRST_WORDS = 4.0
"""Seconds after which reasons are told: by then whatever runs has been found."""


class Lookout:
    """Looks at all jobs of the namespace, from the moment at which that is of interest."""

    def __init__(self, config: AutoDiscoveryConfig, stack: contextlib.ExitStack) -> None:
        self._config = replace(config, job=None)
        self._stack = stack
        self._observer: Observer | None = None
        self._began = time.monotonic()

    def look(self, gathering: Gathering, command: str) -> list[str]:
        """Why the others are not here, in sentences; nothing in the first seconds."""
        seconds = time.monotonic() - self._began
        if self._observer is None and seconds >= FIRST_LOOK:
            self._observer = self._stack.enter_context(Observer(self._config))
        if self._observer is None or seconds < FIRST_WORDS:
            return []
        return list(
            reasons(
                gathering,
                self._observer.reports,
                self._observer.unpaired,
                self._observer.troubles,
                command,
            )
        )


def reasons(
    gathering: Gathering,
    reports: Iterable[Report],
    unpaired: Sequence[str],
    troubles: Mapping[str, str],
    command: str,
) -> Iterator[str]:
    """One sentence for each reason; ``command`` is what to type on the others."""
    if gathering.is_complete:
        return
    job = gathering.here[0].job
    here = {report.node for report in gathering.here}
    elsewhere = {
        report.node: report
        for report in reports
        if report.job not in {"", job}
        and report.role in {"launcher", "member"}
        and report.node not in here
    }
    for report in elsewhere.values():
        yield _other_job(report, job, command)
    known = {*here, *elsewhere}
    missing = [name for node, name in gathering.expected.items() if node not in known]
    yield from _silent(missing, troubles, job, command)
    for each in unpaired:
        yield (
            f"{each} runs Potluck, but is not paired with this machine: "
            "type `potluck pair` here, and there the command that it shows."
        )
    if len(gathering.expected) < gathering.wanted and not unpaired:
        yield _too_few(len(gathering.expected) - 1, gathering.wanted)


def _silent(
    missing: Sequence[str], troubles: Mapping[str, str], job: str, command: str
) -> Iterator[str]:
    """Of machines of the namespace that run nothing, as far as can be seen."""
    for name in sorted(missing):
        if name in troubles:
            yield f"{name} was seen but could not be reached: {troubles[name]}"
    silent = sorted(name for name in missing if name not in troubles)
    if silent:
        yield (
            f"{job} does not run on {_list(silent)} yet: type `{command}` there. "
            "If it does run there, `potluck doctor` looks for the reason."
        )


def _too_few(others: int, wanted: int) -> str:
    paired = "no other machine is" if others < 1 else f"{others} {'is' if others == 1 else 'are'}"
    return (
        f"This run waits for {wanted} machines, and {paired} paired with this one: "
        "type `potluck pair` here, and on the other the command that it shows."
    )


def _other_job(report: Report, job: str, command: str) -> str:
    name = report.name or report.node[:8]
    verb = "waits to run" if report.role == "launcher" else "runs"
    there = command_for(report.job, report.facts.get("script", ""))
    return f"{name} {verb} {report.job}, not {job}: type `{command}` there, or `{there}` here."


def command_for(job: str, script: str) -> str:
    """What starts a job.

    >>> command_for("train.py", "train.py"), command_for("night", "train.py")
    ('potluck run train.py', 'potluck run --job night train.py')
    """
    if not script or job == script:
        return f"potluck run {job}"
    return f"potluck run --job {job} {script}"


def _list(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
