"""Forked children that report what they see; for programs in an interpreter of their own."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.threads import PATIENCE


def open_files() -> set[str]:
    """What this process has open, with its number: a number alone may have been used again."""
    files = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the directory itself
            files.add(f"{entry.name} {entry.readlink()}")
    return files


def in_child(action: Callable[[], Any]) -> Any:
    """Fork; what the action returns in the child, or the text of its error."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            answer = json.dumps(action())
        except BaseException as error:  # noqa: BLE001 - nothing may leave the child but its answer
            answer = json.dumps(repr(error))
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    if not select.select([reader], [], [], PATIENCE)[0]:
        os.kill(
            pid, signal.SIGABRT
        )  # a lock may have been held at the fork: it tells where it waits
    with open(reader, encoding="utf-8") as file:  # noqa: PTH123 - a descriptor has no path
        answer = file.read()
    os.waitpid(pid, 0)
    assert answer, "the child said nothing: pytest shows where it stood, as of a crash"
    return json.loads(answer)
