"""Finding a leader: who gets our vote, and for how long we believe in whom we voted for."""

from __future__ import annotations

import random
import time
from collections.abc import Collection
from itertools import combinations
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._types import Branch, ProcessId, View
from potluck.membership.events import (
    ClusterState,
    Effect,
    ElectionRole,
    Installed,
    Note,
    Removed,
    SendMessage,
)
from potluck.membership.messages import (
    Accepted,
    Cause,
    CauseCode,
    Charter,
    ClusterMessage,
    Commit,
    Departed,
    Heartbeat,
    Phase,
    PreVote,
    PreVoteReply,
    Proposal,
    Propose,
    Vote,
    VoteRequest,
    mark,
)
from potluck.membership.views import LONGEST_CAMPAIGN, largest_linked, largest_mutual
from support.cluster_net import ClusterNet, card

NOT_ELECTED = "had our vote and was not elected"


def answers(
    net: ClusterNet, me: ProcessId, sender: ProcessId, message: msgspec.Struct
) -> list[object]:
    """What a process answers to somebody."""
    effects = net.cores[me].receive(sender, message, net.now)  # type: ignore[arg-type]
    said = [effect.message for effect in effects if isinstance(effect, SendMessage)]
    return [each for each in said if isinstance(each, Vote | PreVoteReply)]


def test_a_vote_is_given_once_and_the_loser_believed_in_for_the_time_of_a_campaign() -> None:
    """While it may still count, nobody else gets our word; then we would vote for another."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    core, view = net.cores[d], net.view_of(d)
    campaign = core._campaign
    (given,) = answers(net, d, c, VoteRequest(view.lineage, view.epoch, 1))
    (refused,) = answers(net, d, b, VoteRequest(view.lineage, view.epoch, 1))
    assert isinstance(given, Vote)
    assert isinstance(refused, Vote)
    assert (given.is_granted, refused.is_granted) == (True, False)
    contact = core._state.contacts.of(c)
    assert contact.beat is not None
    contact.beat = msgspec.structs.replace(contact.beat, term=1, leader=None)
    assert campaign.why_leaderless() == ""
    (leaning,) = answers(net, d, b, PreVote(view.lineage, view.epoch, 2))
    assert isinstance(leaning, PreVoteReply)
    assert leaning.reason == "the leader is heard"
    campaign._hopes_until -= LONGEST_CAMPAIGN * core._state.config.election.election_timeout
    assert NOT_ELECTED in campaign.why_leaderless()
    contact.beat = msgspec.structs.replace(contact.beat, leader=c)
    assert campaign.why_leaderless() == ""
    contact.beat = msgspec.structs.replace(contact.beat, term=0, leader=a)  # an old one
    assert campaign.why_leaderless() == ""


# --------------------------------------------------------------------------------------------------
# From one view to the next: which answers count, what is repeated, and when it is agreed.


def accepted(view: View, term: int, *silent: ProcessId, yes: bool = True) -> Accepted:
    """An answer to a proposal."""
    return Accepted(view.lineage, view.epoch, term, yes, term, (), silent)


def sent(effects: list[Effect], kind: type) -> list[ClusterMessage]:
    """Messages of one kind."""
    messages = [effect.message for effect in effects if isinstance(effect, SendMessage)]
    return [message for message in messages if isinstance(message, kind)]


def proposing(letters: str = "abc", term: int = 0) -> tuple[ClusterNet, list[ProcessId], View]:
    """A leader that has proposed that it becomes the last, in this term; no answer comes."""
    net = ClusterNet()
    members = net.form(letters)
    core, view = net.cores[members[0]], net.view_of(members[0])
    net.dropped = lambda *_: True
    if term:
        core.election.term = core.election.ballot.promised = term
    effects = core.step_down(net.now)
    assert len(sent(effects, Propose)) == len(members) - 1
    told = [str(effect.event) for effect in effects if isinstance(effect, Note)]
    assert "proposed view 2: a hands over rank 0" in told
    return net, members, view


def test_only_answers_of_the_term_count() -> None:
    """An acceptance of an earlier term says nothing about what is proposed now."""
    net, (a, b, c), view = proposing(term=2)
    core = net.cores[a]
    for term in (0, 1, 3):
        for sender in (b, c):
            core.receive(sender, accepted(view, term, b, c), net.now)
        assert core.view == view
    core.receive(b, accepted(view, 2, c), net.now)
    core.receive(c, accepted(view, 2, b), net.now)
    assert core.view != view


def test_answers_to_no_proposal_are_ignored() -> None:
    """They cannot be counted for the next one."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[a], net.view_of(a)
    net.dropped = lambda *_: True
    for sender in (b, c):
        core.receive(sender, accepted(view, 0, b, c), net.now)
    assert core._proposer._acceptors == {}
    core.step_down(net.now)
    assert core.view == view
    core._proposer._acceptors = {b: accepted(view, 0)}
    core._proposer.propose(view, core.election.ballot.accepted or Proposal((a,)))
    assert core._proposer._acceptors == {}


def test_a_refusal_of_the_same_term_does_not_end_it() -> None:
    """Only a promise of a later one does; then the proposal is over as well."""
    net, (a, b, _), view = proposing()
    core = net.cores[a]
    core.receive(b, accepted(view, 0, yes=False), net.now)
    assert core.election.is_leading
    assert core._proposer.is_busy
    refusal = Accepted(view.lineage, view.epoch, 0, False, 3, (), ())
    core.receive(b, refusal, net.now)
    assert not core.election.is_leading
    assert not core._proposer.is_busy


def test_whoever_accepts_follows_the_proposer_and_beats_at_once() -> None:
    """Others then see which view it has accepted."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.run(3)
    core, view = net.cores[c], net.view_of(c)
    s = core._state
    s.next_beat = s.time + 9
    propose = Propose(view.lineage, view.epoch, 4, Proposal((b, a, c), "b leads"))
    (answer,) = sent(core.receive(b, propose, net.now), Accepted)
    assert isinstance(answer, Accepted)
    assert (answer.is_accepted, answer.term, answer.promised) == (True, 4, 4)
    assert (core.election.leader, core.election.term) == (b, 4)
    assert s.next_beat < s.time + 1


def test_a_contradiction_is_not_answered() -> None:
    """Neither accepted nor refused: what was accepted before stands."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[c], net.view_of(c)
    first = Propose(view.lineage, view.epoch, 0, Proposal((a, b, c), "first"))
    core.receive(a, first, net.now)
    other = Propose(view.lineage, view.epoch, 0, Proposal((a, c), "second"))
    assert sent(core.receive(a, other, net.now), Accepted) == []
    assert core.election.ballot.accepted == first.proposal


def test_news_of_the_silent_is_told_to_the_leader_that_waits_for_it() -> None:
    """Once each time it changes, and not after a promise to another."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    core, view = net.cores[b], net.view_of(b)
    propose = Propose(view.lineage, view.epoch, 0, Proposal((a, b, c), "without d"))
    (first,) = sent(core.receive(a, propose, net.now), Accepted)
    assert isinstance(first, Accepted)
    assert first.silent == ()
    word = Departed(view.lineage, view.epoch, 0, -1, None, "bye")
    effects = core.receive(d, word, net.now)
    (again,) = sent(effects, Accepted)
    assert isinstance(again, Accepted)
    assert again.silent == (d,)
    assert [e.to for e in effects if isinstance(e, SendMessage) and e.message == again] == [a]
    assert any("d left: bye" in str(e.event) for e in effects if isinstance(e, Note))
    assert sent(core.tick(net.now + 0.01), Accepted) == []
    core.receive(c, VoteRequest(view.lineage, view.epoch, 1), net.now)
    assert sent(core.receive(c, word, net.now + 0.02), Accepted) == []


def test_what_a_dead_acceptor_heard_is_asked_for_until_no_lease_of_it_is_left() -> None:
    """Four times the pause of the view, or of the one before if that was longer."""
    net = ClusterNet()
    a, b, _ = net.form("abc")
    proposer, s = net.cores[a]._proposer, net.cores[a]._state
    assert not proposer._has_long_ended(b)
    s.former_pause = 3.0
    for age, is_long in ((11.9, False), (12.1, True)):
        s.ended[b] = "its port refuses connections", s.time - age
        assert proposer._has_long_ended(b) is is_long


def test_a_view_is_committed_once() -> None:
    """What follows is decided in the new view."""
    net, (a, b, c), view = proposing()
    core = net.cores[a]
    core.receive(b, accepted(view, 0, c), net.now)
    effects = core.receive(c, accepted(view, 0, b), net.now)
    assert len([effect for effect in effects if isinstance(effect, Installed)]) == 1
    assert sent(effects, Propose) == []
    assert core.view is not None
    assert core.view.members == (b, c, a)
    assert core.election.role is ElectionRole.FOLLOWING


def test_a_leader_elected_in_a_later_term_begins_anew_with_the_same_members() -> None:
    """What was done under the last leader may be lost, so the view needs a successor."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[a], net.view_of(a)
    net.dropped = lambda *_: True
    assert sent(core.tick(net.now), Propose) == []
    core.election.term = core.election.ballot.promised = 1
    core._state.is_dirty = True
    (proposal, _) = sent(core.end_batch(net.now), Propose)
    assert isinstance(proposal, Propose)
    assert proposal.proposal.members == (a, b, c)
    assert core.view == view


# --- campaigns ---


def test_a_wish_for_an_election_ends_with_the_view() -> None:
    """And what a leader said before it was one counts for nothing."""
    net = ClusterNet()
    a, b = net.form("ab")
    campaign = net.cores[b]._campaign
    assert not campaign.is_called
    campaign.is_called = True
    net.now += 1
    net.cores[b]._state.clock.advance(net.now)
    campaign.begin()
    assert not campaign.is_called
    assert campaign._begun == net.cores[b]._state.time
    assert a in net.view_of(b).members


def test_a_canvass_ends_when_the_leader_is_heard_and_no_campaign_does() -> None:
    """Nothing has changed by the question."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[b]
    core.election.pre_vote(net.now, "a is lost")
    core._campaign.review(net.view_of(b))
    assert core.election.state.role is ElectionRole.FOLLOWING
    assert core.election.leader == a
    core.election.pre_vote(net.now, "a is lost")
    core.election.campaign(net.now)
    core._campaign.review(net.view_of(b))
    assert core.election.state.role.value == "campaigning"
    assert c in net.view_of(b).members


# --------------------------------------------------------------------------------------------------
# Being in a view: when it holds, when it pauses, and when one goes.


def keep_in_touch(net: ClusterNet, me: ProcessId, other: ProcessId, seconds: float) -> None:
    """Let one process hear another that hears it, and nobody else."""
    core = net.cores[me]
    contacts = core._state.contacts
    beat = contacts.of(other).beat
    assert beat is not None
    for _ in range(int(seconds * 10)):
        net.now += 0.1
        core.tick(net.now)
        number, echo = contacts.of(other).newest + 1, contacts.sequence
        beat = msgspec.structs.replace(beat, sequence=number, echo=echo)
        core.receive(other, beat, net.now)


def test_whoever_accepted_a_next_view_needs_a_quorum_of_it_too() -> None:
    """It may have been agreed already, and its members may be going on without us."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[b], net.view_of(b)
    strangers = [card(letter).process for letter in "xyz"]
    proposal = Proposal((a, b, *strangers), "with three more")
    core.receive(a, Propose(view.lineage, view.epoch, 0, proposal), net.now)
    assert core.state is ClusterState.PAUSED
    assert "no quorum of it in contact" in core.reason
    keep_in_touch(net, b, a, seconds=4)
    assert core.view == view  # whoever leads is there, and will come to a decision


def test_beats_of_somebody_who_accepted_the_next_view_give_no_lease() -> None:
    """Its word for the old view is worth nothing any more."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[b]
    beat = core._state.contacts.of(a).beat
    assert beat is not None
    core._state.contacts.of(a).beat = msgspec.structs.replace(beat, withholds=True)
    keep_in_touch(net, b, a, seconds=1.5)
    assert core.state is ClusterState.PAUSED
    assert "do not seem to reach it" in core.reason


def test_those_who_accepted_the_same_next_view_still_rely_on_each_other() -> None:
    """The others, and those who are not in it, are given no lease from then on."""
    net = ClusterNet()
    a, b, c, d = net.form("abcd")
    core, view = net.cores[b], net.view_of(b)
    state = core._state
    assert not any(state._withholds(who) for who in (a, c, d))
    proposal = Proposal((a, b, c), "without d")
    core.receive(a, Propose(view.lineage, view.epoch, 0, proposal), net.now)
    assert all(state._withholds(who) for who in (a, c, d))
    for who in (a, d):
        beat = state.contacts.of(who).beat
        assert beat is not None
        said = msgspec.structs.replace(beat, accepted=state.accepted_mark)
        state.contacts.of(who).beat = said
    assert [state._withholds(who) for who in (a, c, d)] == [False, True, True]


def test_whoever_is_left_out_gives_no_lease_and_an_end_of_all_has_no_mark() -> None:
    """One that agreed to go counts for nothing more; nobody goes on from a terminal view."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    for proposal in (Proposal((a, c), "without b"), Proposal((a, b, c), "over", into="e" * 32)):
        state = net.cores[b]._state
        state.election.ballot.accepted = proposal
        beat = state.contacts.of(a).beat
        assert beat is not None
        said = msgspec.structs.replace(beat, accepted=state.accepted_mark)
        state.contacts.of(a).beat = said
        assert state._withholds(a)
        assert bool(state.accepted_mark) is not bool(proposal.into)


def test_a_newcomer_does_not_enter_a_view_of_which_it_knows_a_later_one() -> None:
    """It was let in, never heard of it, and was given up; somebody who is behind tells it now."""
    net = ClusterNet()
    a, b = net.form("ab")
    view = net.view_of(a)
    newcomer = net.add("c")
    net.mesh()
    core = net.cores[newcomer]
    core.receive(a, Commit(view.lineage, view.epoch + 2, Proposal((a,))), net.now)
    late = Commit(view.lineage, view.epoch + 1, Proposal((a, b, newcomer)))
    effects = core.receive(b, late, net.now)
    assert core.view is None
    answers = [e.message for e in effects if isinstance(e, SendMessage) and e.to == b]
    assert any(isinstance(each, Commit) and each.epoch == view.epoch + 2 for each in answers)


def test_whoever_is_behind_gets_no_lease_from_those_who_know_it() -> None:
    """Also when they are in no view, and when it has not said yet where it is."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[b], net.view_of(b)
    state = core._state
    core.receive(a, Commit(view.lineage, view.epoch + 1, Proposal((a, c))), net.now)
    assert core.view is None
    assert state._withholds(c)  # it is in the view before
    contact = state.contacts.of(c)
    assert contact.beat is not None
    contact.beat = msgspec.structs.replace(contact.beat, epoch=view.epoch + 1)
    assert not state._withholds(c)
    contact.beat = None
    assert state._withholds(c)


# --------------------------------------------------------------------------------------------------
# Whom a leader proposes: who stays, in which order, who comes in, and when it waits.


def last_beat(net: ClusterNet, me: ProcessId, of: ProcessId) -> Heartbeat:
    """The newest heartbeat of one process at another."""
    beat = net.cores[me]._state.contacts.of(of).beat
    assert beat is not None
    return beat


def test_nothing_is_proposed_while_nothing_changes() -> None:
    """A healthy view stays as it is."""
    net = ClusterNet()
    a, _ = net.form("ab")
    planner = net.cores[a]._planner
    assert planner.plan(net.view_of(a), must_change=False) is None
    assert planner.next_look is None


def test_a_fresh_start_keeps_members_and_order() -> None:
    """What was aborted goes on with the same members in a new epoch."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    plan = net.cores[a]._planner.plan(net.view_of(a), must_change=True)
    assert plan is not None
    assert plan.members == (a, b, c)
    assert plan.reason == "restarted with the same members"


def test_after_a_loss_nobody_is_counted_on_who_was_not_heard_since() -> None:
    """It may stand still: what is proposed now would wait for it, and nothing else could be."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, proposer = net.cores[a], net.cores[a]._proposer
    core.disconnected(c, "it crashed", net.now)
    core.ended(c, "its port refuses connections", net.now)
    core.tick(net.now + 0.1)
    assert c in core._state.proofs
    assert not proposer.is_busy
    beat = msgspec.structs.replace(last_beat(net, a, b), sequence=1000, aborted=True)
    core.receive(b, beat, net.now + 0.15)
    assert proposer.is_busy


def test_a_newcomer_waits_while_a_member_is_late() -> None:
    """By less than makes it suspect: it is heard again in a moment, or missed."""
    net = ClusterNet()
    a, b = net.form("ab")
    planner, state = net.cores[a]._planner, net.cores[a]._state
    silence = state.health.silence(b, state.now)
    assert planner._is_fresh(b)
    state.now += 2 * state.interval - silence
    assert not planner._is_fresh(b)
    assert state.contacts.is_heard(b)


def test_newcomers_follow_in_the_order_of_their_ids() -> None:
    """Several that are ready come in together, whoever came first."""
    net = ClusterNet()
    net.form("b")
    net.run(1)
    for letter in "dca":
        net.add(letter)
    net.mesh()
    net.run(0.5)
    assert net.agreed() == "bacd"
    assert {view.epoch for views in net.views().values() for view in views} == {1, 2}


def test_a_newcomer_that_not_all_hear_waits_and_people_know_whom_it_lacks() -> None:
    """Until the missing link is there."""
    net = ClusterNet()
    a, b = net.form("ab")
    c = net.add("c")
    net.cut_off([b], [c])
    net.mesh()
    net.run(1)
    assert net.view_of(a).members == (a, b)
    assert "c cannot join yet: it and b" in net.told(a)
    net.heal()
    net.run(0.5)
    assert net.agreed() == "abc"


def test_a_short_gap_between_two_members_is_waited_for() -> None:
    """Nobody is excluded for a link that is missing for less than the pause."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([b], [c])
    net.sever(b, c)
    net.run(0.5)
    assert net.view_of(a).epoch == 1
    assert "until all members hear each other again" in net.told(a)
    net.heal()
    net.run(0.5)
    assert net.agreed() == "abc"
    assert net.view_of(a).epoch == 2


def test_a_leader_does_not_propose_a_stranger_s_view() -> None:
    """One other member that does not hear us is no cluster without us."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[b]
    state = core._state
    for step in range(1, 16):
        now = net.now + 0.1 * step
        core.tick(now)
        contact = state.contacts.of(a)
        deaf = msgspec.structs.replace(
            last_beat(net, b, a),
            sequence=contact.newest + 1,
            echo=state.contacts.sequence,
            hears=(),
        )
        core.receive(a, deaf, now)
        assert core._planner.plan(net.view_of(b), must_change=True) is None
    assert mark(b) not in state.contacts.of(a).hears


# --- causes ---


def commits_of(net: ClusterNet, process: ProcessId) -> tuple[Commit, ...]:
    """What the last view that a process entered was told to follow from."""
    installed = [e for _, who, e in net.effects if who == process and isinstance(e, Installed)]
    return installed[-1].commits


def causes_of(net: ClusterNet, process: ProcessId) -> dict[ProcessId, Cause]:
    """Why members are not in that view."""
    (commit,) = commits_of(net, process)
    return {cause.who: cause for cause in commit.proposal.causes}


def test_a_killed_member_has_ended() -> None:
    """Name, address and what proved it travel in the commit, the same for all."""
    net = ClusterNet()
    a, b, c = net.form("abc", hosts=("10.0.0.7",))
    net.kill(c)
    net.run(0.5)
    (cause,) = causes_of(net, a).values()
    assert (cause.who, cause.code, cause.name, cause.host) == (c, CauseCode.ENDED, "c", "10.0.0.7")
    assert "refuses" in cause.reason
    assert commits_of(net, a) == commits_of(net, b)


def test_a_member_whose_script_ended_has_left() -> None:
    """So that what was under way may be finished."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    net.do(c, net.cores[c].leave(net.now))
    net.dead.add(c)
    net.run(0.5)
    assert causes_of(net, a)[c].code is CauseCode.LEFT


def test_a_member_that_stands_still_is_silent() -> None:
    """The proposer says for how long."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    net.stopped.add(c)
    net.run(4)
    cause = causes_of(net, a)[c]
    assert cause.code is CauseCode.SILENT
    assert cause.silent_for >= 1
    assert net.cores[a].missing(net.now) == ()


def test_one_of_two_that_do_not_hear_each_other_is_unreachable_and_told_so() -> None:
    """It lives: the commit that leaves it out says with whom it has no contact."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([b], [c])
    net.sever(b, c)
    net.run(4)
    (out,) = {b, c} - set(net.view_of(a).members)
    cause = causes_of(net, a)[out]
    assert cause.code is CauseCode.UNREACHABLE
    assert "do not hear each other" in cause.reason
    (removed,) = [e for _, who, e in net.effects if who == out and isinstance(e, Removed)][:1]
    assert removed.commit == commits_of(net, a)[0]


def test_many_causes_are_told_in_short() -> None:
    """A message holds them all."""
    net = ClusterNet()
    members = net.form("abcdefghijklmnopqrst")
    net.run(3)  # a large group takes longer to form
    for victim in members[3:]:
        net.kill(victim)
    net.run(2)
    (commit,) = [each for each in commits_of(net, members[0]) if each.proposal.causes][:1]
    assert len(commit.proposal.causes) > 16
    assert all(cause.name and not cause.reason for cause in commit.proposal.causes)


def test_members_out_of_contact_are_known_before_a_view_leaves_them_out() -> None:
    """For whoever waits in vain."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([a], [b, c])
    net.run(1.5)
    assert {cause.who for cause in net.cores[a].missing(net.now)} == {b, c}
    newcomer = net.add("z")
    assert net.cores[newcomer].missing(net.now) == ()


def test_a_process_that_missed_views_is_told_the_one_right_after_its_own() -> None:
    """And then the newest, once it is back."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    net.run(4)
    assert net.view_of(a).epoch == 2
    for letter in "de":
        net.add(letter)
        for process in net.alive():
            if process != c:
                for other in net.alive():
                    if other not in {c, process}:
                        net.link(process, other)
        net.run(1)
    assert net.view_of(a).epoch > 2
    net.heal()
    net.run(3)
    (removed,) = [e for _, who, e in net.effects if who == c and isinstance(e, Removed)]
    assert removed.commit is not None
    assert removed.commit.epoch == 2
    assert removed.commit.proposal.causes[0].who == c


def test_the_reason_names_both_ends_of_a_broken_connection() -> None:
    """As the first to stop has reported it, whoever that was."""
    for letter, words in (("c", "between b and c"), ("b", "to b broke")):
        net = ClusterNet()
        a, b, c = net.form("abc")
        lost = {"b": b, "c": c}[letter]
        beat = last_beat(net, a, b)
        said = msgspec.structs.replace(beat, sequence=1000, aborted=True, lost=lost)
        net.cores[a].receive(b, said, net.now)
        heard = msgspec.structs.replace(last_beat(net, a, c), sequence=1000)
        net.cores[a].receive(c, heard, net.now)
        plan = net.cores[a]._planner.plan(net.view_of(a), must_change=True)
        assert plan is not None
        assert plan.members == (a, b, c)
        assert plan.reason.startswith(f"the connection {words}")
        assert plan.reason.endswith("broke and is back")


# --- how soon the next view may follow ---


def next_view_after(net: ClusterNet, me: ProcessId) -> float:
    """Seconds from the last view to the next one that no death asks for; the leader plans it."""
    planner, s = net.cores[me]._planner, net.cores[me]._state
    if planner.plan(net.view_of(me), must_change=True) is not None:
        return 0.0
    assert planner.next_look is not None
    return planner.next_look - s.time


def test_views_in_a_row_follow_each_other_ever_more_slowly() -> None:
    """At once, then after one pause each, then twice as long each time, up to sixteen pauses."""
    net = ClusterNet()
    a, _, _ = net.form("abc")
    planner, s = net.cores[a]._planner, net.cores[a]._state
    s.pause_after = 2.0
    waits = [next_view_after(net, a)]
    for _ in range(9):
        planner.begin()
        waits.append(next_view_after(net, a))
    wanted = [2.0 * pauses for pauses in (0, 1, 1, 1, 2, 4, 8, 16, 16, 16)]
    assert waits == pytest.approx(wanted)
    s.clock.advance(s.time + 31.9)
    assert planner.plan(net.view_of(a), must_change=True) is None
    planner._begun_at = s.time - 32.0
    assert planner._may_change()
    assert planner.next_look is None


def test_half_a_minute_in_one_view_is_calm() -> None:
    """The changes before it do not count any more."""
    for calm, wait in ((29.5, 1.0), (30.0, 0.0)):
        net = ClusterNet()
        a, _ = net.form("ab")
        planner = net.cores[a]._planner
        planner._begun_at = net.cores[a]._state.time - calm
        planner.begin()
        assert next_view_after(net, a) == pytest.approx(wait)


def test_to_lose_members_is_no_change_that_counts() -> None:
    """Newcomers need not wait because others died."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    net.kill(c)
    net.run(0.1)
    assert net.agreed() == "ab"
    assert next_view_after(net, a) == 0.0


def test_a_silent_member_waits_for_the_turn_of_the_next_view() -> None:
    """It may be a link that flaps; a death is not waited for."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    planner = net.cores[a]._planner
    planner._in_a_row, planner._begun_at = 8, net.now
    net.stopped.add(c)
    net.run(5)
    assert net.view_of(a).members == (a, b, c)
    assert [cause.who for cause in net.cores[a].missing(net.now)] == [c]
    net.run(12)
    assert net.view_of(a).members == (a, b)


def test_a_new_view_begins_without_the_memories_of_the_last() -> None:
    """Gaps, newcomers and a wish to step down were of the view before."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    planner, s = net.cores[a]._planner, net.cores[a]._state
    planner._missing[b, c] = planner._ready[b] = s.time - 50
    planner.is_stepping_down = True
    planner.begin()
    planner._begun_at = float("-inf")
    assert planner.next_look is None
    s.contacts.unhear(b, c)
    assert planner.plan(net.view_of(a), must_change=True) is None  # the gap has just begun
    assert "until all members hear each other again" in "".join(
        str(getattr(effect, "event", "")) for effect in s.out
    )
    assert not planner.is_stepping_down


def test_the_first_of_several_newcomers_sets_the_time() -> None:
    """But not before the turn of the next view."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    planner, s = net.cores[a]._planner, net.cores[a]._state
    planner._ready = {b: 5.0, c: 7.0}
    delay = s.config.election.connection_delay
    assert planner.next_look == 5.0 + delay
    planner._not_before = 6.0
    assert planner.next_look == 6.0
    planner._not_before = 4.0
    assert planner.next_look == 5.0 + delay


# --- for whom it waits, and who may come ---


def test_a_member_that_does_not_confirm_us_is_waited_for() -> None:
    """It is heard, but may not hear us; people are told."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    s = net.cores[a]._state
    s.contacts.of(c).echoed_at = s.time - 1.5 * s.pause_after
    s.out = []
    assert s.contacts.is_heard(c)
    assert net.cores[a]._planner.plan(net.view_of(a), must_change=True) is None
    told = "".join(str(getattr(effect, "event", "")) for effect in s.out)
    assert "waits until it is known whether c ended" in told


def test_a_leader_leaves_itself_out_where_two_others_hear_each_other() -> None:
    """The largest set that hears each other stays, whoever leads."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    planner, s = net.cores[a]._planner, net.cores[a]._state
    for one in (b, c):
        s.contacts.unhear(one, a)
    assert planner.plan(net.view_of(a), must_change=True) is None
    planner._missing = dict.fromkeys(planner._missing, s.time - s.pause_after - 1)
    plan = planner.plan(net.view_of(a), must_change=True)
    assert plan is not None
    assert plan.members == (b, c)
    (cause,) = plan.causes
    assert (cause.who, cause.code, cause.name) == (a, CauseCode.UNREACHABLE, "a")
    assert cause.silent_for == 0.0


def test_pairs_that_do_not_hear_each_other_are_found_each_once() -> None:
    """Also the first and the last of many, and none where all hear all."""
    net = ClusterNet()
    members = net.form("abcdef")
    planner, contacts = net.cores[members[0]]._planner, net.cores[members[0]]._state.contacts
    assert list(planner._pairs(members)) == []
    apart = [(members[1], members[5]), (members[2], members[3]), (members[2], members[4])]
    for one, other in apart:
        contacts.unhear(other, one)
    assert list(planner._pairs(members)) == apart


def test_a_process_bound_to_another_lineage_is_not_let_in() -> None:
    """Nor one that knows a later view of ours, nor one with another setting."""
    net = ClusterNet()
    a, b = net.form("ab")
    core, view = net.cores[a], net.view_of(a)
    z = net.add("z")
    net.link(a, z)
    net.run(0.05)
    planner, s = core._planner, core._state
    contact = s.contacts.of(z)
    assert contact.beat is not None
    free = contact.beat
    cases = [
        ("", 0, True),
        ("e" * 32, 0, False),
        (view.lineage, view.epoch, True),
        (view.lineage, view.epoch + 1, False),
    ]
    for lineage, epoch, may in cases:
        contact.beat = msgspec.structs.replace(free, bound=lineage, bound_epoch=epoch)
        assert planner._may_come(contact) is may
    contact.beat = msgspec.structs.replace(free, bound="e" * 32)
    assert s.joiners() == [contact]
    assert planner._newcomers([a]) == []
    contact.card = msgspec.structs.replace(contact.card, quorum="any")
    contact.beat = free
    assert not planner._may_come(contact)
    assert net.view_of(b) == view


def test_a_member_that_says_it_is_joining_is_no_newcomer() -> None:
    """It is in the view already, once."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    s = net.cores[a]._state
    contact = s.contacts.of(c)
    assert contact.beat is not None
    contact.beat = msgspec.structs.replace(contact.beat, phase=Phase.JOINING, bound="")
    assert s.joiners() == [contact]
    plan = net.cores[a]._planner.plan(net.view_of(a), must_change=True)
    assert plan is not None
    assert plan.members == (a, b, c)


def test_a_newcomer_that_hears_a_member_and_is_not_heard_by_it_waits() -> None:
    """A link in one direction is none."""
    for way in (0, 1):
        net = ClusterNet()
        a, b = net.form("ab")
        c = net.add("c")
        net.cut.add(((b, c), (c, b))[way])
        for other in (a, b):
            net.connections |= {(other, c), (c, other)}
            net.do(other, net.cores[other].connected(net.cores[c].me, net.now))
            net.do(c, net.cores[c].connected(net.cores[other].me, net.now))
        net.run(0.6)
        assert net.view_of(a).members == (a, b)


# --- what a proposal says ---


def test_the_reason_of_a_view_names_who_is_new_and_who_hands_over() -> None:
    """For the log of everybody."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.run(2)
    net.add("c")
    net.mesh()
    net.run(0.5)
    assert net.cores[b].reason == "c joined"
    net.run(2)
    net.do(a, net.cores[a].step_down(net.now))
    net.run(0.1)
    assert net.cores[b].reason == "a hands over rank 0"
    assert net.cores[b].leader == b


def test_the_reason_of_a_fresh_start_says_what_stopped_the_last_view() -> None:
    """Without a lost member: who has stopped, or which leader is back."""
    net = ClusterNet()
    a, b, _ = net.form("abc")
    core = net.cores[a]
    beat = msgspec.structs.replace(last_beat(net, a, b), sequence=1000, aborted=True)
    core.receive(b, beat, net.now)
    assert core._planner._why_again() == "b has stopped its operations"
    net = ClusterNet()
    a, b, _ = net.form("abc")
    planner, s = net.cores[b]._planner, net.cores[b]._state
    s.election.term = 1
    assert planner._why_again() == "a was out of contact and is back"


def test_a_member_that_ended_out_of_contact_is_not_called_silent() -> None:
    """It is known to have ended, though too late for a proof."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.cut_off([c], [a, b])
    net.sever(a, c)
    net.sever(b, c)
    net.run(1.6)
    net.dead.add(c)
    for one in (a, b):
        net.cores[one]._state.contacts.of(c).leased_at -= 0.5  # too long ago for a proof
        net.do(one, net.cores[one].ended(c, "its port refuses connections", net.now))
        assert c not in net.cores[one]._state.proofs
    net.run(1.5)
    assert net.view_of(a).members == (a, b)
    cause = causes_of(net, a)[c]
    assert cause.code is CauseCode.ENDED
    assert cause.reason == "its process has ended (its port refuses connections)"


# --------------------------------------------------------------------------------------------------
# The largest mutually connected set: mutual always, largest for what real networks look like.


@given(st.integers(0, 7), st.data())
def test_it_is_mutual_and_largest(size: int, data: st.DataObject) -> None:
    """Compared with trying all sets; a link counts only if both sides have it."""
    people = list(range(size))
    pairs = [(one, other) for one in people for other in people if one != other]
    links = data.draw(st.sets(st.sampled_from(pairs))) if pairs else set()
    found = largest_mutual(people, lambda one, other: (one, other) in links)

    def is_mutual(some: tuple[int, ...]) -> bool:
        return all((a, b) in links and (b, a) in links for a, b in combinations(some, 2))

    sets = [some for n in range(size + 1) for some in combinations(people, n) if is_mutual(some)]
    best = max((len(some) for some in sets), default=0)
    assert is_mutual(found)
    assert len(found) == best
    assert found == min(some for some in sets if len(some) == best)


def test_who_must_be_in_is_in() -> None:
    """A smaller set that contains somebody is preferred when it has to."""
    links = {frozenset("ab"), frozenset("bc"), frozenset("ac"), frozenset("cd")}
    assert largest_mutual("abcd", lambda x, y: frozenset((x, y)) in links) == ("a", "b", "c")
    found = largest_mutual("abcd", lambda x, y: frozenset((x, y)) in links, must="d")
    assert found == ("c", "d")


def test_a_hopeless_mesh_ends_in_time() -> None:
    """With a third of all links missing among 64 the search gives up, with a mutual set."""
    chance = random.Random(5)
    missing = {pair for pair in combinations(range(64), 2) if chance.random() < 0.3}

    def is_linked(one: int, other: int) -> bool:
        return (min(one, other), max(one, other)) not in missing

    start = time.monotonic()
    found = largest_mutual(list(range(64)), is_linked)
    assert time.monotonic() - start < 10  # measured: 0.05 s
    assert len(found) >= 5
    assert all(is_linked(one, other) for one, other in combinations(found, 2))


class Looked(list[int]):
    """Links that count how often the search looks at them: once for each set that it extends."""

    times = 0

    def __getitem__(self, index: Any) -> Any:
        self.times += 1
        return super().__getitem__(index)


def linked(size: int, missing: Collection[tuple[int, int]] = ()) -> Looked:
    """The links of a mesh in which these are missing."""
    pairs = [pair for pair in combinations(range(size), 2) if pair not in missing]
    return Looked(
        sum(1 << one + other - each for one, other in pairs if each in (one, other))
        for each in range(size)
    )


def test_a_whole_mesh_is_found_at_once() -> None:
    """It looks at each once; nothing larger can be found afterwards."""
    links = linked(8)
    assert largest_linked("abcdefgh", links) == tuple("abcdefgh")
    assert links.times == 8
    assert largest_linked("", []) == ()


def test_a_search_ends_after_5000_sets() -> None:
    """With the best that it has found by then."""
    chance = random.Random(5)
    missing = {pair for pair in combinations(range(64), 2) if chance.random() < 0.3}
    links = linked(64, missing)
    found = largest_linked(range(64), links)
    assert links.times == 5000
    assert not set(combinations(found, 2)) & missing


def test_who_must_be_in_may_be_alone() -> None:
    """Those who come before it do not count."""
    assert largest_linked("abc", linked(3, {(0, 1), (0, 2), (1, 2)}), must="b") == ("b",)


# --------------------------------------------------------------------------------------------------
# Views that were missed, views of others, and votes that led nowhere.

FOREIGN = "d" * 32


def told_to(effects: list[Effect], to: ProcessId) -> list[object]:
    """What a process is told, without heartbeats."""
    sent = [e.message for e in effects if isinstance(e, SendMessage) and e.to == to]
    return [message for message in sent if not isinstance(message, Heartbeat)]


def test_one_that_counts_on_us_in_a_view_that_we_left_hears_our_last_word_or_where_to_go() -> None:
    """Who is at work there stays there; who is not may follow to the child."""
    net = ClusterNet()
    a, b = net.form("ab")
    core = net.cores[a]
    s = core._state
    child = Commit("e" * 32, 1, Proposal((a,)), Charter(ancestry=(Branch(FOREIGN, 1),)))
    s.history.record(child)
    word = Departed(FOREIGN, 1, 5, -1, None, "it continues in another lineage")
    s.history.depart(word)
    claim = Commit(FOREIGN, 1, Proposal((a, b)))
    assert told_to(core.receive(b, claim, net.now), b) == [word]
    contact = s.contacts.of(b)
    assert contact.beat is not None
    contact.beat = msgspec.structs.replace(contact.beat, phase=Phase.PAUSED)
    assert told_to(core.receive(b, claim, net.now), b) == [child]


def test_a_process_that_skips_views_learns_what_followed_its_own() -> None:
    """Whether it is in the last of them or not; and who is back was not left out."""
    for members, is_in in (("abc", True), ("bc", False)):
        net = ClusterNet()
        a, b, c = net.form("abc")
        core, view = net.cores[a], net.view_of(a)
        named = {"a": a, "b": b, "c": c}
        gone = Cause(c, CauseCode.SILENT, "c")
        missed = Commit(view.lineage, view.epoch + 1, Proposal((a, b), causes=(gone,)))
        core._state.history.record(missed)
        last = Commit(
            view.lineage, view.epoch + 2, Proposal(tuple(named[letter] for letter in members))
        )
        core._state.abort(c, "it is lost")
        core._state.beat()
        effects = core.receive(b, last, net.now)
        if is_in:
            (installed,) = [e for e in effects if isinstance(e, Installed)]
            assert installed.commits == (missed, last)
            assert core._state.left_out == {}
        else:
            (removed,) = [e for e in effects if isinstance(e, Removed)]
            assert removed.commit == missed
            assert core._state.next_beat <= core._state.time + 0.02  # the others hear it


def test_of_those_that_were_left_out_the_last_sixty_four_are_known() -> None:
    """The one that was left out first is forgotten first."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core, view = net.cores[a], net.view_of(a)
    s = core._state
    s.left_out = {card("z", number).process: "z" for number in range(64)}
    gone = Cause(c, CauseCode.SILENT, "c")
    commit = Commit(view.lineage, view.epoch + 1, Proposal((a, b), causes=(gone,)))
    core.receive(b, commit, net.now)
    assert len(s.left_out) == 64
    assert card("z", 0).process not in s.left_out
    assert list(s.left_out)[-1] == c


def test_one_whose_leader_is_heard_again_plans_no_campaign_any_more() -> None:
    """The next time it waits for its turn again."""
    net = ClusterNet()
    a, _, c = net.form("abc")
    core = net.cores[c]
    core.health.lost(a, net.now, "it is late")
    net.do(c, core.tick(net.now))
    assert core.election.not_before is not None
    net.run(0.25)
    assert core.election.not_before is None


def test_a_view_of_one_can_be_agreed_to() -> None:
    """All others of it may have left."""
    net = ClusterNet()
    a, b = net.form("ab")
    view = net.view_of(a)
    effects = net.cores[b].receive(a, Propose(view.lineage, view.epoch, 0, Proposal((a,))), net.now)
    (answer,) = told_to(effects, a)
    assert isinstance(answer, Accepted)
    assert answer.is_accepted


def test_one_of_two_leads_in_the_moment_in_which_the_other_is_proved_dead() -> None:
    """It asks nobody and waits for nothing."""
    net = ClusterNet()
    a, b = net.form("ab")
    net.kill(a)
    net.run(0.004)
    assert net.agreed_by([b]) == "b"


def test_one_that_had_our_vote_has_two_timeouts_to_win() -> None:
    """Longer where members run late; after that another may campaign."""
    net = ClusterNet()
    _, b, c = net.form("abc")
    core, view = net.cores[b], net.view_of(b)
    s = core._state
    s.election.slack = 0.2
    core.receive(c, VoteRequest(view.lineage, view.epoch, 1), net.now)
    assert s.election.leader == c
    contact = s.contacts.of(c)
    assert contact.beat is not None
    contact.beat = msgspec.structs.replace(contact.beat, term=1, leader=None)
    for later, is_leaderless in ((0.9, False), (1.1, True)):
        s.clock.current = net.now + later
        assert bool(core._campaign.why_leaderless()) is is_leaderless
