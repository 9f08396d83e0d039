"""How a script of a run has ended: what it left as last words, and the memory that it had."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from potluck.decoding import Lines, decode_json
from potluck.runtime.last_words import MOST, MOST_TRACEBACK

__all__ = ["CAUSE", "OUTCOME", "Ending", "LastWords", "Memory", "cause_of_death", "duration"]

OUTCOME, CAUSE, AFTER = "outcome", "cause", "after"
"""What launchers tell each other at the end."""

OK, STOPPED, RUNNING, UNKNOWN = "ok", "stopped", "still running", "not heard from"
"""Outcomes; others are "failed", "interrupted" and "killed by SIGKILL"."""

_LARGEST = 4 * (MOST_TRACEBACK + 4 * MOST)
"""Bytes of last words that are read: JSON may escape every letter."""

_Text = Annotated[str, msgspec.Meta(max_length=MOST)]
_Place = Annotated[str, msgspec.Meta(max_length=MOST + 20)]


class LastWords(msgspec.Struct, frozen=True):
    """What a script that ended by an exception says of it."""

    kind: _Text
    message: _Text
    where: _Place
    is_second_hand: bool
    traceback: Annotated[Lines, msgspec.Meta(max_length=MOST_TRACEBACK)]

    @classmethod
    def read(cls, file: Path) -> LastWords | None:
        """From a file; None if there is none, or something else in it."""
        with contextlib.suppress(OSError, msgspec.DecodeError), file.open("rb") as source:
            return decode_json(source.read(_LARGEST), cls)
        return None

    def __str__(self) -> str:
        """The error in one line, with the place where it happened."""
        what = f"{self.kind}: {self.message}" if self.message else self.kind
        if self.kind == "KeyboardInterrupt":
            what = "interrupted by Ctrl-C"
        return f"{what}, {self.where}" if self.where else what


@dataclass(frozen=True, slots=True)
class Ending:
    """How the script of one machine has ended."""

    outcome: str
    cause: str = ""
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        """Whether it ended without an error."""
        return self.outcome == OK

    @property
    def is_cause(self) -> bool:
        """Whether others may have failed because of it."""
        return bool(self.cause) and self.outcome not in {OK, STOPPED, RUNNING}

    def __str__(self) -> str:
        """For the line about all machines.

        >>> str(Ending("killed by SIGKILL", seconds=12.3)), str(Ending("ok", seconds=3.0))
        ('killed by SIGKILL after 12 s', 'ok')
        """
        if self.outcome in {OK, RUNNING, UNKNOWN}:
            return self.outcome
        return f"{self.outcome} after {duration(self.seconds)}"

    def facts(self) -> dict[str, str]:
        """As a launcher tells it."""
        return {OUTCOME: self.outcome, CAUSE: self.cause, AFTER: f"{self.seconds:.1f}"}

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> Ending:
        """As another launcher has told it."""
        seconds = 0.0
        with contextlib.suppress(ValueError):
            seconds = min(max(0.0, float(facts.get(AFTER, ""))), 1e9)
        return cls(facts.get(OUTCOME, "")[:64] or UNKNOWN, facts.get(CAUSE, ""), seconds)


def duration(seconds: float) -> str:
    """As people say it.

    >>> [duration(each) for each in (0.42, 12.3, 200, 8000)]
    ['0.4 s', '12 s', '3 min', '2 h 13 min']
    """
    minutes = int(seconds / 60)
    if seconds < 10:  # noqa: PLR2004
        return f"{seconds:.1f} s"
    if minutes < 2:  # noqa: PLR2004
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"  # noqa: PLR2004


# -- memory ----------------------------------------------------------------------------------------

SAMPLE_EVERY = 0.5
"""Seconds between two looks at the memory."""

RECENT = 10
"""Looks that count: what was free five seconds ago or less."""

SCARCE, MUCH = 0.05, 0.5
"""Shares of the memory: so little free, or so much used, makes a lack of it probable."""


class Memory:
    """The memory that the scripts of this machine use, and what is left."""

    def __init__(self) -> None:
        self._used = 0
        self._free: deque[int] = deque(maxlen=RECENT)
        self._next = 0.0
        self._kills = _oom_kills()

    def look(self, pids: Iterable[int]) -> None:
        """Look, if it is time."""
        if time.monotonic() < self._next:
            return
        import psutil

        self._next = time.monotonic() + SAMPLE_EVERY
        self._free.append(psutil.virtual_memory().available)
        for pid in pids:
            with contextlib.suppress(psutil.Error):
                self._used = max(self._used, psutil.Process(pid).memory_info().rss)

    def words(self) -> str:
        """What was used and free, after a script was killed."""
        import psutil

        self._next = 0.0
        self.look(())
        used = max(self._used, _peak_of_children())
        is_certain = _oom_kills() > self._kills
        return memory_words(
            used, min(self._free), psutil.virtual_memory().total, is_certain=is_certain
        )


def memory_words(used: int, free: int, total: int, *, is_certain: bool) -> str:
    """The memory in words, and whether it was probably the reason.

    >>> memory_words(12_100_000_000, 200_000_000, 16_000_000_000, is_certain=False)
    'it used up to 12.1 GB, and 200 MB of 16.0 GB were free: probably out of memory'
    """
    text = f"it used up to {_size(used)}, and {_size(free)} of {_size(total)} were free"
    if is_certain or free < SCARCE * total or used > MUCH * total:
        text += ": probably out of memory"
    return text


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"  # noqa: PLR2004


def _oom_kills() -> int:
    """How many processes Linux has killed for lack of memory since it was started."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _peak_of_children() -> int:
    """The most memory that one of our children used that have ended."""
    try:
        import resource
    except ImportError:  # on Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit


def cause_of_death(number: int, memory: Memory) -> str:
    """In words, for a script that a signal has ended."""
    text = f"killed by {signal.Signals(number).name}"
    return f"{text}; {memory.words()}" if number == getattr(signal, "SIGKILL", None) else text
