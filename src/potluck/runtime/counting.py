"""Counting collectives: what a call that has ended leaves in the metrics."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, TypeVar

from potluck.errors import DistributedError
from potluck.metrics.operations import LONG

if TYPE_CHECKING:
    from potluck.metrics import DistributedMetrics, OperationMetrics
    from potluck.runtime.call import Call
    from potluck.runtime.work import Work

__all__ = ["count", "count_failure", "count_refusal", "counted", "size_of"]

Result = TypeVar("Result")


def count(metrics: DistributedMetrics, call: Call, began: float) -> None:
    """A call ended well.  This is on the way of many: it takes no lock."""
    metrics.journal.append((call.task.collective, monotonic() - began, size_of(call)))
    if len(metrics.journal) > LONG:
        metrics.work_off()


def count_failure(
    metrics: DistributedMetrics, call: Call, began: float, error: BaseException
) -> None:
    """A call failed."""
    metrics.work_off()  # what went well before was no second try
    entry: OperationMetrics = getattr(metrics, call.task.collective.value)
    entry.note(monotonic() - began, size_of(call), type(error).__name__)
    metrics.tell(f"{call.task.collective.value} failed: {_in_words(error)}")
    vars(error)["_counted"] = id(error)  # a copy of it, which another call raises, is not counted


def count_refusal(metrics: DistributedMetrics, name: str, error: BaseException) -> None:
    """A call raised; counts it unless that was done when it failed."""
    if vars(error).get("_counted") != id(error):
        metrics.work_off()
        entry: OperationMetrics = getattr(metrics, name)
        entry.note(0.0, 0, type(error).__name__)
        metrics.tell(f"{name} failed: {_in_words(error)}")
        vars(error)["_counted"] = id(error)


def _in_words(error: BaseException) -> str:
    return str(error) if isinstance(error, DistributedError) else f"{type(error).__name__}: {error}"


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


def size_of(call: Call) -> int:
    """Bytes of what this rank gives or gets, whichever is more."""
    return max(call.source.nbytes, call.target.nbytes)
