"""Ranks as real processes: started, talked to, looked at, and ended for certain.

A test hands a function at the top level of its own file to :meth:`Ranks.run` or
:meth:`Ranks.start`; every rank's process loads that file and calls the function with its
:class:`~support.place.Place`.  Arguments and results are plain data.  Processes that have finished
a program are used again for the next test, which spares most of the starting.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from support.place import Failure
from support.ports import free_port
from support.threads import PATIENCE

logger = logging.getLogger(__name__)

TESTS = Path(__file__).resolve().parent.parent
PIPE_SIZE = 1 << 20  # bytes that a process may say before somebody listens
LOOK_EVERY = 0.02  # seconds between two looks at whether a silent process has ended

Program = Callable[..., Any]
Wrap = Callable[[list[str]], list[str]]


class RankFailed(AssertionError):
    """A rank did something else than the test expected of it."""


class Rank:
    """One process, and the program it runs."""

    def __init__(self, wrap: Wrap | None = None, environment: dict[str, str] | None = None) -> None:
        self.rank = -1
        self.is_idle = True
        self.is_plain = wrap is None and environment is None
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in clean_up
        self._log_start = 0
        self._unread = b""
        path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [sys.executable, "-c", "from support.place import main; main()"]
        self._process = subprocess.Popen(
            wrap(command) if wrap else command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, **(environment or {}), "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,  # a group of its own: its children end with it in clean_up
        )
        self.pid = self._process.pid
        if sys.platform == "linux":  # otherwise 64 KiB, which members of a training fill in seconds
            assert self._process.stdout is not None
            with contextlib.suppress(OSError):  # users other than root may have too many of them
                fcntl.fcntl(self._process.stdout, fcntl.F_SETPIPE_SZ, PIPE_SIZE)

    # -- talking -----------------------------------------------------------------------------

    def begin(
        self, program: Program, rank: int, world_size: int, master: str, *arguments: Any
    ) -> None:
        """Let the process run ``program``; its outcome is collected later."""
        self.rank = rank
        self._log_start = os.fstat(self._log.fileno()).st_size
        self._write(
            {
                "file": program.__code__.co_filename,
                "program": program.__name__,
                "rank": rank,
                "world_size": world_size,
                "master": master,
                "arguments": arguments,
            }
        )

    def tell(self, word: str) -> None:
        """Say a word that the program waits for."""
        self._write({"word": word})

    def expect(self, word: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """Wait until the program says ``word``; returns the facts it gave with it."""
        return self.expect_any(word, timeout=timeout)

    def expect_any(self, *words: str, timeout: float = PATIENCE) -> dict[str, Any]:
        """The same with one of several words."""
        message = self._read(timeout)
        if message is None or message.get("word") not in words:
            raise self._disappointment(f"said {message} instead of {' or '.join(words)!r}")
        return message

    def hear_any(self, timeout: float = PATIENCE) -> dict[str, Any]:
        """Whatever the program says next, which must be a word."""
        message = self._read(timeout)
        if message is None or "word" not in message:
            raise self._disappointment(f"said {message} instead of a word", message)
        return message

    def last_value(self, timeout: float = PATIENCE) -> Any:
        """What the program returned, after whatever it may have said before."""
        while (message := self._read(timeout)) is not None and "word" in message:
            pass
        if message is None or "value" not in message:
            raise self._disappointment("returned no value", message)
        self.is_idle = True
        return message["value"]

    def has_news(self) -> bool:
        """Whether the program has said or returned something not yet looked at."""
        return bool(self._unread) or self._can_read(0)

    def value(self, timeout: float = PATIENCE) -> Any:
        """What the program returned."""
        message = self._read(timeout)
        if message is None or "value" not in message:
            raise self._disappointment("returned no value", message)
        self.is_idle = True
        return message["value"]

    def failure(self, timeout: float = PATIENCE) -> Failure:
        """How the program failed, which it must."""
        message = self._read(timeout)
        if message is None or "failure" not in message:
            raise self._disappointment(f"did not fail but gave {message}")
        self.is_idle = True
        return cast("Failure", message["failure"])

    def exit_code(self, timeout: float = PATIENCE) -> int:
        """How the process ended, which it must; a signal counts negative."""
        deadline = time.monotonic() + timeout
        while not self._has_ended():
            if time.monotonic() > deadline:
                raise self._disappointment("did not end")
            time.sleep(LOOK_EVERY)
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send_signal(self, number: int) -> float:
        """Send a signal; returns the moment just before."""
        now = time.monotonic()
        os.kill(self.pid, number)
        return now

    def kill(self) -> float:
        """End the process without warning; returns the moment just before."""
        return self.send_signal(signal.SIGKILL)

    @property
    def log(self) -> str:
        """What the process has written to its standard output and error in its last program."""
        # Not by seeking: the process writes at the place that a seek would move.
        size = os.fstat(self._log.fileno()).st_size - self._log_start
        return os.pread(self._log.fileno(), size, self._log_start).decode(errors="replace")

    # -- lines -------------------------------------------------------------------------------

    def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: the next look at it will tell
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
            self._process.stdin.flush()

    def _read(self, timeout: float) -> dict[str, Any] | None:
        """The next line; None when the process has ended instead."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout
        while b"\n" not in self._unread:
            ended = self._has_ended()  # looked at before the pipe, so that nothing is missed
            if self._can_read(0 if ended else LOOK_EVERY):
                data = os.read(self._process.stdout.fileno(), 1 << 16)
                self._unread += data
                ended = ended and not data
            if ended:
                return None
            if time.monotonic() > deadline:
                raise self._disappointment(f"said nothing for {timeout:g} s")
        line, self._unread = self._unread.split(b"\n", 1)
        return cast("dict[str, Any]", msgspec.json.decode(line))

    def _can_read(self, timeout: float) -> bool:
        assert self._process.stdout is not None
        poller = select.poll()  # not select(), which knows no descriptor beyond 1023
        poller.register(self._process.stdout, select.POLLIN)
        return bool(poller.poll(timeout * 1000))

    def _has_ended(self) -> bool:
        # The zombie is kept until clean_up: as long as it is there, its number means nobody else.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, options) is not None

    def _disappointment(self, what: str, message: dict[str, Any] | None = None) -> RankFailed:
        trace = message["failure"]["trace"] if message and "failure" in message else ""
        end = f" and ended with {self.exit_code()}" if self._has_ended() else ""
        return RankFailed(f"rank {self.rank} (pid {self.pid}) {what}{end}\n{trace}\n{self.log}")

    def status(self) -> str:
        """What has become of the process, and what it wrote that nobody has looked at."""
        if self.has_news() and b"\n" not in self._unread:
            assert self._process.stdout is not None
            self._unread += os.read(self._process.stdout.fileno(), 1 << 16)
        state = f"has ended with {self.exit_code()}" if self._has_ended() else "is running"
        return f"rank {self.rank} (pid {self.pid}) {state}\n{self._unread!r}\n{self.log}"

    def clean_up(self) -> None:
        """End the process and everything it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            with contextlib.suppress(BrokenPipeError):
                assert file is not None
                file.close()


class Ranks:
    """The processes of one test."""

    def __init__(self, idle: list[Rank]) -> None:
        self._idle = idle  # ready interpreters, shared by all tests of a session
        self._mine: list[Rank] = []

    def start(
        self,
        program: Program,
        world_size: int,
        *arguments: Any,
        ranks: Iterable[int] | None = None,
        master: str = "",
        wrap: Callable[[int], Wrap] | None = None,
        fresh: bool = False,
    ) -> list[Rank]:
        """Run ``program`` as ``ranks`` (all unless given) of a group, and do not wait.

        ``wrap`` gives for each rank how to start its process, such as inside an emulated host.
        Programs whose forked children exit need ``fresh`` interpreters: where torch has threads,
        which another test may have left, such a child waits for them for ever.
        """
        master = master or new_master()
        started = []
        for rank in range(world_size) if ranks is None else ranks:
            process = self.take(wrap(rank) if wrap else None, fresh=fresh)
            process.begin(program, rank, world_size, master, *arguments)
            started.append(process)
        return started

    def run(
        self,
        program: Program,
        world_size: int,
        *arguments: Any,
        timeout: float = PATIENCE,
        fresh: bool = False,
    ) -> list[Any]:
        """Run ``program`` as all ranks of a group on this machine; what each returned."""
        started = self.start(program, world_size, *arguments, fresh=fresh)
        return [rank.value(timeout) for rank in started]

    def take(
        self,
        wrap: Wrap | None = None,
        environment: dict[str, str] | None = None,
        *,
        fresh: bool = False,
    ) -> Rank:
        """A process that runs nothing yet."""
        self._sort_out()
        if wrap is None and environment is None and self._idle and not fresh:
            process = self._idle.pop()
        else:
            process = Rank(wrap, environment)
        process.is_idle = False
        self._mine.append(process)
        return process

    def _sort_out(self) -> None:
        """Whoever has finished a program is ready for another."""
        ready = [process for process in self._mine if process.is_idle and process.is_plain]
        self._mine = [process for process in self._mine if process not in ready]
        self._idle += ready

    def bury(self, process: Rank) -> None:
        """End one of them for good: a long test makes hundreds."""
        self._mine.remove(process)
        process.clean_up()

    def clean_up(self) -> None:
        """Keep what is ready for the next test, and end everything else."""
        self._sort_out()
        for process in self._mine:
            logger.warning("%s", process.status())  # pytest shows it when the test has failed
            process.clean_up()
        self._mine.clear()


def start_together(processes: Iterable[Rank]) -> None:
    """Release programs that wait for it, however long their interpreters took to start."""
    processes = list(processes)
    for process in processes:
        process.expect("ready")
    for process in processes:
        process.tell("go")


def new_master() -> str:
    """An address on this machine where no rank 0 is yet."""
    return f"127.0.0.1:{free_port()}"
