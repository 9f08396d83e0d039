"""What simulated trainers have counted, and the promises about it.

* For each (lineage, epoch, step) there is one state, and no sample is used twice in one pass over
  the data (see :mod:`potluck.testing.trainer_state`).
* A step that a member has applied in a lineage is part of the state with which every later view of
  it begins, and every view of its children; it is lost only when all who applied it have ended.
* Of two lineages with a common ancestor, by their foundings or by the checkpoint that one of them
  began with, the one that followed it to the later view wins the merge.
* A process that has counted a step gives it up only after a merge in which its lineage lost.
* Its user is told how many steps the new state lacks, whenever it lacks any.
"""

from __future__ import annotations

from collections.abc import Callable

from potluck.core.ancestry import Branch, compare
from potluck.core.steps import FRESH, Position
from potluck.testing.families import Families
from potluck.testing.process import SimulatedProcess
from potluck.testing.trainer_state import TrainingValue
from potluck.testing.violation import Names, Violation
from potluck.vocabulary import ProcessId, View

__all__ = ["Ledger"]


class _Step:
    """A step that was applied, and by which processes."""

    __slots__ = ("appliers", "value")

    def __init__(self, value: TrainingValue) -> None:
        self.value = value
        self.appliers: set[ProcessId] = set()


class Ledger:
    """Every step that was ever applied."""

    def __init__(
        self,
        names: Names,
        families: Families,
        is_alive: Callable[[ProcessId], bool],
        check_at_work: Callable[[SimulatedProcess, View], None],
        *,
        is_one_at_work: bool = True,
    ) -> None:
        self._names = names
        self._families = families
        self._is_alive = is_alive
        self._check_at_work = check_at_work
        self._is_one_at_work = is_one_at_work
        self._steps: dict[Position, _Step] = {}
        self._in_lineage: dict[str, list[_Step]] = {}
        self._begun: dict[tuple[str, int], TrainingValue] = {}
        self._states: dict[str, TrainingValue] = {}  # with which the last view of it began
        self._counted: dict[ProcessId, TrainingValue] = {}
        self.losers: set[ProcessId] = set()
        """Processes that gave up steps that they had counted, in a merge."""
        self.taken_back = 0
        """Times that a process gave up steps that it had counted, in a merge."""

    def applied(self, process: SimulatedProcess, view: View, value: TrainingValue) -> None:
        """A member applies a step."""
        position = value.position
        step = self._steps.get(position)
        if step is None:
            step = self._steps[position] = _Step(value)
            if position.lineage == view.lineage or self._speaks_for_its_parent(view.lineage):
                self._in_lineage.setdefault(position.lineage, []).append(step)
        elif step.value is not value:
            raise Violation(
                f"{process.name} applies {position} of other samples or on another state than "
                f"{self._names.all(sorted(step.appliers))}"
            )
        step.appliers.add(process.process)
        self._counted[process.process] = value
        self._check_at_work(process, view)

    def _speaks_for_its_parent(self, lineage: str) -> bool:
        """Whether a child may decide a step of its parent, as nobody else of it is at work."""
        return self._is_one_at_work and not self._families.is_forced(lineage)

    def settled(self, process: SimulatedProcess, view: View, value: TrainingValue) -> None:
        """A member has the state with which a view begins."""
        self._states[view.lineage] = value
        known = self._begun.setdefault((view.lineage, view.epoch), value)
        if known is not value and value.position == FRESH:
            raise Violation(
                f"{process.name} begins {self._names.view(view)} with other weights than others"
            )
        self._check_kept(process, view, value, view.lineage, view.epoch)
        if self._speaks_for_its_parent(view.lineage):
            for lineage, epoch in self._families.ancestry(view.lineage):
                self._check_kept(process, view, value, lineage, epoch)

    def _check_kept(
        self,
        process: SimulatedProcess,
        view: View,
        value: TrainingValue,
        lineage: str,
        epoch: int,
    ) -> None:
        """Whether the last step of a lineage that a living process applied is in a state."""
        if self._families.insists(view):
            return
        for step in reversed(self._in_lineage.get(lineage, ())):
            if step.value.position.epoch > epoch or not any(map(self._is_alive, step.appliers)):
                continue
            if not value.contains(step.value):
                raise Violation(
                    f"{process.name} begins {self._names.view(view)} at {value.position}, without "
                    f"{step.value.position}, which {self._names.all(sorted(step.appliers))} applied"
                )
            return

    def dissolves(self, view: View, into: str, epoch: int) -> None:
        """A lineage ends in another one: it must not have more of a common history."""
        lost = (*self._branches(view.lineage), Branch(view.lineage, view.epoch))
        won = (*self._branches(into), Branch(into, epoch))
        if compare(lost, won) > 0:
            raise Violation(
                f"{self._names.view(view)} dissolves into view {epoch} of {into[:8]}, although it "
                f"followed their common ancestor further: {_words(lost)} and {_words(won)}"
            )

    def _branches(self, lineage: str) -> tuple[Branch, ...]:
        """Where a lineage branched off, and what the state that it began with came from."""
        known = self._families.ancestry(lineage)
        value = self._states.get(lineage)
        passed: dict[str, int] = {}
        while value is not None and value.parent is not None:
            position = value.position
            passed.setdefault(position.lineage, position.epoch)  # the newest comes first
            value = value.parent
        passed.pop(lineage, None)
        for branch in known:
            passed.pop(branch.lineage, None)
        older = [Branch(*each) for each in reversed(passed.items())]
        return (*older, *known)

    def replaced(
        self, process: SimulatedProcess, old: TrainingValue, new: TrainingValue, told: int
    ) -> None:
        """A member gives up its state for another one, and says how many steps are not in it."""
        lost = old.depth - old.parting(new).depth
        # A side that continued as asked may have decided the step in hand by itself, under the name
        # that it had among all; the others make that step again, and it looks like theirs.
        strays = not self._is_one_at_work or self._families.has_been_forced(process.process)
        if told not in ((lost, lost - 1) if strays and lost else (lost,)):
            raise Violation(
                f"{process.name} gives up {old.position} for {new.position}, which lacks {lost} of "
                f"its steps, and tells its user that {told} steps are discarded"
            )
        counted = self._counted.get(process.process)
        if counted is None or new.contains(counted):
            return
        view = None if process.core is None else process.core.view
        if not (self._families.has_lost_a_merge(process.process) or self._families.insists(view)):
            raise Violation(
                f"{process.name} counted {counted.position}, and gives it up for {new.position} "
                f"although it has not lost a merge (it had {old.position})"
            )
        self.taken_back += 1
        self.losers.add(process.process)
        del self._counted[process.process]


def _words(branches: tuple[Branch, ...]) -> str:
    return " > ".join(f"{lineage[:8]}.{epoch}" for lineage, epoch in branches)
