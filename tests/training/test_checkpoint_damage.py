"""Damage to checkpoints is found wherever it is, said, and never passed off as a beginning."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from potluck import Cluster, DistributedContext, ElasticTrainer, IoError, SimulatedBackend
from potluck.training.checkpoint import Checkpointer, latest
from potluck.training.checkpoint_manifest import digest
from potluck.training.checkpoint_reading import Checkpoint, Damaged
from potluck.training.elastic_saving import FRESH_START, RESUME
from potluck.training.state import TrainingState
from support.clusters import clusters
from support.threads import eventually


def save(folder: Path, *steps: int) -> list[Path]:
    """Checkpoints of these steps; where they are."""
    with Checkpointer(folder, keep=9) as saver:
        return [
            saver.save({"w": np.arange(4.0) + step, "b": np.arange(3)}, step, wait=True).wait()
            for step in steps
        ]


def spoiled(data: bytes) -> Iterator[bytes]:
    """A file with each of its bytes changed in two ways, cut off anywhere, and longer."""
    for place in range(len(data)):
        for bit in (1, 32):
            yield data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :]
    for length in range(0, len(data), 7):
        yield data[:length]
    yield data[:-1]
    yield data + b"\0"
    yield data + data


@pytest.mark.parametrize("suffix", ["safetensors", "json"])
def test_every_byte_of_every_file_is_covered(tmp_path: Path, suffix: str) -> None:
    """Length, header, padding, data, and the manifest itself: opened before, and opened after."""
    (made,) = save(tmp_path, 1)
    (path,) = made.glob(f"*.{suffix}")
    data = path.read_bytes()
    before = Checkpoint(made)
    before.verify()
    for wrong in spoiled(data):
        path.write_bytes(wrong)
        with pytest.raises(IoError):
            before.verify()
        with pytest.raises(IoError):
            Checkpoint(made).verify()
    path.write_bytes(data)
    before.verify()


def wreck(made: Path, how: str) -> None:
    """Damage a checkpoint."""
    (manifest,), (data,) = made.glob("*.json"), made.glob("*.safetensors")
    match how:
        case "bad text with a right checksum":
            text = (
                manifest.read_bytes()
                .partition(b"\n")[2]
                .replace(b'"lineage":"', b'"lineage":"\xff')
            )
            manifest.write_bytes(b"potluck-checkpoint 1 " + digest(text).encode() + b"\n" + text)
        case "bad text":
            manifest.write_bytes(manifest.read_bytes()[:80] + b"\xff\xfe" * 40)
        case "no data":
            data.unlink()
        case "another file":
            manifest.write_bytes(b"\x80\x81\x82")
        case "a folder":
            manifest.unlink()
            manifest.mkdir()
        case "header":
            octets = bytearray(data.read_bytes())
            octets[12] ^= 1
            data.write_bytes(octets)
        case "data":
            octets = bytearray(data.read_bytes())
            octets[-1] ^= 1
            data.write_bytes(octets)
        case "a manifest that does not vouch for its content":
            text = manifest.read_bytes()
            manifest.write_bytes(text.replace(b'"step":3', b'"step":4'))


WAYS = (
    "bad text with a right checksum",
    "bad text",
    "no data",
    "another file",
    "a folder",
    "header",
    "data",
    "a manifest that does not vouch for its content",
)


@pytest.mark.parametrize("how", WAYS)
def test_the_one_before_is_found_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """Which checkpoint is damaged, what is wrong with it, and which one is used instead."""
    *_, newest = save(tmp_path, 1, 2, 3)
    wreck(newest, how)
    with caplog.at_level(logging.WARNING):
        found = latest(tmp_path, verify=True)
    assert found is not None
    assert found.step == 2
    (record,) = caplog.records
    assert f"{newest} is damaged: " in record.message
    assert "Step 2 is used instead" in record.message


def test_what_is_older_than_the_one_in_use_is_no_news(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing is lost by it."""
    older, _ = save(tmp_path, 1, 2)
    wreck(older, "bad text")
    assert latest(tmp_path, verify=True) is not None
    assert not caplog.records


@pytest.mark.parametrize("verify", [False, True])
def test_if_all_are_damaged_that_is_an_error(tmp_path: Path, *, verify: bool) -> None:
    """It names them, and says how to begin anew; a folder without any is no error."""
    for made in save(tmp_path, 1, 2):
        wreck(made, "bad text")
    with pytest.raises(IoError, match=r"All checkpoints in .*step-.*2.*step-.*1.*fresh_start=True"):
        latest(tmp_path, verify=verify)
    assert latest(tmp_path, verify=verify, fresh_start=True) is None
    assert latest(tmp_path / "empty", verify=verify) is None


# -- resuming ------------------------------------------------------------------------------------


def trainer_in(group: DistributedContext, folder: Path, **options: Any) -> ElasticTrainer:
    """A training of one array."""
    weights = np.zeros(4)

    def apply(mean: Any) -> None:
        weights[:] -= mean

    return ElasticTrainer(
        group, TrainingState(model=weights), apply, checkpoints=folder, save_every=1, **options
    )


def train(group: DistributedContext, folder: Path, steps: int) -> list[Path]:
    """Train, and save every step; where the checkpoints are."""
    with trainer_in(group, folder) as trainer:
        for _ in range(steps):
            trainer.step(np.ones(4))
    return sorted(folder.glob("step-*"))


@pytest.mark.parametrize("how", WAYS)
def test_a_training_resumes_from_the_last_good_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Never from damaged bytes; the log and the events of the cluster say what was passed over."""
    with clusters(1) as (node,):
        *_, newest = train(node, tmp_path, 3)
        wreck(newest, how)
        monkeypatch.setenv(RESUME, "1")
        trainer = trainer_in(node, tmp_path)
        assert trainer.step_count == 2
        eventually(lambda: bool(damage_told_to(node)))
        (event,) = damage_told_to(node)
        assert event.folder == newest
        assert event.resumed == 2
        trainer.close()


def damage_told_to(node: Cluster) -> list[Damaged]:
    """What the events of a cluster say of damaged checkpoints."""
    return [each.event for each in node.events() if isinstance(each.event, Damaged)]


def test_a_training_with_damaged_checkpoints_alone_does_not_begin_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless that is asked for, in the program or beside it."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        for made in train(alone, tmp_path, 2):
            wreck(made, "header")
        monkeypatch.setenv(RESUME, "1")
        with pytest.raises(IoError, match=r"All checkpoints .* are damaged.*--fresh-start"):
            trainer_in(alone, tmp_path)
        trainer = trainer_in(alone, tmp_path, fresh_start=True)
        assert trainer.step_count == 0
        trainer.close()
        monkeypatch.setenv(FRESH_START, "1")
        again = trainer_in(alone, tmp_path)
        assert again.step_count == 0
        again.close()
