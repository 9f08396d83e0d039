"""What a process knows of itself, of the time, and of the others around it."""

from __future__ import annotations

from collections.abc import Iterable

from potluck.core.cluster_cards import ProcessCard, Role
from potluck.core.cluster_config import ClusterConfig
from potluck.core.cluster_contacts import Contact, Contacts
from potluck.core.cluster_time import SteadyTime
from potluck.core.election_messages import Proposal
from potluck.core.health import HealthMonitor, HealthStatus
from potluck.core.pace import LENGTHENED, pace
from potluck.vocabulary import ProcessId

__all__ = ["Surroundings"]

_GIVEN_UP = 3  # the same until it counts as silent: it may have a lease for the first of them
_DEAF = 1.5  # pauses without a confirmation from somebody we hear, before operations are aborted


class Surroundings:
    """Who is around, how they are, and what time it is."""

    def __init__(self, me: ProcessCard, config: ClusterConfig, now: float) -> None:
        self.me = me
        self.id = me.process
        self.config = config
        self.clock = SteadyTime(now)
        self.now = now
        self.health = HealthMonitor(config.health)
        self.contacts = Contacts(me, self.health)
        self.interval, self.pause_after = pace(1, config.health)
        """Seconds from one heartbeat to the next, and without contact until we pause ourselves: as
        the view says, and without one by the number of processes around."""
        self.former_pause = 0.0
        """The pause of the view before this one; members that have not entered yet may use it."""
        self.woke_at = float("-inf")
        """When we last ran again after not running for a pause or longer."""
        self._crowd = 0  # processes that the pace was worked out for; 0 in a view

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
        """Beat as a view says that we enter; None without one: as the crowd around allows."""
        if proposal is None or not (proposal.interval and proposal.pause_after):
            self._crowd = 0 if proposal is not None else self._around()
            size = len(proposal.members) if proposal is not None else self._crowd
            self._adopt(*pace(size, self.config.health))
        else:
            self._crowd = 0
            self._adopt(proposal.interval, proposal.pause_after)

    def follow_crowd(self) -> None:
        """Without a view: beat more slowly the more processes are around."""
        if self._crowd != (around := self._around()):
            self._crowd = around
            self._adopt(*pace(around, self.config.health))

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
        """Seconds after which nobody relies any more on what a process of our view said."""
        return LENGTHENED * max(self.pause_after, self.former_pause)

    @property
    def is_observer(self) -> bool:
        """Whether we only look on."""
        return self.me.role is Role.OBSERVER

    def name(self, process: ProcessId) -> str:
        """Somebody's name, for sentences."""
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
        """Whether a process has not confirmed hearing us for so many times its pause."""
        contact = self.contacts.of(process)
        # While we did not run, nobody could have confirmed anything to us.
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
        return "it does not confirm that it hears us"
