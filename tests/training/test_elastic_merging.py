"""Members that trained apart meet: ancestry decides, and the side that loses is told."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck import (
    Aborted,
    Checkpointer,
    DistributedContext,
    DistributedMetrics,
    NoQuorum,
    SimulatedBackend,
)
from potluck._types import Branch, NodeId, ProcessId, View
from potluck.training.averaging import DiscardedWork, compare_states
from potluck.training.checkpoint import latest
from potluck.training.elastic import ElasticTrainer, ViewScope
from potluck.training.state import TrainingState
from potluck.training.steps import Milestone, Missing, Position, StepHistory
from support.clusters import everywhere, join, new_job
from support.elastic import SAMPLES, Regression
from support.gates import Gate
from support.ports import free_port
from support.threads import PATIENCE, Background, eventually, together

LINE, CHILD, OTHER = (letter * 32 for letter in "fab")


opened: list[DistributedContext] = []


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    """End the groups that a test has made."""
    yield
    while opened:
        opened.pop().close()


def members(count: int) -> list[DistributedContext]:
    """A group of this many."""
    made = [DistributedContext(each) for each in SimulatedBackend.create_group(count)]
    opened.extend(made)
    return made


class Stage(ViewScope):
    """Ground on which a test says which view holds."""

    view = View(LINE, 1, ())

    def __init__(self, group: DistributedContext) -> None:
        super().__init__(group)
        self.events: list[Any] = []
        self.away: dict[ProcessId, str] = {}
        self.ended: tuple[ProcessId, ...] = ()
        self.insists = False
        self.awaited: list[dict[ProcessId, str]] = []
        self.noted: list[tuple[int, tuple[Branch, ...]]] = []
        self.has_begun = True

    @contextlib.contextmanager
    def enter_view(self, timeout: float | None) -> Iterator[View]:
        """The view that the test has set."""
        del timeout
        yield self.view

    @property
    def is_constant(self) -> bool:
        """As the test says."""
        return self.has_begun and not self.view.ancestry

    def note_progress(
        self, samples: int, origin: tuple[Branch, ...], steps: int, what: str = "step"
    ) -> None:
        """Remember what the cluster is told."""
        super().note_progress(samples, origin, steps, what)
        self.noted.append((samples, origin))

    def left_out(
        self, awaited: Mapping[ProcessId, str]
    ) -> tuple[Missing, tuple[ProcessId, ...], bool]:
        """As the test says."""
        return tuple({**awaited, **self.away}.items()), self.ended, self.insists

    def note_awaited(self, awaited: Mapping[ProcessId, str]) -> None:
        """Remember what observers are told."""
        super().note_awaited(awaited)
        self.awaited.append(dict(awaited))

    def note_event(self, event: object) -> None:
        """Remember it."""
        super().note_event(event)
        self.events.append(event)


class Player:
    """A member whose views are set by the test."""

    def __init__(self, name: str, **options: Any) -> None:
        (context,) = members(1)
        self.metrics = DistributedMetrics()
        self.run = Regression(context, seed=ord(name), **options)
        self.trainer: Any = self.run.trainer
        self.stage = self.trainer._scope = Stage(context)

    @property
    def lost(self) -> DiscardedWork:
        """What it was told."""
        told = self.trainer.discarded
        assert isinstance(told, DiscardedWork)
        return told

    def enter(self, view: View, context: DistributedContext) -> None:
        """Be in a view, in this group."""
        context._count_in(self.metrics)
        self.trainer._group = self.stage.group = context
        self.stage.view = view


def meet(
    players: Sequence[Player],
    epoch: int,
    lineage: str = LINE,
    ancestry: tuple[Branch, ...] = (),
) -> None:
    """Put members into one view, in this order of ranks."""
    view = View(
        lineage,
        epoch,
        tuple(ProcessId(NodeId("a" * 32), each + 1) for each in range(len(players))),
        ancestry,
    )
    for player, context in zip(players, members(len(players)), strict=True):
        player.enter(view, context)


def train(players: Sequence[Player], steps: int) -> None:
    """All of them make this many steps more."""

    def work(player: Player) -> None:
        player.trainer.start()
        goal = player.trainer.step_count + steps
        while player.trainer.step_count < goal:
            player.run.step()

    everywhere(players, work)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_many_steps_made_alone_do_not_win(
    order: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """A child of view 1 made 40 steps, the others 2 in view 2: theirs count, and it is told."""
    players = [Player(name) for name in "xyz"]
    meet(players, 1)
    train(players, 4)
    *others, alone = players
    meet(others, 2)
    train(others, 2)
    meet([alone], 1, CHILD, (Branch(LINE, 1),))
    train([alone], 40)
    assert alone.trainer._report.ancestry == (Branch(LINE, 1),)
    assert alone.trainer.discarded is None
    before, counted = alone.trainer._report.samples, others[0].trainer._report.samples
    assert before > counted
    meet([players[place] for place in order], 3)
    with caplog.at_level(logging.WARNING):
        train(players, 1)
    assert {each.trainer.position for each in players} == {Position(LINE, 3, 7)}
    assert len({each.run.fingerprint for each in players}) == 1
    lost = alone.lost
    assert (lost.steps, lost.total_steps) == (40, 40)
    assert lost.samples == lost.total_samples == before - 4 * 12
    assert (lost.before, lost.after) == (Position(CHILD, 1, 44), Position(LINE, 2, 6))
    assert (
        f"40 steps ({lost.samples:,} samples) made on this machine while it was apart from the "
        "others are discarded: the cluster continues from step 6. Reason: both sides have a common "
        "past, which the others followed to view 2 and this machine to view 1."
    ) in caplog.text
    assert caplog.text.count("are discarded") == 1
    assert alone.stage.events == [lost]
    assert alone.metrics.snapshot().training.withdrawn == 40
    assert [each.trainer.discarded for each in others] == [None, None]
    assert others[0].run.sampler.log == others[1].run.sampler.log
    others[0].run.sampler.check()


def test_a_second_loss_is_added_to_the_first() -> None:
    """The record shows the latest and the total; a single step is a single step."""
    players = [Player(name) for name in "xy"]
    meet(players, 1)
    train(players, 1)
    for epoch, steps in ((1, 3), (3, 1)):
        meet(players[:1], epoch + 1)
        train(players[:1], 1)
        meet(players[1:], 1, f"{epoch:032d}", (Branch(LINE, epoch),))
        train(players[1:], steps)
        meet(players, epoch + 2)
        train(players, 1)
    lost = players[1].lost
    assert (lost.steps, lost.total_steps) == (1, 4)
    assert "1 step (12 samples) made on this machine while it was apart from the others is" in str(
        lost
    )


def test_what_was_merely_missed_is_not_lost() -> None:
    """A member that was away, and a newcomer, get the state of the others: nothing to tell."""
    players = [Player(name) for name in "xyz"]
    meet(players[:2], 1)
    train(players[:2], 3)
    meet(players[:1], 2)
    train(players[:1], 5)
    players[2].stage.has_begun = False
    meet(players, 3)
    train(players, 1)
    assert [each.trainer.discarded for each in players] == [None] * 3
    assert len({each.run.fingerprint for each in players}) == 1


def test_a_child_continues_from_the_state_of_its_parent() -> None:
    """Its founders have that state; a newcomer gets it, and its ancestry with it."""
    players = [Player(name) for name in "xyz"]
    meet(players[:2], 1)
    train(players[:2], 3)
    meet([players[2], *players[:2]], 1, CHILD, (Branch(LINE, 1),))
    train(players, 2)
    reports = [each.trainer._report for each in players]
    assert {each.position for each in reports} == {Position(CHILD, 1, 5)}
    assert {each.history for each in reports} == {
        StepHistory(Position(CHILD, 1, 5), (Branch(LINE, 1),), 60, (Milestone(LINE, 1, 3, 36),))
    }
    assert [each.trainer.discarded for each in players] == [None] * 3
    assert len({each.run.fingerprint for each in players}) == 1


def test_unrelated_trainings_are_compared_by_samples() -> None:
    """One made more steps with smaller batches: the one with more samples counts."""
    steps, samples = Player("x", batch=2), Player("y")
    meet([steps], 1, CHILD)
    train([steps], 9)
    meet([samples], 1, OTHER)
    train([samples], 2)
    meet([steps, samples], 1)
    train([steps, samples], 1)
    assert steps.trainer._report.history.trail == (Milestone(OTHER, 1, 2, 24),)
    assert steps.trainer.discarded.steps == 9
    assert "the others have 24 committed samples, this machine 18" in steps.trainer.discarded.reason
    assert samples.trainer.discarded is None


def test_samples_are_counted_over_epochs_and_noted() -> None:
    """The cluster is told with every step, and where the lineage comes from."""
    player = Player("x", batch=64)
    meet([player], 1)
    train([player], 3)
    assert player.run.sampler.epoch == 1
    assert player.run.sampler.counted == SAMPLES + 64 == player.trainer._report.samples
    assert player.stage.noted == [(64, ()), (SAMPLES, ()), (SAMPLES + 64, ())]


def test_without_a_sampler_weights_are_samples() -> None:
    """A newcomer has the same number as the others; fractions count as a step each."""
    players = [
        ElasticTrainer(each, TrainingState(model=np.zeros(1)), lambda _: None)
        for each in members(2)
    ]
    for weight, total in ((7.6, 15), (0.1, 16), (None, 18), (1e30, (1 << 62) - 1)):
        everywhere(
            players, functools.partial(ElasticTrainer.step, gradients=np.zeros(1), weight=weight)
        )
        assert {each._report.samples for each in players} == {total}


def test_a_checkpoint_records_its_ancestry(tmp_path: Path) -> None:
    """A founding that loads it is a child of its lineage, and later ones of both."""
    players = [Player(name) for name in "xyz"]
    meet(players[:2], 4)
    train(players[:2], 2)
    with Checkpointer(tmp_path) as saver:
        players[0].trainer.save(saver)
    found = latest(tmp_path)
    assert found is not None
    assert found.history == StepHistory(Position(LINE, 4, 2), (), 24)
    loader = Player("w")
    loader.trainer.resume(found)
    assert loader.stage.noted == [(24, (Branch(LINE, 4),))]
    meet([loader, players[2]], 1, CHILD)
    train([loader, players[2]], 1)
    for each in (loader, players[2]):
        assert each.trainer._report.history == StepHistory(
            Position(CHILD, 1, 3), (Branch(LINE, 4),), 36, (Milestone(LINE, 4, 2, 24),)
        )
        assert each.stage.noted[-1] == (36, (Branch(LINE, 4),))
    with Checkpointer(tmp_path) as saver:
        players[2].trainer.save(saver)
    again = latest(tmp_path)
    assert again is not None
    assert again.history == loader.trainer._report.history


def test_machines_resume_from_what_each_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One trained on by itself after loading: its checkpoint contains the other one's state."""
    first = Player("x")
    meet([first], 1)
    train([first], 3)
    with Checkpointer(tmp_path / "a") as saver:
        first.trainer.save(saver)
    second = Player("y")
    second.trainer.resume(latest(tmp_path / "a"))
    meet([second], 1, CHILD)
    train([second], 2)
    with Checkpointer(tmp_path / "b") as saver:
        second.trainer.save(saver)
    again = [Player("z"), Player("w")]
    for player, folder in zip(again, "ab", strict=True):
        player.trainer.resume(latest(tmp_path / folder))
    # Whoever leads the founding, and whatever its origin is.
    meet(again, 1, OTHER, (Branch(LINE, 1),))
    caplog.clear()
    train(again, 1)
    told = sorted(line for line in caplog.messages if line.startswith("Resumed"))
    assert len(told) == 2
    assert told[0].startswith("Resumed from step 5 (another machine's; of this one: step 3, check")
    assert told[1].startswith("Resumed from step 5 (checkpoint of ")
    assert {each.trainer.step_count for each in again} == {6}
    assert len({each.run.fingerprint for each in again}) == 1
    assert [each.trainer.discarded for each in again] == [None, None]


def test_a_checkpoint_that_loses_is_named(tmp_path: Path) -> None:
    """It was loaded, not made here."""
    first, second = Player("x"), Player("y")
    meet([first], 1)
    train([first], 3)
    with Checkpointer(tmp_path) as saver:
        first.trainer.save(saver)
    second.trainer.resume(latest(tmp_path))
    meet([first], 1, OTHER)
    train([first], 5)
    player = Player("z")
    meet([player], 1, CHILD)
    train([player], 9)
    meet([player, second], 2, CHILD)
    train([player, second], 1)
    assert "3 steps (36 samples) that this machine loaded from a checkpoint are discarded" in str(
        second.trainer.discarded
    )


def test_a_step_that_is_lost_within_its_call_does_not_count() -> None:
    """It is committed as a view begins that ends at once; in the next one it is discarded."""
    one, other = Player("x"), Player("y")
    meet([one, other], 1)
    train([one, other], 2)
    meet([other], 2)
    train([other], 1)
    meet([one], 1, CHILD, (Branch(LINE, 1),))
    trainer = one.trainer
    gradient = one.run.gradient(trainer.take())
    calls: list[str] = []
    meanwhile: list[Background[None]] = []

    def barrier(timeout: float | None = None) -> None:
        del timeout
        calls.append("barrier")
        raise Aborted("As if the view had ended")

    def meet_no_one(tokens: Sequence[str]) -> None:
        del tokens, trainer._saving.meet
        calls.append("settled")
        raise Aborted("As if this view had ended too")

    def can_continue(error: Exception) -> bool:
        del error
        if calls == ["barrier"]:
            meet([one], 2, CHILD, (Branch(LINE, 1),))
            trainer._saving.meet = meet_no_one
        else:
            assert trainer.position == Position(CHILD, 1, 3)
            meet([one, other], 3)
            meanwhile.append(Background(other.trainer.start))
        return True

    trainer._group.barrier = barrier
    one.stage.can_continue = can_continue  # type: ignore[method-assign]
    outcome = trainer.step(gradient)
    meanwhile[0].result()
    assert calls == ["barrier", "settled"]
    assert outcome.counted is False
    assert trainer.discarded.steps == 1
    assert one.run.fingerprint == other.run.fingerprint


@pytest.mark.parametrize("why", ["it has ended", "a person insists"])
def test_a_training_waits_for_a_member_that_may_have_its_state(
    why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """People and observers learn for whom, once, and also that the waiting is over."""
    den = ProcessId(NodeId("d" * 32), 1)
    player = Player("x", timeout=0.6)
    meet([player], 1, OTHER)
    train([player], 2)
    stage = player.stage
    stage.has_begun, stage.away = False, {den: "den"}
    meet([player], 3)
    with pytest.raises(NoQuorum, match=r"Waited 0\.6 s for the state .* den may have it"):
        player.trainer.start()
    assert stage.awaited == [{den: "den"}]
    assert caplog.text.count("Training waits: no member here has the state") == 1
    if why == "it has ended":
        stage.ended = (den,)
    else:
        stage.insists = True
    player.trainer.start()
    assert stage.awaited == [{den: "den"}, {}]
    train([player], 1)
    assert player.trainer.step_count == 3


def test_a_member_looks_again_for_the_one_it_waits_for() -> None:
    """It need not be called again when that has come to its end."""
    den = ProcessId(NodeId("d" * 32), 1)
    player = Player("x", timeout=PATIENCE)
    meet([player], 1, OTHER)
    train([player], 2)
    stage = player.stage
    stage.has_begun, stage.away = False, {den: "den"}
    meet([player], 3)
    starting = Background(player.trainer.start)
    eventually(lambda: bool(stage.awaited))
    stage.ended = (den,)
    starting.result()
    assert stage.awaited == [{den: "den"}, {}]


def test_only_what_the_target_lacks_is_counted() -> None:
    """The comparison of two states alone."""
    mine = StepHistory(Position(CHILD, 1, 9), (Branch(LINE, 1),), 90, (Milestone(LINE, 1, 4, 40),))
    assert compare_states(mine, mine, LINE, None) is None
    lost = compare_states(mine, StepHistory(Position(OTHER, 1, 2), (), 900), OTHER, None)
    assert lost is not None
    assert (lost.steps, lost.samples) == (9, 90)
    again = compare_states(mine, StepHistory(Position(LINE, 2, 5), (), 50), LINE, lost)
    assert again is not None
    assert (again.steps, again.samples, again.total_steps, again.total_samples) == (5, 50, 14, 140)


@pytest.mark.timeout(120)
def test_two_clusters_that_trained_apart_meet(caplog: pytest.LogCaptureFixture) -> None:
    """Real nodes, founded where they cannot hear each other: samples decide, the loser is told."""
    job, apart = new_job(), {"neighbours": False}
    port = free_port()
    with Gate(port) as gate, contextlib.ExitStack() as stack:
        first = stack.enter_context(join(1, job, peers=[f"127.0.0.1:{gate.port}"], **apart))
        second = stack.enter_context(join(1, job, port=port, **apart))
        runs = [Regression(node, seed=place) for place, node in enumerate((first, second))]
        made = (7, 3)
        for run, steps in zip(runs, made, strict=True):
            while run.trainer.step_count < steps:
                run.step()
        assert first.view is not None
        assert second.view is not None
        assert first.view.lineage != second.view.lineage
        lineage = first.view.lineage
        gate.open()
        eventually(lambda: first.view == second.view, 2 * PATIENCE)

        def work(run: Regression) -> None:
            while run.trainer.step_count < made[0] + 3:
                run.step()

        together(*(functools.partial(work, run) for run in runs))
        assert {run.trainer.position.lineage for run in runs} == {lineage}
        assert len({run.fingerprint for run in runs}) == 1
        winner, loser = (run.trainer for run in runs)
        assert winner.discarded is None
        assert loser.discarded is not None
        assert (loser.discarded.steps, loser.discarded.samples) == (3, 36)
        assert "3 steps (36 samples) made on this machine" in caplog.text
        eventually(lambda: loser.discarded in [each.event for each in second.events()])
        runs[0].sampler.check()
