"""Cluster: the handle on a cluster that forms itself and heals itself."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from potluck._time import read_timeout
from potluck._types import Seconds
from potluck.backend.base import Backend
from potluck.backend.sub import SubBackend
from potluck.cluster.views import MESSAGES, InOneView, StageArbiter, explain
from potluck.collective.call import Work
from potluck.collective.context import DistributedContext
from potluck.collective.p2p import Transfer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from potluck._types import Branch, ProcessId, View
    from potluck.cluster.events import ClusterEvent, ViewChange
    from potluck.cluster.topology import SharedTopology
    from potluck.cluster.views import Stage, Stages
    from potluck.collective.call import Place, Request
    from potluck.membership.events import ElectionState
    from potluck.membership.health import HealthSummary
    from potluck.metrics.registry import DistributedMetrics
    from potluck.schedule.task import CollectiveConfig


Result = TypeVar("Result")


class ClusterBackend(Protocol):
    """What a cluster asks of the backend below it."""

    stages: Stages

    @property
    def view(self) -> View | None:
        """The view that holds now."""

    @property
    def leader(self) -> ProcessId | None:
        """Rank 0 of it."""

    @property
    def process(self) -> ProcessId:
        """Who we are."""

    @property
    def health(self) -> HealthSummary:
        """How the others are."""

    @property
    def metrics(self) -> DistributedMetrics | None:
        """What the node has counted, if it does."""

    def count_in(self, metrics: DistributedMetrics) -> None:
        """Count views, leadership, health and peers there as well."""

    @property
    def metrics_url(self) -> str | None:
        """Where that can be read."""

    @property
    def election(self) -> ElectionState:
        """Who leads, in which term and why."""

    @property
    def topology(self) -> SharedTopology:
        """The machines and the links between them."""

    def wait_for_peers(self, count: int, timeout: Seconds | None = None) -> View:
        """Wait until so many others are in the view."""

    def wait_until_active(self, timeout: Seconds | None = None) -> View:
        """Wait until calls can run."""

    def on_view_change(self, callback: Callable[[ViewChange], None]) -> Callable[[], None]:
        """Have something called at every change."""

    def events(self) -> list[ClusterEvent]:
        """What has happened."""

    def continue_without_missing(self) -> None:
        """Do not wait for members that are missing."""

    def note_progress(self, samples: int, origin: tuple[Branch, ...] = ()) -> None:
        """How many samples are committed, and from what the lineage continues."""

    def note_event(self, event: object, level: int = logging.INFO) -> None:
        """Keep an event."""


class Cluster(InOneView, DistributedContext):
    """A cluster, as :func:`potluck.join` returns it.

    Everything a :class:`DistributedContext` can do, in the view that holds at the moment of the
    call.  When a machine is lost or comes, what runs raises :class:`~potluck.PeerLost` or
    :class:`~potluck.ViewChanged`, on all ranks; a rank that is between two calls learns it from its
    next one.  The call after that runs among those who are there then.

    >>> from potluck import join
    >>> with join(job="doctest-cluster", multicast=False, solo_delay=0.0) as cluster:
    ...     cluster.is_master, cluster.all_reduce(1.5)
    (True, 1.5)
    """

    def __init__(self, backend: Backend, config: CollectiveConfig | None = None) -> None:
        if not hasattr(backend, "stages"):
            msg = f"A cluster stands on an AutoDiscoveryBackend, not on a {type(backend).__name__}"
            raise TypeError(msg)
        if config is not None:
            msg = "How collectives of a cluster run is said in AutoDiscoveryConfig(collectives=...)"
            raise ValueError(msg)
        self._backend = backend
        self._metrics = self._cluster.metrics
        self._slept = None
        self._subgroups = {}
        self._whole = None
        self._respect_overrides()

    @property
    def _cluster(self) -> ClusterBackend:
        return self._backend  # type: ignore[return-value] # checked above

    @property
    def _stages(self) -> Stages:  # type: ignore[override]
        return self._cluster.stages

    def __repr__(self) -> str:
        """Who this is, for people."""
        stage = self._stages.latest
        where = "in no view yet" if stage is None else f"rank {stage.rank} of {stage.world_size}"
        return f"<{type(self).__name__}, {where}>"

    # -- who is here ---------------------------------------------------------------------------

    @property
    def view(self) -> View | None:
        """The view that holds now: lineage, epoch and members; None before the first."""
        return self._cluster.view

    @property
    def leader(self) -> ProcessId | None:
        """Rank 0."""
        return self._cluster.leader

    @property
    def election(self) -> ElectionState:
        """Who leads, in which term and why, and what this process does in it."""
        return self._cluster.election

    @property
    def process(self) -> ProcessId:
        """Who we are, whatever our rank."""
        return self._cluster.process

    @property
    def health(self) -> HealthSummary:
        """How the others are, with reasons."""
        return self._cluster.health

    @property
    def topology(self) -> SharedTopology:
        """The machines and the links between them, with what is known now."""
        return self._cluster.topology

    @property
    def metrics_url(self) -> str | None:
        """Where metrics can be read over HTTP; None unless ``metrics_port`` was given."""
        return self._cluster.metrics_url

    def measure_links(self) -> SharedTopology:
        """Probe the links between all members, for about a second each; all ranks call this.

        Collectives measure what they need by themselves; this is for people who want to know.
        """
        from potluck.cluster.topology import measure_links

        return measure_links(self._backend, self.topology, self.wait_until_active())

    def wait_for_peers(self, count: int, timeout: Seconds | None = None) -> View:
        """Wait until at least ``count`` others are in the view."""
        return self._cluster.wait_for_peers(count, timeout)

    def wait_until_active(self, timeout: Seconds | None = None) -> View:
        """Wait while the cluster is paused or changing; calls do so by themselves."""
        return self._cluster.wait_until_active(timeout)

    def on_view_change(self, callback: Callable[[ViewChange], None]) -> Callable[[], None]:
        """Have ``callback`` called after every change of the view, on a thread of its own.

        What this returns ends that.
        """
        return self._cluster.on_view_change(callback)

    def events(self) -> list[ClusterEvent]:
        """What has happened, oldest first; the last few hundred events."""
        return self._cluster.events()

    def continue_without_missing(self) -> None:
        """Do not wait for members that are missing; returns at once, from any thread.

        Call this only if you know that they are switched off.  Those who are here continue as a
        new branch of the job; nothing happens while the cluster works.  If the missing machines
        were at work meanwhile, their work counts when the two sides meet, and that of this side is
        discarded.  ``potluck continue`` does the same from a terminal.
        """
        self._cluster.continue_without_missing()

    def note_progress(self, samples: int, origin: tuple[Branch, ...] = ()) -> None:
        """Say how many training samples are committed in this process's state.

        ``origin`` is the ancestry of a loaded checkpoint, at its end the checkpoint's own lineage
        and epoch.  When two clusters of one job meet, ancestry and then samples decide which one
        stays.  :class:`~potluck.ElasticTrainer` calls this; programs with a training loop of their
        own may.  Raises ``ValueError`` for a negative number.
        """
        self._cluster.note_progress(samples, origin)

    def note_event(self, event: object, level: int = logging.INFO) -> None:
        """Keep an event of the program in :meth:`events`; its text is ``str(event)``."""
        self._cluster.note_event(event, level)

    @property
    def dashboard_url(self) -> str | None:
        """Where ``join(dashboard=...)`` shows what happens; None if it was not asked to."""
        url: str | None = getattr(self._backend, "dashboard_url", None)
        return url

    # -- calls ---------------------------------------------------------------------------------

    def subgroup(self, members: Iterable[int], *, name: str | None = None) -> DistributedContext:
        """Some ranks of the present view as a group of their own, for as long as the view lasts.

        Afterwards it raises what the view ended with; make another.
        """
        with self._stages.visit(self.timeout) as stage:
            assert stage.backend is not None
            context = _Part(SubBackend(stage.backend, members, name=name))
        context.stage, context.stages = stage, self._stages
        context._count_in(self._metrics)  # noqa: SLF001 - of our own kind
        context._whole = self  # noqa: SLF001
        self._subgroups[context] = None
        return context

    def _count_in(self, metrics: DistributedMetrics | None) -> None:
        self._metrics = metrics  # for whom a view waits is counted by the node
        if metrics is not None:
            self._cluster.count_in(metrics)

    def abort(self, reason: str = "aborted by the caller") -> None:
        """End every collective under way with an error, from any thread."""
        stage = self._stages.latest
        if stage is not None and stage.group is not None:
            stage.group.abort(reason)

    def close(self) -> None:
        """Leave the cluster: the others are told at once."""
        self._backend.close()
        for subgroup in list(self._subgroups):
            subgroup.close()


def _in_this_view(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(DistributedContext, name))
    def call(self: _Part, *arguments: Any, **options: Any) -> Any:
        run = getattr(super(_Part, self), name)
        with self._judged(options.get("timeout")):
            outcome = run(*arguments, **options)
        if isinstance(outcome, Transfer):
            outcome.arbiter = StageArbiter(self.stage, self.stages)
        return outcome

    return call


class _Part(DistributedContext):
    """A subgroup of one view."""

    stage: Stage
    stages: Stages

    if not TYPE_CHECKING:  # for type checkers they are the inherited ones
        locals().update({name: _in_this_view(name) for name in MESSAGES})

    def _peer_labels(self) -> dict[int, str]:
        return dict(self.stage.labels)

    @property
    def _place(self) -> Place:
        if self.stage.ending is not None:
            raise copy.copy(self.stage.ending)
        return super()._place

    def _launch(
        self, request: Request[Result], timeout: Seconds | None, *, async_op: bool
    ) -> Result | Work[Result]:
        with self._judged(timeout):
            outcome = super()._launch(request, timeout, async_op=async_op)
        if isinstance(outcome, Work):
            explain(outcome, self.stage, self.stages, read_timeout(self._limit(timeout)))
        return outcome

    @contextlib.contextmanager
    def _judged(self, timeout: Seconds | None) -> Iterator[None]:
        """Around a call: what fails because the view is over raises what membership decided."""
        limit = read_timeout(self._limit(timeout))
        deadline = None if limit is None else time.monotonic() + limit
        self.stage.check(deadline, limit or 0.0)
        try:
            yield
        except BaseException as error:
            verdict = self.stage.verdict_on(error, deadline, limit or 0.0)
            if verdict is None:
                raise
            raise verdict from error
