"""The ground that elastic steps stand on: a cluster whose views change, or a group that stays."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from potluck.core.cluster_events import MembershipEvent
from potluck.errors import DistributedError
from potluck.runtime.cluster import Cluster
from potluck.runtime.cluster_stage import Stage
from potluck.runtime.context import DistributedContext
from potluck.runtime.recorder_cluster import Steps
from potluck.runtime.recorder_logs import log_of
from potluck.vocabulary import NodeId, ProcessId, View

__all__ = ["Ground"]

VERDICT = 30.0
"""Seconds in which a cluster that has lost somebody goes on to another view, on a busy machine."""


class Ground:
    """Where calls run: all those of one block in the same view."""

    def __init__(self, group: DistributedContext) -> None:
        self.group = group
        self._cluster = group if isinstance(group, Cluster) else None
        self._founded: set[str] = set()
        self._stage: Stage | None = None
        self._steps = Steps()

    def can_go_on(self, error: DistributedError) -> bool:
        """Whether another view follows the one in which something failed.

        What a member sees first may be but a symptom, long before the cluster has agreed on what
        has happened; and what somebody ended on purpose is not to be tried again.
        """
        if self._stage is None or not error.recoverable:
            return False
        return self._stage.over.wait(VERDICT)

    @contextlib.contextmanager
    def stand(self, timeout: float | None) -> Iterator[View]:
        """A block in one view.

        Raises what the cluster has to tell first; what fails because the view is over is raised as
        that.
        """
        if self._cluster is None:
            yield _lasting(self.group.world_size)
            return
        limit = self._cluster.timeout if timeout is None else timeout
        with self._cluster.innermost.stages.visit(limit) as stage:  # type: ignore[attr-defined]
            self._stage = stage
            yield stage.view

    def rates(self) -> tuple[int, ...]:
        """Bytes per second of each member's link, as all have agreed; 0 where nobody measured."""
        group = self.group.group if self._stage is None else self._stage.group
        if group is None:
            return ()
        return tuple(map(min, group.links.up, group.links.down))

    def has_founded(self, view: View) -> bool:
        """Whether this member has been in the lineage from its first view on."""
        if self._cluster is None or view.epoch == 1:
            return True
        for event in self._cluster.events():
            told = event.event
            if isinstance(told, MembershipEvent) and told.view and told.view.epoch == 1:
                self._founded.add(told.view.lineage)
        return view.lineage in self._founded

    def note_steps(self, steps: int, what: str = "step") -> None:
        """Let the cluster know how much is behind us: it decides what happens when two meet."""
        backend = self.group if self._stage is None else self._stage.backend
        if backend is not None:
            self._steps.note(log_of(backend), steps, what)
        note = (
            None if self._cluster is None else getattr(self._cluster.innermost, "note_steps", None)
        )
        if note is not None:
            note(steps)


def _lasting(size: int) -> View:
    """The only view of a group that does not change."""
    nobody = NodeId("0" * 32)
    return View("0" * 32, 1, tuple(ProcessId(nobody, rank) for rank in range(size)))
