"""Whoever sits at a terminal sees that something happens; nobody else sees anything of it."""

import io

import pytest

from potluck.apps.cli.progress import working
from support.command import on_screen, potluck


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
