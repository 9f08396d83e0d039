"""Membership and election of one process in one job, as a pure state machine.

Whoever drives a :class:`ClusterCore` tells it what happens on the control lanes and when, carries
out the effects it returns in their order, and calls ``tick`` at ``next_deadline``.  The rules, and
why they are safe, are in ``docs/membership.md``.

The parts: :mod:`cluster_contacts` (whom we hear), :mod:`cluster_evidence` (who is dead),
:mod:`cluster_tenure` (being in a view), :mod:`cluster_succession` (agreeing on the next one),
:mod:`membership` (whom to propose), :mod:`cluster_campaign` and :mod:`election` (who leads),
:mod:`cluster_founding`, :mod:`cluster_merging`, and :mod:`cluster_mail` (who gets which message).
"""

from __future__ import annotations

from collections.abc import Mapping

from potluck.core.ancestry import MAX_BRANCHES, Branch
from potluck.core.cluster_campaign import Campaign
from potluck.core.cluster_cards import ProcessCard
from potluck.core.cluster_config import ClusterConfig
from potluck.core.cluster_effects import Effect, Note
from potluck.core.cluster_events import ClusterState, MembershipChange
from potluck.core.cluster_evidence import Evidence
from potluck.core.cluster_founding import Founding
from potluck.core.cluster_mail import Mail
from potluck.core.cluster_merging import Merging
from potluck.core.cluster_messages import Cause, CauseCode, ClusterMessage, Commit
from potluck.core.cluster_situation import Situation
from potluck.core.cluster_succession import Succession
from potluck.core.cluster_tenure import Tenure
from potluck.core.election import ElectionManager
from potluck.core.health import HealthMonitor
from potluck.core.membership import Planner
from potluck.vocabulary import ProcessId, View

__all__ = ["ClusterConfig", "ClusterCore", "ClusterState"]

_ROUNDS = 4  # a decision may make the next one possible, e.g. an election a proposal


class ClusterCore:
    """Who is in, agreed with the others.

    >>> from potluck.vocabulary import NodeId
    >>> me = ProcessCard(node=NodeId("a" * 32), incarnation=1, name="attic")
    >>> core = ClusterCore(me, ClusterConfig(solo_delay=0.5), now=0.0)
    >>> _ = core.tick(0.5)
    >>> core.state.value, core.view.members == (me.process,), core.leader == me.process
    ('active', True, True)
    """

    def __init__(self, me: ProcessCard, config: ClusterConfig, now: float) -> None:
        self.me = me
        self.config = config
        self._situation = Situation(me, config, now)
        self._tenure = Tenure(self._situation)
        self._planner = Planner(self._situation)
        self._campaign = Campaign(self._situation)
        self._succession = Succession(self._situation, self._tenure, self._planner, self._campaign)
        self._founding = Founding(self._situation, self._tenure)
        self._merging = Merging(self._situation, self._succession)
        self._evidence = Evidence(self._situation)
        self._mail = Mail(
            self._situation,
            self._tenure,
            self._campaign,
            self._succession,
            self._founding,
            self._merging,
            evidence=self._evidence,
        )
        self._known_view: View | None = None
        self._timers: list[float] = []
        self._is_batch = False
        self._look_at_timers()

    # --- what one can ask ---

    @property
    def view(self) -> View | None:
        """The view we are in."""
        return self._situation.view

    @property
    def state(self) -> ClusterState:
        """Where we stand."""
        return self._situation.state

    @property
    def reason(self) -> str:
        """Why, in words."""
        return self._situation.reason

    @property
    def leader(self) -> ProcessId | None:
        """Rank 0 of the view."""
        return self.view.leader if self.view is not None else None

    @property
    def health(self) -> HealthMonitor:
        """How our contacts are."""
        return self._situation.health

    @property
    def election(self) -> ElectionManager:
        """Who leads in which term."""
        return self._situation.election

    @property
    def observed(self) -> dict[str, View]:
        """The newest view of each lineage that an observer was told of."""
        return self._mail.observed

    @property
    def samples(self) -> int:
        """Committed training samples in our state; the driver keeps it current."""
        return self._situation.samples

    @samples.setter
    def samples(self, samples: int) -> None:
        self._situation.samples = samples

    @property
    def origin(self) -> tuple[Branch, ...]:
        """Where the checkpoint that was loaded came from; the driver sets it."""
        return self._situation.origin

    @origin.setter
    def origin(self, origin: tuple[Branch, ...]) -> None:
        self._situation.origin = origin[-MAX_BRANCHES:]

    @property
    def bound(self) -> Commit | None:
        """The newest view known of the lineage that we belong to; None while we are free."""
        return self._situation.bound

    def missing(self, now: float) -> tuple[Cause, ...]:
        """Members of our view that are out of contact, and why; of the last view if we wait."""
        s = self._situation
        s.now = now
        if s.view is not None:
            return self._planner.missing(s.view)
        return tuple(
            s.cause(who, CauseCode.SILENT, s.why_doubtful(who))
            for who in s.kept()
            if who not in s.ended and who not in s.departed and not s.contacts.is_heard(who)
        )

    def left_out(
        self, awaited: Mapping[ProcessId, str]
    ) -> tuple[dict[ProcessId, str], tuple[ProcessId, ...]]:
        """Processes that our lineage left out and that may be alive, and those that have ended.

        ``awaited`` are some that others have told of.  One that may be alive may have a state that
        no member has.
        """
        s = self._situation
        found = {**awaited, **s.left_out}
        alive = {who: name for who, name in found.items() if not self.has_ended(who)}
        return alive, tuple(who for who in found if who in s.ended)

    def has_ended(self, process: ProcessId) -> bool:
        """Whether a process is known to have ended, or has left our lineage."""
        return process in self._situation.ended or process in self._situation.departed

    @property
    def is_insisting(self) -> bool:
        """Whether members that are left out need not be waited for, whatever they have."""
        return self._situation.is_insisting or self._situation.quorum == "any"

    @property
    def next_deadline(self) -> float | None:
        """When ``tick`` wants to be called next, by the clock of ``now``; None after leaving."""
        s = self._situation
        if s.state is ClusterState.LEFT:
            return None
        # What is past has been looked at, or the next beat will be soon enough.
        time, due = s.time, s.next_beat
        for timer in self._timers:
            if time < timer < due:
                due = timer
        due = s.clock.on_the_wall(due)
        judged = s.health.next_deadline
        return due if judged is None else min(due, judged)

    def _look_at_timers(self) -> None:
        """Note when the parts want to be looked at; only their own decisions change that."""
        parts = self._campaign, self._succession, self._founding
        self._timers = [time for part in parts for time in part.deadlines if time is not None]

    # --- what happens ---

    def begin_batch(self) -> None:
        """Take in several things before deciding: what is told from now on is only noted.

        Each call still returns its own effects, to be carried out in order.  A driver that finds
        much waiting tells it all and then calls :meth:`end_batch`: so nobody is accused, and no
        pause begins, while the answer is among what waits.
        """
        self._is_batch = True

    def end_batch(self, now: float) -> list[Effect]:
        """Decide what follows from all that was told since :meth:`begin_batch`."""
        self._is_batch = False
        self._begin(now)
        return self._finish()

    def connected(self, peer: ProcessCard, now: float) -> list[Effect]:
        """An authenticated control lane to a process is open."""
        if self._begin(now):
            self._evidence.connected(peer)
        return self._finish()

    def disconnected(self, peer: ProcessId, cause: str, now: float) -> list[Effect]:
        """The last control lane to a process ended."""
        if self._begin(now):
            self._evidence.disconnected(peer, cause)
        return self._finish()

    def expel(self, peer: ProcessId, why: str, now: float) -> list[Effect]:
        """Remove a process for what it sent; ``why`` says what, and is told to all members."""
        if self._begin(now):
            self._evidence.expel(peer, why)
        return self._finish()

    def ended(self, peer: ProcessId, how: str, now: float) -> list[Effect]:
        """A probe showed that a process has ended; ``how`` says by what."""
        if self._begin(now):
            self._evidence.probed_dead(peer, how)
        return self._finish()

    def unreachable(self, peer: ProcessId, why: str, now: float) -> list[Effect]:
        """A probe of its port proved nothing."""
        if self._begin(now):
            self._evidence.unreachable(peer, why)
        return self._finish()

    def receive(self, sender: ProcessId, message: ClusterMessage, now: float) -> list[Effect]:
        """A message arrived on the control lane."""
        if self._begin(now):
            self._mail.take(sender, message)
        return self._finish()

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if self._begin(now):
            s = self._situation
            events = s.health.tick(now)
            s.out.extend(Note(event) for event in events)
            self._evidence.review()
            if s.time >= s.next_beat:
                s.beat()
            s.is_dirty = True
        return self._finish()

    def leave(self, now: float) -> list[Effect]:
        """Say goodbye; after this the core does nothing more."""
        if self._begin(now):
            self._mail.leave("it said goodbye")
        return self._finish()

    def step_down(self, now: float) -> list[Effect]:
        """Hand rank 0 to the next member, if it is ours."""
        s = self._situation
        if self._begin(now) and s.view is not None:
            if s.view.leader != s.id or len(s.view.members) == 1:
                why = "only the first of several members can hand over"
                s.note(MembershipChange.REFUSED, why, s.id)
            else:
                self._planner.is_stepping_down = s.is_dirty = True
                s.election.stepped_down(f"{s.me} hands over the first rank")
        return self._finish()

    def continue_without_missing(self, now: float) -> list[Effect]:
        """A person says: do not wait for members that are missing, continue with those here."""
        s = self._situation
        if self._begin(now) and s.bound is not None:
            if s.state is ClusterState.ACTIVE:
                s.is_insisting = True
            else:
                s.is_released = s.is_dirty = True
        return self._finish()

    def call_election(self, now: float) -> list[Effect]:
        """Replace a lost leader, where that is not done without being asked to."""
        if self._begin(now):
            self._campaign.is_called = self._situation.is_dirty = True
        return self._finish()

    def _begin(self, now: float) -> bool:
        """Take the time; whether anything still matters to us."""
        s = self._situation
        s.now = now
        before = s.time
        time = s.clock.advance(now)
        if time - before > s.pause_after:
            s.woke_at = time
        s.out = []
        for timer in self._timers:
            if before < timer <= time:
                s.is_dirty = True
        return s.state is not ClusterState.LEFT

    def _finish(self) -> list[Effect]:
        """Decide what follows from what happened."""
        s = self._situation
        if self._is_batch:
            self._notice_view()  # the next message may be of a view that this one installed
        elif s.is_dirty:
            self._decide()
            self._look_at_timers()
        if s.election.events:
            s.note_elections()
        return s.out

    def _decide(self) -> None:
        s = self._situation
        for _ in range(_ROUNDS):
            if not s.is_dirty or s.state is ClusterState.LEFT:
                break
            s.is_dirty = False
            self._notice_view()
            if s.view is not None:
                self._tenure.review(s.view)
                self._succession.review(s.view)
                self._notice_view()
            self._founding.review()
            self._merging.review()
            self._notice_view()

    def _notice_view(self) -> None:
        """Let the parts forget what belonged to another view."""
        if self._situation.view is not self._known_view:
            self._known_view = self._situation.view
            self._campaign.begin()
            self._succession.begin()
            self._founding.begin()
            self._merging.begin()
            self._evidence.begin()
