"""One vote per term, and nothing accepted below a promise."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from potluck.core.cluster_messages import Proposal
from potluck.core.election_ballot import Ballot
from potluck.vocabulary import NodeId, ProcessId

A, B = (ProcessId(NodeId(letter * 32), 1) for letter in "ab")
terms = st.integers(0, 4)
voters = st.sampled_from([A, B])


@given(st.lists(st.tuples(st.booleans(), voters, terms), max_size=12))
def test_votes_and_acceptances_never_contradict_each_other(
    requests: list[tuple[bool, ProcessId, int]],
) -> None:
    """A vote stays given, promises only grow, and one thing is accepted per term."""
    ballot = Ballot()
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
    ballot = Ballot()
    assert ballot.vote(A, 2)
    assert ballot.vote(A, 2)
    assert not ballot.vote(B, 2)
    assert not ballot.vote(B, 1)


def test_a_proposal_of_the_elected_is_accepted_whomever_one_voted_for() -> None:
    """Another candidate may have won the term."""
    ballot = Ballot()
    ballot.vote(A, 2)
    assert ballot.accept(B, 2, Proposal((B,)))
    assert ballot.contradicts(A, 2, Proposal((A,)))
    assert not ballot.accept(A, 2, Proposal((A,)))
    assert not ballot.accept(A, 1, Proposal((A,)))


def test_term_zero_is_promised_before_anybody_asks() -> None:
    """To the first member: no other gets a vote in it."""
    first, other = (ProcessId(NodeId(letter * 32), 1) for letter in "xy")
    ballot = Ballot(voted_for=first)
    assert not ballot.vote(other, 0)
    assert ballot.vote(first, 0)
    assert ballot.vote(other, 1)
    assert (ballot.promised, ballot.accepted_term) == (1, -1)


def test_to_accept_in_a_term_is_to_promise_it() -> None:
    """Nothing of an earlier term is accepted afterwards, and no other gets a vote in it."""
    first, other = (ProcessId(NodeId(letter * 32), 1) for letter in "xy")
    ballot = Ballot(voted_for=first)
    assert ballot.accept(other, 3, Proposal((other,)))
    assert (ballot.promised, ballot.voted_for) == (3, other)
    assert not ballot.vote(first, 3)
    assert not ballot.accept(first, 2, Proposal((first,)))
