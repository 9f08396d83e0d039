"""Mutation tests: ``PYTHONPATH=tests python -m support.mutation_run [--area net]``.

The tests are collected and run once, with a note of the lines that each executes.  Then every
mutant gets a forked process, which runs the tests of its lines until one fails: those first that
have found most.  A test that takes many times its usual time has found its mutant as
well.  A fault in what other things are made of at import is tried in a fresh interpreter.
Survivors are printed, except those that ``tests/support/mutation_survivors.toml`` explains.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol

from potluck.testing.seeds import check_seed
from support.mutation import (
    CannotPlantError,
    Mutant,
    is_plain,
    mutants_of,
    mutated,
    plant,
    read_at_import,
)
from support.mutation_import import PROFILE

ROOT = Path(__file__).parent.parent.parent
CORE = ROOT / "src" / "potluck"
SURVIVORS = Path(__file__).with_name("mutation_survivors.toml")
PLANTED = Path(__file__).with_name("planted")


def _below(*patterns: str) -> tuple[str, ...]:
    """Modules as they are named here, e.g. ``net/tls``, from patterns of paths."""
    paths = sorted(path for pattern in patterns for path in CORE.glob(f"{pattern}.py"))
    return tuple(str(path.relative_to(CORE).with_suffix("")) for path in paths)


@dataclass(frozen=True)
class Area:
    """Modules in which faults are planted, and what has to find them."""

    modules: tuple[str, ...]
    folders: tuple[str, ...]
    """Where their tests are."""
    more: tuple[str, ...] = ()
    """Single tests from elsewhere."""
    seeds: range = range(0)
    """Of the simulated cluster."""

    @property
    def tests(self) -> tuple[str, ...]:
        """What pytest is given; the examples in the modules' docstrings are tests too."""
        files = (path for each in self.folders for path in (ROOT / "tests").glob(each))
        own = (str(CORE / f"{name}.py") for name in self.modules)
        return (*map(str, sorted(files)), *own, *(str(ROOT / "tests" / each) for each in self.more))


_NAMES = ("messages", "events", "election", "state", "health", "views", "bootstrap", "core")
_TRUST = ("pairing_code", "pairing_protocol", "roster", "roster_records", "admission")
_PURE = (*(f"trust/{name}" for name in _TRUST), "rpc/errors", "rpc/protocol")
AREAS = {
    "membership": Area(
        (*(f"membership/{name}" for name in _NAMES), "training/steps"),
        ("membership/test_*.py", "training/test_steps.py"),
        ("testing/test_scenario.py::test_the_story_ends_as_expected",),
        range(12),
    ),
    "pure": Area(
        (*_below("schedule/**/[a-z]*", "compression/[a-z]*"), *_PURE),
        (
            *("schedule/**/test_*.py", "compression/test_*.py"),
            *(f"{path.replace('/', '/test_')}.py" for path in _PURE),
        ),
    ),
    "net": Area(
        _below("net/[a-z]*"),
        (
            *("net/test_*.py", "trust/test_connect.py", "test_process.py", "test_golden.py"),
            *(f"backend/test_{name}.py" for name in ("framing", "lanes", "port", "tcp", "view")),
        ),
        ("integration/test_forks.py::test_a_forked_child_lets_go_of_shared_memory",),
    ),
    "training": Area(
        tuple(name for name in _below("training/[a-z]*") if name != "training/steps"),
        (
            *("training/test_[!s]*.py", "training/test_s[!t]*.py", "training/test_state.py"),
            "test_golden.py",
        ),
    ),
}
MODULES = AREAS["membership"].modules
_PLAIN = (
    *("-q", "-p", "no:randomly", "-p", "no:cacheprovider", "-o", "timeout=0"),
    *("-W", "ignore::pytest.PytestAssertRewriteWarning"),  # hypothesis is here already
)
_MEMORY = 4 << 30  # bytes of address space; a mutant may allocate without end
_FRESH_LIMIT = 600  # seconds for all tests in an interpreter of their own


@dataclass(slots=True)
class Check:
    """Something that fails when a rule is broken: a test, or a seed."""

    name: str
    passes: Callable[[], bool]
    seconds: float = 0.0
    """Of processor time."""
    lines: dict[str, set[int]] = field(default_factory=dict)
    """What it executes, by file."""
    wait: float = 0.0
    """How long it takes by the clock."""

    @property
    def limit(self) -> float:
        """After how many seconds it is taken to hang, also on a busy machine."""
        return 30 + 10 * max(self.seconds, self.wait)

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

    def __init__(
        self,
        checks: list[Check],
        jobs: int,
        until: float,
        keep: Callable[[dict[Mutant, str]], None] = lambda _: None,
        area: Area = AREAS["membership"],
    ) -> None:
        self.checks = checks
        self.area = area
        self.keep = keep
        """Called from time to time with what was found so far."""
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
            # A test that only makes objects executes no line of the module: take all of its own,
            # and those of what imports from it.
            own = f"/test_{Path(mutant.module).name}.py::"
            paths = {str(CORE / f"{name}.py") for name in self._users(mutant.module)}
            near = [
                each for each in self.checks if not paths.isdisjoint(each.lines) or own in each.name
            ]
        else:
            near = [check for check in self.checks if check.executes(mutant)]
        place = f"{mutant.module}.{mutant.function}"

        def key(check: Check) -> tuple[int, int, float]:
            kills = self.kills
            return -kills[place, check.name], -kills[mutant.module, check.name], check.seconds

        return sorted(near, key=key)

    def _users(self, module: str) -> list[str]:
        """A module, and those of the area that import from it."""
        name = f"potluck.{module.replace('/', '.')}"
        return [module, *(each for each in self.area.modules if name in _imported(each))]

    def _start(self, mutant: Mutant) -> Child:
        order = self._order(mutant)
        limit = 60 + sum(check.limit for check in order)
        limit += 0 if takes_effect(mutant) else _FRESH_LIMIT
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
            self.keep(self.found)
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
    _silence()
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, most))
    os.environ["POTLUCK_MUTANT"] = f"{mutant.module}:{mutant.number}"
    os.environ["PYTHONPATH"] = os.pathsep.join([str(PLANTED), str(ROOT / "tests")])
    try:
        is_planted = takes_effect(mutant)
        if is_planted:
            module = importlib.import_module(f"potluck.{mutant.module.replace('/', '.')}")
            source = (CORE / f"{mutant.module}.py").read_text(encoding="utf-8")
            try:
                plant(module, mutated(source, mutant.number))
            except CannotPlantError:
                is_planted = False
        if is_planted:
            name = next((check.name for check in order if not _passes_in_time(check)), "")
        else:
            name = _try_afresh(order)
    finally:
        os.write(pipe, json.dumps(name).encode())
        os._exit(0)


def takes_effect(mutant: Mutant) -> bool:
    """Whether a fault in a module that is imported already is all there: nothing was made of it.

    A constant that only functions read, or a default of a dataclass; but no function that has
    made the members of an enumeration.
    """
    module = importlib.import_module(f"potluck.{mutant.module.replace('/', '.')}")
    if not mutant.is_executed_at_import:
        owner, _, name = mutant.function.rpartition(".")
        made = getattr(module, owner, None) if name == "__init__" else None
        return not (isinstance(made, type) and issubclass(made, Enum))
    if mutant.function:
        made = dataclasses.is_dataclass(getattr(module, mutant.function, None))
        return made and mutant.function not in _read_at_import(annotations=False)
    name = mutant.old.split()[0].rstrip(":")
    if not hasattr(module, name):  # several at once, or another kind of statement
        return False
    return is_plain(getattr(module, name)) and name not in _read_at_import(annotations=True)


@cache
def _read_at_import(*, annotations: bool) -> frozenset[str]:
    """The names with which the library's modules compute at import."""
    trees = (ast.parse(path.read_text(encoding="utf-8")) for path in CORE.glob("**/*.py"))
    return frozenset(
        name for tree in trees for name in read_at_import(tree, annotations=annotations)
    )


@cache
def _imported(module: str) -> frozenset[str]:
    """The modules from which a module imports."""
    tree = ast.parse((CORE / f"{module}.py").read_text(encoding="utf-8"))
    imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
    return frozenset(node.module or "" for node in imports)


def _silence() -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)


def _passes_in_time(check: Check) -> bool:
    """Whether a check passes; one that loops or waits for ever ends this process."""
    signal.setitimer(signal.ITIMER_VIRTUAL, 2 + 10 * check.seconds)
    signal.setitimer(signal.ITIMER_REAL, check.limit)
    try:
        return check.passes()
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _try_afresh(order: list[Check]) -> str:
    """Run tests where the fault was there when the module was imported; "" if all pass."""
    tests = [check.name for check in order if "::" in check.name]  # a seed is no test of pytest
    if not tests:
        return ""
    command = [sys.executable, "-m", "pytest", "-x", *_PLAIN, "-p", "support.mutation_import"]
    try:
        run = subprocess.run([*command, *tests], cwd=ROOT, timeout=_FRESH_LIMIT)  # noqa: PLW1510
    except subprocess.TimeoutExpired:
        return ""  # the machine may be busy: nothing is known
    return "a fresh interpreter" if run.returncode else ""


class Plugin:
    """Takes over from pytest when the tests are collected."""

    def __init__(
        self,
        area: Area,
        mutants: list[Mutant],
        jobs: int,
        seconds: float,
        measured: Path | None,
        keep: Callable[[dict[Mutant, str]], None],
    ) -> None:
        self.area = area
        self.mutants = mutants
        self.jobs = jobs
        self.seconds = seconds
        self.measured = measured
        self.keep = keep
        self.hunt: Hunt | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run all once, then on each mutant."""
        checks = [Check(item.nodeid, _runner(item)) for item in session.items]
        checks += [Check(f"seed {seed}", _player(seed)) for seed in self.area.seeds]
        sound = _recall(checks, self.area, self.measured)
        sys.stdout.write(f"{len(self.mutants)} mutants, {len(sound)} checks\n")
        until = time.monotonic() + self.seconds
        self.hunt = Hunt(sound, self.jobs, until, self.keep, self.area)
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


def _recall(checks: list[Check], area: Area, path: Path | None) -> list[Check]:
    """Take from a file what was measured before; measure what is new, and keep it there.

    :raises RuntimeError: if a module cannot be planted
    """
    known = json.loads(path.read_text()) if path is not None and path.exists() else {}
    fresh = [check for check in checks if check.name not in known]
    sound = _control(_measure(fresh, area), area)  # the others passed it when they were new
    for check in checks:
        if known.get(check.name):
            check.seconds, check.wait, lines = known[check.name]
            check.lines = {file: set(numbers) for file, numbers in lines.items()}
            sound.append(check)
    if path is not None:
        passed = {
            c.name: (c.seconds, c.wait, {f: sorted(n) for f, n in c.lines.items()}) for c in sound
        }
        path.write_text(json.dumps({**{check.name: None for check in checks}, **passed}))
    return sound


def _measure(checks: list[Check], area: Area) -> list[Check]:
    """Run each check once; those that pass, with what they execute.

    Each in a process of its own: a check that has run may leave something behind, and would not
    be the same check when it is run on a mutant.
    """
    sound = []
    for number, check in enumerate(checks, start=1):
        if number % 100 == 0:
            sys.stdout.write(f"{number} of {len(checks)} checks measured\n")
            sys.stdout.flush()
        begun = time.monotonic()
        found = in_a_child(lambda: watch_lines(check, area))  # noqa: B023
        passes, check.seconds, lines = found or (False, 0.0, {})
        check.wait = time.monotonic() - begun
        check.lines = {file: set(numbers) for file, numbers in lines.items()}
        if passes:
            sound.append(check)
        else:
            sys.stdout.write(f"fails without a mutant, left out: {check.name}\n")
    return sound


def in_a_child(work: Callable[[], Any]) -> Any:
    """Do something in a forked process; what it returned, None if it did not come to an end."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        _silence()
        try:
            with os.fdopen(writing, "w", encoding="utf-8") as pipe:
                pipe.write(json.dumps(work()))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, encoding="utf-8") as pipe:
        said = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(said) if said else None


def watch_lines(check: Check, area: Area) -> tuple[bool, float, dict[str, list[int]]]:
    """Run a check; whether it passes, its processor time, and the lines it executes by file.

    Lines that are executed in forked children and in interpreters of their own count as well.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "settings")
        files = "".join(f"\n  {CORE / name}.py" for name in area.modules)
        settings.write_text(
            f"[run]\ndata_file = {folder}/lines\nparallel = true\nsigterm = true\n"
            f"disable_warnings = no-data-collected\n"  # some tests only use messages
            f"patch =\n  _exit\n  fork\n  subprocess\ninclude ={files}\n",
            encoding="utf-8",
        )
        watch = coverage.Coverage(config_file=str(settings))
        begun = time.process_time()
        watch.start()
        try:
            passes = check.passes()
        finally:
            watch.stop()
        seconds = time.process_time() - begun
        watch.save()
        lines: dict[str, set[int]] = {}
        for path in Path(folder).glob("lines*"):
            data = coverage.CoverageData(str(path))
            with suppress(coverage.CoverageException):  # of one that was killed while it wrote
                data.read()
                for file in data.measured_files():
                    lines.setdefault(file, set()).update(data.lines(file) or ())
        return passes, seconds, {file: sorted(numbers) for file, numbers in lines.items()}


def _control(checks: list[Check], area: Area) -> list[Check]:
    """Plant every module as it is and run all checks, one after the other; those that pass.

    The others would find mutants only because of how they are run.

    :raises RuntimeError: if a module cannot be planted
    """

    def run() -> list[str]:
        for module in area.modules:
            source = (CORE / f"{module}.py").read_text(encoding="utf-8")
            plant(importlib.import_module(f"potluck.{module.replace('/', '.')}"), ast.parse(source))
        order = sorted(checks, key=lambda check: check.seconds)
        return [check.name for check in order if not check.passes()]

    failed = in_a_child(run) if checks else []
    if failed is None:
        msg = "a module cannot be planted, or a check ends the process"
        raise RuntimeError(msg)
    for name in failed:
        sys.stdout.write(f"fails after others or with all modules planted, left out: {name}\n")
    return [check for check in checks if check.name not in failed]


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
    """The command; 1 if a survivor is not explained, or too many survive."""
    parser = argparse.ArgumentParser(prog="python -m support.mutation_run", description=__doc__)
    parser.add_argument("--sample", type=int, default=0, help="how many, by lot (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the lot (default 0)")
    parser.add_argument(
        "--module", action="append", help="only of this one, e.g. membership/election"
    )
    parser.add_argument("--function", default="", help="only of functions with this in their name")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time (default 1)")
    parser.add_argument("--seconds", type=float, default=inf, help="at most (default: no limit)")
    parser.add_argument(
        "--results", type=Path, help="a file that keeps results; what it has is not tried again"
    )
    parser.add_argument(
        "--survivors", action="store_true", help="try those again that survived in --results"
    )
    parser.add_argument(
        "--measured", type=Path, help="a file that keeps what each test executes, for the next time"
    )
    parser.add_argument("--area", choices=AREAS, default="membership", help="what to test")
    parser.add_argument(
        "--least", type=float, help="the share to kill of those without an explanation, e.g. 0.9"
    )
    options = parser.parse_args(arguments)
    area = AREAS[options.area]
    mutants = [
        mutant
        for name in options.module or area.modules
        for mutant in mutants_of(name, (CORE / f"{name}.py").read_text(encoding="utf-8"))
        if options.function in mutant.function
    ]
    if options.sample:
        mutants = Random(options.seed).sample(mutants, min(options.sample, len(mutants)))
    keys = _keys(mutants)
    known: dict[str, str] = {}
    if options.results is not None and options.results.exists():
        known = json.loads(options.results.read_text(encoding="utf-8"))
        if options.survivors:
            known = {key: name for key, name in known.items() if name}
    found = {mutant: known[key] for mutant, key in keys.items() if key in known}
    os.environ["HYPOTHESIS_PROFILE"] = PROFILE
    left = [mutant for mutant in mutants if mutant not in found]
    left.sort(key=lambda mutant: mutant.is_executed_at_import)  # these take longest

    def keep(more: dict[Mutant, str]) -> None:
        if options.results is not None:
            known.update({keys[mutant]: name for mutant, name in more.items()})
            options.results.write_text(json.dumps(known, indent=0), encoding="utf-8")

    plugin = Plugin(area, left, options.jobs, options.seconds, options.measured, keep)
    pytest.main([*_PLAIN, "--capture=no", *area.tests], plugins=[plugin])
    if plugin.hunt is None:
        sys.stderr.write("the tests could not be collected, or fail without a mutant\n")
        return 2
    found |= plugin.hunt.found
    keep(found)
    unexplained = report(found)
    if options.least is None:
        return 1 if unexplained else 0
    killed = sum(map(bool, found.values()))
    return 0 if killed >= options.least * (killed + unexplained) else 1


def _keys(mutants: list[Mutant]) -> dict[Mutant, str]:
    """A name for each that stays the same while other parts of its module change."""
    seen: Counter[str] = Counter()
    keys = {}
    for mutant in mutants:
        name = f"{mutant.module} {mutant.function}\n- {mutant.old}\n+ {mutant.new}"
        keys[mutant] = f"{name}\n{seen[name]}"
        seen[name] += 1
    return keys


if __name__ == "__main__":
    sys.exit(main())
