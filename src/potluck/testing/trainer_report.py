"""The door to :mod:`potluck.core.steps`: how a simulated trainer reports, decides and counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from potluck.core.steps import Decision, Position, Report, decide
from potluck.vocabulary import View

__all__ = ["Decision", "Report", "agree", "applied", "attempted", "held", "loaded", "received"]


def agree(view: View, reports: Sequence[Report]) -> Decision:
    """What the members of a view do before they continue."""
    return decide(view, reports)


def attempted(report: Report, attempt: Position | None) -> Report:
    """The member begins to average a step; nothing of an earlier try counts."""
    return replace(report, attempt=attempt, holds=False)


def held(report: Report, samples: int) -> Report:  # noqa: ARG001 - for reports that count samples
    """The member has the complete result of its attempt, with which it will have these samples."""
    return replace(report, holds=True)


def applied(report: Report, view: View, samples: int) -> Report:  # noqa: ARG001 - see held
    """The member has applied the result that it held."""
    assert report.attempt is not None
    return replace(report, position=report.attempt, holds=False)


def received(report: Report, decision: Decision) -> Report:
    """The member has got the state that all decided on."""
    return replace(report, position=decision.target, attempt=None, holds=False)


def loaded(report: Report) -> Report:
    """The report of a new process that has loaded what another one saved."""
    return Report(report.position)
