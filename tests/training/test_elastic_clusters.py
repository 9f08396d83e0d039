"""Elastic steps on real clusters, with losses placed exactly."""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from potluck import (
    Aborted,
    Cluster,
    DistributedError,
)
from potluck.training.elastic_try import Try
from support.clusters import clusters, everywhere, join, new_job
from support.elastic import SAMPLES, Regression
from support.threads import PATIENCE, Background, eventually, together


def train(runs: list[Regression], steps: int) -> None:
    """Every member makes steps until so many are committed."""

    def work(run: Regression) -> None:
        while run.trainer.step_count < steps:
            run.step()

    everywhere(runs, work)


class Trap:
    """Something that happens to a member at a certain point of its steps."""

    def __init__(self, run: Regression, place: str, step: int, spring: Callable[[], None]) -> None:
        self.sprung = threading.Event()
        member: Any = run.trainer
        target, name = {
            "averaging": (member._group, "all_reduce"),
            "acknowledging": (member._group, "barrier"),
            "applying": (member, "_apply"),
        }[place]
        original = getattr(target, name)

        def trapped(*arguments: Any, **options: Any) -> Any:
            if run.trainer.step_count == step and not self.sprung.is_set():
                self.sprung.set()
                spring()
            return original(*arguments, **options)

        setattr(target, name, trapped)


class Gone(Exception):
    """This member's program ends here."""


@pytest.mark.parametrize("place", ["averaging", "acknowledging", "applying"])
def test_a_member_leaves_in_the_middle_of_a_step(place: str) -> None:
    """Before its part of the averaging, before the barrier, or between commit and apply.

    The survivors go on together, bit-identical, and every sample of the epoch counts once.
    """
    with clusters(3) as nodes:
        runs = [Regression(node) for node in nodes]
        lost = runs[1]

        def leave() -> None:
            nodes[1].close()
            raise Gone

        Trap(lost, place, 3, leave)

        def work(run: Regression) -> None:
            try:
                while run.trainer.step_count < 16:
                    run.step()
            except Gone:
                pass

        everywhere(runs, work)
        survivors = [runs[0], runs[2]]
        assert len({run.fingerprint for run in survivors}) == 1
        assert {run.trainer.step_count for run in survivors} == {16}
        survivors[0].sampler.check()
        assert survivors[0].sampler.log == survivors[1].sampler.log
        assert survivors[0].sampler.epoch >= 1
        mine = Counter(pair for run in runs for pair in run.counted)
        assert max(mine.values()) == 1
        assert set(mine) <= set(survivors[0].sampler.log)


def test_what_somebody_ends_on_purpose_is_not_tried_again() -> None:
    """An abort in a view that goes on is raised; the step can be made again."""
    with clusters(2) as nodes:
        runs = [Regression(node) for node in nodes]
        train(runs, 2)
        waiting = Background(runs[0].step)
        eventually(lambda: runs[0].trainer._pending is not None)
        eventually(lambda: ended(nodes[0], waiting))
        with pytest.raises(Aborted, match="enough for today"):
            waiting.result()


def test_a_member_that_fails_in_a_step_does_not_end_the_others() -> None:
    """It raises there; the others try again, with it or without it."""
    with clusters(3) as nodes:
        runs = [Regression(node) for node in nodes]
        train(runs, 2)
        fails: Any = nodes[2].group._vigil
        begin, broken = fails.begin, threading.Event()

        def raising(*arguments: Any) -> None:
            begin(*arguments)
            fails.begin = begin
            broken.set()
            raise MemoryError

        fails.begin = raising
        waiting = [Background(run.step) for run in runs]
        with pytest.raises(MemoryError):
            waiting[2].result()
        assert broken.is_set()
        again = Background(runs[2].step)
        for each in (*waiting[:2], again):
            assert each.result().counted
        assert len({run.fingerprint for run in runs}) == 1


def ended(node: Cluster, waiting: Background[Any]) -> bool:
    """Abort until something was under way that could be."""
    node.abort("enough for today")
    return waiting.ended


def test_a_newcomer_gets_the_state_and_takes_its_share() -> None:
    """It begins from other weights, gets those of the others, and all go on alike."""
    job = new_job()
    with clusters(2, job) as nodes:
        runs = [Regression(node) for node in nodes]
        train(runs, 3)
        goal: list[int] = []  # known to all long before anybody is there

        def go_on(run: Regression) -> None:
            while not goal or run.trainer.step_count < goal[0]:
                run.step()

        def come() -> None:
            with join(2, job) as node:  # and leaves as soon as it is through
                newcomer = Regression(node, seed=8)
                newcomer.step()
                goal.append(newcomer.trainer.step_count + 9)
                runs.append(newcomer)
                go_on(newcomer)

        before = runs[:2]
        together(come, *(lambda run=run: go_on(run) for run in before))
        assert len({run.fingerprint for run in runs}) == 1
        assert runs[2].counted
        runs[0].sampler.check()
        assert set(runs[2].counted) <= set(runs[0].sampler.log)


def test_some_have_the_result_and_one_has_not() -> None:
    """One leaves then: nobody can have applied it, so it is averaged again, by all who are left."""
    with clusters(3) as nodes:
        runs = [Regression(node) for node in nodes]
        late: Any = runs[2].trainer
        complete, gone = Try.finish, threading.Event()
        outcomes: list[list[int]] = [[], [], []]

        def finish(self: Try, *arguments: Any) -> None:
            complete(self, *arguments)
            if self is late._begun and late.step_count == 3 and not gone.is_set():
                eventually(lambda: bool(holds(0) and holds(1)))
                gone.set()
                nodes[1].close()
                assert late._ground._stage.over.wait(PATIENCE)
                raise Aborted("As if the last piece had never come")

        def holds(place: int) -> bool:
            return runs[place].trainer._report.holds

        def work(place: int) -> None:
            try:
                while runs[place].trainer.step_count < 8:
                    outcome = runs[place].step()
                    outcomes[place].append(outcome.tries)
            except DistributedError:
                assert place == 1

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Try, "finish", finish)
            together(*(functools.partial(work, place) for place in range(3)))
        assert outcomes[0] == outcomes[2] == [1, 1, 1, 2, 1, 1, 1, 1]
        assert runs[0].fingerprint == runs[2].fingerprint
        runs[0].sampler.check()


def test_who_had_the_last_samples_of_an_epoch_leaves() -> None:
    """The others had none in hand: they take those samples anew, and each counts once."""
    with clusters(3) as nodes:
        runs = [Regression(node) for node in nodes]
        for run in runs:
            run.sampler.committed = ((0, SAMPLES - 1),)
        everywhere(runs, lambda run: run.trainer.start())
        taken = everywhere(runs, lambda run: run.trainer.take().tolist())
        ((holder, last),) = [(place, each) for place, each in enumerate(taken) if each]
        nodes[holder].close()
        rest = [run for place, run in enumerate(runs) if place != holder]
        train(rest, 2)
        assert rest[0].fingerprint == rest[1].fingerprint
        assert rest[0].sampler.log == rest[1].sampler.log
        assert [each for each in rest[0].sampler.log if each[0] == 0] == [(0, last[0])]


def test_two_have_taken_the_same_samples() -> None:
    """As after an absence: those of one count, and nobody ends for that."""
    with clusters(3) as nodes:
        runs = [Regression(node) for node in nodes]
        train(runs, 1)
        everywhere(runs, lambda run: run.trainer.take())
        first, second = runs[0].trainer, runs[1].trainer
        second._taken = first._taken
        nodes[2].close()
        counted: list[bool] = []

        def work(run: Regression) -> None:
            while run.trainer.step_count < 12:
                counted.append(run.step().counted)

        everywhere(runs[:2], work)
        assert counted.count(False) == 1
        assert runs[0].fingerprint == runs[1].fingerprint
        runs[0].sampler.check()
        assert runs[0].sampler.epoch == 1
