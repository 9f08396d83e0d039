"""Checkpoints of elastic trainings: shared folders, what each member alone has, and resuming."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck import DistributedContext, GradientCompressor, SimulatedBackend
from potluck.core.histories import History, Position
from potluck.training.checkpoint import latest
from potluck.training.checkpoint_reading import checkpoints
from potluck.training.elastic import ElasticTrainer
from potluck.training.elastic_saving import FOLDER, RESUME, Saving
from potluck.training.state import TrainingState
from support.clusters import everywhere
from support.elastic import Regression


def members(count: int) -> list[DistributedContext]:
    """A group of so many."""
    return [DistributedContext(each) for each in SimulatedBackend.create_group(count)]


def train(folders: list[Path], steps: int, **options: Any) -> list[Regression]:
    """Members with a folder each train to a step, saving every second one."""
    group = members(len(folders))
    runs = [
        Regression(context, seed=place, checkpoints=folder, save_every=2, **options)
        for place, (context, folder) in enumerate(zip(group, folders, strict=True))
    ]

    def work(run: Regression) -> None:
        with run.trainer:
            while run.trainer.step_count < steps:
                run.step()

    everywhere(runs, work)
    for context in group:
        context.close()
    return runs


@pytest.fixture
def resuming(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``potluck run --resume`` sets it."""
    monkeypatch.setenv(RESUME, "1")


def test_those_who_share_a_folder_write_parts(tmp_path: Path) -> None:
    """Two share one folder, the third has its own: nobody said so, and both are complete."""
    together_, alone = tmp_path / "nas", tmp_path / "laptop"
    train([together_, alone, together_], 5, keep=2)
    shared, single = latest(together_, verify=True), latest(alone, verify=True)
    assert shared is not None
    assert single is not None
    assert (shared.step, shared.world_size) == (4, 2)
    assert (single.step, single.world_size) == (4, 1)
    assert [each.step for each in checkpoints(together_)] == [4, 2]
    assert np.array_equal(shared.tree()["model"], single.tree()["model"])
    assert not list(together_.glob(".here-*"))


@pytest.mark.usefixtures("resuming")
@pytest.mark.parametrize("number", [1, 2, 4])
def test_any_number_of_members_goes_on_from_the_last_complete_one(
    tmp_path: Path, number: int
) -> None:
    """Saved by three who shared a folder; a save that was cut off counts nothing."""
    first = train([tmp_path] * 3, 7)
    for path in tmp_path.glob("step-*6-*/part-00001*.json"):
        path.unlink()  # as if one had been killed while it saved step 6
    runs = train([tmp_path] * number, 4)
    assert [run.trainer.step_count for run in runs] == [4] * number
    again = train([tmp_path] * number, 9)
    assert {run.trainer.step_count for run in again} == {9}
    assert len({run.fingerprint for run in again}) == 1
    assert first[0].loss > again[0].loss


@pytest.mark.usefixtures("resuming")
def test_who_has_nothing_gets_the_state_of_those_who_have(tmp_path: Path) -> None:
    """One machine lost its disk: it goes on with the others."""
    folders = [tmp_path / "a", tmp_path / "b"]
    train(folders, 4)
    runs = train([folders[0], tmp_path / "new"], 4)
    assert len({run.fingerprint for run in runs}) == 1
    assert {run.trainer.step_count for run in runs} == {4}


@pytest.mark.usefixtures("resuming")
def test_resuming_without_anything_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder, or an empty one: it begins anew, and the log says why."""
    assert Saving(None, 10, 3).found() is None
    assert "There is nothing to resume from" in caplog.text
    monkeypatch.setenv(FOLDER, str(tmp_path))
    saving = Saving(None, 10, 3)
    assert saving.folder == tmp_path
    assert saving.found() is None
    assert "No complete checkpoint" in caplog.text


def test_without_being_asked_it_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints that lie in the folder are not loaded, and the log says so."""
    train([tmp_path], 4)
    assert not caplog.text
    runs = train([tmp_path], 1)
    assert runs[0].trainer.step_count == 1
    assert "has a checkpoint of step 4, which is not loaded" in caplog.text


def test_a_folder_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What went wrong is said; training goes on."""
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        runs = train([tmp_path / "file" / "folder"], 5)
    assert runs[0].trainer.step_count == 5
    assert "No checkpoints here" in caplog.text
    assert "The last checkpoint here failed" in caplog.text


def test_a_disk_that_was_full_for_a_while_ends_nothing(tmp_path: Path) -> None:
    """The next checkpoint is saved as if nothing had been."""
    tree = {"model": np.arange(4.0)}
    saving = Saving(tmp_path / "file", 1, 3)
    (tmp_path / "file").write_text("in the way")
    failed = saving.save(tree, None, History(Position("f" * 32, 1, 1)))
    assert failed is not None
    assert failed.ends_within(None)
    (tmp_path / "file").unlink()
    saving.save(tree, None, History(Position("f" * 32, 1, 2)))
    saving.close()
    found = latest(tmp_path / "file")
    assert found is not None
    assert found.step == 2


@pytest.mark.usefixtures("resuming")
def test_a_checkpoint_of_another_training_is_named(tmp_path: Path) -> None:
    """Which one it is, and what does not fit."""
    train([tmp_path], 2)
    (alone,) = members(1)
    other = TrainingState(model=np.zeros(3), optimizer=np.zeros(3), sampler=np.zeros(1))
    with alone, pytest.raises(ValueError, match=r"step-0.* is of another training .*model"):
        ElasticTrainer(alone, other, lambda _: None, checkpoints=tmp_path)


def compressed(context: DistributedContext, folder: Path, number: int) -> Any:
    """A member that compresses, after so many steps, each with gradients of its own."""
    weights = np.zeros(600, np.float32)
    compressor = GradientCompressor("topk:0.1")
    trainer = ElasticTrainer(
        context,
        TrainingState(model=weights),
        lambda mean: np.subtract(weights, mean, out=weights),
        compressor=compressor,
        checkpoints=folder,
        save_every=3,
    )
    source = np.random.default_rng(context.rank)
    with trainer:
        for _ in range(number):
            trainer.step(source.normal(size=600).astype(np.float32))
    return compressor


@pytest.mark.parametrize("number", [1, 2, 3, 5])
def test_what_compression_has_left_behind_is_saved(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of it is there after the restart, and none of it twice, on any number of members."""
    group = members(3)
    before = everywhere(group, lambda each: compressed(each, tmp_path, 3))
    left = sum(each.residuals["gradients"] for each in before)
    monkeypatch.setenv(RESUME, "1")
    again = members(number)
    after = everywhere(again, lambda each: compressed(each, tmp_path, 0))
    found = [each.residuals["gradients"] for each in after if "gradients" in each.residuals]
    assert len(found) == min(3, number)
    assert np.allclose(sum(found), left, atol=1e-6)
    assert {each.step for each in after if each.residuals} == {3}
    for context in (*group, *again):
        context.close()
