"""Building the connections of a view: tried again while wanted, let go when not."""

from __future__ import annotations

import os
import threading
import time

import pytest

from potluck._types import NodeId, ProcessId, View
from potluck.backend.mesh import MeshBackend
from potluck.backend.simulated import SimulatedBackend
from potluck.cluster import views
from potluck.cluster.views import (
    GRACE,
    MAX_UNTOLD,
    Look,
    ViewConnector,
    ViewGroup,
    ViewSession,
    ViewSessions,
)
from potluck.errors import (
    Aborted,
    BackendUnavailable,
    ChannelClosed,
    DistributedError,
    LeftOut,
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
        self.made: list[MeshBackend] = []
        self.aborted: list[DistributedError] = []

    def make(self, session: ViewSession, deadline: float, look: Look) -> MeshBackend:
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


def session_of(epoch: int) -> ViewSession:
    """A view of one."""
    return ViewSession(View("f" * 32, epoch, (ProcessId(NodeId("a" * 32), 1),)), 0)


def begin(mesh: Mesh) -> tuple[ViewSessions, ViewConnector, ViewSession]:
    """A session whose connections are being made."""
    sessions = ViewSessions()
    connector = ViewConnector(sessions, mesh.make, None)
    session = session_of(1)
    sessions.install(session, CHANGED, orderly=True)
    connector.build(session, None)
    return sessions, connector, session


def test_connections_are_tried_again_until_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """What went wrong is kept for the error of whoever waits in vain."""
    monkeypatch.setattr(views, "PAUSE", 0.01)
    mesh = Mesh(failures=2)
    sessions, connector, session = begin(mesh)
    assert sessions.wait_for(lambda _: True, PATIENCE) is session
    assert str(session.trouble) == "attic does not answer"
    connector.close(PATIENCE)
    mesh.made[0].close()


def test_a_view_that_is_over_is_not_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The builder gives up as soon as it looks."""
    monkeypatch.setattr(views, "PAUSE", PATIENCE)
    mesh = Mesh(failures=1000)
    sessions, connector, session = begin(mesh)
    eventually(lambda: session.trouble is not None)
    sessions.end(LOST)
    connector.close(PATIENCE)
    assert mesh.made == []


@pytest.mark.parametrize("orderly", [True, False])
def test_who_is_in_the_middle_of_something_may_finish_it_if_nobody_is_lost(orderly: bool) -> None:
    """A loss ends everything at once; a change waits for those at work, and no longer."""
    mesh = Mesh()
    sessions, connector, session = begin(mesh)
    with sessions.visit(PATIENCE):
        sessions.stop("a member is gone", orderly=orderly)
        connector.abort(session)
        if not orderly:
            eventually(lambda: len(mesh.aborted) == 1, GRACE / 2)
        assert not (orderly and mesh.aborted)
    eventually(lambda: len(mesh.aborted) == 1)
    assert str(mesh.aborted[0]) == "View 1 has stopped: a member is gone"
    assert session.ending is None
    connector.close(PATIENCE)
    mesh.made[0].close()


def test_the_view_before_is_cleared_away_once_the_next_is_connected() -> None:
    """Its group and its backend are closed."""
    mesh = Mesh()
    sessions, connector, first = begin(mesh)
    assert sessions.wait_for(lambda _: True, PATIENCE) is first
    second = session_of(2)
    before = sessions.install(second, CHANGED, orderly=True)
    connector.build(second, before)
    assert sessions.wait_for(lambda each: each is second, PATIENCE) is second
    assert first.group is not None
    eventually(lambda: first.group is not None and first.group.is_closed)
    with pytest.raises(ChannelClosed):
        mesh.made[0].send(b"", 0)
    connector.close(PATIENCE)
    mesh.made[1].close()


# --------------------------------------------------------------------------------------------------
# Stages: who is told of a change and how often, and what calls wait for.

MEMBERS = tuple(ProcessId(NodeId(letter * 32), 1) for letter in "abc")
CAME = ViewChanged("Somebody came")
SESSION_LOST = PeerLost("Rank 2 is gone", rank=2)


def view(epoch: int, size: int = 1) -> View:
    """One of a lineage."""
    return View("f" * 32, epoch, MEMBERS[:size])


def add(
    sessions: ViewSessions, epoch: int, ending: Exception = CAME, *, built: bool = True
) -> ViewSession:
    """The next session, with this process alone in it."""
    session = ViewSession(view(epoch), 0)
    assert isinstance(ending, ViewChanged | PeerLost)
    sessions.install(session, ending, orderly=True)
    if built:
        build(sessions, session)
    return session


def build(sessions: ViewSessions, session: ViewSession) -> bool:
    """Connect a session."""
    (backend,) = SimulatedBackend.create_group(1)
    group = ViewGroup(backend, session, None)
    if sessions.built(session, backend, group):
        return True
    backend.close()
    return False


@pytest.fixture
def sessions() -> ViewSessions:
    """Without a session."""
    return ViewSessions()


def test_a_call_runs_in_the_session_of_its_beginning(sessions: ViewSessions) -> None:
    """Also calls within it, whatever is installed meanwhile."""
    first = add(sessions, 1)
    with sessions.visit(1) as outer:
        second = add(sessions, 2)
        with sessions.visit(1) as inner:
            assert outer is inner is first
        assert sessions.current is first
        assert sessions.latest is second
    assert sessions.current is second


def test_a_change_between_two_calls_is_told_once_by_the_next(sessions: ViewSessions) -> None:
    """With the error that ended the session; the call after that runs in the new one."""
    add(sessions, 1)
    with sessions.visit(1):
        pass
    second = add(sessions, 2, SESSION_LOST)
    with pytest.raises(PeerLost, match="Rank 2"):
        sessions.visit(1).__enter__()
    with sessions.visit(1) as session:
        assert session is second


def told(sessions: ViewSessions) -> list[str]:
    """What a program is told by its calls until one of them runs."""
    errors: list[str] = []
    while True:
        try:
            with sessions.visit(1):
                return errors
        except (ViewChanged, PeerLost) as error:
            errors.append(str(error))


def test_a_program_is_told_of_every_view_though_it_has_begun_nothing_there(
    sessions: ViewSessions,
) -> None:
    """In order, one error per call; so a rank that is slow is told what the others are told."""
    add(sessions, 1)
    with sessions.visit(1):
        pass
    add(sessions, 2, PeerLost("Rank 3 is gone"))
    add(sessions, 3, PeerLost("Rank 2 is gone"))
    last = add(sessions, 4, CAME)
    assert told(sessions) == ["Rank 3 is gone", "Rank 2 is gone", "Somebody came"]
    assert told(sessions) == []
    assert sessions.current is last


def test_a_view_that_comes_and_goes_while_a_call_waits_is_told_by_that_call(
    sessions: ViewSessions,
) -> None:
    """The program knows that the one before is over; a session that was never built counts too."""
    add(sessions, 1)
    with sessions.visit(1):
        sessions.end(SESSION_LOST)
    with pytest.raises(PeerLost):
        sessions.visit(1).__enter__()
    waiting = Background(lambda: sessions.visit(PATIENCE).__enter__())
    add(sessions, 2, built=False)
    assert not waiting.ended
    third = add(sessions, 3, PeerLost("Rank 1 is gone"))
    with pytest.raises(PeerLost, match="Rank 1"):
        waiting.result()
    with sessions.visit(1) as session:
        assert session is third


def test_views_that_this_process_has_passed_over_are_told_as_well(sessions: ViewSessions) -> None:
    """It was out of contact while the others were in them."""
    add(sessions, 1)
    with sessions.visit(1):
        pass
    over, now = ViewSession(view(2), 0), ViewSession(view(3), 0)
    over.end(PeerLost("Rank 1 is gone"))
    sessions.install(now, SESSION_LOST, orderly=False, passed=[over])
    build(sessions, now)
    assert told(sessions) == ["Rank 2 is gone", "Rank 1 is gone"]


def test_of_too_many_views_the_oldest_are_not_told_and_the_next_error_says_so(
    sessions: ViewSessions,
) -> None:
    """A program that calls nothing for a day keeps no more than a few."""
    add(sessions, 1)
    with sessions.visit(1):
        pass
    for epoch in range(2, MAX_UNTOLD + 5):
        add(sessions, epoch, PeerLost(f"View {epoch - 1} is over", cause="a loss"))
    errors = told(sessions)
    assert len(errors) == MAX_UNTOLD
    assert errors[0] == "View 1 is over: a loss"
    assert errors[1] == "View 5 is over: a loss (the end of 3 earlier views was not reported)"
    assert errors[2] == "View 6 is over: a loss"
    assert errors[-1] == f"View {MAX_UNTOLD + 3} is over: a loss"


def test_a_wait_acknowledges_every_view_so_far(sessions: ViewSessions) -> None:
    """Also those that came after the one the program was in; it begins anew, as after joining."""
    add(sessions, 1)
    with sessions.visit(1):
        pass
    add(sessions, 2)
    add(sessions, 3)
    with pytest.raises(ViewChanged):
        sessions.visit(1).__enter__()
    sessions.accept()
    add(sessions, 4)
    assert told(sessions) == []


def test_reading_its_place_does_not_spare_a_program_an_error(sessions: ViewSessions) -> None:
    """What it reads is the present place; the views until then are told all the same."""
    add(sessions, 1)
    assert sessions.read(1).view.epoch == 1
    add(sessions, 2, SESSION_LOST)
    add(sessions, 3)
    assert sessions.read(1).view.epoch == 3
    assert told(sessions) == ["Rank 2 is gone", "Somebody came"]


def test_a_session_without_calls_is_left_without_a_word(sessions: ViewSessions) -> None:
    """Changes before the first call are nobody's surprise."""
    add(sessions, 1)
    second = add(sessions, 2)
    with sessions.visit(1) as session:
        assert session is second


def test_whoever_has_read_its_place_is_told_when_that_changes(sessions: ViewSessions) -> None:
    """A rank or a size that was read counts until the next call; never does an old one slip in."""
    first = add(sessions, 1)
    assert sessions.read(1) is first
    second = add(sessions, 2)
    assert sessions.read(1) is second
    with pytest.raises(ViewChanged):
        sessions.visit(1).__enter__()
    with sessions.visit(1) as session:
        assert session is second


def test_after_a_call_the_place_is_the_one_it_had_in_it(sessions: ViewSessions) -> None:
    """A sum is divided by the number of those who added, though one of them has left since."""
    first = add(sessions, 1)
    assert sessions.read(1) is first
    with sessions.visit(1):
        pass
    second = add(sessions, 2, SESSION_LOST)
    assert sessions.read(1) is first
    with pytest.raises(PeerLost, match="Rank 2"):
        sessions.visit(1).__enter__()
    assert sessions.read(1) is second


def test_the_last_place_can_be_read_when_everything_is_over(sessions: ViewSessions) -> None:
    """Reports are often written after the cluster was closed."""
    first = add(sessions, 1)
    with sessions.visit(1):
        pass
    sessions.fail(BackendUnavailable("over"))
    assert sessions.read(1) is first


def test_a_place_is_read_in_a_view_that_holds(sessions: ViewSessions) -> None:
    """While the view changes whoever asks for its rank waits, and is not told of it again."""
    add(sessions, 1)
    sessions.end(SESSION_LOST)
    reading = Background(lambda: sessions.read(PATIENCE))
    second = add(sessions, 2)
    assert reading.result() is second
    with sessions.visit(1) as session:
        assert session is second


def test_changes_that_were_waited_for_are_not_told(sessions: ViewSessions) -> None:
    """Whoever asks for more peers knows that they came."""
    add(sessions, 1)
    with sessions.visit(1):
        pass
    second = add(sessions, 2)
    assert sessions.wait_for(lambda session: session.view.epoch == 2, 1) is second
    sessions.accept()
    with sessions.visit(1) as session:
        assert session is second


def test_a_failure_in_the_middle_becomes_what_the_cluster_says(sessions: ViewSessions) -> None:
    """A broken connection is a symptom; the verdict comes a moment later, and counts as told."""
    add(sessions, 1)

    def fail() -> None:
        with sessions.visit(1):
            raise ChannelClosed("a stream broke")

    running = Background(fail)
    sessions.end(SESSION_LOST)
    with pytest.raises(PeerLost, match="Rank 2"):
        running.result()
    second = add(sessions, 2)
    with sessions.visit(1) as session:
        assert session is second


def test_other_failures_stay_what_they_are(sessions: ViewSessions) -> None:
    """A wrong argument or a deadline has nothing to do with who is in."""
    add(sessions, 1)
    for error in (ValueError("no"), Timeout("late", seconds=1)):
        with pytest.raises(type(error)), sessions.visit(1):
            raise error


def test_what_is_lost_to_operations_alone_is_complained_about(
    sessions: ViewSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Membership looks at that member, and the call raises what it decides."""
    monkeypatch.setattr("potluck.cluster.views.COMPLAIN_AFTER", 0.01)
    monkeypatch.setattr("potluck.cluster.views.HEARSAY_AFTER", 0.01)
    session = add(sessions, 1)
    told: list[int] = []

    def look(rank: int, _: str) -> None:
        told.append(rank)
        sessions.stop("the connection to rank 2 ended")
        sessions.end(CAME)

    session.complain = look
    with pytest.raises(ViewChanged, match="Somebody came"), sessions.visit(PATIENCE):
        raise PeerLost("silent", rank=2)
    assert told == [2]


def test_a_broken_connection_that_has_to_do_with_no_member_stays_what_it_is(
    sessions: ViewSessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no member that membership could look at."""
    monkeypatch.setattr("potluck.cluster.views.COMPLAIN_AFTER", 0.01)
    session = add(sessions, 1)
    session.complain = lambda *_: pytest.fail("there is nobody to complain about")
    with pytest.raises(ChannelClosed, match="a stream broke"), sessions.visit(PATIENCE):
        raise ChannelClosed("a stream broke")


def test_a_stop_raises_nothing_until_it_is_decided_what_follows(sessions: ViewSessions) -> None:
    """Neither in the middle of a call nor in the next one."""
    session = add(sessions, 1)
    entered, interrupt = threading.Event(), threading.Event()

    def run() -> None:
        with sessions.visit(PATIENCE):
            entered.set()
            interrupt.wait(PATIENCE)
            raise session.stop_error

    running = Background(run)
    assert entered.wait(PATIENCE)
    sessions.stop("rank 2 is lost")
    later = Background(lambda: sessions.visit(PATIENCE).__enter__())
    interrupt.set()
    eventually(lambda: session._bystanders == 1)
    for waiting in (running, later):
        assert not waiting.ended
    second = add(sessions, 2, SESSION_LOST)
    for waiting in (running, later):
        with pytest.raises(PeerLost, match="Rank 2"):
            waiting.result()
    with sessions.visit(1) as after:
        assert after is second


def test_if_no_view_follows_a_call_names_whom_it_misses(sessions: ViewSessions) -> None:
    """At its timeout; the error of the view is raised once there is one."""
    session = ViewSession(view(1, 3), 0)
    sessions.install(session, CAME, orderly=True)
    build(sessions, session)
    sessions.find_missing = lambda: [
        Cause(MEMBERS[2], CauseCode.SILENT, "attic", "10.0.0.3", 4.25, "unplugged")
    ]
    with sessions.visit(1):
        pass
    sessions.stop("attic is silent")
    with pytest.raises(NoQuorum) as caught:
        sessions.visit(0.01).__enter__()
    assert caught.value.missing == (2,)
    assert "rank 2 (attic at 10.0.0.3, not heard for 4.2 s)" in str(caught.value)
    assert "potluck continue" in str(caught.value)
    with pytest.raises(NoQuorum):
        sessions.visit(0.01).__enter__()
    add(sessions, 2, SESSION_LOST)
    with pytest.raises(PeerLost, match="Rank 2"):
        sessions.visit(1).__enter__()


def test_one_that_was_left_out_names_whom_it_misses_unless_it_can_be_let_in(
    sessions: ViewSessions,
) -> None:
    """One that came later has no rank here; without anyone missing it says what it waits for."""
    session = ViewSession(view(1, 3), 0)
    sessions.install(session, CAME, orderly=True)
    build(sessions, session)
    with sessions.visit(1):
        pass
    newcomer = ProcessId(NodeId("e" * 32), 1)
    sessions.find_missing = lambda: [
        Cause(MEMBERS[2], CauseCode.SILENT, "attic", "10.0.0.3", 4.25, "unplugged"),
        Cause(newcomer, CauseCode.SILENT, "desk", "10.0.0.9", 2.0, "unplugged"),
    ]
    sessions.end(LeftOut("This process was left out of view 2"))
    with pytest.raises(LeftOut):
        sessions.visit(1).__enter__()
    with pytest.raises(NoQuorum) as caught:
        sessions.visit(0.01).__enter__()
    assert caught.value.missing == (2,)
    assert "rank 2 (attic at 10.0.0.3, not heard for 4.2 s)" in str(caught.value)
    assert ", desk at 10.0.0.9, not heard for 2.0 s: " in str(caught.value)
    assert "this machine is in no view now" in str(caught.value)
    sessions.find_missing = tuple
    sessions.explain("waiting for attic to let us into a cluster of 3")
    with pytest.raises(Timeout, match="in no view now: waiting for attic to let us") as late:
        sessions.visit(0.01).__enter__()
    assert not isinstance(late.value, NoQuorum)


def test_a_program_may_abort_what_waits_for_the_next_view(sessions: ViewSessions) -> None:
    """Its own error ends the call; that of the view follows with the next one."""
    session = add(sessions, 1)
    with sessions.visit(1):
        pass
    sessions.stop("rank 2 is lost")
    assert session.group is not None
    running = Background(lambda: session.decided_error(session.stop_error, None))
    eventually(lambda: session._bystanders == 1)
    session.group.abort("changed my mind")
    verdict = running.result()
    assert isinstance(verdict, Aborted)
    assert "changed my mind" in str(verdict)
    add(sessions, 2, SESSION_LOST)
    with pytest.raises(PeerLost, match="Rank 2"):
        sessions.visit(1).__enter__()


@pytest.mark.parametrize(("is_final", "stays"), [(False, True), (True, False)])
def test_an_abort_by_another_program_is_raised_as_that(
    sessions: ViewSessions, is_final: bool, stays: bool
) -> None:
    """Unless that rank has left the group for good: what becomes of it, membership decides."""
    session = add(sessions, 1)
    aborted = Aborted("Rank 1 ended the operation", rank=1)
    aborted.is_final = is_final
    assert session.is_undecided(aborted) is not stays
    if stays:
        assert session.decided_error(aborted, None) is None


def test_calls_wait_for_connections_and_say_why_in_vain(sessions: ViewSessions) -> None:
    """Without a view, while it is being connected, and while the cluster is paused."""
    sessions.explain("no other machine has joined yet")
    with pytest.raises(Timeout, match=r"has not joined a group.*no other machine has joined yet"):
        sessions.visit(0.01).__enter__()
    session = add(sessions, 1, built=False)
    session.trouble = ChannelClosed("attic does not answer")
    with pytest.raises(Timeout, match=r"not connected yet.*attic does not answer"):
        sessions.visit(0.01).__enter__()
    build(sessions, session)
    sessions.pause("2 of 3 members are silent")
    with pytest.raises(Timeout, match=r"paused.*2 of 3 members are silent"):
        sessions.visit(0.01).__enter__()
    waiting = Background(lambda: sessions.visit(PATIENCE).__enter__())
    sessions.pause(None)
    assert waiting.result() is session


def test_connections_that_come_too_late_are_not_used(sessions: ViewSessions) -> None:
    """A view may be over before its members have met."""
    session = add(sessions, 1, built=False)
    add(sessions, 2)
    assert not build(sessions, session)


def test_the_end_is_for_good(sessions: ViewSessions) -> None:
    """If the control thread ends nothing runs any more, and whoever waits learns it."""
    waiting = Background(lambda: sessions.visit(PATIENCE).__enter__())
    sessions.fail(BackendUnavailable("over"))
    with pytest.raises(BackendUnavailable, match="over"):
        waiting.result()
    add(sessions, 1, built=False)
    with pytest.raises(BackendUnavailable, match="over"):
        sessions.visit(1).__enter__()


def test_a_forked_child_waits_for_nothing(sessions: ViewSessions) -> None:
    """Another thread may have held the lock at the fork; the child takes none."""
    holding, release = threading.Event(), threading.Event()

    def hold() -> None:
        with sessions._changed:
            holding.set()
            release.wait(PATIENCE)

    thread = threading.Thread(target=hold)
    thread.start()
    assert holding.wait(PATIENCE)
    sessions.become_forked(BackendUnavailable(f"belongs to {os.getpid()}"))
    with pytest.raises(BackendUnavailable, match="belongs to"):
        sessions.visit(1).__enter__()
    release.set()
    thread.join()


def test_followers_see_every_session_once_it_is_built(sessions: ViewSessions) -> None:
    """Also the one that is there; none after they have left."""
    first = add(sessions, 1)
    seen: list[ViewSession] = []
    sessions.follow(seen.append)
    second = add(sessions, 2)
    assert seen == [first, second]
    sessions.unfollow(seen.append)
    add(sessions, 3)
    assert seen == [first, second]


def test_a_group_ends_with_its_session(sessions: ViewSessions) -> None:
    """Works that were started and those that are started later get the session's error."""
    session = add(sessions, 1)
    assert session.group is not None
    sessions.end(SESSION_LOST)
    with pytest.raises(PeerLost, match="Rank 2"):
        session.group.barrier()
    eventually(session.over.is_set)
