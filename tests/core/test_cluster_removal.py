"""What ends with a stay in a view, what begins with one, and what a process says of both."""

from __future__ import annotations

import msgspec
import pytest

from potluck.core.ancestry import Branch
from potluck.core.cluster import ClusterConfig, ClusterCore, ClusterState
from potluck.core.cluster_cards import Role, mark
from potluck.core.cluster_effects import Abort, Effect, Installed, Note, Paused, Removed, Send
from potluck.core.cluster_events import MembershipChange, MembershipEvent
from potluck.core.cluster_messages import (
    Charter,
    ClusterMessage,
    Commit,
    Departed,
    Found,
    Heartbeat,
    Phase,
    Proposal,
    Propose,
)
from potluck.core.election_events import ElectionRole
from potluck.vocabulary import ProcessId, View
from support.cluster_net import ClusterNet, card

OTHER = "0" * 32
Z = card("z").process


def sent(effects: list[Effect], to: ProcessId) -> list[ClusterMessage]:
    """What one process is sent, without heartbeats."""
    messages = [e.message for e in effects if isinstance(e, Send) and e.to == to]
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
    s = core._situation
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
    assert core._tenure.since == s.time
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
        waits.append(core._situation.ready_at - core._situation.time)
        net.now += 0.01
        core.receive(a, Commit(lineage, epoch + 1, Proposal((a, b, c))), net.now)
        assert core.view is not None, turn
    assert waits == pytest.approx([0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0])
    for stay, wait in ((30.0, 8.0), (30.5, 0.25), (1.0, 0.5)):
        core._tenure.since = core._situation.time - stay
        epoch = net.view_of(c).epoch + 1
        core.receive(a, Commit(lineage, epoch, Proposal((a, b))), net.now)
        assert core._situation.ready_at - core._situation.time == pytest.approx(wait)
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
    assert core._situation.phase is Phase.WAITING
    assert core._founding.deadlines == (core._situation.ready_at, None)


def test_a_process_without_a_view_keeps_only_those_it_waits_for_or_hears() -> None:
    """And beats at the pace of the processes around it."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[c]
    s = core._situation
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
    observer = card("o", role=Role.OBSERVER)
    told = sent(core.connected(observer, net.now), observer.process)
    assert [m.epoch for m in told if isinstance(m, Commit)] == [view.epoch]
    later = Commit(view.lineage, view.epoch + 1, Proposal((a, b), "again"))
    assert later in sent(core.receive(a, later, net.now), observer.process)
    end = Commit(view.lineage, view.epoch + 2, Proposal((a, b), "over", OTHER, 3, (Z,)))
    assert end in sent(core.receive(a, end, net.now), observer.process)
    assert core.bound is not None
    assert core.bound.view == View(OTHER, 3, (Z,))
    assert core._situation.archive.is_closed(view.lineage, end.epoch)


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
        assert core._situation.agreed == OTHER
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
    word = core._situation.archive.last_word(old.lineage)
    assert word is not None
    assert (word.epoch, word.reason) == (old.epoch, "it continues in another lineage")
    assert core._situation.archive.last_word(OTHER) is None


def test_a_member_that_steps_aside_or_gives_way_is_ready_at_once() -> None:
    """It leaves a last word; the one that gives way tells it to the others."""
    for gives_way in (False, True):
        net = ClusterNet()
        _, b, c = net.form("abc")
        core, view = net.cores[c], net.view_of(c)
        s = core._situation
        s.out = []
        if gives_way:
            core._tenure.give_way("ours gives way")
        else:
            core._tenure.step_aside("another continues")
        assert s.ready_at == s.time
        word = s.archive.last_word(view.lineage)
        assert word is not None
        assert word.epoch == view.epoch
        assert (word in sent(s.out, b)) is gives_way


def test_what_we_declined_once_we_decline_with_the_same_word() -> None:
    """A later view gets a later word."""
    net = ClusterNet()
    a, _ = net.form("ab")
    core = net.cores[a]
    core.connected(card("z"), net.now)
    words = []
    for epoch in (4, 3, 4, 5):
        strange = Commit(OTHER, epoch, Proposal((Z, a)))
        words += sent(core.receive(Z, strange, net.now), Z)
    assert [word.epoch for word in words if isinstance(word, Departed)] == [4, 4, 4, 5]
    first = words[0]
    assert isinstance(first, Departed)
    assert (first.promised, first.accepted_term, first.accepted) == (-1, -1, None)
    known = core._situation.archive.last_word(OTHER)
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
    s = core._situation
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
    core._tenure._pause("for a test")
    assert s.next_beat < s.time + 1
    assert core._tenure.paused_at == s.time


def test_a_view_is_told_with_its_number_of_members() -> None:
    """One member, or several."""
    net = ClusterNet()
    net.form("ab")
    lone = ClusterNet()
    (z,) = [lone.add("z")]
    lone.run(2)
    assert "view 1 with 2 members: begun by a" in net.told(card("a").process)
    assert "view 1 with 1 member: begun by z" in lone.told(z)


def test_reasons_to_wait_are_news_again_in_the_next_view() -> None:
    """Whoever waits for the same thing again says so again."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[c]
    s = core._situation
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
    core._situation.archive.record(between)
    effects = core.receive(a, newest, net.now)
    (installed,) = [effect for effect in effects if isinstance(effect, Installed)]
    assert installed.commits == (between, newest)
    assert core._tenure.since == core._situation.time


def test_an_excluded_process_does_not_enter_the_view_that_left_it_out() -> None:
    """Whatever a message says of it; and it tells where it is even if all had stopped before."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    s = core._situation
    s.abort(b, "it crashed")
    net.run(0.3)
    s.next_beat = s.time + 9
    without(net, c, a)
    assert s.next_beat < s.time + 1
    assert s.archive.is_closed(view.lineage, view.epoch + 1)
    core.receive(b, Commit(view.lineage, view.epoch + 1, Proposal((a, b, c))), net.now)
    assert core.view is None


def test_what_is_known_of_members_that_stay_is_kept_from_view_to_view() -> None:
    """Also of one that is not connected at the moment."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    net.dropped = lambda *_: True
    core.disconnected(b, "reset", net.now)
    before = core._situation.contacts.of(b)
    core.receive(a, Commit(view.lineage, view.epoch + 1, Proposal((a, b, c))), net.now)
    assert core._situation.contacts.of(b) is before
