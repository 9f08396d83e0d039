"""Counting collectives: what a call that has ended leaves in the metrics."""

from __future__ import annotations

from time import perf_counter
from typing import TYPE_CHECKING, Any

from potluck.metrics.operations import LONG

if TYPE_CHECKING:
    from potluck.metrics import DistributedMetrics, OperationMetrics
    from potluck.runtime.call import Call
    from potluck.runtime.work import Work

__all__ = ["count", "count_failure", "count_work"]


def count(metrics: DistributedMetrics, call: Call, began: float) -> None:
    """A call ended well.  This is on the way of every one of them: it takes no lock."""
    seconds, source, target = perf_counter() - began, call.source, call.target
    entry: OperationMetrics = getattr(metrics, call.task.collective._value_)
    entry.seconds.append(seconds)
    sizes = entry.sizes
    sizes.append(source.nbytes if source is target else max(source.nbytes, target.nbytes))
    if entry.is_interrupted or len(sizes) > LONG:
        entry.tidy()


def count_failure(
    metrics: DistributedMetrics, call: Call, began: float, error: BaseException
) -> None:
    """A call failed."""
    entry: OperationMetrics = getattr(metrics, call.task.collective.value)
    nbytes = max(call.source.nbytes, call.target.nbytes)
    entry.note(perf_counter() - began, nbytes, type(error).__name__)


def count_work(metrics: DistributedMetrics, call: Call, began: float, work: Work[Any]) -> None:
    """Something that was started has ended, well or not."""
    error = work.exception()
    if error is None:
        count(metrics, call, began)
    else:
        count_failure(metrics, call, began, error)
