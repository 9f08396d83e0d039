"""What a member may write of itself: none of it steers a terminal, forges a line or breaks a page.

The members here are real, and lie: each text of their reports is replaced before it is sent.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from potluck.apps.cli.main import app
from potluck.core.calls_encoding import RpcResponse
from potluck.core.calls_failures import Failure, error_of
from potluck.runtime import control
from potluck.runtime.control_reports import Report, Said, write
from potluck.runtime.observing_journal import Journal
from support.clusters import clusters, new_job

EVIL = "\x1b]52;c;cm0gLXJm\x07\x1b[2J\r\nForged: all is well\u202e\u2066\x9b31m\x00[/bold][red]"


def assert_harmless(text: str) -> None:
    """Only what can be printed, in lines that are ours."""
    for line in text.split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.startswith("Forged")


def lie(message: Said) -> bytes:
    """What a hostile member sends in place of this."""
    if isinstance(message, Report):
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
        monkeypatch.setattr(control, "write", lie)
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
    failure = Failure(reason, EVIL, EVIL, [EVIL], f"Traceback:\n{EVIL}")
    error = error_of(RpcResponse(1, error=EVIL, facts=msgspec.msgpack.encode(failure)), 3)
    assert_harmless(str(error))
    assert_harmless("".join(traceback.format_exception(error)))
    assert_harmless(str(error_of(RpcResponse(1, error=EVIL), 3)))
