"""The door to :mod:`potluck.core.steps`: how a simulated trainer reports, decides and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from potluck.core.histories import History
from potluck.core.steps import Decision, Position, Report, ancestry_in, decide
from potluck.vocabulary import View

__all__ = [
    "Decision",
    "History",
    "Report",
    "agree",
    "applied",
    "attempted",
    "held",
    "loaded",
    "received",
    "stepped",
]


def agree(view: View, reports: Sequence[Report]) -> Decision:
    """What the members of a view do before they continue."""
    return decide(view, reports)


def attempted(report: Report, attempt: Position | None) -> Report:
    """The member begins to average a step; nothing of an earlier try counts."""
    return replace(report, attempt=attempt, holds=False)


def held(report: Report, samples: int) -> Report:
    """The member has the complete result of its attempt, with which it will have these samples."""
    return replace(report, holds=True, samples_held=samples)


def stepped(report: Report, view: View) -> History:
    """What the member has once it has applied the result that it holds."""
    assert report.attempt is not None
    ancestry = ancestry_in(view, report.attempt, report.history)
    return report.history.extended(report.attempt, ancestry, report.samples_held)


def applied(report: Report, history: History) -> Report:
    """The member has applied the result that it held."""
    return replace(report.at(history), holds=False)


def received(report: Report, decision: Decision) -> Report:
    """The member has got the state that all decided on."""
    return replace(report.at(decision.history), attempt=None, holds=False)


def loaded(report: Report) -> Report:
    """The report of a new process that has loaded what another one saved."""
    return Report().at(report.history)
