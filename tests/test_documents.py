"""What README and its companions show is there, and works."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import potluck
from support.idioms import idioms
from support.pages import ROOT, blocks, languages, pages

README = (ROOT / "README.md").read_text(encoding="utf-8")
CHANGELOG = ROOT / "CHANGELOG.md"
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


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
    page.relative_to(ROOT).as_posix()
    for page in pages()
    if page.name not in ELSEWHERE and blocks(page.read_text(encoding="utf-8"), "python")
]


@pytest.mark.parametrize("page", PROGRAMS)
def test_the_examples_of_a_page_are_true(tmp_path: Path, page: str) -> None:
    """All of them run as one program, in which every thread's assertion counts."""
    text = (ROOT / page).read_text(encoding="utf-8")
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
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    assert set(name.findall(page)) == used


def shown() -> list[str]:
    """The paths on the map in CONTRIBUTING.md; an indented line is within the last folder."""
    paths: list[str] = []
    folder = ""
    for line in block("text", CONTRIBUTING).splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            paths.append(folder + name)
        else:
            folder = name
            paths.append(name)
    return paths


def test_the_map_shows_what_exists() -> None:
    """Every line of the map is a file or folder of the tree."""
    assert [path for path in shown() if not (ROOT / path).exists()] == []
    assert [path for path in shown() if (ROOT / path).is_dir() != path.endswith("/")] == []


def test_the_map_misses_nothing() -> None:
    """Every package and every module at the root is on the map."""
    package = ROOT / "src" / "potluck"
    rooms = {file.relative_to(ROOT).parts[2] for file in package.rglob("*.py")}
    assert rooms - {path.split("/")[2] for path in shown() if path.startswith("src/")} == set()


def links(page: Path) -> set[Path]:
    """The files of the tree to which a page links."""
    found = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    return {(page.parent / link).resolve() for link in found if "://" not in link}


def test_every_page_can_be_found_from_the_readme() -> None:
    """README links to every page for users; the index of the internals to every other one."""
    assert set((ROOT / "docs").glob("*.md")) - links(ROOT / "README.md") == set()
    index = ROOT / "docs" / "internals" / "README.md"
    assert index in links(ROOT / "README.md")
    assert set(index.parent.glob("*.md")) - links(index) == {index}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.name))
def test_verbs_and_links_exist(page: Path) -> None:
    """Each `make` verb named in a page is in the Makefile, each linked file is in the tree."""
    text = page.read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = set(re.findall(r"(?:`|\$ )make ([\w-]+)", text))
    assert verbs <= set(re.findall(r"^([\w-]+):", makefile, flags=re.MULTILINE))
    assert [link for link in links(page) if not link.exists()] == []


def prose(page: Path) -> str:
    """What is written by hand in a page: generated parts are checked where they come from."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"<!-- generated: .*?<!-- end -->", "", text, flags=re.DOTALL)


FROM_THE_CODE = {"cli.md", "reference.md"}
"""Pages made from help texts and docstrings."""


@pytest.mark.parametrize("page", [*pages(), CHANGELOG], ids=lambda page: str(page.name))
def test_pages_are_written_in_plain_english(page: Path) -> None:
    """No page has an idiom that sounds translated; tests/test_idioms.py plants each of them.

    Help texts and docstrings are read as they are printed.
    """
    assert (
        idioms(page.read_text(encoding="utf-8") if page.name in FROM_THE_CODE else prose(page))
        == []
    )


def test_an_idiom_in_a_page_is_found(tmp_path: Path) -> None:
    """Also at the end of a line; what is generated from the code is not looked at here."""
    page = tmp_path / "page.md"
    page.write_text("The others go\non.\n<!-- generated: x -->\nNobody.\n<!-- end -->\n", "utf-8")
    assert idioms(prose(page)) == ["The others go on."]


INSIDE = re.compile(r"\b(namespace|circle|roster|lineage|quorum)s?\b", re.IGNORECASE)
"""Words of the internals. A view and an epoch (of training) are ordinary words as well."""


def test_pages_for_users_use_their_two_words() -> None:
    """They say group and job; what is in backquotes, such as an option, keeps its name."""
    found = [ROOT / "README.md", ROOT / "examples" / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in found:
        if page.name not in FROM_THE_CODE:
            text = re.sub(r"^```.*?^```$", "", prose(page), flags=re.MULTILINE | re.DOTALL)
            assert INSIDE.findall(re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)) == [], page.name


def test_the_glossary_is_short() -> None:
    """At most 25 words are needed to read the code."""
    text = (ROOT / "docs" / "internals" / "concepts.md").read_text(encoding="utf-8")
    words = re.findall(r"^\| ([\w, ]+) \|", text, flags=re.MULTILINE)[1:]
    assert 15 <= len(words) <= 25


def test_the_tour_names_what_exists() -> None:
    """Each answer needs at most five files, and the names that it mentions are in them."""
    text = (ROOT / "docs" / "internals" / "tour.md").read_text(encoding="utf-8")
    answers = text.split("\n## ")[1:]
    assert len(answers) == 4
    for answer in answers:
        rows = re.findall(r"^\| `([\w/]+\.py)` \| (.*) \|$", answer, flags=re.MULTILINE)
        assert 3 <= len(rows) <= 5
        files = [
            ROOT / "src" / "potluck" / each for each in re.findall(r"`([a-z_/]+\.py)`", answer)
        ]
        sources = "".join(
            file.read_text(encoding="utf-8") for file in files if "tests" not in file.parts
        )
        for name in re.findall(r"`([A-Za-z_.]+)`", " ".join(told for _, told in rows)):
            if name not in potluck.__all__:
                assert all(re.search(rf"\b{part}\b", sources) for part in name.split(".")), name


def anchors(page: Path) -> set[str]:
    """The places of a page to which a link can lead."""
    text = re.sub(r"^```.*?^```$", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.name))
def test_links_lead_to_headings(page: Path) -> None:
    """A link with a fragment names a heading of the page that it leads to."""
    for link, fragment in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text("utf-8")):
        target = (page.parent / link).resolve() if link else page
        assert fragment in anchors(target), f"{link}#{fragment}"


def test_the_example_of_the_style_guide_is_true() -> None:
    """The function and the test shown in CONTRIBUTING.md are run as one program."""
    text = CONTRIBUTING
    code = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))
    program = f"{code}\ntest_the_parts_cover_the_whole()\nimport doctest\n"
    program += "result = doctest.testmod()\nassert result.attempted == 1 and result.failed == 0"
    subprocess.run([sys.executable, "-c", program], check=True)
