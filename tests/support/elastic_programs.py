"""A member of an elastic training in a process of its own, and a crowd of them."""

from __future__ import annotations

import itertools
import os
import signal
import time
from typing import Any

import numpy as np

import potluck
from potluck import DistributedContext, SimulatedBackend
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

    def gradient(self, indices: Any) -> dict[str, Any]:
        """With the wish to stop."""
        time.sleep(COMPUTING)
        return {**super().gradient(indices), "stop": np.array([float(self.wants_to_stop)])}

    def apply(self, gradient: Any) -> None:
        """Step, and note whether somebody wants to stop."""
        super().apply(gradient)
        self.is_over = bool(gradient["stop"][0] > 0)


def die_at(run: Regression, where: str, step: int) -> None:
    """Let the process be killed at a point of a step: there is no later instruction."""
    target: Any
    target, name = {
        "averaging": (run.trainer._group, "all_reduce"),
        "acknowledging": (run.trainer._group, "barrier"),
        "applying": (run.trainer, "_apply"),
        "settling": (run.trainer._group, "all_gather_object"),
        "transferring": (run.trainer._group, "all_to_all"),
    }[where]
    original = getattr(target, name)

    def trapped(*arguments: Any, **options: Any) -> Any:
        if run.trainer.step_count >= step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **options)

    setattr(target, name, trapped)


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
            outcome = run.step()
            place.say(
                "step",
                step=outcome.step,
                size=outcome.world_size,
                print=run.fingerprint,
                tries=outcome.tries,
            )
        return {
            "step": run.trainer.step_count,
            "print": run.fingerprint,
            "loss": run.loss,
            "epoch": run.sampler.epoch,
            "size": run.sampler.size,
            "committed": [list(each) for each in run.sampler.committed],
            "log": [list(each) for each in run.sampler.log],
            "counted": [list(each) for each in run.counted],
        }


class Crew:
    """Members in processes of their own, and everything that they have said."""

    def __init__(self, ranks: Ranks, job: str, rate: float = RATE) -> None:
        self._ranks = ranks
        self._job = job
        self._rate = rate
        self._count = 0
        self.prints: dict[int, set[str]] = {}
        """Fingerprints by step, of all members."""

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
            said = self._note(member.hear_any())
            made += said["word"] == "step" and said["size"] == size
            if made >= steps:
                return said

    def overhear(self, member: Rank) -> None:
        """Note what a member has said, without waiting for more."""
        while member.has_news():
            self._note(member.hear_any())

    def _note(self, said: dict[str, Any]) -> dict[str, Any]:
        if said["word"] == "step":
            self.prints.setdefault(said["step"], set()).add(said["print"])
        return said

    def finish(self, members: list[Rank]) -> list[dict[str, Any]]:
        """Let all come to an end together; what each returned."""
        members[0].tell("stop")
        results = []
        for member in members:
            while (message := member._read(PATIENCE)) is not None and "word" in message:
                self._note(message)
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

    The first result is of a member that was there all the time.
    """
    assert len({result["print"] for result in results}) == 1
    assert all(len(prints) == 1 for prints in crew.prints.values())
    assert len({str((each["epoch"], each["committed"])) for each in results}) == 1
    log = [tuple(pair) for pair in results[0]["log"]]
    whole = itertools.product(range(results[0]["epoch"]), range(results[0]["size"]))
    assert len(log) == len(set(log))
    assert set(whole) <= set(log)
    assert all({tuple(pair) for pair in result["log"]} <= set(log) for result in results)
    counted = [tuple(pair) for result in results for pair in result["counted"]]
    assert len(counted) == len(set(counted))
    assert set(counted) <= set(log)
