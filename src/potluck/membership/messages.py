"""What the members of a cluster say to each other on the control connection: typed and bounded.

::

    everybody   Heartbeat      who I am with, whom I hear, and which of your beats I heard last
                KnownProcesses  cards of those I am connected to, for a process that has just come
                Lost           a member of our view is gone for me: end what you are doing
                Departed       I am out of this lineage for good; this is what I had accepted
                Relayed        one of the following, between two members that do not hear each other
    election    PreVote → PreVoteReply      would you vote for me?  (pre-vote: changes nothing)
                VoteRequest → Vote     one vote per term, with what was accepted before
    change      Propose → Accepted     the next view, in the term of its leader
                Commit                 the next view is agreed
    founding    Found → Founded        begin a lineage; all founders must agree
    merging     MergeRequest → MergeAnswer    may we dissolve into you?

Every message of a lineage names (lineage, epoch): the view whose members decide on the next one.
Terms count within an epoch; term 0 belongs to the first member of the view without a vote.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Annotated, Literal, TypeAlias

import msgspec

from potluck._decode import Reader, msgpack_reader
from potluck._types import Branch, NodeId, ProcessId, View
from potluck._version import Build
from potluck.errors import MalformedFrame
from potluck.trust.roster_records import NAME_LIMIT

# --------------------------------------------------------------------------------------------------
# Where a lineage comes from, and which of two lineages wins when they meet.
#
# A lineage is a sequence of views.  A *child* lineage begins at one view of its parent.  Its
# *ancestry* lists every such point, oldest first: the pairs (lineage, last epoch followed).
#   Ancestry
# decides before anything else: of two lineages with a common ancestor, the one that followed that
# ancestor to the later epoch wins, however many steps the other one made.

MAX_BRANCHES = 32
"""Branches that an ancestry keeps; of a longer one the newest."""


def branch_off(ancestry: tuple[Branch, ...], lineage: str, epoch: int) -> tuple[Branch, ...]:
    """The ancestry of a child that begins at an epoch of a lineage with this ancestry.

    >>> branch_off((Branch("a", 4),), "b", 2)
    (Branch(lineage='a', epoch=4), Branch(lineage='b', epoch=2))
    """
    return (*ancestry, Branch(lineage, epoch))[-MAX_BRANCHES:]


def compare(one: tuple[Branch, ...], other: tuple[Branch, ...]) -> int:
    """Which of two followed their nearest common ancestor further: 1, -1, or 0 if neither did.

    Each is an ancestry that ends with the lineage itself and its present epoch.  An ancestor that
    is still alive counts before a child that left it in the same epoch.

    >>> parent, early = (Branch("a", 5),), (Branch("a", 3), Branch("b", 90))
    >>> compare(parent, early), compare(early, parent)
    (1, -1)
    >>> compare(early, (Branch("a", 3), Branch("c", 2))), compare(parent, (Branch("d", 1),))
    (0, 0)
    """
    theirs = {branch.lineage: branch for branch in other}
    for mine in reversed(one):
        if mine.lineage in theirs:
            left = theirs[mine.lineage]
            here, there = (mine.epoch, mine is one[-1]), (left.epoch, left is other[-1])
            return (here > there) - (here < there)
    return 0


@dataclass(frozen=True, slots=True)
class Claim:
    """What decides which of two lineages stays."""

    branches: tuple[Branch, ...]
    """Its ancestry, and at the end the lineage itself with its present epoch."""
    samples: int = 0
    """Committed training samples."""
    members: int = 0

    @property
    def lineage(self) -> str:
        """Which lineage this is about."""
        return self.branches[-1].lineage


def outranks(one: Claim, other: Claim) -> bool:
    """Whether the first of two lineages stays: by ancestry, samples, members, then the lower id.

    >>> parent = Claim((Branch("a", 5),), samples=10, members=3)
    >>> child = Claim((Branch("a", 3), Branch("b", 90)), samples=99, members=4)
    >>> outranks(parent, child), outranks(child, parent)
    (True, False)
    >>> outranks(Claim((Branch("c", 1),), samples=1), Claim((Branch("d", 1),), samples=2))
    False
    """
    order = compare(one.branches, other.branches)
    mine, theirs = (order, one.samples, one.members), (0, other.samples, other.members)
    return mine > theirs or (mine == theirs and one.lineage < other.lineage)


# --------------------------------------------------------------------------------------------------
# What the messages of a cluster are made of: bounds, and the types that keep them.

MAX_MEMBERS = 256
"""Members of a view at most."""

MAX_CONTACTS = 512
"""Processes that a process is connected to at one time, at most."""

MAX_MESSAGE = 60 << 10
"""Bytes of an encoded message at most."""

SENTENCE_LIMIT = 1000  # characters

Lineage = Annotated[str, msgspec.Meta(max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Term = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
Mark = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Marks = Annotated[tuple[Mark, ...], msgspec.Meta(max_length=MAX_CONTACTS)]
Sentence = Annotated[str, msgspec.Meta(max_length=SENTENCE_LIMIT)]
Label = Annotated[str, msgspec.Meta(max_length=255)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
Ancestry = Annotated[tuple[Branch, ...], msgspec.Meta(max_length=MAX_BRANCHES)]
Members = Annotated[tuple[ProcessId, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class MembershipMessage(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Positional on the wire: heartbeats are frequent."""


def clip(sentence: str, limit: int = SENTENCE_LIMIT) -> str:
    """A sentence short enough to travel."""
    return sentence if len(sentence) <= limit else sentence[: limit - 1] + "…"


# --------------------------------------------------------------------------------------------------
# What members say to each other to agree on the next view: the messages of one Paxos instance.
#
# Each names (lineage, epoch), the view whose members decide.  Terms count within an epoch.


class CauseCode(Enum):
    """Why a member of the last view is not in the next one."""

    ENDED = "ended"
    """Its process has ended without saying so: killed, crashed, restarted."""
    LEFT = "left"
    """Its script ended, or called ``leave``."""
    SILENT = "silent"
    """Nothing was heard from it for too long: asleep, unplugged, stopped, cut off."""
    UNREACHABLE = "unreachable"
    """It is alive, but some members that stay cannot reach it."""
    MISBEHAVED = "misbehaved"
    """It sent a member something that no correct process sends, and was removed for that."""


class Cause(MembershipMessage, frozen=True):
    """Why one member of the last view is not in the next one, as the proposer decided."""

    who: ProcessId
    code: CauseCode
    name: Label = ""
    """What people call its machine."""
    host: Label = ""
    """Its address."""
    silent_for: Seconds = 0.0
    """Seconds since the proposer last heard from it."""
    reason: Sentence = ""
    """What was seen, in words: which link, which port."""


class Charter(MembershipMessage, frozen=True):
    """What is fixed for a lineage when it is founded."""

    quorum: Literal["majority", "any"] = "majority"
    ancestry: Ancestry = ()
    """Where it branched off, oldest first; empty if free processes founded it."""
    origin: Ancestry = ()
    """Where the checkpoint came from with which its first ancestor began, oldest first."""


class Proposal(MembershipMessage, frozen=True):
    """What the members of a view are to agree on: who is in the next one."""

    members: Members
    reason: Sentence = ""
    into: Lineage = ""
    """The lineage into which this one dissolves with this view; empty for all others."""
    into_epoch: Count = 0
    into_members: Members = ()
    """The newest view known of that lineage: its members take ours in."""
    causes: Annotated[tuple[Cause, ...], msgspec.Meta(max_length=MAX_MEMBERS)] = ()
    """Why members of the last view are not in this one."""
    interval: Seconds = 0.0
    """Seconds between heartbeats in this view; 0 for the preset."""
    pause_after: Seconds = 0.0
    """Seconds without contact after which a member of this view pauses; 0 for the preset."""
    into_charter: Charter | None = None
    """Of the lineage into which this one dissolves."""


class PreVote(MembershipMessage, frozen=True, tag="canvass"):
    """Would you vote for me in this term?  Nothing changes by the answer."""

    lineage: Lineage
    epoch: Count
    term: Count


class PreVoteReply(MembershipMessage, frozen=True, tag="leaning"):
    """The answer to a pre-vote."""

    lineage: Lineage
    epoch: Count
    term: Count
    is_granted: bool
    promised: Count
    proofs: Members
    """Members whose death the sender can prove."""
    reason: Sentence = ""


class VoteRequest(MembershipMessage, frozen=True, tag="request"):
    """Vote for me in this term."""

    lineage: Lineage
    epoch: Count
    term: Count


class Vote(MembershipMessage, frozen=True, tag="vote"):
    """The answer to a vote request; reports any proposal accepted earlier in this epoch."""

    lineage: Lineage
    epoch: Count
    term: Count
    is_granted: bool
    promised: Count
    accepted_term: Term
    accepted: Proposal | None
    proofs: Members


class Propose(MembershipMessage, frozen=True, tag="propose"):
    """The leader of a term asks to accept the next view."""

    lineage: Lineage
    epoch: Count
    term: Count
    proposal: Proposal


class Accepted(MembershipMessage, frozen=True, tag="accepted"):
    """The answer to a proposal."""

    lineage: Lineage
    epoch: Count
    term: Count
    is_accepted: bool
    promised: Count
    proofs: Members
    silent: Members
    """Members that the sender has not heard for so long that they have paused themselves, or that
    have departed."""


class Commit(MembershipMessage, frozen=True, tag="commit"):
    """A view is agreed: ``proposal`` is view ``epoch`` of the lineage."""

    lineage: Lineage
    epoch: Count
    proposal: Proposal
    charter: Charter = Charter()

    @property
    def view(self) -> View:
        """The view it installs."""
        return View(self.lineage, self.epoch, self.proposal.members, self.charter.ancestry)


# --------------------------------------------------------------------------------------------------
# The card of a process: what it says about itself when it opens a control connection.
#
# A card travels in the first message of a control connection and is passed on among acquaintances,
# so it is typed and bounded.  The node id in it is proved by the connection; the rest is the word
# of an authenticated member.

MAX_HOSTS = 16
_HOST_LIMIT = 255  # characters, as long as a host name may be

_Node = Annotated[NodeId, msgspec.Meta(min_length=1, max_length=64)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
_Tag = Annotated[str, msgspec.Meta(max_length=64)]
_Version = Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
_Host = Annotated[str, msgspec.Meta(min_length=1, max_length=_HOST_LIMIT)]
_Seconds = Annotated[float, msgspec.Meta(gt=0, le=3600)]


class ProcessRole(Enum):
    """What a process is there for."""

    MEMBER = "member"
    OBSERVER = "observer"
    """Looks on; never counted, never a member."""


class ProcessInfo(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """Who a process is and where it can be reached.

    >>> card = ProcessInfo(node=NodeId("a" * 32), incarnation=7, name="attic")
    >>> card.process, str(card)
    (ProcessId(node='aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa', incarnation=7), 'attic')
    """

    node: _Node
    incarnation: _Count
    slot: _Count = 0
    """Its place among the processes of its machine, its own while it lives."""
    machine: _Tag = ""
    """Which machine it runs on; two machines never show the same."""
    boot: _Tag = ""
    """The same until that machine's next reboot; empty where that is not known."""
    name: Annotated[str, msgspec.Meta(max_length=NAME_LIMIT)] = ""
    """The machine's name, for people."""
    hosts: Annotated[tuple[_Host, ...], msgspec.Meta(max_length=MAX_HOSTS)] = ()
    """Its addresses, best first."""
    port: Annotated[int, msgspec.Meta(ge=0, le=65535)] = 0
    role: ProcessRole = ProcessRole.MEMBER
    schema: _Tag = ""
    """Names the shape of the state it trains; only equal ones become one cluster."""
    pause_after: _Seconds = 1.0
    """Seconds without contact after which it pauses itself; see ``HealthConfig.pause_after``."""
    quorum: Literal["majority", "any"] = "majority"
    """Its setting; only processes with the same one become one cluster."""
    place: Annotated[int, msgspec.Meta(ge=-1, lt=1 << 20)] = -1
    """The rank that a launcher wishes for it in the first view; -1 where none has a wish."""
    versions: tuple[_Tag, _Version, _Version] = "", 1, 1
    """Of Potluck, and the newest and the oldest of the protocol; see :attr:`build`."""

    @property
    def process(self) -> ProcessId:
        """Its id."""
        return ProcessId(self.node, self.incarnation)

    @property
    def build(self) -> Build:
        """What it runs; what came into the protocol later is not said to it."""
        return Build(*self.versions)

    def succeeds(self, other: ProcessInfo) -> bool:
        """Whether this is a later start in the same place, so that the other must have ended."""
        return (
            self.node == other.node
            and self.machine == other.machine
            and self.slot == other.slot
            and self.incarnation > other.incarnation
        )

    def __str__(self) -> str:
        """What people call it, for sentences; without a name its short id."""
        return self.name or str(self.process)


def mark(process: ProcessId) -> int:
    """A process id in 63 bits, for lists in heartbeats; equal marks mean equal ids in practice.

    >>> mark(ProcessId(NodeId("a" * 32), 7))
    2424896524347195162
    """
    digest = hashlib.sha256(f"{process.node}/{process.incarnation}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


# --------------------------------------------------------------------------------------------------


class Phase(IntEnum):
    """Where a process stands, as its heartbeats say."""

    WAITING = 0
    """Without a view, and not ready for one yet."""
    JOINING = 1
    """Without a view, and willing to enter one."""
    ACTIVE = 2
    PAUSED = 3
    OBSERVING = 4


class Heartbeat(MembershipMessage, frozen=True, tag="heartbeat"):
    """Sent to every connected process at every beat, and at once when something changes."""

    sequence: Count
    echo: Count
    """The sequence of the newest heartbeat of yours that I have heard; 0 for none."""
    held: Seconds
    """How long ago I heard it."""
    phase: Phase
    hears: Marks
    """Marks of all processes that I hear."""
    samples: Count = 0
    """Committed training samples in my state."""
    lineage: Lineage = ""
    epoch: Count = 0
    view: Mark = 0
    """Identifies my view, to notice two of one number."""
    size: Count = 0
    """Members of my view."""
    leader: ProcessId | None = None
    term: Count = 0
    aborted: bool = False
    """Operations of this view have been aborted: it needs a successor."""
    lost: ProcessId | None = None
    """Whose loss they were aborted for, so that all of them end with the same error."""
    orderly: bool = False
    """Whether that one left in an orderly way."""
    wants: Count = 1
    """While I am free, I found no cluster with fewer processes."""
    withholds: bool = False
    """Do not rely on me: I have accepted a next view that you have not, or do not know whether you
    hear me."""
    accepted: Mark = 0
    """The next view that I have accepted; 0 for none."""
    bound: Lineage = ""
    """The lineage that I belong to, in a view of it or waiting for one; empty if I am free."""
    bound_epoch: Count = 0
    """The newest epoch of it that I know."""
    ended: Marks = ()
    """Marks of members of that view that I know to have ended, while I am not at work."""
    ancestry: Ancestry = ()
    """Of my lineage; said by leaders to those who are not in their view."""
    lateness: Seconds = 0.0
    """How late my own loop ran recently."""
    pause_after: Seconds = 0.0
    """The longest time without contact that I have announced to pause after; 0 for the preset."""


class KnownProcesses(MembershipMessage, frozen=True, tag="acquaintances"):
    """Cards of processes that the sender is connected to now."""

    cards: Annotated[tuple[ProcessInfo, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Lost(MembershipMessage, frozen=True, tag="lost"):
    """The sender has lost a member of the view."""

    lineage: Lineage
    epoch: Count
    who: ProcessId
    reason: Sentence
    is_proved: bool = False
    """Whether the sender holds a proof of its death."""
    is_expelled: bool = False
    """Whether the sender has removed it for what it sent; ``reason`` then says what that was."""


class Departed(MembershipMessage, frozen=True, tag="departed"):
    """The sender takes no part in the lineage any more, and this is its last word in it."""

    lineage: Lineage
    epoch: Count
    promised: Term
    """The highest term it had promised to anybody; -1 if it never entered the view."""
    accepted_term: Term
    accepted: Proposal | None
    reason: Sentence
    is_leaving: bool = False
    """Whether the process ends, so that it will not be back."""
    is_followed: bool = False
    """Whether it continues in a descendant of the lineage, where those it left can follow it."""


class Found(MembershipMessage, frozen=True, tag="found"):
    """Let us begin this lineage."""

    lineage: Lineage
    proposal: Proposal
    charter: Charter = Charter()
    is_forced: bool = False
    """Whether a person asked for it: then no process is waited for."""


class Founded(MembershipMessage, frozen=True, tag="founded"):
    """The answer to a founding."""

    lineage: Lineage
    is_agreed: bool
    reason: Sentence = ""


class MergeRequest(MembershipMessage, frozen=True, tag="merge"):
    """The leader of ``lineage`` asks the leader of ``into`` to reserve a merge."""

    lineage: Lineage
    epoch: Count
    into: Lineage
    ancestry: Ancestry = ()
    """Of the lineage that asks, as are the next two."""
    samples: Count = 0
    members: Count = 0


class MergeAnswer(MembershipMessage, frozen=True, tag="reserved"):
    """The answer; ``members`` are those to whom all of the asking lineage need links."""

    lineage: Lineage
    epoch: Count
    into: Lineage
    is_reserved: bool
    members: Members
    reason: Sentence = ""
    into_epoch: Count = 0
    charter: Charter = Charter()
    """Of the lineage that answers."""


class Relayed(MembershipMessage, frozen=True, tag="relayed"):
    """A message of ``origin`` for ``to``, by way of a member that hears both."""

    origin: ProcessId
    to: ProcessId
    content: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE)]


ClusterMessage: TypeAlias = (
    Heartbeat
    | KnownProcesses
    | Lost
    | Departed
    | PreVote
    | PreVoteReply
    | VoteRequest
    | Vote
    | Propose
    | Accepted
    | Commit
    | Found
    | Founded
    | MergeRequest
    | MergeAnswer
    | Relayed
)

RELAYABLE = PreVote, PreVoteReply, VoteRequest, Vote, Propose, Accepted, Commit, Departed, Lost
"""What members that do not hear each other may say by way of a third."""

_encoder = msgspec.msgpack.Encoder()
_decoder: Reader[ClusterMessage] = msgpack_reader(ClusterMessage)


def encode(message: ClusterMessage) -> bytes:
    """A message as bytes."""
    data = _encoder.encode(message)
    if len(data) > MAX_MESSAGE:
        kind = type(message).__name__
        raise MalformedFrame(
            f"A {kind} of {len(data)} bytes is too long to send: {MAX_MESSAGE} is the limit",
            expected=MAX_MESSAGE,
            got=len(data),
        )
    return data


def decode(data: bytes | bytearray | memoryview) -> ClusterMessage:
    """A message from bytes that an authenticated peer sent; :class:`MalformedFrame` if it is odd.

    >>> decode(encode(PreVote("f" * 32, 3, 1)))
    PreVote(lineage='ffffffffffffffffffffffffffffffff', epoch=3, term=1)
    """
    if len(data) > MAX_MESSAGE:
        raise MalformedFrame(
            f"A cluster message of {len(data)} bytes: {MAX_MESSAGE} is the limit",
            expected=MAX_MESSAGE,
            got=len(data),
        )
    try:
        return _decoder.decode(data)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise MalformedFrame(f"This is not a cluster message: {error}") from None
