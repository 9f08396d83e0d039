"""The page about the command is what the command says; so is what the shells are told."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

import potluck as library
from potluck.apps.cli.main import app
from potluck.cluster import node
from potluck.cluster.reports import Journal, Said, StatusReport, write
from potluck.rpc.protocol import CallFailure, RpcResponse, error_of
from support.cli_page import PAGE, commands, page, shown
from support.clusters import clusters, new_job
from support.command import COMMAND, environment, on_screen, potluck
from support.interpreter import ask


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


# --------------------------------------------------------------------------------------------------
# What a member may write of itself: none of it steers a terminal, forges a line or breaks a page.
#
# The members here are real, and lie: each text of their reports is replaced before it is sent.

EVIL = "\x1b]52;c;cm0gLXJm\x07\x1b[2J\r\nForged: all is well\u202e\u2066\x9b31m\x00[/bold][red]"


def assert_harmless(text: str) -> None:
    """Only what can be printed, in lines that are ours."""
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.startswith("Forged")


def lie(message: Said) -> bytes:
    """What a hostile member sends in place of this."""
    if isinstance(message, StatusReport):
        facts = {EVIL: EVIL, "script": EVIL}
        members = [replace(each, name=EVIL) for each in message.members]
        peers = [replace(each, name=EVIL, reason=EVIL, address=EVIL) for each in message.peers]
        message = replace(
            message, name=EVIL, host=EVIL, state=EVIL, reason=EVIL * 8, version=EVIL, facts=facts
        )
        message = replace(message, members=members, peers=peers)
    if isinstance(message, Journal):
        message = replace(
            message,
            events=[replace(each, text=EVIL, level=EVIL) for each in message.events],
            epochs=[replace(each, reason=EVIL) for each in message.epochs],
        )
    return write(message)


@pytest.fixture
def liars(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The name of a job whose members lie."""
    job = new_job()
    with clusters(2, job):
        monkeypatch.setattr(node, "write", lie)
        yield job


@pytest.mark.parametrize("command", ["status", "doctor"])
def test_what_members_say_reaches_the_terminal_as_plain_text(liars: str, command: str) -> None:
    """For people, and in the strings of what programs read."""
    options = ["--job", liars] if command == "status" else []
    shown = CliRunner().invoke(app, [command, *options])
    assert "Forged: all is well" in shown.stdout or command == "doctor"
    assert_harmless(shown.stdout + shown.stderr)
    told = CliRunner().invoke(app, [command, "--json", *options])
    for text in texts_in(json.loads(told.stdout)):
        assert_harmless(text.replace("\n", " "))
        assert text.isprintable(), ascii(text)


def texts_in(value: Any) -> Iterator[str]:
    """Every text in what JSON holds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for item in value.items() for each in item for text in texts_in(each))
    elif isinstance(value, list):
        yield from (text for each in value for text in texts_in(each))


@pytest.mark.parametrize(
    "reason", ["missing", "raised", "busy", "late", "cancelled", "invalid", "internal"]
)
def test_an_error_of_a_remote_call_is_shown_as_plain_text(reason: Any) -> None:
    """Its words on one line; a traceback in lines that each say whose they are."""
    failure = CallFailure(reason, EVIL, EVIL, [EVIL], f"Traceback:\n{EVIL}")
    error = error_of(RpcResponse(1, error=EVIL, facts=msgspec.msgpack.encode(failure)), 3)
    assert_harmless(str(error))
    assert_harmless("".join(traceback.format_exception(error)))
    assert_harmless(str(error_of(RpcResponse(1, error=EVIL), 3)))


# --------------------------------------------------------------------------------------------------
# The command itself: its help, its usage errors, and how soon it answers.

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


# --------------------------------------------------------------------------------------------------
# ``potluck version`` says what is installed.


def test_the_version_is_one_line() -> None:
    """What a bug report needs fits on one line, also as the flag everybody tries first."""
    result = potluck("version")
    assert result.returncode == 0
    assert result.stdout.count("\n") == 1
    assert result.stdout.startswith(f"potluck {library.__version__} ")
    assert potluck("--version").stdout == result.stdout


def test_the_version_for_a_program_is_json() -> None:
    """The same facts under names."""
    facts = json.loads(potluck("version", "--json").stdout)
    assert facts["potluck"] == library.__version__
    assert facts["python"] == platform.python_version()
    assert facts["protocol"] >= 1
