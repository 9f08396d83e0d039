"""DistributedContext: any backend, with collectives, and counted if wanted."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, TypeVar

from potluck.metrics import DistributedMetrics, MetricsSnapshot
from potluck.runtime.lifted import Lifted
from potluck.runtime.requests import Request
from potluck.runtime.work import Work

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from potluck.backend.base import Backend
    from potluck.collective.config import CollectiveConfig

__all__ = ["DistributedContext"]

Result = TypeVar("Result")

_counting = threading.Lock()
"""Several contexts, on several threads, may count in one place."""


class DistributedContext(Lifted):
    """A handle on a group: collectives, messages and who we are in it.

    Takes any :class:`Backend`; ``config`` says how collectives shall run, for those who want a say
    in it.  Closing the context closes the backend.

    >>> from potluck import SimulatedBackend
    >>> with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
    ...     context.all_reduce(2.5), context.is_master
    (2.5, True)
    """

    def __new__(cls, backend: Backend, config: CollectiveConfig | None = None) -> Self:
        """Of the kind that fits the backend: on one whose ranks change, a :class:`Cluster`."""
        del config
        fitting: type[Self] = getattr(backend, "context_type", cls)
        return super().__new__(fitting if issubclass(fitting, cls) else cls)

    def __init__(self, backend: Backend, config: CollectiveConfig | None = None) -> None:
        super().__init__(backend, config)
        self._metrics: DistributedMetrics | None = None
        self._subgroups: dict[DistributedContext, None] = {}
        self._whole: DistributedContext | None = None

    @classmethod
    def with_metrics(
        cls,
        backend: Backend,
        metrics: DistributedMetrics | None = None,
        config: CollectiveConfig | None = None,
    ) -> Self:
        """A context that counts, in ``metrics`` if that is given."""
        context = cls(backend, config)
        context._metrics = DistributedMetrics() if metrics is None else metrics
        return context

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def metrics(self) -> DistributedMetrics | None:
        """Where this context counts, if it does."""
        return self._metrics

    def metrics_snapshot(self) -> MetricsSnapshot | None:
        """What has been counted so far; None for a context without metrics."""
        if self._metrics is None:
            return None
        with _counting:
            return self._metrics.snapshot()

    def subgroup(self, members: Iterable[int], *, name: str | None = None) -> DistributedContext:
        """Some ranks as a group of their own; every member calls this, as for ``SubBackend``.

        It ends with this context, or by itself when it is closed.
        """
        from potluck.backend.sub import SubBackend

        # Of the backend below: subgroups of the same parent are counted to tell them apart.
        context = DistributedContext(SubBackend(self.innermost, members, name=name))
        context._metrics = self._metrics
        context._whole = self
        self._subgroups[context] = None
        return context

    def close(self) -> None:
        """Leave the group, and its subgroups: peers waiting for this rank are told at once."""
        for subgroup in list(self._subgroups):
            subgroup.close()
        super().close()
        if self._whole is not None:
            self._whole._subgroups.pop(self, None)  # noqa: SLF001 - another of our kind

    def _launch(
        self, request: Request[Result], timeout: float | None, *, async_op: bool
    ) -> Result | Work[Result]:
        if self._metrics is None:
            return super()._launch(request, timeout, async_op=async_op)
        started = time.perf_counter()
        try:
            outcome = super()._launch(request, timeout, async_op=async_op)
        except BaseException:
            self._count(request, started, succeeded=False)
            raise
        if async_op and isinstance(outcome, Work):
            work = outcome
            work.add_done_callback(
                lambda: self._count(request, started, succeeded=work.exception() is None)
            )
        else:
            self._count(request, started, succeeded=True)
        return outcome

    def _count(self, request: Request[Result], started: float, *, succeeded: bool) -> None:
        milliseconds = (time.perf_counter() - started) * 1e3
        entry = getattr(self._metrics, request.call.task.collective.value)
        with _counting:
            entry.duration_ms.observe(milliseconds)
            entry.bytes_processed.add(request.nbytes)
            (entry.completed if succeeded else entry.failed).inc()
