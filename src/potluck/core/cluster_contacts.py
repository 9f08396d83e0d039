"""Whom this process is in contact with, and for how long it may rely on that.

A heartbeat says which of ours the sender heard last.  So we know not only that we hear somebody,
but since when at the latest *they* cannot have counted us as silent: from the moment at which we
sent the beat that they have heard.  Promises between members hang on that moment, and on nothing
about how long messages travel.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from potluck.core.cluster_cards import ProcessCard, Role, mark
from potluck.core.cluster_messages import MAX_CONTACTS, Heartbeat, Phase
from potluck.core.health import HealthMonitor
from potluck.vocabulary import ProcessId

__all__ = ["Contact", "Contacts"]

_BEATS_KEPT = 256  # sent beats whose time is remembered; more than a minute of them
_CARDS_KEPT = 1024  # of processes that were here
_NEVER = float("-inf")


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
    leased_at: float = _NEVER
    """The same, counting only what it said while it held to us: it cannot have written us off
    before twice its pause after that."""
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
    _sent: dict[int, float] = field(default_factory=dict)
    _mark: int = 0

    def __post_init__(self) -> None:
        """Compute our own mark once."""
        self._mark = mark(self.me.process)

    def __iter__(self) -> Iterator[Contact]:
        return iter(self._table.values())

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
            self._cards.pop(process, None)
            self._cards[process] = contact.card
        if len(self._cards) > _CARDS_KEPT:
            del self._cards[next(iter(self._cards))]

    def last_card(self, process: ProcessId) -> ProcessCard:
        """The card of a process that was here before; one that says nothing if it was not."""
        stub = ProcessCard(node=process.node, incarnation=process.incarnation)
        return self._cards.get(process, stub)

    # --- beats ---

    def number_beat(self, time: float) -> int:
        """The sequence of a round of heartbeats sent now."""
        self.sequence += 1
        self._sent[self.sequence] = time
        self._sent.pop(self.sequence - _BEATS_KEPT, None)
        return self.sequence

    def heard(
        self, contact: Contact, beat: Heartbeat, now: float, time: float, *, counts: bool
    ) -> bool:
        """Take in a heartbeat; whether it is newer than all before.

        It ``counts`` unless the sender has gone on without us, or doubts us, or is about to.
        """
        sent = self._sent.get(beat.echo)
        round_trip = None if sent is None else max(0.0, time - sent - beat.held)
        self.health.heard(contact.process, now, round_trip=round_trip)
        if beat.sequence <= contact.newest:
            return False
        contact.newest = beat.sequence
        contact.beat, contact.beat_at = beat, time
        contact.hears = frozenset(beat.hears)
        if sent is not None:
            contact.echoed_at = max(contact.echoed_at, sent)
        if counts:
            contact.leased_at = contact.echoed_at
        return True

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
