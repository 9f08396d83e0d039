"""What the members of a cluster say to each other on the control lane: typed and bounded.

::

    everybody   Heartbeat      who I am with, whom I hear, and which of your beats I heard last
                Acquaintances  cards of those I am connected to, for a process that has just come
                Lost           a member of our view is gone for me: end what you are doing
                Departed       I am out of this lineage for good; this is what I had accepted
                Relayed        one of the following, between two members that do not hear each other
    election    Canvass → Leaning      would you vote for me?  (pre-vote: changes nothing)
                VoteRequest → Vote     one vote per term, with what was accepted before
    change      Propose → Accepted     the next view, in the term of its leader
                Commit                 the next view is agreed
    founding    Found → Founded        begin a lineage; all founders must agree
    merging     MergeRequest → MergeAnswer    may we dissolve into you?

Every message of a lineage names (lineage, epoch): the view whose members decide on the next one.
Terms count within an epoch; term 0 belongs to the first member of the view without a vote.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Annotated, TypeAlias

import msgspec

from potluck.core.cluster_bounds import (
    MAX_CONTACTS,
    MAX_MEMBERS,
    MAX_MESSAGE,
    Ancestry,
    Count,
    Lineage,
    Mark,
    Marks,
    Members,
    Message,
    Seconds,
    Sentence,
    Term,
    clip,
)
from potluck.core.cluster_cards import ProcessCard
from potluck.core.election_messages import (
    Accepted,
    Canvass,
    Cause,
    CauseCode,
    Charter,
    Commit,
    Leaning,
    Proposal,
    Propose,
    Vote,
    VoteRequest,
)
from potluck.decoding import Reader, msgpack_reader
from potluck.errors import MalformedFrame
from potluck.vocabulary import ProcessId

__all__ = [
    "MAX_CONTACTS",
    "MAX_MEMBERS",
    "RELAYABLE",
    "Accepted",
    "Acquaintances",
    "Canvass",
    "Cause",
    "CauseCode",
    "Charter",
    "ClusterMessage",
    "Commit",
    "Departed",
    "Found",
    "Founded",
    "Heartbeat",
    "Leaning",
    "Lost",
    "MergeAnswer",
    "MergeRequest",
    "Phase",
    "Proposal",
    "Propose",
    "Relayed",
    "Vote",
    "VoteRequest",
    "clip",
    "decode",
    "encode",
]


class Phase(IntEnum):
    """Where a process stands, as its heartbeats say."""

    WAITING = 0
    """Without a view, and not ready for one yet."""
    JOINING = 1
    """Without a view, and willing to enter one."""
    ACTIVE = 2
    PAUSED = 3
    OBSERVING = 4


class Heartbeat(Message, frozen=True, tag="heartbeat"):
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
    """Whether that one said goodbye."""
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


class Acquaintances(Message, frozen=True, tag="acquaintances"):
    """Cards of processes that the sender is connected to now."""

    cards: Annotated[tuple[ProcessCard, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Lost(Message, frozen=True, tag="lost"):
    """The sender has lost a member of the view."""

    lineage: Lineage
    epoch: Count
    who: ProcessId
    reason: Sentence
    is_proved: bool = False
    """Whether the sender holds a proof of its death."""
    is_expelled: bool = False
    """Whether the sender has removed it for what it sent; ``reason`` then says what that was."""


class Departed(Message, frozen=True, tag="departed"):
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


class Found(Message, frozen=True, tag="found"):
    """Let us begin this lineage."""

    lineage: Lineage
    proposal: Proposal
    charter: Charter = Charter()
    is_forced: bool = False
    """Whether a person asked for it: then nobody is waited for."""


class Founded(Message, frozen=True, tag="founded"):
    """The answer to a founding."""

    lineage: Lineage
    is_agreed: bool
    reason: Sentence = ""


class MergeRequest(Message, frozen=True, tag="merge"):
    """The leader of ``lineage`` asks the leader of ``into`` to reserve a merge."""

    lineage: Lineage
    epoch: Count
    into: Lineage
    ancestry: Ancestry = ()
    """Of the lineage that asks, as are the next two."""
    samples: Count = 0
    members: Count = 0


class MergeAnswer(Message, frozen=True, tag="reserved"):
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


class Relayed(Message, frozen=True, tag="relayed"):
    """A message of ``origin`` for ``to``, by way of a member that hears both."""

    origin: ProcessId
    to: ProcessId
    content: Annotated[bytes, msgspec.Meta(max_length=MAX_MESSAGE)]


ClusterMessage: TypeAlias = (
    Heartbeat
    | Acquaintances
    | Lost
    | Departed
    | Canvass
    | Leaning
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

RELAYABLE = Canvass, Leaning, VoteRequest, Vote, Propose, Accepted, Commit, Departed, Lost
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

    >>> decode(encode(Canvass("f" * 32, 3, 1)))
    Canvass(lineage='ffffffffffffffffffffffffffffffff', epoch=3, term=1)
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
