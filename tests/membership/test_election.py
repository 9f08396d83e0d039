"""Terms and votes: who may lead, and how a member answers those who want to."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._types import NodeId, ProcessId, View
from potluck.membership.election import AcceptorState, ElectionManager, has_quorum
from potluck.membership.events import ElectionConfig, ElectionKind, ElectionRole
from potluck.membership.messages import Departed, PreVote, PreVoteReply, Proposal, Vote, VoteRequest

A, B, C = (ProcessId(NodeId(letter * 32), 1) for letter in "abc")
VIEW = View("f" * 32, 3, (A, B, C))
NEXT = Proposal((B, C), "without a")


def manager(me: ProcessId = B) -> ElectionManager:
    """A member of a view that has just been installed."""
    election = ElectionManager(me, ElectionConfig())
    election.begin(VIEW, "a view was agreed")
    return election


def leaning(term: int, *, granted: bool = True, promised: int = 0) -> PreVoteReply:
    """An answer to a pre-vote."""
    return PreVoteReply(VIEW.lineage, VIEW.epoch, term, granted, promised, ())


def vote(term: int, accepted: Proposal | None = None, *, at: int = -1, promised: int = 1) -> Vote:
    """An answer to a vote request."""
    granted = promised == term
    return Vote(VIEW.lineage, VIEW.epoch, term, granted, promised, at, accepted, ())


def departed(promised: int, accepted: Proposal | None = None) -> Departed:
    """Somebody's last word in the view."""
    return Departed(VIEW.lineage, VIEW.epoch, promised, 0 if accepted else -1, accepted, "bye")


def test_the_first_member_leads_in_term_zero() -> None:
    """Without a vote; everybody knows."""
    first = manager(A)
    assert first.is_leading
    assert first.state.leader == A
    assert manager().state.role is ElectionRole.FOLLOWING
    assert [event.kind for event in first.events] == [ElectionKind.ELECTED]
    assert str(first.events[0]).startswith("this process leads epoch 3")
    assert str(manager().events[0]) == f"{A} leads epoch 3 as its first member"
    first.end("we left")
    assert first.state.role is ElectionRole.IDLE


def test_a_canvass_raises_no_term() -> None:
    """The term rises only with a quorum behind it, and is led only with votes."""
    election = manager()
    asked = election.pre_vote(10.0, "a is lost")
    assert (asked.term, election.term, election.ballot.promised) == (1, 0, 0)
    assert not election.has_won(set())
    election.take_leaning(C, leaning(1))
    assert election.has_won(set())
    assert election.has_answered(C)
    request = election.campaign(10.1)
    assert (request.term, election.term, election.ballot.promised) == (1, 1, 1)
    assert not election.has_won(set())
    election.take_vote(C, vote(1))
    assert election.has_won(set())
    election.lead()
    assert election.state.leader == B
    assert election.state.reason == "2 of 3 members voted for us"
    assert election.events[-1].kind is ElectionKind.ELECTED
    assert str(election.events[-1]) == "this process leads: 2 of 3 members voted for us"
    assert election.inherited is None


def test_answers_of_another_attempt_do_not_count() -> None:
    """Late, refused or unasked answers leave the count alone; a yes can be taken back."""
    election = manager()
    election.take_leaning(C, leaning(1))
    election.pre_vote(10.0, "a is lost")
    election.take_leaning(C, leaning(7))
    assert not election.has_answered(C)
    election.take_leaning(C, leaning(1))
    election.take_leaning(C, leaning(1, granted=False))
    assert not election.has_answered(C)
    election.campaign(10.1)
    election.take_vote(C, vote(1, promised=4))
    assert not election.has_answered(C)
    assert election.pre_vote(11.0, "again").term == 5


def test_a_late_vote_of_term_1_does_not_win_term_2() -> None:
    """Its voter may have given its vote in term 2 to another candidate."""
    election = manager()
    election.pre_vote(10.0, "a is lost")
    election.campaign(10.1)
    election.give_up(11.0)
    election.pre_vote(12.0, "a is still lost")
    assert election.campaign(12.1).term == 2
    election.take_vote(C, vote(1, NEXT, at=1))
    assert not election.has_answered(C)
    assert not election.has_won(set())
    assert election.inherited is None
    election.take_vote(C, vote(2, promised=2))
    assert election.has_won(set())


def test_what_was_accepted_in_the_highest_term_must_be_proposed_again() -> None:
    """Votes, our own ballot and the words of the departed are all asked."""
    other = Proposal((C,), "without a and b")
    election = manager()
    election.ballot.accept(A, 0, other)
    election.pre_vote(10.0, "a is lost")
    election.campaign(10.1)
    assert election.inherited == other
    election.take_vote(C, vote(1, NEXT, at=1))
    election.take_vote(A, vote(1, other, at=0))
    election.lead()
    assert election.inherited == NEXT


def test_the_departed_count_as_gone_with_their_last_word() -> None:
    """One that had voted in a later term does not, for an earlier one."""
    election = manager()
    election.depart(A, departed(0, NEXT))
    election.pre_vote(10.0, "a left")
    election.depart(C, departed(9))
    assert not election.has_won(set())
    assert election.has_won({C})
    election.campaign(10.1)
    assert election.has_won({C})
    election.lead()
    assert election.inherited == NEXT
    assert election.gone == {A}
    assert election.pre_vote(11.0, "again").term == 10


def test_those_who_went_to_a_child_give_no_vote_and_still_count() -> None:
    """They are alive: without a majority of those who are left, their word makes no quorum."""
    election = manager(B)
    election.pre_vote(0.0, "the leader is lost")
    for other in (A, C):
        election.depart(other, msgspec.structs.replace(departed(0), is_followed=True))
    assert election.elsewhere == {A, C}
    assert not election.has_won(set())
    election.depart(C, departed(0))
    election.depart(A, departed(0))
    assert election.has_won(set())


def test_a_leader_learns_from_the_departed_that_its_term_is_over() -> None:
    """It must ask for a later one."""
    election = manager(A)
    election.depart(C, departed(0))
    assert election.is_leading
    election.depart(B, departed(2))
    assert not election.is_leading
    assert election.leader is None


def test_one_vote_per_term() -> None:
    """The second candidate of a term is refused; the first may ask again."""
    election = manager()
    first = election.answer_vote_request(C, VoteRequest(VIEW.lineage, VIEW.epoch, 1), set())
    again = election.answer_vote_request(C, VoteRequest(VIEW.lineage, VIEW.epoch, 1), set())
    second = election.answer_vote_request(A, VoteRequest(VIEW.lineage, VIEW.epoch, 1), {C})
    assert (first.is_granted, again.is_granted, second.is_granted) == (True, True, False)
    assert second.proofs == (C,)
    assert election.leader == C


def test_a_canvass_is_answered_without_a_promise() -> None:
    """No to an old term, and to any while the leader is heard; yes otherwise."""
    election = manager()

    def answer(sender: ProcessId, term: int, refusal: str = "") -> PreVoteReply:
        pre_vote = PreVote(VIEW.lineage, VIEW.epoch, term)
        return election.answer_pre_vote(sender, pre_vote, refusal=refusal, proofs=set())

    assert answer(C, 1).is_granted
    assert election.ballot.promised == 0
    assert answer(C, 1, "the leader is heard").reason == "the leader is heard"
    election.ballot.vote(C, 2)
    assert "already given in term 2" in answer(A, 2).reason
    assert answer(C, 2).is_granted


def test_a_failed_campaign_rests_before_the_next() -> None:
    """A failed pre-vote changes nothing about the leader; a failed campaign leaves none."""
    election = manager()
    election.wait_turn(0, 10.0)
    assert election.not_before == 10.0
    election.pre_vote(10.0, "a is lost")
    election.give_up(10.4)
    assert election.leader == A
    assert [event.kind for event in election.events][-1] is ElectionKind.TIMEOUT
    assert election.reason == "no quorum voted for us in time"
    election.wait_turn(0, 10.4)
    assert election.not_before is not None
    assert election.not_before > 10.4
    election.pre_vote(11.0, "a is lost")
    election.campaign(11.1)
    election.give_up(11.5)
    assert election.leader is None


def test_a_resumed_leader_ends_a_canvass() -> None:
    """As if nothing had been."""
    election = manager()
    election.pre_vote(10.0, "a is lost")
    election.resume_following()
    assert (election.role, election.leader) == (ElectionRole.FOLLOWING, A)


def test_seniors_go_first() -> None:
    """Each more senior member that is heard costs one timeout; the wait shrinks with them."""
    election = manager(C)
    election.wait_turn(1, 10.0)
    assert election.not_before is not None
    assert election.not_before >= 10.3
    election.wait_turn(0, 10.1)
    assert election.not_before == 10.1


def test_the_proposer_of_a_later_term_is_followed() -> None:
    """Whoever proposes was elected; hearing it again is no news."""
    election = manager()
    election.events.clear()
    election.follow_proposer(C, 2)
    election.follow_proposer(C, 2)
    assert (election.term, election.leader) == (2, C)
    assert [event.kind for event in election.events] == [ElectionKind.NEW_LEADER]


def test_a_later_promise_ends_our_term() -> None:
    """An equal one does not."""
    election = manager(A)
    election.preempted(0, "no later term")
    assert election.is_leading
    election.preempted(3, "another machine campaigns")
    assert not election.is_leading


@pytest.mark.parametrize("kind", [ElectionKind.SPLIT_BRAIN, ElectionKind.STEPPED_DOWN])
def test_events_are_sentences(kind: ElectionKind) -> None:
    """The same words for log, command and dashboard."""
    election = manager()
    tell = election.split_brain if kind is ElectionKind.SPLIT_BRAIN else election.stepped_down
    tell("something happened")
    assert str(election.events[-1]) == "something happened"
    assert election.events[-1].kind is kind


def test_a_campaign_waits_for_those_of_more_senior_members() -> None:
    """One election timeout for each, and a share of one; the most senior does not wait."""
    timeout = ElectionConfig().election_timeout
    election = manager()
    election.wait_turn(2, 10.0)
    assert election.not_before is not None
    assert 10.0 + 2 * timeout <= election.not_before <= 10.0 + 2.5 * timeout
    election.wait_turn(0, 10.0)
    assert election.not_before == 10.0
    election.wait_turn(1, 10.0)
    assert election.not_before == 10.0  # a turn that has come stays


def test_a_vote_of_the_departed_in_our_own_term_reports_what_it_accepted() -> None:
    """It voted for us, then left: its word takes the place of its vote."""
    election = manager()
    election.pre_vote(10.0, "a is lost")
    election.campaign(10.1)
    election.depart(C, departed(1, NEXT))
    election.lead()
    assert election.inherited == NEXT


def test_an_attempt_waits_for_answers_for_one_to_one_and_a_half_timeouts() -> None:
    """Both the question and the campaign; the rest after a failure is shorter."""
    timeout = ElectionConfig().election_timeout
    for me in (B, C, *(ProcessId(NodeId(letter * 32), 1) for letter in "defgh")):
        election = manager(me)  # each has its own share of chance
        election.pre_vote(10.0, "a is lost")
        assert election.until is not None
        assert 10.0 + timeout < election.until <= 10.0 + 1.5 * timeout
        election.campaign(20.0)
        assert election.until is not None
        assert 20.0 + timeout < election.until <= 20.0 + 1.5 * timeout


# --- what a new view, a leader or a quorum ends ---

TIMEOUT = ElectionConfig().election_timeout


def kinds(election: ElectionManager) -> list[ElectionKind]:
    """What happened since this was last asked."""
    found = [event.kind for event in election.events]
    election.events.clear()
    return found


def fail_often(election: ElectionManager, times: int, now: float = 10.0) -> float:
    """Let campaigns fail; the time after that."""
    for _ in range(times):
        election.pre_vote(now, "a is lost")
        election.campaign(now)
        assert election.until is not None
        now = election.until
        election.give_up(now)
    return now


def begins_like_the_first(election: ElectionManager, now: float) -> bool:
    """Whether the next attempt may begin at once, is told, and waits as long as a first one."""
    election.events.clear()
    election.wait_turn(0, now)
    is_at_once = election.not_before == now
    election.pre_vote(now, "a is lost")
    assert election.until is not None
    is_told = kinds(election) == [ElectionKind.STARTED]
    return is_at_once and is_told and election.until <= now + 1.5 * TIMEOUT


def test_only_the_first_of_several_attempts_is_told() -> None:
    """Its beginning and its failure; people need not hear of each that follows."""
    election = manager()
    election.events.clear()
    now = fail_often(election, 1)
    assert kinds(election) == [ElectionKind.STARTED, ElectionKind.TIMEOUT]
    fail_often(election, 3, now)
    assert kinds(election) == []


def test_a_failed_attempt_rests_for_half_a_timeout_to_one_and_a_half() -> None:
    """So two that failed together do not begin together again."""
    election = manager()
    now = fail_often(election, 1)
    election.wait_turn(0, now)
    assert election.not_before is not None
    assert now + 0.5 * TIMEOUT <= election.not_before <= now + 1.5 * TIMEOUT


@pytest.mark.parametrize(
    ("failures", "times"), [(4, 1), (5, 2), (6, 4), (7, 8), (8, 16), (9, 16), (40, 16)]
)
def test_after_five_failures_attempts_take_twice_as_long_each_time(
    failures: int, times: int
) -> None:
    """Sixteen times as long at most: who comes back is not waited for without end."""
    election = manager()
    now = fail_often(election, failures)
    election.pre_vote(now, "a is lost")
    assert election.until is not None
    assert now + times * TIMEOUT < election.until <= now + 1.5 * times * TIMEOUT


def test_a_quorum_a_leader_or_a_new_view_ends_a_row_of_failures() -> None:
    """The next attempt begins like a first one."""
    for times in (1, 9):
        election = manager()
        now = fail_often(election, times)
        assert not begins_like_the_first(election, now)
        election.encourage()
        assert begins_like_the_first(election, now)
        election = manager()
        now = fail_often(election, times)
        election.begin(View(VIEW.lineage, 4, VIEW.members), "a view was agreed")
        assert begins_like_the_first(election, now)
        election = manager()
        now = fail_often(election, times)
        election.follow_proposer(C, 99)
        election._rest_until = now  # the rest after a failure is not ended by a leader
        assert begins_like_the_first(election, now)


def test_a_quorum_in_contact_ends_a_canvass_and_no_campaign() -> None:
    """Votes that were asked for are still counted."""
    election = manager()
    election.pre_vote(10.0, "a is lost")
    election.encourage()
    assert (election.role, election.leader) == (ElectionRole.FOLLOWING, A)
    election.pre_vote(10.0, "a is lost")
    election.campaign(10.1)
    election.encourage()
    assert election.role is ElectionRole.CAMPAIGNING


def test_a_new_view_knows_nothing_of_the_last_epoch() -> None:
    """Terms, votes, last words and what was accepted belong to one epoch."""
    election = manager()
    election.depart(C, departed(7, NEXT))
    election.pre_vote(10.0, "a is lost")
    election.campaign(10.0)
    election.ballot.accept(B, 8, NEXT)
    election.lead()
    assert election.inherited == NEXT
    election.begin(View(VIEW.lineage, 4, (A, B)), "without c")
    assert (election.term, election.leader) == (0, A)
    assert [election.inherited] == [None]
    assert (election.ballot.promised, election.ballot.accepted) == (0, None)
    assert election.ballot.voted_for == A
    assert election.gone == frozenset()
    assert election.until is None
    assert election.pre_vote(11.0, "a is lost").term == 1
    assert not election.has_answered(C)


def test_without_a_view_there_is_no_term_no_leader_and_nothing_is_due() -> None:
    """What was promised and accepted ended with the view."""
    election = manager()
    election.answer_vote_request(C, VoteRequest(VIEW.lineage, VIEW.epoch, 3), set())
    election.ballot.accept(C, 3, NEXT)
    election.depart(A, departed(0))
    election.pre_vote(10.0, "c is lost")
    election.not_before = 11.0
    election.end("we were excluded")
    state = election.state
    assert (state.role, state.term, state.leader) == (ElectionRole.IDLE, 0, None)
    assert (state.lineage, state.epoch, state.reason) == ("", 0, "we were excluded")
    assert (election.ballot.promised, election.ballot.accepted) == (0, None)
    assert election.departed == {}
    assert election.until is election.not_before is None


def test_a_member_that_departed_after_a_promise_in_our_term_is_waited_for() -> None:
    """It may have voted for another candidate of this very term, which may have won."""
    election = manager()
    election.pre_vote(10.0, "a is lost")
    election.depart(C, departed(1))
    assert not election.has_won({A})
    election = manager()
    election.pre_vote(10.0, "a is lost")
    election.depart(C, departed(0))
    assert election.has_won({A})


def test_a_proposer_is_followed_into_a_later_term_and_before_the_one_we_voted_for() -> None:
    """Whoever proposes in a term has won it."""
    election = manager()
    election.follow_proposer(C, 2)
    election.follow_proposer(C, 3)
    assert (election.term, election.leader) == (3, C)
    election.answer_vote_request(C, VoteRequest(VIEW.lineage, VIEW.epoch, 4), set())
    election.follow_proposer(A, 4)
    assert (election.term, election.leader) == (4, A)


def test_the_next_term_is_later_than_any_that_was_mentioned() -> None:
    """A refusal names the term that was promised to another."""
    election = manager()
    election.pre_vote(10.0, "a is lost")
    election.take_leaning(C, leaning(1, granted=False, promised=4))
    election.take_leaning(C, leaning(1, granted=False, promised=2))
    assert election.pre_vote(11.0, "again").term == 5


def test_whoever_follows_has_nothing_due() -> None:
    """Neither the end of an attempt nor the begin of the next."""
    election = manager()
    election.pre_vote(10.0, "a is lost")
    election.not_before = 10.5
    election.resume_following()
    assert election.until is election.not_before is None


# --------------------------------------------------------------------------------------------------
# One vote per term, and nothing accepted below a promise.

BALLOT_A, BALLOT_B = (ProcessId(NodeId(letter * 32), 1) for letter in "ab")
terms = st.integers(0, 4)
voters = st.sampled_from([BALLOT_A, BALLOT_B])


@given(st.lists(st.tuples(st.booleans(), voters, terms), max_size=12))
def test_votes_and_acceptances_never_contradict_each_other(
    requests: list[tuple[bool, ProcessId, int]],
) -> None:
    """A vote stays given, promises only grow, and one thing is accepted per term."""
    ballot = AcceptorState()
    votes: dict[int, ProcessId] = {}
    accepted: dict[int, Proposal] = {}
    for is_vote, who, term in requests:
        before = ballot.promised
        if is_vote and ballot.vote(who, term):
            assert votes.setdefault(term, who) == who
        if not is_vote and ballot.accept(who, term, Proposal((who,))):
            assert term >= before
            assert accepted.setdefault(term, Proposal((who,))) == Proposal((who,))
        assert ballot.promised >= before


def test_a_vote_can_be_repeated_but_not_moved() -> None:
    """Asking again gets the same answer; an earlier term gets none."""
    ballot = AcceptorState()
    assert ballot.vote(BALLOT_A, 2)
    assert ballot.vote(BALLOT_A, 2)
    assert not ballot.vote(BALLOT_B, 2)
    assert not ballot.vote(BALLOT_B, 1)


def test_a_vote_stays_where_it_was_given_whatever_is_accepted_in_its_term() -> None:
    """The one that has it may ask again; the one whose proposal was accepted never had it."""
    ballot = AcceptorState()
    assert ballot.vote(BALLOT_A, 1)
    assert ballot.accept(BALLOT_B, 1, NEXT)
    assert ballot.vote(BALLOT_A, 1)
    assert not ballot.vote(BALLOT_B, 1)


def test_a_proposal_of_the_elected_is_accepted_whomever_one_voted_for() -> None:
    """Another candidate may have won the term."""
    ballot = AcceptorState()
    ballot.vote(BALLOT_A, 2)
    assert ballot.accept(BALLOT_B, 2, Proposal((BALLOT_B,)))
    assert ballot.contradicts(BALLOT_A, 2, Proposal((BALLOT_A,)))
    assert not ballot.accept(BALLOT_A, 2, Proposal((BALLOT_A,)))
    assert not ballot.accept(BALLOT_A, 1, Proposal((BALLOT_A,)))


def test_term_zero_is_promised_before_anybody_asks() -> None:
    """To the first member: no other gets a vote in it."""
    first, other = (ProcessId(NodeId(letter * 32), 1) for letter in "xy")
    ballot = AcceptorState(voted_for=first)
    assert not ballot.vote(other, 0)
    assert ballot.vote(first, 0)
    assert ballot.vote(other, 1)
    assert (ballot.promised, ballot.accepted_term) == (1, -1)


def test_to_accept_in_a_term_is_to_promise_it() -> None:
    """Nothing of an earlier term is accepted afterwards, and no other gets a vote in it."""
    first, other = (ProcessId(NodeId(letter * 32), 1) for letter in "xy")
    ballot = AcceptorState(voted_for=first)
    assert ballot.accept(other, 3, Proposal((other,)))
    assert (ballot.promised, ballot.voted_for) == (3, other)
    assert not ballot.vote(first, 3)
    assert not ballot.accept(first, 2, Proposal((first,)))


# --------------------------------------------------------------------------------------------------
# Quorums share a living member, or leave nobody alive to object.

EVERYBODY = [ProcessId(NodeId(letter), 1) for letter in "abcdefg"]
sizes = st.integers(1, 7)
subsets = st.sets(st.sampled_from(EVERYBODY))


@given(sizes, subsets, subsets)
def test_two_quorums_without_deaths_share_a_member(
    size: int, one: set[ProcessId], other: set[ProcessId]
) -> None:
    """Majorities, and halves with the first member, always intersect."""
    members = EVERYBODY[:size]
    if has_quorum(members, one, set()) and has_quorum(members, other, set()):
        assert one & other & set(members)


@given(sizes, subsets, subsets, subsets)
def test_a_quorum_of_the_living_leaves_only_dead_behind(
    size: int, one: set[ProcessId], other: set[ProcessId], dead: set[ProcessId]
) -> None:
    """Where two quorums share nobody, all living votes of one of them have died since."""
    members = EVERYBODY[:size]
    if has_quorum(members, one, set()) and has_quorum(members, other, dead):
        assert (one & other & set(members)) - dead or not (one & set(members)) - dead - other


@given(sizes, subsets, subsets)
def test_the_dead_never_vote(size: int, present: set[ProcessId], dead: set[ProcessId]) -> None:
    """A vote of somebody proved dead changes nothing."""
    members = EVERYBODY[:size]
    assert has_quorum(members, present, dead) == has_quorum(members, present - dead, dead)


def test_nobody_is_no_quorum() -> None:
    """Even when all are dead."""
    assert not has_quorum(EVERYBODY, set(), set(EVERYBODY))
