"""How a script has ended, in words; and what is believed of what was written about it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from potluck.apps.cli.run_ending import Ending, LastWords, memory_words

GB = 10**9
WORDS = {
    "kind": "ValueError",
    "message": "bad batch",
    "where": "train.py:40",
    "is_second_hand": False,
    "traceback": "Traceback\n  x\nValueError: bad batch\n",
}


def read(folder: Path, text: str | bytes) -> LastWords | None:
    """What is read from a file."""
    file = folder / "words.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    return LastWords.read(file)


def test_an_error_is_one_line_with_its_place(tmp_path: Path) -> None:
    """As far as there is a message, and a place."""
    assert str(read(tmp_path, json.dumps(WORDS))) == "ValueError: bad batch, train.py:40"
    bare = {**WORDS, "message": "", "where": ""}
    assert str(read(tmp_path, json.dumps(bare))) == "ValueError"
    ended = {**WORDS, "kind": "KeyboardInterrupt", "message": ""}
    assert str(read(tmp_path, json.dumps(ended))) == "interrupted by Ctrl-C, train.py:40"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[]",
        json.dumps({**WORDS, "message": "x" * 10_000}),
        json.dumps({**WORDS, "traceback": "x" * 100_000}),
        json.dumps({**WORDS, "is_second_hand": "yes"}),
    ],
)
def test_what_is_not_in_order_counts_for_nothing(tmp_path: Path, text: str | bytes) -> None:
    """A script may write what it likes into that file."""
    assert read(tmp_path, text) is None
    assert LastWords.read(tmp_path / "nothing") is None


def test_what_steers_a_terminal_is_taken_out(tmp_path: Path) -> None:
    """Lines of the traceback stay lines."""
    evil = read(tmp_path, json.dumps({**WORDS, "message": "a\x1b[2Jb", "traceback": "a\n\x1bb"}))
    assert evil is not None
    assert evil.message == "a [2Jb"
    assert evil.traceback == "a\n b"


@pytest.mark.parametrize(
    ("used", "free", "is_certain", "expected"),
    [
        (12 * GB, GB, False, True),
        (GB, GB // 4, False, True),
        (GB, 8 * GB, True, True),
        (GB, 8 * GB, False, False),
    ],
    ids=["used most of it", "little was free", "the system says so", "neither"],
)
def test_whether_memory_was_the_reason(
    used: int, free: int, is_certain: bool, expected: bool
) -> None:
    """Of 16 GB."""
    words = memory_words(used, free, 16 * GB, is_certain=is_certain)
    assert words.endswith(": probably out of memory") is expected


def test_what_another_launcher_tells_is_read_with_care() -> None:
    """Numbers that are none count as nothing; nothing at all is no ending."""
    told = Ending("failed", "ValueError: x", 12.34)
    assert Ending.of(told.facts()) == Ending("failed", "ValueError: x", 12.3)
    assert Ending.of({"outcome": "ok", "after": "soon"}) == Ending("ok")
    assert Ending.of({"outcome": "ok", "after": "-1e400"}).seconds == 0.0
    assert Ending.of({"outcome": "failed", "after": "nan"}).seconds == 0.0
    assert str(Ending.of({})) == "not heard from"
