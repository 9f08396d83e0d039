"""Members that are removed for what they sent: at once, by all, with one reason."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck._types import Branch, NodeId, ProcessId, View
from potluck.membership.core import ClusterCore
from potluck.membership.events import (
    Abort,
    ClusterConfig,
    ClusterState,
    Disconnect,
    Effect,
    ElectionRole,
    Installed,
    MembershipChange,
    MembershipEvent,
    Note,
    Paused,
    Removed,
    SendMessage,
)
from potluck.membership.messages import (
    Cause,
    CauseCode,
    Charter,
    ClusterMessage,
    Commit,
    Departed,
    Found,
    Heartbeat,
    Lost,
    Phase,
    ProcessRole,
    Proposal,
    Propose,
    mark,
)
from support.cluster_net import ClusterNet, card

WHY = "Rank 2 sent its report in a form that is not valid: a step of -1"


def causes(net: ClusterNet, process: ProcessId) -> tuple[Cause, ...]:
    """Why members are not in the last view of a process, from the commit that it has."""
    commits = [e.commits for _, who, e in net.effects if who == process and type(e) is Installed]
    return commits[-1][0].proposal.causes


def expel(net: ClusterNet, accuser: ProcessId, process: ProcessId) -> None:
    """One member has seen what another one sent."""
    net.do(accuser, net.cores[accuser].expel(process, WHY, net.now))


@pytest.mark.parametrize("accuser", [0, 1, 3])
@pytest.mark.parametrize("culprit", [0, 2])
def test_one_member_that_saw_it_is_enough(accuser: int, culprit: int) -> None:
    """All others remove it, also if it is the leader, and all get the same reason."""
    if accuser == culprit:
        return
    net = ClusterNet()
    members = net.form("abcd")
    expel(net, members[accuser], members[culprit])
    net.run(6.0)
    others = [each for each in members if each is not members[culprit]]
    assert net.agreed_by(others) == "abcd".replace("abcd"[culprit], "")
    for each in others:
        (cause,) = causes(net, each)
        assert (cause.who, cause.code, cause.reason) == (
            members[culprit],
            CauseCode.MISBEHAVED,
            WHY,
        )
        assert any(
            who == each and isinstance(e, Disconnect) and e.peer == members[culprit]
            for _, who, e in net.effects
        )


def test_it_does_not_come_back_before_it_starts_again() -> None:
    """Whatever it tries; a later start of it is another process."""
    net = ClusterNet()
    members = net.form("abc")
    expel(net, members[0], members[2])
    for _ in range(10):
        net.run(1.0)
        net.mesh()
    assert net.agreed_by(members[:2]) == "ab"
    net.kill(members[2])
    net.add("c", 2)
    net.mesh()
    net.run(20.0)
    assert net.agreed() == "abc"


def test_the_second_of_two_continues_as_a_child() -> None:
    """It has no quorum of the view, and the first may be at work: so its lineage is another."""
    net = ClusterNet()
    first, second = net.form("ab")
    before = net.view_of(second)
    expel(net, second, first)
    net.run(30.0)
    assert net.agreed_by([second]) == "b"
    after = net.view_of(second)
    assert after.lineage != before.lineage
    assert [lineage for lineage, _ in after.ancestry] == [before.lineage]
    (cause,) = causes(net, second)
    assert (cause.who, cause.code, cause.reason) == (first, CauseCode.MISBEHAVED, WHY)


@pytest.mark.parametrize(("letters", "most"), [("abc", 1), ("abcd", 1), ("abcde", 2)])
def test_one_member_cannot_have_all_others_removed(letters: str, most: int) -> None:
    """Its word counts for fewer than half of the view, and not against the one it was about."""
    net = ClusterNet()
    members = net.form(letters)
    liar = members[0]
    view = net.view_of(liar)
    for to in members[1:]:
        for who in members[1:]:
            message = Lost(view.lineage, view.epoch, who, "a lie", is_expelled=True)
            net.do(to, net.cores[to].receive(liar, message, net.now))
    net.run(5.0)
    removed = {e.peer for _, who, e in net.effects if isinstance(e, Disconnect) and who != liar}
    assert removed == set(members[1 : 1 + most])


def test_what_a_member_said_in_an_earlier_view_does_not_limit_its_word() -> None:
    """It has one removed in each view, if both sent what no correct process sends."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    expel(net, a, d)
    net.run(6.0)
    assert net.agreed_by([a, b, c]) == "abc"
    expel(net, a, c)
    net.run(6.0)
    assert net.agreed_by([a, b]) == "ab"


def test_what_a_removed_member_says_of_others_does_not_count() -> None:
    """It accuses the one that removed it, and is not believed."""
    net = ClusterNet()
    members = net.form("abc")
    view = net.view_of(members[0])
    expel(net, members[0], members[2])
    lie = Lost(view.lineage, view.epoch, members[0], "a lie", is_expelled=True)
    net.run(0.01)
    net.do(members[1], net.cores[members[1]].receive(members[2], lie, net.now))
    net.run(6.0)
    assert net.agreed_by(members[:2]) == "ab"


def test_a_removal_stops_operations_and_is_told_to_people_at_once() -> None:
    """Nothing more is heard of the one that is removed."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    core = net.cores[a]
    effects = core.expel(c, WHY, net.now)
    (abort,) = [e for e in effects if isinstance(e, Abort)]
    assert (abort.lost, WHY in abort.reason) == (c, True)
    events = [e.event for e in effects if isinstance(e, Note)]
    (event,) = [e for e in events if isinstance(e, MembershipEvent)]
    assert (event.change, event.process) == (MembershipChange.EXPELLED, c)
    assert str(event) == f"c is removed: {WHY}"
    assert not core._state.contacts.is_heard(c)
    assert core.health.reason(c) == f"its connection ended: {WHY}"
    stranger = net.add("d", config=ClusterConfig(min_nodes=9))
    net.link(a, stranger)
    core._state.beat()
    core.expel(stranger, WHY, net.now)
    assert stranger not in core.health.peers
    assert core._state.next_beat <= core._state.time + 0.02


def test_a_stranger_that_is_removed_is_cut_off_and_is_not_let_in() -> None:
    """It is in no view of ours: no member is told, and no operation stops."""
    net = ClusterNet()
    a, _ = net.form("ab", config=ClusterConfig(min_nodes=2))
    stranger = net.add("c", config=ClusterConfig(min_nodes=9))
    net.link(a, stranger)
    net.run(0.05)
    view = net.view_of(a)
    effects = net.cores[a].expel(stranger, WHY, net.now)
    assert [e.peer for e in effects if isinstance(e, Disconnect)] == [stranger]
    assert not [e for e in effects if isinstance(e, Abort)]
    assert not [e for e in effects if isinstance(e, SendMessage) and isinstance(e.message, Lost)]
    net.do(a, effects)
    net.mesh()
    net.run(5.0)
    assert net.view_of(a) == view
    assert net.cores[a].expel(stranger, WHY, net.now) == []  # once is enough


def test_only_so_many_removed_processes_are_remembered() -> None:
    """The first of 257 is forgotten, and can be removed again; the others stay out."""
    net = ClusterNet()
    core = net.cores[net.form("a")[0]]
    strangers = [ProcessId(NodeId("e" * 32), number) for number in range(257)]
    for stranger in strangers:
        assert Disconnect in {type(e) for e in core.expel(stranger, WHY, net.now)}
    assert core.expel(strangers[1], WHY, net.now) == []
    assert Disconnect in {type(e) for e in core.expel(strangers[0], WHY, net.now)}


def test_a_process_that_waits_removes_a_member_of_the_view_it_waits_for() -> None:
    """It has no operations to stop, and no members to tell; it does not wait for that one."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    net.cut_off([b], [a, c, d])
    net.run(3)
    net.heal()
    net.dropped = lambda *_: True
    commit = net.cores[a].bound
    assert commit is not None
    net.do(b, net.cores[b].receive(a, commit, net.now))
    assert net.cores[b].view is None
    effects = net.cores[b].expel(a, WHY, net.now)
    assert [e.peer for e in effects if isinstance(e, Disconnect)] == [a]
    assert not [e for e in effects if isinstance(e, Abort)]
    net.run(3)
    assert net.cores[b].reason.startswith("waiting for c, d: they were in view ")


def test_a_view_with_a_removed_process_is_left_with_the_reason() -> None:
    """Those who agreed on it had not heard: the member stops operations and tells them."""
    net = ClusterNet()
    a, b = net.form("ab", config=ClusterConfig(min_nodes=2))
    late = net.add("c", config=ClusterConfig(min_nodes=9))
    net.mesh()
    net.dropped = lambda *_: True
    net.do(b, net.cores[b].expel(late, WHY, net.now))
    view = net.view_of(b)
    next_view = Commit(view.lineage, view.epoch + 1, Proposal((a, b, late)))
    effects = net.cores[b].receive(a, next_view, net.now)
    assert net.view_of(b).members == (a, b, late)
    (abort,) = [e for e in effects if isinstance(e, Abort)]
    assert abort.lost == late
    told = [e for e in effects if isinstance(e, SendMessage) and isinstance(e.message, Lost)]
    assert [(e.to, e.message) for e in told] == [
        (a, Lost(view.lineage, view.epoch + 1, late, WHY, is_expelled=True))
    ]


# --------------------------------------------------------------------------------------------------
# Processes that were started with different quorum settings, before there is a cluster.


def notes(net: ClusterNet, process: ProcessId) -> list[str]:
    """What a process told people."""
    return [str(e.event) for _, who, e in net.effects if who == process and isinstance(e, Note)]


def test_one_process_with_another_setting_does_not_keep_the_others_from_beginning() -> None:
    """It is left out, and both sides say why."""
    net = ClusterNet()
    a = net.add("a", config=ClusterConfig(min_nodes=2))
    b = net.add("b", config=ClusterConfig(min_nodes=2, quorum="any"))
    c = net.add("c", config=ClusterConfig(min_nodes=2))
    net.mesh()
    net.run(20)
    assert net.view_of(a).members == (a, c)
    assert net.view_of(c).members == (a, c)
    core = net.cores[b]
    assert core.state is ClusterState.JOINING
    assert "quorum='any'" in core.reason
    assert "quorum='majority'" in core.reason
    assert [
        text
        for text in notes(net, a)
        if "quorum='any', b with" in text or "b with quorum='any'" in text
    ]


def test_two_that_do_not_fit_wait_and_say_why() -> None:
    """Neither begins with the other, and neither has enough without it."""
    net = ClusterNet()
    a = net.add("a", config=ClusterConfig(min_nodes=2))
    b = net.add("b", config=ClusterConfig(min_nodes=2, quorum="any"))
    net.mesh()
    net.run(20)
    for process in (a, b):
        assert net.cores[process].view is None
        assert "all processes of a job need the same setting" in net.cores[process].reason


def test_of_two_that_could_begin_alone_only_the_first_does() -> None:
    """Otherwise one job would have two clusters that can never merge."""
    net = ClusterNet()
    a = net.add("a", config=ClusterConfig(min_nodes=1))
    b = net.add("b", config=ClusterConfig(min_nodes=1, quorum="any"))
    net.mesh()
    net.run(20)
    assert net.view_of(a).members == (a,)
    assert net.cores[b].state is ClusterState.JOINING
    assert "all processes of a job need the same setting" in net.cores[b].reason


# --------------------------------------------------------------------------------------------------
# Whatever happens to a small cluster, views have one successor, and in the end there is one.

faults = st.sampled_from(["kill", "restart", "cut", "half a cut", "heal", "stop", "reset", "leave"])
pauses = st.sampled_from([0.001, 0.002, 0.003, 0.05, 0.4, 1.2, 2.5])
steps = st.lists(st.tuples(faults, st.integers(0, 3), st.integers(0, 3), pauses), max_size=6)


def disturb(net: ClusterNet, fault: str, one: int, other: int) -> None:
    """Let something go wrong, if it can."""
    alive = net.alive()
    first, second = alive[one % len(alive)], alive[other % len(alive)]
    letter = "abcd"[one]
    if fault == "kill" and len(alive) > 1:
        net.kill(first)
    elif fault == "restart" and not any(process.node[0] == letter for process in alive):
        starts = sum(process.node[0] == letter for process in net.cores)
        net.add(letter, incarnation=starts + 1)
        net.mesh()
    elif fault == "cut":
        net.cut_off(alive[:one], alive[one:])
    elif fault == "half a cut" and first != second:
        net.cut.add((first, second))
    elif fault == "heal":
        net.heal()
    elif fault == "stop":
        net.stopped.add(first)
    elif fault == "reset" and (first, second) in net.connections:
        net.sever(first, second)
    elif fault == "leave" and len(alive) > 1:
        net.do(first, net.cores[first].leave(net.now))
        net.kill(first)


@settings(max_examples=25)
@given(steps)
def test_views_have_one_successor_and_all_end_in_one(
    story: list[tuple[str, int, int, float]],
) -> None:
    """Also when faults follow each other within milliseconds."""
    net = ClusterNet()
    net.form("abcd")
    for fault, one, other, pause in story:
        disturb(net, fault, one, other)
        net.run(pause)
    for process in list(net.stopped):
        net.wake(process)
    net.cut.clear()
    for _ in range(40):
        net.mesh()
        net.run(0.5)
        views = {net.cores[process].view for process in net.alive()}
        if len(views) == 1 and all(
            view and len(view.members) == len(net.alive()) for view in views
        ):
            break
    assert all(len(views) == 1 for views in net.views().values())
    assert sorted(net.agreed()) == sorted(process.node[0] for process in net.alive())


# --------------------------------------------------------------------------------------------------
# What ends with a stay in a view, what begins with one, and what a process says of both.

OTHER = "0" * 32
Z = card("z").process


def sent(effects: list[Effect], to: ProcessId) -> list[ClusterMessage]:
    """What one process is sent, without heartbeats."""
    messages = [e.message for e in effects if isinstance(e, SendMessage) and e.to == to]
    return [message for message in messages if not isinstance(message, Heartbeat)]


def changes(effects: list[Effect]) -> list[tuple[MembershipChange, str]]:
    """What people are told of members."""
    events = [effect.event for effect in effects if isinstance(effect, Note)]
    return [(e.change, e.sentence) for e in events if isinstance(e, MembershipEvent)]


def without(net: ClusterNet, me: ProcessId, by: ProcessId) -> list[Effect]:
    """Tell a process of the next view of its lineage, which leaves it out."""
    view = net.view_of(me)
    stay = tuple(member for member in view.members if member != me)
    commit = Commit(view.lineage, view.epoch + 1, Proposal(stay, "it was slow"))
    return net.cores[me].receive(by, commit, net.now)


def test_whoever_is_excluded_stops_and_forgets_the_view() -> None:
    """Operations end, people know why, and nothing of the view is left to act on."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[c]
    s = core._state
    s.proofs[b], s.reported = "it is dead", {b}
    view = net.view_of(c)
    net.now += 0.3
    effects = without(net, c, a)
    (abort,) = [effect for effect in effects if isinstance(effect, Abort)]
    assert (abort.epoch, abort.lost) == (view.epoch, None)
    (removed,) = [effect for effect in effects if isinstance(effect, Removed)]
    assert removed.reason == "we were excluded: it was slow"
    assert (MembershipChange.REMOVED, removed.reason) in changes(effects)
    assert core.state is ClusterState.JOINING
    assert core.election.role is ElectionRole.IDLE
    assert core.leader is None
    assert (s.proofs, s.reported, s.is_aborted) == ({}, set(), False)
    assert core._installer.since == s.time
    assert core.next_deadline is not None
    assert core.next_deadline <= net.now + 0.1  # the others hear of it before the next beat
    answers = sent(core.receive(b, Commit(view.lineage, view.epoch, Proposal((b, c))), net.now), b)
    assert [m.epoch for m in answers if isinstance(m, Commit)] == [view.epoch + 1]


def test_a_later_view_that_a_waiting_process_hears_of_is_the_one_it_waits_for() -> None:
    """It decides at once what follows from that; an earlier or equal one changes nothing."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    without(net, c, a)
    assert core.bound is not None
    for epoch, known in ((view.epoch + 1, view.epoch + 1), (view.epoch + 4, view.epoch + 4)):
        core.receive(a, Commit(view.lineage, epoch, Proposal((a,), f"view {epoch}")), net.now)
        assert core.bound.epoch == known
    same = Commit(view.lineage, view.epoch + 4, Proposal((a, b), "another"))
    core.receive(b, same, net.now)
    assert core.bound.proposal.members == (a,)
    assert core.view is None


def test_each_removal_in_a_row_is_followed_by_a_longer_wait() -> None:
    """A quarter of a second, then twice as long each time, up to eight seconds."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, lineage = net.cores[c], net.view_of(c).lineage
    waits = []
    for turn in range(7):
        epoch = net.view_of(c).epoch + 1
        core.receive(a, Commit(lineage, epoch, Proposal((a, b))), net.now)
        waits.append(core._state.ready_at - core._state.time)
        net.now += 0.01
        core.receive(a, Commit(lineage, epoch + 1, Proposal((a, b, c))), net.now)
        assert core.view is not None, turn
    assert waits == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0])
    for stay, wait in ((30.0, 8.0), (30.5, 0.25), (1.0, 0.5)):
        core._installer.since = core._state.time - stay
        epoch = net.view_of(c).epoch + 1
        core.receive(a, Commit(lineage, epoch, Proposal((a, b))), net.now)
        assert core._state.ready_at - core._state.time == pytest.approx(wait)
        core.receive(a, Commit(lineage, epoch + 1, Proposal((a, b, c))), net.now)


def test_while_it_waits_it_says_so_once() -> None:
    """The reason does not grow each time it is looked at."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    core = net.cores[c]
    without(net, c, a)
    for _ in range(3):
        net.now += 0.02
        core.tick(net.now)
    wanted = "waiting a moment before entering again: we were excluded: it was slow"
    assert core.reason == wanted
    assert core._state.phase is Phase.WAITING
    assert core._founding.deadlines == (core._state.ready_at, None)


def test_a_process_without_a_view_keeps_only_those_it_waits_for_or_hears() -> None:
    """And beats at the pace of the processes around it."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[c]
    s = core._state
    net.dropped = lambda *_: True
    core.disconnected(b, "reset", net.now)
    view = net.view_of(c)
    s.interval = 7.0
    core.receive(a, Commit(view.lineage, view.epoch + 1, Proposal((a,))), net.now)
    assert [contact.process for contact in s.contacts] == [a]
    assert s.interval == pytest.approx(0.2)


def test_observers_learn_of_every_view_and_of_the_end_of_a_lineage() -> None:
    """From those who are in it."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[b], net.view_of(b)
    observer = card("o", role=ProcessRole.OBSERVER)
    told = sent(core.connected(observer, net.now), observer.process)
    assert [m.epoch for m in told if isinstance(m, Commit)] == [view.epoch]
    later = Commit(view.lineage, view.epoch + 1, Proposal((a, b), "again"))
    assert later in sent(core.receive(a, later, net.now), observer.process)
    end = Commit(view.lineage, view.epoch + 2, Proposal((a, b), "over", OTHER, 3, (Z,)))
    assert end in sent(core.receive(a, end, net.now), observer.process)
    assert core.bound is not None
    assert core.bound.view == View(OTHER, 3, (Z,))
    assert core._state.history.is_closed(view.lineage, end.epoch)


def test_a_dissolved_lineage_is_not_entered_again() -> None:
    """A late message that counts on us there gets a last word."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[b], net.view_of(b)
    end = Commit(view.lineage, view.epoch + 1, Proposal((a, b), "over", OTHER, 3, (Z,)))
    core.receive(a, end, net.now)
    late = Commit(view.lineage, view.epoch + 1, Proposal((a, b), "not over"))
    core.receive(a, late, net.now)
    assert core.view is None


def entering(epoch: int, ancestry: tuple[Branch, ...], *, agreed: bool) -> ClusterCore:
    """A paused member that is told of a view in another lineage, and may have agreed to it."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    for other in (a, b):
        net.sever(c, other)
    net.run(5)
    core, view = net.cores[c], net.view_of(c)
    assert core.state is ClusterState.PAUSED
    core.connected(card("z"), net.now)
    beat = Heartbeat(1, 1, 0.0, Phase.JOINING, (mark(c),))
    core.receive(Z, beat, net.now)
    branches = tuple(
        Branch(view.lineage, view.epoch + each.epoch) if not each.lineage else each
        for each in ancestry
    )
    child = Charter(ancestry=branches)
    proposal = Proposal((Z, c), "a child")
    if agreed:
        core.receive(Z, Found(OTHER, proposal, child, is_forced=True), net.now)
        assert core._state.has_agreed_to(OTHER)
    core.receive(Z, Commit(OTHER, epoch, proposal, child), net.now)
    return core


OURS, STRANGE, EARLIER = Branch("", 0), Branch("e" * 32, 9), Branch("", -1)


@pytest.mark.parametrize(
    ("epoch", "ancestry", "agreed", "enters"),
    [
        (1, (OURS,), True, True),
        (1, (OURS,), False, False),  # the first view of a child needs our word
        (2, (OURS,), True, False),  # a later one is not what we agreed to, and we are in a view
        (2, (OURS,), False, False),
        (1, (), False, False),
        (1, (STRANGE,), False, False),
        (1, (EARLIER,), False, False),
    ],
)
def test_a_member_enters_only_the_child_that_it_agreed_to(
    epoch: int, ancestry: tuple[Branch, ...], agreed: bool, enters: bool
) -> None:
    """While it is in a view of its lineage."""
    core = entering(epoch, ancestry, agreed=agreed)
    assert core.view is not None
    assert (core.view.lineage == OTHER) is enters


@pytest.mark.parametrize(
    ("epoch", "ancestry", "enters"),
    [(1, (OURS,), False), (2, (OURS,), True), (3, (OURS,), True), (2, (STRANGE,), False)],
)
def test_a_process_that_waits_is_let_into_a_later_view_of_a_child(
    epoch: int, ancestry: tuple[Branch, ...], enters: bool
) -> None:
    """Not into its first view, which only its founders agreed to."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    without(net, c, a)
    branches = tuple(
        Branch(view.lineage, view.epoch + 1) if each == OURS else each for each in ancestry
    )
    core.connected(card("z"), net.now)
    core.receive(Z, Commit(OTHER, epoch, Proposal((Z, c)), Charter(ancestry=branches)), net.now)
    assert (core.view is not None) is enters


def test_a_view_with_another_quorum_setting_is_never_entered() -> None:
    """It was fixed when the lineage was founded; the sender gets a last word."""
    core = ClusterCore(card("a"), ClusterConfig(), 0.0)
    core.connected(card("z"), 0.0)
    commit = Commit(OTHER, 3, Proposal((Z, core.me.process)), Charter("any"))
    effects = core.receive(Z, commit, 0.1)
    assert core.view is None
    assert [type(message) for message in sent(effects, Z)] == [Departed]


def test_whoever_founds_a_child_leaves_a_last_word_in_its_old_view() -> None:
    """It is not told to those who stay, but it is what they get when they ask."""
    core = entering(1, (OURS,), agreed=True)
    view = core.view
    assert view is not None
    (old,) = view.ancestry
    word = core._state.history.last_word(old.lineage)
    assert word is not None
    assert (word.epoch, word.reason) == (old.epoch, "it continues in another lineage")
    assert core._state.history.last_word(OTHER) is None


def test_a_member_that_steps_aside_or_gives_way_is_ready_at_once() -> None:
    """It leaves a last word; the one that gives way tells it to the others."""
    for gives_way in (False, True):
        net = ClusterNet()
        _, b, c = net.form("abc")
        core, view = net.cores[c], net.view_of(c)
        s = core._state
        s.out = []
        if gives_way:
            core._installer.give_way("our view is given up")
        else:
            core._installer.step_aside("another continues")
        assert s.ready_at == s.time
        word = s.history.last_word(view.lineage)
        assert word is not None
        assert word.epoch == view.epoch
        assert (word in sent(s.out, b)) is gives_way


def test_what_we_declined_once_we_decline_with_the_same_word() -> None:
    """A later view gets a later word; a process that is behind is told of the newest view."""
    net = ClusterNet()
    a, _ = net.form("ab")
    core = net.cores[a]
    core.connected(card("z"), net.now)
    words = []
    for epoch in (4, 3, 4, 5):
        strange = Commit(OTHER, epoch, Proposal((Z, a)))
        words += sent(core.receive(Z, strange, net.now), Z)
    told = [word for word in words if isinstance(word, Departed | Commit)]
    assert [(type(word), word.epoch) for word in told] == [
        (Departed, 4),
        (Commit, 4),
        (Departed, 4),
        (Departed, 5),
    ]
    first = words[0]
    assert isinstance(first, Departed)
    assert (first.promised, first.accepted_term, first.accepted) == (-1, -1, None)
    known = core._state.history.last_word(OTHER)
    assert known is not None
    assert known.epoch == 5


def test_a_sender_that_is_behind_is_told_only_the_later_view() -> None:
    """No last word: we may still enter the view that it counts on us in."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    later = Commit(view.lineage, view.epoch + 3, Proposal((a, b)))
    core.receive(a, later, net.now)
    active = Heartbeat(
        10**6, 1, 0.0, Phase.ACTIVE, (), lineage=view.lineage, epoch=view.epoch + 1, size=3
    )
    for phase in (Phase.ACTIVE, Phase.JOINING):
        core.receive(
            b, msgspec.structs.replace(active, sequence=10**6 + int(phase), phase=phase), net.now
        )
        between = Commit(view.lineage, view.epoch + 2, Proposal((a, b, c)))
        assert sent(core.receive(b, between, net.now), b) == [later]
    assert core.view is None


def test_a_pause_and_its_end_are_told_at_once() -> None:
    """To people, with how many are here; and to the others before the next regular beat."""
    net = ClusterNet()
    a, b, c, d, e = net.form("abcde")
    core = net.cores[e]
    net.kill(d)
    net.run(0.002)
    net.dropped = lambda *_: True
    net.cut_off([e], [a, b, c])
    net.run(1.5)
    (paused,) = [x for _, who, x in net.effects if who == e and isinstance(x, Paused)]
    assert core.state is ClusterState.PAUSED
    assert "1 of 5 members are in contact" in paused.reason
    assert f"paused: {paused.reason}" in net.told(e)
    net.dropped = lambda *_: False
    net.cut.clear()
    net.run(0.4)
    assert core.state.value == "active"


def test_a_member_that_pauses_or_resumes_beats_out_of_turn() -> None:
    """Others decide by what its next beat says."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    net.run(3)
    s = core._state
    s.next_beat = s.time + 9
    core.receive(a, Propose(view.lineage, view.epoch, 0, Proposal((a, b), "without c")), net.now)
    assert core.state is ClusterState.PAUSED
    s.next_beat = s.time + 9
    s.election.ballot.accepted = None
    s.is_dirty = True
    resumed = changes(core.end_batch(net.now))
    words = "resumed: a quorum of the view is in contact again"
    assert (MembershipChange.RESUMED, words) in resumed
    assert core.state.value == "active"
    assert s.next_beat < s.time + 1
    s.next_beat = s.time + 9
    core._installer._pause("for a test")
    assert s.next_beat < s.time + 1
    assert core._installer.paused_at == s.time


def test_a_view_is_told_with_its_number_of_members() -> None:
    """One member, or several."""
    net = ClusterNet()
    net.form("ab")
    lone = ClusterNet()
    (z,) = [lone.add("z")]
    lone.run(2)
    assert "view 1 with 2 members: started by a" in net.told(card("a").process)
    assert "view 1 with 1 member: started by z" in lone.told(z)


def test_reasons_to_wait_are_news_again_in_the_next_view() -> None:
    """Whoever waits for the same thing again says so again."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[c]
    s = core._state
    for enter in (True, False):
        s.note_once("topic", "it waits")
        s.out = []
        view = net.view_of(c)
        members = (a, b, c) if enter else (a, b)
        core.receive(a, Commit(view.lineage, view.epoch + 1, Proposal(members)), net.now)
        s.out = []
        s.note_once("topic", "it waits")
        assert len(changes(s.out)) == 1


def test_a_process_that_missed_a_view_enters_the_newest_and_knows_what_came_between() -> None:
    """Operations of the view before end with an error made from the first."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.now += 0.1
    core, view = net.cores[c], net.view_of(c)
    between = Commit(view.lineage, view.epoch + 1, Proposal((a, b, c), "between"))
    newest = Commit(view.lineage, view.epoch + 2, Proposal((a, b, c), "newest"))
    core._state.history.record(between)
    effects = core.receive(a, newest, net.now)
    (installed,) = [effect for effect in effects if isinstance(effect, Installed)]
    assert installed.commits == (between, newest)
    assert core._installer.since == core._state.time


def test_an_excluded_process_does_not_enter_the_view_that_left_it_out() -> None:
    """Whatever a message says of it; and it tells where it is even if all had stopped before."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    s = core._state
    s.abort(b, "it crashed")
    net.run(0.3)
    s.next_beat = s.time + 9
    without(net, c, a)
    assert s.next_beat < s.time + 1
    assert s.history.is_closed(view.lineage, view.epoch + 1)
    core.receive(b, Commit(view.lineage, view.epoch + 1, Proposal((a, b, c))), net.now)
    assert core.view is None


def test_what_is_known_of_members_that_stay_is_kept_from_view_to_view() -> None:
    """Also of one that is not connected at the moment."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    net.dropped = lambda *_: True
    core.disconnected(b, "reset", net.now)
    before = core._state.contacts.of(b)
    core.receive(a, Commit(view.lineage, view.epoch + 1, Proposal((a, b, c))), net.now)
    assert core._state.contacts.of(b) is before
