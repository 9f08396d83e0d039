"""The faults that mutation tests plant: which there are, and that they take effect."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from potluck.training import sampler
from support.interpreter import ask
from support.mutation import CannotPlantError, mutants_of, mutated, plant
from support.mutation_import import Finder
from support.mutation_run import (
    AREAS,
    CORE,
    PLANTED,
    Check,
    Hunt,
    explained,
    in_a_child,
    report,
    takes_effect,
    watch_lines,
)

SOURCE = '''
"""A module."""

LIMIT = 3
__all__ = ["Box", "is_small", "outside"]

def is_small(number: int, most: int = LIMIT) -> bool:
    """Whether a number is small."""
    if not number:
        return True
    return number < most and number != 2

class Box:
    """Keeps numbers."""
    def __init__(self) -> None:
        self.kept = []
    @property
    def best(self) -> str:
        return f"{max(self.kept) + 1}"
    def put(self, number: int) -> None:
        if number in self.kept:
            return
        self.kept.append(number)
    def even(self) -> list[int]:
        return [n for n in self.kept if n % 2 == 0]
'''


@pytest.fixture
def box(tmp_path: Path) -> Iterator[ModuleType]:
    """The module above, and another one that has imported from it."""
    sys.path.insert(0, str(tmp_path))
    (tmp_path / "mutated_box.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "mutated_user.py").write_text(
        "from mutated_box import LIMIT, Box, is_small\n", encoding="utf-8"
    )
    importlib.invalidate_caches()
    yield importlib.import_module("mutated_user")
    sys.path.remove(str(tmp_path))
    for name in ("mutated_user", "mutated_box"):
        del sys.modules[name]


def changes() -> dict[tuple[str, str], int]:
    """The numbers of all faults, by what they change."""
    return {(m.old, m.new): m.number for m in mutants_of("mutated_box", SOURCE)}


def test_the_faults_of_a_module() -> None:
    """Conditions, comparisons, numbers, calls and whole statements; no text, no annotation."""
    found = set(changes())
    assert ("if not number:", "if not not number:") in found
    body = "return number < most and number != 2"
    assert {new for old, new in found if old == body} == {
        "return number <= most and number != 2",
        "return number < most or number != 2",
        "return number < most and number == 2",
        "return number < most and number != 3",
        "return number < most and number != 1",
        "return not (number < most and number != 2)",
    }
    assert {new for old, new in found if old == "LIMIT = 3"} == {"LIMIT = 4", "LIMIT = 2"}
    assert ("return True", "return False") in found
    assert ("if number in self.kept:", "if number not in self.kept:") in found
    assert ("self.kept.append(number)", "(removed)") in found
    assert ("return", "(removed)") in found
    listed = "return [n for n in self.kept if n % 2 == 0]"
    assert (listed, "return [n for n in self.kept if n % 2 != 0]") in found
    assert not any("__all__" in old or "max" in old for old, _ in found)


def test_every_fault_is_another_program() -> None:
    """Each compiles, and none is the original."""
    mutants = mutants_of("mutated_box", SOURCE)
    assert len({compile(mutated(SOURCE, m.number), "", "exec") for m in mutants}) == len(mutants)
    with_lines = {m.old: (m.line, m.last_line) for m in mutants}
    assert with_lines["if number in self.kept:"] == (21, 21)


def test_a_fault_is_seen_by_those_who_imported_before(box: ModuleType) -> None:
    """Functions, methods, properties, defaults and constants change in place."""
    numbers = changes()
    home = sys.modules["mutated_box"]
    kept = box.Box()
    plant(home, mutated(SOURCE, numbers["self.kept.append(number)", "(removed)"]))
    kept.put(4)
    assert kept.kept == []
    plant(home, mutated(SOURCE, numbers["return True", "return False"]))
    kept.put(4)
    assert kept.kept == [4]  # the other fault is out again
    assert not box.is_small(0)
    plant(home, mutated(SOURCE, numbers["LIMIT = 3", "LIMIT = 4"]))
    assert box.LIMIT == home.LIMIT == 4
    assert box.is_small(3)
    assert kept.best == "5"


def test_a_fault_can_be_there_from_the_import_on(box: ModuleType) -> None:
    """So what other modules computed from a constant has it too."""
    home = sys.modules["mutated_box"]
    finder = Finder("mutated_box", changes()["LIMIT = 3", "LIMIT = 4"])
    spec = finder.find_spec("mutated_box", [str(Path(home.__file__ or "").parent)])
    assert spec is not None
    assert spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert (fresh.LIMIT, fresh.is_small(3)) == (4, True)
    assert (box.LIMIT, finder.find_spec("another")) == (3, None)


CHOICES = """
from enum import Enum

LIMIT = 3

class Way(Enum):
    UP = 1

def choose(way: Way = Way.UP, limit: int = LIMIT, *, other: Way = Way.UP, most: int = LIMIT):
    return way is other is Way.UP, limit, most
"""


def test_defaults_that_are_data_change_and_others_stay() -> None:
    """A member of an enumeration that was made a second time would equal none."""
    module = ModuleType("choices")
    module.__file__ = "choices.py"
    exec(CHOICES, vars(module))  # noqa: S102 - the lines above
    (fault,) = (m.number for m in mutants_of("choices", CHOICES) if m.new == "LIMIT = 4")
    choose, way = vars(module)["choose"], vars(module)["Way"]
    plant(module, mutated(CHOICES, fault))
    assert choose() == (True, 4, 4)
    assert choose(way.UP, 5) == (True, 5, 4)


WRAPPED = """
from contextlib import contextmanager
from functools import cache, cached_property

@contextmanager
def counting(seen):
    seen.append(1)
    yield
    seen.append(2)

@cache
def limit():
    return 3

class Shelf:
    @cached_property
    def size(self):
        return 4
    @contextmanager
    def open(self):
        yield 5
    @classmethod
    @cache
    def width(cls):
        return 6
"""


def test_a_fault_is_planted_in_what_is_wrapped() -> None:
    """Context managers, and what is computed once: also for those that have the old one."""
    module = ModuleType("wrapped")
    module.__file__ = "wrapped.py"
    exec(WRAPPED, vars(module))  # noqa: S102 - the lines above
    counting, limit, shelf = (vars(module)[name] for name in ("counting", "limit", "Shelf"))

    def look() -> list[int]:
        seen: list[int] = []
        with counting(seen):
            pass
        with shelf().open() as opened:
            return [*seen, limit(), shelf().size, opened, shelf.width()]

    assert look() == [1, 2, 3, 4, 5, 6]
    for place in range(6):
        number = place + 1
        (fault,) = (
            m.number
            for m in mutants_of("wrapped", WRAPPED)
            if str(number) in m.old and str(number + 1) in m.new
        )
        plant(module, mutated(WRAPPED, fault))
        expected = [1, 2, 3, 4, 5, 6]
        expected[place] += 1
        assert look() == expected


def test_a_fault_that_cannot_be_planted_is_not_taken_for_one_that_survived() -> None:
    """A function that does not call its parent any more has other names around it."""
    source = "class One:\n    def __init__(self):\n        super().__init__()\n"
    module = ModuleType("one")
    module.__file__ = "one.py"
    exec(source, vars(module))  # noqa: S102 - the line above
    (removal,) = [m for m in mutants_of("one", source) if m.new == "(removed)"]
    with pytest.raises(CannotPlantError):
        plant(module, mutated(source, removal.number))


def test_a_fault_is_caught_survives_or_hangs(capfd: pytest.CaptureFixture[str]) -> None:
    """Each in a process of its own: here nothing changes."""
    source = (CORE / "membership" / "election.py").read_text(encoding="utf-8")
    mutant = next(m for m in mutants_of("membership/election", source) if m.old == "if not votes:")
    quorum = importlib.import_module("potluck.membership.election")
    lines = {str(CORE / "membership" / "election.py"): {mutant.line}}

    def holds() -> bool:
        return bool(quorum.has_quorum([1, 2, 3], [1, 2], set()))

    for passes, finder in ((holds, "a test"), (lambda: True, "")):
        hunt = Hunt([Check("a test", passes, 0.0, lines)], 1, float("inf"))
        hunt.run([mutant])
        assert hunt.found == {mutant: finder}
        assert report(hunt.found) == (0 if finder else 1)
    blind = Hunt([Check("elsewhere", holds, 0.0, {})], 1, float("inf"))
    blind.run([mutant])
    assert blind.found == {mutant: ""}  # a test that does not come there is not run
    assert holds()
    assert "- if not votes:\n+ if not not votes:" in capfd.readouterr().out


def test_every_explanation_is_of_a_fault_that_exists() -> None:
    """One whose line has changed is to be thought about again."""
    found = {
        (m.module, m.function, m.old, m.new)
        for area in AREAS.values()
        for name in area.modules
        for m in mutants_of(name, (CORE / f"{name}.py").read_text(encoding="utf-8"))
    }
    assert len(found) > 5000
    entries = explained()
    assert [key for key in entries if key not in found] == []
    assert all(reason.endswith(".") for reason in entries.values())


@pytest.mark.parametrize(
    ("module", "old", "is_enough"),
    [
        ("membership/messages", "samples: int = 0", True),  # a default of a dataclass
        ("membership/election", "_QUICK_ATTEMPTS = 5", True),  # only functions read it
        ("membership/messages", "MAX_BRANCHES = 32", False),  # a type of a message was made with it
        ("membership/election", "_NO_VIEW = View('', 0, ())", False),  # an object of a class
        (
            "membership/health",
            "interval: float = 0.2",
            False,
        ),  # a default has been made of the class
        ("membership/messages", "samples: Count = 0", False),  # a message, not a dataclass
        ("membership/messages", "return 0", True),
        ("training/balance", "BUSY, HOT, SLOW = (50, 90, 2.0)", False),  # several at once
        ("membership/health", "self.status = status", False),  # it has made an enumeration
    ],
)
def test_what_was_made_at_import_needs_a_fresh_interpreter(
    module: str, old: str, is_enough: bool
) -> None:
    """A fault in what nothing was made of takes effect where it is planted."""
    source = (CORE / f"{module}.py").read_text(encoding="utf-8")
    found = [takes_effect(mutant) for mutant in mutants_of(module, source) if mutant.old == old]
    assert found
    assert set(found) == {is_enough}


def test_an_interpreter_that_a_test_starts_has_the_fault(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of what users notice happens only when a process begins or ends."""
    name = "training/sampler"
    mutants = mutants_of(name, (CORE / f"{name}.py").read_text(encoding="utf-8"))
    (fault,) = (each for each in mutants if each.new == "MAX_PIECES = 9")
    monkeypatch.setenv("POTLUCK_MUTANT", f"{name}:{fault.number}")
    program = "from potluck.training.sampler import MAX_PIECES; print(MAX_PIECES)"
    assert ask(program, cwd=tmp_path) == 8
    assert ask(program, cwd=tmp_path, path=PLANTED) == 9


def test_what_a_test_executes_in_other_processes_counts(tmp_path: Path) -> None:
    """In a forked child that leaves without a word, and in an interpreter of its own."""

    def forks() -> bool:
        child = os.fork()
        if not child:
            sampler.total([(0, 4)])
            os._exit(0)
        return os.waitpid(child, 0)[1] == 0

    def asks() -> bool:
        program = "from potluck.training.sampler import total; print(total([(0, 4)]))"
        return bool(ask(program, cwd=tmp_path) == 4)

    file = str(CORE / "training" / "sampler.py")
    line = inspect.getsourcelines(sampler.total)[1] + 6
    for passes in (forks, asks):
        check = Check("", passes)
        passed, _, lines = in_a_child(partial(watch_lines, check, AREAS["training"]))
        assert passed
        assert line in lines[file]
