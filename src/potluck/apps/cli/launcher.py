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
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from potluck import _platform
from potluck._decode import printable
from potluck.apps.cli.run_places import (
    BEGINNING,
    OK,
    ROLL,
    STOPPED,
    WAITED,
    MemoryUse,
    Output,
    OutputReader,
    ParticipantLists,
    Participants,
    RankAssignment,
    ScriptError,
    ScriptExit,
    cause_of_death,
    duration,
    group_of,
)
from potluck.cluster.presence import FIXED
from potluck.cluster.reports import StatusReport
from potluck.launch_env import FILE, MOST, PARENT, is_second_hand

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
        self._words: ScriptError | None = None
        self._recorders: list[OutputReader] = []
        self.was_ended = False
        line = [sys.executable, *command]
        told = {**environment, FILE: str(self._file), PARENT: str(os.getpid())}
        if outputs is None:  # it has our terminal, and is in our group: Ctrl-C reaches both
            self.has_group = False
            self.process = subprocess.Popen(line, env=told)  # noqa: S603 - what the user typed
            return
        # A group of its own: it can be ended with all that it has started, and Ctrl-C reaches it
        # through us alone.
        self.has_group = _platform.HAS_PROCESS_GROUPS
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
            self._recorders.append(OutputReader(source, output, self.label, place))  # type: ignore[arg-type]

    @property
    def code(self) -> int | None:
        """As a shell would say it; None while it runs."""
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def words(self) -> ScriptError | None:
        """What it says of the exception that ends it, if it has."""
        if self._words is None:
            self._words = ScriptError.read(self._file)
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
        if len(line) > MOST:
            line = f"{line[: MOST - 1].rpartition(' ')[0] or line[: MOST - 1]} …"
        return printable(line.rstrip(" .,:;"))

    @property
    def is_second_hand(self) -> bool:
        """Whether it only tells that another rank has failed."""
        words = self.words
        return is_second_hand(self.last_words) if words is None else words.is_second_hand

    def send(self, number: int) -> None:
        """Send a signal to it, if it runs."""
        # In a terminal Ctrl-C reaches a single script by itself; twice would be once too often.
        if number == signal.SIGINT and not self._recorders and _platform.is_in_foreground():
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
                _platform.kill_process_group(self.process.pid)
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


def _end_leftovers(folder: Path) -> None:
    """End what a script has started in our own group and left behind.

    Such a process has the environment of the script.  Helpers that end by themselves when the
    script has ended have a second to do so.  What made a group of its own wants to stay.
    """
    import psutil

    if not _platform.HAS_PROCESS_GROUPS:
        return
    left = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and _platform.shares_process_group(process.pid):
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
    company: Participants,
    *,
    deadline: float = float("inf"),
    patience: float = 0.0,
) -> int:
    """Run the script once for each environment; the exit code of the one that failed first.

    At ``deadline``, which is ``patience`` seconds after the command began, all are ended.
    """
    outputs = (Output(sys.stdout), company.output) if len(environments) > 1 else None
    crew = _Workers(company, deadline, patience)
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
    number = _platform.SIGUSR2
    if number is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(number, before)


class _Workers:
    """All workers, and what has happened to them."""

    def __init__(self, company: Participants, deadline: float, patience: float) -> None:
        self.workers: list[Worker] = []
        self._company = company
        self._deadline = deadline
        self._limit = patience
        self._is_late = False
        self._told = ""
        self._failed: list[Worker] = []
        self._signals: list[int] = []
        self._memory = MemoryUse()

    # -- signals ---------------------------------------------------------------------------------

    @property
    def was_told_to_end(self) -> bool:
        """Whether there was a signal after which nothing more is begun."""
        return bool(self._signals)

    @contextlib.contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        """Whatever we are told, the workers are told; what cannot wait is done at the second."""
        before = {
            number: signal.signal(number, self._forward) for number in _platform.signals(*FORWARDED)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, _frame: FrameType | None) -> None:
        is_repeated = number == signal.SIGINT and number in self._signals
        if number in _platform.signals("SIGINT", "SIGTERM", "SIGHUP"):
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
            ending = ScriptExit(STOPPED, seconds=seconds)
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

    def _ending(self) -> ScriptExit:
        """How the script of this machine has ended, as far as that is known here."""
        seconds = self._company.seconds
        codes = [worker.code for worker in self.workers]
        if self._is_late:
            cause = (
                f"--timeout ended it after {duration(self._limit)}; its script was still running"
            )
            return ScriptExit("ended by --timeout", cause, seconds)
        if self._signals and (any(codes) or not codes):
            return self._interrupted(seconds)
        culprit = self._culprit() or (self._too_late() if self._failed else None)
        if culprit is not None:
            return self._ending_of(culprit, seconds)
        return ScriptExit(STOPPED if self._failed else OK, seconds=seconds)

    def _interrupted(self, seconds: float) -> ScriptExit:
        name = signal.Signals(self._signals[0]).name
        words = next((each.words for each in self.workers if each.words is not None), None)
        where = f", {words.where}" if words is not None and words.where else ""
        how = "interrupted by Ctrl-C" if name == "SIGINT" else f"ended by {name}"
        return ScriptExit("interrupted" if name == "SIGINT" else how, f"{how}{where}", seconds)

    def _ending_of(self, culprit: Worker, seconds: float) -> ScriptExit:
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
        return ScriptExit(outcome, f"{self._whose(culprit)}{cause}", seconds)

    def _whose(self, worker: Worker) -> str:
        return f"rank {worker.label}: " if len(self.workers) > 1 else ""

    def _explain(self, ending: ScriptExit) -> ScriptExit:
        """Those that failed here only tell of another rank; say what is behind it."""
        if self._company.cause():  # the line that says it has been said
            return ending
        first = self._failed[0]
        self._show(first)
        words = first.words
        cause = self._hearsay() if words is None or len(self.workers) > 1 else str(words)
        return ScriptExit(STOPPED, cause, ending.seconds)

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


# --------------------------------------------------------------------------------------------------
# Who is here for a run: launchers find each other, compare notes, and begin together.
#
# A launcher first *waits* for as many as are wanted, then is *ready*, and *starts* when all of them
# are ready.  Machines whose script already runs count as started, so one that was restarted comes
# in.

COMPARED = {
    "script_sha256": "the script",
    "arguments": "the arguments",
    "python": "the version of Python",
    "potluck": "the version of Potluck",
    "numpy": "the version of numpy",
    "torch": "the version of PyTorch",
}
"""What must be alike, and what it is called."""

BLOCKING = frozenset({"script_sha256"})
"""What a run does not begin with."""

LAST_WORDS = frozenset({"starting", "stopping"})
"""A launcher that has said one of these has seen that everybody is here."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Something in which machines of a run differ."""

    fact: str
    values: Mapping[str, tuple[str, ...]]
    """For each value the machines that have it, most machines first."""

    @property
    def is_grave(self) -> bool:
        """Whether the run must not begin."""
        return self.fact in BLOCKING

    def __str__(self) -> str:
        """One sentence that names who differs."""
        if self.fact == "script_sha256":
            most, *others = map(_list, self.values.values())
            return f"The script on {' and on '.join(others)} differs from the one on {most}"
        parts = [f"{_list(names)}: {value or 'none'}" for value, names in self.values.items()]
        verb = "are" if self.fact == "arguments" else "is"
        what = f"{COMPARED[self.fact].capitalize()} {verb} not the same everywhere"
        return f"{what} ({'; '.join(parts)})"


def differences(reports: Iterable[StatusReport]) -> list[Difference]:
    """In what the machines differ, and who."""
    found = []
    known = [report for report in reports if report.facts]
    names = labels(known)
    for fact in COMPARED:
        values: dict[str, list[str]] = {}
        for report in known:
            values.setdefault(report.facts.get(fact, ""), []).append(names[report.key])
        if len(values) > 1:
            ordered = sorted(values.items(), key=lambda item: (-len(item[1]), item[0]))
            found.append(Difference(fact, {value: tuple(sorted(who)) for value, who in ordered}))
    return found


def labels(reports: Sequence[StatusReport]) -> dict[tuple[str, int], str]:
    """What to call each: its machine's name; with its port where several have that name."""
    short = {report.key: report.name or report.node[:8] for report in reports}
    count = Counter(short.values())
    return {
        report.key: f"{name}:{report.port}" if count[name] > 1 else name
        for report in reports
        if (name := short[report.key])
    }


class LauncherWait:
    """The state of one launcher's wait: who is here, and whether to begin."""

    def __init__(self, me: StatusReport, wanted: int, expected: Mapping[str, str]) -> None:
        self._wanted = wanted
        self._expected = dict(expected)
        self._here: dict[tuple[str, int], StatusReport] = {me.key: me}
        self._me = me.key
        self._started: dict[tuple[str, int], StatusReport] = {}
        self._rolls = ParticipantLists()
        self.hosts: dict[tuple[str, int], str] = {}
        """By which addresses the others are, or were, connected with us."""

    def look(self, reports: Iterable[StatusReport]) -> None:
        """What is known now; a launcher that has begun counts until its script is seen."""
        mine = self._here[self._me]
        seen = {
            report.key: report
            for report in reports
            if report.key != self._me
            and report.job == mine.job  # an address may lead to a process of another job
            and report.role in {"launcher", "member"}
            and report.facts.get("world") != FIXED  # whose ranks are given out
        }
        for report in seen.values():
            if report.role == "launcher" and report.state in LAST_WORDS:
                self._started[report.key] = report
        running = {report.node for report in seen.values() if report.role == "member"}
        pending = {
            key: report for key, report in self._started.items() if report.node not in running
        }
        self._here = {self._me: mine, **pending, **seen}

    def expect(self, expected: Mapping[str, str], *, wants_all: bool) -> None:
        """It may have turned out that there are more machines; with ``wants_all`` all must come."""
        self._expected = dict(expected)
        if wants_all:
            self._wanted = max(self._wanted, len(expected))

    def say(self, age: float) -> tuple[str, dict[str, str]]:
        """Our own state and facts; the command was typed ``age`` seconds ago."""
        import msgspec

        mine = self._here[self._me]
        told = mine.facts.get(WAITED) or f"{age * 1000:.0f}" if self.is_complete else ""
        mine = msgspec.structs.replace(
            mine,
            state="ready" if self.is_complete else "waiting",
            facts={**mine.facts, WAITED: told},
        )
        self._here[self._me] = mine
        roll = self._rolls.call(self.here) if self.is_complete else ""
        facts = {WAITED: told, ROLL: roll}
        self._here[self._me] = msgspec.structs.replace(mine, facts={**mine.facts, **facts})
        return mine.state, facts

    @property
    def here(self) -> list[StatusReport]:
        """Everybody who is here, ourselves first."""
        mine = self._here[self._me]
        others = [report for key, report in self._here.items() if key != self._me]
        return [mine, *sorted(others, key=lambda each: (each.name, each.key))]

    @property
    def wanted(self) -> int:
        """How many there must be."""
        return self._wanted

    @property
    def expected(self) -> Mapping[str, str]:
        """The machines of the group, by id."""
        return self._expected

    @property
    def missing(self) -> list[str]:
        """Names of machines that belong to the group and are not here."""
        nodes = {report.node for report in self._here.values()}
        return sorted(name for node, name in self._expected.items() if node not in nodes)

    @property
    def is_complete(self) -> bool:
        """Whether as many are here as are wanted."""
        return self.count >= self._wanted

    @property
    def count(self) -> int:
        """How many are here; workers of one launcher count once."""
        return len(set(map(group_of, self._here.values())))

    @property
    def crew(self) -> RankAssignment | None:
        """Who takes part and with how many workers, if everybody who is here says the same."""
        return self._rolls.agreed(self.here[1:]) if self.is_complete else None

    @property
    def may_start(self) -> bool:
        """Whether everybody who is here knows that all are here."""
        others = [report for key, report in self._here.items() if key != self._me]
        return self.is_complete and all(
            report.role == "member" or report.state in {"ready", *LAST_WORDS} for report in others
        )

    @property
    def differences(self) -> list[Difference]:
        """In what those who are here differ."""
        return differences(self.here)

    def status_line(self) -> str:
        """Who is here and who is missing, in one line."""
        names = _list(list(labels(self.here).values()))
        count = self.count
        text = f"{count} of {self._wanted} {'is' if count == 1 else 'are'} here: {names}"
        if not self.is_complete and self.missing:
            text += f"; missing: {_list(self.missing)}"
        return text


def _list(names: Sequence[str]) -> str:
    return ", ".join(names)
