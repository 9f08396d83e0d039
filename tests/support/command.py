"""The command ``potluck`` as a person or a script runs it: piped, in a terminal, interrupted."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.threads import PATIENCE

COMMAND = Path(sys.executable).with_name("potluck")

# A run in the background may have been told to ignore Ctrl-C, which its children would inherit.
START = (
    "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
# The process gets the terminal for its own, so that Ctrl-C in it becomes a signal.
START_IN_TERMINAL = f"import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); {START}"
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def environment(variables: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment without what changes how the command looks."""
    looks = {"NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "POTLUCK_DEBUG", "TTY_COMPATIBLE"}
    kept = {name: value for name, value in os.environ.items() if name not in looks}
    return kept | {"TERM": "xterm-256color"} | dict(variables or {})


def potluck(
    *arguments: str, variables: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, piped; ``variables`` are added to its environment."""
    return subprocess.run(
        [COMMAND, *arguments],
        capture_output=True,
        check=False,
        env=environment(variables),
        text=True,
        timeout=PATIENCE,
    )


@contextmanager
def started(
    *arguments: str, variables: Mapping[str, str] | None = None, folder: Path | None = None
) -> Iterator[subprocess.Popen[str]]:
    """The command under way, piped; it is gone at the end, and whatever it started as well."""
    process = subprocess.Popen(
        [sys.executable, "-c", START, COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(variables),
        cwd=folder,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            end_all(process.pid)


class Screen:
    """A command in a terminal of its own."""

    def __init__(self, process: subprocess.Popen[bytes], terminal: int) -> None:
        self.process = process
        self.raw = ""
        """Everything it wrote, escape sequences included."""
        self._terminal = terminal
        # What is read may end in the middle of a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def text(self) -> str:
        """Everything it wrote, as words only."""
        return ESCAPES.sub("", self.raw)

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._terminal, keys.encode())

    def read_until(self, words: str, within: float = PATIENCE) -> None:
        """Read until these words have appeared."""
        deadline = time.monotonic() + within
        while words not in self.text:
            assert self._read(deadline), f"{words!r} did not appear in\n{self.text}"

    def read_to_end(self, within: float = PATIENCE) -> int:
        """Read until it ends; returns its exit code."""
        deadline = time.monotonic() + within
        while self._read(deadline):
            pass
        return self.process.wait(max(0.1, deadline - time.monotonic()))

    def _read(self, deadline: float) -> bool:
        remaining = max(0.0, deadline - time.monotonic())
        if not select.select([self._terminal], [], [], remaining)[0]:
            return False
        with contextlib.suppress(OSError):  # how a terminal says that nobody writes to it any more
            self.raw += self._decoder.decode(os.read(self._terminal, 1 << 16))
            return True
        return False


@contextmanager
def on_screen(
    *arguments: str, size: tuple[int, int] = (80, 24), variables: Mapping[str, str] | None = None
) -> Iterator[Screen]:
    """The command in a terminal of so many columns and lines."""
    terminal, inside = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", size[1], size[0], 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", START_IN_TERMINAL, COMMAND, *arguments],
        stdin=inside,
        stdout=inside,
        stderr=inside,
        env=environment(variables),
        start_new_session=True,
    )
    os.close(inside)
    try:
        yield Screen(process, terminal)
    finally:
        end_all(process.pid)
        process.wait()
        os.close(terminal)


def children_of(pid: int) -> list[int]:
    """The processes it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    return []


def is_gone(pid: int) -> bool:
    """Whether a process has ended; one that only waits to be buried has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def end_all(pid: int) -> None:
    """End a process and those it has started."""
    for each in [*children_of(pid), pid]:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(each).kill()
