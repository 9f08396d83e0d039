"""The demo's plot: nodes meet and train, one is killed, the others go on, it comes back.

The story only gives orders and listens; bytes between nodes never pass through here.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import math
import os
import queue
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol, Self, TypeAlias

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from potluck._process import Closing
from potluck.apps.cli.demo_messages import (
    Begun,
    Committed,
    Failed,
    Finish,
    Finished,
    Happened,
    Leave,
    LinkLine,
    Listening,
    Meet,
    News,
    Order,
    Progress,
    Setup,
    Unfound,
    decode_news,
    encode_line,
)
from potluck.errors import DistributedError, PeerLost, Timeout

# --------------------------------------------------------------------------------------------------
# The demo's processes: started, told what to do, listened to, and gone at the end.

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


# --------------------------------------------------------------------------------------------------
# What is known while the demo runs: its nodes, what they told, and what happened when.

STORY, UNDISTURBED = "story", "undisturbed"
"""The two runs of a demo."""

GOING = {"training", "done"}
"""States in which a node takes part."""


@dataclass(eq=False)
class Actor:
    """One node in its present start."""

    name: str
    process: NodeProcess
    """Its present start."""
    state: str = "starting"
    started_at: float = 0.0
    reason: str = ""
    """Why it is as it is, in the words of the others."""
    place: Listening | None = None
    unfound: Unfound | None = None
    begun: Begun | None = None
    progress: Progress | None = None
    happened: list[Happened] = field(default_factory=list)
    committed: list[Committed] = field(default_factory=list)
    finished: dict[str, Finished] = field(default_factory=dict)

    def first(self, kind: str, fits: Callable[[Happened], bool]) -> Happened | None:
        """The first event of a kind that fits."""
        return next((each for each in self.happened if each.kind == kind and fits(each)), None)


@dataclass(frozen=True)
class Link:
    """A pair of nodes and what is between them."""

    ends: tuple[str, str]
    round_trip: float | None
    rate: int
    """Bytes per second that can go from one to the other; 0 where nobody has measured."""
    is_limit: bool = True
    """Whether it allows no more; within one machine nothing is a limit."""


@dataclass
class Scene:
    """Everything the audience may see."""

    actors: list[Actor]
    steps: int
    began: float = field(default_factory=time.monotonic)
    found_by: str = ""
    run: str = STORY
    losses: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    marks: list[tuple[int, str]] = field(default_factory=list)
    """Steps of the story at which something happened, each with a sign."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the beginning, and a sentence."""
    names: dict[str, str] = field(default_factory=dict)
    """Of processes."""

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    @property
    def progress(self) -> Progress | None:
        """The latest of all nodes that take part."""
        told = [each.progress for each in self.actors if each.progress and each.state in GOING]
        return max(told, key=lambda each: (each.run == self.run, each.step), default=None)

    @property
    def speed(self) -> float:
        """Steps per second, as all nodes of the run see it together."""
        told = [each.progress for each in self.actors if each.progress and each.state in GOING]
        speeds = [each.speed for each in told if each.run == self.run]
        return sum(speeds) / max(1, len(speeds))

    @property
    def averaged(self) -> int:
        """Bytes that went through the collectives of a node that was there all the time."""
        return max((each.progress.averaged for each in self.actors if each.progress), default=0)

    def recast(self, actor: Actor, process: NodeProcess) -> Actor:
        """Another start of the same node: nothing of the last one holds any more."""
        place = self.actors.index(actor)
        self.actors[place] = Actor(
            actor.name, process, "starting again", time.monotonic(), actor.reason
        )
        return self.actors[place]

    def receive(self, actor: Actor, news: News) -> None:
        """Take note of what a node tells."""
        match news:
            case Listening():
                actor.place = news
                self.names[news.process] = actor.name
                actor.state = "looking around"
            case Unfound():
                actor.unfound = news
            case Begun():
                actor.begun, actor.state, actor.reason = news, "training", ""
            case Progress():
                actor.progress = news
                self._note_loss(news)
            case Happened():
                actor.happened.append(news)
            case Committed():
                actor.committed.append(news)
            case Finished():
                actor.finished[news.run] = news
                if news.run == UNDISTURBED:
                    actor.state = "done"

    def _note_loss(self, news: Progress) -> None:
        curve = self.losses.setdefault(news.run, [])
        if not curve or news.step > curve[-1][0]:
            curve.append((news.step, news.loss))

    def links(self) -> Iterator[Link]:
        """Every pair of nodes that take part, with the longest round trip either has measured."""
        going = [each for each in self.actors if each.progress and each.state in GOING]
        for place, one in enumerate(going):
            for other in going[place + 1 :]:
                seen = [*self._seen(one, other), *self._seen(other, one)]
                trips = [line.round_trip for line in seen if line.round_trip is not None]
                assert one.progress is not None
                assert other.progress is not None
                pair = one.progress, other.progress
                rate = min(min(each.up, each.down) for each in pair)
                is_limit = any(each.is_limit for each in pair)
                yield Link((one.name, other.name), max(trips, default=None), rate, is_limit)

    def _seen(self, actor: Actor, other: Actor) -> Iterator[LinkLine]:
        assert actor.progress is not None
        for line in actor.progress.links:
            if other.place is not None and line.process == other.place.process:
                yield line

    def health(self, actor: Actor) -> LinkLine | None:
        """The worst that any other says of a node, as ``potluck status`` shows it."""
        order = ("healthy", "degraded", "suspect", "dead")
        lines = [
            line
            for other in self.actors
            if other is not actor and other.progress is not None and other.state in GOING
            for line in self._seen(other, actor)
        ]
        return max(
            lines,
            key=lambda line: order.index(line.status) if line.status in order else 0,
            default=None,
        )


def words(names: list[str]) -> str:
    """A list as people say it.

    >>> words(["basil", "thyme", "sage"])
    'basil, thyme and sage'
    """
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


# --------------------------------------------------------------------------------------------------
# Who works behind the demo: starts the nodes, passes on orders, listens, and ends everybody.
#
# Every wait has a deadline, and a process that ends unasked ends the demo with an error that says
# so.

NAMES = "basil thyme sage mint dill chive fennel cumin anise clove ginger sesame".split()

LASTING, SLOWEST, FASTEST = 8.0, 10.0, 30.0
"""Seconds that the story should last if nothing happens, so that people can watch, and the steps
per second that this may mean; the undisturbed run has no such limit."""

REFRESH = 0.05
"""Seconds between two looks of the audience."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for."""

    nodes: int = 3
    steps: int = 240
    seed: int = 0
    kill: int | None = None
    """The rank in the first view; None kills nobody."""
    seconds: float = 110.0
    """The demo gives up after that time."""
    multicast: bool = True


class Audience(Protocol):
    """Who watches."""

    def say(self, seconds: float, sentence: str, *, grave: bool = False) -> None:
        """Something happened, so many seconds after the beginning."""

    def show(self, scene: Scene) -> None:
        """This is how things stand; called often."""


class Crew(Closing):
    """The processes of one demo; a context manager that leaves none of them and no file behind."""

    def __init__(self, settings: Settings, audience: Audience) -> None:
        self.settings = settings
        self.scene = Scene([], settings.steps)
        self.addresses: list[str] = []
        """Where the nodes are, once they had to be told."""
        self._audience = audience
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._secret = secrets.token_hex(32)
        self._processes: list[NodeProcess] = []
        self._may_end: set[NodeProcess] = set()
        # Keys and notes of its own, for a moment: nothing of this machine's user is touched.
        self._home = tempfile.TemporaryDirectory(prefix="potluck-demo-", ignore_cleanup_errors=True)
        self._deadline = self.scene.began + settings.seconds

    def __enter__(self) -> Self:
        """Start the nodes."""
        try:
            for number in range(self.settings.nodes):
                name = NAMES[number] if number < len(NAMES) else f"node-{number}"
                actor = Actor(name, self._start(name), started_at=time.monotonic())
                self.scene.actors.append(actor)
        except BaseException:
            self.close()
            raise
        return self

    def close(self) -> None:
        """End every process."""
        with signals_held():  # of two Ctrl-C in a row the second does not stop this
            for process in self._processes:
                process.kill()  # all of them first: no other waits for one that is slow to go
            for process in self._processes:
                process.close()
            self._home.cleanup()

    # -- processes -----------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        """Of all processes that were started."""
        return [process.pid for process in self._processes]

    def _start(self, name: str) -> NodeProcess:
        settings = self.settings
        with signals_held():
            process = NodeProcess(name, Path(self._home.name, name), self._events)
            self._processes.append(process)
        process.order(
            Setup(
                name=name,
                secret=self._secret,
                nodes=settings.nodes,
                seed=settings.seed,
                steps=settings.steps,
                pace=1 / min(FASTEST, max(SLOWEST, settings.steps / LASTING)),
                multicast=settings.multicast,
                peers=self.addresses,
            )
        )
        return process

    def kill(self, actor: Actor) -> float:
        """End a node without a warning; when that was."""
        self._may_end.add(actor.process)
        actor.state = "killed"
        now = time.monotonic()
        actor.process.kill()
        return now

    def restart(self, actor: Actor) -> Actor:
        """Start a node again, with the keys it had."""
        return self.scene.recast(actor, self._start(actor.name))

    def order(self, order: Order) -> None:
        """Tell all nodes something."""
        for actor in self.scene.actors:
            actor.process.order(order)

    def let_go(self) -> None:
        """From now on any node may end."""
        self._may_end.update(self._processes)

    # -- what happens --------------------------------------------------------------------------

    def say(self, sentence: str, *, grave: bool = False) -> None:
        """Tell the audience, and keep it for the report."""
        seconds = self.scene.seconds
        self.scene.events.append((round(seconds, 3), sentence))
        self._audience.say(seconds, sentence, grave=grave)

    def wait_for(
        self, group: Sequence[Actor], ready: Callable[[Actor], object], limit: float, what: str
    ) -> None:
        """Listen until something holds for everybody of a group; raises ``Timeout``."""
        began = time.monotonic()
        deadline = min(began + limit, self._deadline)
        while missing := [actor.name for actor in group if not ready(actor)]:
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"{words(missing)} did not {what} within {deadline - began:.0f} s",
                    seconds=deadline - began,
                    hint="This machine may be too busy; try fewer nodes, or more --seconds.",
                )
            self._listen()

    def _listen(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._receive(*self._events.get(timeout=REFRESH))
            while True:
                self._receive(*self._events.get_nowait())
        self._audience.show(self.scene)

    def _receive(self, process: NodeProcess, news: News | None) -> None:
        if news is None:
            process.ended = True
            if process not in self._may_end:
                raise process.explain_end()
        elif isinstance(news, Failed):
            raise process.explain_end(news)
        else:
            for actor in self.scene.actors:
                if actor.process is process:
                    self.scene.receive(actor, news)


# --------------------------------------------------------------------------------------------------
# What the demo found out, for machines and for people.


class Killed(msgspec.Struct, frozen=True):
    """The node that was killed."""

    name: str
    rank: int
    pid: int
    step: int
    """How far training had come."""


class Noticed(msgspec.Struct, frozen=True):
    """How a survivor learned of it."""

    name: str
    milliseconds: float
    """From the kill to the moment it knew."""
    sentence: str
    """In the words of the log."""


class Agreed(msgspec.Struct, frozen=True):
    """The view without the killed node."""

    epoch: int
    milliseconds: float
    """From the kill to the moment the last survivor was in it."""
    sentence: str


class Resumed(msgspec.Struct, frozen=True):
    """The first step without it."""

    step: int
    milliseconds: float


class Returned(msgspec.Struct, frozen=True):
    """How the killed node came back."""

    name: str
    pid: int
    epoch: int
    step: int
    """From which it went on."""
    seconds: float
    """From the start of its process to its readiness."""
    state_bytes: int
    state_seconds: float


class Run(msgspec.Struct, frozen=True):
    """How one of the two trainings ended."""

    steps: int
    loss: float
    """Over all points."""
    noise: float
    """How far apart the losses of the last batches were."""
    accuracy: float
    """On points that were not trained on."""
    fingerprints: dict[str, str]
    """Of the parameters, for each node."""
    samples: float
    missing_samples: float
    """Between what the sampler says has counted, and what went into steps: 0 if all is well."""
    seconds: float

    @classmethod
    def of(cls, ends: dict[str, Finished]) -> Run:
        """From what every node told at the end."""
        first = next(iter(ends.values()))
        counted = [end.weight for end in ends.values() if end.weight]
        return cls(
            steps=first.step,
            loss=first.loss,
            noise=max(end.wobble for end in ends.values()),
            accuracy=first.accuracy,
            fingerprints={name: end.fingerprint for name, end in ends.items()},
            samples=first.samples,
            missing_samples=max((abs(first.samples - each) for each in counted), default=0.0),
            seconds=max(end.seconds for end in ends.values()),
        )

    @property
    def is_identical(self) -> bool:
        """Whether all nodes ended with the same parameters, bit for bit."""
        return len(set(self.fingerprints.values())) == 1


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Everything, in the order in which it happened."""

    nodes: list[str]
    seed: int
    found_by: str
    meeting_seconds: float
    killed: Killed | None = None
    noticed: list[Noticed] = []
    agreed: Agreed | None = None
    resumed: Resumed | None = None
    returned: Returned | None = None
    story: Run
    undisturbed: Run
    losses: dict[str, list[tuple[int, float]]]
    """(step, mean loss over the batch) of both runs, some ten for each second."""
    averaged_bytes: int
    """Bytes of arrays that went through the collectives of one node."""
    view: int
    """The number of the last one."""
    events: list[tuple[float, str]]
    """Seconds since the beginning, and a sentence."""
    pids: list[int]
    """Of all processes that were started."""
    seconds: float

    @property
    def difference(self) -> float:
        """Between the losses at the end of the two runs."""
        return abs(self.story.loss - self.undisturbed.loss)

    @property
    def noise(self) -> float:
        """What such a difference may be by chance: as much as the last batches differed."""
        return max(self.story.noise, self.undisturbed.noise)

    @property
    def problems(self) -> list[str]:
        """Why the story did not hold; empty if it did."""
        found = []
        for what, run in (("the story", self.story), ("the undisturbed run", self.undisturbed)):
            if not run.is_identical:
                found.append(f"the parameters after {what} differ: {run.fingerprints}")
            if run.missing_samples:
                found.append(
                    f"{run.missing_samples:,.0f} samples of {what} were lost or counted twice"
                )
        if self.difference > self.noise:
            found.append(
                f"the losses differ by {self.difference:.4f}, which is more than "
                f"the {self.noise:.4f} between single batches"
            )
        return found

    def to_json(self) -> bytes:
        """For machines; the verdict is in it too."""
        fields: dict[str, Any] = {
            **msgspec.to_builtins(self),
            "identical": self.story.is_identical and self.undisturbed.is_identical,
            "difference": self.difference,
            "noise": self.noise,
            "problems": self.problems,
            "held": not self.problems,
        }
        return msgspec.json.format(msgspec.json.encode(fields))

    def sentences(self) -> Iterator[str]:
        """For people."""
        story, plain = self.story, self.undisturbed
        yield from self._disturbance()
        yield (
            f"Loss after {story.steps:,} steps: {story.loss:.4f}; undisturbed {plain.loss:.4f}. "
            f"They differ by {self.difference:.4f}, single batches by up to {self.noise:.4f}."
        )
        yield (
            f"{story.samples:,.0f} samples counted, each once per epoch; "
            f"{story.accuracy:.1%} of unseen points are put on the right spiral."
        )
        yield (
            f"{self.averaged_bytes / 1e6:,.0f} MB went through the collectives of each node; "
            f"undisturbed and at full speed it was {plain.steps / plain.seconds:,.0f} steps/s."
        )
        if story.is_identical and plain.is_identical:
            print_of = next(iter(story.fingerprints.values()))
            count = len(self.nodes)
            who = f"All {count} nodes" if count > 2 else "Both nodes"  # noqa: PLR2004 - there are two
            yield f"{who} hold the same parameters, bit for bit ({print_of})."
        for problem in self.problems:
            yield f"The story did not hold: {problem}."

    def _disturbance(self) -> Iterator[str]:
        killed, agreed, resumed, back = self.killed, self.agreed, self.resumed, self.returned
        if killed is None or agreed is None or resumed is None or back is None:
            return
        slowest = max(each.milliseconds for each in self.noticed)
        yield (
            f"{killed.name} was killed at step {killed.step:,}. All others knew within "
            f"{slowest:.1f} ms, agreed on view {agreed.epoch} after {agreed.milliseconds:.0f} ms "
            f"and committed the next step after {resumed.milliseconds:.0f} ms."
        )
        yield (
            f"{back.name} came back {back.seconds:.1f} s after its start, got "
            f"{back.state_bytes / 1e6:.1f} MB of state in {back.state_seconds:.2f} s "
            f"and went on from step {back.step:,}."
        )


# --------------------------------------------------------------------------------------------------

BEFORE, AWAY, TOGETHER = 4, 16, 24
"""One of so many parts of all steps is made before somebody is killed, before it is started again,
so that one sees the others go on, and with it before the story may end; at least three steps."""

MEETING, NOTICING, AGREEING, LEAVING = 60.0, 15.0, 30.0, 10.0
"""Seconds for an act, on a machine that has much else to do."""

TRAINING = 3600.0
"""Seconds for acts that take as long as they take; --seconds ends them."""

NO_MULTICAST = (
    "Multicast DNS finds nobody here (`potluck doctor` looks for reasons), so the nodes are told "
    "each other's addresses, as with --peer."
)
NOT_ASKED = "Without multicast the nodes are told each other's addresses, as with --peer."


class Story:
    """Runs the demo once."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._scene = crew.scene
        self._settings = crew.settings

    def run(self) -> Report:
        """The whole plot."""
        crew, scene = self._crew, self._scene
        names = words([actor.name for actor in scene.actors])
        crew.say(f"{names} start, each in a process and with keys of its own.")
        meeting = self._meet()
        kill = self._settings.kill
        disturbance = {} if kill is None else self._disturb(self._ranked()[kill])
        crew.order(Finish())
        story = self._await_run(STORY)
        crew.say(f"The story ends after step {story.steps:,} with a loss of {story.loss:.4f}.")
        crew.say("The same once more, undisturbed and at full speed, to compare.")
        scene.run = UNDISTURBED
        plain = self._await_run(UNDISTURBED)
        crew.say(f"Undisturbed it ends with a loss of {plain.loss:.4f}.")
        self._leave()
        return Report(
            nodes=[actor.name for actor in scene.actors],
            seed=self._settings.seed,
            found_by=scene.found_by,
            meeting_seconds=meeting,
            **disturbance,
            story=story,
            undisturbed=plain,
            losses=scene.losses,
            averaged_bytes=max(actor.finished[STORY].averaged for actor in scene.actors),
            view=max(actor.progress.epoch for actor in scene.actors if actor.progress),
            events=scene.events,
            pids=crew.pids,
            seconds=scene.seconds,
        )

    def _disturb(self, victim: Actor) -> dict[str, Any]:
        """Kill somebody, see what the others do, and bring it back."""
        killed, killed_at = self._kill(victim)
        noticed = self._await_notice(victim, killed_at)
        agreed = self._await_agreement(killed_at)
        resumed = self._await_next_step(agreed, killed_at)
        self._await_step(self._survivors[0], resumed.step + self._part(AWAY), "go on")
        returned = self._bring_back(victim)
        return {
            "killed": killed,
            "noticed": noticed,
            "agreed": agreed,
            "resumed": resumed,
            "returned": returned,
        }

    # -- the acts ------------------------------------------------------------------------------

    def _meet(self) -> float:
        """Wait until all train; give them addresses if multicast leads nowhere."""
        crew, scene = self._crew, self._scene

        def trains(actor: Actor) -> bool:
            if not crew.addresses and all(each.unfound and each.place for each in scene.actors):
                places = [each.place for each in scene.actors if each.place]
                crew.addresses = [f"127.0.0.1:{place.port}" for place in places]
                crew.say(NO_MULTICAST if self._settings.multicast else NOT_ASKED)
                crew.order(Meet(crew.addresses))
            return actor.progress is not None

        crew.wait_for(scene.actors, trains, MEETING, "find the others")
        begun = [actor.begun for actor in scene.actors if actor.begun]
        seconds = max(each.at for each in begun) - scene.began
        scene.found_by = "addresses" if crew.addresses else "multicast DNS"
        ranked = words([actor.name for actor in self._ranked()])
        crew.say(
            f"They found each other by {scene.found_by} and agreed on view "
            f"{max(each.epoch for each in begun)} after {seconds:.1f} s: {ranked} train one model."
        )
        return seconds

    def _kill(self, victim: Actor) -> tuple[Killed, float]:
        self._await_step(victim, self._part(BEFORE), "train")
        assert victim.progress is not None
        step, rank, pid = victim.progress.step, victim.progress.rank, victim.process.pid
        now = self._crew.kill(victim)
        self._scene.marks.append((step, "✕"))
        self._crew.say(f"{victim.name} (pid {pid}) is killed at step {step:,}.", grave=True)
        return Killed(victim.name, rank, pid, step), now

    def _await_notice(self, victim: Actor, killed_at: float) -> list[Noticed]:
        gone = victim.place.process if victim.place else ""

        def notice(actor: Actor) -> Happened | None:
            """What it saw itself; or what the others told it first, by going on."""
            lost = actor.first("lost", lambda each: each.about == gone)
            return lost or actor.first("installed", lambda each: each.at > killed_at)

        self._crew.wait_for(self._survivors, notice, NOTICING, "notice the loss")
        noticed = [
            Noticed(actor.name, (told.at - killed_at) * 1000, told.sentence)
            for actor in self._survivors
            if (told := notice(actor))
        ]
        noticed.sort(key=lambda each: each.milliseconds)
        times = [f"{each.name} after {each.milliseconds:.1f} ms" for each in noticed]
        victim.reason = noticed[0].sentence
        self._crew.say(f"Noticed by {words(times)}: {noticed[0].sentence}.")
        return noticed

    def _await_agreement(self, killed_at: float) -> Agreed:
        def view(actor: Actor) -> Happened | None:
            return actor.first("installed", lambda each: each.at > killed_at)

        self._crew.wait_for(self._survivors, view, AGREEING, "agree on a view")
        last = max(filter(None, map(view, self._survivors)), key=lambda each: each.at)
        agreed = Agreed(last.epoch, (last.at - killed_at) * 1000, last.sentence)
        self._crew.say(f"Agreed after {agreed.milliseconds:.0f} ms on {agreed.sentence}.")
        return agreed

    def _await_next_step(self, agreed: Agreed, killed_at: float) -> Resumed:
        def commit(actor: Actor) -> Committed | None:
            return next((c for c in actor.committed if c.epoch >= agreed.epoch), None)

        self._crew.wait_for(self._survivors, commit, AGREEING, "go on")
        last = max(filter(None, map(commit, self._survivors)), key=lambda each: each.at)
        resumed = Resumed(last.step, (last.at - killed_at) * 1000)
        self._crew.say(
            f"Step {resumed.step:,} is committed by those who are left, "
            f"{resumed.milliseconds:.0f} ms after the kill."
        )
        return resumed

    def _bring_back(self, victim: Actor) -> Returned:
        crew = self._crew
        actor = crew.restart(victim)
        crew.say(f"{actor.name} is started again (pid {actor.process.pid}).")
        crew.wait_for([actor], lambda each: each.begun, MEETING, "come back")
        begun = actor.begun
        assert begun is not None
        back = Returned(
            name=actor.name,
            pid=actor.process.pid,
            epoch=begun.epoch,
            step=begun.step,
            seconds=begun.at - actor.started_at,
            state_bytes=begun.received,
            state_seconds=begun.syncing,
        )
        self._scene.marks.append((back.step, "↑"))
        crew.say(
            f"{back.name} is back, in view {back.epoch}: {back.state_bytes / 1e6:.1f} MB of state "
            f"came in {back.state_seconds:.2f} s; it goes on from step {back.step:,}."
        )
        self._await_step(actor, back.step + self._part(TOGETHER), "catch up")
        return back

    def _await_step(self, actor: Actor, step: int, what: str) -> None:
        def is_there(each: Actor) -> bool:
            return each.progress is not None and each.progress.step >= step

        self._crew.wait_for([actor], is_there, TRAINING, what)

    def _await_run(self, run: str) -> Run:
        actors = self._scene.actors
        self._crew.wait_for(actors, lambda each: run in each.finished, TRAINING, "finish")
        return Run.of({actor.name: actor.finished[run] for actor in actors})

    def _leave(self) -> None:
        self._crew.let_go()
        self._crew.order(Leave())
        ended = self._scene.actors
        self._crew.wait_for(ended, lambda actor: actor.process.ended, LEAVING, "leave")

    def _part(self, of: int) -> int:
        return max(3, self._settings.steps // of)

    # -- who -----------------------------------------------------------------------------------

    @property
    def _survivors(self) -> list[Actor]:
        return [actor for actor in self._scene.actors if actor.state != "killed"]

    def _ranked(self) -> list[Actor]:
        """In the order of ranks."""
        return sorted(
            self._scene.actors, key=lambda each: each.progress.rank if each.progress else -1
        )


# --------------------------------------------------------------------------------------------------
# The demo's picture: nodes, links and curves, for a terminal of 80 columns and more.

STYLES = {
    **dict.fromkeys(("training", "healthy"), "green"),
    "done": "bold green",
    **dict.fromkeys(("killed", "dead"), "bold red"),
    **dict.fromkeys(
        ("degraded", "suspect", "starting", "starting again", "looking around"), "yellow"
    ),
}

BARS = "▁▂▃▄▅▆▇█"
CURVE_WIDTH = 48
TINY = 1e-6
"""No loss is drawn as less."""

FIGURES = ("step", "share", "averaged", "rate")

MOST_LINKS = 6
"""Links that are listed; of more, the slowest."""


def sparkline(points: Sequence[tuple[int, float]], last: int, low: float, high: float) -> str:
    """Values by step as a line of text, on a scale that several lines can share.

    >>> sparkline([(1, 4.0), (25, 2.0), (50, 0.0)], last=100, low=0.0, high=4.0)
    '████████████▄▄▄▄▄▄▄▄▄▄▄▄▁'
    """
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    columns: dict[int, str] = {}
    for step, value in points:
        columns[_column(step, last)] = BARS[int((min(max(value, low), high) - low) * scale)]
    line, bar = "", BARS[0]
    for column in range(max(columns, default=-1) + 1):
        bar = columns.get(column, bar)
        line += bar
    return line


def _column(step: int, last: int) -> int:
    return min(CURVE_WIDTH, step * CURVE_WIDTH // max(1, last))


def size(count: float) -> str:
    """Bytes for people.

    >>> size(800_000), size(98_765_432_100)
    ('0.8 MB', '98.8 GB')
    """
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"  # noqa: PLR2004


def table(left: Sequence[str], right: Sequence[str] = ()) -> Table:
    """An empty table with columns that begin on the left, and columns of figures."""
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for title in left:
        made.add_column(title)
    for title in right:
        made.add_column(title, justify="right")
    return made


def picture(scene: Scene) -> Group:
    """Everything at a glance."""
    return Group(
        "",
        _nodes(scene),
        *_remarks(scene),
        "",
        *_links(scene),
        *_curves(scene),
        Text(_status(scene), "dim"),
    )


def _nodes(scene: Scene) -> Table:
    nodes = table(("rank", "node", "state", "health"), FIGURES)
    for actor in scene.actors:
        health = scene.health(actor)
        cells = (
            actor.name,
            actor.state,
            health.status if health and actor.state != "killed" else "",
        )
        progress = actor.progress
        is_going = progress is not None and actor.state != "killed"
        rank = str(progress.rank) if progress and is_going else "–"
        row = [Text(cell, STYLES.get(cell, "")) for cell in (rank, *cells)]
        nodes.add_row(*row, *_figures(actor))
    return nodes


def _figures(actor: Actor) -> Iterator[str]:
    if actor.progress is not None:
        yield f"{actor.progress.step:,}"
        yield str(actor.progress.share) if actor.state != "killed" else "–"
        yield size(actor.progress.averaged)
        yield f"{size(actor.progress.rate)}/s" if actor.state != "killed" else "–"


def _remarks(scene: Scene) -> Iterator[Text]:
    """What ``potluck status`` says of those who are not well."""
    for actor in scene.actors:
        if actor.reason:
            yield Text(actor.reason, "yellow")
        health = scene.health(actor)
        if health is not None and health.status != "healthy":
            yield Text(f"{actor.name} is {health.status}: {health.reason}", "yellow")


def _links(scene: Scene) -> Iterator[Table | Text]:
    found = sorted(scene.links(), key=lambda link: link.round_trip or 0.0, reverse=True)
    if not found:
        return
    shown = sorted(found[:MOST_LINKS], key=lambda link: link.ends)
    links = table(("link",), ("round trip", "rate"))
    for link in shown:
        links.add_row(*link_words(link))
    yield links
    if len(found) > len(shown):
        yield Text(f"and {len(found) - len(shown)} more, which are no slower", "dim")
    yield Text("")


def link_words(link: Link) -> tuple[str, str, str]:
    """Between whom, how long, and how much.

    >>> link_words(Link(("basil", "sage"), 0.0021, 118_000_000))
    ('basil – sage', '2.1 ms', '118 MB/s')
    """
    trip = "" if link.round_trip is None else f"{link.round_trip * 1e3:.1f} ms"
    rate = f"{link.rate / 1e6:.0f} MB/s" if link.is_limit else "not a limit"
    return " – ".join(link.ends), trip, rate if link.rate else ""


def _curves(scene: Scene) -> Iterator[Text]:
    """Both curves on one scale, and below them where somebody went and came."""
    # By magnitude: what a loss still gains when it is small would be flat otherwise.
    curves = {
        run: [(step, math.log(max(loss, TINY))) for step, loss in losses]
        for run, losses in scene.losses.items()
    }
    everything = [point for curve in curves.values() for point in curve]
    last = max([scene.steps, *(step for step, _ in everything)])
    values = [value for _, value in everything] or [0.0]
    for run, title in ((STORY, "loss"), (UNDISTURBED, "undisturbed")):
        losses = scene.losses.get(run, [])
        if losses or run == STORY:
            curve = sparkline(curves.get(run, []), last, min(values), max(values))
            now = f"{losses[-1][1]:.4f}" if losses else "…"
            style = "cyan" if run == STORY else "blue"
            yield Text.assemble(f"{title:<12}", (curve, style), f"  {now}")
    signs = [" "] * (CURVE_WIDTH + 1)
    for step, sign in scene.marks:
        signs[_column(step, last)] = sign
    yield Text(" " * 12 + "".join(signs).rstrip(), "bold red")


def _status(scene: Scene) -> str:
    progress = scene.progress
    if progress is None:
        return f"{scene.seconds:.1f} s"
    pace = ", slowed down to be watched" if progress.run == STORY else ", at full speed"
    return (
        f"view {progress.epoch} · step {progress.step:,} · {scene.speed:.0f} steps/s{pace} · "
        f"{scene.seconds:.1f} s"
    )


# --------------------------------------------------------------------------------------------------
# Where the demo is seen: live in a terminal, as plain lines elsewhere, not at all by machines.

LIVE_EVERY, PLAIN_EVERY = 0.1, 1.0
"""Seconds between two pictures."""


PLAIN_SIGNS = {**dict(zip(BARS, " .:-=+*#", strict=True)), "–": "-", "·": "|", "✕": "x", "↑": "^"}
"""What stands for a sign that a terminal cannot write."""


def speak_plainly(stream: object) -> None:
    """Let a stream write what it can where its encoding has no such signs, instead of failing."""
    codecs.register_error("potluck.plain", _plain)
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="potluck.plain")


def _plain(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)  # for nothing else it is given
    cut = error.object[error.start : error.end]
    return "".join(PLAIN_SIGNS.get(sign, "?") for sign in cut), error.end


def event(seconds: float, sentence: str, *, grave: bool = False) -> Table:
    """What happened, with the time on the left of all its lines."""
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(Text(f"{seconds:6.2f} s", "dim"), Text(sentence, "bold red" if grave else ""))
    return line


class LiveScreen:
    """For a terminal: what happened scrolls, the picture stays below it."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._shown = 0.0

    def say(self, seconds: float, sentence: str, *, grave: bool = False) -> None:
        """Print above the picture."""
        self._live.console.print(event(seconds, sentence, grave=grave))
        self._shown = 0.0  # what has changed is drawn at once

    def show(self, scene: Scene) -> None:
        """Redraw, unless that was done a moment ago."""
        now = time.monotonic()
        if now - self._shown >= LIVE_EVERY:
            self._shown = now
            self._live.update(picture(scene), refresh=True)


class PlainScreen:
    """For files, pipes and simple terminals: a line for what happens, and one now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._shown = time.monotonic()

    def say(self, seconds: float, sentence: str, *, grave: bool = False) -> None:  # noqa: ARG002 - words will do
        """Print a line."""
        self._console.print(Text(f"{seconds:6.2f} s  {sentence}"), soft_wrap=True)

    def show(self, scene: Scene) -> None:
        """One line each second."""
        now, progress = time.monotonic(), scene.progress
        going = sum(actor.state == "training" for actor in scene.actors)
        if now - self._shown < PLAIN_EVERY or progress is None or not going:
            return
        self._shown = now
        which = "" if progress.run == STORY else "undisturbed: "
        self.say(
            scene.seconds,
            f"  {which}step {progress.step:,}, loss {progress.loss:.4f}, view {progress.epoch} "
            f"with {going} of {len(scene.actors)} nodes, {scene.speed:.0f} steps/s, "
            f"{size(scene.averaged)} averaged",
        )


class SilentScreen:
    """For machines: the report at the end says it all."""

    def say(self, seconds: float, sentence: str, *, grave: bool = False) -> None:
        """Nothing."""

    def show(self, scene: Scene) -> None:
        """Nothing."""


@contextmanager
def open_screen(console: Console, *, silent: bool) -> Iterator[Audience]:
    """The screen that fits."""
    if silent:
        yield SilentScreen()
    elif console.is_terminal and not console.is_dumb_terminal:
        with Live(console=console, auto_refresh=False) as live:
            yield LiveScreen(live)
    else:
        yield PlainScreen(console)
