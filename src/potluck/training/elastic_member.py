"""Member: one process's part in steps that are transactions.

Everything here follows :mod:`potluck.core.steps`.  A view begins with settling; a step in it is a
record from everybody, the averaging, and a barrier.  Whoever passes the barrier knows that all hold
the average, and applies it.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from potluck.arrays.base import Array
from potluck.collective.compression.compressor import GradientCompressor
from potluck.core.histories import History, Position
from potluck.core.steps import Action, Report, ancestry_in
from potluck.errors import Aborted, BackendUnavailable, Disconnected, NoQuorum, Timeout
from potluck.logs import get_logger
from potluck.runtime.context import DistributedContext
from potluck.training.elastic_ground import Ground
from potluck.training.elastic_outcome import (
    DiscardedWork,
    Pending,
    StepOutcome,
    compare_states,
)
from potluck.training.elastic_pace import Pace
from potluck.training.elastic_record import WHAT, Record, check_records
from potluck.training.elastic_saving import Saving
from potluck.training.elastic_settling import Settlement, Standing, pieces, settle
from potluck.training.elastic_try import Try
from potluck.training.peer_messages import check_intervals, gather, malformed
from potluck.training.sampler import ElasticSampler
from potluck.training.sampler_intervals import Intervals, overlap, total, union
from potluck.training.shares import Condition, Straggler
from potluck.training.shares_conditions import measure_condition
from potluck.training.state import TrainingState
from potluck.training.state_sync import StateSync, SyncReport
from potluck.vocabulary import ProcessId, View

__all__ = ["Member"]

logger = get_logger(__name__)

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


class Member:
    """Settles, averages and commits."""

    def __init__(
        self, group: DistributedContext, state: TrainingState, apply: Callable[[Any], None]
    ) -> None:
        self._ground = Ground(group)
        self._group = group
        self._apply = apply
        self._state = state
        self._sync = StateSync(state, group.metrics)
        self.sampler: ElasticSampler | None = None
        self.batch = 0
        """Samples of all members together in one step."""
        self._compressor: GradientCompressor | None = None
        self._saving = Saving(None, every=0, keep=1)
        self._verify_every = 0
        self._timeout: float | None = None
        self._pace = Pace(self._ground.note_event)
        self.room: dict[int, Array] = {}
        """Memory for what is averaged, by the number of its bucket."""
        self._begun: Try | None = None
        self._report = Report()
        self._settled: View | None = None
        self._rank = 0  # in that view
        self._pending: Pending | None = None
        self._outcome = StepOutcome(0, counted=False, world_size=0, weight=0.0, tries=0)
        self._taken: Intervals | None = None
        self._reserved: tuple[Intervals, ...] = ()
        self._others_wait = False
        self._broken: BaseException | None = None
        self._awaited: dict[ProcessId, str] = {}  # who may have the state, when nobody here has it
        self._lineage = ""  # of the view in which this member settled last
        self._loaded: Position | None = None  # from a checkpoint
        self.discarded: DiscardedWork | None = None
        """The committed steps of this machine that were discarded last, and the total; or None."""
        self.last_sync: SyncReport | None = None
        """What the last exchange of states did, if there was one."""

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

    def _repeat(self, action: Callable[[View], Result]) -> Result:
        """Settle in the view that holds and do something there, until no view ends in between."""
        failures = 0
        while True:
            if self._broken is not None:
                raise BackendUnavailable(
                    "This member's state is no longer what the others have",
                    cause=f"applying a step failed: {self._broken!r}",
                    hint="Start it again: it gets the state from the others.",
                ) from self._broken
            try:
                with self._ground.stand(self._timeout) as view:
                    failures = self._ground.failures
                    if self._settled != view:
                        self._settle(view)
                    return action(view)
            except (Aborted, Disconnected) as error:
                self._settled = None
                self._drop_try()
                if not self._ground.can_go_on(error):
                    raise
                logger.info("After step %d: %s", self.position.step, error)
            except Timeout:
                raise  # the next call goes on with what is under way
            except Exception:
                self._drop_try()
                if self._ground.failures != failures:
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
        if found.action is Action.APPLY:
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
        if found.action is Action.RECEIVE or not is_kept:
            self._become(decision.history, keep=is_kept)
        if found.action is Action.RECEIVE:
            self._tell_discarded(before)
        self._report = replace(self._report, attended=(view.lineage, view.epoch))
        self._reserved, self._pace.speeds = tuple(share or () for share in kept), found.speeds
        self._saving.meet(found.tokens)
        self._rank, self._settled = self._group.rank, view

    def _agree(self, view: View) -> Settlement:
        """Tell the others where this member stands, and decide; wait for a state that is away."""
        size = None if self.sampler is None else self.sampler.size
        limit = self._group.timeout if self._timeout is None else self._timeout
        began = time.monotonic()
        while True:
            missing, ended, insists = self._ground.left_out(self._awaited)
            self._report = replace(
                self._report,
                founder=self._ground.has_founded(view),
                missing=missing,
                insists=insists,
                ended=ended,
            )
            standing = Standing(
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
                self._ground.note_awaited(self._awaited)
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

    def _become(self, history: History, *, keep: bool = False) -> None:
        """Have another state; what was computed for the last one is of no use, unless kept."""
        if not keep:
            if self._pending is not None:
                size = self._group.world_size
                step = history.position.step
                self._outcome = StepOutcome(step, False, size, 0.0, self._pending.tries)
                logger.warning(
                    "The gradients at %s do not count: they were for a state that is gone, or for "
                    "samples that another member has now",
                    self.position,
                )
            self._pending, self._taken = None, None
        if self._compressor is not None:
            self._compressor.discard()
        if self.sampler is not None:
            history = replace(history, samples=self.sampler.counted)
        self._report = replace(self._report.at(history), attempt=None, holds=False)
        self._note_progress("state received")

    def _tell_discarded(self, before: History) -> None:
        """Another state has replaced ours: say which of our committed steps are not in it."""
        lost = compare_states(before, self._report.history, self._lineage, self.discarded)
        if lost is None:
            return
        self.discarded = replace(lost, is_loaded=lost.before == self._loaded)
        # A step that was committed in this very call is not in the state that we have now.
        self._outcome = replace(self._outcome, counted=False)
        logger.warning("%s", self.discarded)
        self._ground.note_event(self.discarded)
        if self._group.metrics is not None:
            self._group.metrics.training.withdraw(lost.steps)

    def _note_progress(self, what: str = "step") -> None:
        history = self._report.history
        origin = history.origin_of(self._lineage)
        self._ground.note_progress(history.samples, origin, history.position.step, what)

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

    def _begin(self, weight: float, signature: int, attempt: Position) -> Try:
        """Begin a try of a step; nothing of an earlier one counts."""
        self._drop_try()
        if self._compressor is not None:
            self._compressor.discard()
        self._report = replace(self._report, attempt=attempt, holds=False)
        record = Record(
            attempt.step,
            signature if weight else 0,
            weight,
            self._pace.meter.speed,
            0 if self.sampler is None else self.sampler.epoch,
            self._taken or (),
        )
        return Try(attempt, self._group, record, self._compressor)

    def _drop_try(self) -> None:
        """What was under way is over; it may still use its memory for a moment."""
        if self._begun is not None:
            self._begun.abandon()
            self._begun = None
            self.room.clear()

    def _average(self, pending: Pending, attempt: Position, view: View) -> None:
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

    def _samples_with(self, records: Sequence[Record]) -> int:
        """Committed samples once a step counts; the same on all members."""
        if self.sampler is not None:
            return self.sampler.counted + sum(total(record.share) for record in records)
        # Weights are samples, unless they are fractions: then each step counts as one.
        weight = sum(record.weight for record in records)
        return min(self._report.samples + max(1, round(weight)), MAX_SAMPLES)

    def _set_aside(self, pending: Pending) -> None:
        """Those who had the last samples are gone: nobody brings any, and all take them anew."""
        size = self._group.world_size
        self._outcome = StepOutcome(self.position.step, False, size, 0.0, pending.tries)
        self._begun, self._pending, self._taken, self._reserved = None, None, None, ()
        self._report = replace(self._report, attempt=None, holds=False)

    def _compare(self, view: View) -> SyncReport:
        """See whether all have the same state and how they are; put right what differs."""
        mine = measure_condition()
        self._pace.conditions = tuple(gather(self._group, mine, Condition, "its condition"))
        ranks = range(len(view.members))
        return self._sync.run(self._group, ranks, PLATFORM, ranks)

    def _check(self, records: Sequence[Record]) -> None:
        """Whatever is wrong with what somebody brings, all find it before anybody holds it."""
        is_cluster = self._ground.is_cluster
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
                raise malformed(rank, WHAT, wrong)
            counted = union(counted, share)

    def _commit(self, history: History) -> None:
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
        self._pace.note(pending.records, self._ground.rates(), nbytes)
        self._reserved, self._others_wait = (), False
        self._pending, self._taken = None, None
        self._report = replace(self._report.at(history), holds=False)
        self._note_progress()

    # -- samples -----------------------------------------------------------------------------------

    def _share(self, view: View) -> Intervals:
        """This member's part of the next batch."""
        return self._shares(len(view.members))[self._rank]

    def _shares(self, size: int) -> list[Intervals]:
        """The next batch, divided among so many members; all of them compute the same parts."""
        assert self.sampler is not None
        counts = self._pace.counts(self.batch, size)
        reserved = [*self._reserved, *[()] * (size - len(self._reserved))]
        counts = [0 if has else count for has, count in zip(reserved, counts, strict=True)]
        shares = self.sampler.assign(counts, pieces(reserved))
        return [has or share for has, share in zip(reserved, shares, strict=True)]
