"""Contacts: processes that may be there, where, and when to try them next.

Discovery and members tell of processes; dialling finds out.  Both sides of a pair may dial; the one
with the smaller id does so at once and the other after a moment, so that there is rarely more than
one connection, and always at least one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from potluck.core.cluster_cards import ProcessCard
from potluck.net.addresses import Address
from potluck.net.discovery_records import Sighting
from potluck.vocabulary import NodeId, ProcessId

__all__ = ["Contact", "Contacts"]

COURTESY = 0.3
"""Seconds that the side with the larger id waits for the other to dial."""

CROWD = 4
"""Processes for which that is long enough; with more it waits longer in proportion.

The other side dials one after the other, and each handshake costs both sides processor time.
"""

LONGEST_COURTESY = 10.0
"""Seconds, however many there are."""

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 2.0
"""Seconds before trying again; each time twice as long."""

RARELY = 30.0
"""The longest pause for those who are only remembered from an earlier run."""

MAX_CONTACTS = 1024
"""More are not remembered: hints are not worth any memory."""

TRIES = 12
"""Attempts at somebody whom nobody reports any more."""


@dataclass(slots=True, eq=False)
class Contact:
    """Somebody to connect to."""

    key: str
    node: NodeId | None = None
    """Who has to answer; None for whoever is there."""
    process: ProcessId | None = None
    addresses: tuple[Address, ...] = ()
    name: str = ""
    reported: set[str] = field(default_factory=set)
    """The sources that say it is there."""
    is_dialled: bool = False
    is_connected: bool = False
    is_self: bool = False
    tries: int = 0
    due: float = 0.0
    trouble: str = ""
    """Why the last attempt failed."""


class Contacts:
    """Who may be there; used by the control thread alone."""

    def __init__(self, me: ProcessId) -> None:
        self._me = me
        self._known: dict[str, Contact] = {}

    def sighted(self, sighting: Sighting, now: float) -> None:
        """Discovery has seen somebody, or sees it elsewhere."""
        self._learn(
            sighting.key,
            sighting.process,
            sighting.node,
            sighting.addresses,
            sighting.name,
            now,
        ).reported = set(sighting.sources)

    def unsighted(self, key: str) -> None:
        """Discovery no longer sees somebody; who is connected stays so."""
        contact = self._known.get(key)
        if contact is not None:
            contact.reported.clear()

    def introduced(self, card: ProcessCard, now: float) -> None:
        """A member has told of somebody."""
        addresses = tuple(Address(host, card.port) for host in card.hosts)
        if card.port and addresses:
            key = _key(card.process)
            self._learn(key, card.process, card.node, addresses, card.name, now)

    def _learn(
        self,
        key: str,
        process: ProcessId | None,
        node: NodeId | None,
        addresses: tuple[Address, ...],
        name: str,
        now: float,
    ) -> Contact:
        known = self._known.get(key if process is None else _key(process))
        if known is None:
            known = Contact(key if process is None else _key(process), node, process)
            if process is not None and process < self._me:
                known.due = now + self._courtesy
            known.is_self = process == self._me
            if len(self._known) < MAX_CONTACTS:
                self._known[known.key] = known
                if process is not None:
                    self._known.setdefault(key, known)
        elif known.addresses != addresses and not known.is_connected:
            known.due, known.tries = min(known.due, now), 0
        known.addresses = addresses or known.addresses
        known.name = name or known.name
        return known

    def connected(self, process: ProcessId, now: float, via: Contact | None = None) -> None:
        """A connection to a process is open; ``via`` is the contact that was dialled for it.

        The contact may have had an address only.  If it was another process, such as an earlier one
        that had the same port, it is not there any more: it is forgotten, or, if discovery still
        reports it, dialled again later.
        """
        for contact in self._of(process):
            contact.is_connected, contact.tries, contact.trouble = True, 0, ""
        if via is None:
            return
        if via.process is None:
            via.is_connected, via.process, via.tries = True, process, 0
        elif via.process != process and via.reported:
            self.failed(via, f"another process answers at its address ({_key(process)})", now)
        elif via.process != process:
            self.forget(via.process)

    def disconnected(self, process: ProcessId, now: float) -> None:
        """The lane to somebody has ended: try again."""
        for contact in self._of(process):
            contact.is_connected = False
            contact.due = now + (self._courtesy if process < self._me else FIRST_PAUSE)
            if contact.node is None:
                contact.process = None  # whoever is at that address now

    def failed(self, contact: Contact, trouble: str, now: float) -> None:
        """An attempt has failed."""
        contact.is_dialled = False
        contact.trouble = trouble
        contact.tries += 1
        longest = RARELY if contact.reported == {"known"} else LONGEST_PAUSE
        contact.due = now + min(FIRST_PAUSE * 2 ** min(contact.tries, 12), longest)
        if not contact.reported and contact.tries >= TRIES:
            for key in [key for key, each in self._known.items() if each is contact]:
                del self._known[key]

    def forget(self, process: ProcessId) -> None:
        """Do not try somebody any more, until it is seen anew."""
        for contact in self._of(process):
            for key in [key for key, each in self._known.items() if each is contact]:
                del self._known[key]

    def _of(self, process: ProcessId) -> list[Contact]:
        return [each for each in set(self._known.values()) if each.process == process]

    def addresses_of(self, process: ProcessId) -> tuple[Address, ...]:
        """Where somebody was last seen."""
        return tuple(dict.fromkeys(a for each in self._of(process) for a in each.addresses))

    @property
    def _courtesy(self) -> float:
        return min(COURTESY * max(1.0, len(self._known) / CROWD), LONGEST_COURTESY)

    def due(self, now: float, most: int = MAX_CONTACTS) -> list[Contact]:
        """Whom to dial now, those first that wait longest; each is marked as being dialled."""
        found = [each for each in self._candidates() if each.due <= now]
        if len(found) > most:
            found = sorted(found, key=lambda each: (each.due, each.key))[:most]
        for contact in found:
            contact.is_dialled = True
        return found

    def _candidates(self) -> set[Contact]:
        taken = {each.process for each in self._known.values() if each.is_connected}
        return {
            each
            for each in self._known.values()
            if not (each.is_dialled or each.is_connected or each.is_self)
            and each.addresses
            and (each.process is None or each.process not in taken)
        }

    @property
    def next_deadline(self) -> float | None:
        """When somebody has to be dialled next."""
        return min((each.due for each in self._candidates()), default=None)

    @property
    def troubles(self) -> dict[str, str]:
        """Whom we could not reach lately, and why."""
        return self.troubles_except(lambda _: False)

    def troubles_except(self, is_over: Callable[[Contact], bool]) -> dict[str, str]:
        """The same without those of whom it is known that they have ended."""
        return {
            each.name or ", ".join(map(str, each.addresses)): each.trouble
            for each in set(self._known.values())
            if each.trouble and not each.is_connected and not is_over(each)
        }


def _key(process: ProcessId) -> str:
    return f"{process.node}/{process.incarnation}"
