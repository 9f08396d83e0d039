"""Ranks of a run: launchers that agree on who takes part give every worker its place.

Each launcher says which launchers it sees, as a *roll*: a hash of them all and of how many workers
each will start.  When all of them say the same roll, each knows the place of all.  A launcher
that has seen that begins; those that hear of it follow, even if more have come meanwhile.

Rank 0 is on the machine where the command was typed first.  Clocks of machines differ, so each says
how long it had waited when all were there, which is at about the same moment everywhere.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, BinaryIO, TextIO

import msgspec

from potluck import _platform
from potluck._decode import Lines, decode_json
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.cluster.observer import STOPPING, Observer
from potluck.cluster.reports import StatusReport
from potluck.errors import DistributedError
from potluck.launch_env import MOST, MOST_TRACEBACK

ROLL, PER_NODE, LAUNCHER, MEETING = "roll", "per_node", "launcher", "meeting_port"
WAITED, COMPANY = "waited", "company_port"
"""What a launcher says beside what is compared."""

DIGITS = 16
"""Hexadecimal digits of a roll."""

LOOPBACK = "127.0.0.1"

RANKED = ("RANK", "WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What holds only where everybody's place is known."""

MOST_WORKERS = 1024
"""Of one machine; a larger number from a peer is refused."""


def workers_of(report: StatusReport) -> int:
    """How many workers a launcher will start, as it says."""
    text = report.facts.get(PER_NODE, "1")
    is_number = text.isascii() and text.isdecimal() and len(text) < 5  # noqa: PLR2004
    return min(max(1, int(text)), MOST_WORKERS) if is_number else 1


def meeting_port_of(report: StatusReport) -> int:
    """Where rank 0 listens if it is a worker of this launcher."""
    return port_in(report, MEETING) or report.port


def port_in(report: StatusReport, fact: str) -> int:
    """The port that a launcher tells under a name; 0 if it tells none."""
    text = report.facts.get(fact, "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= 5  # noqa: PLR2004
    return int(text) if is_number and int(text) < 1 << 16 else 0


def waited_of(report: StatusReport) -> int:
    """For how many milliseconds a launcher had waited when all were there, as it says."""
    text = report.facts.get(WAITED, "")
    is_number = text.isascii() and text.isdecimal() and len(text) <= 12  # noqa: PLR2004
    return int(text) if is_number else 0


def group_of(report: StatusReport) -> str:
    """What to count as one: a launcher, or the workers that one has started."""
    return report.facts.get(LAUNCHER, "") or f"{report.node}:{report.incarnation}"


@dataclass(frozen=True, slots=True)
class RankAssignment:
    """Launchers in the order of their machines' places; the first one's first worker is rank 0."""

    launchers: tuple[StatusReport, ...]

    @classmethod
    def of(cls, reports: Iterable[StatusReport]) -> RankAssignment:
        """In the same order on all machines: the one that has waited longest comes first."""
        return cls(tuple(sorted(reports, key=lambda each: (-waited_of(each), each.key))))

    @property
    def roll(self) -> str:
        """Stands for who takes part, and with how many."""
        lines = [
            f"{each.node}:{each.incarnation}:{meeting_port_of(each)}:{workers_of(each)}"
            f":{waited_of(each)}\n"
            for each in self.launchers
        ]
        return hashlib.sha256("".join(lines).encode()).hexdigest()[:DIGITS]

    @property
    def world_size(self) -> int:
        """Workers of all."""
        return sum(map(workers_of, self.launchers))

    @property
    def is_local(self) -> bool:
        """Whether all are on one machine."""
        return len({each.node for each in self.launchers}) == 1

    def first_rank(self, key: tuple[str, int]) -> tuple[int, int]:
        """Of a launcher: its place among the launchers, and the rank of its first worker."""
        before = 0
        for place, each in enumerate(self.launchers):
            if each.key == key:
                return place, before
            before += workers_of(each)
        msg = f"{key} is not in the crew"
        raise KeyError(msg)


class ParticipantLists:
    """What was said about who takes part, by us and by the others."""

    def __init__(self) -> None:
        self._said: dict[str, RankAssignment] = {}
        self._current = ""

    def call(self, here: Sequence[StatusReport]) -> str:
        """The roll of those who are here; empty where scripts already run, whose ranks change."""
        self._current = ""
        if all(report.role == "launcher" for report in here):
            crew = RankAssignment.of(here)
            self._current = crew.roll
            self._said[self._current] = crew
        return self._current

    def agreed(self, others: Sequence[StatusReport]) -> RankAssignment | None:
        """The launchers that take part, once all have said so, or one has begun that had seen it.

        >>> desk, attic = (StatusReport(node=name, incarnation=1, role="launcher") for name in "da")
        >>> rolls = ParticipantLists()
        >>> roll = rolls.call([desk, attic])
        >>> rolls.agreed([attic]) is None
        True
        >>> told = StatusReport(node="a", incarnation=1, role="launcher", facts={"roll": roll})
        >>> [each.node for each in rolls.agreed([told]).launchers]
        ['a', 'd']
        """
        for report in others:
            if report.state == "starting" and report.facts.get(ROLL, "") in self._said:
                return self._said[report.facts[ROLL]]
        if self._current and all(each.facts.get(ROLL) == self._current for each in others):
            return self._said[self._current]
        return None


def environments(
    common: Mapping[str, str],
    me: StatusReport,
    crew: RankAssignment | None,
    master: str,
    ports: Sequence[int],
) -> list[dict[str, str]]:
    """The environment of each of our workers, in the words of torchrun.

    ``master`` is where rank 0's machine can be reached from here, and each worker has a port.
    Where others already run, ranks are for ``potluck.join()`` to find out.
    """
    count = len(ports)
    shared = {name: value for name, value in common.items() if name not in RANKED}
    shared |= {"LOCAL_WORLD_SIZE": str(count)}
    if count > 1:
        each = max(1, (os.cpu_count() or 1) // count)  # or they would fight for the processors
        shared = {"OMP_NUM_THREADS": str(each), "PYTHONUNBUFFERED": "1", **shared}
    first = 0
    if crew is not None:
        place, first = crew.first_rank(me.key)
        shared |= {
            "WORLD_SIZE": str(crew.world_size),
            "GROUP_RANK": str(place),
            "GROUP_WORLD_SIZE": str(len(crew.launchers)),
            "MASTER_ADDR": LOOPBACK if crew.is_local else master,
            "MASTER_PORT": str(meeting_port_of(crew.launchers[0])),
        }
    made = []
    for local, port in enumerate(ports):
        own = {**shared, "LOCAL_RANK": str(local), "POTLUCK_PORT": str(port)}
        if crew is not None:
            own["RANK"] = str(first + local)
        made.append(own)
    return made


# --------------------------------------------------------------------------------------------------
# What the workers of a run print: line by line, each with the rank it is from.
#
# What a worker writes to its standard error is also remembered for a while: if it fails, its
# traceback is shown once more, where one looks for it.

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


class OutputReader:
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
        """Wait until everything has been read; processes of the worker may still write."""
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


# --------------------------------------------------------------------------------------------------
# How a script of a run has ended: what it left as last words, and the memory that it had.

OUTCOME, CAUSE, AFTER = "outcome", "cause", "after"
"""What launchers tell each other at the end."""

OK, STOPPED, RUNNING, UNKNOWN = "ok", "stopped", "still running", "not heard from"
"""Outcomes; others are "failed", "interrupted" and "killed by SIGKILL"."""

_LARGEST = 4 * (MOST_TRACEBACK + 4 * MOST)
"""Bytes of last words that are read: JSON may escape every letter."""

_Text = Annotated[str, msgspec.Meta(max_length=MOST)]
_Place = Annotated[str, msgspec.Meta(max_length=MOST + 20)]


class ScriptError(msgspec.Struct, frozen=True):
    """What a script that ended by an exception says of it."""

    kind: _Text
    message: _Text
    where: _Place
    is_second_hand: bool
    traceback: Annotated[Lines, msgspec.Meta(max_length=MOST_TRACEBACK)]

    @classmethod
    def read(cls, file: Path) -> ScriptError | None:
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
class ScriptExit:
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

        >>> str(ScriptExit("killed by SIGKILL", seconds=12.3)), str(ScriptExit("ok", seconds=3.0))
        ('killed by SIGKILL after 12 s', 'ok')
        """
        if self.outcome in {OK, RUNNING, UNKNOWN}:
            return self.outcome
        return f"{self.outcome} after {duration(self.seconds)}"

    def facts(self) -> dict[str, str]:
        """As a launcher tells it."""
        return {OUTCOME: self.outcome, CAUSE: self.cause, AFTER: f"{self.seconds:.1f}"}

    @classmethod
    def of(cls, facts: Mapping[str, str]) -> ScriptExit:
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


class MemoryUse:
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
        used = max(self._used, _platform.peak_memory_of_children())
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


def cause_of_death(number: int, memory: MemoryUse) -> str:
    """In words, for a script that a signal has ended."""
    text = f"killed by {signal.Signals(number).name}"
    return f"{text}; {memory.words()}" if number == _platform.SIGKILL else text


# --------------------------------------------------------------------------------------------------
# The launchers of a run stay in touch while their scripts run: each learns how the others ended.
#
# They meet on ports of their own, which they told each other before the scripts began, and are
# announced to no other process.  What they tell is bounded and cleaned like every report.

FAREWELL = 3.0
"""Seconds to wait at the end for how the others ended, and for a cause where none is known."""

EARLY = 3.0
"""Seconds after which one that ended before the others is worth a line."""

LOOK_EVERY = 0.05


@dataclass
class _Machine:
    """A machine of the run, as this one sees it."""

    label: str
    ending: ScriptExit | None = None
    arguments: str = ""
    ended_at: float = 0.0
    is_connected: bool = False
    was_connected: bool = False
    is_told: bool = False
    """Whether a line has said how it ended."""
    was_restarted: bool = False


@dataclass
class Participants:
    """Who takes part, and how each has ended so far; used by one thread."""

    me: str
    """What this machine is called."""
    json: bool = False
    output: Output = field(default_factory=lambda: Output(sys.stderr))
    own_id: str = ""
    order: Sequence[str] = ()
    """The ids of all launchers by rank, ours included; those that come later follow."""
    observer: Observer | None = None
    _others: dict[str, _Machine] = field(default_factory=dict)
    _began: float = field(default_factory=time.monotonic)
    _mine: ScriptExit | None = None
    _former: set[str] = field(default_factory=set)  # launchers whose machines have another one now

    def expect(self, others: Mapping[str, str]) -> None:
        """Others that begin with us: their launchers' ids, and what they are called."""
        self._others = {key: _Machine(label) for key, label in others.items()}

    @property
    def seconds(self) -> float:
        """Since the script began."""
        return time.monotonic() - self._began

    # -- words -----------------------------------------------------------------------------------

    def say(self, text: str, *, grave: bool = False) -> None:
        """One line on standard error."""
        if self.json:
            line = msgspec.json.encode({"error" if grave else "note": text}).decode()
        else:
            line = f"potluck: {text}"
        self.output.say(line)

    def tell(self, ending: ScriptExit) -> None:
        """Tell the others how we ended; what is known later may be told again.

        The time stays: all machines then say the same.
        """
        if self._mine is not None:
            ending = replace(ending, seconds=self._mine.seconds)
        self._mine = ending
        if self.observer is not None:
            self.observer.tell(STOPPING, **ending.facts())

    # -- the others ------------------------------------------------------------------------------

    def look(self) -> None:
        """Learn how others ended, and say so, one line for each that failed."""
        if self.observer is None:
            return
        connected = self.observer.reports
        present = {each.facts.get(LAUNCHER, "") for each in connected}
        for key, each in self._others.items():
            each.is_connected = key in present
        for report in [*self.observer.parted, *connected]:
            self._take(report, is_connected=report in connected)
        for machine in self._others.values():
            self._mention(machine)

    def _take(self, report: StatusReport, *, is_connected: bool) -> None:
        key = report.facts.get(LAUNCHER, "")
        if report.role != "launcher" or report.job != self.observer_job or not key:
            return
        if key in self._former:
            return
        if key not in self._others:
            self._others[key] = _Machine(report.name or report.node[:8])
            self._replace_former(key)
        machine = self._others[key]
        machine.is_connected = machine.is_connected or is_connected
        machine.was_connected = True
        machine.arguments = report.facts.get("arguments", "")
        if report.facts.get(OUTCOME):
            machine.ended_at = machine.ended_at or time.monotonic()
            machine.ending = ScriptExit.of(report.facts)

    def _replace_former(self, key: str) -> None:
        """A machine whose script was started again is one machine: its earlier launcher is over."""
        node = key.partition(":")[0]
        for old, each in list(self._others.items()):
            is_over = each.ending is not None or not each.is_connected
            if old != key and old.partition(":")[0] == node and is_over:
                self._former.add(old)
                del self._others[old]
                self._others[key].was_restarted = True
                self.order = [key if known == old else known for known in self.order]

    @property
    def observer_job(self) -> str:
        """The job of the run."""
        return "" if self.observer is None else self.observer.job or ""

    def _mention(self, machine: _Machine) -> None:
        ending = machine.ending
        if ending is None or machine.is_told:
            return
        if ending.is_cause:
            machine.is_told = True
            self.say(f"{machine.label}: {ending.cause}", grave=True)
        elif ending.is_ok and self._mine is None and time.monotonic() > machine.ended_at + EARLY:
            machine.is_told = True
            self.say(f"{machine.label}: its script has ended (ok), this machine's still runs.")

    @property
    def _is_over(self) -> bool:
        """Whether all have ended; one that was in touch and is no more has no last word to say."""
        return all(
            each.ending is not None or (each.was_connected and not each.is_connected)
            for each in self._others.values()
        )

    def cause(self) -> str:
        """Why another rank is lost, waiting a moment for its machine to say so; empty if unknown.

        The line itself has been said then.
        """
        deadline = time.monotonic() + FAREWELL
        while True:
            self.look()
            ended = [each for each in self._others.values() if each.ending is not None]
            for each in ended:
                if each.ending is not None and each.ending.is_cause:
                    return each.label
            if self._is_over or time.monotonic() >= deadline:
                early = [each for each in ended if each.ending is not None and each.ending.is_ok]
                return self._blame_early(early[0]) if early else ""
            time.sleep(LOOK_EVERY)

    def _blame_early(self, machine: _Machine) -> str:
        if not machine.is_told:
            machine.is_told = True
            text = f"{machine.label}: its script ended without an error while others needed it."
            if self.observer is not None:
                mine = self.observer.own_report().facts.get("arguments", "")
                if mine != machine.arguments:
                    text = (
                        f"{text[:-1]}; its arguments differ "
                        f"({machine.label}: {machine.arguments or 'none'}; "
                        f"{self.me}: {mine or 'none'})."
                    )
            self.say(text, grave=True)
        return machine.label

    def conclude(self) -> None:
        """Wait a moment for the others to end, and say in one line who ended how."""
        if not self._others or self._mine is None:
            return
        deadline = time.monotonic() + FAREWELL
        self.look()
        while not self._is_over and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)
            self.look()
        parts = {self.own_id: f"{self.me} {self._mine}"}
        for key, each in self._others.items():
            again = " (restarted)" if each.was_restarted else ""
            parts[key] = f"{each.label} {self._state_of(each)}{again}"
        keys = [key for key in self.order if key in parts]
        keys += [key for key in parts if key not in keys]
        self.say(f"Finished: {', '.join(parts[key] for key in keys)}.")

    @staticmethod
    def _state_of(machine: _Machine) -> ScriptExit:
        if machine.ending is not None:
            return machine.ending
        return ScriptExit(RUNNING if machine.is_connected else UNKNOWN)


@contextlib.contextmanager
def open_company(
    company: Participants, config: AutoDiscoveryConfig, facts: Mapping[str, str], *, port: int
) -> Iterator[Participants]:
    """Stay in touch with the launchers at the addresses in ``config`` while a script runs."""
    quiet = replace(config, port=port, multicast=False, neighbours=False, known=False)
    with contextlib.ExitStack() as stack:
        try:
            company.observer = Observer(quiet, job=config.job, facts=facts)
        except DistributedError:  # the port was taken meanwhile: the others can still be dialled
            company.observer = Observer(replace(quiet, port=None), job=config.job, facts=facts)
        stack.enter_context(company.observer)
        company.observer.tell("running")
        yield company
