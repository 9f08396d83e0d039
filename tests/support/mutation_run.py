"""Mutation tests of the membership: ``PYTHONPATH=tests python -m support.mutation_run``.

The tests are collected and run once, with a note of the lines that each executes.  Then every
mutant gets a forked process, which runs the tests of its lines until one fails: those first that
have found most.  A process that hangs has found its mutant as well.  Survivors are printed, except
those that ``tests/support/mutation_survivors.toml`` explains.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import sys
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random

import coverage
import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from potluck.testing.seeds import check_seed
from support.mutation import Mutant, mutants_of, mutated, plant

ROOT = Path(__file__).parent.parent.parent
CORE = ROOT / "src" / "potluck" / "core"
SURVIVORS = Path(__file__).with_name("mutation_survivors.toml")
_DATA = {
    "cluster_messages",
    "cluster_bounds",
    "cluster_config",
    "cluster_events",
    "cluster_effects",
}
MODULES = (
    *sorted({path.stem for path in CORE.glob("cluster*.py")} - _DATA),
    *("ancestry", "election", "election_ballot", "quorum", "membership", "membership_mesh"),
    *("steps", "histories"),
)
TESTS = (
    *sorted(str(path) for path in (ROOT / "tests" / "core").glob("test_cluster*.py")),
    *(
        str(ROOT / "tests" / "core" / f"test_{name}.py")
        for name in (
            *("ancestry", "election", "election_ballot", "membership", "membership_mesh", "quorum"),
            *("steps", "histories"),
        )
    ),
    *(str(CORE / f"{name}.py") for name in ("ancestry", "quorum", "election")),
    f"{ROOT / 'tests' / 'testing' / 'test_stories.py'}::test_the_story_ends_as_expected",
)
SEEDS = range(12)


@dataclass(slots=True)
class Check:
    """Something that fails when a rule is broken: a test, or a seed."""

    name: str
    passes: Callable[[], bool]
    seconds: float = 0.0
    lines: dict[str, set[int]] = field(default_factory=dict)
    """What it executes, by file."""

    def executes(self, mutant: Mutant) -> bool:
        """Whether it comes to the place of a fault."""
        lines = self.lines.get(str(CORE / f"{mutant.module}.py"), set())
        return not lines.isdisjoint(range(mutant.line, mutant.last_line + 1))


@dataclass(slots=True)
class Child:
    """A process with a fault in it."""

    mutant: Mutant
    pid: int
    pipe: int
    deadline: float
    said: bytes = b""


class Hunt:
    """Runs the checks on mutants, several at a time."""

    def __init__(self, checks: list[Check], jobs: int, until: float) -> None:
        self.checks = checks
        self.jobs = jobs
        self.until = until
        """When no further mutant is tried (monotonic)."""
        self.kills: Counter[tuple[str, str]] = Counter()
        self.found: dict[Mutant, str] = {}
        """Which check noticed each mutant; empty if none did."""

    def run(self, mutants: Iterable[Mutant]) -> None:
        """Try them all."""
        waiting, running = list(reversed(list(mutants))), list[Child]()
        while waiting or running:
            while waiting and len(running) < self.jobs:
                running.append(self._start(waiting.pop()))
            ready, _, _ = select.select([child.pipe for child in running], [], [], 0.5)
            if time.monotonic() > self.until:
                for child in running:
                    _reap(child)  # it is not known what would have come of it
                return
            for child in list(running):
                if child.pipe in ready:
                    child.said += (part := os.read(child.pipe, 4096))
                    if part:
                        continue
                elif time.monotonic() < child.deadline:
                    continue
                running.remove(child)
                self._end(child)

    def _order(self, mutant: Mutant) -> list[Check]:
        """Those that have found most in its function and module first, then the quick ones."""
        if mutant.is_executed_at_import:
            near = [
                check for check in self.checks if str(CORE / f"{mutant.module}.py") in check.lines
            ]
        else:
            near = [check for check in self.checks if check.executes(mutant)]
        place = f"{mutant.module}.{mutant.function}"

        def key(check: Check) -> tuple[int, int, float]:
            kills = self.kills
            return -kills[place, check.name], -kills[mutant.module, check.name], check.seconds

        return sorted(near, key=key)

    def _start(self, mutant: Mutant) -> Child:
        order = self._order(mutant)
        limit = 20 + 6 * sum(check.seconds for check in order)
        reading, writing = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reading)
            _become(mutant, order, writing)
        os.close(writing)
        return Child(mutant, pid, reading, time.monotonic() + limit)

    def _end(self, child: Child) -> None:
        mutant = child.mutant
        status = _reap(child)
        name = json.loads(child.said) if child.said else f"no end (status {status})"
        self.found[mutant] = name
        if name:
            self.kills[f"{mutant.module}.{mutant.function}", name] += 1
            self.kills[mutant.module, name] += 1
        else:
            sys.stdout.write(f"survived: {mutant.diff}\n")
        if len(self.found) % 50 == 0:
            sys.stdout.write(f"{len(self.found)} tried\n")
        sys.stdout.flush()


def _reap(child: Child) -> int:
    """End a process, if it has not ended by itself; its status."""
    with suppress(ProcessLookupError):
        os.kill(child.pid, signal.SIGKILL)
    _, status = os.waitpid(child.pid, 0)
    os.close(child.pipe)
    return status


def _become(mutant: Mutant, order: list[Check], pipe: int) -> None:
    """In a process of its own: plant the fault, run checks, write the name of the first to fail."""
    name = "it cannot be imported"
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)
    try:
        module = importlib.import_module(f"potluck.core.{mutant.module}")
        source = (CORE / f"{mutant.module}.py").read_text(encoding="utf-8")
        plant(module, mutated(source, mutant.number))
        name = next((check.name for check in order if not check.passes()), "")
    finally:
        os.write(pipe, json.dumps(name).encode())
        os._exit(0)


class Plugin:
    """Takes over from pytest when the tests are collected."""

    def __init__(
        self, mutants: list[Mutant], jobs: int, seconds: float, measured: Path | None
    ) -> None:
        self.mutants = mutants
        self.jobs = jobs
        self.seconds = seconds
        self.measured = measured
        self.hunt: Hunt | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all once, then on each mutant."""
        checks = [Check(item.nodeid, _runner(item)) for item in session.items]
        checks += [Check(f"seed {seed}", _player(seed)) for seed in SEEDS]
        sound = _recall(checks, self.measured)
        sys.stdout.write(f"{len(self.mutants)} mutants, {len(sound)} checks\n")
        self.hunt = Hunt(sound, self.jobs, time.monotonic() + self.seconds)
        self.hunt.run(self.mutants)
        return True


def _runner(item: pytest.Item) -> Callable[[], bool]:
    return lambda: all(not part.failed for part in runtestprotocol(item, log=False, nextitem=None))


def _player(seed: int) -> Callable[[], bool]:
    def passes() -> bool:
        try:
            check_seed(seed)
        except Exception:  # noqa: BLE001 - whatever it is, the core did not pass
            return False
        return True

    return passes


def _recall(checks: list[Check], path: Path | None) -> list[Check]:
    """Take from a file what was measured before; measure what is new, and keep it there."""
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    sound = _measure([check for check in checks if check.name not in known])
    for check in checks:
        if known.get(check.name):
            check.seconds, lines = known[check.name]
            check.lines = {file: set(numbers) for file, numbers in lines.items()}
            sound.append(check)
    if path is not None:
        passed = {c.name: (c.seconds, {f: sorted(n) for f, n in c.lines.items()}) for c in sound}
        path.write_text(json.dumps({**{check.name: None for check in checks}, **passed}))
    return sound


def _measure(checks: list[Check]) -> list[Check]:
    """Run each check once; those that pass, with what they execute."""
    files = [str(CORE / f"{name}.py") for name in MODULES]
    watch = coverage.Coverage(data_file=None, include=files, config_file=False)
    watch.set_option("run:disable_warnings", ["no-data-collected"])  # some tests only use messages
    sound = []
    for check in checks:
        watch.erase()
        begun = time.process_time()
        watch.start()
        try:
            passes = check.passes()
        finally:
            watch.stop()
        check.seconds = time.process_time() - begun
        data = watch.get_data()
        check.lines = {file: set(data.lines(file) or ()) for file in data.measured_files()}
        if passes:
            sound.append(check)
        else:
            sys.stdout.write(f"fails without a mutant, left out: {check.name}\n")
    return sound


# --- the command ---


def explained(path: Path = SURVIVORS) -> dict[tuple[str, str, str, str], str]:
    """Survivors with the reason why no test notices them."""
    with path.open("rb") as file:
        entries = tomllib.load(file).get("survivor", [])
    return {
        (entry["module"], entry["function"], entry["old"], entry["new"]): entry["reason"]
        for entry in entries
    }


def report(found: dict[Mutant, str]) -> int:
    """Print what survived, and the table; how many survivors are not explained."""
    reasons = explained()
    unexplained = 0
    table: dict[str, Counter[str]] = {}
    for mutant, name in found.items():
        row = table.setdefault(mutant.module, Counter())
        row["total"] += 1
        if name:
            row["killed"] += 1
        elif (mutant.module, mutant.function, mutant.old, mutant.new) in reasons:
            row["explained"] += 1
        else:
            unexplained += 1
            sys.stdout.write(f"\n{mutant.diff}\n")
    table["all"] = sum(table.values(), Counter())
    sys.stdout.write("\nmodule                  killed   total  explained\n")
    for name, row in table.items():
        share = row["killed"] / row["total"] if row["total"] else 1.0
        numbers = f"{row['killed']:7} {row['total']:7} {row['explained']:10}"
        sys.stdout.write(f"{name:22} {numbers}  {share:.1%}\n")
    return unexplained


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; 1 if a survivor is not explained."""
    parser = argparse.ArgumentParser(prog="python -m support.mutation_run", description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="how many, by lot (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the lot (default 0)")
    parser.add_argument("--module", action="append", help="only of this one, e.g. quorum")
    parser.add_argument("--function", default="", help="only of functions with this in their name")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--seconds", type=float, default=inf, help="at most (default: no limit)")
    parser.add_argument(
        "--measured", type=Path, help="a file that keeps what each test executes, for the next time"
    )
    options = parser.parse_args(arguments)
    mutants = [
        mutant
        for name in options.module or MODULES
        for mutant in mutants_of(name, (CORE / f"{name}.py").read_text(encoding="utf-8"))
        if options.function in mutant.function
    ]
    if options.sample:
        mutants = Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    settings.register_profile(
        "mutation",
        deadline=None,
        derandomize=True,
        database=None,
        max_examples=30,
        phases=[Phase.explicit, Phase.generate],
    )
    os.environ["HYPOTHESIS_PROFILE"] = "mutation"
    plugin = Plugin(mutants, options.jobs, options.seconds, options.measured)
    plain = "-q -p no:randomly -p no:cacheprovider --capture=no -o timeout=0".split()
    plain += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # hypothesis is here already
    pytest.main([*plain, *TESTS], plugins=[plugin])
    if plugin.hunt is None:
        sys.stderr.write("the tests could not be collected\n")
        return 2
    return 1 if report(plugin.hunt.found) else 0


if __name__ == "__main__":
    sys.exit(main())
