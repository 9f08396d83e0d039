"""The demo's processes: started, told what to do, listened to, and gone at the end."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TypeAlias

import msgspec

from potluck.apps.cli.demo_messages import Failed, News, Order, decode_news, encode_line
from potluck.errors import DistributedError, PeerLost

__all__ = ["ENDINGS", "Event", "NodeFailed", "NodeProcess", "environment", "signals_held"]

ONE_THREAD_EACH = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
"""Several nodes share this machine: numpy's own threads would only be in their way."""

_MEANT_FOR_OTHERS = re.compile(
    r"POTLUCK_(?!INTERFACES$)|(WORLD_SIZE|RANK|LOCAL_RANK|MASTER_ADDR|MASTER_PORT)$"
    r"|(OMPI|PMI|PMIX|SLURM|TORCHELASTIC)_"
)
"""Variables that set up a user's own clusters; which interfaces may be used holds here too."""

ENDINGS = ("SIGINT", "SIGTERM", "SIGHUP")
"""Signals that end a demo; the last one comes when a connection by SSH is lost."""

LAST_LINES = 60
"""Lines of a process's error output that are kept."""


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Let signals that end the demo wait for the end of a block, in the main thread.

    A process that was interrupted while it was started would belong to nobody.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    numbers = [getattr(signal, name) for name in ENDINGS if hasattr(signal, name)]
    before = {each: signal.signal(each, lambda number, _: came.append(number)) for each in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        for number in came[:1]:
            signal.raise_signal(number)


class NodeFailed(PeerLost):
    """A node of the demo ended although nobody asked it to."""

    trace: str = ""
    """What it wrote about that: usually a traceback."""


def environment(home: Path) -> dict[str, str]:
    """For a node whose files are in a folder of its own."""
    kept = {k: value for k, value in os.environ.items() if not _MEANT_FOR_OTHERS.match(k)}
    return kept | ONE_THREAD_EACH | {"POTLUCK_HOME": str(home)}


class NodeProcess:
    """One start of one node."""

    def __init__(self, name: str, home: Path, events: queue.SimpleQueue[Event]) -> None:
        self.name = name
        self.ended = False
        """Whether all its news have been read; set by whoever reads them."""
        self._last_lines: deque[str] = deque(maxlen=LAST_LINES)
        # A session of its own: Ctrl-C goes to the demo alone, which then ends everybody.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "potluck.apps.cli.demo_node"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(home),
            start_new_session=True,
        )
        self.pid = self._process.pid
        self._threads = [
            threading.Thread(target=self._read_news, args=(self._process.stdout, events)),
            threading.Thread(target=self._read_last_lines, args=(self._process.stderr,)),
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

    def explain_end(self, said: Failed | None = None) -> DistributedError:
        """The error for a process that ended although nobody asked it to."""
        code: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = self._process.wait(1.0)
            self._threads[1].join(1.0)  # what it wrote may still be in the pipe
        if said is not None:
            cause = said.text
        elif code is None:
            cause = "its connection broke, but the process still runs"
        elif code < 0:
            cause = f"it was ended by the signal {signal.Signals(-code).name}"
        else:
            cause = f"it ended with exit code {code}"
            cause += f" and wrote: {self._last_lines[-1]}" if self._last_lines else ""
        error = NodeFailed(
            f"The demo's node {self.name} (pid {self.pid}) is gone",
            host=self.name,
            cause=cause,
            hint="Nobody meant it to; run the demo again.",
        )
        error.trace = said.trace if said is not None else "\n".join(self._last_lines)
        return error

    def _read_news(self, pipe: IO[bytes], events: queue.SimpleQueue[Event]) -> None:
        for line in pipe:
            try:
                events.put((self, decode_news(line)))
            except msgspec.DecodeError:
                events.put((self, Failed(f"it wrote {line!r}, which is no news")))
        events.put((self, None))

    def _read_last_lines(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            if text := line.decode(errors="replace").rstrip():
                self._last_lines.append(text)


Event: TypeAlias = tuple[NodeProcess, News | None]
"""News of a process; None is its end."""
