"""Logs of real programs: one event is one line, for people and for programs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.command import COMMAND, environment
from support.threads import PATIENCE

SCRIPT = """
import potluck
with potluck.join(multicast=False, known=False, solo_delay=0.0, timeout=20) as cluster:
    cluster.barrier()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a script that joins."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


def stderr_of(folder: Path, *command: str, **variables: str) -> list[str]:
    """The lines that a program writes beside its output."""
    home = {"POTLUCK_HOME": str(folder / "home")}
    result = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE,
        cwd=folder,
        env=environment({**home, **variables}),
    )
    return result.stderr.splitlines()


def test_people_and_programs_read_what_happens(folder: Path) -> None:
    """The same events, told in both ways by POTLUCK_LOG."""
    for_people = stderr_of(folder, sys.executable, "train.py", POTLUCK_LOG="info")
    assert all(re.match(r"\d\d:\d\d:\d\d info \w+: ", line) for line in for_people)
    for_programs = [
        json.loads(line)
        for line in stderr_of(folder, sys.executable, "train.py", POTLUCK_LOG="json,debug")
    ]
    (installed,) = (each for each in for_programs if each.get("event") == "installed")
    assert (installed["epoch"], installed["level"]) == (1, "info")
    assert any(line.endswith("leads epoch 1 as its first member") for line in for_people)


def test_a_command_hands_the_wish_on(folder: Path) -> None:
    """`potluck --log json run` shows the logs of the script that it starts."""
    lines = stderr_of(folder, str(COMMAND), "--log", "json", "run", "--nodes", "1", "train.py")
    events = [json.loads(line).get("event") for line in lines if line.startswith("{")]
    assert "installed" in events


def test_nobody_hears_anything_unasked(folder: Path) -> None:
    """A program in which all is well writes nothing."""
    assert "POTLUCK_LOG" not in os.environ
    assert stderr_of(folder, sys.executable, "train.py") == []
