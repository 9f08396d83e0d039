"""Who leads: terms, explicit votes and pre-votes within one epoch, each with its reason.

The members of a view elect the one that proposes the next one.  Term 0 belongs to the view's first
member without a vote.  When it is lost, a member first *canvasses*: only if a quorum would vote for
it, which no member does that still hears the leader, the term rises and votes are asked for.  Each
member votes once per term and reports what it accepted before.

The manager decides and counts; who is heard, and who is proved dead, its owner tells it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from potluck._types import ProcessId, View
from potluck.membership.events import (
    ElectionConfig,
    ElectionEvent,
    ElectionKind,
    ElectionRole,
    ElectionState,
)
from potluck.membership.messages import Departed, PreVote, PreVoteReply, Proposal, Vote, VoteRequest

# --------------------------------------------------------------------------------------------------
# What one member has promised and accepted in one epoch: the acceptor of single-decree Paxos.
#
# It lives as long as its process: a restarted process is a new member without a vote, so nothing
# needs to be kept on disk.


@dataclass(slots=True)
class AcceptorState:
    """Promises bind: after a vote in a term nothing is accepted in an earlier one."""

    promised: int = 0
    """The highest term voted or accepted in; term 0 is promised to the first member by all."""
    voted_for: ProcessId | None = None
    """Who got the vote in that term."""
    accepted_term: int = -1
    accepted: Proposal | None = None
    proposer: ProcessId | None = None
    """Whose proposal was accepted."""

    def vote(self, candidate: ProcessId, term: int) -> bool:
        """Vote, if no vote was given in this or a later term; asking again changes nothing."""
        if term > self.promised:
            self.promised, self.voted_for = term, candidate
        return term == self.promised and self.voted_for == candidate

    def accept(self, leader: ProcessId, term: int, proposal: Proposal) -> bool:
        """Accept a proposal, unless a later term was promised, or another one in this term."""
        if term < self.promised or self.contradicts(leader, term, proposal):
            return False
        if term > self.promised:
            self.promised, self.voted_for = term, leader
        self.accepted_term, self.accepted, self.proposer = term, proposal, leader
        return True

    def contradicts(self, leader: ProcessId, term: int, proposal: Proposal) -> bool:
        """Whether something else was accepted in this very term, which must not happen."""
        return term == self.accepted_term and (leader, proposal) != (self.proposer, self.accepted)


# --------------------------------------------------------------------------------------------------
# Who may decide: the quorum of a view, as a pure function.
#
# Any two quorums of one view have a living member in common, or all who were in one of them are
# dead; see ``docs/internals/membership.md`` for why that is enough.


def has_quorum(
    members: Sequence[ProcessId], present: Collection[ProcessId], gone: AbstractSet[ProcessId]
) -> bool:
    """Whether those present may decide for a view.

    ``gone`` are the members proved dead, or departed with their last word known: they never vote,
    so they are not counted as present, even if others say so.

    >>> from potluck._types import NodeId
    >>> a, b, c, d = (ProcessId(NodeId(letter), 1) for letter in "abcd")
    >>> has_quorum([a, b, c], {b, c}, set())               # a majority
    True
    >>> has_quorum([a, b, c, d], {a, d}, set())            # half of it, with the first
    True
    >>> has_quorum([a, b, c, d], {c, d}, set())            # half of it, without
    False
    >>> has_quorum([a, b, c, d], {c, d}, {a, b})           # all that are left
    True
    """
    living = set(members) - gone
    votes = living.intersection(present)
    if not votes:
        return False
    twice = 2 * len(votes)
    return (
        twice > len(members) or (twice == len(members) and members[0] in votes) or votes == living
    )


# --------------------------------------------------------------------------------------------------

_NO_VIEW = View("", 0, ())
_QUICK_ATTEMPTS = 5  # campaigns without success before each waits twice as long as the last,
_MOST_DOUBLED = 4  # up to this power of two


@dataclass(slots=True)
class _Count:
    """Who said yes, with the proofs each holds, and what had been accepted before."""

    voters: dict[ProcessId, frozenset[ProcessId]] = field(default_factory=dict)
    accepted_term: int = -1
    accepted: Proposal | None = None

    def report(self, term: int, proposal: Proposal | None) -> None:
        if proposal is not None and term > self.accepted_term:
            self.accepted_term, self.accepted = term, proposal


class ElectionManager:
    """Who leads in which term of the current epoch, as far as this member knows.

    >>> from potluck._types import NodeId
    >>> me = ProcessId(NodeId("a" * 32), 1)
    >>> manager = ElectionManager(me, ElectionConfig())
    >>> manager.begin(View("f" * 32, 1, (me,)), "it was founded")
    >>> print(manager.state)
    leading in term 1.0: it was founded
    """

    asked: int
    """The term that we canvass for or campaign in."""

    def __init__(self, me: ProcessId, config: ElectionConfig) -> None:
        self.me = me
        self.config = config
        self.events: list[ElectionEvent] = []
        """What happened since the owner last took them."""
        self.slack = 0.0
        """Seconds by which members ran late recently: so much longer an answer may take."""
        self._enter(_NO_VIEW, ElectionRole.IDLE, "not in a view yet")

    def _enter(self, view: View, role: ElectionRole, reason: str) -> None:
        """Begin an epoch, or the time without one: nothing that was said in another counts."""
        self.view, self.role, self.reason = view, role, reason
        self.term = 0
        self.leader: ProcessId | None = view.leader if view.members else None
        self.ballot = AcceptorState(voted_for=self.leader)
        self.departed: dict[ProcessId, Departed] = {}
        """Members that left the lineage, with their last words in this epoch."""
        self.until: float | None = None  # when the present attempt is given up
        self.not_before: float | None = None  # when the next attempt may begin
        self._rest_until = float("-inf")  # after a failed attempt
        self._attempts = 0
        self._seen = 0  # the highest term anybody mentioned
        self._count = _Count()

    @property
    def state(self) -> ElectionState:
        """Who leads in which term, and why."""
        view = self.view
        return ElectionState(
            self.role, view.lineage, view.epoch, self.term, self.leader, self.reason
        )

    @property
    def is_leading(self) -> bool:
        """Whether we may propose in the current term."""
        return self.role is ElectionRole.LEADING

    @property
    def gone(self) -> frozenset[ProcessId]:
        """Who departed with a last word that binds no one beyond the current term."""
        return frozenset(who for who, word in self.departed.items() if word.promised <= self.term)

    @property
    def elsewhere(self) -> frozenset[ProcessId]:
        """Who departed for a descendant of the lineage: it takes no part, and is alive."""
        return frozenset(who for who, word in self.departed.items() if word.is_followed)

    @property
    def inherited(self) -> Proposal | None:
        """What must be proposed again: the accepted proposal of the highest term reported."""
        return self._count.accepted

    # --- epochs ---

    def begin(self, view: View, reason: str) -> None:
        """A view was installed: its first member leads in term 0."""
        mine = view.leader == self.me
        self._enter(view, ElectionRole.LEADING if mine else ElectionRole.FOLLOWING, reason)
        who = "this process leads" if mine else f"{view.leader} leads"
        kind = ElectionKind.ELECTED if mine else ElectionKind.NEW_LEADER
        self._event(kind, f"{who} epoch {view.epoch} as its first member")

    def end(self, reason: str) -> None:
        """We are in no view any more."""
        self._enter(_NO_VIEW, ElectionRole.IDLE, reason)

    def depart(self, who: ProcessId, word: Departed) -> None:
        """A member left the lineage for good."""
        self.departed[who] = word
        self._seen = max(self._seen, word.promised)
        if self.role is ElectionRole.LEADING and word.promised > self.term:
            self._follow(None, "a member that left had voted in a later term")

    # --- asking ---

    def wait_turn(self, senior: int, now: float) -> None:
        """The leader is lost: plan a campaign after those of the ``senior`` more senior members."""
        share = senior + (0.5 * self._jitter() if senior else 0.0)
        due = max(self._rest_until, now + share * self._timeout)
        self.not_before = due if self.not_before is None else min(due, self.not_before)

    def pre_vote(self, now: float, reason: str) -> PreVote:
        """Ask whether a campaign would succeed.  No term rises by this."""
        self.role, self.reason, self.not_before = ElectionRole.CANVASSING, reason, None
        self._attempts += 1
        self.asked = max(self._seen, self.term, self.ballot.promised) + 1
        self._count = _Count({self.me: frozenset()})
        self.until = now + self._timeout * (1 + 0.5 * self._jitter())
        if self._attempts == 1:
            self._event(ElectionKind.STARTED, f"an election starts: {reason}")
        return self.canvass_again()

    def canvass_again(self) -> PreVote:
        """The question once more, for a member that may have changed its mind."""
        return PreVote(self.view.lineage, self.view.epoch, self.asked)

    def campaign(self, now: float) -> VoteRequest:
        """Raise the term, vote for ourselves and ask for votes."""
        self.role, self.term, self.leader = ElectionRole.CAMPAIGNING, self.asked, None
        self.ballot.vote(self.me, self.asked)
        self._count = _Count({self.me: frozenset()})
        self._count.report(self.ballot.accepted_term, self.ballot.accepted)
        self.until = now + self._timeout * (1 + 0.5 * self._jitter())
        return VoteRequest(self.view.lineage, self.view.epoch, self.asked)

    def lead(self) -> None:
        """We have a quorum of votes: the term is ours."""
        for word in self.departed.values():
            if word.promised <= self.asked:
                self._count.report(word.accepted_term, word.accepted)
        self.role, self.leader, self.until = ElectionRole.LEADING, self.me, None
        self.reason = f"{len(self._count.voters)} of {len(self.view.members)} members voted for us"
        self._event(ElectionKind.ELECTED, f"this process leads: {self.reason}")

    def give_up(self, now: float) -> None:
        """The attempt had no quorum in time; try again later."""
        leader = self.leader if self.role is ElectionRole.CANVASSING else None
        self.role, self.leader, self.until = ElectionRole.FOLLOWING, leader, None
        self.reason = "no quorum voted for us in time"
        self._rest_until = now + self._timeout * (0.5 + self._jitter())
        if self._attempts == 1:
            self._event(ElectionKind.TIMEOUT, f"no leader was elected: {self.reason}")

    def encourage(self) -> None:
        """A quorum is in contact again: attempts that had none before say nothing any more."""
        self._attempts, self._rest_until, self.not_before = 0, float("-inf"), None
        if self.role is ElectionRole.CANVASSING:
            self._follow(self.leader, "a quorum is in contact again")

    def resume_following(self) -> None:
        """The leader is there after all: our pre-vote has changed nothing."""
        self._follow(self.leader, "the leader is heard again")

    def has_won(self, proofs: AbstractSet[ProcessId]) -> bool:
        """Whether the attempt has a quorum; ``proofs`` are those we hold ourselves."""
        voters = self._count.voters
        gone = set(proofs).union(*voters.values())
        words = {w: word for w, word in self.departed.items() if not word.is_followed}
        gone |= {who for who, word in words.items() if word.promised < self.asked}
        return has_quorum(self.view.members, voters.keys() - self.elsewhere, gone)

    # --- answering ---

    def answer_pre_vote(
        self, sender: ProcessId, message: PreVote, *, refusal: str, proofs: AbstractSet[ProcessId]
    ) -> PreVoteReply:
        """Say whether we would vote; ``refusal`` is why not, e.g. that we hear the leader."""
        promised = self.ballot.promised
        if message.term <= promised and not (
            message.term == promised and self.ballot.voted_for == sender
        ):
            refusal = refusal or f"a vote was already given in term {promised}"
        return PreVoteReply(
            message.lineage,
            message.epoch,
            message.term,
            not refusal,
            promised,
            tuple(sorted(proofs)),
            refusal,
        )

    def answer_vote_request(
        self, sender: ProcessId, message: VoteRequest, proofs: AbstractSet[ProcessId]
    ) -> Vote:
        """Vote, at most once per term, and report what was accepted."""
        granted = self.ballot.vote(sender, message.term)
        if granted and (self.term, self.leader) != (message.term, sender):
            self.term = message.term
            self._follow(sender, f"we voted for {sender}")
        return Vote(
            message.lineage,
            message.epoch,
            message.term,
            granted,
            self.ballot.promised,
            self.ballot.accepted_term,
            self.ballot.accepted,
            tuple(sorted(proofs)),
        )

    def follow_proposer(self, sender: ProcessId, term: int) -> None:
        """A proposal came from the leader of a term."""
        if self.leader != sender or self.term != term:
            self.term = term
            self._follow(sender, f"{sender} was elected")
            self._event(ElectionKind.NEW_LEADER, f"{sender} leads: it was elected")

    def take_leaning(self, sender: ProcessId, message: PreVoteReply) -> None:
        """Count an answer to our pre-vote."""
        self._seen = max(self._seen, message.promised)
        if self.role is ElectionRole.CANVASSING and message.term == self.asked:
            if message.is_granted:
                self._count.voters[sender] = frozenset(message.proofs)
            else:
                self._count.voters.pop(sender, None)

    def take_vote(self, sender: ProcessId, message: Vote) -> None:
        """Count a vote."""
        self._seen = max(self._seen, message.promised)
        current = self.role is ElectionRole.CAMPAIGNING and message.term == self.asked
        if current and message.is_granted:
            self._count.voters[sender] = frozenset(message.proofs)
            self._count.report(message.accepted_term, message.accepted)

    def has_answered(self, member: ProcessId) -> bool:
        """Whether a member said yes in the present attempt."""
        return member in self._count.voters

    def preempted(self, promised: int, reason: str) -> None:
        """A member refused because of a later term: our own is over."""
        self._seen = max(self._seen, promised)
        if promised > self.term:
            self._follow(None, reason)

    def split_brain(self, sentence: str) -> None:
        """Report what must not happen."""
        self._event(ElectionKind.SPLIT_BRAIN, sentence)

    def stepped_down(self, sentence: str) -> None:
        """Report that we hand over."""
        self._event(ElectionKind.STEPPED_DOWN, sentence)

    def _follow(self, leader: ProcessId | None, reason: str) -> None:
        self.role, self.leader, self.reason = ElectionRole.FOLLOWING, leader, reason
        self.until = self.not_before = None
        if leader is not None:
            self._attempts = 0

    def _event(self, kind: ElectionKind, sentence: str) -> None:
        self.events.append(ElectionEvent(kind, self.view.epoch, self.term, self.leader, sentence))

    @property
    def _timeout(self) -> float:
        """How long an attempt waits for answers; each failed one makes the next longer."""
        doubled: int = 2 ** min(max(0, self._attempts - _QUICK_ATTEMPTS), _MOST_DOUBLED)
        return (self.config.election_timeout + self.slack) * doubled

    def _jitter(self) -> float:
        """From 0 to 1, different for every process and attempt, the same in every replay."""
        text = f"{self.me.node}/{self.me.incarnation} {self.view.epoch} {self._attempts}"
        return hashlib.sha256(text.encode()).digest()[0] / 256
