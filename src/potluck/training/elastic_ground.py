"""The ground that elastic steps stand on: a cluster whose views change, or a group that stays."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping

from potluck.core.ancestry import Branch
from potluck.core.cluster_events import MembershipEvent
from potluck.core.steps import Missing
from potluck.errors import Aborted, CollectiveMismatch, DistributedError, MalformedFrame
from potluck.runtime.cluster import Cluster
from potluck.runtime.cluster_stage import Stage
from potluck.runtime.context import DistributedContext
from potluck.runtime.recorder_cluster import Steps
from potluck.runtime.recorder_logs import log_of
from potluck.vocabulary import NodeId, ProcessId, View

__all__ = ["Ground"]

MOST_ALARMS = 3
"""Disagreements that a member may report in one view while no other member sees any."""


class _Unclear(Aborted):
    """Ranks disagreed, this one is not told who is at fault: the step is tried again."""

    is_final = True


class Ground:
    """Where calls run: all those of one block in the same view."""

    def __init__(self, group: DistributedContext) -> None:
        self.group = group
        self._cluster = group if isinstance(group, Cluster) else None
        self._founded: set[str] = set()
        self._stage: Stage | None = None
        self._steps = Steps()
        self._alarms: list[set[int]] = []  # who reported disagreements in this view

    @property
    def is_cluster(self) -> bool:
        """Whether views follow each other here, so that the others can continue without one."""
        return self._cluster is not None

    def can_go_on(self, error: DistributedError) -> bool:
        """Whether the error says that the view is over: then another follows, or will.

        What a program ended on purpose is not to be tried again.
        """
        if self._cluster is None or not error.recoverable:
            return False
        if isinstance(error, _Unclear):
            return True
        # Before this member stood in any view, only the end of a view can be reported.
        return self._stage is None or self._stage.ending is not None

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
            if self._stage is not stage:
                self._stage = stage
                self._alarms.clear()
            if stage.group is not None:
                stage.group.ask_around()
            try:
                yield stage.view
            except CollectiveMismatch as error:
                raise self._judged(error) from error

    def _judged(self, error: CollectiveMismatch) -> DistributedError:
        """What it means that ranks disagree about an operation.

        A member that differs from most is at fault, like one that sends what is not valid.  Where
        this member is in no majority, or was not asked, the error stays what it is.
        """
        if error.odd_one is not None:
            return MalformedFrame(
                f"Rank {error.odd_one} disagrees with most members",
                rank=error.odd_one,
                cause=error.cause or error.message,
            )
        ballot = error.ballot
        if ballot is None or not ballot.has_most:
            return error
        odd = ballot.odd_one()
        if odd is not None:
            rank, theirs, ours = odd
            return MalformedFrame(
                f"Rank {rank} made another call than most members",
                rank=rank,
                cause=f"{theirs} where {ours} was due",
            )
        # Another member has seen it, and has the one at fault removed; or it says so in vain.
        self._alarms.append(ballot.reporters)
        if len(self._alarms) < MOST_ALARMS:
            return _Unclear(f"Some ranks disagree: {error}")
        reporters = Counter(rank for each in self._alarms for rank in each)
        if not reporters:
            return error
        ((rank, count),) = reporters.most_common(1)
        return MalformedFrame(
            f"Rank {rank} reported {count} times that ranks disagree, and no other rank saw it",
            rank=rank,
        )

    def rates(self) -> tuple[int, ...]:
        """Bytes per second of each member's link, as all have agreed; 0 where nobody measured."""
        group = self.group.group if self._stage is None else self._stage.group
        if group is None:
            return ()
        return tuple(map(min, group.links.up, group.links.down))

    def has_founded(self, view: View) -> bool:
        """Whether this member was in the first view of this lineage and of all its ancestors."""
        if self._cluster is None:
            return True
        for event in self._cluster.events():
            told = event.event
            if isinstance(told, MembershipEvent) and told.view and told.view.epoch == 1:
                self._founded.add(told.view.lineage)
        if view.epoch == 1:
            self._founded.add(view.lineage)
        ancestors = {lineage for lineage, _ in view.ancestry}
        return {view.lineage, *ancestors} <= self._founded

    def left_out(self, awaited: Mapping[ProcessId, str]) -> tuple[Missing, bool]:
        """Members that were left out and may be alive, and whether to continue without them.

        ``awaited`` are those of whom the last decision told.
        """
        if self._cluster is None:
            return (), True
        found, insists = self._cluster.innermost.left_out(awaited)  # type: ignore[attr-defined]
        return tuple(found.items()), insists

    def note_progress(
        self, samples: int, origin: tuple[Branch, ...], steps: int, what: str = "step"
    ) -> None:
        """Tell the cluster how many samples are committed, and from what its lineage continues.

        Both decide which of two clusters stays when they meet.
        """
        backend = self.group if self._stage is None else self._stage.backend
        if backend is not None:
            self._steps.note(log_of(backend), steps, what)
        if self._cluster is not None:
            self._cluster.note_progress(samples, origin)

    def note_event(self, event: object) -> None:
        """Keep something that the user should know among the events of the cluster."""
        if self._cluster is not None:
            self._cluster.note_event(event, logging.WARNING)


def _lasting(size: int) -> View:
    """The only view of a group that does not change."""
    nobody = NodeId("0" * 32)
    return View("0" * 32, 1, tuple(ProcessId(nobody, rank) for rank in range(size)))
