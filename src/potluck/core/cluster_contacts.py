"""Whom this process is in contact with, and for how long it may rely on that.

A heartbeat says which of ours the sender heard last.  So we know not only that we hear somebody,
but since when at the latest *they* cannot have counted us as silent: from the moment at which we
sent the beat that they have heard.  Promises between members hang on that moment, and on nothing
about how long messages travel.  Each beat announces for how long its sender relies on an answer to
it before it pauses, and a process that heard it waits for twice that before excluding the sender.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from potluck.core.cluster_cards import ProcessCard, Role, mark
from potluck.core.cluster_messages import MAX_CONTACTS, Heartbeat, Phase
from potluck.core.health import HealthMonitor
from potluck.vocabulary import ProcessId

__all__ = ["Contact", "Contacts"]

_BEATS_KEPT = 256  # sent beats whose time is remembered; more than a minute of them
_CARDS_KEPT = 1024  # of processes that were here
_NEVER = float("-inf")
LONGEST_ANNOUNCED = 3600.0  # seconds, as on cards


@dataclass(slots=True)
class Contact:
    """What is known of one process.  Times are those of :class:`SteadyTime`."""

    card: ProcessCard
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
        return self.card.role is Role.MEMBER


@dataclass(slots=True)
class Contacts:
    """The table of all contacts, and the times at which our beats were sent."""

    me: ProcessCard
    health: HealthMonitor
    sequence: int = 0
    _table: dict[ProcessId, Contact] = field(default_factory=dict)
    _cards: dict[ProcessId, ProcessCard] = field(default_factory=dict)
    _sent: dict[int, tuple[float, float]] = field(default_factory=dict)
    _mark: int = 0

    def __post_init__(self) -> None:
        """Compute our own mark once."""
        self._mark = mark(self.me.process)

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
        """Whether nobody else can be taken in."""
        return len(self._table) >= MAX_CONTACTS

    def connect(self, card: ProcessCard, now: float) -> Contact:
        """A lane is open."""
        contact = self.know(card, now)
        contact.card = card
        contact.is_connected = True
        return contact

    def know(self, card: ProcessCard, now: float) -> Contact:
        """Keep a contact of a process, connected or not."""
        contact = self._table.get(card.process)
        if contact is None:
            process = card.process
            contact = self._table[process] = Contact(card, process, mark(process))
            self.health.watch(process, now, name=str(card))
        return contact

    def disconnect(self, contact: Contact, cause: str, now: float) -> None:
        """The last lane to it ended."""
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

    def remember(self, card: ProcessCard) -> None:
        """Keep a card for when its process becomes a member of a view that we know of."""
        self._cards.pop(card.process, None)
        self._cards[card.process] = card
        if len(self._cards) > _CARDS_KEPT:
            del self._cards[next(iter(self._cards))]

    def last_card(self, process: ProcessId) -> ProcessCard:
        """The card of a process that was here before; one that says nothing if it was not."""
        stub = ProcessCard(node=process.node, incarnation=process.incarnation)
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

        It ``counts`` unless the sender has gone on without us, or doubts us, or is about to.
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
        """It has gone on without us: that it once heard us counts for nothing."""
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
            and self.health.status(process).is_operational
        )

    def is_mutual(self, process: ProcessId) -> bool:
        """Whether we hear it and it says that it hears us."""
        return self.is_heard(process) and self._mark in self._table[process].hears

    def hears(self, one: ProcessId, other: ProcessId) -> bool:
        """Whether one process says that it hears the other; we count as one of them."""
        if one == self.me.process:
            return self.is_heard(other)
        contact = self._table.get(one)
        return contact is not None and self._mark_of(other) in contact.hears

    def links(self, processes: Sequence[ProcessId]) -> list[int]:
        """For each of these processes, in bits, which of them it hears and is heard by."""
        bits = {self._mark_of(process): 1 << i for i, process in enumerate(processes)}
        hears = [self._heard_bits(process, processes, bits) for process in processes]
        links, everybody = list(hears), (1 << len(processes)) - 1
        for i, heard in enumerate(hears):  # usually all hear all: only what is missing costs time
            missing = everybody & ~heard
            while missing:
                lowest = missing & -missing
                links[lowest.bit_length() - 1] &= ~(1 << i)
                missing ^= lowest
        return links

    def _heard_bits(
        self, one: ProcessId, processes: Sequence[ProcessId], bits: dict[int, int]
    ) -> int:
        if one == self.me.process:
            return sum(1 << i for i, other in enumerate(processes) if self.is_heard(other))
        contact = self._table.get(one)
        marks = frozenset[int]() if contact is None else contact.hears - {contact.mark}
        return sum(bits.values()) - sum(bits[mark] for mark in bits.keys() - marks)

    def _mark_of(self, process: ProcessId) -> int:
        if process == self.me.process:
            return self._mark
        contact = self._table.get(process)
        return mark(process) if contact is None else contact.mark

    def heard_marks(self, but: Collection[ProcessId]) -> tuple[int, ...]:
        """The marks of all that we hear, but some, for our heartbeats."""
        heard = [c for c in self if c.is_member and self.is_heard(c.process)]
        return tuple(sorted(contact.mark for contact in heard if contact.process not in but))

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
