"""Every command that a page shows is run by a test, which is named here."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest

from support.pages import ROOT, blocks, pages

# What a command looks like -> the test file that runs it, and a word by which that is seen.
RUN_BY = {
    r"make [a-z-]+": ("test_commands_in_documents.py", "--dry-run"),
    r"\.venv/bin/pre-commit install": ("test_commands_in_documents.py", "pre-commit"),
    r"\.venv/bin/python hello\.py( &)?": ("test_documents.py", "hello.py"),
    r"potluck pair( \d+-[a-z]+-[a-z]+)?": ("integration/test_walkthrough.py", "pair"),
    r"potluck dashboard": ("apps/cli/test_dashboard.py", "dashboard"),
    r"potluck run --serve \w+\.py": ("apps/cli/test_dashboard.py", "--serve"),
    r"potluck run --per-node 2 examples/\w+\.py": ("examples/test_examples.py", "--per-node"),
    r"potluck run \w+\.py": ("integration/test_walkthrough.py", "hello.py"),
    r"potluck doctor( --json| --peer [\d.]+)?": ("integration/test_doctor.py", "Doctor("),
    r"POTLUCK_LOG=[a-z,]+ python train\.py": ("integration/test_logs.py", "POTLUCK_LOG"),
    r"potluck --log json run train\.py": ("integration/test_logs.py", "--log"),
    r"python -m potluck\.testing\.seeds .*": ("testing/test_seeds.py", "--shorten"),
    r"python -m potluck\.testing\.mutants .*": ("testing/test_mutants.py", "--seeds"),
    r"python -m potluck\.testing\.load .*": ("testing/test_load.py", "--groups"),
    r"PYTHONPATH=tests python -m support\.mutation_run .*": ("test_mutation.py", "mutation_run"),
    r"PYTHONPATH=tests python -m support\.compiled_seeds .*": ("test_compiled_seeds.py", "main("),
    r"python -m potluck\.testing\.explore .*": ("testing/test_explore.py", "main("),
}


def shown() -> list[tuple[str, str]]:
    """Page and command, for each line with a prompt."""
    found = []
    for page in pages():
        for block in blocks(page.read_text(encoding="utf-8"), "console"):
            for line in block.splitlines():
                match = re.match(r"^\w*\$ +(.*?)(?:  +#.*)?$", line)
                if match:
                    found.append((page.name, match[1].strip()))
    return found


@pytest.mark.parametrize(("page", "command"), shown())
def test_every_command_is_run_by_a_test(page: str, command: str) -> None:
    """A command that no pattern above knows is one that nobody has tried."""
    assert any(re.fullmatch(pattern, command) for pattern in RUN_BY), f"{page} shows: {command}"


@pytest.mark.parametrize("pattern", RUN_BY)
def test_the_tests_named_here_exist(pattern: str) -> None:
    """And do what is said of them, as far as a word can show; no pattern is left over."""
    file, word = RUN_BY[pattern]
    assert word in (ROOT / "tests" / file).read_text(encoding="utf-8")
    assert any(re.fullmatch(pattern, command) for _, command in shown())


def test_the_verbs_of_make_can_be_carried_out() -> None:
    """Each is gone through without doing it: the tests cannot run themselves."""
    verbs = {command.split()[1] for _, command in shown() if command.startswith("make ")}
    assert {"demo", "test"} <= verbs
    make = shutil.which("make")
    assert make is not None
    for verb in sorted(verbs):
        done = subprocess.run(
            [make, "--dry-run", verb], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        assert ".venv/bin" in done.stdout or "Nothing to be done" in done.stdout


def test_what_runs_before_a_commit_is_set_up() -> None:
    """The hooks that pre-commit installs are those of the repository."""
    hooks = (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    assert "ruff" in hooks
    assert "mypy" in hooks
