"""The links of a process: whom it dials, which lanes it has, and what is said on them.

Belongs to the control thread, which asks and is told; errands and the I/O thread do the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from potluck.core.buckets import TokenBucket
from potluck.core.cluster_cards import ProcessCard, Role
from potluck.core.cluster_messages import MAX_MEMBERS
from potluck.errors import ChannelClosed, DistributedError, MalformedFrame
from potluck.logs import get_logger
from potluck.metrics.sections import DiscoveryMetrics
from potluck.net.discovery_records import Found, Gone
from potluck.net.incarnation import is_slot_free
from potluck.runtime import clock
from potluck.runtime.control_contacts import Contact, Contacts
from potluck.runtime.control_doors import SAME_PROCESS
from potluck.runtime.control_errands import PROBE_WITHIN, Errands, probe
from potluck.runtime.control_lanes import LaneTable, OpenedLane
from potluck.runtime.io import IoThread
from potluck.runtime.io_lane import Frame, Lane

if TYPE_CHECKING:
    from potluck.net.addresses import Address
    from potluck.net.discovery import Discovery
    from potluck.runtime.control_doors import Doors
    from potluck.vocabulary import ProcessId

__all__ = ["CLUSTER", "REPORTS", "Links", "Listener"]

logger = get_logger(__name__)

CLUSTER, REPORTS = 0, 1
"""Tags of control messages: for the core, and of those who ask how we are."""

MAX_LANES = 2 * MAX_MEMBERS
"""Processes that have a lane at once: all members of the largest view, and as many who wait."""

DIALS_AT_ONCE = 4
"""Processes that are dialled at the same time: a handshake computes more than it waits."""

WAITING_DIALS = 12
"""More of them that have waited for an answer for a second: an address may be a black hole."""

PATIENT = 1.0
"""Seconds for which a dial counts as one that computes."""

DIALS_BURST, DIALS_PER_SECOND = 64, 16.0
"""Connections that are opened at once, and in a second after that, whatever happens."""

PROBES_BURST, PROBES_PER_SECOND = 64, 32.0
"""The same for ports that are tried."""

MAX_OBSERVERS = 64
"""Observers that have a lane at once."""

MAX_BANNED = 256
"""Processes whose lanes are refused; of more, the latest."""


class Listener(Protocol):
    """Who is told; everything on the control thread."""

    def met(self, card: ProcessCard) -> None:
        """There is a lane to a process."""

    def lost(self, process: ProcessId, cause: str) -> None:
        """There is none any more."""

    def misbehaved(self, process: ProcessId, why: str) -> None:
        """It sent what no correct process sends."""

    def probed(self, process: ProcessId, what: str, *, has_ended: bool) -> None:
        """Its slot and port were tried: how it ended, or why nothing is known."""

    def said(self, process: ProcessId, payload: bytes) -> None:
        """It sent a message for the core; raises ``MalformedFrame``."""

    def asked(self, lane: Lane, payload: bytes) -> None:
        """Somebody sent a report, or asks for one; raises ``MalformedFrame``."""


class Links:
    """All control lanes of one process."""

    def __init__(
        self, me: ProcessCard, listener: Listener, errands: Errands, post: Callable[..., None]
    ) -> None:
        self._me = me
        self._listener = listener
        self._errands = errands
        self._post = post
        self._lanes = LaneTable(me.process)
        self.contacts = Contacts(me.process)
        self._onlookers = LaneTable(me.process)  # lanes of which one end is an observer
        self._last: dict[ProcessId, OpenedLane] = {}  # the latest lane of everybody we have met
        self._banned: dict[ProcessId, str] = {}
        self._dialling: dict[Contact, float] = {}  # who is dialled now, and since when
        now = clock.now()
        self._dials = TokenBucket(DIALS_PER_SECOND, DIALS_BURST, now)
        self._probes = TokenBucket(PROBES_PER_SECOND, PROBES_BURST, now)
        self._probing: set[ProcessId] = set()
        self.doors: Doors | None = None
        self.discovery: Discovery | None = None
        self._draining = False
        self.counts = DiscoveryMetrics()
        self.is_over = False
        self.io = IoThread(self)

    # -- any thread ----------------------------------------------------------------------------

    def objection(self, process: ProcessId) -> str | None:
        """Why a process may not open a lane, if so."""
        return self._banned.get(process)

    def opened(self, lane: OpenedLane) -> None:
        """Somebody has opened a lane."""
        if self.is_over:
            lane.lane.close()
        else:
            self._post(lambda: self._on_opened(lane))

    def arrived(self, lane: Lane, frame: Frame) -> None:
        """A message has come in."""
        self._post(lambda: self._on_message(lane, frame))

    def ended(self, lane: Lane, cause: str) -> None:
        """A lane is over."""
        self._post(lambda: self._on_ended(lane, cause))

    def silenced(self, reason: str) -> None:
        """The I/O thread is over: so is the control thread, whose groups end for good."""
        self._post(lambda: _raise(reason))

    def wake(self) -> None:
        """Discovery has news."""
        if not self._draining:
            self._draining = True
            self._post(self._drain)

    # -- the control thread --------------------------------------------------------------------

    def send(self, to: ProcessId, payload: bytes) -> None:
        """Send a message for the core of a process, if there is a lane to it."""
        opened = self._lanes.to(to)
        if opened is not None:
            self.io.send(opened.lane, payload, CLUSTER)

    def dial_due(self, now: float) -> None:
        """Dial whom it is time to dial, a few at a time."""
        if self.doors is None:
            return
        quick = sum(now - since < PATIENT for since in self._dialling.values())
        room = min(DIALS_AT_ONCE - quick, DIALS_AT_ONCE + WAITING_DIALS - len(self._dialling))
        if room <= 0 or not self._dials.has(now):
            return
        for contact in self.contacts.due(now, room):
            self._dials.take(now)
            self._dialling[contact] = now
            self._dial(contact)

    def next_dial(self, now: float) -> float | None:
        """When the next dial is due; None if it depends on something else."""
        due = None if self.doors is None else self.contacts.next_deadline
        if due is None:
            return None
        if len(self._dialling) >= DIALS_AT_ONCE:
            due = max(due, now + PATIENT / 4)  # the end of a dial wakes us earlier
        return max(due, self._dials.when(now))

    def drop(self, process: ProcessId, why: str) -> None:
        """Make sure of a process anew: end the lane to it, as if it had broken."""
        opened = self._lanes.to(process)
        if opened is not None:
            self.io.drop(opened.lane)
            self._on_ended(opened.lane, why)

    def ban(self, process: ProcessId, reason: str) -> None:
        """Close all lanes to a process, and accept none."""
        self._banned[process] = reason
        while len(self._banned) > MAX_BANNED:
            del self._banned[next(iter(self._banned))]
        for lane in self._lanes.remove(process):
            self.io.drop(lane)
        self.contacts.forget(process)

    def probe(self, process: ProcessId) -> None:
        """Try the port of a process, unless that is being done, or was done too often."""
        if process in self._probing or not self._probes.take(clock.now()):
            return  # the core asks again with its next beat
        self._probing.add(process)
        addresses = list(self.addresses_of(process))
        last = self._last.get(process)
        link = last.link if last else None
        slot = self._slot_here(last.card) if last else None

        def errand() -> None:
            if _is_free(slot):
                has_ended, what = True, "its slot on its machine is free"
            else:
                why = probe(addresses, link, PROBE_WITHIN if slot is None else PROBE_HERE_WITHIN)
                has_ended, what = why is None, why or "its port refuses connections"
            self._post(lambda: self._on_probed(process, what, has_ended=has_ended))

        self._errands.run(errand, urgent=True)

    def _slot_here(self, card: ProcessCard) -> int | None:
        """The slot of a process of this user on this machine; None for all others."""
        is_here = card.node == self._me.node and card.machine == self._me.machine
        return card.slot if is_here else None

    def addresses_of(self, process: ProcessId) -> tuple[Address, ...]:
        """Where a process may be reached, first where it was reached last."""
        last = self._last.get(process)
        known = self.contacts.addresses_of(process)
        return tuple(dict.fromkeys([*([last.address] if last else []), *known]))

    @property
    def opened_lanes(self) -> list[OpenedLane]:
        """The lanes in use."""
        return self._lanes.opened

    @property
    def observers(self) -> dict[Lane, OpenedLane]:
        """The lanes in use of which one end is an observer; any thread."""
        return {each.lane: each for each in self._onlookers.opened}

    def observer_behind(self, lane: Lane) -> ProcessCard | None:
        """Who is at the other end of such a lane, also if it is not used any more."""
        return self._onlookers.behind(lane)

    def _remember(self, opened: OpenedLane) -> None:
        self._last[opened.card.process] = opened
        if len(self._last) > 2 * MAX_LANES:
            self.forget_except(set())

    def forget_except(self, processes: set[ProcessId]) -> None:
        """Remember no more of those who are gone than is of use."""
        for process in [each for each in self._last if each not in processes]:
            if self._lanes.to(process) is None:
                del self._last[process]

    def _dial(self, contact: Contact) -> None:
        addresses, node, doors = contact.addresses, contact.node, self.doors
        assert doors is not None
        self.counts.attempts.inc()

        def look() -> None:
            if self._errands.is_closed:
                raise ChannelClosed("This process is leaving")

        def errand() -> None:
            try:
                opened = doors.dial(addresses, node, look)
            except (DistributedError, OSError, ValueError) as error:  # an address may be none
                words = str(error)
                self._post(lambda: self._on_failed(contact, words))
            else:
                self._post(lambda: self._on_opened(opened, contact))

        # Anybody may announce a thousand machines that do not answer; the others come first.
        self._errands.run(errand, ahead=contact.reported != {"mdns"})

    def _on_failed(self, contact: Contact, trouble: str) -> None:
        self._dialling.pop(contact, None)
        contact.is_self = contact.is_self or SAME_PROCESS in trouble
        if trouble != contact.trouble and not contact.is_self:  # once for each reason
            logger.debug("could not reach %s: %s", contact.name or contact.addresses, trouble)
        if not contact.is_self:
            self.counts.unreachable.inc()
        self.contacts.failed(contact, trouble, clock.now())

    def _on_opened(self, opened: OpenedLane, via: Contact | None = None) -> None:
        process = opened.card.process
        if via is not None:
            via.is_dialled = False
            self._dialling.pop(via, None)
        is_watch = Role.OBSERVER in {opened.card.role, self._me.role}
        table, most = (self._onlookers, MAX_OBSERVERS) if is_watch else (self._lanes, MAX_LANES)
        if self.is_over or process in self._banned:
            self._decline(opened, via, self._banned.get(process, "this process is leaving"))
            return
        if len(table) >= most and table.to(process) is None:
            self._decline(opened, via, "there are too many connections already")
            return
        self._remember(opened)
        if not is_watch:
            self.contacts.introduced(opened.card, clock.now())
        self.contacts.connected(process, clock.now(), via)
        is_new, unwanted = table.add(opened, clock.now())
        self.io.add(opened.lane)
        if unwanted is not None:
            self.io.retire(unwanted)
        if is_new:
            self._listener.met(opened.card)

    def _decline(self, opened: OpenedLane, via: Contact | None, why: str) -> None:
        """Do without a lane; who was dialled is not dialled again at once."""
        opened.lane.close()
        if via is not None:
            self.contacts.failed(via, why, clock.now())

    def _on_ended(self, lane: Lane, cause: str) -> None:
        opened = self._onlookers.ended(lane) or self._lanes.ended(lane)
        if opened is not None and not self.is_over:
            self.contacts.disconnected(opened.card.process, clock.now())
            self._listener.lost(opened.card.process, cause)

    def _on_message(self, lane: Lane, frame: Frame) -> None:
        self.io.looked_at(lane)
        if self.is_over:
            return
        card = self._lanes.behind(lane)
        try:
            if frame.tag == REPORTS:
                self._listener.asked(lane, frame.payload)
            elif card is not None:
                self._listener.said(card.process, frame.payload)
        except MalformedFrame as error:
            logger.warning("%s sent what cannot be understood: %s", lane.name, error)
            why = f"it sent what cannot be understood ({error})"
            self.io.drop(lane, 0.0)
            if card is not None:
                self._listener.misbehaved(card.process, why)
            self._on_ended(lane, why)

    def _on_probed(self, process: ProcessId, what: str, *, has_ended: bool) -> None:
        self._probing.discard(process)
        if not self.is_over and self._lanes.to(process) is None:
            self._listener.probed(process, what, has_ended=has_ended)

    def _drain(self) -> None:
        self._draining = False
        if self.discovery is None or self.is_over:
            return
        now = clock.now()
        for event in self.discovery.drain():
            if isinstance(event, Gone):
                self.counts.departures.inc()
                self.contacts.unsighted(event.sighting.key)
            elif event.sighting.process != self._me.process:
                if isinstance(event, Found):
                    self.counts.arrivals.inc()
                self.contacts.sighted(event.sighting, now)


PROBE_HERE_WITHIN = 0.05
"""Seconds for a port of this machine.

It answers at once or a firewall drops the question.  The system may release the slot of a process
that was killed a moment after its connections, so the slot is looked at again soon.
"""


def _is_free(slot: int | None) -> bool:
    """Whether the system has released the lock of a slot here, whatever a firewall does."""
    if slot is None:
        return False
    try:
        return is_slot_free(slot)
    except DistributedError as error:
        logger.debug("slot %d could not be looked at: %s", slot, error)
        return False


def _raise(reason: str) -> None:
    raise RuntimeError(reason)
