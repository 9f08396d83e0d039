"""Logs of real programs: one event is one line, for people and for programs."""

import json
import os
import re
import subprocess
import sys

import pytest

from support.command import COMMAND, environment
from support.threads import PATIENCE

SCRIPT = """
import potluck
with potluck.join(multicast=False, known=False, solo_delay=0.0, timeout=20) as cluster:
    cluster.barrier()
"""


PROGRAMS = {
    "people": ({"POTLUCK_LOG": "info"}, [sys.executable]),
    "nobody": ({}, [sys.executable]),
    "programs": ({}, [str(COMMAND), "--log", "json,debug", "run", "--nodes", "1"]),
}
"""For whom each logs: its variables, and what starts the script."""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that each program wrote beside its output; all run at the same time."""
    folder = tmp_path_factory.mktemp("logs")
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    processes = {
        whom: subprocess.Popen(
            [*command, "train.py"],
            stderr=subprocess.PIPE,
            text=True,
            cwd=folder,
            env=environment({"POTLUCK_HOME": str(folder / whom), **variables}),
        )
        for whom, (variables, command) in PROGRAMS.items()
    }
    try:
        written = {whom: each.communicate(timeout=PATIENCE)[1] for whom, each in processes.items()}
        assert [each.returncode for each in processes.values()] == [0, 0, 0], written
    finally:
        for each in processes.values():
            each.kill()
            each.communicate()
    return {whom: text.splitlines() for whom, text in written.items()}


def test_people_read_what_happens(told: dict[str, list[str]]) -> None:
    """One line for each event, as POTLUCK_LOG asks for it."""
    assert all(re.match(r"\d\d:\d\d:\d\d info \w+: ", line) for line in told["people"])
    assert any(line.endswith("leads epoch 1 as its first member") for line in told["people"])


def test_a_command_hands_the_wish_on_and_programs_read_the_same(
    told: dict[str, list[str]],
) -> None:
    """`potluck --log json run` shows the logs of the script that it starts."""
    events = [json.loads(line) for line in told["programs"] if line.startswith("{")]
    (installed,) = (each for each in events if each.get("event") == "installed")
    assert (installed["epoch"], installed["level"]) == (1, "info")


def test_nobody_hears_anything_unasked(told: dict[str, list[str]]) -> None:
    """A program in which all is well writes nothing."""
    assert "POTLUCK_LOG" not in os.environ
    assert told["nobody"] == []
