"""What the workers of a run print: line by line, each with the rank it is from.

What a worker writes to its standard error is also remembered for a while: if it fails, its
traceback is shown once more, where one looks for it.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections import deque
from typing import BinaryIO, TextIO

__all__ = ["BEGINNING", "Output", "Recorder"]

LONGEST = 1 << 16
"""Bytes of a line that are waited for; what is longer is cut into several."""

REMEMBERED = 400
"""Lines of standard error that are kept for the end."""

LAST = 10
"""Lines that are shown of a worker that failed without a traceback."""

COLOURS = (36, 33, 32, 35, 34, 31)
"""In the words of a terminal: cyan, yellow, green, magenta, blue, red."""

BEGINNING = "Traceback (most recent call last):"

_RANK = re.compile(r"^\[rank\d+\]: ")
"""What PyTorch writes before the lines of a traceback."""

_ENDS = re.compile(rb"\r?\n|\r")
"""Of lines; progress bars return to the beginning of theirs, and each state becomes a line."""

_CONTINUES = re.compile(r"^(?:\s|$|During handling|The above exception|Traceback \()")
"""Lines inside a traceback; the first other one says what was wrong."""


class Output:
    """A stream of ours that several workers write to, whole lines at a time."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()
        self.is_terminal = stream.isatty()

    def write(self, label: str, place: int, line: str) -> None:
        """A line of the worker at a place."""
        prefix = f"[{label}] "
        if self.is_terminal:
            prefix = f"\x1b[{COLOURS[place % len(COLOURS)]}m{prefix}\x1b[0m"
        self.say(f"{prefix}{line}")

    def say(self, text: str) -> None:
        """Lines of our own."""
        # Where nobody reads us any more, the workers go on all the same.
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._stream.write(f"{text}\n")
            self._stream.flush()


class Recorder:
    """Reads one stream of a worker to its end, on a thread of its own."""

    def __init__(self, source: BinaryIO, output: Output, label: str, place: int) -> None:
        self._source = source
        self._output = output
        self._label = label
        self._place = place
        self._lines: deque[str] = deque(maxlen=REMEMBERED)
        self._thread = threading.Thread(target=self._run, name=f"output-{label}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        rest = b""
        with self._source:
            while data := self._source.read1(LONGEST):  # type: ignore[attr-defined]
                *lines, rest = _ENDS.split(rest + data)
                for line in lines:
                    self._take(line)
                if len(rest) >= LONGEST:
                    self._take(rest)
                    rest = b""
        if rest:
            self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line.decode(errors="replace")
        self._lines.append(text)
        self._output.write(self._label, self._place, text)

    def finish(self, timeout: float) -> None:
        """Wait until everything has been read; somebody the worker started may still write."""
        self._thread.join(timeout)

    @property
    def last_words(self) -> str:
        """The last traceback, with all that led to it; the last lines where there is none."""
        lines = [_RANK.sub("", line) for line in self._lines]
        return last_traceback(lines) or "\n".join(lines[-LAST:])


def last_traceback(lines: list[str]) -> str:
    """The last traceback among lines, with those it was caused by; empty if there is none.

    >>> print(last_traceback(["epoch 1", BEGINNING, '  File "x.py"', "ValueError: no", "bye"]))
    Traceback (most recent call last):
      File "x.py"
    ValueError: no
    """
    starts = [number for number, line in enumerate(lines) if line.endswith(BEGINNING)]
    if not starts:
        return ""
    end = starts[-1] + 1
    while end < len(lines) and _CONTINUES.match(lines[end]):
        end += 1
    first = starts[-1]
    for start in reversed(starts[:-1]):
        between = lines[start:first]
        if not any(line.startswith(("During handling", "The above exception")) for line in between):
            break
        first = start
    return "\n".join(lines[first : end + 1])
