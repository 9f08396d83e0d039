"""What must hold in every cluster at every moment, checked from outside with full knowledge.

Safety is checked when it could break, at the very event:

* a view has at most one committed successor, and its members agree on their ranks;
* the rules of votes, proposals and quorums (:mod:`potluck.testing.ballots`);
* a process's views follow each other, it is in each of them, and no observer ever is;
* nobody is active in a view from which a later view of the lineage has excluded it, so that two
  views of one lineage are never at work at once; a process that was stopped or suspended has the
  time it needs to notice (``Bounds.waking``).

Liveness is checked when the surroundings have not changed for as long as it may take, and the links
lose nothing:

* nobody stays active in a view with a member that is dead, stopped, cut off or elsewhere;
* when all faults have ended, all processes are in one view.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from potluck.core import cluster_effects as effects
from potluck.core.cluster import ClusterConfig
from potluck.core.cluster_cards import Role
from potluck.core.cluster_events import ClusterState
from potluck.core.cluster_messages import Commit, Proposal
from potluck.core.election_events import ElectionEvent, ElectionKind
from potluck.core.pace import LENGTHENED
from potluck.testing.ballots import Ballots
from potluck.testing.calm import Calm
from potluck.testing.dialling import Dialling
from potluck.testing.families import Families
from potluck.testing.ledger import Ledger
from potluck.testing.network import LossyNetwork
from potluck.testing.process import SimulatedProcess
from potluck.testing.violation import Names, Violation
from potluck.vocabulary import ProcessId, View

__all__ = ["Bounds", "Invariants", "Violation"]


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long things may take, in seconds of the simulated time."""

    waking: float
    """From the end of a stop or suspension until a process has noticed that it was excluded."""
    settling: float
    """From the last change of the surroundings until views contain only who can work together."""
    patience: float
    """For this long after a process ran late, the others are patient with it, and it with them."""
    converging: float
    """From the end of all faults until all are in one view."""

    @classmethod
    def of(cls, config: ClusterConfig) -> Bounds:
        """The bounds that a configuration promises."""
        pause = config.health.pause_after
        return cls(
            waking=1.5 * pause,
            settling=4 * pause + 5 * config.election.election_timeout,
            patience=2 * LENGTHENED * pause + 2 * pause,
            converging=8 * pause + 10 * config.election.election_timeout + config.solo_delay,
        )


class Invariants:
    """Watches a simulated cluster and raises :class:`Violation` when a rule is broken."""

    def __init__(
        self,
        places: Mapping[str, SimulatedProcess],
        network: LossyNetwork,
        bounds: Bounds,
        *,
        is_one_at_work: bool = True,
    ) -> None:
        self.bounds = bounds
        self._is_one_at_work = is_one_at_work  # not under the quorum "any"
        self.committed: dict[tuple[str, int], View] = {}
        """Every view that anybody installed or announced as agreed."""
        self._places = places
        self._network = network
        self._clock = network.clock
        self._newest: dict[str, int] = {}  # lineage -> the last committed epoch
        self.names = Names(places)
        self.ballots = Ballots(self.names, self._is_alive)
        self.calm = Calm(places, network, self.names, bounds.settling, bounds.converging)
        self.families = Families(places, self.names, self._is_waking)
        self.ledger = Ledger(
            self.names,
            self.families,
            self._is_alive,
            self._applies,
            is_one_at_work=is_one_at_work,
        )
        self._disturbances = 0
        self._patient_until = 0.0

    # --- at every event ---

    def sends(self, process: SimulatedProcess, to: ProcessId, message: object) -> None:
        """Check a message that is about to leave."""
        if isinstance(message, Commit):
            self._commits(process, message.view, message.proposal)
        else:
            self.ballots.sends(process, to, message)

    def tells(self, process: SimulatedProcess, effect: effects.Effect) -> None:
        """Check what a core has decided."""
        if isinstance(effect, effects.Installed):
            self._installs(process, effect.view)
            if effect.commits:
                self.families.succeeded(process, effect.commits)
        elif isinstance(effect, effects.Removed):
            self._leaves(process, effect.commit)
        elif isinstance(effect, effects.Note):
            event = effect.event
            if isinstance(event, ElectionEvent) and event.kind is ElectionKind.SPLIT_BRAIN:
                raise Violation(f"{process.name} sees a split brain: {event}")

    def changed(self, process: SimulatedProcess) -> None:
        """Check where a core stands after its view or state changed."""
        core = process.core
        self.calm.changed(process)
        if core is None or core.state is not ClusterState.ACTIVE:
            return
        view = core.view
        if view is None:
            raise Violation(f"{process.name} is active without a view")
        if self.committed.get((view.lineage, view.epoch)) != view:
            raise Violation(
                f"{process.name} is active in {self.names.view(view)}, which is not agreed"
            )
        self._check_excluded(process)
        if self._is_one_at_work:
            self.families.check()

    def _applies(self, process: SimulatedProcess, view: View) -> None:
        """Check a process whose trainer applies a step in a view: then it is at work there."""
        core = process.core
        if core is None or core.view is None:
            raise Violation(f"{process.name} applies a step in no view")
        if (core.view.lineage, core.view.epoch) != (view.lineage, view.epoch):
            raise Violation(
                f"{process.name} applies a step in {self.names.view(view)}, although it is in "
                f"{self.names.view(core.view)}"
            )
        if core.state is not ClusterState.ACTIVE:
            raise Violation(f"{process.name} applies a step although it is {core.state.value}")
        self._check_excluded(process)
        if self._is_one_at_work:
            self.families.check()

    def restless(self, process: SimulatedProcess) -> None:
        """A core that wants to be woken at once, again and again, would burn a processor."""
        core = process.core
        due = core.next_deadline if core is not None else None
        raise Violation(
            f"{process.name} was woken at {process.clock.now} by its clock, and wants to be woken "
            f"again at {due}, which has passed"
        )

    def woke(self, process: SimulatedProcess) -> None:
        """A process goes on: it has a while to notice what it missed."""
        self._clock.after(self.bounds.waking, self._has_woken, process)

    def _has_woken(self, process: SimulatedProcess) -> None:
        self._check_excluded(process)
        if self._is_one_at_work:
            self.families.check()

    def _is_waking(self, process: SimulatedProcess) -> bool:
        return self._clock.now < process.woke_at + self.bounds.waking

    def _installs(self, process: SimulatedProcess, view: View) -> None:
        if process.process not in view.members:
            raise Violation(f"{process.name} installs {self.names.view(view)} and is not in it")
        if len(set(view.members)) != len(view.members):
            raise Violation(f"{process.name} installs {self.names.view(view)}, with a member twice")
        for place in self._places.values():
            if place.card.role is Role.OBSERVER and place.process in view.members:
                raise Violation(f"{process.name} installs {self.names.view(view)} with an observer")
        before = process.seen[0]
        if before and before.lineage == view.lineage and before.epoch >= view.epoch:
            names = self.names
            raise Violation(
                f"{process.name} goes back from {names.view(before)} to {names.view(view)}"
            )
        self._commits(process, view)
        self.families.installed(process, view)

    def _leaves(self, process: SimulatedProcess, commit: Commit | None) -> None:
        """A process is in no view any more; a lineage of one dissolves without a message."""
        view = process.seen[0]
        if commit is None and view is not None and process.core is not None:
            commit = process.core._situation.archive.newest(view.lineage)  # noqa: SLF001
        if commit is not None and commit.proposal.into:
            self._commits(process, commit.view, commit.proposal)

    def _commits(
        self, process: SimulatedProcess, view: View, proposal: Proposal | None = None
    ) -> None:
        known = self.committed.get((view.lineage, view.epoch))
        if known is None:
            self._agrees(process, view, proposal or Proposal(view.members))
        elif known.members != view.members:
            raise Violation(
                f"View {view.epoch - 1} of {view.lineage[:8]} has two successors: "
                f"{self.names.view(known)}, and at {process.name} {self.names.view(view)}"
            )

    def _agrees(self, process: SimulatedProcess, view: View, proposal: Proposal) -> None:
        """A view is announced as agreed for the first time."""
        self.committed[view.lineage, view.epoch] = view
        self.calm.agreed(view)
        self.families.agreed(view, proposal.into)
        if proposal.into:
            newest = self.families.newest_epoch(proposal.into)
            self.ledger.dissolves(view, proposal.into, newest)
        before = self.committed.get((view.lineage, view.epoch - 1))
        if before is not None:
            self.ballots.check_quorum(process, before, proposal)
        if view.epoch > self._newest.get(view.lineage, 0) and not proposal.into:
            self._newest[view.lineage] = view.epoch
            for place in self._places.values():
                self._check_excluded(place)

    def _check_excluded(self, process: SimulatedProcess) -> None:
        """Whether it is at work in a view although a later one has excluded it."""
        core = process.core
        if core is None or process.is_stopped or core.state is not ClusterState.ACTIVE:
            return
        view = core.view
        if view is None or self._is_waking(process):
            return
        for epoch in range(view.epoch + 1, self._newest.get(view.lineage, 0) + 1):
            later = self.committed.get((view.lineage, epoch))
            if later is not None and process.process not in later.members:
                raise Violation(
                    f"{process.name} is at work in {self.names.view(view)} while it has been "
                    f"excluded from {self.names.view(later)}"
                )

    def _is_alive(self, process: ProcessId) -> bool:
        return any(
            place.process == process and place.core is not None for place in self._places.values()
        )

    # --- when nothing has changed for a while ---

    def ran_late(self) -> None:
        """A process was held up, or its clock leapt: all are patient for a while."""
        self._patient_until = self._clock.now + self.bounds.patience

    @property
    def patience(self) -> float:
        """Seconds for which decisions may still take longer."""
        return max(0.0, self._patient_until - self._clock.now)

    def disturbed(self) -> None:
        """The surroundings have changed: what must settle begins to settle now."""
        self._disturbances += 1
        self.calm.disturbed()
        self._clock.after(self.bounds.settling, self._check_settled, self._disturbances)

    def _check_settled(self, disturbance: int) -> None:
        if disturbance != self._disturbances or self._network.quality.loss:
            return  # with luck a lossy network lets nobody agree on anything for ever
        if self.patience:
            self._clock.after(self.patience, self._check_settled, disturbance)
            return
        for process in self._places.values():
            core = process.core
            if core is None or process.is_stopped or core.state is not ClusterState.ACTIVE:
                continue
            if core.view is not None:
                self._check_members(process, core.view)

    def _check_members(self, process: SimulatedProcess, view: View) -> None:
        present = {place.process: place for place in self._places.values()}
        for member in view.members:
            place = present.get(member)
            if (trouble := self._trouble(process, place, view)) is not None:
                raise Violation(
                    f"{process.name} is still active in {self.names.view(view)} "
                    f"{self.bounds.settling:g} s after the last change, although "
                    f"{self.names.who(member)} {trouble}"
                )

    def _trouble(
        self, process: SimulatedProcess, place: SimulatedProcess | None, view: View
    ) -> str | None:
        if place is None or place.core is None:
            return "is dead"
        if place.is_stopped:
            return "is stopped"
        if not self._network.is_open(process.host, place.host):
            return "cannot be reached"
        if place.core.view != view:
            return f"is in {self.names.view(place.core.view)}"
        return None

    def why_not_waiting(self, dialling: Dialling) -> str | None:
        """Who does not wait as it should, for a process that may be at work; None if all do.

        At most one view is at work.  A process that was in a view and is not in this one names one
        that is dead, and of which nobody can know that.
        """
        living = [
            place
            for place in self._places.values()
            if place.core is not None and place.card.role is Role.MEMBER
        ]
        missing = set(map(str, self.unknown_deaths(dialling)))
        working = set()
        for place in living:
            core = place.core
            assert core is not None
            if core.state is ClusterState.ACTIVE and core.view is not None:
                working.add(self.families.heir(core.view.lineage))
            elif self.families.has_been_in_a_view(place.process) and not any(
                name in core.reason for name in missing
            ):
                return f"{place.name} does not wait for one that is missing: {core.reason}"
        return "two lineages are at work" if len(working) > 1 else None

    def unknown_deaths(self, dialling: Dialling) -> set[ProcessId]:
        """All starts of processes that are dead, and of which nobody can know that."""
        return {
            who
            for place in self._places.values()
            if place.core is None and not dialling.is_provable(place)
            for who in place.past
        }

    def why_not_converged(self) -> str | None:
        """What keeps the living members from being in one view; None if they are."""
        members = [
            place
            for place in self._places.values()
            if place.core is not None and place.card.role is Role.MEMBER
        ]
        wanted = {place.process for place in members}
        for place in members:
            core = place.core
            assert core is not None
            if core.state is not ClusterState.ACTIVE or core.view is None:
                return f"{place.name} is {core.state.value}: {core.reason}"
            if set(core.view.members) != wanted:
                return f"{place.name} is in {self.names.view(core.view)}"
        views = {place.core.view for place in members if place.core is not None}
        return None if len(views) <= 1 else "two views have the same members"
