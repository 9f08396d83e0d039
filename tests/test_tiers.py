"""Every test is run by one of the tiers: `make test`, the rest of `make test-all`, `make soak`."""

import itertools
import re
from pathlib import Path

import pytest
from _pytest.mark.expression import Expression

ROOT = Path(__file__).parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
MARKERS = ("slow", "hypothesis", "frameworks", "soak")


def variable(name: str) -> str:
    """What the Makefile sets a variable to."""
    found = re.search(rf"^{name} := (.*?)(?<!\\)$", MAKEFILE, re.MULTILINE | re.DOTALL)
    assert found is not None, f"the Makefile sets no {name}"
    return found[1]


def takes(tier: str, markers: set[str]) -> bool:
    """Whether a tier runs a test with these markers."""

    def is_marked(name: str, /, **_: str | int | bool | None) -> bool:
        return name in markers

    return Expression.compile(variable(tier)).evaluate(is_marked)


@pytest.mark.parametrize("is_marked", list(itertools.product([False, True], repeat=len(MARKERS))))
def test_no_test_falls_between_the_tiers(is_marked: tuple[bool, ...]) -> None:
    """Whatever its markers, one tier runs it; only property tests are run by the first two."""
    markers = {name for name, is_set in zip(MARKERS, is_marked, strict=True) if is_set}
    tiers = [
        tier for tier in ("FIRST", "SECOND", "FRAMEWORKS_ONLY", "SOAKS") if takes(tier, markers)
    ]
    assert tiers
    assert len(tiers) == 1 or (tiers == ["FIRST", "SECOND"] and "hypothesis" in markers)


def recipe(verb: str) -> str:
    """The commands of a verb."""
    return re.split(r"\n\n", MAKEFILE.split(f"\n{verb}: ", 1)[1], maxsplit=1)[0]


def test_each_verb_runs_its_tier() -> None:
    """And continuous integration runs the first and all that `make test-all` adds."""
    assert "-m '$(FIRST)' $(ARGS)" in recipe("test")
    assert "-m '$(SECOND)' $(ARGS)" in recipe("test-slow")
    assert "-m soak" in recipe("soak")
    assert recipe("test-all").startswith("test test-rest cover-pure ")
    rest = recipe("test-rest").partition(" ##")[0].split()
    assert rest == ["types", "test-slow", "test-bare", "test-frameworks"]
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.rstrip().endswith("\nmake test\nmake test-rest")


def test_every_file_that_needs_the_frameworks_is_given_to_them() -> None:
    """`make test-frameworks` names its files, because the others need no second environment."""
    marked = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("test_*.py")
        if re.search(r"\bmark\.frameworks\b", path.read_text(encoding="utf-8"))
    } - {"tests/test_tiers.py"}
    assert marked
    assert marked <= set(recipe("test-frameworks").split())


def test_what_runs_bare_exists() -> None:
    """A file that was renamed would otherwise end the run before it begins, or be left out."""
    files = [word for word in variable("BARE").split() if word != "\\"]
    assert files
    assert all((ROOT / file).is_file() for file in files)


def test_the_quick_profile_is_the_smaller_one(request: pytest.FixtureRequest) -> None:
    """`make test` asks for it by name; the second tier does not."""
    assert "HYPOTHESIS_PROFILE:-quick" in recipe("test")
    assert "HYPOTHESIS_PROFILE" not in recipe("test-slow")
    rules = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
    quick = re.search(r'"quick",[^)]*max_examples=(\d+)', rules)
    assert quick is not None
    assert 10 <= int(quick[1]) < 100
