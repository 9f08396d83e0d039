"""Building the connections of a view: tried again while wanted, let go when not."""

from __future__ import annotations

import os
import threading
import time

import pytest

from potluck._types import NodeId, ProcessId, View
from potluck.backend.base import Backend
from potluck.backend.simulated import SimulatedBackend
from potluck.cluster import views
from potluck.cluster.views import GRACE, MAX_UNTOLD, Builders, Look, Stage, Stages, ViewGroup
from potluck.errors import (
    Aborted,
    BackendUnavailable,
    ChannelClosed,
    DistributedError,
    NoConnection,
    NoQuorum,
    PeerLost,
    Timeout,
    ViewChanged,
)
from potluck.membership.messages import Cause, CauseCode
from support.threads import PATIENCE, Background, eventually

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
    monkeypatch.setattr(views, "PAUSE", 0.01)
    mesh = Mesh(failures=2)
    stages, builders, stage = begin(mesh)
    assert stages.wait_for(lambda _: True, PATIENCE) is stage
    assert str(stage.trouble) == "attic does not answer"
    builders.close(PATIENCE)
    mesh.made[0].close()


def test_a_view_that_is_over_is_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder gives up as soon as it looks."""
    monkeypatch.setattr(views, "PAUSE", PATIENCE)
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


# --------------------------------------------------------------------------------------------------
# Stages: who is told of a change and how often, and what calls wait for.

MEMBERS = tuple(ProcessId(NodeId(letter * 32), 1) for letter in "abc")
CAME = ViewChanged("Somebody came")
STAGES_LOST = PeerLost("Rank 2 is gone", rank=2)


def view(epoch: int, size: int = 1) -> View:
    """One of a lineage."""
    return View("f" * 32, epoch, MEMBERS[:size])


def add(stages: Stages, epoch: int, ending: Exception = CAME, *, built: bool = True) -> Stage:
    """The next stage, with this process alone in it."""
    stage = Stage(view(epoch), 0)
    assert isinstance(ending, ViewChanged | PeerLost)
    stages.install(stage, ending, orderly=True)
    if built:
        build(stages, stage)
    return stage


def build(stages: Stages, stage: Stage) -> bool:
    """Connect a stage."""
    (backend,) = SimulatedBackend.create_group(1)
    group = ViewGroup(backend, stage, None)
    if stages.built(stage, backend, group):
        return True
    backend.close()
    return False


@pytest.fixture
def stages() -> Stages:
    """Without a stage."""
    return Stages()


def test_a_call_runs_in_the_stage_of_its_beginning(stages: Stages) -> None:
    """Also calls within it, whatever is installed meanwhile."""
    first = add(stages, 1)
    with stages.visit(1) as outer:
        second = add(stages, 2)
        with stages.visit(1) as inner:
            assert outer is inner is first
        assert stages.current is first
        assert stages.latest is second
    assert stages.current is second


def test_a_change_between_two_calls_is_told_once_by_the_next(stages: Stages) -> None:
    """With the error that ended the stage; the call after that runs in the new one."""
    add(stages, 1)
    with stages.visit(1):
        pass
    second = add(stages, 2, STAGES_LOST)
    with pytest.raises(PeerLost, match="Rank 2"):
        stages.visit(1).__enter__()
    with stages.visit(1) as stage:
        assert stage is second


def told(stages: Stages) -> list[str]:
    """What a program is told by its calls until one of them runs."""
    errors: list[str] = []
    while True:
        try:
            with stages.visit(1):
                return errors
        except (ViewChanged, PeerLost) as error:
            errors.append(str(error))


def test_a_program_is_told_of_every_view_though_it_has_begun_nothing_there(stages: Stages) -> None:
    """In order, one error per call; so a rank that is slow is told what the others are told."""
    add(stages, 1)
    with stages.visit(1):
        pass
    add(stages, 2, PeerLost("Rank 3 is gone"))
    add(stages, 3, PeerLost("Rank 2 is gone"))
    last = add(stages, 4, CAME)
    assert told(stages) == ["Rank 3 is gone", "Rank 2 is gone", "Somebody came"]
    assert told(stages) == []
    assert stages.current is last


def test_a_view_that_comes_and_goes_while_a_call_waits_is_told_by_that_call(stages: Stages) -> None:
    """The program knows that the one before is over; a stage that was never built counts too."""
    add(stages, 1)
    with stages.visit(1):
        stages.end(STAGES_LOST)
    with pytest.raises(PeerLost):
        stages.visit(1).__enter__()
    waiting = Background(lambda: stages.visit(PATIENCE).__enter__())
    add(stages, 2, built=False)
    assert not waiting.ended
    third = add(stages, 3, PeerLost("Rank 1 is gone"))
    with pytest.raises(PeerLost, match="Rank 1"):
        waiting.result()
    with stages.visit(1) as stage:
        assert stage is third


def test_views_that_this_process_has_passed_over_are_told_as_well(stages: Stages) -> None:
    """It was out of contact while the others were in them."""
    add(stages, 1)
    with stages.visit(1):
        pass
    over, now = Stage(view(2), 0), Stage(view(3), 0)
    over.end(PeerLost("Rank 1 is gone"))
    stages.install(now, STAGES_LOST, orderly=False, passed=[over])
    build(stages, now)
    assert told(stages) == ["Rank 2 is gone", "Rank 1 is gone"]


def test_of_too_many_views_the_oldest_are_not_told_and_the_next_error_says_so(
    stages: Stages,
) -> None:
    """A program that calls nothing for a day keeps no more than a few."""
    add(stages, 1)
    with stages.visit(1):
        pass
    for epoch in range(2, MAX_UNTOLD + 5):
        add(stages, epoch, PeerLost(f"View {epoch - 1} is over", cause="a loss"))
    errors = told(stages)
    assert len(errors) == MAX_UNTOLD
    assert errors[0] == "View 1 is over: a loss"
    assert errors[1] == "View 5 is over: a loss (the end of 3 earlier views was not reported)"
    assert errors[2] == "View 6 is over: a loss"
    assert errors[-1] == f"View {MAX_UNTOLD + 3} is over: a loss"


def test_a_wait_acknowledges_every_view_so_far(stages: Stages) -> None:
    """Also those that came after the one the program was in; it begins anew, as after joining."""
    add(stages, 1)
    with stages.visit(1):
        pass
    add(stages, 2)
    add(stages, 3)
    with pytest.raises(ViewChanged):
        stages.visit(1).__enter__()
    stages.accept()
    add(stages, 4)
    assert told(stages) == []


def test_reading_its_place_does_not_spare_a_program_an_error(stages: Stages) -> None:
    """What it reads is the present place; the views until then are told all the same."""
    add(stages, 1)
    assert stages.read(1).view.epoch == 1
    add(stages, 2, STAGES_LOST)
    add(stages, 3)
    assert stages.read(1).view.epoch == 3
    assert told(stages) == ["Rank 2 is gone", "Somebody came"]


def test_a_stage_that_nobody_has_used_is_left_without_a_word(stages: Stages) -> None:
    """Changes before the first call are nobody's surprise."""
    add(stages, 1)
    second = add(stages, 2)
    with stages.visit(1) as stage:
        assert stage is second


def test_whoever_has_read_its_place_is_told_when_that_changes(stages: Stages) -> None:
    """A rank or a size that was read counts until the next call; never does an old one slip in."""
    first = add(stages, 1)
    assert stages.read(1) is first
    second = add(stages, 2)
    assert stages.read(1) is second
    with pytest.raises(ViewChanged):
        stages.visit(1).__enter__()
    with stages.visit(1) as stage:
        assert stage is second


def test_after_a_call_the_place_is_the_one_it_had_in_it(stages: Stages) -> None:
    """A sum is divided by the number of those who added, though one of them has left since."""
    first = add(stages, 1)
    assert stages.read(1) is first
    with stages.visit(1):
        pass
    second = add(stages, 2, STAGES_LOST)
    assert stages.read(1) is first
    with pytest.raises(PeerLost, match="Rank 2"):
        stages.visit(1).__enter__()
    assert stages.read(1) is second


def test_the_last_place_can_be_read_when_everything_is_over(stages: Stages) -> None:
    """Reports are often written after the cluster was closed."""
    first = add(stages, 1)
    with stages.visit(1):
        pass
    stages.fail(BackendUnavailable("over"))
    assert stages.read(1) is first


def test_a_place_is_read_in_a_view_that_holds(stages: Stages) -> None:
    """While the view changes whoever asks for its rank waits, and is not told of it again."""
    add(stages, 1)
    stages.end(STAGES_LOST)
    reading = Background(lambda: stages.read(PATIENCE))
    second = add(stages, 2)
    assert reading.result() is second
    with stages.visit(1) as stage:
        assert stage is second


def test_changes_that_were_waited_for_are_not_told(stages: Stages) -> None:
    """Whoever asks for more peers knows that they came."""
    add(stages, 1)
    with stages.visit(1):
        pass
    second = add(stages, 2)
    assert stages.wait_for(lambda stage: stage.view.epoch == 2, 1) is second
    stages.accept()
    with stages.visit(1) as stage:
        assert stage is second


def test_a_failure_in_the_middle_becomes_what_the_cluster_says(stages: Stages) -> None:
    """A broken connection is a symptom; the verdict comes a moment later, and counts as told."""
    add(stages, 1)

    def fail() -> None:
        with stages.visit(1):
            raise ChannelClosed("a stream broke")

    running = Background(fail)
    stages.end(STAGES_LOST)
    with pytest.raises(PeerLost, match="Rank 2"):
        running.result()
    second = add(stages, 2)
    with stages.visit(1) as stage:
        assert stage is second


def test_other_failures_stay_what_they_are(stages: Stages) -> None:
    """A wrong argument or a deadline has nothing to do with who is in."""
    add(stages, 1)
    for error in (ValueError("no"), Timeout("late", seconds=1)):
        with pytest.raises(type(error)), stages.visit(1):
            raise error


def test_what_is_lost_to_operations_alone_is_complained_about(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Membership looks at that member, and the call raises what it decides."""
    monkeypatch.setattr("potluck.cluster.views.COMPLAIN_AFTER", 0.01)
    monkeypatch.setattr("potluck.cluster.views.HEARSAY_AFTER", 0.01)
    stage = add(stages, 1)
    told: list[int] = []

    def look(rank: int, _: str) -> None:
        told.append(rank)
        stages.stop("the connection to rank 2 ended")
        stages.end(CAME)

    stage.complain = look
    with pytest.raises(ViewChanged, match="Somebody came"), stages.visit(PATIENCE):
        raise PeerLost("silent", rank=2)
    assert told == [2]


def test_a_broken_connection_that_has_to_do_with_no_member_stays_what_it_is(
    stages: Stages, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no member that membership could look at."""
    monkeypatch.setattr("potluck.cluster.views.COMPLAIN_AFTER", 0.01)
    stage = add(stages, 1)
    stage.complain = lambda *_: pytest.fail("there is nobody to complain about")
    with pytest.raises(ChannelClosed, match="a stream broke"), stages.visit(PATIENCE):
        raise ChannelClosed("a stream broke")


def test_a_stop_raises_nothing_until_it_is_decided_what_follows(stages: Stages) -> None:
    """Neither in the middle of a call nor in the next one."""
    stage = add(stages, 1)
    entered, interrupt = threading.Event(), threading.Event()

    def run() -> None:
        with stages.visit(PATIENCE):
            entered.set()
            interrupt.wait(PATIENCE)
            raise stage.stop_error

    running = Background(run)
    assert entered.wait(PATIENCE)
    stages.stop("rank 2 is lost")
    later = Background(lambda: stages.visit(PATIENCE).__enter__())
    interrupt.set()
    eventually(lambda: stage._bystanders == 1)
    for waiting in (running, later):
        assert not waiting.ended
    second = add(stages, 2, STAGES_LOST)
    for waiting in (running, later):
        with pytest.raises(PeerLost, match="Rank 2"):
            waiting.result()
    with stages.visit(1) as after:
        assert after is second


def test_if_no_view_follows_a_call_names_whom_it_misses(stages: Stages) -> None:
    """At its timeout; the error of the view is raised once there is one."""
    stage = Stage(view(1, 3), 0)
    stages.install(stage, CAME, orderly=True)
    build(stages, stage)
    stages.find_missing = lambda: [
        Cause(MEMBERS[2], CauseCode.SILENT, "attic", "10.0.0.3", 4.25, "unplugged")
    ]
    with stages.visit(1):
        pass
    stages.stop("attic is silent")
    with pytest.raises(NoQuorum) as caught:
        stages.visit(0.01).__enter__()
    assert caught.value.missing == (2,)
    assert "rank 2 (attic at 10.0.0.3, not heard for 4.2 s)" in str(caught.value)
    assert "potluck continue" in str(caught.value)
    with pytest.raises(NoQuorum):
        stages.visit(0.01).__enter__()
    add(stages, 2, STAGES_LOST)
    with pytest.raises(PeerLost, match="Rank 2"):
        stages.visit(1).__enter__()


def test_a_program_may_abort_what_waits_for_the_next_view(stages: Stages) -> None:
    """Its own error ends the call; that of the view follows with the next one."""
    stage = add(stages, 1)
    with stages.visit(1):
        pass
    stages.stop("rank 2 is lost")
    assert stage.group is not None
    running = Background(lambda: stage.verdict_on(stage.stop_error, None))
    eventually(lambda: stage._bystanders == 1)
    stage.group.abort("changed my mind")
    verdict = running.result()
    assert isinstance(verdict, Aborted)
    assert "changed my mind" in str(verdict)
    add(stages, 2, STAGES_LOST)
    with pytest.raises(PeerLost, match="Rank 2"):
        stages.visit(1).__enter__()


@pytest.mark.parametrize(("is_final", "stays"), [(False, True), (True, False)])
def test_an_abort_by_another_program_is_raised_as_that(
    stages: Stages, is_final: bool, stays: bool
) -> None:
    """Unless that rank has left the group for good: what becomes of it, membership decides."""
    stage = add(stages, 1)
    aborted = Aborted("Rank 1 ended the operation", rank=1)
    aborted.is_final = is_final
    assert stage.is_undecided(aborted) is not stays
    if stays:
        assert stage.verdict_on(aborted, None) is None


def test_calls_wait_for_connections_and_say_why_in_vain(stages: Stages) -> None:
    """Without a view, while it is being connected, and while the cluster is paused."""
    stages.explain("it has met nobody yet")
    with pytest.raises(Timeout, match=r"in no view.*it has met nobody yet"):
        stages.visit(0.01).__enter__()
    stage = add(stages, 1, built=False)
    stage.trouble = ChannelClosed("attic does not answer")
    with pytest.raises(Timeout, match=r"not connected yet.*attic does not answer"):
        stages.visit(0.01).__enter__()
    build(stages, stage)
    stages.pause("2 of 3 members are silent")
    with pytest.raises(Timeout, match=r"paused.*2 of 3 members are silent"):
        stages.visit(0.01).__enter__()
    waiting = Background(lambda: stages.visit(PATIENCE).__enter__())
    stages.pause(None)
    assert waiting.result() is stage


def test_connections_that_come_too_late_are_not_used(stages: Stages) -> None:
    """A view may be over before its members have met."""
    stage = add(stages, 1, built=False)
    add(stages, 2)
    assert not build(stages, stage)


def test_the_end_is_for_good(stages: Stages) -> None:
    """If the control thread ends nothing runs any more, and whoever waits learns it."""
    waiting = Background(lambda: stages.visit(PATIENCE).__enter__())
    stages.fail(BackendUnavailable("over"))
    with pytest.raises(BackendUnavailable, match="over"):
        waiting.result()
    add(stages, 1, built=False)
    with pytest.raises(BackendUnavailable, match="over"):
        stages.visit(1).__enter__()


def test_a_forked_child_waits_for_nothing(stages: Stages) -> None:
    """Another thread may have held the lock at the fork; the child takes none."""
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with stages._changed:
            holding.set()
            release.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(PATIENCE)
    stages.become_forked(BackendUnavailable(f"belongs to {os.getpid()}"))
    with pytest.raises(BackendUnavailable, match="belongs to"):
        stages.visit(1).__enter__()
    release.set()
    thread.join()


def test_followers_see_every_stage_once_it_is_built(stages: Stages) -> None:
    """Also the one that is there; none after they have left."""
    first = add(stages, 1)
    seen: list[Stage] = []
    stages.follow(seen.append)
    second = add(stages, 2)
    assert seen == [first, second]
    stages.unfollow(seen.append)
    add(stages, 3)
    assert seen == [first, second]


def test_a_group_ends_with_its_stage(stages: Stages) -> None:
    """Works that were started and those that are started later get the stage's error."""
    stage = add(stages, 1)
    assert stage.group is not None
    stages.end(STAGES_LOST)
    with pytest.raises(PeerLost, match="Rank 2"):
        stage.group.barrier()
    eventually(stage.over.is_set)
