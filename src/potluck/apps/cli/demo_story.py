"""The demo: starts nodes, watches them as ``potluck status`` does, kills one and brings it back."""

from __future__ import annotations

import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from potluck._decode import decode_json
from potluck.apps.cli.common import signals_held
from potluck.apps.cli.output import Display, column_of, list_names, size, sparkline, table
from potluck.apps.cli.status_facts import NodeStatus, jobs_of
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.cluster.observer import Observer
from potluck.cluster.reports import EpochLine, EventLine, Journal
from potluck.errors import PeerLost, Timeout
from potluck.identity.namespace import NetworkNamespace, Protection
from potluck.net.tcp import free_ports

NAMES = (
    "basil thyme sage mint dill chive fennel cumin anise clove ginger sesame caper tansy sorrel rue"
).split()
STORY, UNDISTURBED = "story", "undisturbed"  # with a kill; and the run to compare it with
LASTING, SLOWEST, FASTEST = 8.0, 10.0, 30.0  # seconds of the first run, and its limits in steps/s
WIDTH = 48  # columns of a curve
STYLES = {
    **dict.fromkeys(("training", "healthy", "done"), "green"),
    **dict.fromkeys(("killed", "dead"), "bold red"),
    **dict.fromkeys(("degraded", "suspect", "starting", "connecting"), "yellow"),
}
OTHER_JOBS = (
    *("POTLUCK_", "RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_"),
    *("OMPI_", "PMI_", "PMIX_", "SLURM_", "TORCHELASTIC_"),
)
"""How variables begin that set up the user's own jobs."""


def environment(home: Path, **settings: str) -> dict[str, str]:
    """The environment of a node, which has a home of its own like a machine."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(OTHER_JOBS) or name == "POTLUCK_INTERFACES"
    }
    given = {f"POTLUCK_{name.upper()}": value for name, value in settings.items()}
    # Several nodes share this machine: threads of NumPy's own would only slow them down.
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return kept | one_thread | {"POTLUCK_HOME": str(home)} | given


class NodeFailed(PeerLost):
    """A node of the demo ended unexpectedly."""


@dataclass(eq=False)
class Node:
    """One start of one node: its process, what it prints, and what the observer knows of it."""

    name: str
    process: subprocess.Popen[bytes]
    output: Path
    started_at: float = field(default_factory=time.time)
    is_killed: bool = False
    status: NodeStatus | None = None
    journal: Journal | None = None
    events: dict[int, EventLine] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    _position: int = 0

    def read(self) -> Iterator[dict[str, Any]]:
        """Note what it has printed since the last call; the steps among it."""
        code = self.process.poll()  # before its last lines are read
        with self.output.open("rb") as output:
            output.seek(self._position)
            lines = [line for line in output if line.endswith(b"\n")]
        self._position += sum(map(len, lines))
        for line in (decode_json(line, dict[str, int | float | str]) for line in lines):
            if "step" in line:
                self.steps.append(line)
                yield line
            else:
                self.runs[str(line["run"])] = line
        if code is not None and self.state not in {"killed", "done"}:
            cause = f"exit code {code}" if code >= 0 else f"signal {signal.Signals(-code).name}"
            raise NodeFailed(
                f"The demo's node {self.name} (pid {self.process.pid}) ended unexpectedly",
                host=self.name,
                cause=cause,
                hint="Run the demo again; `potluck doctor` checks this machine.",
            )

    def observe(self, status: NodeStatus | None, journal: Journal | None) -> None:
        """Note what the observer knows now; of a node that is done, the last that it knew."""
        if status is not None or self.state != "done":
            self.status, self.journal = status, journal or self.journal
        self.events |= {each.number: each for each in journal.events} if journal else {}

    @property
    def rank(self) -> int | None:
        """Its rank, while it is a member."""
        return self.status.rank if self.status and not self.is_killed else None

    @property
    def state(self) -> str:
        """In a word."""
        if self.is_killed:
            return "killed"
        if self.steps:
            return "done" if UNDISTURBED in self.runs else "training"
        return "starting" if self.status is None else "connecting"

    @property
    def averaged(self) -> float:
        """Bytes of gradients that it has averaged with others."""
        return float(self.steps[-1]["averaged"]) if self.steps else 0.0

    def figure(self, name: str) -> float:
        """Something that it has counted."""
        return self.journal.figures.get(name, 0.0) if self.journal else 0.0

    def noticed(self, victim: Node, after: float) -> EventLine | None:
        """The first thing that it said of another one after a moment."""
        events = (each for each in self.events.values() if each.time >= after)
        return next((each for each in events if victim.name in each.text), None)


@dataclass
class Demo:
    """Runs the demo once, and leaves no process and no file behind.

    ``kill`` is the rank of the node to kill; the demo gives up after ``seconds``.
    """

    display: Display
    count: int = 3
    steps: int = 240
    seed: int = 0
    kill: int | None = None
    seconds: float = 110.0
    nodes: list[Node] = field(default_factory=list)
    losses: dict[str, dict[int, float]] = field(default_factory=lambda: {STORY: {}})
    marks: dict[int, str] = field(default_factory=dict)
    _events: list[tuple[float, str]] = field(default_factory=list)
    _started: list[Node] = field(default_factory=list)
    _began: float = field(default_factory=time.time)
    _secret: bytes = field(default_factory=lambda: secrets.token_bytes(32))

    def run(self) -> dict[str, Any]:
        """All of it; the facts for the report."""
        with ExitStack() as stack:
            # Keys and files of its own, for a moment: nothing of the user's is touched.
            folder = tempfile.TemporaryDirectory(prefix="potluck-demo-", ignore_cleanup_errors=True)
            self._folder = Path(stack.enter_context(folder))
            os.environ["POTLUCK_HOME"] = str(self._folder / "observer")
            stack.callback(self._end)
            self._ports = free_ports(self.count)  # the usual ones are left to the user's own jobs
            self._peers = [f"127.0.0.1:{port}" for port in self._ports]
            self.nodes += map(self._start, range(self.count))
            config = AutoDiscoveryConfig(
                namespace=self._group("observer"),
                peers=self._peers,
                multicast=False,
                neighbours=False,
                known=False,
            )
            self._observer = stack.enter_context(Observer(config, job="demo", journals=True))
            return self._tell()

    def _end(self) -> None:
        with signals_held():  # a second Ctrl-C does not stop this
            for node in self._started:
                node.process.kill()  # all of them first: none waits for one that is slow to end
            for node in self._started:
                node.process.communicate()

    def _group(self, name: str) -> NetworkNamespace:
        """The group of the demo, as a node keeps it."""
        home = self._folder / name
        return NetworkNamespace("demo", self._secret, (), Protection.PASSPHRASE, home)

    def _start(self, number: int) -> Node:
        """Start a node; if it is started again, with the keys it had."""
        name, output = NAMES[number], self._folder / f"{len(self._started)}.out"
        self._group(name).save()
        settings = {
            "join": {"port": self._ports[number], "peers": self._peers, "known": False},
            "seed": self.seed,
            "steps": self.steps,
            "view": 1 if self.kill is None else 3,  # one is lost in view 2, and back in view 3
            "pace": 1 / min(FASTEST, max(SLOWEST, self.steps / LASTING)),
        }
        shared = {"job": "demo", "namespace": "demo", "min_nodes": str(self.count), "log": "error"}
        command = [sys.executable, "-P", "-m", "potluck.apps.cli.demo_node"]
        with output.open("wb") as out, signals_held():
            process = subprocess.Popen(  # noqa: S603 - our own module
                [*command, msgspec.json.encode(settings).decode()],
                stdin=subprocess.PIPE,  # it ends when this does
                stdout=out,
                env=environment(self._folder / name, name=name, **shared),
                start_new_session=True,  # Ctrl-C reaches the demo alone, which ends the nodes
            )
            self._started.append(Node(name, process, output))
        return self._started[-1]

    # -- watching ------------------------------------------------------------------------------

    def _say(self, sentence: str, *, grave: bool = False, at: float | None = None) -> None:
        seconds = (at or time.time()) - self._began
        self._events.append((round(seconds, 3), sentence))
        self.display.say(sentence, grave=grave, seconds=seconds)

    def _wait_for(self, nodes: Sequence[Node], ready: Callable[[Node], object], what: str) -> None:
        """Watch until something holds for all these nodes; raises ``Timeout``."""
        while missing := [node.name for node in nodes if not ready(node)]:
            if time.time() - self._began >= self.seconds:
                raise Timeout(
                    f"{list_names(missing)} did not {what} within {self.seconds:g} s",
                    seconds=self.seconds,
                    hint="This machine may be too busy; try fewer nodes, or more --seconds.",
                )
            self._watch()

    def _wait_for_step(self, node: Node, step: int, what: str) -> None:
        self._wait_for([node], lambda each: each.steps and each.steps[-1]["step"] >= step, what)

    def _watch(self) -> None:
        """Take in what the nodes print and what the observer knows, and show it."""
        self._observer.wait_for_news(self._observer.news, 0.05)
        jobs, journals = jobs_of(self._observer.reports), self._observer.history.journals
        found = {each.report.pid: each for job in jobs for each in job.nodes if each.report}
        for node in self.nodes:
            for line in node.read():
                self.losses.setdefault(line["run"], {}).setdefault(line["step"], line["loss"])
            status = found.get(node.process.pid)
            key = (status.node, status.incarnation) if status else ("", 0)
            node.observe(status, journals.get(key))
        self.display.show(self)

    # -- the story -----------------------------------------------------------------------------

    def _tell(self) -> dict[str, Any]:
        names = [node.name for node in self.nodes]
        self._say(f"{list_names(names)} start, each in its own process and with its own keys.")
        facts = {"nodes": names, "seed": self.seed, **self._meet(), **self._disturb()}
        facts[STORY] = story = self._finish(STORY)
        self._say(f"The run ends after step {story['steps']:,} with a loss of {story['loss']:.4f}.")
        self._say("The same training runs again, undisturbed and at full speed, to compare.")
        facts[UNDISTURBED] = plain = self._finish(UNDISTURBED)
        self._say(f"The undisturbed run ends with a loss of {plain['loss']:.4f}.")
        self._wait_for(self.nodes, lambda node: node.process.poll() is not None, "leave")
        return {
            **facts,
            "difference": abs(story["loss"] - plain["loss"]),
            "noise": max(story["noise"], plain["noise"]),
            "losses": {run: list(losses.items()) for run, losses in self.losses.items()},
            "averaged_bytes": int(max(node.averaged for node in self.nodes)),
            "events": self._events,
            "pids": [node.process.pid for node in self._started],
            "seconds": time.time() - self._began,
        }

    def _meet(self) -> dict[str, Any]:
        """Wait until all nodes train."""
        self._wait_for(
            self.nodes, lambda node: node.steps and node.rank is not None, "find the others"
        )
        seconds = max(node.steps[0]["time"] for node in self.nodes) - self._began
        self.nodes.sort(key=lambda node: node.rank or 0)
        self._say(
            f"They found each other and train together after {seconds:.1f} s. "
            f"By rank: {list_names([node.name for node in self.nodes])}."
        )
        return {"meeting_seconds": seconds}

    def _disturb(self) -> dict[str, Any]:
        """Kill a node after a quarter of the steps, see what the others do, and bring it back."""
        if self.kill is None:
            return {**dict.fromkeys(("killed", "agreed", "resumed", "returned")), "noticed": []}
        victim = self.nodes[self.kill]
        self._wait_for_step(victim, max(3, self.steps // 4), "train")
        step, pid, killed_at = victim.steps[-1]["step"], victim.process.pid, time.time()
        victim.process.kill()
        victim.is_killed = True
        self.marks[step] = "✕"
        self._say(f"{victim.name} (pid {pid}) is killed at step {step:,}.", grave=True)
        return {
            "killed": {"name": victim.name, "rank": self.kill, "pid": pid, "step": step},
            **self._continue(victim, killed_at),
            "returned": self._bring_back(victim),
        }

    def _continue(self, victim: Node, killed_at: float) -> dict[str, Any]:
        """Tell who notices it when, when the others agree, and when they make the next step."""
        others = [node for node in self.nodes if node is not victim]
        noticed = []
        for node in others:
            self._wait_for([node], lambda each: each.noticed(victim, killed_at), "notice it")
            event = node.noticed(victim, killed_at)
            assert event is not None
            self._say(f"{node.name}: {event.text}.", at=event.time)
            milliseconds = (event.time - killed_at) * 1000
            noticed.append(
                {"name": node.name, "sentence": event.text, "milliseconds": milliseconds}
            )

        def view() -> EpochLine | None:
            views = self._observer.history.epochs("demo")
            return next((each for each in views if each.time >= killed_at), None)

        def resumed(node: Node) -> dict[str, Any] | None:
            before = victim.steps[-1]["view"]
            return next((step for step in node.steps if step["view"] > before), None)

        self._wait_for(others, lambda node: view() and resumed(node), "continue without it")
        first = max(filter(None, map(resumed, others)), key=lambda step: step["time"])
        new = view()
        assert new is not None
        agreed, later = ((at - killed_at) * 1000 for at in (new.time, first["time"]))
        self._say(
            f"They agreed to continue {agreed:.0f} ms after the kill, {new.reason}.", at=new.time
        )
        self._say(
            f"Step {first['step']:,} is committed without it, {later:.0f} ms after the kill.",
            at=first["time"],
        )
        away = max(3, self.steps // 16)
        self._wait_for_step(others[0], first["step"] + away, "continue")
        return {
            "noticed": noticed,
            "agreed": {"epoch": new.epoch, "milliseconds": agreed},
            "resumed": {"step": first["step"], "milliseconds": later},
        }

    def _bring_back(self, victim: Node) -> dict[str, Any]:
        node = self.nodes[self.nodes.index(victim)] = self._start(NAMES.index(victim.name))
        self._say(f"{node.name} is started again (pid {node.process.pid}).")
        received = "state.received_bytes"
        self._wait_for([node], lambda each: each.steps and each.figure(received), "return")
        first, nbytes, seconds = node.steps[0], node.figure(received), node.figure("state.seconds")
        step, away = first["step"] - 1, first["time"] - node.started_at
        self.marks[step] = "↑"
        self._say(
            f"{node.name} trains again {away:.1f} s after its restart. It received {size(nbytes)} "
            f"of state in {seconds:.2f} s and continues from step {step:,}.",
            at=first["time"],
        )
        pid, epoch = node.process.pid, first["view"]
        back = {"name": node.name, "pid": pid, "epoch": epoch, "step": step, "seconds": away}
        return {**back, "state_bytes": int(nbytes), "state_seconds": seconds}

    def _finish(self, run: str) -> dict[str, Any]:
        """Wait for the end of a run; its results."""
        self._wait_for(self.nodes, lambda node: run in node.runs, "finish")
        ends = {node.name: node.runs[run] for node in self.nodes}
        first = next(iter(ends.values()))
        losses = [loss for _, loss in sorted(self.losses[run].items())]
        last = losses[-max(10, len(losses) // 10) :]
        self.losses[run][first["steps"]] = first["loss"]  # over all points, as in the report
        wrong = [abs(first["samples"] - end["weight"]) for end in ends.values() if end["weight"]]
        return {
            **{key: first[key] for key in ("steps", "loss", "accuracy", "samples")},
            "noise": max(last) - min(last),
            "fingerprints": {name: end["fingerprint"] for name, end in ends.items()},
            "missing_samples": max(wrong, default=0.0),
            "seconds": max(end["seconds"] for end in ends.values()),
        }

    # -- how it looks --------------------------------------------------------------------------

    def facts(self) -> None:
        """For programs there is the report at the end."""

    def line(self) -> str:
        """For files and pipes."""
        averaged = size(max(node.averaged for node in self.nodes))
        progress = self._progress()
        return f"{progress}, {averaged} averaged" if progress else ""

    def _progress(self) -> str:
        training = sum(node.state == "training" for node in self.nodes)
        run, losses = list(self.losses.items())[-1]
        if not training or not losses:
            return ""
        step, which = max(losses), "undisturbed: " if run == UNDISTURBED else ""
        times = [each["time"] for each in max((node.steps for node in self.nodes), key=len)]
        recent = [each for each in times if each > times[-1] - 1.0]
        speed = (len(recent) - 1) / max(recent[-1] - recent[0], 1e-3)
        return (
            f"{time.time() - self._began:6.2f} s    {which}step {step:,}, loss {losses[step]:.4f}, "
            f"{training} of {len(self.nodes)} nodes, {speed:.0f} steps/s"
        )

    def draw(self) -> RenderableType:
        """For a terminal of 80 columns and more."""
        figures = ("step", "share", "averaged", "rate", "round trip")
        nodes = table(("rank", "node", "state", "health"), figures, gap=1)
        remarks = []
        for node in self.nodes:
            rank = "–" if node.rank is None else str(node.rank)
            health = node.status.health if node.status and not node.is_killed else ""
            if node.status and health not in {"", "healthy"}:
                remark = f"{node.name} is {health}: {node.status.reason}"
                remarks.append(Text(remark, "yellow"))  # as `potluck status` says it
            words = (rank, node.name, node.state, health)
            nodes.add_row(*(Text(word, STYLES.get(word, "")) for word in words), *_figures(node))
        return Group("", nodes, *remarks, "", *self._curves(), Text(self._progress(), "dim"))

    def _curves(self) -> Iterator[Text]:
        """Both losses on one logarithmic scale, and below them when a node was lost or returned."""
        curves = {
            run: [(step, math.log(max(loss, 1e-6))) for step, loss in sorted(losses.items())]
            for run, losses in self.losses.items()
        }
        last = max(self.steps, *(max(losses, default=0) for losses in self.losses.values()))
        values = [value for curve in curves.values() for _, value in curve] or [0.0]
        for (run, curve), style in zip(curves.items(), ("cyan", "blue"), strict=False):
            title = "loss" if run == STORY else run
            drawn = sparkline(curve, last, min(values), max(values), width=WIDTH)
            now = f"{math.exp(curve[-1][1]):.4f}" if curve else "…"
            yield Text.assemble(f"{title:<12}", (drawn, style), f"  {now}")
        signs = [" "] * (WIDTH + 1)
        for step, sign in self.marks.items():
            signs[column_of(step, last, WIDTH)] = sign
        yield Text(" " * 12 + "".join(signs).rstrip(), "bold red")


def _figures(node: Node) -> Iterator[str]:
    """What a row of the table says of a node that has trained."""
    if node.steps:
        last, is_here = node.steps[-1], not node.is_killed
        report = node.status.report if node.status else None
        trips = [line.round_trip for line in report.peers if line.round_trip] if report else []
        yield f"{last['step']:,}"
        yield f"{last['share']}" if is_here else "–"
        yield size(node.averaged)
        yield f"{size(node.figure('all_reduce.bytes_per_second'))}/s" if is_here else "–"
        yield f"{max(trips) * 1000:.1f} ms" if trips and is_here else "–"
