"""Counting collectives: what a call that has ended leaves in the metrics."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from potluck.metrics.operations import LONG

if TYPE_CHECKING:
    from potluck.metrics import DistributedMetrics, OperationMetrics
    from potluck.runtime.call import Call
    from potluck.runtime.work import Work

__all__ = ["count", "count_failure", "counted"]

Result = TypeVar("Result")


def count(metrics: DistributedMetrics, call: Call, began: float) -> None:
    """A call ended well.  This is on the way of many: it takes no lock."""
    seconds, journal, source = monotonic() - began, metrics.journal, call.source
    nbytes = source.nbytes if source is call.target else _size(call)
    journal.append((call.task.collective, seconds, nbytes))
    if len(journal) > LONG:
        metrics.work_off()


def count_failure(
    metrics: DistributedMetrics, call: Call, began: float, error: BaseException
) -> None:
    """A call failed."""
    metrics.work_off()  # what went well before was no second try
    entry: OperationMetrics = getattr(metrics, call.task.collective.value)
    entry.note(monotonic() - began, _size(call), type(error).__name__)


def counted(
    metrics: DistributedMetrics, call: Call, work: Work[Result], began: float
) -> Work[Result]:
    """Count something that was started when it has ended, well or not."""

    def end() -> None:
        error = work.exception()
        if error is None:
            count(metrics, call, began)
        else:
            count_failure(metrics, call, began, error)

    work.add_done_callback(end)
    return work


def _size(call: Call) -> int:
    return max(call.source.nbytes, call.target.nbytes)
