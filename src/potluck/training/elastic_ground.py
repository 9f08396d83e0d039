"""The ground that elastic steps stand on: a cluster whose views change, or a group that stays."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping

from potluck.core.ancestry import Branch
from potluck.core.cluster_events import MembershipEvent
from potluck.core.steps import Missing
from potluck.errors import (
    Aborted,
    CollectiveMismatch,
    DistributedError,
    MalformedFrame,
    ViewChanged,
)
from potluck.runtime.cluster import Cluster
from potluck.runtime.cluster_stage import Stage
from potluck.runtime.context import DistributedContext
from potluck.runtime.recorder_cluster import Steps
from potluck.runtime.recorder_logs import log_of
from potluck.vocabulary import NodeId, ProcessId, View

__all__ = ["Ground"]

MOST_ALARMS = 3
"""Tries of one step that members may end for reasons that no other member sees."""


def unclear(text: str) -> Aborted:
    """A step was ended, and this member cannot tell who is at fault: it is tried again."""
    error = Aborted(text)
    error.is_final = error.is_unclear = True
    return error


class Ground:
    """Where calls run: all those of one block in the same view."""

    def __init__(self, group: DistributedContext) -> None:
        self.group = group
        self._cluster = group if isinstance(group, Cluster) else None
        self._founded: set[str] = set()
        self._stage: Stage | None = None
        self._steps = Steps()
        self._alarms: list[set[int]] = []  # who ended tries since the last step, in this view

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
        if isinstance(error, Aborted) and error.is_unclear:
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
            except Aborted as error:
                is_ours = error.is_final or error.rank in {None, stage.rank}
                if is_ours or isinstance(error, ViewChanged):
                    raise
                tellers = set() if error.teller is None else {error.teller}
                raise self._alarmed(tellers, error) from error

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
        return self._alarmed(ballot.reporters, error)

    def _alarmed(self, tellers: set[int], error: DistributedError) -> DistributedError:
        """Members (``tellers``) have ended a step of all, for reasons that only they know.

        It is tried again; a member that ends one try after the other is at fault.
        """
        self._alarms.append(tellers)
        if len(self._alarms) < MOST_ALARMS:
            return unclear(str(error))
        ended = Counter(rank for each in self._alarms for rank in each)
        if not ended:
            return error
        ((rank, count),) = ended.most_common(1)
        return MalformedFrame(
            f"Rank {rank} ended the step of all members {count} times in a row",
            rank=rank,
            cause=error.message,
        )

    @property
    def failures(self) -> int:
        """Grows, on all members alike, when an operation of all has failed."""
        group = self.group.group if self._stage is None else self._stage.group
        return 0 if group is None else group.epoch

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

    def left_out(
        self, awaited: Mapping[ProcessId, str]
    ) -> tuple[Missing, tuple[ProcessId, ...], bool]:
        """Who was left out and may be alive, who has ended, and whether to continue without them.

        ``awaited`` are those of whom the last decision told.
        """
        if self._cluster is None:
            return (), (), True
        cluster = self._cluster.innermost
        found, ended, insists = cluster.left_out(awaited)  # type: ignore[attr-defined]
        return tuple(found.items()), ended, insists

    def note_awaited(self, awaited: Mapping[ProcessId, str]) -> None:
        """Let people who ask know whom the training waits for; nobody, if it does not wait."""
        if self._cluster is not None:
            self._cluster.innermost.note_awaited(awaited)  # type: ignore[attr-defined]

    def note_progress(
        self, samples: int, origin: tuple[Branch, ...], steps: int, what: str = "step"
    ) -> None:
        """Tell the cluster how many samples are committed, and from what its lineage continues.

        Both decide which of two clusters stays when they meet.
        """
        self._alarms.clear()
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
