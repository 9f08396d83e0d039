"""What a node of a cluster has its flight recorder take down: views, health, elections, steps."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Any

import msgspec

from potluck.core.cluster_events import MembershipEvent
from potluck.core.election_events import ElectionEvent
from potluck.core.health_records import HealthEvent
from potluck.errors import BackendUnavailable
from potluck.runtime import clock
from potluck.runtime.recorder import Label, Lane
from potluck.runtime.recorder_format import Header, Neighbour
from potluck.runtime.recorder_logs import make_recorder

if TYPE_CHECKING:
    from potluck.core.health_records import HealthSummary
    from potluck.runtime.cluster_events import ViewChange
    from potluck.runtime.control import Control
    from potluck.runtime.recorder import Log
    from potluck.vocabulary import ProcessId

__all__ = ["ClusterRecorder", "Steps"]

ANSWER_WITHIN = 0.3
"""Seconds for what the control thread knows of the others."""


VIEWS = 32
"""Views of which a dump tells who was in them."""


class ClusterRecorder:
    """The flight recorder of one node, through all its views."""

    def __init__(self, control: Control, job: str) -> None:
        self._control = control
        self._job = job
        self._label = Label(Lane.CLUSTER)
        self._view = ""
        self._views: dict[str, tuple[str, ...]] = {}
        self._known: tuple[Neighbour, ...] = ()
        self.recorder = make_recorder()
        self.recorder.is_automatic = True
        self.recorder.describe = self._describe

    def note(self, event: object) -> None:
        """Something happened."""
        what = type(event).__name__
        if isinstance(event, HealthEvent):
            what = event.status.value
        elif isinstance(event, MembershipEvent):
            what = event.change.value
        elif isinstance(event, ElectionEvent):
            what = event.kind.value
        self._append(what, 0, str(event))

    def changed(self, change: ViewChange) -> None:
        """Another view holds."""
        view = change.view
        rank = view.rank_of(self._control.me.process)
        self._view = f"{view.lineage}/{view.epoch}"
        self._label = Label(Lane.CLUSTER, "", self._view, -1 if rank is None else rank)
        self.recorder.rank = self._label.rank
        self.recorder.world_size = len(view.members)
        while len(self._views) >= VIEWS:
            del self._views[next(iter(self._views))]
        self._views[self._view] = tuple(map(str_of, view.members))
        self._append(f"view {view.epoch}", view.epoch, str(change))

    def _append(self, what: str, number: int, sentence: str) -> None:
        now = time.monotonic()
        self.recorder.append_event((what, now, now, number, 0, 0, self._label, None, sentence))

    def close(self) -> None:
        """The node ends: what is known of it stays, without anything of the node itself."""
        facts, peers = self._facts(), self._peers()
        self.recorder.describe = lambda header: msgspec.structs.replace(
            header, **facts, peers=peers
        )

    def _describe(self, header: Header) -> Header:
        return msgspec.structs.replace(header, **self._facts(), peers=self._peers())

    def _facts(self) -> dict[str, Any]:
        card = self._control.me
        return {
            "process": str_of(card.process),
            "name": card.name,
            "job": self._job[:255],
            "view": self._view,
            "views": self._views.copy(),
        }

    def _peers(self) -> tuple[Neighbour, ...]:
        """What the control thread knows of the others, if it answers."""
        control = self._control
        if control.is_alive:
            with contextlib.suppress(BackendUnavailable):
                ask = control.core.health.summary
                self._known = _neighbours(control.ask(lambda: ask(clock.now()), ANSWER_WITHIN))
        return self._known


def str_of(process: ProcessId) -> str:
    """A process as dumps name it."""
    return f"{process.node}/{process.incarnation}"


def _neighbours(health: HealthSummary) -> tuple[Neighbour, ...]:
    return tuple(
        Neighbour(
            name=each.name[:255],
            process=str_of(each.peer),
            round_trip=each.round_trip,
            status=each.status.value,
            reason=each.reason[:4000],
        )
        for each in health.peers[:256]
    )


class Steps:
    """Takes down the steps of a training: each lasts from the end of the one before."""

    def __init__(self) -> None:
        self._before = time.monotonic()

    def note(self, log: Log, number: int, what: str = "step") -> None:
        """A step was made, or something else that ended at so many steps."""
        label, now = log.collectives, time.monotonic()
        label = Label(Lane.TRAINING, "", label.view, label.rank)
        log.recorder.append_event((what, self._before, now, number, 0, 0, label, None, None))
        self._before = now
