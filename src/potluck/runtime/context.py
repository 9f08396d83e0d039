"""DistributedContext: any backend, with collectives, and counted if wanted."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from potluck.metrics import DistributedMetrics, MetricsSnapshot
from potluck.metrics.snapshot import OPERATIONS
from potluck.runtime.counting import count_refusal
from potluck.runtime.lifted import Lifted
from potluck.runtime.presence import counted, is_attended
from potluck.runtime.recorder_logs import recorder_of
from potluck.runtime.waiting import watch_waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from os import PathLike
    from pathlib import Path
    from typing import Self

    from potluck.backend.base import Backend
    from potluck.collective.config import CollectiveConfig

__all__ = ["DistributedContext"]


def _counting_refusals(name: str) -> Callable[..., Any]:
    inherited = getattr(Lifted, name)

    @functools.wraps(inherited)
    def call(self: DistributedContext, *arguments: Any, **options: Any) -> Any:
        try:
            return inherited(self, *arguments, **options)
        except BaseException as error:
            if self._metrics is not None:
                count_refusal(self._metrics, name, error)
            raise

    return call


class DistributedContext(Lifted):
    """A handle on a group: collectives, messages and who we are in it.

    Takes any :class:`Backend`; ``config`` says how collectives shall run, for those who want a say
    in it.  Closing the context closes the backend.

    >>> from potluck import SimulatedBackend
    >>> with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
    ...     context.all_reduce(2.5), context.is_master
    (2.5, True)
    """

    if not TYPE_CHECKING:  # for type checkers they are the inherited ones
        locals().update({name: _counting_refusals(name) for name in OPERATIONS})

    def __new__(cls, backend: Backend, config: CollectiveConfig | None = None) -> Self:
        """Of the kind that fits the backend: on one whose ranks change, a :class:`Cluster`."""
        del config
        fitting: type[Self] = getattr(backend, "context_type", cls)
        return super().__new__(fitting if issubclass(fitting, cls) else cls)

    def __init__(self, backend: Backend, config: CollectiveConfig | None = None) -> None:
        super().__init__(backend, config)
        self._slept: dict[int, float] | None = None
        self._subgroups: dict[DistributedContext, None] = {}
        self._whole: DistributedContext | None = None
        if self._metrics is None and is_attended(self.innermost):
            from potluck.runtime.metrics_endpoint import process_metrics

            self._count_in(process_metrics())

    @classmethod
    def with_metrics(
        cls,
        backend: Backend,
        metrics: DistributedMetrics | None = None,
        config: CollectiveConfig | None = None,
    ) -> Self:
        """A context that counts, in ``metrics`` if that is given."""
        context = cls(backend, config)
        context._count_in(metrics or context._metrics or DistributedMetrics())
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
        return None if self._metrics is None else self._metrics.snapshot()

    def _count_in(self, metrics: DistributedMetrics | None) -> None:
        """Count there; by which names others are waited for is up to who they are."""
        if self._metrics is not None and self._slept is not None:
            self._metrics.peers.release(self._slept)
        self._metrics = metrics
        if metrics is not None:
            counted(self.innermost, self._group, metrics)
            self._slept = watch_waiting(self._group, metrics, self._peer_labels())

    def _peer_labels(self) -> dict[int, str]:
        """What the other ranks are called in metrics, where that is not by their number."""
        return {}

    def dump_trace(self, path: str | PathLike[str] | None = None) -> Path:
        """Write down the last operations of this rank, and what is under way; returns where.

        Without a path that is ``POTLUCK_TRACE_DIR``, or ``traces`` in Potluck's own folder.
        ``potluck trace`` puts the dumps of all ranks together.
        """
        from potluck.runtime.recorder_files import dump

        return dump(recorder_of(self), path, reason="the program asked for it")

    def subgroup(self, members: Iterable[int], *, name: str | None = None) -> DistributedContext:
        """Some ranks as a group of their own; every member calls this, as for ``SubBackend``.

        It ends with this context, or by itself when it is closed.
        """
        from potluck.backend.sub import SubBackend

        # Of the backend below: subgroups of the same parent are counted to tell them apart.
        context = DistributedContext(SubBackend(self.innermost, members, name=name))
        context._count_in(self._metrics)
        context._whole = self
        self._subgroups[context] = None
        return context

    def close(self) -> None:
        """Leave the group, and its subgroups: peers waiting for this rank are told at once."""
        for subgroup in list(self._subgroups):
            subgroup.close()
        if self._metrics is not None and self._slept is not None:
            self._metrics.peers.release(self._slept)
        super().close()
        if self._whole is not None:
            self._whole._subgroups.pop(self, None)  # noqa: SLF001 - another of our kind
