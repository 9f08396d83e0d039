"""A member of an elastic training in a process of its own, and a crowd of them."""

from __future__ import annotations

import itertools
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import potluck
from potluck import DistributedContext, SimulatedBackend
from potluck.schedule.reduce import Reducer
from support.clusters import OPTIONS
from support.elastic import RATE, Regression
from support.place import Place
from support.ranks import Rank, Ranks
from support.threads import PATIENCE

COMPUTING = 0.01  # seconds that a step pretends to compute: this suite shares its cores


class Stoppable(Regression):
    """A training that all members end at the same step: the wish to stop is averaged as well."""

    wants_to_stop = False
    is_over = False

    def __init__(self, group: DistributedContext, seed: int = 0, **options: Any) -> None:
        self.ballast = np.zeros(options.pop("ballast", 1))
        super().__init__(group, seed, **options)
        self.lost: list[tuple[int, str]] = []
        """How many steps were discarded each time, and of which lineage they were."""

    def gradient(self, indices: Any) -> dict[str, Any]:
        """With the wish to stop."""
        time.sleep(COMPUTING)
        wish = {"stop": np.array([float(self.wants_to_stop)]), "ballast": self.ballast}
        return {**super().gradient(indices), **wish}

    def apply(self, gradient: Any) -> None:
        """Step, and note whether a member wants to stop."""
        super().apply(gradient)
        self.is_over = bool(gradient["stop"][0] > 0)

    def step(self) -> Any:
        """The same; what was discarded does not count any more."""
        outcome = super().step()
        told = self.trainer.discarded
        if told is not None and told.total_steps > sum(steps for steps, _ in self.lost):
            self.lost.append((told.steps, told.before.lineage))
            self.sampler.log.clear()
            self.counted.clear()
        return outcome

    def facts_of(self, outcome: Any) -> dict[str, Any]:
        """How a step went, for the test."""
        return {
            "step": outcome.step,
            "size": outcome.world_size,
            "print": self.fingerprint,
            "tries": outcome.tries,
            "position": list(self.trainer.position),
        }

    def result(self) -> dict[str, Any]:
        """How the training ended, for the test."""
        return {
            "position": list(self.trainer.position),
            "lost": [list(each) for each in self.lost],
            "step": self.trainer.step_count,
            "print": self.fingerprint,
            "loss": self.loss,
            "epoch": self.sampler.epoch,
            "size": self.sampler.size,
            "committed": [list(each) for each in self.sampler.committed],
            "log": [list(each) for each in self.sampler.log],
            "counted": [list(each) for each in self.counted],
        }


def die_at(run: Regression, where: str, step: int) -> None:
    """Let the process be killed at a point of a step: there is no later instruction."""
    trainer: Any = run.trainer

    def is_due() -> bool:
        return bool(trainer.step_count >= step)

    def leads() -> bool:
        """The first of those who have the state, while another one has it too."""
        return is_due() and trainer._group.rank == 0 and trainer._group.world_size > 2

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def stop() -> None:
        os.kill(os.getpid(), signal.SIGSTOP)  # until the test says otherwise

    if where == "applied":  # after it, and only once
        spring_after(trainer, "_apply", once(is_due), stop)
    elif where == "adding up":  # with some pieces of the array added up, and others not
        calls = itertools.count(1)
        for name in ("combine", "fold"):
            spring(Reducer, name, lambda: is_due() and next(calls) > 2, kill)
    else:
        target, name, condition = {
            "averaging": (trainer._group, "all_reduce", is_due),
            "acknowledging": (trainer._group, "barrier", is_due),
            "applying": (trainer, "_apply", is_due),
            "settling": (trainer._group, "all_gather_object", is_due),
            "transferring": (trainer._group, "all_to_all", is_due),
            "leading a transfer": (trainer._group, "all_to_all", leads),
        }[where]
        spring(target, name, condition, kill)


def spring(target: Any, name: str, is_due: Callable[[], bool], action: Callable[[], None]) -> None:
    """Do something before a call when its time has come."""
    original = getattr(target, name)

    def trapped(*arguments: Any, **options: Any) -> Any:
        if is_due():
            action()
        return original(*arguments, **options)

    setattr(target, name, trapped)


def spring_after(
    target: Any, name: str, is_due: Callable[[], bool], action: Callable[[], None]
) -> None:
    """The same after it."""
    original = getattr(target, name)

    def trapped(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        if is_due():
            action()
        return result

    setattr(target, name, trapped)


def once(condition: Callable[[], bool]) -> Callable[[], bool]:
    """True the first time that something is."""
    is_over = False

    def is_first() -> bool:
        nonlocal is_over
        before, is_over = is_over, is_over or condition()
        return is_over and not before

    return is_first


def train(
    place: Place,
    job: str,
    min_nodes: int,
    death: tuple[str, int] | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Train until the test says "stop" to any member; say where it stands after every step."""
    with potluck.join(min_nodes, job=job, timeout=PATIENCE, **OPTIONS) as cluster:
        run = Stoppable(cluster, **{"seed": place.rank, **options})
        if death is not None:
            die_at(run, *death)
        run.trainer.start()
        place.say("begun", step=run.trainer.step_count, size=cluster.world_size)
        while not run.is_over:
            run.wants_to_stop = run.wants_to_stop or place.next_word() == "stop"
            place.say("step", **run.facts_of(run.step()))
        return run.result()


class Crew:
    """Members in processes of their own, and everything that they have said."""

    def __init__(self, ranks: Ranks, job: str, rate: float = RATE) -> None:
        self._ranks = ranks
        self._job = job
        self._rate = rate
        self._count = 0
        self.prints: dict[tuple[Any, ...], dict[str, str]] = {}
        """By lineage, epoch and step: each fingerprint, and who said it last."""

    def start(
        self,
        count: int,
        min_nodes: int,
        *,
        death: tuple[str, int] | None = None,
        **options: Any,
    ) -> list[Rank]:
        """So many more; they wait until there are ``min_nodes``, and may have to die.

        Unless told otherwise each begins from weights of its own.
        """
        started = []
        for _ in range(count):
            member = self._ranks.take()
            how = {"rate": self._rate, **options}
            member.begin(train, self._count, count, "", self._job, min_nodes, death, how)
            self._count += 1
            started.append(member)
        return started

    def follow(self, member: Rank, size: int, steps: int = 1) -> dict[str, Any]:
        """Listen until a member has made so many steps among so many members."""
        made = 0
        while True:
            said = self._note(member, member.hear_any())
            made += said["word"] == "step" and said["size"] == size
            if made >= steps:
                return said

    def overhear(self, member: Rank) -> None:
        """Note what a member has said, without waiting for more."""
        while member.has_news():
            self._note(member, member.hear_any())

    def _note(self, member: Rank, said: dict[str, Any]) -> dict[str, Any]:
        if said["word"] == "step":
            position = tuple(said["position"])
            self.prints.setdefault(position, {})[said["print"]] = f"{member.rank}: {said}"
        return said

    def finish(self, members: list[Rank]) -> list[dict[str, Any]]:
        """Let all come to an end together; what each returned."""
        members[0].tell("stop")
        results = []
        for member in members:
            while (message := member._read(PATIENCE)) is not None and "word" in message:
                self._note(member, message)
            assert message is not None
            assert "value" in message, message
            member.is_idle = True
            results.append(message["value"])
        return results


def undisturbed(steps: int, rate: float = RATE) -> float:
    """The loss that one machine reaches by itself in so many steps."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        run = Regression(alone, rate=rate)
        while run.trainer.step_count < steps:
            run.step()
        return run.loss


def check(crew: Crew, results: list[dict[str, Any]]) -> None:
    """All have the same bits after every step, and every sample of every epoch counted once.

    The first result is of a member that was there all the time.  Newcomers that heard each other
    before they heard the members may have begun a training of their own, which lost the merge: its
    steps have the same numbers, and are not part of the state.
    """
    assert len({result["print"] for result in results}) == 1
    assert not {place: prints for place, prints in crew.prints.items() if len(prints) > 1}
    lineage = results[0]["position"][0]
    numbers = Counter(step for where, _, step in crew.prints if where == lineage)
    assert set(numbers.values()) == {1}, "a step was made again in a later view"
    assert not [where for each in results for _, where in each["lost"] if where == lineage]
    assert len({str((each["epoch"], each["committed"])) for each in results}) == 1
    log = [tuple(pair) for pair in results[0]["log"]]
    whole = itertools.product(range(results[0]["epoch"]), range(results[0]["size"]))
    assert len(log) == len(set(log))
    assert set(whole) <= set(log)
    assert all({tuple(pair) for pair in result["log"]} <= set(log) for result in results)
    counted = [tuple(pair) for result in results for pair in result["counted"]]
    assert len(counted) == len(set(counted))
    assert set(counted) <= set(log)
