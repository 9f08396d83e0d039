"""A training on emulated machines, each with a home of its own, and what its members say.

Homes of their own matter: processes that share one are processes of one machine to Potluck.
"""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import potluck
from potluck._types import View
from potluck.training.elastic import ElasticTrainer
from potluck.training.state import TrainingState
from support.cables import Cables
from support.command import COMMAND, environment
from support.homes import Home, pair
from support.hosts import Host
from support.place import Place, as_failure
from support.ranks import Rank, Ranks
from support.threads import PATIENCE

Said: TypeAlias = dict[str, Any]

SMALL, LARGE = 16, 1 << 20  # numbers in a gradient; the large one has 4 MB
COMPUTING = 0.03  # seconds that a step pretends to compute
LIMIT = 4.0  # seconds after which a step that waits says why, and is made again
LATEST = 2 * PATIENCE  # seconds in which everything must happen that is waited for


def train(place: Place, job: str, min_nodes: int, size: int, options: dict[str, Any]) -> Said:
    """Train until the test says "stop" to any member; say every step and every error."""
    settings = {"multicast": True, "known": False, "neighbours": False, **options}
    is_held = settings.pop("held", False)
    with potluck.join(min_nodes, job=job, **{"timeout": LATEST, **settings}) as cluster:
        weights, chance = np.zeros(size, np.float32), np.random.default_rng()
        is_over, wants_to_stop, told = False, False, 0

        def apply(gradient: Any) -> None:
            nonlocal is_over
            np.subtract(weights, gradient["w"], out=weights)
            is_over = bool(gradient["stop"][0] > 0)

        state = TrainingState(model=weights)
        trainer = ElasticTrainer(cluster, state, apply, timeout=LIMIT)
        if is_held:
            hold_before_another_lineage(place, trainer)
        while not is_over:
            word = place.next_word()
            wants_to_stop = wants_to_stop or word == "stop"
            if word == "events":
                place.say("events", texts=[str(each) for each in cluster.events()])
            if word == "continue":
                cluster.continue_without_missing()
            time.sleep(COMPUTING)
            stop = np.array([float(wants_to_stop)])
            try:
                outcome = trainer.step({"w": chance.normal(size=size).astype("f4"), "stop": stop})
            except potluck.Timeout as error:
                place.say("told", **as_failure(error))
                continue
            if trainer.discarded is not None and trainer.discarded.total_steps > told:
                told = trainer.discarded.total_steps
                place.say("discarded", text=str(trainer.discarded), steps=told)
            lineage, epoch, step = trainer.position
            place.say(
                "step",
                step=step,
                counted=outcome.counted,
                size=outcome.world_size,
                view=[lineage, epoch],
                print=fingerprint(weights),
            )
        return {"print": fingerprint(weights), "step": trainer.step_count, "discarded": told}


def hold_before_another_lineage(place: Place, trainer: ElasticTrainer) -> None:
    """Let a member wait for the word "enter" before it gets the state of another lineage."""
    settle = trainer._settle

    def settle_when_told(view: View) -> None:
        if trainer.position.lineage not in ("", view.lineage):
            trainer._settle = settle  # type: ignore[method-assign]
            place.say("entering", view=[view.lineage, view.epoch])
            place.hear("enter", LATEST)
        settle(view)

    trainer._settle = settle_when_told  # type: ignore[method-assign]


def fingerprint(weights: Any) -> str:
    """Of the parameters, bit by bit."""
    return hashlib.blake2b(weights.tobytes()).hexdigest()[:16]


def make_homes(folder: Path, hosts: Sequence[Host]) -> dict[str, Path]:
    """Pair the machines; where each keeps its keys."""
    homes = [Home(folder, host.name) for host in hosts]
    for guest in homes[1:]:
        pair(homes[0], guest)
    return {host.name: home.path for host, home in zip(hosts, homes, strict=True)}


class Site:
    """Machines, their homes and the cables between them."""

    def __init__(self, hosts: Sequence[Host], folder: Path) -> None:
        self.hosts = list(hosts)
        self.homes = make_homes(folder, hosts)
        self._cables = Cables(hosts)
        self._cut: set[tuple[str, str]] = set()

    def cut(self, host: Host) -> None:
        """Cut one machine off from all others, without a sign to any of them."""
        for sender, receiver in self._ways(host):
            if (sender.name, receiver.name) not in self._cut:
                self._cables.cut(sender, receiver)
                self._cut.add((sender.name, receiver.name))

    def heal(self, host: Host) -> None:
        """Connect it again."""
        for sender, receiver in self._ways(host):
            if (sender.name, receiver.name) in self._cut:
                self._cables.mend(sender, receiver)
                self._cut.discard((sender.name, receiver.name))

    def heal_all(self) -> None:
        """Connect all."""
        for host in self.hosts:
            self.heal(host)

    def _ways(self, host: Host) -> list[tuple[Host, Host]]:
        others = [each for each in self.hosts if each is not host]
        return [way for each in others for way in ((each, host), (host, each))]

    def potluck(self, host: Host, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the command on a machine to its end."""
        return subprocess.run(
            host.command([str(COMMAND), *arguments]),
            capture_output=True,
            check=False,
            env=environment({"POTLUCK_HOME": str(self.homes[host.name])}),
            text=True,
            timeout=PATIENCE,
        )


class Team:
    """The members of one training, by the machine they run on, and what each has said."""

    def __init__(self, ranks: Ranks, site: Site, job: str, size: int = SMALL) -> None:
        self._ranks = ranks
        self._site = site
        self._size = size
        self.job = job
        self.nodes: dict[str, Rank] = {}
        self.steps: dict[str, list[Said]] = {}
        self.said: dict[str, list[Said]] = {}
        """What it said beside its steps."""

    def start(self, hosts: Sequence[Host], min_nodes: int, **options: Any) -> None:
        """Start a member on each of these machines."""
        for host in hosts:
            variables = {"POTLUCK_HOME": str(self._site.homes[host.name])}
            node = self._ranks.take(host.command, variables)
            arguments = self.job, min_nodes, self._size, options
            node.begin(train, self._site.hosts.index(host), len(hosts), "", *arguments)
            self.nodes[host.name] = node
            self.steps[host.name], self.said[host.name] = [], []

    def kill(self, hosts: Sequence[Host]) -> None:
        """End members without warning."""
        for host in hosts:
            node = self.nodes.pop(host.name)
            node.kill()
            self._ranks.bury(node)

    def listen(self, seconds: float = 0.0) -> None:
        """Hear what all say, for some time: a member that is not heard stops."""
        end = time.monotonic() + seconds
        while True:
            for name, node in self.nodes.items():
                while node.has_news():
                    said = node.hear_any()
                    kept = self.steps if said["word"] == "step" else self.said
                    kept[name].append(said)
            if time.monotonic() >= end:
                return
            time.sleep(0.01)

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Listen until something has come true."""
        end = time.monotonic() + LATEST
        while not condition():
            assert time.monotonic() < end, f"{what}: not within {LATEST:g} s\n{self.summary()}"
            self.listen(0.02)

    def wait_for_steps(self, hosts: Sequence[Host], size: int, count: int = 3) -> None:
        """Listen until each has made some more steps in one view of this many members."""
        self.listen()
        before = {host.name: len(self.steps[host.name]) for host in hosts}

        def are_made() -> bool:
            news = {name: self.steps[name][since:] for name, since in before.items()}
            views = [
                {tuple(each["view"]) for each in steps[-count:] if each["size"] == size}
                for steps in news.values()
                if len(steps) >= count
            ]
            return len(views) == len(before) and all(
                len(view) == 1 and view == views[0] for view in views
            )

        names = ", ".join(before)
        self.wait_until(are_made, f"{names} train in one view of {size}")

    def between(self, host: Host, begin: float, end: float) -> list[Said]:
        """Steps that a member committed in a period, as far as it has said so."""
        return [each for each in self.steps[host.name] if begin < each["at"] < end]

    def words(self, host: Host, word: str) -> list[Said]:
        """What a member has said of one kind."""
        return [each for each in self.said[host.name] if each["word"] == word]

    def finish(self) -> list[Said]:
        """Let all come to an end together; what each returned."""
        next(iter(self.nodes.values())).tell("stop")
        results = []
        for name, node in self.nodes.items():
            while "word" in (said := node._read(LATEST) or {}):
                (self.steps if said["word"] == "step" else self.said)[name].append(said)
            assert "value" in said, f"{name}: {said}\n{node.log}"
            node.is_idle = True
            results.append(said["value"])
        assert len({each["print"] for each in results}) == 1, results
        assert len({each["step"] for each in results}) == 1, results
        return results

    def check_one_truth(self) -> None:
        """No member went back, and all who applied a step have the same parameters after it."""
        by_step: dict[int, dict[str, list[str]]] = {}
        for name, steps in self.steps.items():
            numbers = [each["step"] for each in steps]
            assert numbers == sorted(set(numbers)), f"{name} went back: {numbers}"
            for each in steps:
                by_step.setdefault(each["step"], {}).setdefault(each["print"], []).append(name)
            assert not self.words(self._host(name), "discarded"), self.said[name]
        assert not [prints for prints in by_step.values() if len(prints) > 1]
        lineages = {each["view"][0] for steps in self.steps.values() for each in steps}
        assert len(lineages) == 1, self.summary()

    def _host(self, name: str) -> Host:
        return next(host for host in self._site.hosts if host.name == name)

    def summary(self) -> str:
        """What each made last, and what it wrote, for people."""
        lines = []
        for name, node in self.nodes.items():
            lines += [f"{name}: {self.steps[name][-1:]} {self.said[name][-2:]}", node.log[-2000:]]
        return "\n".join(lines)
