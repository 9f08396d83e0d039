"""The command itself: its help, its usage errors, and how soon it answers."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck.apps.cli.main import app
from support.command import on_screen, potluck
from support.interpreter import ask

HEAVY = ["asyncio", "cryptography", "msgspec", "numpy", "psutil", "rich.live", "torch", "zeroconf"]
COMMANDS = ["demo", "members", "pair", "revoke", "rotate", "run", "status", "unpair", "version"]


def test_help_lists_every_command_and_the_exit_codes() -> None:
    """Somebody who knows nothing finds everything from here."""
    result = potluck("--help")
    assert result.returncode == 0
    assert all(re.search(rf"\b{command}\b", result.stdout) for command in COMMANDS)
    assert "Exit codes: 0 done" in result.stdout


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("flag", ["-h", "--help"])
def test_a_command_explains_itself_by_example(command: str, flag: str) -> None:
    """Each has a sentence, examples to copy, its exit codes, and the options all commands share."""
    result = CliRunner().invoke(app, [command, flag])
    assert result.exit_code == 0
    assert f" potluck {command} " in result.stdout
    assert all(word in result.stdout for word in ("--json", "--debug", "Exit codes"))


def test_without_a_command_the_help_is_shown() -> None:
    """The bare name is a question, not an error message."""
    result = potluck()
    assert "Usage: potluck" in result.stdout + result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [["denmo"], ["demo", "--rank", "3"], ["version", "now"]])
def test_wrong_usage_ends_with_two(arguments: list[str]) -> None:
    """A typing error is named on stderr, nothing is run, and stdout stays clean."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "No such" in result.stderr or "unexpected" in result.stderr
    assert result.stdout == ""


def test_the_help_costs_no_heavy_import(tmp_path: Path) -> None:
    """Putting the commands together loads nothing that only running them needs."""
    source = (
        "import json, sys; before = set(sys.modules); import potluck.apps.cli.main; "
        f"print(json.dumps(sorted((set(sys.modules) - before) & set({HEAVY}))))"
    )
    assert ask(source, cwd=tmp_path) == []


def test_no_color_means_no_colour() -> None:
    """In a terminal the help has colours, unless the user asked for none."""
    for variables, coloured in (({"NO_COLOR": ""}, True), ({"NO_COLOR": "1"}, False)):
        with on_screen("--help", variables=variables) as screen:
            assert screen.read_to_end() == 0
        assert "Usage: potluck" in screen.text
        assert bool(re.search(r"\x1b\[[0-9;]*3[0-7]m", screen.raw)) is coloured


def test_ctrl_c_while_the_command_is_loaded_is_no_crash() -> None:
    """The first moment goes into imports: one word and exit code 130 then as well."""
    source = (
        "import sys\n"
        "class Impatient:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'typer':\n"
        "            raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Impatient())\n"
        "from potluck.__main__ import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", source]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "Interrupted.\n")
