"""A simulated trainer: steps as transactions, as :mod:`potluck.training.elastic` makes them.

In each view the members settle first: they report, decide (:func:`potluck.training.steps.decide`),
and bring the state to members that lack it.  A step is a record from every member, a result that
each member holds, and a barrier; a member that passes it applies the result.  Rank 0 gathers and
passes on.  What members of a view say to each other belongs to that view: when a core ends the
operations of a view, pauses, or enters another view, nothing of the old one counts any more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from potluck._types import ProcessId, View
from potluck.membership import events as effects
from potluck.testing.clock import VirtualClock
from potluck.testing.network import Flow, LossyNetwork
from potluck.testing.process import SimulatedProcess, Violation
from potluck.training.steps import (
    FRESH,
    Position,
    StepHistory,
    StepReport,
    SyncAction,
    SyncDecision,
    ancestry_in,
    decide,
)

# --------------------------------------------------------------------------------------------------
# The door to :mod:`potluck.training.steps`: how a simulated trainer reports, decides and counts.


def agree(view: View, reports: Sequence[StepReport]) -> SyncDecision:
    """What the members of a view do before they continue."""
    return decide(view, reports)


def attempted(report: StepReport, attempt: Position | None) -> StepReport:
    """The member begins to average a step; nothing of an earlier try counts."""
    return replace(report, attempt=attempt, holds=False)


def held(report: StepReport, samples: int) -> StepReport:
    """The member has the complete result of its attempt, with which it will have these samples."""
    return replace(report, holds=True, samples_held=samples)


def stepped(report: StepReport, view: View) -> StepHistory:
    """What the member has once it has applied the result that it holds."""
    assert report.attempt is not None
    ancestry = ancestry_in(view, report.attempt, report.history)
    return report.history.extended(report.attempt, ancestry, report.samples_held)


def applied(report: StepReport, history: StepHistory) -> StepReport:
    """The member has applied the result that it held."""
    return replace(report.at(history), holds=False)


def received(report: StepReport, decision: SyncDecision) -> StepReport:
    """The member has got the state that all decided on."""
    return replace(report.at(decision.history), attempt=None, holds=False)


def loaded(report: StepReport) -> StepReport:
    """The report of a new process that has loaded what another one saved."""
    return StepReport().at(report.history)


# --------------------------------------------------------------------------------------------------
# The state of a simulated training as a value: each step is a node that knows what it followed.
#
# Two members have the same state if they have the same node.  A state also says which samples of
# the present pass over the data went into it, so that none counts twice.

DATASET = 24
"""Samples of one pass over the data."""
_ALL = (1 << DATASET) - 1

Share = tuple[int, ...]


class TrainingValue:
    """What a member's training consists of after one step."""

    __slots__ = ("depth", "mask", "parent", "passes", "position", "samples")

    def __init__(
        self, parent: TrainingValue | None, position: Position, mask: int, passes: int, samples: int
    ) -> None:
        self.parent = parent
        self.position = position
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.mask = mask
        """The samples of the present pass that are in it, one bit each."""
        self.passes = passes
        self.samples = samples
        """All samples that ever went into it."""

    def contains(self, other: TrainingValue) -> bool:
        """Whether a step is part of this state."""
        value: TrainingValue | None = self
        while value is not None and value.depth > other.depth:
            value = value.parent
        return value is other

    def parting(self, other: TrainingValue) -> TrainingValue:
        """The last state that is part of this one and of another; what this began with if none."""
        value = self
        while value.parent is not None and not other.contains(value):
            value = value.parent
        return value

    def free(self, taken: set[int]) -> list[int]:
        """Samples of this pass that are neither in it nor taken by a member."""
        return [n for n in range(DATASET) if not self.mask >> n & 1 and n not in taken]


class States:
    """All states of one simulated cluster; the same step on the same state is the same value."""

    def __init__(self) -> None:
        self._made: dict[tuple[TrainingValue, Position, tuple[Share, ...]], TrainingValue] = {}

    def fresh(self) -> TrainingValue:
        """The state of a process that has loaded nothing; no two are alike."""
        return TrainingValue(None, FRESH, 0, 0, 0)

    def after(
        self, base: TrainingValue, position: Position, shares: tuple[Share, ...]
    ) -> TrainingValue:
        """The state after a step in which these samples were used."""
        key = base, position, shares
        value = self._made.get(key)
        if value is None:
            value = self._made[key] = self._make(base, position, shares)
        return value

    def _make(
        self, base: TrainingValue, position: Position, shares: tuple[Share, ...]
    ) -> TrainingValue:
        mask, count = base.mask, 0
        for sample in (sample for share in shares for sample in share):
            if mask >> sample & 1:
                raise Violation(f"Sample {sample} is used twice in pass {base.passes}: {position}")
            mask |= 1 << sample
            count += 1
        is_full = mask == _ALL
        return TrainingValue(
            base, position, 0 if is_full else mask, base.passes + is_full, base.samples + count
        )


# --------------------------------------------------------------------------------------------------

SHORTEST = 0.08  # seconds to compute gradients, at least
LONGEST = 0.2
RETRY = 1.0  # seconds after which an unanswered message is sent again, as TCP would
_EARLY = 32  # messages of a view that we have not entered yet
_SAVE_EVERY = 4  # steps


@dataclass(frozen=True, slots=True)
class TrainerWatch:
    """Who checks what trainers do."""

    settled: Callable[[SimulatedProcess, View, TrainingValue], None]
    """A member has the state with which a view begins."""
    applied: Callable[[SimulatedProcess, View, TrainingValue], None]
    """A member applies a step."""
    replaced: Callable[[SimulatedProcess, TrainingValue, TrainingValue, int], None]
    """A member has another state, and tells its user how many steps are not in that one."""
    lost: Callable[[SimulatedProcess, View], None]
    """A member tells its user that the state of the training is gone."""


@dataclass(frozen=True, slots=True)
class SimulatedCheckpoint:
    """What a process has written to its disk."""

    report: StepReport
    value: TrainingValue


@dataclass(frozen=True, slots=True)
class _Standing:
    report: StepReport
    value: TrainingValue
    taken: Share


_Arrived = tuple[SyncDecision, TrainingValue]


@dataclass(slots=True)
class _Round:
    """What rank 0 gathers from all members before it answers."""

    parts: dict[int, Any]
    answer: Any = None
    is_answered: bool = False


class SimulatedTrainer:
    """The training of one start of one process."""

    def __init__(
        self,
        process: SimulatedProcess,
        network: LossyNetwork,
        states: States,
        watch: TrainerWatch,
        find: Callable[[ProcessId], SimulatedTrainer | None],
    ) -> None:
        self.process = process
        self.who = process.process
        self.value = states.fresh()
        self.report = StepReport()
        self.is_lost = False
        """Whether the members that had the state are gone, so that it must be started again."""
        self.awaited: dict[ProcessId, str] = {}
        """Processes that it waits for, by name: one of them may have the state."""
        self.discarded = 0
        """Steps of which the user was told that they are not in the state any more."""
        self.saved: SimulatedCheckpoint | None = None
        self.saves = False
        self._network = network
        self._clock: VirtualClock = network.clock
        self._states = states
        self._watch = watch
        self._find = find
        self._view: View | None = None
        self._next: View | None = None  # the view that the core has entered, and we have not
        self._rank = 0
        self._is_paused = False
        self._flows: dict[int, Flow] = {}
        self._rounds: dict[tuple[str, int], _Round] = {}
        self._early: list[tuple[View, int, str, int, Any]] = []
        self._waiting: tuple[str, int, Any] | None = None  # what we said last to rank 0
        self._is_settled = False
        self._decision: SyncDecision | None = None
        self._arrived: _Arrived | None = None
        self._result: TrainingValue | None = None
        self._taken: Share = ()
        self._reserved: tuple[Share, ...] = ()

    # --- life ---

    def load(self, checkpoint: SimulatedCheckpoint) -> None:
        """Begin with what an earlier process of this place has saved."""
        self.saved = checkpoint
        self.report = loaded(checkpoint.report)
        self.value = checkpoint.value
        self._note()

    def tells(self, effect: effects.Effect) -> None:
        """The core has decided something about the operations of a view."""
        match effect:
            case effects.Installed(view):
                self._end()
                self._next, self._is_paused = view, False
                # Not before the core has said all: it may have paused, or ended this view, at once.
                self._clock.post(self._clock.now, self._do, self._begin, view)
            case effects.Abort() | effects.Removed():
                self._end()
            case effects.Paused():
                self._is_paused = True
            case effects.ViewResumed():
                self._resume()

    def _begin(self, view: View) -> None:
        rank = view.rank_of(self.who)
        if view is not self._next or rank is None or self.is_lost:
            return
        self._view, self._rank, self._next = view, rank, None
        self._report_standing(0)
        early, self._early = self._early, []
        for message in early:
            self.take(message)

    def _report_standing(self, number: int) -> None:
        core = self.process.core
        assert core is not None
        missing, ended = core.left_out(self.awaited)
        self.report = replace(
            self.report,
            founder=core.is_constant,
            missing=tuple(missing.items()),
            insists=core.is_insisting,
            ended=ended,
        )
        self._say("settle", number, _Standing(self.report, self.value, self._taken))

    def _report_again(self, view: View, number: int) -> None:
        """See whether those who may have the state are still missing."""
        if self._view is view and not self._is_settled:
            self._report_standing(number)

    def _end(self) -> None:
        """Nothing that belongs to the present view counts any more."""
        self._view = self._next = self._waiting = self._arrived = self._decision = None
        self._is_settled = False
        self._flows.clear()
        self._rounds.clear()

    def _resume(self) -> None:
        self._is_paused = False
        if self._waiting is not None:
            self._say(*self._waiting)

    # --- messages ---

    def _say(self, kind: str, number: int, content: Any) -> None:
        """Say something to rank 0, and again until it answers."""
        self._waiting = kind, number, content
        if not self._is_paused:
            self._send(0, kind, number, content)
        if self._view is not None:  # it may be over, now that rank 0 is ourselves
            self._clock.after(RETRY, self._retry, self._view, kind, number)

    def _retry(self, view: View, kind: str, number: int) -> None:
        waiting = self._waiting
        if self._view is view and waiting is not None and waiting[:2] == (kind, number):
            if self.process.is_running and not self._is_paused:
                self._send(0, *waiting)
            self._clock.after(RETRY, self._retry, view, kind, number)

    def _send(self, rank: int, kind: str, number: int, content: Any) -> None:
        view = self._view
        if view is None:
            return
        message = view, self._rank, kind, number, content
        if rank == self._rank:
            self.take(message)
            return
        flow = self._flows.get(rank)
        other = self._find(view.members[rank])
        if other is None:
            return
        if flow is None:
            flow = self._network.flow(self.process.host, other.process.host)
            self._flows[rank] = flow
        flow.send(other.receive, message, certain=True)

    def receive(self, message: tuple[View, int, str, int, Any]) -> None:
        """A message has come over the network."""
        self._do(self.take, message)

    def _do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Do something now, or when the process has time for it."""
        process = self.process
        if process.process != self.who or process.core is None:
            return
        if process.is_stopped or process.share < 1:
            process.ask(lambda *_: self._then_nothing(action, arguments))
        else:
            action(*arguments)

    @staticmethod
    def _then_nothing(
        action: Callable[..., None], arguments: tuple[Any, ...]
    ) -> list[effects.Effect]:
        action(*arguments)
        return []

    def take(self, message: tuple[View, int, str, int, Any]) -> None:
        """A message of a member is worked on."""
        view, rank, kind, number, content = message
        mine = self._view
        if mine is None or view.epoch != mine.epoch or view.lineage != mine.lineage:
            if not self.is_lost and len(self._early) < _EARLY:
                self._early.append(message)
            return
        if self._is_paused:
            return  # it is sent again
        match kind:
            case "settle" | "record" | "held":
                self._gather(rank, kind, number, content)
            case "want":
                if self._decision is not None:
                    self._send(rank, "state", 0, (self._decision, self.value))
            case "state":
                self._arrived = content
                self._maybe_receive()
            case _:
                self._answered(kind, number, content)

    def _gather(self, rank: int, kind: str, number: int, content: Any) -> None:
        """Rank 0 waits for every member, and then tells all of them."""
        assert self._view is not None
        gathered = self._rounds.get((kind, number))
        if gathered is None:
            gathered = self._rounds[kind, number] = _Round({})
            self._rounds.pop((kind, number - 2), None)
        if gathered.is_answered:
            self._send(rank, f"all {kind}", number, gathered.answer)
            return
        gathered.parts[rank] = content
        size = len(self._view.members)
        if len(gathered.parts) == size:
            gathered.is_answered = True
            gathered.answer = tuple(gathered.parts[each] for each in range(size))
            for each in (*range(1, size), 0):
                self._send(each, f"all {kind}", number, gathered.answer)

    def _answered(self, kind: str, number: int, content: tuple[Any, ...]) -> None:
        waiting = self._waiting
        if waiting is None or (f"all {waiting[0]}", waiting[1]) != (kind, number):
            return  # an answer that came twice
        self._waiting = None
        match kind:
            case "all settle":
                self._settle(content, number)
            case "all record":
                self._hold(content)
            case "all held":
                assert self._view is not None
                self._commit(stepped(self.report, self._view))
                self._compute()

    # --- a view begins ---

    def _settle(self, standings: tuple[_Standing, ...], number: int) -> None:
        view = self._view
        assert view is not None
        decision = agree(view, [each.report for each in standings])
        self.awaited = dict(decision.missing)
        if decision.missing:
            self._clock.after(RETRY, self._do, self._report_again, view, number + 1)
            return
        if decision.is_lost:
            self.is_lost = True
            self._watch.lost(self.process, view)
            self._end()
            return
        action = decision.actions[self._rank]
        if action is SyncAction.APPLY:
            self._commit(decision.history)
        elif self.report.attempt is not None and self.report.attempt[:2] == (
            view.lineage,
            view.epoch,
        ):
            self.report = attempted(self.report, None)
        self._share_out(standings, decision)
        if action is not SyncAction.RECEIVE:
            self._decision = decision
            self._settled()
            if decision.sources[0] == self._rank:
                for rank in decision.receivers:
                    self._send(rank, "state", 0, (decision, self.value))
        elif not self._maybe_receive():
            self._clock.after(RETRY, self._do, self._want, view, decision.sources[0])

    def _share_out(self, standings: tuple[_Standing, ...], decision: SyncDecision) -> None:
        """What members had in hand stays theirs if it was for this state, and no other has it."""
        kept: list[Share] = [()] * len(standings)
        taken: set[int] = set()
        for rank in decision.sources:
            share = standings[rank].taken
            if decision.actions[rank] is SyncAction.KEEP and taken.isdisjoint(share):
                kept[rank] = share
                taken.update(share)
        self._reserved = tuple(kept)
        self._taken = kept[self._rank]

    def _want(self, view: View, source: int) -> None:
        """Ask for the state again, if it got lost."""
        if self._view is view and not self._is_settled:
            self._send(source, "want", 0, None)
            self._clock.after(RETRY, self._do, self._want, view, source)

    def _maybe_receive(self) -> bool:
        """Take the state that has arrived, once it is known that it counts."""
        if self._arrived is None or self._waiting is not None or self._is_settled:
            return False
        decision, value = self._arrived
        lost = self._discarded_by(decision)
        self._watch.replaced(self.process, self.value, value, lost)
        self.discarded += lost
        self.value = value
        self.report = received(self.report, decision)
        self._settled()
        return True

    def _discarded_by(self, decision: SyncDecision) -> int:
        """The committed steps of which the user is told that another state lacks them."""
        lost = self.report.history.discarded_by(decision.history)
        return 0 if lost is None else lost.steps

    def _settled(self) -> None:
        view = self._view
        assert view is not None
        self._is_settled = True
        self.report = replace(self.report, attended=(view.lineage, view.epoch))
        self._note()
        self._watch.settled(self.process, view, self.value)
        self._compute()

    # --- a step ---

    def _compute(self) -> None:
        view = self._view
        if view is not None:
            pause = SHORTEST + (LONGEST - SHORTEST) * self._network.chance.random()
            self._clock.after(pause, self._do, self._computed, view, self.value)

    def _computed(self, view: View, value: TrainingValue) -> None:
        if view is not self._view or value is not self.value:
            return
        if not self._taken:
            self._taken = self._assign(view)
        attempt = Position(view.lineage, view.epoch, self.report.position.step + 1)
        self.report = attempted(self.report, attempt)
        self._result = None
        self._say("record", attempt.step, self._taken)

    def _assign(self, view: View) -> Share:
        """One sample for each member that has none in hand, in rank order."""
        size = len(view.members)
        reserved = [*self._reserved, *[()] * (size - len(self._reserved))]
        free = self.value.free({sample for share in reserved for sample in share})
        lacking = [rank for rank in range(size) if not reserved[rank]]
        place = lacking.index(self._rank)
        return (free[place],) if place < len(free) else ()

    def _hold(self, shares: tuple[Share, ...]) -> None:
        attempt = self.report.attempt
        assert attempt is not None
        self._result = self._states.after(self.value, attempt, shares)
        self.report = held(self.report, self._result.samples)
        self._say("held", attempt.step, None)

    def _commit(self, history: StepHistory) -> None:
        """Every member holds the result: apply it."""
        view, result = self._view, self._result
        assert view is not None
        assert result is not None
        self._watch.applied(self.process, view, result)
        self.value, self._result = result, None
        self.report = applied(self.report, history)
        self._taken, self._reserved = (), ()
        self._note()
        if self.saves and result.depth % _SAVE_EVERY == 0:
            self.saved = SimulatedCheckpoint(self.report, result)

    def _note(self) -> None:
        core = self.process.core
        if core is not None:
            lineage = "" if self._view is None else self._view.lineage
            core.samples = self.value.samples
            core.origin = self.report.history.origin_of(lineage)
