"""Rules taken out of the core, to see that the seeds notice: ``python -m potluck.testing.mutants``.

A mutant is the real core without one rule.  The command plays seeds with each of them until one
breaks an invariant, and names that seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from potluck._types import Branch, ProcessId
from potluck.membership import bootstrap
from potluck.membership.bootstrap import Bootstrap
from potluck.membership.core import ClusterCore, FailureEvidence
from potluck.membership.messages import Charter, Claim, Commit, Found
from potluck.membership.state import MembershipState
from potluck.membership.views import ViewInstaller
from potluck.testing.seeds import check_seed


class Patch(Protocol):
    """What replaces attributes for a while; pytest's MonkeyPatch is one."""

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A core without one of its rules."""

    name: str
    sentence: str
    plant: Callable[[Patch], None]
    known_seed: int
    """A seed that catches it, for tests that cannot play many."""


def _found_alone(patch: Patch) -> None:
    def branch(founding: Bootstrap, bound: Commit) -> None:  # noqa: ARG001 - it forgets where it belongs
        s = founding._state  # noqa: SLF001 - a mutant is a part of what it changes
        if s.view is None:
            founding._found_when_due((s.id,), Charter(s.quorum), "")  # noqa: SLF001

    def why_not(founding: Bootstrap, sender: ProcessId, message: Found) -> str:
        is_own = sender == founding._state.id  # noqa: SLF001
        return "" if is_own else known(founding, sender, message)

    known = Bootstrap._why_not_now  # noqa: SLF001
    patch.setattr(Bootstrap, "_maybe_branch", branch)
    patch.setattr(Bootstrap, "_why_not_now", why_not)


def _trust_the_founder(patch: Patch) -> None:
    patch.setattr(Bootstrap, "_why_not_bound", lambda *_: "")
    patch.setattr(
        ViewInstaller,
        "_may_install",
        lambda installer, commit: (
            not installer._state.history.is_closed(  # noqa: SLF001
                commit.lineage, commit.epoch
            )
        ),
    )


def _merge_by_samples(patch: Patch) -> None:
    def outranks(one: Claim, other: Claim) -> bool:
        mine, theirs = (one.samples, one.members), (other.samples, other.members)
        return mine > theirs or (mine == theirs and one.lineage < other.lineage)

    patch.setattr(bootstrap, "outranks", outranks)


def _prove_without_a_lease(patch: Patch) -> None:
    patch.setattr(FailureEvidence, "_is_proof", lambda *_: True)


def _exclude_after_one_pause(patch: Patch) -> None:
    def is_silent(s: MembershipState, process: ProcessId) -> bool:
        pause = s.contacts.of(process).card.pause_after
        return s.health.silence(process, s.now) >= pause

    patch.setattr(MembershipState, "is_silent", is_silent)


def _forget_where_a_checkpoint_came_from(patch: Patch) -> None:
    def forget(_: ClusterCore, origin: tuple[Branch, ...]) -> None:
        """Whatever the trainer says is dropped."""

    patch.setattr(ClusterCore, "origin", property(lambda _: (), forget))


def _break_a_pledge(patch: Patch) -> None:
    patch.setattr(MembershipState, "is_pledged", property(lambda _: False))


MUTANTS = (
    Mutant("founds alone", "A process that was left out begins a lineage alone.", _found_alone, 4),
    Mutant(
        "trusts the founder",
        "Only the founder checks whether a process is bound; the process itself agrees to all.",
        _trust_the_founder,
        555,
    ),
    Mutant("merges by samples", "Samples decide a merge, not ancestry.", _merge_by_samples, 187),
    Mutant("proves without a lease", "Any sign of an end is a proof.", _prove_without_a_lease, 551),
    Mutant(
        "excludes after one pause",
        "A silent member is left out after one pause time instead of two.",
        _exclude_after_one_pause,
        29,
    ),
    Mutant(
        "forgets the checkpoint",
        "A restarted process does not say where its checkpoint came from.",
        _forget_where_a_checkpoint_came_from,
        187,
    ),
    Mutant(
        "breaks a pledge",
        "A process that agreed to a founding enters another view while the founder may begin.",
        _break_a_pledge,
        36,
    ),
)


class _Planting:
    """Replaces attributes, and puts them back."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any]] = []

    def setattr(self, target: Any, name: str, value: Any) -> None:
        """Replace an attribute."""
        own = vars(target).get(name, self)  # itself: the target inherited it
        self._replaced.append((target, name, own))
        setattr(target, name, value)

    def undo(self) -> None:
        """Put everything back."""
        for target, name, value in reversed(self._replaced):
            if value is self:
                delattr(target, name)
            else:
                setattr(target, name, value)
        self._replaced.clear()


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Everything within runs with the mutant instead of the core."""
    planting = _Planting()
    try:
        mutant.plant(planting)
        yield
    finally:
        planting.undo()


def first_seed(mutant: Mutant, seeds: Sequence[int]) -> tuple[int, str] | None:
    """The first seed whose story catches a mutant, and what it breaks; None if none does."""
    for seed in seeds:
        with planted(mutant):
            broken = _broken(seed)
        if broken is not None and _broken(seed) is None:  # the mutant alone breaks it
            return seed, broken
    return None


def _broken(seed: int) -> str | None:
    try:
        check_seed(seed)
    except Exception as error:  # noqa: BLE001 - a core that raises is caught as well
        return f"{type(error).__name__}: {error}"
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a mutant is not caught."""
    parser = argparse.ArgumentParser(prog="python -m potluck.testing.mutants", description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="at most (default 10000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    options = parser.parse_args(arguments)
    survivors = 0
    for mutant in (each for each in MUTANTS if options.only in each.name):
        begun = time.monotonic()
        found = first_seed(mutant, range(options.first, options.first + options.seeds))
        seconds = time.monotonic() - begun
        if found is None:
            survivors += 1
            words = f"NOT caught by {options.seeds} seeds"
        else:
            words = f"caught by seed {found[0]}: {found[1]}"
        sys.stdout.write(f"{mutant.name} ({seconds:.0f} s): {words}\n")
        sys.stdout.flush()
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
