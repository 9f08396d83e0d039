"""The demo's processes: started, told what to do, listened to, and gone at the end."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from typing import IO, TypeAlias

import msgspec

from potluck.apps.cli.demo_messages import (
    Failed,
    Finished,
    Lost,
    Meeting,
    News,
    Order,
    Progress,
    decode_news,
    encode_line,
)
from potluck.errors import DistributedError, PeerLost

__all__ = ["Event", "Member", "Standing", "explain_end"]

ONE_THREAD_EACH = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
"""Several ranks share this machine: numpy's own threads would only be in their way."""


@dataclass(eq=False)
class Standing:
    """What is known of a rank."""

    rank: int
    """The one it began with."""
    pid: int
    state: str = "starting"
    progress: Progress | None = None


class Member(Standing):
    """One rank's process."""

    def __init__(self, rank: int, seed: int, home: str, events: queue.SimpleQueue[Event]) -> None:
        self.meeting: Meeting | None = None
        self.lost: Lost | None = None
        self.finished: Finished | None = None
        self.ended = False
        self._last_words = ""
        # A session of its own: Ctrl-C goes to the demo alone, which then ends everybody in order.
        self._process = subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "potluck.apps.cli.demo_worker", str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | ONE_THREAD_EACH | {"POTLUCK_HOME": home, "POTLUCK_NAMESPACE": ""},
            start_new_session=True,
        )
        super().__init__(rank, self._process.pid)
        self._threads = [
            threading.Thread(target=self._read_news, args=(self._process.stdout, events)),
            threading.Thread(target=self._read_last_words, args=(self._process.stderr,)),
        ]
        for thread in self._threads:
            thread.daemon = True
            thread.start()

    def order(self, order: Order) -> None:
        """Tell it what to do; a process that is gone will be noticed by its silence."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(encode_line(order))
            self._process.stdin.flush()

    def kill(self) -> None:
        """End it without a warning."""
        self._process.kill()

    def wait(self, timeout: float) -> int | None:
        """Its exit code, or None if it still runs after ``timeout`` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        return None

    def last_words(self, patience: float) -> str:
        """The last line of its error output, usually the error itself."""
        self._threads[1].join(patience)  # what it wrote may still be in the pipe
        return self._last_words

    def close(self) -> None:
        """Make sure that nothing of it is left."""
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join()
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            assert pipe is not None
            with contextlib.suppress(OSError):  # an order it did not read any more
                pipe.close()

    def _read_news(self, pipe: IO[bytes], events: queue.SimpleQueue[Event]) -> None:
        for line in pipe:
            try:
                events.put((self, decode_news(line)))
            except msgspec.DecodeError:
                events.put((self, Failed(f"it wrote {line!r}, which is no news")))
        events.put((self, None))

    def _read_last_words(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            self._last_words = line.decode(errors="replace").strip() or self._last_words


Event: TypeAlias = tuple[Member, News | None]
"""News of a member; None is its end."""


def explain_end(member: Member) -> DistributedError:
    """The error for a process that ended although nobody asked it to."""
    code = member.wait(1.0)
    if code is None:
        cause = "its connection broke, but the process still runs"
    elif code < 0:
        cause = f"it was ended by the signal {signal.Signals(-code).name}"
    else:
        cause = f"it ended with exit code {code}"
    if words := member.last_words(0 if code is None else 1.0):
        cause += f" and wrote: {words}"
    return PeerLost(
        f"Rank {member.rank} of the demo (pid {member.pid}) is gone",
        rank=member.rank,
        cause=cause,
        hint="Nobody meant it to; run the demo again.",
    )
