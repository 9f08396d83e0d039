"""Building the connections of a view: tried again while wanted, let go when not."""

from __future__ import annotations

import time

import pytest

from potluck.backend.base import Backend
from potluck.backend.simulated import SimulatedBackend
from potluck.errors import ChannelClosed, DistributedError, NoConnection, PeerLost, ViewChanged
from potluck.runtime import cluster_building
from potluck.runtime.cluster_building import GRACE, Builders
from potluck.runtime.cluster_stage import Look, Stage
from potluck.runtime.cluster_stages import Stages
from potluck.vocabulary import NodeId, ProcessId, View
from support.threads import PATIENCE, eventually

CHANGED = ViewChanged("Somebody came")
LOST = PeerLost("Rank 1 is gone", rank=1)


class Mesh:
    """Makes backends as a test wants, and remembers how they ended."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.made: list[Backend] = []
        self.aborted: list[DistributedError] = []

    def make(self, stage: Stage, deadline: float, look: Look) -> Backend:
        """A backend, after so many failures."""
        assert deadline > time.monotonic()
        if self.failures:
            self.failures -= 1
            look()
            raise NoConnection("attic does not answer")
        (backend,) = SimulatedBackend.create_group(1)
        vars(backend)["abort"] = self.aborted.append
        self.made.append(backend)
        return backend


def stage_of(epoch: int) -> Stage:
    """A view of one."""
    return Stage(View("f" * 32, epoch, (ProcessId(NodeId("a" * 32), 1),)), 0)


def begin(mesh: Mesh) -> tuple[Stages, Builders, Stage]:
    """A stage whose connections are being made."""
    stages = Stages()
    builders = Builders(stages, mesh.make, None)
    stage = stage_of(1)
    stages.install(stage, CHANGED, orderly=True)
    builders.build(stage, None)
    return stages, builders, stage


def test_connections_are_tried_again_until_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What went wrong is kept for the error of whoever waits in vain."""
    monkeypatch.setattr(cluster_building, "PAUSE", 0.01)
    mesh = Mesh(failures=2)
    stages, builders, stage = begin(mesh)
    assert stages.wait_for(lambda _: True, PATIENCE) is stage
    assert str(stage.trouble) == "attic does not answer"
    builders.close(PATIENCE)
    mesh.made[0].close()


def test_a_view_that_is_over_is_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder gives up as soon as it looks."""
    monkeypatch.setattr(cluster_building, "PAUSE", PATIENCE)
    mesh = Mesh(failures=1000)
    stages, builders, stage = begin(mesh)
    eventually(lambda: stage.trouble is not None)
    stages.end(LOST)
    builders.close(PATIENCE)
    assert mesh.made == []


@pytest.mark.parametrize("orderly", [True, False])
def test_who_is_in_the_middle_of_something_may_finish_it_if_nobody_is_lost(orderly: bool) -> None:
    """A loss ends everything at once; a change waits for those at work, and no longer."""
    mesh = Mesh()
    stages, builders, stage = begin(mesh)
    with stages.visit(PATIENCE):
        stages.stop("a member is gone", orderly=orderly)
        builders.abort(stage)
        if not orderly:
            eventually(lambda: len(mesh.aborted) == 1, GRACE / 2)
        assert not (orderly and mesh.aborted)
    eventually(lambda: len(mesh.aborted) == 1)
    assert str(mesh.aborted[0]) == "View 1 has stopped: a member is gone"
    assert stage.ending is None
    builders.close(PATIENCE)
    mesh.made[0].close()


def test_the_view_before_is_cleared_away_once_the_next_is_connected() -> None:
    """Its group and its backend are closed."""
    mesh = Mesh()
    stages, builders, first = begin(mesh)
    assert stages.wait_for(lambda _: True, PATIENCE) is first
    second = stage_of(2)
    before = stages.install(second, CHANGED, orderly=True)
    builders.build(second, before)
    assert stages.wait_for(lambda each: each is second, PATIENCE) is second
    assert first.group is not None
    eventually(lambda: first.group is not None and first.group.is_closed)
    with pytest.raises(ChannelClosed):
        mesh.made[0].send(b"", 0)
    builders.close(PATIENCE)
    mesh.made[1].close()
