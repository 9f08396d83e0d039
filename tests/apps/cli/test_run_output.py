"""What workers print: whose line it is, and which traceback tells the reason."""

from __future__ import annotations

import io
from typing import BinaryIO, cast

import pytest

from potluck.apps.cli.run_output import (
    BEGINNING,
    LONGEST,
    Output,
    Recorder,
    last_traceback,
)
from potluck.runtime.last_words import is_second_hand
from support.threads import PATIENCE


def recorded(data: bytes) -> tuple[str, Recorder]:
    """What is shown of a worker's output, and who has read it."""
    shown = io.StringIO()
    source = cast("BinaryIO", io.BufferedReader(io.BytesIO(data)))
    recorder = Recorder(source, Output(shown), "3", 1)
    recorder.finish(PATIENCE)
    return shown.getvalue(), recorder


def test_a_line_that_never_ends_is_cut() -> None:
    """A worker that prints without an end of line cannot fill the memory."""
    shown, _ = recorded(b"x" * (3 * LONGEST))
    assert len(shown.splitlines()) >= 3
    assert shown.count("x") == 3 * LONGEST


def test_what_pytorch_writes_before_a_traceback_is_left_out_of_it() -> None:
    """`[rank3]: ` stands before every line there."""
    lines = [BEGINNING, '  File "train.py", line 3, in <module>', "ValueError: no"]
    shown, recorder = recorded("".join(f"[rank3]: {line}\n" for line in lines).encode())
    assert shown.startswith(f"[3] [rank3]: {BEGINNING}\n")
    assert recorder.last_words == "\n".join(lines)


def test_without_a_traceback_the_last_lines_count() -> None:
    """Such as those of a syntax error, or of a library in another language."""
    _, recorder = recorded("".join(f"line {n}\n" for n in range(30)).encode())
    assert recorder.last_words.splitlines() == [f"line {n}" for n in range(20, 30)]


def test_a_traceback_comes_with_all_that_led_to_it() -> None:
    """But not with one that was printed before and has nothing to do with it."""
    handled = [BEGINNING, '  File "x.py"', "OSError: handled", "went on"]
    cause = [BEGINNING, '  File "y.py"', "KeyError: 'a'", ""]
    link = ["During handling of the above exception, another exception occurred:", ""]
    reason = [BEGINNING, '  File "z.py"', "ValueError: b"]
    found = last_traceback([*handled, *cause, *link, *reason, "bye"])
    assert found.splitlines() == [*cause, *link, *reason]
    assert last_traceback(["all is well"]) == ""


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("potluck.errors.PeerLost: Rank 2 (desk at 10.0.0.5) is gone: it was killed.", True),
        ("potluck.errors.Aborted: Rank 1 ended the operation: it left the group", True),
        ("RuntimeError: Got the following error when running the callback: Aborted: Rank 1", True),
        ("RuntimeError: Aborted by the user", False),
        ("RuntimeError: PeerLost: Rank 2 (desk at 10.0.0.5:4711) is gone: killed", True),
        ("RuntimeError: [../gloo/transport/tcp/pair.cc:534] Connection closed by peer", True),
        ("ValueError: the file is gone", False),
        ("potluck.errors.CollectiveMismatch: Ranks disagree about an operation", False),
        ("", False),
    ],
)
def test_whether_it_was_somebody_elses_failure(last: str, expected: bool) -> None:
    """By the last line, which says what went wrong."""
    assert is_second_hand(f"{BEGINNING}\n  File 'x'\n{last}") is expected
