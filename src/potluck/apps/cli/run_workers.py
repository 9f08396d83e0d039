"""Several workers of one machine: started together, heard line by line, and ended together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

from potluck.apps.cli.run_output import BEGINNING, Output, Recorder, is_second_hand

__all__ = ["FORWARDED", "run_workers"]

FORWARDED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")

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
        self, command: Sequence[str], place: int, environment: Mapping[str, str], outputs: Outputs
    ) -> None:
        self.label = environment.get("RANK", str(place))
        self.is_alone = environment.get("GROUP_WORLD_SIZE") == "1"
        """Whether all workers are on this machine."""
        # A group of its own: it can be ended with all that it has started, and Ctrl-C reaches it
        # through us alone.
        own_group: dict[str, Any] = {"process_group": 0} if os.name == "posix" else {}
        self.process = subprocess.Popen(  # noqa: S603 - what the user typed
            [sys.executable, *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **own_group,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self._out = Recorder(self.process.stdout, outputs[0], self.label, place)  # type: ignore[arg-type]
        self._err = Recorder(self.process.stderr, outputs[1], self.label, place)  # type: ignore[arg-type]
        self.was_ended = False

    @property
    def code(self) -> int | None:
        """As a shell would say it; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def last_words(self) -> str:
        """Why it failed, as far as it said: its traceback, or else the last lines it wrote."""
        return self._err.last_words

    def send(self, number: int) -> None:
        """Send a signal to it, if it runs."""
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
            if os.name == "posix":
                os.killpg(self.process.pid, signal.SIGKILL)
            else:
                self.process.kill()

    def drain(self) -> None:
        """Read what is left of its output."""
        for recorder in (self._out, self._err):
            recorder.finish(DRAIN)


Outputs = tuple[Output, Output]


def run_workers(command: Sequence[str], environments: Sequence[Mapping[str, str]]) -> int:
    """Run the script once for each environment; the exit code of the one that failed first."""
    outputs = Output(sys.stdout), Output(sys.stderr)
    crew = _Crew()
    with crew.signals_forwarded():
        try:
            for place, environment in enumerate(environments):
                if crew.was_told_to_end:
                    break
                with dump_signal_ignored():
                    worker = Worker(command, place, environment, outputs)
                crew.workers.append(worker)
            crew.attend()
        finally:
            crew.clean_up()
    return crew.conclude(outputs[1])


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

    def __init__(self) -> None:
        self.workers: list[Worker] = []
        self._failed: list[Worker] = []
        self._signals: list[int] = []

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
            if is_repeated:
                worker.kill()
            else:
                worker.send(number)

    # -- the run ---------------------------------------------------------------------------------

    def attend(self) -> None:
        """Wait until all have ended; when one fails, see to it that the others end."""
        deadline, is_ending = float("inf"), False
        while running := self._look():
            now = time.monotonic()
            if self._failed and not is_ending:
                deadline = min(deadline, now + self._patience())
            if now >= deadline:
                for worker in running:
                    if is_ending:
                        worker.kill()
                    else:
                        worker.end()
                is_ending, deadline = True, now + GRACE
            time.sleep(LOOK_EVERY)

    def _patience(self) -> float:
        """Seconds that the others have, now that one has failed."""
        if self._signals:
            return PARTING
        return 0.0 if self._culprit() is not None else HEARSAY

    def _look(self) -> list[Worker]:
        """Who still runs; whoever has failed since the last look is remembered in that order."""
        running = []
        for worker in self.workers:
            if (code := worker.code) is None:
                running.append(worker)
            elif code and worker not in self._failed and not worker.was_ended:
                worker.kill()  # what it has started, and what would keep its output open
                worker.drain()
                self._failed.append(worker)
        return running

    def _culprit(self) -> Worker | None:
        """Who failed first, not counting those who only tell of it."""
        for worker in self._failed:
            if not is_second_hand(worker.last_words):
                return worker
        return None

    def _too_late(self) -> Worker | None:
        """Who was failing, but had not ended when all who waited for it had."""
        for worker in self.workers:
            words = worker.last_words if worker.was_ended else ""
            if BEGINNING in words and not is_second_hand(words):
                return worker
        return None

    def clean_up(self) -> None:
        """Leave nothing behind."""
        for worker in self.workers:
            worker.kill()
        for worker in self.workers:
            worker.process.wait()
            worker.drain()

    def conclude(self, output: Output) -> int:
        """Say who failed and why, if anybody did; the exit code of it all."""
        codes = [worker.code or 0 for worker in self.workers]
        if self._signals and (any(codes) or not codes):
            name = signal.Signals(self._signals[0]).name
            output.say(f"potluck: the {len(codes)} workers were ended by {name}.")
            return 128 + self._signals[0]
        if not self._failed:
            return 0
        culprit = self._culprit()
        if culprit is None and (late := self._too_late()) is not None:
            output.say(f"\n{late.last_words}\n")
            output.say(f"potluck: rank {late.label} failed first, and had to be ended.")
            return 1
        first = culprit or self._failed[0]
        code = first.code or 1
        if first.last_words:
            output.say(f"\n{first.last_words}\n")
        if culprit is None:
            output.say(f"potluck: {self._hearsay()}.")
        else:
            output.say(f"potluck: rank {first.label} {_how(code)} first; {self._others(first)}.")
        return code

    def _hearsay(self) -> str:
        """What may be behind it where those who failed only tell of somebody else."""
        is_alone = all(worker.is_alone for worker in self.workers)
        reasons = [] if is_alone else ["a rank on another machine failed first: look at its output"]
        left = [each.label for each in self.workers if each.code == 0 and not each.was_ended]
        if left:
            who = f"rank {left[0]}" if len(left) == 1 else f"ranks {', '.join(left)}"
            reasons.insert(0, f"{who} ended without an error while others still needed it")
        return (
            ", or ".join(reasons) or "each that failed tells of another: look at what came before"
        )

    def _others(self, culprit: Worker) -> str:
        rest = [worker for worker in self.workers if worker is not culprit]
        ended = sum(worker.was_ended for worker in rest)
        if ended:
            return f"{ended} of the other {len(rest)} had to be ended"
        return f"the other {len(rest)} have ended too"


def _how(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(code - 128).name}"
    return f"failed with exit code {code}"
