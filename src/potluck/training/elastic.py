"""ElasticTrainer: training that continues while machines come and go.

A step is a transaction: gradients are averaged out of place, and applied only when every member
holds the average.  If a member is lost in the middle, the survivors decide alike whether the step
counts; if not, they average again what they have computed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from potluck._process import Closing
from potluck._types import Branch, NodeId, ProcessId, Seconds, View, in_seconds
from potluck.arrays.base import Array
from potluck.cluster.cluster import Cluster
from potluck.cluster.telemetry import Steps
from potluck.cluster.views import ViewSession
from potluck.collective.call import Work
from potluck.collective.collectives import DistributedBackend
from potluck.collective.context import DistributedContext
from potluck.compression.compressor import GradientCompressor
from potluck.errors import (
    Aborted,
    BackendUnavailable,
    CollectiveMismatch,
    Disconnected,
    DistributedError,
    MalformedFrame,
    NoQuorum,
    Timeout,
    ViewChanged,
)
from potluck.logs import NOTICE, get_logger
from potluck.membership.messages import Ancestry, Count, Label, Lineage, MembershipMessage
from potluck.trace.recorder import log_of
from potluck.training.averaging import (
    HEAVIEST,
    LENGTH,
    Buckets,
    DiscardedWork,
    Gradients,
    PendingStep,
    StepContribution,
    StepOutcome,
    check_records,
    compare_states,
    count_step,
)
from potluck.training.averaging import WHAT as RECORD_WHAT
from potluck.training.balance import MemberCondition, MemberSpeeds, Straggler, measure_condition
from potluck.training.checkpoint import Checkpointer, Saving, count_save, own_part, restore_own
from potluck.training.checkpoint_files import Checkpoint
from potluck.training.peer_messages import Shares, check_intervals, gather, malformed
from potluck.training.sampler import ElasticSampler, Indices, Intervals, overlap, total, union
from potluck.training.state import StateSync, SyncReport, TrainingState
from potluck.training.steps import (
    FRESH,
    Missing,
    Position,
    StepHistory,
    StepReport,
    SyncAction,
    SyncDecision,
    Trail,
    ancestry_in,
    decide,
)

# --------------------------------------------------------------------------------------------------
# The ground that elastic steps stand on: a cluster whose views change, or a group that stays.

MOST_ALARMS = 3
"""Tries of one step that members may end for reasons that no other member sees."""


def unclear(text: str) -> Aborted:
    """A step was ended, and this member cannot tell who is at fault: it is tried again."""
    error = Aborted(text)
    error.is_final = error.is_unclear = True
    return error


class ViewScope:
    """Where calls run: all those of one block in the same view."""

    def __init__(self, group: DistributedContext) -> None:
        self.group = group
        self._cluster = group if isinstance(group, Cluster) else None
        self._session: ViewSession | None = None
        self._steps = Steps()
        self._alarms: list[set[int]] = []  # who ended tries since the last step, in this view

    @property
    def is_cluster(self) -> bool:
        """Whether views follow each other here, so that the others can continue without one."""
        return self._cluster is not None

    def can_continue(self, error: DistributedError) -> bool:
        """Whether the error says that the view is over: then another follows, or will.

        What a program ended on purpose is not to be tried again.
        """
        if self._cluster is None or not error.recoverable:
            return False
        if isinstance(error, Aborted) and error.is_unclear:
            return True
        # Before this member stood in any view, only the end of a view can be reported.
        return self._session is None or self._session.ending is not None

    @contextlib.contextmanager
    def enter_view(self, timeout: float | None) -> Iterator[View]:
        """A block in one view.

        Raises what the cluster has to tell first; what fails because the view is over is raised as
        that.
        """
        if self._cluster is None:
            yield _lasting(self.group.world_size)
            return
        limit = self._cluster.timeout if timeout is None else timeout
        with self._cluster.innermost.sessions.visit(limit) as session:
            if self._session is not session:
                self._session = session
                self._alarms.clear()
            if session.group is not None:
                session.group.ask_around()
            try:
                yield session.view
            except CollectiveMismatch as error:
                raise self._judged(error) from error
            except Aborted as error:
                is_ours = error.is_final or error.rank in {None, session.rank}
                if is_ours or isinstance(error, ViewChanged):
                    raise
                tellers = set() if error.teller is None else {error.teller}
                raise self._alarmed(tellers, error) from error

    def _judged(self, error: CollectiveMismatch) -> DistributedError:
        """What it means that ranks disagree about an operation.

        A member that differs from most is at fault, like one that sends what is not valid.  Where
        this member is in no majority, or was not asked, the error stays what it is.
        """
        if error.odd_one is not None:
            return MalformedFrame(
                f"Rank {error.odd_one} disagrees with most members",
                rank=error.odd_one,
                cause=error.cause or error.message,
            )
        ballot = error.ballot
        if ballot is None or not ballot.has_most:
            return error
        odd = ballot.odd_one()
        if odd is not None:
            rank, theirs, ours = odd
            return MalformedFrame(
                f"Rank {rank} made another call than most members",
                rank=rank,
                cause=f"{theirs} where {ours} was expected",
            )
        # Another member has seen it, and has the one at fault removed; or it says so in vain.
        return self._alarmed(ballot.reporters, error)

    def _alarmed(self, tellers: set[int], error: DistributedError) -> DistributedError:
        """Members (``tellers``) have ended a step of all, for reasons that only they know.

        It is tried again; a member that ends one try after the other is at fault.
        """
        self._alarms.append(tellers)
        if len(self._alarms) < MOST_ALARMS:
            return unclear(str(error))
        ended = Counter(rank for each in self._alarms for rank in each)
        if not ended:
            return error
        ((rank, count),) = ended.most_common(1)
        return MalformedFrame(
            f"Rank {rank} aborted the step of all members {count} times in a row",
            rank=rank,
            cause=error.message,
        )

    @property
    def failures(self) -> int:
        """Grows, on all members alike, when an operation of all has failed."""
        group = self.group.group if self._session is None else self._session.group
        return 0 if group is None else group.epoch

    def rates(self) -> tuple[int, ...]:
        """Bytes per second of each member's link, as all have agreed; 0 where unmeasured."""
        group = self.group.group if self._session is None else self._session.group
        if group is None:
            return ()
        return tuple(map(min, group.links.up, group.links.down))

    @property
    def is_constant(self) -> bool:
        """Whether this member was in every view of this lineage and of all its ancestors.

        Then no step was made without it, and what it began with is what the training began with.
        """
        return self._cluster is None or self._cluster.innermost.is_constant  # type: ignore[attr-defined]

    def left_out(
        self, awaited: Mapping[ProcessId, str]
    ) -> tuple[Missing, tuple[ProcessId, ...], bool]:
        """Who was left out and may be alive, who has ended, and whether to continue without them.

        ``awaited`` are those of whom the last decision told.
        """
        if self._cluster is None:
            return (), (), True
        cluster = self._cluster.innermost
        found, ended, insists = cluster.left_out(awaited)  # type: ignore[attr-defined]
        return tuple(found.items()), ended, insists

    def note_awaited(self, awaited: Mapping[ProcessId, str]) -> None:
        """Tell observers which members the training waits for; none, if it does not wait."""
        if self._cluster is not None:
            self._cluster.innermost.note_awaited(awaited)  # type: ignore[attr-defined]

    def note_progress(
        self, samples: int, origin: tuple[Branch, ...], steps: int, what: str = "step"
    ) -> None:
        """Tell the cluster how many samples are committed, and from what its lineage continues.

        Both decide which of two clusters stays when they meet.
        """
        self._alarms.clear()
        backend = self.group if self._session is None else self._session.backend
        if backend is not None:
            self._steps.note(log_of(backend), steps, what)
        if self._cluster is not None:
            self._cluster.note_progress(samples, origin)

    def note_event(self, event: object) -> None:
        """Keep something that the user should know among the events of the cluster."""
        if self._cluster is not None:
            self._cluster.note_event(event, logging.WARNING)


def _lasting(size: int) -> View:
    """The only view of a group that does not change."""
    node = NodeId("0" * 32)
    return View("0" * 32, 1, tuple(ProcessId(node, rank) for rank in range(size)))


# --------------------------------------------------------------------------------------------------
# One try of a step: the record that everybody sends, then the buckets, always in this order.
#
# It may begin before all gradients are there, while a backward pass still computes; a member that
# has nothing to compute makes the same operations at once.

ENDING = 5.0
"""Seconds in which operations of a view that is over come to their end."""


class StepAttempt:
    """What of a step is under way in one view."""

    def __init__(
        self,
        attempt: Position,
        group: DistributedBackend,
        record: StepContribution,
        compressor: GradientCompressor | None,
    ) -> None:
        self.attempt, self.weight = attempt, record.weight
        self._group, self._compressor = group, compressor
        self._row = record.encode()
        self._told: Work[npt.NDArray[np.int64]] | None = None
        self._records: tuple[StepContribution, ...] = ()
        self._works: list[Work[Array]] = []

    def start(self) -> None:
        """Send the record meanwhile."""
        self._told = self._group.gather_records(self._row, async_op=True)

    def records(self, timeout: float | None) -> tuple[StepContribution, ...]:
        """What everybody brings."""
        if not self._records:
            told = self._told
            rows = (
                self._group.gather_records(self._row, timeout)
                if told is None
                else told.wait(timeout)
            )
            numbered = enumerate(rows.reshape(-1, LENGTH).tolist())
            self._records = tuple(StepContribution.decode(row, rank) for rank, row in numbered)
        return self._records

    @property
    def begun(self) -> int:
        """Buckets that are under way or done."""
        return len(self._works)

    def launch(self, buckets: Buckets, timeout: float | None) -> None:
        """Begin with the next bucket, which is packed."""
        total = 0.0
        if self._compressor is not None:
            total = sum(record.weight for record in self.records(timeout))
        self._works.append(buckets.start(self.begun, self._group, self._compressor, total))

    def finish(self, gradients: Gradients, timeout: float | None) -> None:
        """Have the mean of everything."""
        buckets = gradients.buckets
        while self.begun < len(buckets.all):
            gradients.pack(self.begun, self.weight)
            self.launch(buckets, timeout)
        for number, work in enumerate(self._works):
            work.wait(timeout)
            buckets.finish(number, is_compressed=self._compressor is not None)

    def abandon(self) -> None:
        """The view is over: wait until nothing of this is under way any more."""
        deadline = time.monotonic() + ENDING
        under_way: list[Work[Any]] = [*self._works, *([self._told] if self._told else [])]
        for work in under_way:
            with contextlib.suppress(DistributedError):
                work.sleep_until(deadline)


# --------------------------------------------------------------------------------------------------
# Settling: the first thing the members of a new view do together.
#
# They tell each other where they stand, decide the step that was under way, bring the state to
# those who lack it, and share out what is left of the batch.

WHAT = "its report of where it stands"

Token = Annotated[str, msgspec.Meta(pattern=r"\A[0-9A-Za-z]{0,64}\Z")]
"""A mark, which becomes part of the name of a file: nothing that could lead elsewhere."""


_Place = tuple[Lineage, Count, Count]
_LARGEST = (1 << 62) - 1
_MANY_STEPS = 1 << 40  # a thousand a second for 34 years
_NEAR = 1 << 20  # steps
_MOST_MISSING = 32  # processes that a report names


class _ReportMessage(MembershipMessage, frozen=True):
    """What a member reports, as it travels."""

    position: _Place
    attended: tuple[Lineage, Count]
    attempt: _Place | None
    holds: bool
    founder: bool
    ancestry: Ancestry
    samples: Count
    trail: Trail
    samples_held: Count
    missing: Annotated[tuple[tuple[ProcessId, Label], ...], msgspec.Meta(max_length=_MOST_MISSING)]
    insists: bool
    ended: Annotated[tuple[ProcessId, ...], msgspec.Meta(max_length=_MOST_MISSING)]
    taken: Shares
    speed: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
    condition: MemberCondition
    waits: bool
    token: Token


@dataclass(frozen=True, slots=True)
class MemberReport:
    """What a member reports."""

    report: StepReport
    taken: Intervals
    """Samples it has in hand for its next step."""
    speed: int
    condition: MemberCondition
    waits: bool = False
    """Whether it has computed, and waits for the others."""
    token: str = ""
    """The mark it has left in its folder for checkpoints."""

    def message(self) -> _ReportMessage:
        """As it travels."""
        report = self.report
        return _ReportMessage(
            report.position,
            report.attended,
            report.attempt,
            report.holds,
            report.founder,
            report.ancestry,
            min(report.samples, _LARGEST),
            report.trail,
            min(report.samples_held, _LARGEST),
            report.missing[:_MOST_MISSING],
            report.insists,
            report.ended[:_MOST_MISSING],
            self.taken,
            self.speed,
            self.condition,
            self.waits,
            self.token,
        )

    @classmethod
    def of(cls, told: _ReportMessage) -> MemberReport:
        """From what another member sent."""
        report = StepReport(
            Position(*told.position),
            told.attended,
            None if told.attempt is None else Position(*told.attempt),
            told.holds,
            told.founder,
            told.ancestry,
            told.samples,
            told.trail,
            told.samples_held,
            told.missing,
            told.insists,
            told.ended,
        )
        return cls(report, told.taken, told.speed, told.condition, told.waits, told.token)


def _check(rank: int, standing: MemberReport, view: View, size: int | None) -> None:
    """Raise if a report contradicts what all members know."""
    report = standing.report
    wrong = check_intervals(standing.taken, size)
    for position in (report.position, report.attempt):
        if position is not None and position[0] == view.lineage and position[1] > view.epoch:
            wrong = f"{position}, while view {view.epoch} is the latest"
    if wrong:
        raise malformed(rank, WHAT, wrong)


def _check_steps(steps: Sequence[int]) -> None:
    """Raise if a member alone claims a step that no training reaches.

    The others would follow it, and their own next step could be one that no message can tell.
    """
    for rank, step in enumerate(steps):
        near = sum(each >= step - _NEAR for each in steps)
        if step >= _MANY_STEPS and 2 * near <= len(steps):
            raise malformed(rank, WHAT, f"step {step}, which no training reaches")


@dataclass(frozen=True, slots=True)
class SyncResult:
    """What the members of a view have found out."""

    decision: SyncDecision
    action: SyncAction
    """What this member has to do."""
    taken: tuple[Intervals, ...]
    """In rank order: samples that members had in hand."""
    speeds: tuple[int, ...]
    conditions: tuple[MemberCondition, ...]
    waiting: tuple[int, ...]
    """Ranks that have computed the next step already."""
    tokens: tuple[str, ...] = ()
    """In rank order: the marks they have left in their folders."""
    trained: tuple[int, ...] = ()
    """Ranks that had made a step before."""

    def kept(self, alike: Container[int]) -> list[Intervals | None]:
        """In rank order, what members still have in hand; None for what does not count.

        ``alike`` are the ranks that had the state before anything was sent.
        """
        kept: list[Intervals | None] = [None] * len(self.taken)
        for rank in (*self.decision.sources, *self.decision.receivers):
            action = self.decision.actions[rank]
            others = pieces([share for share in kept if share])
            if action is SyncAction.APPLY:
                kept[rank] = ()
            elif action is SyncAction.RECEIVE and rank not in alike:
                continue
            # Two who began apart, or of whom one was away while its samples were handed out anew,
            # may have taken the same: what the first one has counts.
            elif not overlap(self.taken[rank], others):
                kept[rank] = self.taken[rank]
        return kept


def settle(
    group: DistributedBackend, view: View, mine: MemberReport, size: int | None = None
) -> SyncResult:
    """Ask everybody, and decide; all members call this first in a view.

    ``size`` is the number of samples that there are, if they are handed out.
    """
    told = [MemberReport.of(each) for each in gather(group, mine.message(), _ReportMessage, WHAT)]
    for rank, each in enumerate(told):
        _check(rank, each, view, size)
    _check_steps([each.report.position.step for each in told])
    decision = decide(view, [each.report for each in told])
    if decision.is_lost:
        raise BackendUnavailable(
            "This member has never had the state of the training",
            cause=decision.reason,
            hint="Start it again: it then begins anew, or from a checkpoint.",
        )
    return SyncResult(
        decision,
        decision.actions[group.rank],
        tuple(each.taken for each in told),
        tuple(each.speed for each in told),
        tuple(each.condition for each in told),
        tuple(
            rank
            for rank, each in enumerate(told)
            if each.waits and decision.actions[rank] is SyncAction.KEEP
        ),
        tuple(each.token for each in told),
        tuple(rank for rank, each in enumerate(told) if each.report.position != FRESH),
    )


def pieces(shares: Sequence[Intervals]) -> list[tuple[int, int]]:
    """All intervals of several shares.

    >>> pieces([((0, 2),), (), ((5, 7), (9, 10))])
    [(0, 2), (5, 7), (9, 10)]
    """
    return [piece for share in shares for piece in share]


# --------------------------------------------------------------------------------------------------
# The trainer: one member's part in steps that are transactions.
#
# Everything here follows :mod:`potluck.training.steps`.  A view begins with settling; a step in it
# is a record from every member, the averaging, and a barrier.  A member that passes the barrier
# knows that all hold the average, and applies it.

PLATFORM = f"{platform.machine()} {platform.system()} numpy {np.__version__}"
"""Machines of which this is the same compute the same bits."""

MAX_SAMPLES = (1 << 62) - 1
"""More committed samples than this are not told apart."""

LOOK = 0.5
"""Seconds after which members that wait for a state look again whether it is there."""

CONTINUE = (
    "Bring that machine back, or continue without its steps: `potluck continue`, or "
    "cluster.continue_without_missing()"
)

Result = TypeVar("Result")


logger = get_logger(__name__)


class ElasticTrainer(Closing):
    """Runs steps on a cluster, or on any group.

    ``apply`` gets the tree of averaged gradients and changes the model; it is called for committed
    steps alone, and the arrays are lent for the call.  ``sampler`` and ``batch`` (samples of all
    members together) hand out data; ``compressor`` saves bytes.  Every ``verify_every`` steps the
    members compare their states, and put right what differs.  Every ``save_every`` steps they save
    into the folder ``checkpoints``, each its own or one for all, where ``keep`` checkpoints stay;
    with ``potluck run --resume`` this resumes from the last good one.  If all are damaged that
    raises :class:`~potluck.IoError`, unless ``fresh_start`` asks to begin anew then.

    >>> import numpy as np
    >>> from potluck import DistributedContext, SimulatedBackend
    >>> weights = np.zeros(2)
    >>> def descend(gradient): weights[:] -= 0.5 * gradient
    >>> with DistributedContext(SimulatedBackend.create_group(1)[0]) as group:
    ...     trainer = ElasticTrainer(group, TrainingState(model=weights), descend)
    ...     trainer.step(np.array([2.0, 4.0])).step
    1
    >>> weights.tolist()
    [-1.0, -2.0]
    """

    def __init__(
        self,
        cluster: DistributedContext,
        state: TrainingState,
        apply: Callable[[Any], None],
        *,
        sampler: ElasticSampler | None = None,
        batch: int | None = None,
        compressor: GradientCompressor | None = None,
        verify_every: int = 100,
        checkpoints: str | os.PathLike[str] | None = None,
        save_every: int = 100,
        keep: int = 3,
        fresh_start: bool = False,
        timeout: Seconds | None = None,
    ) -> None:
        if (sampler is None) != (batch is None):
            msg = "Pass both sampler= and batch=, the samples that all members take per step"
            raise ValueError(msg)
        whole = state if sampler is None else state.with_part("sampler", sampler)
        self._scope = ViewScope(cluster)
        self._group = cluster
        self._apply = apply
        self._state = whole
        self._sync = StateSync(whole, cluster.metrics)
        self.sampler, self.batch = sampler, batch or 0
        """Samples of all members together in one step."""
        self._compressor = compressor
        self._pace = MemberSpeeds(self._scope.note_event)
        self.room: dict[int, Array] = {}
        """Memory for what is averaged, by the number of its bucket."""
        self._begun: StepAttempt | None = None
        self._report = StepReport()
        self._settled: View | None = None
        self._rank = 0  # in that view
        self._pending: PendingStep | None = None
        self._outcome = StepOutcome(0, counted=False, world_size=0, weight=0.0, tries=0)
        self._taken: Intervals | None = None
        self._reserved: tuple[Intervals, ...] = ()
        self._others_wait = False
        self._broken: BaseException | None = None
        self._awaited: dict[ProcessId, str] = {}  # who may have the state, when no one here has it
        self._lineage = ""  # of the view in which this member settled last
        self._loaded: Position | None = None  # from a checkpoint
        self._origin = ""  # of what was loaded, in words, until people have read it
        self.discarded: DiscardedWork | None = None
        """The committed steps of this machine that were discarded last, and the total; or None."""
        self.last_sync: SyncReport | None = None
        """What the last exchange of states did, if there was one."""
        if compressor is not None:
            compressor.auto_commit = False  # what it remembers changes when a step is committed
        self._verify_every, self._timeout = verify_every, in_seconds(timeout)
        self._taken_at = 0.0
        self._saving = Saving(checkpoints, save_every, keep, fresh_start=fresh_start)
        found = self._saving.found()
        for each in self._saving.damaged:
            self._scope.note_event(each)
        if found is not None:
            self.resume(found)

    @property
    def position(self) -> Position:
        """The last step that this member has applied, and the view it was made in."""
        return self._report.position

    @property
    def others_wait(self) -> bool:
        """Whether others had computed the next step already when this view began."""
        return self._others_wait

    @property
    def straggler(self) -> Straggler | None:
        """The member that is much slower than the others, if there is one, and likely why."""
        return self._pace.straggler

    @property
    def step_count(self) -> int:
        """Steps that are committed."""
        return self.position.step

    def start(self) -> None:
        """Meet the others and get the state; returns when this member can begin to compute."""
        self._repeat(lambda _: None)

    def take(self) -> Indices:
        """This member's samples for the next step; the same ones until that is done."""
        if self.sampler is None:
            msg = "This trainer has no sampler= and batch= to take samples from"
            raise ValueError(msg)
        if self._taken is None:
            view = self._settled
            share = self._share(view) if view is not None else self._repeat(self._share)
            self._taken = share
        self._taken_at = time.perf_counter()
        return self.sampler.indices(self._taken)

    def step(self, gradients: Any, weight: float | None = None) -> StepOutcome:
        """Average these gradients with those of all members, and apply the result everywhere.

        ``weight`` is how much they count: unless given, the samples taken, or 1.  With a weight of
        0 they are not looked at.  Returns when the step is committed and applied here.
        """
        return self.step_in_buckets(gradients, weight)

    def step_in_buckets(
        self,
        tree: Any,
        weight: float | None,
        limit: int | None = None,
        buckets: Buckets | None = None,
    ) -> StepOutcome:
        """The same in operations of at most ``limit`` bytes, some of which may be under way."""
        if self._taken is not None:
            self._pace.meter.note(total(self._taken), time.perf_counter() - self._taken_at)
        counts = self.counts(weight)
        if self._pending is None and self._begun is not None and self._begun.weight != counts:
            msg = f"Its averaging was started with weight {self._begun.weight:g}, not {counts:g}"
            raise ValueError(msg)
        if self._pending is None or not (self._report.holds or self._begun):
            gradients = Gradients(tree, self.room, limit=limit, buckets=buckets)
            self._pending = PendingStep(gradients, counts)
        # Otherwise the last call was interrupted: the others may have what it was about.
        outcome = count_step(self._group.metrics, lambda: self._repeat(self._try))
        if outcome.counted and self._saving.is_due(outcome.step):
            work = self._saving.save(self._state.capture(), self._own(), self._report.history)
            if work is not None:
                count_save(self._group.metrics, work, self._saving.last_nbytes)
        return outcome

    def note_loss(self, loss: float) -> None:
        """Tell metrics and observers this member's loss of the last step."""
        if self._group.metrics is not None:
            self._group.metrics.training.loss.set(float(loss))

    def counts(self, weight: float | None) -> float:
        """How much this member's gradients count; raises ``ValueError`` for an invalid weight."""
        if weight is not None:
            if not 0 <= float(weight) <= HEAVIEST:  # also if it is not a number
                msg = f"A weight must be a number from 0 to {HEAVIEST:g}, got {weight}"
                raise ValueError(msg)
            return float(weight)
        return 1.0 if self._taken is None else float(total(self._taken))

    def verify(self) -> SyncReport:
        """Compare the states of all members, and put right those that differ; all call this."""
        self.last_sync = self._repeat(self._compare)
        return self.last_sync

    # -- checkpoints -----------------------------------------------------------------------------

    def save(self, checkpointer: Checkpointer) -> Work[Any]:
        """Save the state after the last committed step, meanwhile."""
        history, tree = self._report.history, self._state.capture()
        lineage, epoch, step = history.position
        work = checkpointer.save(
            tree, step, lineage=lineage, epoch=epoch, history=history, own=self._own()
        )
        return count_save(self._group.metrics, work, checkpointer.last_nbytes)

    def resume(self, checkpoint: Checkpoint) -> None:
        """Continue from a checkpoint; call it before :meth:`start`.

        If the members resume from different checkpoints, the one that contains the other counts,
        then the one that followed a common ancestor longer, then the one with more samples.
        """
        if self._settled is not None:
            msg = "A checkpoint must be loaded before the trainer starts"
            raise ValueError(msg)
        tree = checkpoint.tree()
        try:
            self._state.restore(tree)
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            msg = (
                f"The checkpoint {checkpoint.folder} belongs to another training: {error}. "
                "Use the script that saved it, or another folder."
            )
            raise ValueError(msg) from error
        if self._compressor is not None:
            restore_own(checkpoint, self._compressor, self._group.rank, self._group.world_size)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(checkpoint.written_at))
        self._origin = f"checkpoint of {when}, folder {checkpoint.folder}"
        self._loaded = checkpoint.history.position
        self._become(checkpoint.history)

    def _own(self) -> Any:
        return own_part(self._compressor, self._rank)

    def close(self) -> None:
        """Wait for what is being saved; the cluster is the caller's to close."""
        self._saving.close()

    def __enter__(self) -> Self:
        """Meet the others."""
        self.start()
        return self

    # -- an early start --------------------------------------------------------------------------
    #
    # Averaging may begin while the backward pass still computes.  Operations and their order are
    # those of any step, so members that do not begin early take part; the sums have the same bits.
    # What was begun in a view that ends counts nothing: the step is then made from the gradients.

    def begin_early(self, buckets: Buckets, weight: float) -> None:
        """Tell the others what will come, unless a view ends meanwhile."""
        if self._settled is None or self._pending is not None or self._broken is not None:
            return
        if not weight:
            return  # perhaps no member brings anything, and then nothing is averaged

        def begin(view: View) -> None:
            attempt = Position(view.lineage, view.epoch, self.position.step + 1)
            self._begun = self._begin(weight, buckets.signature, attempt)
            self._begun.start()

        self._if_settled(begin)

    def go_on_early(self, buckets: Buckets, number: int) -> None:
        """Average a bucket that is packed, meanwhile; each comes after the one before it."""

        def launch(_: View) -> None:
            if self._begun is not None and self._begun.begun == number:
                self._begun.launch(buckets, self._timeout)

        if self._begun is not None:
            self._if_settled(launch)

    def _if_settled(self, action: Callable[[View], None]) -> None:
        try:
            with self._scope.enter_view(0.0) as view:
                if view == self._settled:
                    action(view)
        except DistributedError as error:  # step() finds out what has become of the view
            logger.debug("Averaging could not start early: %s", error)

    # -- views ------------------------------------------------------------------------------------

    def _repeat(self, action: Callable[[View], Result]) -> Result:
        """Settle in the view that holds and do something there, until no view ends in between."""
        failures = self._scope.failures
        while True:
            if self._broken is not None:
                raise BackendUnavailable(
                    "This member's state is no longer what the others have",
                    cause=f"applying a step failed: {self._broken!r}",
                    hint="Start it again: it gets the state from the others.",
                ) from self._broken
            try:
                with self._scope.enter_view(self._timeout) as view:
                    failures = self._scope.failures
                    if self._settled != view:
                        self._settle(view)
                    return action(view)
            except (Aborted, Disconnected) as error:
                self._settled = None
                self._drop_try()
                if not self._scope.can_continue(error):
                    raise
                logger.info("After step %d: %s", self.position.step, error)
            except Timeout:
                raise  # the next call continues what is under way
            except Exception:
                self._drop_try()
                if self._scope.failures != failures:
                    self._settled = None  # the others have heard of it, and settle anew
                raise

    # -- a view begins ---------------------------------------------------------------------------

    def _settle(self, view: View) -> None:
        self._settled = None
        self._drop_try()  # of a view that is over
        self._lineage = view.lineage
        found = self._agree(view)
        decision, before = found.decision, self._report.history
        logger.info("View %d with %d members: %s", view.epoch, len(view.members), decision.reason)
        if found.action is SyncAction.APPLY:
            self._commit(decision.history)
        elif self._report.attempt is not None and self._report.attempt[:2] == (
            view.lineage,
            view.epoch,
        ):
            # Settled anew in the same view: another try will have the same name.
            self._report = replace(self._report, attempt=None, holds=False)
        alike: Sequence[int] = decision.sources
        if decision.receivers:
            self.last_sync = self._sync.run(self._group, decision.sources, PLATFORM, found.trained)
            alike = self.last_sync.servers
        self._pace.conditions = found.conditions
        self._others_wait = any(rank != self._group.rank for rank in found.waiting)
        kept = found.kept(alike)
        is_kept = kept[self._group.rank] is not None
        if found.action is SyncAction.RECEIVE or not is_kept:
            self._become(decision.history, keep=is_kept)
        if found.action is SyncAction.RECEIVE:
            self._tell_discarded(before)
        self._report = replace(self._report, attended=(view.lineage, view.epoch))
        self._reserved, self._pace.speeds = tuple(share or () for share in kept), found.speeds
        self._saving.meet(found.tokens)
        self._tell_resumed()
        self._rank, self._settled = self._group.rank, view

    def _tell_resumed(self) -> None:
        """Once the members have agreed: another one may have had a later checkpoint."""
        if not self._origin:
            return
        step, own, loaded = self.position.step, self._origin, self._loaded
        if loaded is not None and self.position != loaded:
            own = f"another machine's; of this one: step {loaded.step}, {own}"
        logger.warning("Resumed from step %d (%s)", step, own, extra=NOTICE)
        self._origin = ""

    def _agree(self, view: View) -> SyncResult:
        """Tell the others where this member stands, and decide; wait for a state that is away."""
        size = None if self.sampler is None else self.sampler.size
        limit = self._group.timeout if self._timeout is None else self._timeout
        began = time.monotonic()
        while True:
            missing, ended, insists = self._scope.left_out(self._awaited)
            self._report = replace(
                self._report,
                founder=self._scope.is_constant,
                missing=missing,
                insists=insists,
                ended=ended,
            )
            standing = MemberReport(
                self._report,
                self._taken or (),
                self._pace.meter.speed,
                measure_condition(),
                waits=self._pending is not None,
                token=self._saving.token,
            )
            self._saving.mark()
            found = settle(self._group, view, standing, size)
            is_news = dict(found.decision.missing) != self._awaited
            self._awaited = dict(found.decision.missing)
            if is_news:
                self._scope.note_awaited(self._awaited)
            if not self._awaited:
                return found
            if is_news:
                logger.warning("Training waits: %s. %s", found.decision.reason, CONTINUE)
            if limit is not None and time.monotonic() >= began + limit:
                raise NoQuorum(
                    f"Waited {limit:g} s for the state of this training",
                    seconds=limit,
                    cause=found.decision.reason,
                    hint=CONTINUE,
                )
            time.sleep(LOOK)

    def _become(self, history: StepHistory, *, keep: bool = False) -> None:
        """Have another state; what was computed for the last one is of no use, unless kept."""
        if not keep:
            if self._pending is not None:
                size = self._group.world_size
                step = history.position.step
                self._outcome = StepOutcome(step, False, size, 0.0, self._pending.tries)
                logger.info(
                    "The gradients at %s are discarded: they belong to an old state, or to samples "
                    "that another member has now",
                    self.position,
                )
            self._pending, self._taken = None, None
        if self._compressor is not None:
            self._compressor.discard()
        if self.sampler is not None:
            history = replace(history, samples=self.sampler.counted)
        self._report = replace(self._report.at(history), attempt=None, holds=False)
        self._note_progress("state received")

    def _tell_discarded(self, before: StepHistory) -> None:
        """Another state has replaced ours: say which of our committed steps are not in it."""
        lost = compare_states(before, self._report.history, self._lineage, self.discarded)
        if lost is None:
            return
        self.discarded = replace(lost, is_loaded=lost.before == self._loaded)
        # A step that was committed in this very call is not in the state that we have now.
        self._outcome = replace(self._outcome, counted=False)
        logger.warning("%s", self.discarded)
        self._scope.note_event(self.discarded)
        if self._group.metrics is not None:
            self._group.metrics.training.withdraw(lost.steps)

    def _note_progress(self, what: str = "step") -> None:
        history = self._report.history
        origin = history.origin_of(self._lineage)
        self._scope.note_progress(history.samples, origin, history.position.step, what)

    # -- a step ------------------------------------------------------------------------------------

    def _try(self, view: View) -> StepOutcome:
        """Average and commit the step under way, unless settling has done so."""
        pending = self._pending
        if pending is None:  # and since then more may have been received
            size = self._group.world_size
            return replace(self._outcome, step=self.position.step, world_size=size)
        attempt = Position(view.lineage, view.epoch, self.position.step + 1)
        if not (self._report.holds and self._report.attempt == attempt):
            self._average(pending, attempt, view)
            if self._pending is None:
                return self._outcome
        # Otherwise an earlier call was interrupted here, and the others wait.
        self._group.barrier(self._timeout)
        base = self._report.history
        ancestry = ancestry_in(view, attempt, base)
        self._commit(base.extended(attempt, ancestry, self._report.samples_held))
        return self._outcome

    def _begin(self, weight: float, signature: int, attempt: Position) -> StepAttempt:
        """Begin a try of a step; nothing of an earlier one counts."""
        self._drop_try()
        if self._compressor is not None:
            self._compressor.discard()
        self._report = replace(self._report, attempt=attempt, holds=False)
        record = StepContribution(
            attempt.step,
            signature if weight else 0,
            weight,
            self._pace.meter.speed,
            0 if self.sampler is None else self.sampler.epoch,
            self._taken or (),
        )
        return StepAttempt(attempt, self._group, record, self._compressor)

    def _drop_try(self) -> None:
        """What was under way is over; it may still use its memory for a moment."""
        if self._begun is not None:
            self._begun.abandon()
            self._begun = None
            self.room.clear()

    def _average(self, pending: PendingStep, attempt: Position, view: View) -> None:
        """Have the result of a step, which does not count yet."""
        pending.tries += 1
        begun = self._begun
        if begun is None or begun.attempt != attempt:
            signature = pending.gradients.buckets.signature
            begun = self._begun = self._begin(pending.weight, signature, attempt)
        records = begun.records(self._timeout)
        if self.sampler is not None and not any(each.share or each.weight for each in records):
            self._set_aside(pending)
            return
        self._check(records)
        begun.finish(pending.gradients, self._timeout)
        made = attempt.step - 1
        if self._verify_every and made and made % self._verify_every == 0:
            self._compare(view)
        pending.records, self._begun = records, None
        self._report = replace(self._report, holds=True, samples_held=self._samples_with(records))

    def _samples_with(self, records: Sequence[StepContribution]) -> int:
        """Committed samples once a step counts; the same on all members."""
        if self.sampler is not None:
            return self.sampler.counted + sum(total(record.share) for record in records)
        # Weights are samples, unless they are fractions: then each step counts as one.
        weight = sum(record.weight for record in records)
        return min(self._report.samples + max(1, round(weight)), MAX_SAMPLES)

    def _set_aside(self, pending: PendingStep) -> None:
        """Those who had the last samples are gone: no member brings any, and all take them anew."""
        size = self._group.world_size
        self._outcome = StepOutcome(self.position.step, False, size, 0.0, pending.tries)
        self._begun, self._pending, self._taken, self._reserved = None, None, None, ()
        self._report = replace(self._report, attempt=None, holds=False)

    def _compare(self, view: View) -> SyncReport:
        """See whether all have the same state and how they are; put right what differs."""
        mine = measure_condition()
        self._pace.conditions = tuple(gather(self._group, mine, MemberCondition, "its condition"))
        ranks = range(len(view.members))
        return self._sync.run(self._group, ranks, PLATFORM, ranks)

    def _check(self, records: Sequence[StepContribution]) -> None:
        """Whatever is wrong with what a member brings, all find it before any of them holds it."""
        is_cluster = self._scope.is_cluster
        check_records(records, self._group.rank if is_cluster else None)
        sampler = self.sampler
        if sampler is None:
            return
        due = self._shares(len(records))
        order = sorted(range(len(records)), key=lambda rank: records[rank].share != due[rank])
        counted = sampler.committed
        for rank in order:  # those first who bring what is theirs: they are not to blame
            share = records[rank].share
            wrong = check_intervals(share, sampler.size)
            twice = overlap(share, counted)
            if twice:
                wrong = f"samples that count already, or are another member's: {twice}"
            if wrong:
                raise malformed(rank, RECORD_WHAT, wrong)
            counted = union(counted, share)

    def _commit(self, history: StepHistory) -> None:
        """Every member holds the result: apply it, and count what went into it."""
        pending, attempt = self._pending, history.position
        assert pending is not None
        assert self._report.attempt == attempt
        try:
            self._apply(pending.gradients.mean())
        except BaseException as error:
            self._broken = error
            raise
        if self.sampler is not None:
            self.sampler.commit(record.share for record in pending.records)
        if self._compressor is not None:
            self._compressor.commit()
        weight = sum(record.weight for record in pending.records)
        size = self._group.world_size
        self._outcome = StepOutcome(attempt.step, True, size, weight, pending.tries)
        nbytes = pending.gradients.buckets.nbytes
        self._pace.note(pending.records, self._scope.rates(), nbytes)
        self._reserved, self._others_wait = (), False
        self._pending, self._taken = None, None
        self._report = replace(self._report.at(history), holds=False)
        self._note_progress()

    # -- samples -----------------------------------------------------------------------------------

    def _share(self, view: View) -> Intervals:
        """This member's part of the next batch."""
        return self._shares(len(view.members))[self._rank]

    def _shares(self, size: int) -> list[Intervals]:
        """The next batch, divided among this many members; all of them compute the same parts."""
        assert self.sampler is not None
        counts = self._pace.counts(self.batch, size)
        reserved = [*self._reserved, *[()] * (size - len(self._reserved))]
        counts = [0 if has else count for has, count in zip(reserved, counts, strict=True)]
        shares = self.sampler.assign(counts, pieces(reserved))
        return [has or share for has, share in zip(reserved, shares, strict=True)]
