"""What the documentation takes from the code is what the code says; every public name is shown."""

from __future__ import annotations

import doctest
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import potluck
from support.pages import ROOT, blocks


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """The script that writes the pages."""
    spec = importlib.util.spec_from_file_location("docs_build", ROOT / "docs" / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    kept = list(sys.path)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path[:] = kept
    return module


@pytest.fixture(scope="module")
def made(build: ModuleType) -> dict[Path, str]:
    """Every page that has something generated, as it should be."""
    pages: dict[Path, str] = build.pages()
    return pages


def test_the_pages_are_up_to_date(made: dict[Path, str]) -> None:
    """Whoever changes a table of the code runs `make docs`."""
    stale = [path.name for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: make docs"


def test_a_page_that_was_changed_by_hand_is_noticed(build: ModuleType) -> None:
    """The generated part is replaced, the text around it stays."""
    text = "before\n<!-- generated: limits -->\nwrong\n<!-- end -->\nafter\n"
    fresh = build.renewed(text)
    assert fresh.startswith("before\n<!-- generated: limits -->\n\n| what |")
    assert fresh.endswith("<!-- end -->\nafter\n")
    assert "wrong" not in fresh
    assert build.renewed(fresh) == fresh


def test_every_part_is_used_somewhere(build: ModuleType, made: dict[Path, str]) -> None:
    """None is made for nobody."""
    text = "".join(made.values())
    assert set(re.findall(r"<!-- generated: ([\w ]+) -->", text)) == set(build.PARTS)


@pytest.mark.parametrize("name", potluck.__all__)
def test_every_public_name_has_an_example(name: str) -> None:
    """It is in the docstring, and is run with that module's other examples."""
    thing = getattr(potluck, name)
    doc = inspect.getdoc(thing)
    assert doc is not None
    examples = doctest.DocTestParser().get_examples(doc)
    assert examples, f"{name} has no example"
    asserting = [each for each in examples if each.want or "assert" in each.source]
    assert asserting, f"the example of {name} shows no result"


def test_the_reference_shows_every_public_name() -> None:
    """With its examples."""
    text = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"^### `(\w+)`$", text, flags=re.MULTILINE)) == potluck.__all__
    assert len(blocks(text, "pycon")) >= len(potluck.__all__)


REFERENCE = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(text, id=f"{number}-{text.splitlines()[-1][:40]}")
        for number, text in enumerate(blocks(REFERENCE, "pycon"))
    ],
)
def test_every_example_of_the_reference_runs_as_printed(
    example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader pastes it into a fresh interpreter, where no name is defined."""
    monkeypatch.chdir(tmp_path)
    parsed = doctest.DocTestParser().get_doctest(example, {}, "reference.md", None, 0)
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(parsed, out=said.append)
    assert not said, "".join(said)
