"""Many seeds of the simulated cluster: ``python -m potluck.testing.seeds --seeds 200000``.

Every seed is a story of faults (:mod:`potluck.testing.chance`) through which the invariants must
hold.  One that fails is told again, shortened to what matters, with the command that repeats it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from math import inf
from multiprocessing import get_context
from signal import SIG_IGN, SIGINT, signal

from rich.console import Console
from rich.progress import Progress

from potluck.core.cluster import ClusterCore
from potluck.testing.chance import random_story
from potluck.testing.process import CoreFactory
from potluck.testing.scenario import Scenario, ScenarioError
from potluck.testing.stage import play
from potluck.testing.violation import Violation

__all__ = ["Failure", "Report", "check_seed", "check_seeds", "main", "shorten"]

_FRAME = frozenset({"seed", "beat", "nodes", "calm", "settle"})  # without them it is no such story
_GARBAGE = 200_000  # objects; stories make many, and most of them end with their story
_TELL_EVERY = 30.0  # seconds between two lines of progress where there is no terminal
BATCH = 50  # seeds that a worker takes at once, at most


@dataclass(frozen=True, slots=True)
class Failure:
    """A seed whose story broke a rule."""

    seed: int
    reason: str

    @property
    def command(self) -> str:
        """What repeats it, with every event."""
        return f"python -m potluck.testing.seeds --seed {self.seed} --trace"


@dataclass(slots=True)
class Report:
    """What came of many seeds."""

    seeds: int = 0
    failures: list[Failure] = field(default_factory=list)
    settled_in: list[float] = field(default_factory=list)
    """Seconds from the last fault until all were in one view, for each seed that got there."""
    exceptions: int = 0
    """Children that were at work beside a lineage of which their founders could not know."""
    taken_back: int = 0
    """Times that a process gave up counted steps, because its lineage had lost a merge."""
    elapsed: float = 0.0
    """Real seconds."""

    def add(self, other: Report) -> None:
        """Count another report in."""
        self.seeds += other.seeds
        self.failures += other.failures
        self.settled_in += other.settled_in
        self.exceptions += other.exceptions
        self.taken_back += other.taken_back

    def as_dict(self) -> dict[str, object]:
        """For ``--json``."""
        times = sorted(self.settled_in)
        return {
            "seeds": self.seeds,
            "failures": [{"seed": f.seed, "reason": f.reason} for f in self.failures],
            "exceptions": self.exceptions,
            "taken_back": self.taken_back,
            "seconds": round(self.elapsed, 1),
            "seeds_per_second": round(self.seeds / self.elapsed, 1) if self.elapsed else None,
            "settled_in_seconds": {
                "median": round(statistics.median(times), 3),
                "p99": round(times[int(0.99 * (len(times) - 1))], 3),
                "max": round(times[-1], 3),
            }
            if times
            else None,
        }


def check_seed(
    seed: int, *, core: CoreFactory = ClusterCore, tell: Callable[[str], None] | None = None
) -> float | None:
    """Play the story of a seed; the seconds it took to settle.  Raises what went wrong."""
    return play(random_story(seed), core=core, tell=tell).settled_in


def check_seeds(seeds: Sequence[int], *, core: CoreFactory = ClusterCore) -> Report:
    """Play the stories of many seeds, one after the other."""
    report = Report()
    for seed in seeds:
        report.seeds += 1
        try:
            cluster = play(random_story(seed), core=core)
        except Exception as error:  # noqa: BLE001 - a core that raises is a finding like any other
            report.failures.append(Failure(seed, f"{type(error).__name__}: {error}"))
        else:
            if cluster.settled_in is not None:
                report.settled_in.append(cluster.settled_in)
            report.exceptions += len(cluster.invariants.families.exceptions)
            report.taken_back += cluster.invariants.ledger.taken_back
    return report


def shorten(
    story: Scenario, *, core: CoreFactory = ClusterCore, attempts: int = 300
) -> tuple[Scenario, str]:
    """Leave out lines of a failing story while it fails in the same way; the rest, and how."""
    reason = _failure(story, core) or ""
    index = len(story.steps)
    while index > 0 and attempts > 0:
        index -= 1
        if story.steps[index].action.verb in _FRAME:
            continue
        attempts -= 1
        shorter = story.without(index)
        still = _failure(shorter, core)
        if still is not None and _kind(still) == _kind(reason):
            story, reason = shorter, still
    return story, reason


def _failure(story: Scenario, core: CoreFactory) -> str | None:
    try:
        play(story, core=core)
    except (ScenarioError, ValueError):
        return None  # it names somebody who has been left out
    except Exception as error:  # noqa: BLE001 - a core that raises is a finding like any other
        return f"{type(error).__name__}: {error}"
    return None


def _kind(reason: str) -> str:
    """What a failure has in common with others like it: its words without names and numbers."""
    words = re.sub(r"\{[^}]*\}|\S*\d\S*|\b[a-z]\b", "", reason.partition(";")[0])
    return " ".join(words.split()[:12])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a seed failed."""
    parser = argparse.ArgumentParser(prog="python -m potluck.testing.seeds", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many (default 2000)")
    parser.add_argument("--first", type=int, default=0, help="the first of them (default 0)")
    parser.add_argument(
        "--jobs",
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="processes (default: all cores)",
    )
    parser.add_argument(
        "--minutes", type=float, default=inf, help="stop after so many at the latest"
    )
    parser.add_argument("--seed", type=int, help="only this one")
    parser.add_argument("--trace", action="store_true", help="with --seed: tell every event")
    parser.add_argument("--shorten", action="store_true", help="with --seed: leave out what we can")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    options = parser.parse_args(arguments)
    console = Console(stderr=options.json)
    if options.seed is not None:
        return _one(options.seed, console, trace=options.trace, short=options.shorten)
    wanted = range(options.first, options.first + options.seeds)
    report = _many(wanted, options.jobs, console, minutes=options.minutes)
    if options.json:
        sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n")
    _explain(report, console)
    return 1 if report.failures else 0


def _one(seed: int, console: Console, *, trace: bool, short: bool) -> int:
    story = random_story(seed)
    if short:
        story, _ = shorten(story)
    _tell(str(story))
    tell = _tell if trace else None
    try:
        cluster = play(story, tell=tell)
    except Violation as violation:
        console.print(f"seed {seed}: {violation}", style="red", markup=False, soft_wrap=True)
        return 1
    console.print(f"seed {seed}: all rules kept; settled in {cluster.settled_in or 0:.3f} s")
    return 0


def _tell(line: str) -> None:
    sys.stdout.write(line + "\n")  # plain and unwrapped: traces are searched and compared


def _many(seeds: range, workers: int, console: Console, *, minutes: float) -> Report:
    begun = told = time.monotonic()
    report = Report()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("seeds", total=len(seeds))
        with closing(_parts(seeds, workers)) as parts, suppress(KeyboardInterrupt):
            for part in parts:
                report.add(part)
                for failure in part.failures:
                    _show(failure, progress.console)
                failed = f"seeds ({len(report.failures)} failed)"
                progress.update(task, advance=part.seeds, description=failed)
                if not console.is_terminal and time.monotonic() - told > _TELL_EVERY:
                    told = time.monotonic()
                    rate = report.seeds / (told - begun)
                    console.print(f"{report.seeds} of {len(seeds)} {failed}, {rate:.0f} per second")
                if time.monotonic() - begun > 60 * minutes:
                    break
    report.elapsed = time.monotonic() - begun
    return report


def _begin_worker() -> None:
    signal(SIGINT, SIG_IGN)
    gc.freeze()
    gc.set_threshold(_GARBAGE)


def _parts(seeds: range, workers: int) -> Generator[Report]:
    size = max(1, min(BATCH, len(seeds) // (4 * workers)))
    batches = [seeds[start : start + size] for start in range(0, len(seeds), size)]
    if workers <= 1:
        yield from map(check_seeds, batches)
        return
    pool = ProcessPoolExecutor(workers, get_context("spawn"), initializer=_begin_worker)
    try:
        yield from pool.map(check_seeds, batches)
    finally:
        pool.shutdown(cancel_futures=True)


def _show(failure: Failure, console: Console) -> None:
    words = f"seed {failure.seed}: {failure.reason}"
    console.print(words, style="red", markup=False, soft_wrap=True)
    console.print(f"  again: {failure.command}", markup=False, soft_wrap=True)


def _explain(report: Report, console: Console) -> None:
    facts = report.as_dict()
    console.print(
        f"{report.seeds} seeds, {len(report.failures)} failed, in {facts['seconds']} s "
        f"({facts['seeds_per_second']} per second); settled in: {facts['settled_in_seconds']}; "
        f"children beside an unknown view: {report.exceptions}; "
        f"steps taken back by a lost merge: {report.taken_back}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(main())
