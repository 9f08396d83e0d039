"""What the parts of a cluster core share: the table they sit around, and the way out.

The parts change it in turn, within one call of the core; nothing here decides.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from typing import Literal, TypeVar

import msgspec

from potluck._types import Branch, ProcessId, View
from potluck.membership.election import ElectionManager
from potluck.membership.events import (
    Abort,
    ClusterConfig,
    ClusterState,
    Effect,
    MembershipChange,
    MembershipEvent,
    Note,
    SendMessage,
)
from potluck.membership.health import (
    LENGTHENED,
    HealthMonitor,
    HealthStatus,
    TokenBucket,
    lengthened,
    pace,
)
from potluck.membership.messages import (
    MAX_BRANCHES,
    MAX_CONTACTS,
    RELAYABLE,
    Cause,
    CauseCode,
    Charter,
    Claim,
    ClusterMessage,
    Commit,
    Departed,
    Heartbeat,
    Lost,
    Phase,
    ProcessInfo,
    ProcessRole,
    Proposal,
    Relayed,
    clip,
    encode,
    mark,
)

# --------------------------------------------------------------------------------------------------
# Whom this process is in contact with, and for how long it may rely on that.
#
# A heartbeat says which of ours the sender heard last.  So we know not only that we hear a process,
# but since when at the latest *they* cannot have counted us as silent: from the moment at which we
# sent the beat that they have heard.  Promises between members hang on that moment, and on nothing
# about how long messages travel.  Each beat announces for how long its sender relies on an answer
# to it before it pauses, and a process that heard it waits for twice that before excluding the
# sender.

_BEATS_KEPT = 256  # sent beats whose time is remembered; more than a minute of them
_CARDS_KEPT = 1024  # of processes that were here
_NEVER = float("-inf")
LONGEST_ANNOUNCED = 3600.0  # seconds, as on cards


@dataclass(slots=True)
class Contact:
    """What is known of one process.  Times are those of :class:`SteadyTime`."""

    card: ProcessInfo
    process: ProcessId
    mark: int
    is_connected: bool = False
    beat: Heartbeat | None = None
    """The newest heartbeat of it; None until one came on the present connection."""
    beat_at: float = _NEVER
    newest: int = 0
    """The sequence of the newest heartbeat of it ever heard."""
    echoed_at: float = _NEVER
    """When we sent the newest of our beats that it has heard."""
    echoed_for: float = 0.0
    """The pause that this beat announced."""
    leased_at: float = _NEVER
    """When we sent the newest of our beats that it has heard and confirmed while it held to us: it
    cannot have written us off before twice the announced pause after that."""
    leased_for: float = 0.0
    """The pause that this beat announced: so long the lease lasts."""
    announced: float = 0.0
    """The pause that its newest heartbeat announced; 0 if none came."""
    relied_until: float = _NEVER
    """Twice the announced pause after the last of its beats that we confirmed without doubts.

    Until then it may be at work because of us, or its death may be a proof to us."""
    hears: frozenset[int] = frozenset()
    helped_at: float = _NEVER
    """When we last told it of a view that it should know."""

    @property
    def is_member(self) -> bool:
        """Whether it came to take part."""
        return self.card.role is ProcessRole.MEMBER


@dataclass(slots=True)
class Contacts:
    """The table of all contacts, and the times at which our beats were sent."""

    me: ProcessInfo
    health: HealthMonitor
    sequence: int = 0
    _table: dict[ProcessId, Contact] = field(default_factory=dict)
    _cards: dict[ProcessId, ProcessInfo] = field(default_factory=dict)
    _sent: dict[int, tuple[float, float]] = field(default_factory=dict)
    _id: ProcessId = field(init=False)
    _mark: int = field(init=False)

    def __post_init__(self) -> None:
        """Compute our own id and mark once."""
        self._id = self.me.process
        self._mark = mark(self._id)

    def __iter__(self) -> Iterator[Contact]:
        return iter(self._table.values())

    def __len__(self) -> int:
        return len(self._table)

    def get(self, process: ProcessId) -> Contact | None:
        """What is known of a process."""
        return self._table.get(process)

    def of(self, process: ProcessId) -> Contact:
        """What is known of a process that is connected or a member of our view."""
        return self._table[process]

    @property
    def is_full(self) -> bool:
        """Whether no other process can be taken in."""
        return len(self._table) >= MAX_CONTACTS

    def connect(self, card: ProcessInfo, now: float) -> Contact:
        """A connection is open."""
        contact = self.know(card, now)
        contact.card = card
        contact.is_connected = True
        return contact

    def know(self, card: ProcessInfo, now: float) -> Contact:
        """Keep a contact of a process, connected or not."""
        contact = self._table.get(card.process)
        if contact is None:
            process = card.process
            contact = self._table[process] = Contact(card, process, mark(process))
            self.health.watch(process, now, name=str(card))
        return contact

    def disconnect(self, contact: Contact, cause: str, now: float) -> None:
        """The last connection to it ended."""
        contact.is_connected = False
        contact.beat = None
        contact.hears = frozenset()
        self.health.lost(contact.process, now, cause)

    def forget(self, process: ProcessId) -> None:
        """Keep nothing of a process but its card, for a while."""
        contact = self._table.pop(process, None)
        self.health.forget(process)
        if contact is not None:
            self.remember(contact.card)

    def remember(self, card: ProcessInfo) -> None:
        """Keep a card for when its process becomes a member of a view that we know of."""
        self._cards.pop(card.process, None)
        self._cards[card.process] = card
        if len(self._cards) > _CARDS_KEPT:
            del self._cards[next(iter(self._cards))]

    def last_card(self, process: ProcessId) -> ProcessInfo:
        """The card of a process that was here before; one that says nothing if it was not."""
        stub = ProcessInfo(node=process.node, incarnation=process.incarnation)
        return self._cards.get(process, stub)

    # --- beats ---

    def number_beat(self, time: float, pause: float) -> int:
        """The sequence of a round of heartbeats sent now, which announce this pause."""
        self.sequence += 1
        self._sent[self.sequence] = time, pause
        self._sent.pop(self.sequence - _BEATS_KEPT, None)
        return self.sequence

    def heard(
        self, contact: Contact, beat: Heartbeat, now: float, time: float, *, counts: bool
    ) -> bool:
        """Take in a heartbeat; whether it is newer than all before.

        It ``counts`` unless the sender has continued without us, or doubts us, or is about to.
        """
        sent, pause = self._sent.get(beat.echo, (None, 0.0))
        round_trip = None if sent is None else max(0.0, time - sent - beat.held)
        self.health.heard(contact.process, now, round_trip=round_trip, lateness=beat.lateness)
        if beat.sequence <= contact.newest:
            return False
        contact.newest = beat.sequence
        contact.beat, contact.beat_at = beat, time
        contact.hears = frozenset(beat.hears)
        if sent is not None and sent > contact.echoed_at:
            contact.echoed_at, contact.echoed_for = sent, pause
        if counts:
            contact.leased_at, contact.leased_for = contact.echoed_at, contact.echoed_for
        contact.announced = min(beat.pause_after, LONGEST_ANNOUNCED)
        return True

    def confirmed(self, contact: Contact, pause: float) -> None:
        """We are about to confirm its newest beat, on which it may rely for ``pause`` seconds."""
        contact.relied_until = max(contact.relied_until, contact.beat_at + 2 * pause)

    def write_off(self, contact: Contact) -> None:
        """It has continued without us: that it once heard us counts for nothing."""
        contact.leased_at = _NEVER

    def unhear(self, one: ProcessId, other: ProcessId) -> None:
        """One process says that it has lost another, before its next heartbeat does."""
        self._table[one].hears -= {self._mark_of(other)}

    # --- questions ---

    def is_heard(self, process: ProcessId) -> bool:
        """Whether it is connected and speaks to us in time."""
        contact = self._table.get(process)
        return (
            contact is not None
            and contact.is_connected
            and contact.beat is not None
            and self.health.is_operational(process)
        )

    def is_mutual(self, process: ProcessId) -> bool:
        """Whether we hear it and it says that it hears us."""
        contact = self._table.get(process)
        return contact is not None and self._mark in contact.hears and self.is_heard(process)

    def hears(self, one: ProcessId, other: ProcessId) -> bool:
        """Whether one process says that it hears the other; we count as one of them."""
        if one == self._id:
            return self.is_heard(other)
        contact = self._table.get(one)
        return contact is not None and self._mark_of(other) in contact.hears

    def links(self, processes: Sequence[ProcessId]) -> list[int]:
        """For each of these processes, in bits, which of them it hears and is heard by."""
        marks = [self._mark_of(process) for process in processes]
        if all(map(self._hears_all, processes, marks, repeat(frozenset(marks)))):
            everybody = (1 << len(processes)) - 1
            return [everybody & ~(1 << i) for i in range(len(processes))]
        bits = {mark: 1 << i for i, mark in enumerate(marks)}
        hears = [self._heard_bits(process, processes, bits) for process in processes]
        links = [0] * len(processes)
        for i, heard in enumerate(hears):
            for j in range(i):
                if heard >> j & 1 and hears[j] >> i & 1:
                    links[i] |= 1 << j
                    links[j] |= 1 << i
        return links

    def _hears_all(self, one: ProcessId, own: int, marks: frozenset[int]) -> bool:
        """Whether a process hears all of these but itself."""
        if one == self._id:
            return marks.issubset(self._heard_now(own))
        contact = self._table.get(one)
        return contact is not None and marks - contact.hears <= {own}

    def _heard_now(self, own: int) -> set[int]:
        """The marks of all that we hear, and ours."""
        heard = {contact.mark for contact in self if self.is_heard(contact.process)}
        heard.add(own)
        return heard

    def _heard_bits(
        self, one: ProcessId, processes: Sequence[ProcessId], bits: dict[int, int]
    ) -> int:
        if one == self._id:
            return sum(1 << i for i, other in enumerate(processes) if self.is_heard(other))
        contact = self._table.get(one)
        marks = frozenset[int]() if contact is None else contact.hears
        return sum(bits[mark] for mark in marks.intersection(bits))

    def _mark_of(self, process: ProcessId) -> int:
        contact = self._table.get(process)
        if contact is not None:
            return contact.mark
        return self._mark if process == self._id else mark(process)

    def heard_marks(self, but: Collection[ProcessId]) -> tuple[int, ...]:
        """The marks of all that we hear, but some, for our heartbeats."""
        members = [c for c in self._table.values() if c.is_member and c.process not in but]
        return tuple(sorted(c.mark for c in members if self.is_heard(c.process)))

    def joiners(self) -> list[Contact]:
        """Those without a view who would enter one, and hear us as we hear them."""
        return [
            contact
            for contact in self
            if contact.beat is not None
            and contact.beat.phase is Phase.JOINING
            and contact.is_member
            and contact.card.schema == self.me.schema
            and self.is_mutual(contact.process)
        ]


# --------------------------------------------------------------------------------------------------
# Time for promises that hang on it: it never goes back, whatever the caller's clock does.

_SHORTEST_WAIT = 0.0002  # seconds; rounding must not make the driver spin


class SteadyTime:
    """The caller's time, with steps back of its clock left out.

    >>> time = SteadyTime(100.0)
    >>> time.advance(101.5), time.advance(60.0), time.advance(61.0)
    (101.5, 101.5, 102.5)
    >>> time.on_the_wall(102.5), time.on_the_wall(103.0)
    (61.0, 61.5)
    """

    def __init__(self, now: float) -> None:
        self._wall = now
        self._shift = 0.0
        self.current = now

    def advance(self, now: float) -> float:
        """Advance to ``now``; the steady time."""
        if now < self._wall:
            self._shift += self._wall - now
        self._wall = now
        self.current = max(self.current, now + self._shift)
        return self.current

    def on_the_wall(self, time: float) -> float:
        """What the caller's clock will show at a steady time."""
        if time <= self.current:
            return self._wall
        return max(self._wall + _SHORTEST_WAIT, time - self._shift)


# --------------------------------------------------------------------------------------------------
# Lineages this process has been in: its last word in each, and the newest views known of each.
#
# A question about a lineage that we left gets the same answer for ever, so that no process
# counts on us there, and none stays behind in a view that has a successor.  Several views are kept,
# so that a process that missed some of them also learns what followed its own.

T = TypeVar("T")

_LIMIT = 64  # lineages; a process leaves one when it is removed, merged or cut off
_VIEWS = 16  # of one lineage


class LineageHistory:
    """Last words and newest views, by lineage; the oldest are dropped."""

    def __init__(self) -> None:
        self._words: dict[str, Departed] = {}
        self._commits: dict[str, tuple[Commit, ...]] = {}  # oldest first

    def depart(self, word: Departed) -> None:
        """We have left a lineage."""
        _put(self._words, word.lineage, word)

    def record(self, commit: Commit) -> None:
        """A view was agreed."""
        others = [c for c in self._commits.get(commit.lineage, ()) if c.epoch != commit.epoch]
        known = sorted([*others, commit], key=lambda each: each.epoch)
        _put(self._commits, commit.lineage, tuple(known[-_VIEWS:]))

    def last_word(self, lineage: str) -> Departed | None:
        """What we said when we left."""
        return self._words.get(lineage)

    def newest(self, lineage: str) -> Commit | None:
        """The newest view that we know."""
        known = self._commits.get(lineage)
        return known[-1] if known else None

    def following(self, lineage: str, epoch: int) -> tuple[Commit, ...]:
        """The views known that came after one, oldest first."""
        return tuple(c for c in self._commits.get(lineage, ()) if c.epoch > epoch)

    def successor(self, lineage: str, epoch: int) -> Commit | None:
        """Where a process that knows this view should go: a later one, or one of a child."""
        newest = self.newest(lineage)
        if newest is not None and newest.epoch > epoch:
            return newest
        for known in reversed(self._commits.values()):
            if known[-1].proposal.into == lineage:
                continue  # a child that has come back leads nowhere else
            branches = known[-1].charter.ancestry
            if any(each.lineage == lineage and each.epoch >= epoch for each in branches):
                return known[-1]
        return None

    def has_come_back(self, lineage: str, epoch: int) -> bool:
        """Whether we left this view for a child, and that has dissolved into the lineage again."""
        word = self._words.get(lineage)
        return (
            word is not None
            and word.epoch == epoch
            and any(known[-1].proposal.into == lineage for known in self._commits.values())
        )

    def followed(self, terminal: Commit) -> Commit:
        """Where a lineage that has ended in another one leads: the newest view known there."""
        commit = terminal
        for _ in range(_LIMIT):
            proposal = commit.proposal
            if not proposal.into:
                break
            charter = proposal.into_charter or commit.charter
            there = Proposal(proposal.into_members)
            told = Commit(proposal.into, proposal.into_epoch, there, charter)
            known = self.newest(proposal.into)
            commit = told if known is None or known.epoch < told.epoch else known
        return commit

    def is_closed(self, lineage: str, epoch: int) -> bool:
        """Whether we may not enter this view: we have left it or a later one, or know of one."""
        word, newest = self._words.get(lineage), self.newest(lineage)
        is_left = word is not None and epoch <= word.epoch
        return is_left or (newest is not None and epoch < newest.epoch)


def _put(table: dict[str, T], key: str, value: T) -> None:
    table.pop(key, None)
    table[key] = value
    while len(table) > _LIMIT:
        del table[next(iter(table))]


# --------------------------------------------------------------------------------------------------

_DETAILED = 16  # causes in full; of more, each has a name only, so that a message holds them
_REASON_LIMIT = 200  # characters of the reason of one cause; a view may have many
_EAGER = 0.1  # of an interval: so soon after a beat the next may follow when something changed
_EAGER_BURST = 10  # beats out of turn at once,
_EAGER_RATE = 4.0  # and in a second after that
_EAGER_CROWD = 8  # contacts; with more, a round costs as many times more
_NOBODY: frozenset[ProcessId] = frozenset()
_GIVEN_UP = 3  # the same until it counts as silent: it may have a lease for the first of them
_DEAF = 1.5  # pauses without a confirmation from a process we hear, before operations are aborted
_TOLD_OF_LOSSES = 3  # members that hear of a loss: the leader, and who would succeed it


@dataclass(frozen=True, slots=True)
class Pledge:
    """That we agreed to begin a lineage, with whom, and until when we keep to it."""

    founder: ProcessId
    lineage: str
    until: float


class MembershipState:
    """Everything that more than one part of a core needs."""

    interval: float
    """Seconds from one heartbeat to the next: as the view says, and without one by the number of
    processes around."""
    pause_after: float
    """The same without contact until we pause ourselves."""
    is_constant: bool
    """Whether we were in every view of our lineage, and of those it comes from, since the founding.

    Then its members have decided nothing without us."""
    left_out: dict[ProcessId, str]
    """Names of members of our lineage that a later view left out, though they may be alive."""
    is_insisting: bool
    """Whether a person asked us, at work in this view, to continue without those left out."""
    former_pause: float
    """The pause of the view before this one; members that have not entered yet may use it."""
    woke_at: float
    """When we last ran again after not running for a pause or longer."""
    bound: Commit | None
    """The newest view known of the lineage that we belong to; None while we are free."""
    departed: set[ProcessId]
    """Members of that view that have left the lineage for good."""
    elsewhere: set[ProcessId]
    """Members of that view that have left it for a descendant, in which we may follow them."""
    pledge: Pledge | None
    """The last founding that we have agreed to, since we entered a view."""
    released_at: float | None
    """When a person asked us to continue without those who are missing, since we were last at work;
    None if that did not happen."""
    samples: int
    """Committed training samples in our state."""
    announced_samples: int
    """What our last heartbeats said of that: two leaders must compare the same numbers."""
    origin: tuple[Branch, ...]
    """Where the checkpoint that was loaded came from, if there was one."""
    proofs: dict[ProcessId, str]
    """Members whose death we can prove, and how."""
    reported: set[ProcessId]
    """Members whose death another one can prove."""
    ended: dict[ProcessId, tuple[str, float]]
    """Processes that have ended, proved or not, with how and when we learnt it."""
    expelled: dict[ProcessId, str]
    """Processes that were removed for what they sent, and what it was; until they restart."""
    is_aborted: bool
    """Whether operations of the view have been aborted, so that it needs a successor."""
    lost: ProcessId | None
    """For whose loss; the first that we learnt of."""
    lost_by: ProcessId | None
    """Which process reported that; our own id if we saw it."""
    stopped_because: str
    """Why operations were stopped, in words."""
    ready_at: float
    """When we may enter a view again."""
    is_dirty: bool
    """Whether something changed that decisions hang on."""

    def __init__(self, me: ProcessInfo, config: ClusterConfig, now: float) -> None:
        self.me = me
        self.id = me.process
        self.config = config
        self.clock = SteadyTime(now)
        self.now = now
        self.health = HealthMonitor(config.health)
        self.contacts = Contacts(me, self.health)
        self.interval, self.pause_after = pace(1, config.health)
        self.former_pause = self.pause_after
        self.woke_at = float("-inf")
        self.left_out, self.is_insisting, self.is_constant = {}, False, False
        self.election = ElectionManager(self.id, config.election)
        self.history = LineageHistory()
        self.view: View | None = None
        self.state = ClusterState.JOINING
        self.reason = "no other machine has joined yet"
        self.bound = None
        self.departed, self.elsewhere = set(), set()
        self.pledge = None
        self.released_at = None
        self.samples = 0
        self.announced_samples = 0
        self.origin = ()
        self.proofs = {}
        self.reported = set()
        self.ended = {}
        self.expelled = {}
        self.is_aborted = False
        self.aborted_at = now
        self.lost = None
        self.lost_by = None
        self.stopped_because = ""
        self.is_loss_orderly = False
        self.ready_at = now
        self.out: list[Effect] = []
        self.is_dirty = True
        self.next_beat = now
        self._last_beat = float("-inf")
        self._regular_beat = now  # when the next beat is due that is not out of turn
        self._eager = TokenBucket(_EAGER_RATE, _EAGER_BURST, now)
        self._told: dict[str, str] = {}

    @property
    def time(self) -> float:
        """The caller's time, except that it never goes back."""
        return self.clock.current

    # --- pace ---

    def pace_for(self, members: Iterable[ProcessId]) -> tuple[float, float]:
        """Interval and pause of a view with these members, as its proposer fills them in."""
        who = list(members)
        contacts = (self.contacts.get(process) for process in who)
        slowest = [contact.card.pause_after for contact in contacts if contact is not None]
        return pace(len(who), self.config.health, slowest)

    def keep_pace(self, proposal: Proposal | None) -> None:
        """Beat as a view says that we enter; without one more slowly the more are around."""
        if proposal is None:
            self._adopt(*pace(self._around(), self.config.health))
        elif proposal.interval and proposal.pause_after:
            self._adopt(proposal.interval, proposal.pause_after)
        else:
            self._adopt(*pace(len(proposal.members), self.config.health))

    def _around(self) -> int:
        return max(1 + len(self.contacts), self.config.min_nodes)

    def _adopt(self, interval: float, pause_after: float) -> None:
        self.former_pause = self.pause_after
        self.interval, self.pause_after = interval, pause_after
        self.health.adopt(self.config.health.paced(interval, pause_after))

    @property
    def lateness(self) -> float:
        """How late this process ran recently, or another that it hears."""
        latest = self.health.lateness
        for contact in self.contacts:
            if contact.beat is not None and contact.beat.lateness > latest:
                latest = contact.beat.lateness
        return latest

    def pause_of(self, contact: Contact) -> float:
        """For how long a process may rely on its newest heartbeat, if we confirm that."""
        asked = contact.announced or contact.card.pause_after
        return max(self.pause_after, asked)

    def has_lease(self, contact: Contact) -> bool:
        """Whether a process cannot have given us up, nor will before we pause."""
        age = self.time - contact.leased_at
        return age <= contact.leased_for and age <= LENGTHENED * self.pause_after

    @property
    def longest_lease(self) -> float:
        """Seconds after which no process relies any more on what one of our view said."""
        return LENGTHENED * max(self.pause_after, self.former_pause)

    @property
    def is_observer(self) -> bool:
        """Whether we only look on."""
        return self.me.role is ProcessRole.OBSERVER

    def name(self, process: ProcessId) -> str:
        """The name of a process, for sentences."""
        if process == self.id:
            return str(self.me)
        contact = self.contacts.get(process)
        return str(process if contact is None else contact.card)

    def names(self, processes: Iterable[ProcessId]) -> str:
        """Several names, for sentences."""
        return ", ".join(self.name(process) for process in processes)

    def joiners(self) -> list[Contact]:
        """Those without a view who would enter one with us, and hold to us as we to them."""
        return [c for c in self.contacts.joiners() if self.has_lease(c)]

    # --- doubts ---

    def is_doubtful(self, process: ProcessId, pauses: float = 1) -> bool:
        """Whether a process has not confirmed hearing us for this many times its pause."""
        contact = self.contacts.of(process)
        # While we did not run, no process could have confirmed anything to us.
        since = max(self.woke_at, contact.echoed_at)
        limit = self.pause_of(contact) + self.health.allowance(process)
        return self.time - since >= pauses * limit

    def is_lost(self, process: ProcessId) -> bool:
        """Whether nothing can be done together with a member now."""
        if self.health.is_operational(process):
            return self.is_doubtful(process, _DEAF)
        return self.is_doubtful(process)

    def is_silent(self, process: ProcessId) -> bool:
        """Whether a member has paused itself, if it is alive, for all that we hear of it."""
        if self.time < self.contacts.of(process).relied_until:
            return False
        if self.is_doubtful(process, _GIVEN_UP):
            return True
        return self.health.status(process) is HealthStatus.DEAD and self.health.silence(
            process, self.now
        ) >= 2 * self.pause_of(self.contacts.of(process))

    def why_doubtful(self, process: ProcessId) -> str:
        """Why a member is out of contact, in words."""
        if not self.health.is_operational(process):
            return self.health.reason(process)
        return "our messages do not seem to reach it"

    @property
    def phase(self) -> Phase:
        """What our heartbeats say of us."""
        if self.is_observer:
            return Phase.OBSERVING
        if self.state is ClusterState.ACTIVE:
            return Phase.ACTIVE
        if self.state is ClusterState.PAUSED:
            return Phase.PAUSED
        return Phase.JOINING if self.time >= self.ready_at else Phase.WAITING

    @property
    def gone(self) -> frozenset[ProcessId]:
        """Members that will never vote again: proved dead by us, or departed."""
        if not self.proofs and not self.election.departed:
            return _NOBODY
        return self.election.gone.union(self.proofs)

    @property
    def absent(self) -> frozenset[ProcessId]:
        """Members that are not in the view any more for all we know, whatever they had promised."""
        if not self.proofs and not self.election.departed:
            return _NOBODY
        return frozenset(self.election.departed).union(self.proofs)

    @property
    def uncounted(self) -> frozenset[ProcessId]:
        """Those of them that do not count for a quorum.

        One that continues in a descendant of the lineage counts, and gives no vote: without a
        quorum of those who are left, they follow it.
        """
        if not self.proofs and not self.election.departed:
            return _NOBODY
        left = self.election.departed.keys() - self.election.elsewhere
        return frozenset(left).union(self.proofs)

    def is_member(self, process: ProcessId) -> bool:
        """Whether a process is in our view."""
        return self.view is not None and process in self.view.members

    # --- what binds us ---

    @property
    def quorum(self) -> Literal["majority", "any"]:
        """Fixed when our lineage was founded; before that, as configured."""
        return self.config.quorum if self.bound is None else self.bound.charter.quorum

    def bind(self, commit: Commit) -> None:
        """Belong to this lineage from now on, in this view or in one to come."""
        if self.bound is None or self.bound.lineage != commit.lineage:
            self.left_out = {}
        self.bound, self.departed, self.elsewhere = commit, set(), set()
        self.keep_only_known()

    @property
    def is_released(self) -> bool:
        """Whether a person asked us to continue without waiting for those who are missing."""
        return self.released_at is not None

    @property
    def is_pledged(self) -> bool:
        """Whether a founder may still begin because we agreed: until then we enter nothing else."""
        pledge = self.pledge
        return pledge is not None and self.time < pledge.until and pledge.founder not in self.ended

    def has_agreed_to(self, lineage: str) -> bool:
        """Whether this is the founding that we agreed to last."""
        return self.pledge is not None and self.pledge.lineage == lineage

    def kept(self) -> list[ProcessId]:
        """The other members of our view, or of the newest one that we are bound to."""
        members = () if self.bound is None else self.bound.view.members
        return [member for member in members if member != self.id]

    def is_kept(self, process: ProcessId) -> bool:
        """Whether a process is in our view, or in the newest one that we are bound to."""
        is_bound = self.bound is not None and process in self.bound.view.members
        return is_bound or self.is_member(process)

    def may_enter(self, lineage: str) -> bool:
        """Whether we may enter a lineage: ours, a child of it begun no earlier, any if free."""
        bound = self.bound
        if bound is None or lineage == bound.lineage:
            return True
        newest = self.history.newest(lineage)
        return newest is not None and self.is_descendant(newest.charter)

    def is_descendant(self, charter: Charter) -> bool:
        """Whether a lineage branched off ours, at the newest view that we know or later."""
        bound = self.bound
        return bound is not None and any(
            branch.lineage == bound.lineage and branch.epoch >= bound.epoch
            for branch in charter.ancestry
        )

    def is_gone_for_good(self, who: ProcessId) -> bool:
        """Whether a member of the view that we are bound to will never be at work in it again."""
        # One that was removed for what it sent will not be let in, wherever it is at work.
        return who in self.ended or who in self.departed or who in self.expelled

    def why_other_quorum(self, contact: Contact) -> str:
        """What to tell people of a process that was started with another setting."""
        return (
            f"this process was started with quorum={self.quorum!r}, {contact.card} with "
            f"quorum={contact.card.quorum!r}; all processes of a job need the same setting"
        )

    def fellows(self) -> list[Contact]:
        """Those bound to the same lineage who are not at work, and hear us as we hear them."""
        lineage = "" if self.bound is None else self.bound.lineage
        return [
            contact
            for contact in self.contacts
            if contact.beat is not None
            and contact.beat.bound == lineage
            and (contact.beat.phase is Phase.JOINING or contact.beat.phase is Phase.PAUSED)
            and contact.is_member
            and self.suits(contact)
            and self.contacts.is_mutual(contact.process)
            and not self.is_doubtful(contact.process)
        ]

    def suits(self, contact: Contact) -> bool:
        """Whether a process could be in one cluster with us, by its settings."""
        return contact.card.schema == self.me.schema and contact.card.quorum == self.quorum

    def why_waiting(self, missing: Iterable[ProcessId]) -> str:
        """What to tell people while members of the last view are missing."""
        who = list(missing)
        epoch = 0 if self.bound is None else self.bound.epoch
        one = len(who) == 1
        return (
            f"waiting for {self.names(who)}: {'it was' if one else 'they were'} in view {epoch} "
            f"and may still be running. To continue without {'it' if one else 'them'}: "
            "potluck continue"
        )

    def causes(self, out: Iterable[tuple[ProcessId, CauseCode, str]]) -> tuple[Cause, ...]:
        """Why members are not in the next view, in as much detail as a message holds."""
        causes = tuple(self.cause(*each) for each in out)
        if len(causes) <= _DETAILED:
            return causes
        return tuple(Cause(each.who, each.code, each.name) for each in causes)

    def cause(self, who: ProcessId, code: CauseCode, reason: str) -> Cause:
        """Why a member is not in the next view, as data."""
        is_me = who == self.id  # a leader may have to leave itself out
        card = self.me if is_me else self.contacts.of(who).card
        host = card.hosts[0] if card.hosts else ""
        silence = 0.0 if is_me else self.health.silence(who, self.now)
        return Cause(who, code, card.name, host, silence, clip(reason, _REASON_LIMIT))

    @property
    def ancestry(self) -> tuple[Branch, ...]:
        """Of our lineage, with where its checkpoint came from: this decides merges."""
        if self.bound is None:
            return self.origin
        charter = self.bound.charter
        return (*(self.origin or charter.origin), *charter.ancestry)[-MAX_BRANCHES:]

    @property
    def claim(self) -> Claim:
        """What our lineage has to say for itself when it meets another; we are in a view."""
        view = self.election.view
        branches = (*self.ancestry, Branch(view.lineage, view.epoch))
        return Claim(branches, self.announced_samples, len(view.members))

    def others(self) -> list[ProcessId]:
        """The other members of our view."""
        members = self.view.members if self.view is not None else ()
        return [member for member in members if member != self.id]

    # --- the way out ---

    def send(self, to: ProcessId, message: ClusterMessage) -> None:
        """Send, if there is a connection; to a member out of touch also by way of another."""
        if to == self.id:
            return
        contact = self.contacts.get(to)
        if contact is not None and contact.is_connected:
            self.out.append(SendMessage(to, message))
        if (
            isinstance(message, RELAYABLE)
            and self.is_member(to)
            and not self.contacts.is_mutual(to)
        ):
            self._relay(to, message)

    def _relay(self, to: ProcessId, message: ClusterMessage) -> None:
        for member in self.others():
            if member in self.election.departed:
                continue  # it passes nothing on in a view that it has left
            if self.contacts.is_mutual(member) and self.contacts.hears(member, to):
                self.out.append(SendMessage(member, Relayed(self.id, to, encode(message))))
                return

    def tell(self, recipients: Iterable[ProcessId], message: ClusterMessage) -> None:
        """Send to several."""
        for process in recipients:
            self.send(process, message)

    def tell_observers(self, message: ClusterMessage) -> None:
        """Send to all that look on."""
        self.tell([c.process for c in self.contacts if not c.is_member], message)

    def note(
        self, change: MembershipChange, sentence: str, process: ProcessId | None = None
    ) -> None:
        """Let people know."""
        self.note_elections()
        self.out.append(Note(MembershipEvent(change, sentence, process, self.view)))

    def note_elections(self) -> None:
        """Let people know what the election manager has to tell."""
        if self.election.events:
            self.out.extend(Note(event) for event in self.election.events)
            self.election.events.clear()

    def note_once(self, topic: str, sentence: str, process: ProcessId | None = None) -> None:
        """Let people know why something waits, unless the reason is what it was."""
        if self._told.get(topic) != sentence:
            self._told[topic] = sentence
            self.note(MembershipChange.WAITING, sentence, process)

    def forget_evidence(self) -> None:
        """What was known of members held in a view that is over."""
        self.proofs, self.reported = {}, set()
        self.is_aborted, self.lost, self.is_loss_orderly = False, None, False
        self.lost_by, self.stopped_because = None, ""

    def keep_only_known(self) -> None:
        """Keep those who are connected, or in the view that we are bound to; no others."""
        for contact in list(self.contacts):
            if not contact.is_connected and not self.is_kept(contact.process):
                self.contacts.forget(contact.process)
        for member in self.kept():
            self.contacts.know(self.contacts.last_card(member), self.now)

    def forget_told(self) -> None:
        """The next reasons are news again."""
        self._told.clear()

    # --- heartbeats ---

    def beat_soon(self) -> None:
        """Something changed that others should hear before the next regular beat.

        The number of beats out of turn is bounded; beyond that it waits.
        """
        if self._eager.has(self.time):
            soonest = self._last_beat + _EAGER * min(self.interval, self.config.health.interval)
            self.next_beat = min(self.next_beat, max(self.time, soonest))

    def beat(self) -> None:
        """Send a heartbeat to everybody."""
        if self.time < self._regular_beat:
            self._eager.take(self.time, max(1.0, len(self.contacts) / _EAGER_CROWD))
        round_ = self._compose()
        for contact in self.contacts:
            if contact.is_connected:
                self._beat_to(contact, round_)
        self._last_beat = self.time
        self.next_beat = self._regular_beat = self.time + self.interval

    def greet(self, process: ProcessId) -> None:
        """Send a heartbeat to one process at once, which is connected."""
        self._beat_to(self.contacts.of(process), self._compose())

    def _heard_marks(self) -> tuple[int, ...]:
        """Marks of all that we hear, without members that do not confirm hearing us."""
        return self.contacts.heard_marks(but=list(filter(self.is_doubtful, self.others())))

    def _compose(self) -> Heartbeat:
        """What a round of heartbeats says to everybody."""
        if self.view is None:
            self.keep_pace(None)
        lateness = self.lateness
        self.election.slack = lateness if lateness > self.interval / 4 else 0.0
        pause = lengthened(self.pause_after, lateness)
        self.announced_samples = self.samples
        view, election = self.view, self.election
        message = Heartbeat(
            sequence=self.contacts.number_beat(self.time, pause),
            echo=0,
            held=0.0,
            phase=self.phase,
            hears=self._heard_marks(),
            samples=self.announced_samples,
            wants=self.config.min_nodes,
            bound="" if self.bound is None else self.bound.lineage,
            bound_epoch=0 if self.bound is None else self.bound.epoch,
            ended=self._ended_marks(),
            lateness=self.health.lateness,
            pause_after=pause,
        )
        if view is None:
            return message
        return msgspec.structs.replace(
            message,
            lineage=view.lineage,
            epoch=view.epoch,
            view=view_mark(view),
            size=len(view.members),
            leader=view.leader,
            term=election.term,
            aborted=self.is_aborted,
            lost=self.lost,
            orderly=self.is_loss_orderly,
            accepted=self.accepted_mark,
        )

    def _beat_to(self, contact: Contact, round_: Heartbeat) -> None:
        """Send one of a round of heartbeats: what differs is which of its beats we heard."""
        withholds = self._withholds(contact.process)
        if contact.newest and not withholds:
            self.contacts.confirmed(contact, self.pause_of(contact))
        message = msgspec.structs.replace(
            round_,
            echo=contact.newest,
            held=max(0.0, self.time - contact.beat_at) if contact.newest else 0.0,
            withholds=withholds,
        )
        view = self.view
        if view is not None and view.leader == self.id and contact.process not in view.members:
            message = msgspec.structs.replace(message, ancestry=self.ancestry)
        self.out.append(SendMessage(contact.process, message))

    def _ended_marks(self) -> tuple[int, ...]:
        """Whom of the view that we are bound to we know to have ended, while that matters."""
        if self.state is ClusterState.ACTIVE:
            return ()
        return tuple(sorted(mark(who) for who in self.kept() if who in self.ended))

    def _withholds(self, process: ProcessId) -> bool:
        """Whether no process may rely on this beat: we have doubts, or have accepted a next view.

        In the latter case those may who are in it with us, and have accepted it as well.
        """
        contact = self.contacts.of(process)
        # To the letter, without patience for ourselves: what is_silent() claims hangs on it.
        if self.time - contact.echoed_at >= self.pause_of(contact) or self._is_behind(contact):
            return True
        accepted = self.election.ballot.accepted
        if accepted is None or not self.is_member(process):
            return False
        beat = contact.beat
        is_shared = beat is not None and beat.accepted == self.accepted_mark != 0
        return not (is_shared and {self.id, process}.issubset(accepted.members))

    def _is_behind(self, contact: Contact) -> bool:
        """Whether it may be at work in a view that has a successor, or that we left for a child.

        What it says on a new connection shows where it stands.
        """
        beat = contact.beat
        if beat is None:
            return True
        newest, word = self.history.newest(beat.lineage), self.history.last_word(beat.lineage)
        has_left = word is not None and word.is_followed and word.epoch >= beat.epoch
        return has_left or (newest is not None and newest.epoch > beat.epoch)

    @property
    def accepted_mark(self) -> int:
        """The next view that we have accepted, in 63 bits; 0 for none, and for the end of all."""
        accepted, view = self.election.ballot.accepted, self.view
        if accepted is None or accepted.into or view is None:
            return 0
        return view_mark(View(view.lineage, view.epoch + 1, accepted.members))

    # --- what everybody does ---

    def abort(
        self,
        lost: ProcessId | None,
        reason: str,
        *,
        orderly: bool = False,
        by: ProcessId | None = None,
    ) -> None:
        """Stop the operations of our view, here; nothing happens the second time."""
        if self.view is not None and not self.is_aborted:
            self.is_aborted = self.is_dirty = True
            self.aborted_at = self.time
            self.lost, self.is_loss_orderly = lost, orderly
            self.lost_by, self.stopped_because = by or self.id, reason
            self.out.append(Abort(self.view.epoch, lost, reason, orderly))
            self.beat_soon()

    def report_loss(self, who: ProcessId, reason: str, *, is_proved: bool = False) -> None:
        """Tell those who decide that a member of our view is lost to us.

        These are the leader and the next members in rank order that are not lost as well: one of
        them will lead if the leader is.  The others notice it themselves, or by our heartbeat.
        """
        view = self.election.view
        message = Lost(view.lineage, view.epoch, who, clip(reason), is_proved)
        lost = self.gone | {who}
        seniors = [m for m in self.others() if m not in lost and self._may_lead(m)]
        leader = self.election.leader
        first = [leader] if leader in seniors else []
        self.tell(list(dict.fromkeys([*first, *seniors]))[:_TOLD_OF_LOSSES], message)

    def _may_lead(self, member: ProcessId) -> bool:
        contact = self.contacts.of(member)
        return contact.is_connected and self.health.is_operational(member)


@lru_cache(maxsize=64)
def view_mark(view: View) -> int:
    """A view in 63 bits, for heartbeats."""
    return int.from_bytes(view.session[:8], "big") >> 1
