"""``potluck run``: the script's output, exit code and signals are its own."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from typer.testing import CliRunner

from potluck.apps.cli.main import app
from support.clusters import new_job
from support.command import on_screen, started
from support.threads import PATIENCE

ENVIRONMENT = """
import json, os, sys
names = ("POTLUCK_JOB", "POTLUCK_NAMESPACE", "POTLUCK_MIN_NODES", "POTLUCK_PORT")
print(json.dumps([sys.argv[1:], {name: os.environ[name] for name in names}]))
sys.exit(7)
"""

SLEEP = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
print("ready", flush=True)
time.sleep(60)
"""


def script(folder: Path, text: str, name: str = "train.py") -> str:
    """A script in a file."""
    file = folder / name
    file.write_text(text)
    return str(file)


def test_the_script_runs_with_its_arguments_and_its_exit_code(tmp_path: Path) -> None:
    """What comes after the script is the script's, also what looks like an option of ours."""
    job, file = new_job(), script(tmp_path, ENVIRONMENT)
    with started("run", "--nodes", "1", "--job", job, file, "--nodes", "5", "-x") as process:
        output, notes = process.communicate(timeout=PATIENCE)
    arguments, variables = json.loads(output)
    assert process.returncode == 7
    assert arguments == ["--nodes", "5", "-x"]
    assert variables["POTLUCK_JOB"] == job
    assert variables["POTLUCK_MIN_NODES"] == "1"
    assert int(variables["POTLUCK_PORT"]) > 0
    assert "1 of 1 is here" in notes


def test_signals_reach_the_script(tmp_path: Path) -> None:
    """It may save its work; the command ends with the script's exit code."""
    file = script(tmp_path, SLEEP)
    with started("run", "--nodes", "1", "--job", new_job(), file) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 9
        process.communicate()


def test_too_few_in_time_end_with_three(tmp_path: Path) -> None:
    """The sentence says who is here and what to look at; the script is not run."""
    file = script(tmp_path, "print('never')")
    arguments = ["run", "--nodes", "2", "--timeout", "0.3", "--job", new_job(), file]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 3
    assert "Gave up after 0.3 s: 1 of 2 is here" in result.stderr
    assert "potluck doctor" in result.stderr
    assert result.stdout == ""


def test_a_script_that_is_not_there_is_wrong_usage() -> None:
    """Before anything is looked for, in one line."""
    result = CliRunner().invoke(app, ["run", "nowhere.py"])
    assert result.exit_code == 2
    assert result.stderr == ("There is no file nowhere.py here. Each machine needs its own copy.\n")


def test_different_scripts_do_not_begin_and_who_differs_is_named(tmp_path: Path) -> None:
    """On both sides, by name; the same for a program as lines of JSON."""
    (tmp_path / "other").mkdir()
    files = [script(tmp_path, "print(1)"), script(tmp_path / "other", "print(2)")]
    options = ("run", "--json", "--nodes", "2", "--job", new_job())
    with started(*options, files[0]) as first, started(*options, files[1]) as second:
        for run in (first, second):
            output, notes = run.communicate(timeout=PATIENCE)
            assert run.returncode == 1, notes
            assert output == ""
            lines = [json.loads(line) for line in notes.splitlines()]
            errors = [line["error"] for line in lines if "error" in line]
            assert re.fullmatch(r"The script on \S+ differs from the one on \S+\.", errors[0])
            assert "--anyway" in errors[1]


def test_a_terminal_shows_a_table(tmp_path: Path) -> None:
    """With the machine's own row marked; the script's output follows."""
    file = script(tmp_path, "print('the script runs')")
    with on_screen("run", "--nodes", "1", "--job", new_job(), file) as screen:
        screen.read_until("the script runs")
        assert screen.read_to_end() == 0
        assert "(this one)" in screen.text
        assert "1 of 1 is here" in screen.text
