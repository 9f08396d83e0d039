"""Errors reach a person as one paragraph, and a traceback only on request."""

from __future__ import annotations

import errno
import io
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from potluck.apps.cli.common import guarded, signals_held
from potluck.apps.cli.main import app as main_app
from potluck.apps.cli.output import working
from potluck.errors import PeerLost
from support.command import on_screen, potluck
from support.threads import PATIENCE

FAULTS: dict[str, BaseException] = {
    "ours": PeerLost("Rank 3 is gone", cause="cable pulled", hint="Plug it in."),
    "bug": KeyError("soup"),
    "exit": typer.Exit(7),
    "usage": typer.BadParameter("too hot", param_hint="--soup"),
    "interrupt": KeyboardInterrupt(),
    "pipe": BrokenPipeError(errno.EPIPE, "Broken pipe"),
}


def cook(fault: Annotated[str, typer.Argument(help="What goes wrong.")] = "") -> None:
    """Cook."""
    if fault:
        raise FAULTS[fault]
    typer.echo("soup")


@pytest.fixture
def app() -> typer.Typer:
    """A command with one guarded subcommand."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    app.command()(guarded(cook))
    return app


def test_a_command_that_works_is_left_alone(app: typer.Typer) -> None:
    """Nothing is added to its output."""
    result = CliRunner().invoke(app, ["cook"])
    assert (result.exit_code, result.output) == (0, "soup\n")


def test_its_own_options_are_kept_and_one_is_added(app: typer.Typer) -> None:
    """The help shows what the command declares, and --debug."""
    text = CliRunner().invoke(app, ["cook", "--help"]).stdout
    assert "What goes wrong." in text
    assert "--debug" in text


def test_an_error_is_told_in_one_paragraph(app: typer.Typer) -> None:
    """Message, cause and hint on stderr; stdout stays clean for whoever reads it."""
    result = CliRunner().invoke(app, ["cook", "ours"])
    assert result.exit_code == 1
    assert result.stderr == "potluck: Rank 3 is gone: cable pulled. Plug it in.\n"
    assert result.stdout == ""


LOGS = """
import logging, typer
from potluck.apps.cli.common import guarded
def cook():
    logging.getLogger("potluck.kitchen").warning("the soup is hot")
typer.run(guarded(cook))
"""


@pytest.mark.parametrize(
    ("options", "wish", "shown"),
    [
        ([], "", r""),
        (["--debug"], "", r"\d\d:\d\d:\d\d warning kitchen: the soup is hot\n"),
        ([], "json", r'{"time":.*"level":"warning",.*"message":"the soup is hot"}\n'),
        (["--debug"], "error", r""),
    ],
)
def test_the_log_stays_out_of_the_terminal(options: list[str], wish: str, shown: str) -> None:
    """What it says is part of the error already; --debug shows it too, POTLUCK_LOG has a say."""
    command = [sys.executable, "-c", LOGS, *options]
    result = subprocess.run(
        command,
        capture_output=True,
        check=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "POTLUCK_LOG": wish},
    )
    assert re.fullmatch(shown, result.stderr)


def test_a_fault_of_ours_is_admitted(app: typer.Typer) -> None:
    """What nobody expected is called a fault, with the way to see more, and no traceback."""
    result = CliRunner().invoke(app, ["cook", "bug"])
    assert result.exit_code == 1
    assert "KeyError: 'soup'" in result.stderr
    assert "a fault in Potluck" in result.stderr
    assert "--debug" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("fault", ["ours", "bug"])
@pytest.mark.parametrize(
    ("options", "variables"), [(["--debug"], {}), ([], {"POTLUCK_DEBUG": "1"})], ids=["flag", "env"]
)
def test_the_traceback_is_there_on_request(
    app: typer.Typer, fault: str, options: list[str], variables: dict[str, str]
) -> None:
    """By the option or by the environment; the paragraph still comes last."""
    result = CliRunner().invoke(app, ["cook", fault, *options], env=variables)
    assert result.exit_code == 1
    assert "Traceback" in result.stderr
    assert result.stderr.splitlines()[-1].startswith("potluck: ")


def test_an_interrupt_is_no_error(app: typer.Typer) -> None:
    """Ctrl-C ends with the code that shells use for it."""
    result = CliRunner().invoke(app, ["cook", "interrupt"])
    assert result.exit_code == 130
    assert result.stderr == "Interrupted.\n"


@pytest.mark.parametrize(("fault", "code"), [("exit", 7), ("usage", 2), ("pipe", 1)])
def test_what_the_framework_understands_passes_through(
    app: typer.Typer, fault: str, code: int
) -> None:
    """Exit codes, wrong usage and a reader that has gone are not faults of ours."""
    result = CliRunner().invoke(app, ["cook", fault])
    assert result.exit_code == code
    assert "fault in Potluck" not in result.output


# --------------------------------------------------------------------------------------------------
# What a person reads: help without types of Python, errors whose lines end between words.

COMMANDS = [
    each.name or each.callback.__name__ for each in main_app.registered_commands if each.callback
]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_no_types_of_python(command: str) -> None:
    """No ``<bool>``, ``<list[str]>`` or ``<int range>``."""
    result = CliRunner().invoke(main_app, [*([command] if command else []), "--help"])
    assert result.exit_code == 0
    assert re.findall(r"<[^>\n]*>", result.output) == []
    assert "bool" not in result.output.lower()


def test_an_error_in_a_terminal_breaks_between_words(tmp_path: Path) -> None:
    """However narrow it is; in a pipe it stays one line."""
    missing = str(tmp_path / "nothing")
    with on_screen("trace", missing, size=(40, 24)) as screen:
        assert screen.read_to_end() == 1
    lines = screen.text.replace("\r", "").splitlines()
    words = " ".join(lines).split()
    words = words[words.index("potluck:") :]  # before it a spinner turned
    assert "written" in words
    assert all(len(line) <= 40 for line in lines if missing not in line)
    in_a_pipe = CliRunner().invoke(main_app, ["trace", missing])
    assert words == in_a_pipe.stderr.split()
    assert len(in_a_pipe.stderr.splitlines()) == 1


# --------------------------------------------------------------------------------------------------
# Whoever sits at a terminal sees that something happens; nobody else sees anything of it.


def test_at_a_terminal_something_moves() -> None:
    """While the command looks around."""
    with on_screen("status", "--wait", "0.3") as screen:
        assert screen.read_to_end() == 3
    assert "Looking around for up to 0.3 s" in screen.text


def test_in_a_pipe_nothing_is_said() -> None:
    """Neither on stdout nor on stderr."""
    ended = potluck("status", "--wait", "0.1", "--json")
    assert "Looking" not in ended.stdout + ended.stderr


def test_who_wants_silence_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is a terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    written = io.StringIO()
    monkeypatch.setattr("sys.stderr", written)
    with working("Cooking", silent=True):
        pass
    assert written.getvalue() == ""


def test_a_signal_waits_until_a_process_can_be_ended() -> None:
    """One that comes while a process is started ends the command afterwards, not in between."""
    happened: list[str] = []
    before = signal.signal(signal.SIGHUP, lambda *_: happened.append("told"))
    try:
        with signals_held():
            signal.raise_signal(signal.SIGHUP)
            happened.append("started")
        assert happened == ["started", "told"]
        signal.raise_signal(signal.SIGHUP)
        assert happened[2:] == ["told"]  # as before
    finally:
        signal.signal(signal.SIGHUP, before)
