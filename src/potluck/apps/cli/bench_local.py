"""Further processes of this machine for ``potluck bench``: started, and ended for certain."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

__all__ = ["colleagues"]

PROGRAM = "from potluck.apps.cli.main import app; app(prog_name='potluck')"

ENDING = 5.0
"""Seconds for a process to end that was told to."""


@contextmanager
def colleagues(count: int, options: Sequence[str]) -> Iterator[None]:
    """So many more processes of the same measurement; they are gone at the end."""
    command = [sys.executable, "-c", PROGRAM, "bench", "--member", *options]
    started = [
        subprocess.Popen(  # noqa: S603 - this very program
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for _ in range(count)
    ]
    is_done = False
    try:
        yield
        is_done = True
    finally:
        for process in started:
            _end(process, is_done=is_done)


def _end(process: subprocess.Popen[bytes], *, is_done: bool) -> None:
    """It ends by itself when all is done; otherwise at once."""
    if not is_done:
        process.terminate()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
