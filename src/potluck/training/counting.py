"""What training counts: steps, what went into them, exchanges of the state, checkpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from potluck.metrics import DistributedMetrics, OperationMetrics
from potluck.runtime.work import Work

__all__ = ["count_save", "count_step", "count_sync"]


class _Outcome(Protocol):
    """How a step went."""

    @property
    def step(self) -> int:
        """Steps that are committed now."""

    @property
    def counted(self) -> bool:
        """Whether this member's gradients are in it."""

    @property
    def weight(self) -> float:
        """Of all gradients in it together."""

    @property
    def tries(self) -> int:
        """How often its averaging was begun."""


class _Received(Protocol):
    """What an exchange of states has brought."""

    @property
    def nbytes(self) -> int:
        """Bytes that this rank has received."""


Outcome = TypeVar("Outcome", bound=_Outcome)
Received = TypeVar("Received", bound=_Received)


def count_step(metrics: DistributedMetrics | None, step: Callable[[], Outcome]) -> Outcome:
    """Do a step, and count how it went."""
    if metrics is None:
        return step()
    training = metrics.training
    began = time.perf_counter()
    try:
        outcome = step()
    except BaseException as error:
        training.steps.note(time.perf_counter() - began, 0, type(error).__name__)
        raise
    training.steps.note(time.perf_counter() - began, 0)
    training.commit(outcome.step, outcome.weight, outcome.tries, counted=outcome.counted)
    return outcome


def count_sync(metrics: DistributedMetrics | None, sync: Callable[[], Received]) -> Received:
    """Exchange states, and count what that has brought."""
    began = time.perf_counter()
    report = sync()
    if metrics is not None:
        metrics.state.syncs.note(time.perf_counter() - began, report.nbytes)
    return report


def count_save(metrics: DistributedMetrics | None, work: Work[Any], nbytes: int) -> Work[Any]:
    """Count a checkpoint when it is saved, or is not."""
    if metrics is not None:
        saves, began = metrics.state.saves, time.perf_counter()
        work.add_done_callback(lambda: _count(saves, time.perf_counter() - began, work, nbytes))
    return work


def _count(saves: OperationMetrics, seconds: float, work: Work[Any], nbytes: int) -> None:
    error = work.exception()
    saves.note(seconds, nbytes, "" if error is None else type(error).__name__)
