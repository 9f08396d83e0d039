"""The page about the command is what the command says; so is what the shells are told."""

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck.apps.cli.main import app
from support.cli_page import PAGE, commands, page, shown
from support.command import COMMAND, environment, potluck


def test_the_page_is_what_the_command_says() -> None:
    """Otherwise: PYTHONPATH=tests python -m support.cli_page."""
    assert PAGE.read_text(encoding="utf-8") == page()


def test_every_command_of_the_plan_is_there() -> None:
    """None is missing, none is there that the page and these tests do not know."""
    assert sorted(commands()) == [
        *("bench", "continue", "dashboard", "demo", "doctor", "members", "pair"),
        *("passphrase", "revoke", "rotate", "run", "status", "trace", "unpair", "version"),
    ]


@pytest.mark.parametrize("command", commands())
def test_every_help_has_examples_and_exit_codes(command: str) -> None:
    """At least two lines to copy, and what the exit codes mean."""
    text = shown(command)
    assert text.count(f"\n potluck {command}") >= 2
    assert "Exit codes: " in text
    assert "--json" in text


def test_the_main_help_tells_the_exit_codes() -> None:
    """All of them, for who writes a script around several commands."""
    words = " ".join(shown().split())
    codes = words.partition("Exit codes: ")[2]
    for code in (
        "0 done",
        "1 failed",
        "2 wrong usage",
        "3 it worked, and found",
        "130 interrupted",
    ):
        assert code in codes


def asked_by_a_shell(variables: dict[str, str]) -> str:
    """What the command answers to a shell that completes."""
    return CliRunner().invoke(app, env=variables, prog_name="potluck").stdout


@pytest.mark.parametrize(
    ("shell", "sign"), [("bash", "complete -o default -F"), ("zsh", "#compdef potluck")]
)
def test_a_shell_gets_its_completion_script(shell: str, sign: str) -> None:
    """What its start-up file needs, and nothing else."""
    ended = asked_by_a_shell({"_POTLUCK_COMPLETE": f"source_{shell}"})
    assert sign in ended
    assert "_POTLUCK_COMPLETE=complete_" in ended


@pytest.mark.parametrize(
    ("typed", "offered"), [("potluck st", {"status"}), ("potluck bench --lo", {"--local"})]
)
def test_the_tab_key_completes_commands_and_options(typed: str, offered: set[str]) -> None:
    """As bash asks for it."""
    count = str(len(typed.split()) - 1)
    asked = {"_POTLUCK_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": count}
    assert set(asked_by_a_shell(asked).split()) == offered


QUIET = {"status --wait 0.2": 3, "trace": 1, "run nothing.py": 2}


@pytest.mark.parametrize(("words", "code"), QUIET.items())
def test_in_a_pipe_there_is_not_one_escape_sequence(tmp_path: Path, words: str, code: int) -> None:
    """Neither in results nor in errors, and the exit code is the documented one."""
    ended = potluck(*words.split(), variables={"POTLUCK_HOME": str(tmp_path)})
    assert ended.returncode == code, ended.stderr
    assert "\x1b" not in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    """``potluck --help | head -1`` ends without a traceback."""
    line = f"{COMMAND} --help | head -1"
    ended = subprocess.run(
        ["sh", "-c", line], capture_output=True, check=False, env=environment(), timeout=30
    )
    assert b"Traceback" not in ended.stderr
