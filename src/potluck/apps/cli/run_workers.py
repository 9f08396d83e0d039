"""The scripts of one machine: started together, heard line by line, and ended together.

A single one has the terminal for its own.  Several are read, and each line says whose it is.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from potluck.apps.cli.run_company import Company
from potluck.apps.cli.run_ending import (
    OK,
    STOPPED,
    Ending,
    LastWords,
    Memory,
    cause_of_death,
    duration,
)
from potluck.apps.cli.run_output import BEGINNING, Output, Recorder
from potluck.decoding import printable
from potluck.runtime.last_words import FILE, MOST, PARENT, is_second_hand

__all__ = ["TOO_LATE", "dump_signal_ignored", "run_workers"]

FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")

TOO_LATE = 3
"""The exit code of a run that --timeout ends."""

LOOK_EVERY = 0.05
"""Seconds between two looks at who has ended."""

HEARSAY = 2.0
"""Seconds for the one that failed first to be seen, after one that only tells of it."""

GRACE = 5.0
"""Seconds for a worker to end when another one has failed."""

PARTING = 30.0
"""Seconds for the others when one has ended after a signal: they may save their work."""

DRAIN = 1.0
"""Seconds to read what an ended worker has written."""


class Worker:
    """One process of the script."""

    def __init__(
        self,
        command: Sequence[str],
        place: int,
        environment: Mapping[str, str],
        outputs: Outputs | None,
        folder: Path,
    ) -> None:
        self.label = environment.get("RANK", str(place))
        self.is_alone = environment.get("GROUP_WORLD_SIZE") == "1"
        """Whether all workers are on this machine."""
        self._folder = folder
        self._file = folder / f"{place}.json"
        self._words: LastWords | None = None
        self._recorders: list[Recorder] = []
        self.was_ended = False
        line = [sys.executable, *command]
        told = {**environment, FILE: str(self._file), PARENT: str(os.getpid())}
        if outputs is None:  # it has our terminal, and is in our group: Ctrl-C reaches both
            self.has_group = False
            self.process = subprocess.Popen(line, env=told)  # noqa: S603 - what the user typed
            return
        # A group of its own: it can be ended with all that it has started, and Ctrl-C reaches it
        # through us alone.
        self.has_group = os.name == "posix"
        own_group: dict[str, Any] = {"process_group": 0} if self.has_group else {}
        self.process = subprocess.Popen(  # noqa: S603 - what the user typed
            line,
            env=told,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **own_group,
        )
        for source, output in zip((self.process.stdout, self.process.stderr), outputs, strict=True):
            assert source is not None
            self._recorders.append(Recorder(source, output, self.label, place))  # type: ignore[arg-type]

    @property
    def code(self) -> int | None:
        """As a shell would say it; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def words(self) -> LastWords | None:
        """What it says of the exception that ends it, if it has."""
        if self._words is None:
            self._words = LastWords.read(self._file)
        return self._words

    @property
    def last_words(self) -> str:
        """Why it failed, as far as it said: its traceback, or else the last lines it wrote."""
        words = self.words
        if words is not None and words.is_second_hand:
            return words.traceback.rstrip()
        return self._recorders[-1].last_words if self._recorders else ""

    @property
    def last_line(self) -> str:
        """The last line of the traceback that it wrote, if it wrote one."""
        words = self.last_words
        line = words.rpartition("\n")[2] if BEGINNING in words else ""
        return printable(line[:MOST])

    @property
    def is_second_hand(self) -> bool:
        """Whether it only tells that another rank has failed."""
        words = self.words
        return is_second_hand(self.last_words) if words is None else words.is_second_hand

    def send(self, number: int) -> None:
        """Send a signal to it, if it runs."""
        # In a terminal Ctrl-C reaches a single script by itself; twice would be once too often.
        if number == signal.SIGINT and not self._recorders and _is_in_front():
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def end(self) -> None:
        """Ask it to end."""
        if self.process.poll() is None:
            self.was_ended = True
            self.process.terminate()

    def kill(self) -> None:
        """End it without a word, and whatever it has started."""
        if self.process.poll() is None:
            self.was_ended = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.has_group:
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()

    def clean_up(self) -> None:
        """Leave nothing behind that it has started, and read what is left of its output."""
        self.kill()
        self.process.wait()
        if not self.has_group:
            _end_leftovers(self._folder)
        self.drain()

    def drain(self) -> None:
        """Read what is left of its output."""
        for recorder in self._recorders:
            recorder.finish(DRAIN)


Outputs = tuple[Output, Output]


def _is_in_front() -> bool:
    """Whether Ctrl-C in our terminal reaches us and our children, wherever the input is from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | getattr(os, "O_NOCTTY", 0))
    except OSError:
        return sys.stdin.isatty()
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _end_leftovers(folder: Path) -> None:
    """End what a script has started in our own group and left behind.

    Such a process has the environment of the script.  Helpers that end by themselves when the
    script has ended have a second to do so.  What made a group of its own wants to stay.
    """
    import psutil

    if os.name != "posix":
        return
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and os.getpgid(process.pid) == os.getpgrp():
                file = process.environ().get(FILE, "")
                left += [process] if file and Path(file).parent == folder else []
    for action in ("", "terminate", "kill"):
        for process in left:
            with contextlib.suppress(psutil.Error):
                if action:
                    getattr(process, action)()
        _, left = psutil.wait_procs(left, timeout=DRAIN)


def run_workers(
    command: Sequence[str],
    environments: Sequence[Mapping[str, str]],
    company: Company,
    *,
    deadline: float = float("inf"),
    patience: float = 0.0,
) -> int:
    """Run the script once for each environment; the exit code of the one that failed first.

    At ``deadline``, which is ``patience`` seconds after the command began, all are ended.
    """
    outputs = (Output(sys.stdout), company.output) if len(environments) > 1 else None
    crew = _Crew(company, deadline, patience)
    with tempfile.TemporaryDirectory(prefix="potluck-run-") as folder, crew.signals_forwarded():
        try:
            for place, environment in enumerate(environments):
                if crew.was_told_to_end:
                    break
                with dump_signal_ignored():
                    worker = Worker(command, place, environment, outputs, Path(folder))
                crew.workers.append(worker)
            crew.attend()
        finally:
            crew.clean_up()
        code = crew.conclude()
    with contextlib.suppress(KeyboardInterrupt):  # a person may have waited long enough
        company.conclude()
    return code


@contextlib.contextmanager
def dump_signal_ignored() -> Iterator[None]:
    """Let SIGUSR2 end neither us nor a script begun meanwhile, which inherits this.

    It asks for dumps of the flight recorder; before the script has joined there is none.
    """
    number = getattr(signal, "SIGUSR2", None)  # not on Windows
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


class _Crew:
    """All workers, and what has happened to them."""

    def __init__(self, company: Company, deadline: float, patience: float) -> None:
        self.workers: list[Worker] = []
        self._company = company
        self._deadline = deadline
        self._limit = patience
        self._is_late = False
        self._told = ""
        self._failed: list[Worker] = []
        self._signals: list[int] = []
        self._memory = Memory()

    # -- signals ---------------------------------------------------------------------------------

    @property
    def was_told_to_end(self) -> bool:
        """Whether there was a signal after which nothing more is begun."""
        return bool(self._signals)

    @contextlib.contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        """Whatever we are told, the workers are told; what cannot wait is done at the second."""
        before = {
            number: signal.signal(number, self._forward)
            for name in FORWARDED
            if (number := getattr(signal, name, None)) is not None
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        is_repeated = number == signal.SIGINT and number in self._signals
        if number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", None)}:
            self._signals.append(number)
        for worker in list(self.workers):
            if is_repeated and worker.has_group:
                worker.kill()
            else:
                worker.send(number)

    # -- the run ---------------------------------------------------------------------------------

    def attend(self) -> None:
        """Wait until all have ended; when one fails, see to it that the others end."""
        until, is_ending = self._deadline, False
        while running := self._look():
            self._memory.look(worker.process.pid for worker in running)
            self._company.look()
            now = time.monotonic()
            if self._failed and not is_ending:
                until = min(until, now + self._patience())
            self._tell_early()
            if now >= until:
                self._is_late = self._is_late or (now >= self._deadline and not self._failed)
                for worker in running:
                    if is_ending:
                        worker.kill()
                    else:
                        worker.end()
                is_ending, until = True, now + GRACE
            time.sleep(LOOK_EVERY)

    def _tell_early(self) -> None:
        """Tell the others as soon as one says why it fails: it may take long to end."""
        seconds = self._company.seconds
        speaking = [each for each in self.workers if each.words is not None]
        first = self._culprit() or next(
            (each for each in speaking if not each.is_second_hand), None
        )
        ending = None if first is None else self._ending_of(first, seconds)
        if ending is None and speaking:
            ending = Ending(STOPPED, seconds=seconds)
        if ending is not None and ending.outcome != self._told:
            self._told = ending.outcome
            self._company.tell(ending)

    def _patience(self) -> float:
        """Seconds that the others have, now that one has failed."""
        if self._signals:
            return PARTING
        return 0.0 if self._culprit() is not None else HEARSAY

    def _look(self) -> list[Worker]:
        """Who still runs; those that have failed since the last look are kept in that order."""
        running = []
        for worker in self.workers:
            if (code := worker.code) is None:
                running.append(worker)
            elif code and worker not in self._failed and not worker.was_ended:
                if worker.has_group:
                    worker.kill()  # what it has started, and what would keep its output open
                worker.drain()
                self._failed.append(worker)
        return running

    def _culprit(self) -> Worker | None:
        """Which failed first, not counting those that only tell of it."""
        return next((each for each in self._failed if not each.is_second_hand), None)

    def _too_late(self) -> Worker | None:
        """Which was failing, but had not ended when all that waited for it had."""
        for worker in self.workers:
            words = worker.last_words if worker.was_ended else ""
            if BEGINNING in words and not worker.is_second_hand:
                return worker
        return None

    def clean_up(self) -> None:
        """Leave nothing behind."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.clean_up()

    # -- the end ---------------------------------------------------------------------------------

    def conclude(self) -> int:
        """Say how it ended here, and tell the others; the exit code of it all."""
        company, ending = self._company, self._ending()
        company.tell(ending)
        if ending.outcome == STOPPED:
            ending = self._explain(ending)
            company.tell(ending)
        elif ending.cause:
            self._show(self._culprit() or self._too_late())
        if ending.cause:
            company.say(f"{company.me}: {ending.cause}{self._others()}", grave=not ending.is_ok)
        return self._code()

    def _ending(self) -> Ending:
        """How the script of this machine has ended, as far as that is known here."""
        seconds = self._company.seconds
        codes = [worker.code for worker in self.workers]
        if self._is_late:
            cause = (
                f"--timeout ended it after {duration(self._limit)}; its script was still running"
            )
            return Ending("ended by --timeout", cause, seconds)
        if self._signals and (any(codes) or not codes):
            return self._interrupted(seconds)
        culprit = self._culprit() or (self._too_late() if self._failed else None)
        if culprit is not None:
            return self._ending_of(culprit, seconds)
        return Ending(STOPPED if self._failed else OK, seconds=seconds)

    def _interrupted(self, seconds: float) -> Ending:
        name = signal.Signals(self._signals[0]).name
        words = next((each.words for each in self.workers if each.words is not None), None)
        where = f", {words.where}" if words is not None and words.where else ""
        how = "interrupted by Ctrl-C" if name == "SIGINT" else f"ended by {name}"
        return Ending("interrupted" if name == "SIGINT" else how, f"{how}{where}", seconds)

    def _ending_of(self, culprit: Worker, seconds: float) -> Ending:
        words, code = culprit.words, culprit.code or 1
        outcome = "failed"
        if words is not None and not words.is_second_hand:
            cause = str(words)
            outcome = "interrupted" if words.kind == "KeyboardInterrupt" else outcome
        elif culprit.was_ended:
            cause = f"{culprit.last_line}; it failed, and had to be ended"
        elif (number := code - 128) in set(signal.Signals):
            cause = cause_of_death(number, self._memory)
            outcome = f"killed by {signal.Signals(number).name}"
        else:
            cause = culprit.last_line or f"failed with exit code {code}"
        return Ending(outcome, f"{self._whose(culprit)}{cause}", seconds)

    def _whose(self, worker: Worker) -> str:
        return f"rank {worker.label}: " if len(self.workers) > 1 else ""

    def _explain(self, ending: Ending) -> Ending:
        """Those that failed here only tell of another rank; say what is behind it."""
        if self._company.cause():  # the line that says it has been said
            return ending
        first = self._failed[0]
        self._show(first)
        words = first.words
        cause = self._hearsay() if words is None or len(self.workers) > 1 else str(words)
        return Ending(STOPPED, cause, ending.seconds)

    def _show(self, worker: Worker | None) -> None:
        """Show a traceback that was not shown, or that is lost among the lines of others."""
        if worker is not None and worker.last_words:
            self._company.output.say(f"\n{worker.last_words}\n")

    def _hearsay(self) -> str:
        """What may be behind it where those that failed only tell of another rank."""
        is_alone = all(worker.is_alone for worker in self.workers)
        reasons = [] if is_alone else ["a rank on another machine failed first: look at its output"]
        left = [each.label for each in self.workers if each.code == 0 and not each.was_ended]
        if left:
            which = f"rank {left[0]}" if len(left) == 1 else f"ranks {', '.join(left)}"
            reasons.insert(0, f"{which} ended without an error while others still needed it")
        return (
            ", or ".join(reasons) or "each that failed tells of another: look at what came before"
        )

    def _others(self) -> str:
        """What became of the other workers of this machine."""
        if self._signals or self._is_late or not self._failed:
            return ""
        culprit = self._culprit() or self._too_late() or self._failed[0]
        rest = [worker for worker in self.workers if worker is not culprit]
        ended = sum(worker.was_ended for worker in rest)
        return f"; {ended} of the other {len(rest)} workers had to be ended" if ended else ""

    def _code(self) -> int:
        codes = [worker.code or 0 for worker in self.workers]
        if self._is_late:
            return TOO_LATE
        if self._signals and (any(codes) or not codes):
            # A single script has the last word: it may have saved its work.
            return codes[0] if len(codes) == 1 else 128 + self._signals[0]
        if not self._failed:
            return 0
        culprit = self._culprit() or self._too_late() or self._failed[0]
        return 1 if culprit.was_ended else culprit.code or 1
