"""From one view to the next: which answers count, what is repeated, and when it is agreed."""

from __future__ import annotations

from potluck.core.cluster_effects import Effect, Installed, Note, Send
from potluck.core.cluster_messages import (
    Accepted,
    ClusterMessage,
    Departed,
    Proposal,
    Propose,
    VoteRequest,
)
from potluck.core.election_events import ElectionRole
from potluck.vocabulary import ProcessId, View
from support.cluster_net import ClusterNet


def accepted(view: View, term: int, *silent: ProcessId, yes: bool = True) -> Accepted:
    """An answer to a proposal."""
    return Accepted(view.lineage, view.epoch, term, yes, term, (), silent)


def sent(effects: list[Effect], kind: type) -> list[ClusterMessage]:
    """Messages of one kind."""
    messages = [effect.message for effect in effects if isinstance(effect, Send)]
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
    assert "proposed view 2: a (aaaaaaaa/1) hands over the first rank" in told
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
    assert core._succession._acceptors == {}
    core.step_down(net.now)
    assert core.view == view
    core._succession._acceptors = {b: accepted(view, 0)}
    core._succession.propose(view, core.election.ballot.accepted or Proposal((a,)))
    assert core._succession._acceptors == {}


def test_a_refusal_of_the_same_term_does_not_end_it() -> None:
    """Only a promise of a later one does; then the proposal is over as well."""
    net, (a, b, _), view = proposing()
    core = net.cores[a]
    core.receive(b, accepted(view, 0, yes=False), net.now)
    assert core.election.is_leading
    assert core._succession.is_busy
    refusal = Accepted(view.lineage, view.epoch, 0, False, 3, (), ())
    core.receive(b, refusal, net.now)
    assert not core.election.is_leading
    assert not core._succession.is_busy


def test_whoever_accepts_follows_the_proposer_and_beats_at_once() -> None:
    """Others then see which view it has accepted."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    net.run(3)
    core, view = net.cores[c], net.view_of(c)
    s = core._situation
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
    assert [e.to for e in effects if isinstance(e, Send) and e.message == again] == [a]
    assert any("d (dddddddd/1) left: bye" in str(e.event) for e in effects if isinstance(e, Note))
    assert sent(core.tick(net.now + 0.01), Accepted) == []
    core.receive(c, VoteRequest(view.lineage, view.epoch, 1), net.now)
    assert sent(core.receive(c, word, net.now + 0.02), Accepted) == []


def test_what_a_dead_acceptor_heard_is_asked_for_until_no_lease_of_it_is_left() -> None:
    """Four times the pause of the view, or of the one before if that was longer."""
    net = ClusterNet()
    a, b, _ = net.form("abc")
    succession, s = net.cores[a]._succession, net.cores[a]._situation
    assert not succession._has_long_ended(b)
    s.former_pause = 3.0
    for age, is_long in ((11.9, False), (12.1, True)):
        s.ended[b] = "its port refuses connections", s.time - age
        assert succession._has_long_ended(b) is is_long


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
    core._situation.is_dirty = True
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
    net.cores[b]._situation.clock.advance(net.now)
    campaign.begin()
    assert not campaign.is_called
    assert campaign._begun == net.cores[b]._situation.time
    assert a in net.view_of(b).members


def test_a_canvass_ends_when_the_leader_is_heard_and_no_campaign_does() -> None:
    """Nothing has changed by the question."""
    net = ClusterNet()
    a, b, c = net.form("abc")
    core = net.cores[b]
    core.election.canvass(net.now, "a is lost")
    core._campaign.review(net.view_of(b))
    assert core.election.state.role is ElectionRole.FOLLOWING
    assert core.election.leader == a
    core.election.canvass(net.now, "a is lost")
    core.election.campaign(net.now)
    core._campaign.review(net.view_of(b))
    assert core.election.state.role.value == "campaigning"
    assert c in net.view_of(b).members
