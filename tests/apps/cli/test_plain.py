"""What a person reads: help without types of Python, errors whose lines end between words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from potluck.apps.cli.main import app
from support.command import on_screen

COMMANDS = [
    each.name or each.callback.__name__ for each in app.registered_commands if each.callback
]


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_has_no_types_of_python(command: str) -> None:
    """No ``<bool>``, ``<list[str]>`` or ``<int range>``."""
    result = CliRunner().invoke(app, [*([command] if command else []), "--help"])
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
    in_a_pipe = CliRunner().invoke(app, ["trace", missing])
    assert words == in_a_pipe.stderr.split()
    assert len(in_a_pipe.stderr.splitlines()) == 1
