"""What is due at a moment is done at that very moment, and what ends then has ended.

A driver calls at exactly the time that it was told, so the bounds themselves matter: if the very
moment did not count, each of these would happen one call later than was foretold.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from potluck import HealthConfig, HealthStatus
from potluck.membership.core import ClusterCore
from potluck.membership.events import ClusterConfig, Effect, ElectionRole, ProbePort, SendMessage
from potluck.membership.health import HealthMonitor
from potluck.membership.messages import Commit, Heartbeat, PreVote, Proposal
from potluck.membership.state import Contact, MembershipState
from support.cluster_net import ClusterNet, card
from support.health import Ward, process

Z = card("z").process
PEER = process("a")


def pair(letters: str = "ab") -> tuple[ClusterCore, MembershipState, Contact]:
    """The first of some members of a view, what it knows, and what of the second."""
    net = ClusterNet()
    first, second, *_ = net.form(letters)
    core = net.cores[first]
    return core, core._state, core._state.contacts.of(second)


def sent_to(effects: list[Effect], contact: Contact) -> list[object]:
    """What a process is sent."""
    sent = [effect for effect in effects if isinstance(effect, SendMessage)]
    return [each.message for each in sent if each.to == contact.process]


# --- contact ---


def test_a_beat_that_was_not_confirmed_for_a_whole_pause_is_relied_on_no_more() -> None:
    """The other side counts from the same beat: it may give us up a pause after that."""
    _, s, contact = pair()
    contact.announced = 1.0
    for age, withholds in ((0.99, False), (1.0, True)):
        contact.echoed_at, s.clock.current, s.out = 0.0, age, []
        s.greet(contact.process)
        (beat,) = sent_to(s.out, contact)
        assert isinstance(beat, Heartbeat)
        assert beat.withholds is withholds


def test_a_lease_lasts_for_the_whole_of_four_pauses() -> None:
    """And not a moment longer."""
    _, s, contact = pair()
    contact.leased_at, contact.leased_for, s.pause_after = 50.0, 9.0, 2.0
    s.clock.current = 58.0
    assert s.has_lease(contact)


def test_a_member_is_in_doubt_after_exactly_its_pause() -> None:
    """It pauses itself then, and must not be counted on."""
    _, s, contact = pair()
    contact.announced, contact.echoed_at = 1.0, 0.0
    for age, is_doubtful in ((0.99, False), (1.0, True)):
        s.clock.current = age
        assert s.is_doubtful(contact.process) is is_doubtful


def test_a_member_may_rely_on_us_until_its_time_is_over_and_no_longer() -> None:
    """At the end of that time it has stopped, and may be left out."""
    _, s, contact = pair()
    contact.echoed_at, s.clock.current = 0.0, 10.0
    contact.relied_until = 10.1
    assert not s.is_silent(contact.process)
    contact.relied_until = 10.0
    assert s.is_silent(contact.process)


def test_a_dead_member_is_silent_after_exactly_twice_the_pause_that_it_announced() -> None:
    """By then it has paused itself, if it is alive."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    s = net.cores[a]._state
    net.cut_off([c], [a])
    net.run(2.3)
    assert s.health.status(c) is HealthStatus.DEAD
    silence = s.health.silence(c, s.now)
    s.contacts.of(c).announced = silence / 2
    assert s.is_silent(c)
    s.contacts.of(c).announced = silence / 2 + 0.01
    assert not s.is_silent(c)


def test_an_end_that_is_learnt_when_the_dead_one_may_have_moved_on_proves_nothing() -> None:
    """Nine tenths of twice the pause after the last contact it is too late."""
    for learnt, is_proof in ((1.79, True), (1.8, False)):
        net = ClusterNet()
        a, b, _ = net.form("abc")
        core, s = net.cores[a], net.cores[a]._state
        core.disconnected(b, "reset by peer", net.now)
        contact = s.contacts.of(b)
        contact.leased_at, contact.leased_for = 0.0, 1.0
        s.ended[b] = "its port refuses connections", learnt
        core.ended(b, "its port refuses connections", net.now)
        assert (b in s.proofs) is is_proof


# --- lateness ---


def test_lateness_of_a_quarter_of_an_interval_does_not_lengthen_elections() -> None:
    """Only more than that does."""
    _, s, contact = pair()
    assert contact.beat is not None
    contact.beat = msgspec.structs.replace(contact.beat, lateness=s.interval / 4)
    s.beat()
    assert s.election.slack == 0.0


def test_a_peer_that_reports_a_tenth_of_an_interval_is_given_no_more_time() -> None:
    """So much is everyday life, and not worth a word."""
    ward = Ward()
    ward.monitor.heard(PEER, ward.now, lateness=0.02)
    assert ward.monitor.allowance(PEER) == 0.0
    ward.rest(1.5)
    assert ward.monitor.status(PEER) is HealthStatus.SUSPECT
    assert "late" not in ward.monitor.reason(PEER)


def test_a_poor_link_is_told_of_at_exactly_the_twenty_fifth_heartbeat() -> None:
    """With an interval whose multiples are not rounded, so that the very moment is met."""
    ward = Ward(HealthConfig(interval=0.25, least_patience=0.75, pause_after=1.5))
    begun = ward.now
    ward.beat(times=50, trip=0.15)
    first = ward.events[0]
    assert first.status is HealthStatus.DEGRADED
    assert first.time - begun == (8 + 1 + 25) * 0.25


def test_a_monitor_foretells_when_a_silent_peer_is_suspect() -> None:
    """A tick at that time says so; none before does."""
    monitor = HealthMonitor(HealthConfig(interval=0.25, least_patience=0.75, pause_after=1.5))
    monitor.watch(PEER, 0.0)
    events: list[Any] = []
    while not events:
        due = monitor.next_deadline
        assert due is not None
        events = monitor.tick(due)
    assert events[0].time == 1.5


# --- views ---


def test_links_that_are_missing_for_exactly_a_pause_part_the_members() -> None:
    """The largest set that hears each other is what stays."""
    core, s, contact = pair("abc")
    view = core.view
    assert view is not None
    a, b, c = view.members
    s.contacts.unhear(b, c)
    assert contact.process == b
    for since, mesh in ((99.5, None), (99.0, (a, b))):
        s.clock.current, core._planner._missing = 100.0, {(b, c): since}
        assert core._planner._mesh([a, b, c]) == mesh


def test_a_newcomer_is_let_in_when_the_planner_said_that_it_would() -> None:
    """It has been ready for the delay by then."""
    core, s, _ = pair()
    core._planner._ready = {Z: 50.0}
    look = core._planner.next_look
    assert look is not None
    s.clock.current = look - 0.01
    assert not core._planner._is_time()
    s.clock.current = look
    assert core._planner._is_time()


def test_an_acceptor_ended_long_ago_after_exactly_the_longest_lease() -> None:
    """Nobody relies on it any more."""
    core, s, contact = pair()
    s.ended[contact.process] = "it left", 0.0
    for age, is_long in ((s.longest_lease - 0.1, False), (s.longest_lease, True)):
        s.clock.current = age
        assert core._proposer._has_long_ended(contact.process) is is_long


def test_a_campaign_without_answers_is_given_up_when_it_is_due() -> None:
    """And the next attempt waits for a while."""
    net = ClusterNet()
    _, b, _ = net.form("abc")
    core, s = net.cores[b], net.cores[b]._state
    s.election.pre_vote(s.time, "the leader is lost")
    roles = [s.election.role]
    assert s.election.until is not None
    s.clock.current = s.election.until
    core._campaign._pursue()
    roles.append(s.election.role)
    assert roles == [ElectionRole.CANVASSING, ElectionRole.FOLLOWING]


def test_a_leader_that_spoke_in_the_moment_our_view_began_has_spoken() -> None:
    """What it said of itself counts."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, s = net.cores[b], net.cores[b]._state
    leader = s.contacts.of(a)
    assert leader.beat is not None
    leader.beat = msgspec.structs.replace(leader.beat, lineage="e" * 32)
    for early, words in ((0.1, ""), (0.0, "a has moved to another lineage")):
        leader.beat_at = core._campaign._begun - early
        assert core._campaign.why_leaderless() == words


def test_a_process_that_lost_its_view_may_found_after_exactly_twice_the_pause() -> None:
    """A view that could take it in had that long."""
    core, s, _ = pair()
    s.view, core._installer.since = None, 50.0
    for age, is_ready in ((1.99, False), (2.0, True)):
        s.clock.current = 50.0 + age
        assert core._founding._is_ready() is is_ready


# --- those who are behind, and those who were left out ---


def test_whoever_is_behind_is_told_again_after_exactly_half_a_beat() -> None:
    """Not sooner: the answer may be on its way."""
    core, s, contact = pair()
    view = core.view
    assert view is not None
    asks = PreVote(view.lineage, view.epoch - 1, 1)
    s.history.record(Commit(view.lineage, view.epoch, Proposal(view.members)))
    for age, is_told in ((0.09, False), (0.1, True)):
        contact.helped_at, s.clock.current, s.out = 0.0, age, []
        core._dispatch.take(contact.process, asks)
        assert bool([m for m in sent_to(s.out, contact) if isinstance(m, Commit)]) is is_told


def test_one_that_missed_several_views_is_told_the_newest_after_exactly_half_a_beat() -> None:
    """Until then others may know which view followed its own."""
    core, s, contact = pair()
    view = core.view
    assert view is not None
    s.history.record(Commit(view.lineage, view.epoch + 5, Proposal(view.members)))
    asks = PreVote(view.lineage, view.epoch + 1, 1)
    for age, is_told in ((0.0, False), (0.09, False), (0.1, True)):
        s.clock.current, s.out = age, []
        core._dispatch.take(contact.process, asks)
        assert bool([m for m in sent_to(s.out, contact) if isinstance(m, Commit)]) is is_told


def test_those_left_out_are_asked_after_once_in_exactly_a_pause() -> None:
    """A training may wait for one of them that is dead."""
    core = ClusterCore(card("a"), ClusterConfig(min_nodes=3), 0.0)
    s = core._state
    s.left_out = {Z: "z"}
    assert ProbePort(Z) in core.tick(0.0)
    assert ProbePort(Z) not in core.tick(s.pause_after - 0.01)
    assert ProbePort(Z) in core.tick(s.pause_after)


@pytest.mark.parametrize("index", [1, 2])
def test_a_process_that_does_not_come_first_begins_in_its_turn(index: int) -> None:
    """Two election timeouts for each that comes before it, and then at once."""
    core, s, _ = pair("abcd")
    founding = core._founding
    group = [process("e"), process("f"), process("g")]
    group[index] = s.id
    s.released_at = 50.0
    turn = 50.0 + 2 * 0.3 * index
    s.clock.current = turn - 0.01
    assert not founding._speaks_for(tuple(group))
    assert turn in founding.deadlines  # it looks again then, and not with some later beat
    s.clock.current = turn
    assert founding._speaks_for(tuple(group))


def test_a_proposal_that_waits_is_repeated_when_it_was_foretold() -> None:
    """Nothing is due where none waits."""
    core, s, _ = pair("abc")
    view = core.view
    assert view is not None
    before = core._proposer.deadlines
    core._proposer.propose(view, Proposal(view.members, "once more"))
    repeat = s.time + 2 * s.interval
    assert repeat not in before
    assert repeat in core._proposer.deadlines
