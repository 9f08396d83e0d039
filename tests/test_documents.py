"""What README and its companions show is there, and works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.pages import ROOT, blocks, languages, pages

README = (ROOT / "README.md").read_text(encoding="utf-8")


def block(language: str, text: str) -> str:
    """The first fenced block of a language."""
    found = re.search(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    """Two processes run the ten lines as they stand, and both have the mean."""
    (tmp_path / "hello.py").write_text(block("python", README), encoding="utf-8")
    nodes = [
        subprocess.Popen(
            [sys.executable, "hello.py"],
            cwd=tmp_path,
            env=os.environ | {"POTLUCK_HOME": str(tmp_path / "home")},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    try:
        printed = [process.communicate(timeout=30)[0] for process in nodes]
    finally:
        for process in nodes:
            process.kill()
            process.wait()
    assert sorted(printed) == [
        "rank 0 of 2 has [1.5 1.5 1.5 1.5]\n",
        "rank 1 of 2 has [1.5 1.5 1.5 1.5]\n",
    ]


ELSEWHERE = {
    "CONTRIBUTING.md": "test_documents.py",
    "README.md": "test_documents.py",
    "pytorch.md": "integration/test_torch_examples.py",
    "quickstart.md": "integration/test_walkthrough.py",
}
"""Pages whose programs are run by a test of their own: they need more than one process."""

PROGRAMS = [
    page.name
    for page in pages()
    if page.name not in ELSEWHERE and blocks(page.read_text(encoding="utf-8"), "python")
]


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_examples_of_a_page_are_true(tmp_path: Path, page: str) -> None:
    """All of them run as one program, in which every thread's assertion counts."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    watch = "import os, threading, traceback\ndef end(args):\n"
    watch += "    traceback.print_exception(args.exc_value)\n    os._exit(1)\n"
    (tmp_path / "page.py").write_text(
        watch + "threading.excepthook = end\n" + "\n".join(blocks(text, "python")),
        encoding="utf-8",
    )
    subprocess.run([sys.executable, "page.py"], cwd=tmp_path, check=True, timeout=50)


@pytest.mark.parametrize("page", ELSEWHERE)
def test_the_other_pages_have_a_test_that_runs_them(page: str) -> None:
    """It is named above, and reads the page."""
    assert page in (ROOT / "tests" / ELSEWHERE[page]).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.name))
def test_every_block_says_what_it_is(page: Path) -> None:
    """Programs, commands and examples are run; the rest is text, or a diagram made from code."""
    known = {"python", "console", "text"}
    if page.name == "reference.md":
        known |= {"pycon"}  # the examples of docstrings, which are run where they are
    if page.name == "architecture.md":
        known |= {"mermaid"}
    assert languages(page.read_text(encoding="utf-8")) <= known


def test_every_variable_is_explained() -> None:
    """What the environment can say to Potluck is on the page about operating it, and no more."""
    name = re.compile(r"\bPOTLUCK_[A-Z]+(?:_[A-Z]+)*\b")
    source = (ROOT / "src" / "potluck").rglob("*.py")
    used = {found for file in source for found in name.findall(file.read_text(encoding="utf-8"))}
    page = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    assert set(name.findall(page)) == used


def shown() -> list[str]:
    """The paths on the README's map; an indented line is within the last one that is not."""
    paths: list[str] = []
    folder = ""
    for line in block("text", README).splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            paths.append(folder + name)
        else:
            folder = name
            paths.append(name)
    return paths


def test_the_map_shows_what_exists() -> None:
    """Every line of the map in the README is a file or folder of the tree."""
    assert [path for path in shown() if not (ROOT / path).exists()] == []
    assert [path for path in shown() if (ROOT / path).is_dir() != path.endswith("/")] == []


def test_the_map_misses_nothing() -> None:
    """Every room of the package and every page of the documentation is on the map."""
    package = ROOT / "src" / "potluck"
    rooms = {file.relative_to(ROOT).parts[2] for file in package.rglob("*.py")}
    assert rooms - {path.split("/")[2] for path in shown() if path.startswith("src/")} == set()
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")}
    assert pages - set(shown()) == set()


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.name))
def test_verbs_and_links_exist(page: Path) -> None:
    """Each `make` verb named in a page is in the Makefile, each linked file is in the tree."""
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = set(re.findall(r"(?:`|\$ )make ([\w-]+)", text))
    assert verbs <= set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    assert [link for link in links if not page.parent.joinpath(link).exists()] == []


def test_the_example_of_the_style_guide_is_true() -> None:
    """The function and the test shown in CONTRIBUTING.md are run as one program."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))
    program = f"{code}\ntest_the_parts_cover_the_whole()\nimport doctest\n"
    program += "result = doctest.testmod()\nassert result.attempted == 1 and result.failed == 0"
    subprocess.run([sys.executable, "-c", program], check=True)
