"""What a process knows of itself, of the time, and of the others around it."""

from __future__ import annotations

from collections.abc import Iterable

from potluck.core.cluster_cards import ProcessCard, Role
from potluck.core.cluster_config import ClusterConfig
from potluck.core.cluster_contacts import Contact, Contacts
from potluck.core.cluster_time import SteadyTime
from potluck.core.health import HealthMonitor, HealthStatus
from potluck.vocabulary import ProcessId

__all__ = ["Surroundings"]

_BEATS_IN_A_PAUSE = 5
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

    @property
    def time(self) -> float:
        """The caller's time, except that it never goes back."""
        return self.clock.current

    @property
    def pause_after(self) -> float:
        """Seconds without contact after which we pause ourselves."""
        return self.config.health.pause_after

    @property
    def interval(self) -> float:
        """Seconds from one heartbeat to the next: a few must fit into a pause, even with losses."""
        return min(self.config.health.interval, self.pause_after / _BEATS_IN_A_PAUSE)

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
        oldest = self.time - self.pause_after
        return [c for c in self.contacts.joiners() if c.leased_at > oldest]

    # --- doubts ---

    def is_doubtful(self, process: ProcessId, pauses: float = 1) -> bool:
        """Whether a process has not confirmed hearing us for so many times its pause."""
        contact = self.contacts.of(process)
        limit = pauses * (max(self.pause_after, contact.card.pause_after) + self.health.lateness)
        return self.time - contact.echoed_at >= limit

    def is_lost(self, process: ProcessId) -> bool:
        """Whether nothing can be done together with a member now."""
        if self.health.status(process).is_operational:
            return self.is_doubtful(process, _DEAF)
        return self.is_doubtful(process)

    def is_silent(self, process: ProcessId) -> bool:
        """Whether a member has paused itself, if it is alive, for all that we hear of it."""
        if self.is_doubtful(process, _GIVEN_UP):
            return True
        pause = self.contacts.of(process).card.pause_after
        return (
            self.health.status(process) is HealthStatus.DEAD
            and self.health.silence(process, self.now) >= 2 * pause
        )

    def why_doubtful(self, process: ProcessId) -> str:
        """Why a member is out of contact, in words."""
        if not self.health.status(process).is_operational:
            return self.health.reason(process)
        return "it does not confirm that it hears us"
