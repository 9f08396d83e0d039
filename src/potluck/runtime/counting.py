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
    metrics.journal.append((call.task, began, monotonic(), 0, call.target.itemsize))
    if len(metrics.journal) > LONG:
        metrics.work_off()


def count_failure(
    metrics: DistributedMetrics, call: Call, began: float, error: BaseException
) -> None:
    """A call failed."""
    metrics.work_off()  # what went well before was no second try
    entry: OperationMetrics = getattr(metrics, call.task.collective.value)
    nbytes = call.task.extent * call.target.itemsize
    entry.note(monotonic() - began, nbytes, type(error).__name__)


def counted(
    metrics: DistributedMetrics, call: Call, work: Work[Result], began: float | None = None
) -> Work[Result]:
    """Count something that was started when it has ended, well or not."""
    start = monotonic() if began is None else began

    def end() -> None:
        error = work.exception()
        if error is None:
            count(metrics, call, start)
        else:
            count_failure(metrics, call, start, error)

    work.add_done_callback(end)
    return work
