"""Checkpoints: whole or not at all, checked, removed in time, and read by any number of ranks."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest

from potluck import (
    Cluster,
    DistributedContext,
    ElasticTrainer,
    GradientCompressor,
    SimulatedBackend,
)
from potluck import IoError as potluck_IoError
from potluck._types import Branch
from potluck.errors import IoError
from potluck.membership.messages import MAX_BRANCHES
from potluck.training import checkpoint
from potluck.training.checkpoint import FOLDER, FRESH_START, RESUME, Checkpointer, Saving, latest
from potluck.training.checkpoint_files import (
    BLOCK,
    MAX_HEADER,
    SMALLEST_PART,
    Checkpoint,
    Damaged,
    Folder,
    Manifest,
    checkpoints,
    digest,
    part_of,
)
from potluck.training.state import TrainingState
from potluck.training.steps import Milestone, Position, StepHistory
from support.clusters import clusters, everywhere
from support.elastic import Regression
from support.interpreter import ask
from support.threads import PATIENCE, eventually


def tree(step: int = 1) -> dict[str, Any]:
    """A state with arrays of all kinds, larger and smaller than a block."""
    chance = np.random.default_rng(step)
    return {
        "model": {
            "large": chance.normal(size=(700, 401)).astype(np.float32),
            "small": np.arange(7, dtype=np.int64) * step,
            "scalar": np.float64(step),
            "empty": np.empty((0, 3), np.float16),
            "half": chance.normal(size=5000).astype(ml_dtypes.bfloat16),
        },
        "steps": step,
        "betas": (0.9, None),
    }


def assert_same(left: Any, right: Any) -> None:
    """Two such states are equal, bit by bit."""
    assert left["steps"] == right["steps"]
    assert left["betas"] == right["betas"]
    for name, array in left["model"].items():
        other = right["model"][name]
        assert (array.dtype, array.shape) == (other.dtype, other.shape)
        assert array.tobytes() == other.tobytes()


def save(folder: Path, world_size: int, step: int = 1, **facts: Any) -> None:
    """All ranks save, one after the other."""
    for rank in range(world_size):
        with Checkpointer(folder, rank=rank, world_size=world_size) as saver:
            saver.save(tree(step), step, **facts)


@pytest.mark.parametrize("world_size", [1, 4])
def test_what_was_saved_comes_back(tmp_path: Path, world_size: int) -> None:
    """Every array bit by bit, and every plain value."""
    save(tmp_path, world_size, 3, lineage="f" * 32, epoch=2)
    found = latest(tmp_path, verify=True)
    assert found is not None
    assert (found.lineage, found.epoch, found.step) == ("f" * 32, 2, 3)
    assert_same(found.tree(), tree(3))
    assert repr(found) == f"<Checkpoint of step 3, written by {world_size} ranks>"


def test_the_beginning_can_be_saved_too(tmp_path: Path) -> None:
    """Before the first step, in the first view."""
    save(tmp_path, 1, 0)
    found = latest(tmp_path, verify=True)
    assert found is not None
    assert (found.epoch, found.step) == (0, 0)


@pytest.mark.parametrize("readers", [1, 2, 3, 8])
def test_any_number_of_ranks_can_read_it(tmp_path: Path, readers: int) -> None:
    """Saved by 4, each of 2, 3 or 8 reads its own part; together they have everything once."""
    save(tmp_path, 4)
    found = latest(tmp_path)
    assert found is not None
    shards = [found.shard(rank, readers) for rank in range(readers)]
    for name, whole in tree()["model"].items():
        parts = sorted(
            (shard[f"model.{name}"] for shard in shards if f"model.{name}" in shard),
            key=lambda part: part.start,
        )
        together = np.concatenate([part.array.reshape(-1) for part in parts])
        assert together.tobytes() == whole.tobytes()
        assert {part.shape for part in parts} == {np.shape(whole)}
    sizes = [sum(part.array.nbytes for part in shard.values()) for shard in shards]
    assert max(sizes) < sum(sizes) / readers + BLOCK


def test_an_array_without_elements_belongs_to_one_rank(tmp_path: Path) -> None:
    """And no rank has an empty part of an array that has elements."""
    saved = {"empty": np.empty((0, 3)), "one": np.ones(1), "two": np.ones(2), "void": np.empty(0)}
    with Checkpointer(tmp_path) as saver:
        saver.save(saved, 1)
    found = latest(tmp_path)
    assert found is not None
    shards = [found.shard(rank, 3) for rank in range(3)]
    for name, array in saved.items():
        parts = [shard[name] for shard in shards if name in shard]
        assert sum(part.array.size for part in parts) == array.size
        assert len(parts) == max(1, sum(part.array.size > 0 for part in parts))
        assert parts[0].shape == array.shape


def test_an_array_without_elements_is_written_once(tmp_path: Path) -> None:
    """By one of the ranks, and so is one that is too small to be divided."""
    save(tmp_path, 3)
    headers: list[dict[str, Any]] = []
    for path in tmp_path.glob("step-*/*.safetensors"):
        data = path.read_bytes()
        headers.append(json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")]))
    for name, ranks in (("empty", 1), ("small", 1), ("scalar", 1), ("large", 3), ("half", 3)):
        assert sum(f"model.{name}" in header for header in headers) == ranks


def test_an_array_is_divided_from_its_smallest_parts_on() -> None:
    """Below that one rank has all of it."""
    assert [part_of(2 * SMALLEST_PART, 0, rank, 2) for rank in range(2)] == [(0, 256), (256, 512)]
    assert [part_of(2 * SMALLEST_PART - 1, 1, rank, 2) for rank in range(2)] == [(0, 0), (0, 511)]


@pytest.mark.parametrize(
    "wrong",
    [{"rank": -1}, {"rank": 1}, {"rank": 2, "world_size": 2}, {"world_size": 0}, {"keep": 0}],
)
def test_a_saver_that_makes_no_sense_is_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    """Before it touches the folder."""
    with pytest.raises(ValueError, match="Invalid rank"):
        Checkpointer(tmp_path / "new", **wrong)
    assert not (tmp_path / "new").exists()


def test_a_saver_knows_how_much_it_has_saved(tmp_path: Path) -> None:
    """Bytes of its own part, none before the first."""
    with Checkpointer(tmp_path) as saver:
        assert saver.last_nbytes == 0
        saver.save({"a": np.zeros(10), "b": np.zeros(3, np.float32)}, 1)
        assert saver.last_nbytes == 92


def test_elements_are_read_from_any_place(tmp_path: Path) -> None:
    """Also none, and across the parts of several ranks."""
    save(tmp_path, 3)
    found = latest(tmp_path)
    assert found is not None
    name = max(found.names, key=lambda each: found.read(each).size)
    whole = found.read(name)
    for start, stop in (
        (0, 1),
        (1, whole.size),
        (whole.size // 4, whole.size // 2),
        (5, 5),
        (5, 3),
    ):
        assert found.read(name, start, stop).tobytes() == whole[start:stop].tobytes()


def test_a_reader_touches_only_what_it_needs(tmp_path: Path) -> None:
    """Damage in the part of another rank does not concern it."""
    save(tmp_path, 2)
    found = latest(tmp_path)
    assert found is not None
    damage(next(tmp_path.glob("step-*/part-00001-of-00002.safetensors")), -1)
    found.shard(0, 2)
    with pytest.raises(IoError, match="is damaged"):
        found.shard(1, 2)


def damage(path: Path, place: int) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_a_damaged_one_is_passed_over(tmp_path: Path) -> None:
    """Where a byte has changed the checkpoint before it is found, in data and in manifests."""
    for step in (1, 2, 3):
        save(tmp_path, 1, step)
    damage(next(tmp_path.glob("step-*003-*/*.safetensors")), -5)
    damage(next(tmp_path.glob("step-*002-*/*.json")), 60)
    unchecked = latest(tmp_path)
    assert unchecked is not None
    assert unchecked.step == 3
    with pytest.raises(IoError, match=r"is damaged: .* block \d+ .*earlier checkpoint"):
        unchecked.tree()
    found = latest(tmp_path, verify=True)
    assert found is not None
    assert found.step == 1


def test_one_that_lacks_a_part_is_not_complete(tmp_path: Path) -> None:
    """While one of the ranks has not finished, the one before is the latest."""
    save(tmp_path, 2, 1)
    with Checkpointer(tmp_path, rank=0, world_size=2) as saver:
        saver.save(tree(2), 2)
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 1
    with Checkpointer(tmp_path, rank=1, world_size=2) as saver:
        saver.save(tree(2), 2)
    found = latest(tmp_path)
    assert found is not None
    assert found.step == 2


def test_parts_of_different_checkpoints_are_no_checkpoint(tmp_path: Path) -> None:
    """A part of another lineage in the same folder does not pass for the missing one."""
    save(tmp_path, 2, 1, lineage="a" * 32)
    save(tmp_path / "other", 2, 1, lineage="a" * 31 + "b")
    (mine,), (other,) = tmp_path.glob("step-*"), (tmp_path / "other").glob("step-*")
    for name in ("json", "safetensors"):
        part = f"part-00001-of-00002.{name}"
        (other / part).replace(mine / part)
    with pytest.raises(IoError, match="belong to different checkpoints"):
        latest(tmp_path)


def test_old_ones_are_removed(tmp_path: Path) -> None:
    """So many complete ones stay; what a crash has left, and other numbers of ranks, go as well."""
    leftover = tmp_path / "step-000000000001-000000-start-of-1"
    leftover.mkdir()
    (leftover / ".writing-part-00000-of-00001.json").write_bytes(b"half")
    save(tmp_path, 2, 2)
    with Checkpointer(tmp_path, keep=2) as saver:
        for step in (3, 4, 5):
            saver.save(tree(step), step)
    assert sorted(path.name[:17] for path in tmp_path.iterdir()) == [
        "step-000000000004",
        "step-000000000005",
    ]


def test_saving_does_not_hold_up_training(tmp_path: Path) -> None:
    """What is saved is what was there at the call, whatever training does meanwhile."""
    state = tree()
    with Checkpointer(tmp_path) as saver:
        work = saver.save(state, 1)
        state["model"]["large"][:] = 0
        assert work.wait(PATIENCE).is_dir()
    found = latest(tmp_path)
    assert found is not None
    assert_same(found.tree(), tree())


def test_a_failure_to_save_is_told(tmp_path: Path) -> None:
    """A folder that cannot be made: whoever waits learns it, and so does the next save."""
    (tmp_path / "file").write_bytes(b"")
    saver = Checkpointer(tmp_path / "file" / "below")
    with pytest.raises(OSError, match="below"):
        saver.save(tree(), 1, wait=True)
    with pytest.raises(OSError, match="below"):
        saver.save(tree(), 2)
    saver.save(tree(), 3)  # tried anew
    with pytest.raises(OSError, match="below"):
        saver.close()
    with pytest.raises(ValueError, match="Invalid rank 2"):
        Checkpointer(tmp_path, rank=2, world_size=2)
    with pytest.raises(TypeError, match="cannot be saved as safetensors"):
        Checkpointer(tmp_path).save({"a": np.zeros(2, np.longdouble)}, 1)


def test_the_files_are_safetensors(tmp_path: Path) -> None:
    """A length, a JSON header with types, shapes and offsets, then the bytes; nothing else."""
    save(tmp_path, 1)
    data = next(tmp_path.glob("step-*/*.safetensors")).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    assert length % 8 == 0
    assert header.pop("__metadata__")["step"] == "1"
    large = header["model.large"]
    start, stop = large["data_offsets"]
    assert (large["dtype"], large["shape"]) == ("F32", [700, 401])
    assert data[8 + length + start : 8 + length + stop] == tree()["model"]["large"].tobytes()
    assert max(each["data_offsets"][1] for each in header.values()) == len(data) - 8 - length
    assert header["model.half"]["dtype"] == "BF16"


def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    """Numbers that point outside are an error even where the checksum is right."""
    save(tmp_path, 1)
    good = Manifest.decode(next(tmp_path.glob("step-*/*.json")).read_bytes())
    piece = good.pieces[0]
    (large,) = (each for each in good.pieces if each.name == "model.large")
    for wrong in (
        msgspec.structs.replace(good, rank=1),
        msgspec.structs.replace(good, rank=-1),
        msgspec.structs.replace(good, size=-1),
        msgspec.structs.replace(good, begins=-1),
        msgspec.structs.replace(good, begins=MAX_HEADER + 1),
        msgspec.structs.replace(good, checksums=()),
        msgspec.structs.replace(
            good, pieces=(msgspec.structs.replace(large, offset=good.size - large.stop),)
        ),
        msgspec.structs.replace(good, pieces=(msgspec.structs.replace(large, offset=-1),)),
        msgspec.structs.replace(
            good, pieces=(msgspec.structs.replace(large, start=-1, stop=0, offset=8),)
        ),
        msgspec.structs.replace(
            good, pieces=(msgspec.structs.replace(large, start=1, stop=0, offset=8),)
        ),
        msgspec.structs.replace(good, size=good.size + BLOCK),
        msgspec.structs.replace(
            good, pieces=(msgspec.structs.replace(piece, offset=good.size + 1, stop=0, start=0),)
        ),
        msgspec.structs.replace(good, pieces=(msgspec.structs.replace(piece, stop=1 << 60),)),
        msgspec.structs.replace(good, pieces=good.pieces * 2),  # two arrays in the same bytes
        msgspec.structs.replace(good, pieces=(msgspec.structs.replace(piece, shape=(-2, -99)),)),
    ):
        with pytest.raises(IoError, match=r"contradicts|wrong about|impossible size"):
            Manifest.decode(wrong.encode())
    with pytest.raises(IoError, match="not a checkpoint manifest"):
        Manifest.decode(b"hello")
    found = latest(tmp_path)
    assert found is not None
    with pytest.raises(KeyError, match="no array 'x'"):
        found.read("x")


# -- killed at any instant --------------------------------------------------------------------

NURSERY = """
import os, sys
from pathlib import Path
import numpy as np
from potluck.training.checkpoint import Checkpointer, latest

def save_for_ever(folder):
    found = latest(folder)
    step = found.step if found else 0
    saver = Checkpointer(folder, keep=2)
    while True:
        step += 1
        saver.save({"a": np.full(100_000, step, np.int64), "b": np.full(10, step), "s": step}, step)
        if step == 2:
            saver.wait()
            os.write(1, b"begun\\n")

os.write(1, b"ready\\n")
for line in sys.stdin:
    if (child := os.fork()) == 0:
        save_for_ever(Path(line.strip()))
    os.write(1, b"%d\\n" % child)
    os.waitpid(child, 0)
    os.write(1, b"ended\\n")
"""


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    """A process that starts others which save, one after the other."""
    with subprocess.Popen(
        [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        assert process.stdin is not None
        process.stdin.close()


def kill_again_and_again(process: subprocess.Popen[str], folder: Path, times: int) -> None:
    """The last complete checkpoint loads each time, is the right one, and never an older one."""
    assert process.stdin is not None
    assert process.stdout is not None
    chance = random.Random(7)
    before, pace = 0, 0.0
    for kill in range(times):
        started = time.monotonic()
        process.stdin.write(f"{folder}\n")
        process.stdin.flush()
        child = int(process.stdout.readline())
        if kill == 0:
            assert process.stdout.readline() == "begun\n"
            pace = time.monotonic() - started  # of two saves on this machine, today
        time.sleep(chance.uniform(0.0, 1.5 * pace))  # any instant will do
        os.kill(child, signal.SIGKILL)
        assert process.stdout.readline() == "ended\n"
        found = latest(folder, verify=True)
        assert found is not None
        state = found.tree()
        assert state["s"] == found.step >= before
        assert set(state["a"].tolist()) == {found.step} == set(state["b"].tolist())
        before = found.step


def test_killed_while_saving_the_last_good_one_loads(
    nursery: subprocess.Popen[str], tmp_path: Path
) -> None:
    """Eight kills at random instants."""
    kill_again_and_again(nursery, tmp_path, 8)


@pytest.mark.soak
def test_killed_a_hundred_times_while_saving(
    nursery: subprocess.Popen[str], tmp_path: Path
) -> None:
    """A hundred kills at random instants."""
    kill_again_and_again(nursery, tmp_path, 100)


def test_an_earlier_training_does_not_crowd_out_a_new_one(tmp_path: Path) -> None:
    """Its checkpoints of later steps stay, and so do those that are saved now."""
    with Checkpointer(tmp_path, keep=2) as saver:
        for step in (700, 800, 900):
            saver.save({"w": np.zeros(2)}, step, lineage="a" * 32, wait=True)
        for step in (1, 2, 3):
            saver.save({"w": np.zeros(2)}, step, lineage="b" * 32, wait=True)
    assert [each.step for each in checkpoints(tmp_path)] == [900, 800, 3, 2]


def test_what_a_rank_alone_has_is_saved_beside_the_rest(tmp_path: Path) -> None:
    """Each writes its own, whatever its size; it is no part of the tree and never divided."""
    weights = np.arange(2000.0)
    for rank in range(2):
        with Checkpointer(tmp_path, rank=rank, world_size=2) as saver:
            own = {"left": np.full(3000, float(rank), np.float32), "member": rank}
            saver.save({"w": weights}, 4, own=own if rank else None)
    found = latest(tmp_path, verify=True)
    assert found is not None
    assert found.names == ["w"]
    assert np.array_equal(found.tree()["w"], weights)
    assert found.own(0) is None
    assert found.own(1)["member"] == 1
    assert np.array_equal(found.own(1)["left"], np.ones(3000, np.float32))


def test_a_lineage_is_no_path(tmp_path: Path) -> None:
    """Whatever a member or a file calls it, what is saved stays in the folder."""
    folder = tmp_path / "folder"
    with Checkpointer(folder) as saver:
        made = saver.save(tree(), 1, lineage="/../../a", wait=True).wait()
    assert made.parent == folder
    assert list(tmp_path.iterdir()) == [folder]
    found = latest(folder)
    assert found is not None
    assert found.lineage == "/../../a"


# --- where a state comes from ---

A, B, C = (letter * 32 for letter in "abc")


def keep(folder: Path, history: StepHistory, **options: Any) -> None:
    """Save a state with its history."""
    lineage, epoch, step = history.position
    with Checkpointer(folder, **options) as saver:
        saver.save(tree(step), step, lineage=lineage, epoch=epoch, history=history, wait=True)


def test_a_checkpoint_knows_where_it_comes_from(tmp_path: Path) -> None:
    """Ancestry, samples, and the last step of each earlier lineage in it."""
    history = StepHistory(Position(B, 2, 9), (Branch(A, 3),), 90, (Milestone(A, 3, 7, 70),))
    keep(tmp_path, history)
    found = latest(tmp_path)
    assert found is not None
    assert found.history == history


def test_checkpoints_of_earlier_versions_are_read(tmp_path: Path) -> None:
    """They say nothing about ancestry and samples; a step has at least one sample."""
    save(tmp_path, 1, 5, lineage=A, epoch=2)
    (path,) = tmp_path.glob("step-*/*.json")
    fields = json.loads(path.read_bytes().partition(b"\n")[2])
    for name in ("ancestry", "samples", "trail", "header"):
        del fields[name]
    text = json.dumps(fields).encode()
    path.write_bytes(b"potluck-checkpoint 1 " + digest(text).encode() + b"\n" + text)
    found = latest(tmp_path, verify=True)
    assert found is not None
    assert found.history == StepHistory(Position(A, 2, 5), samples=5)
    assert_same(found.tree(), tree(5))
    damage(next(path.parent.glob("*.safetensors")), 20)  # they kept no checksum of this
    with pytest.raises(IoError, match="the checksum of its header is wrong"):
        found.verify()


@pytest.mark.parametrize(
    "wrong",
    [
        {"ancestry": [["a" * 33, 1]]},
        {"ancestry": [["a", -1]]},
        {"ancestry": [["a", 1]] * (MAX_BRANCHES + 1)},
        {"samples": -1},
        {"samples": 1 << 62},
        {"trail": [["a", 1, 1, 1]] * (MAX_BRANCHES + 1)},
        {"trail": [["a", 1, -1, 1]]},
        {"epoch": -1},
        {"step": 1 << 62},
    ],
    ids=str,
)
def test_an_impossible_past_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    """A file is input like any other."""
    save(tmp_path, 1, 5)
    (path,) = tmp_path.glob("step-*/*.json")
    fields = {**json.loads(path.read_bytes().partition(b"\n")[2]), **wrong}
    text = json.dumps(fields).encode()
    path.write_bytes(b"potluck-checkpoint 1 " + digest(text).encode() + b"\n" + text)
    with pytest.raises(IoError, match=r"damaged|impossible"):
        Checkpoint(path.parent)
    with pytest.raises(IoError, match=r"All checkpoints in .* are damaged"):
        latest(tmp_path)
    assert latest(tmp_path, fresh_start=True) is None


def test_what_lost_a_merge_is_not_what_is_resumed(tmp_path: Path) -> None:
    """Its steps are more; those of the lineage that it left come first, and both stay."""
    lost = StepHistory(Position(B, 1, 300), (Branch(A, 3),), 3000, (Milestone(A, 3, 120, 1200),))
    keep(tmp_path, StepHistory(Position(A, 3, 120), samples=1200), keep=2)
    keep(tmp_path, lost, keep=2)
    for step in (130, 140, 150):
        keep(tmp_path, StepHistory(Position(A, 5, step), samples=10 * step), keep=2)
    assert [each.history.position[1:] for each in checkpoints(tmp_path)] == [
        (5, 150),
        (5, 140),
        (1, 300),
    ]
    # A training that continues from the lost one contains it, and still comes later.
    keep(tmp_path, lost.extended(Position(C, 1, 301), lost.branches, 3010), keep=2)
    found = latest(tmp_path, verify=True)
    assert found is not None
    assert found.step == 150


@pytest.mark.parametrize("lineage", ["my favourite training of the whole year", "a" * 33])
def test_a_long_name_of_a_lineage_becomes_an_id(tmp_path: Path, lineage: str) -> None:
    """Other members accept 32 characters."""
    save(tmp_path, 1, 5, lineage=lineage)
    found = latest(tmp_path)
    assert found is not None
    assert len(found.history.position.lineage) == 32


def test_every_mebibyte_has_its_checksum(tmp_path: Path) -> None:
    """In every version: older checkpoints must be readable, and can be checked by hand."""
    data = np.random.default_rng(3).integers(0, 255, 5 << 19, np.uint8)
    with Checkpointer(tmp_path) as saver:
        saver.save({"a": data}, 1)
    manifest = Manifest.decode(next(tmp_path.glob("step-*/*.json")).read_bytes())
    parts = [data[place : place + (1 << 20)] for place in range(0, data.size, 1 << 20)]
    assert len(parts) == 3
    assert list(manifest.checksums) == [
        hashlib.blake2b(part.tobytes(), digest_size=16).hexdigest() for part in parts
    ]


# --------------------------------------------------------------------------------------------------
# Damage to checkpoints is found wherever it is, said, and never passed off as a beginning.


def damage_save(folder: Path, *steps: int) -> list[Path]:
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
    (made,) = damage_save(tmp_path, 1)
    (path,) = made.glob(f"*.{suffix}")
    data = path.read_bytes()
    before = Checkpoint(made)
    before.verify()
    for wrong in spoiled(data):
        path.write_bytes(wrong)
        with pytest.raises(potluck_IoError):
            before.verify()
        with pytest.raises(potluck_IoError):
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
            raw = bytearray(data.read_bytes())
            raw[12] ^= 1
            data.write_bytes(raw)
        case "data":
            raw = bytearray(data.read_bytes())
            raw[-1] ^= 1
            data.write_bytes(raw)
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
    *_, newest = damage_save(tmp_path, 1, 2, 3)
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
    older, _ = damage_save(tmp_path, 1, 2)
    wreck(older, "bad text")
    assert latest(tmp_path, verify=True) is not None
    assert not caplog.records


@pytest.mark.parametrize("verify", [False, True])
def test_if_all_are_damaged_that_is_an_error(tmp_path: Path, *, verify: bool) -> None:
    """It names them, and says how to begin anew; a folder without any is no error."""
    for made in damage_save(tmp_path, 1, 2):
        wreck(made, "bad text")
    with pytest.raises(
        potluck_IoError, match=r"All checkpoints in .*step-.*2.*step-.*1.*fresh_start=True"
    ):
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
        with pytest.raises(potluck_IoError, match=r"All checkpoints .* are damaged.*--fresh-start"):
            trainer_in(alone, tmp_path)
        trainer = trainer_in(alone, tmp_path, fresh_start=True)
        assert trainer.step_count == 0
        trainer.close()
        monkeypatch.setenv(FRESH_START, "1")
        again = trainer_in(alone, tmp_path)
        assert again.step_count == 0
        again.close()


# --------------------------------------------------------------------------------------------------
# Checkpoints of elastic trainings: shared folders, what each member alone has, and resuming.


def members(count: int) -> list[DistributedContext]:
    """A group of so many."""
    return [DistributedContext(each) for each in SimulatedBackend.create_group(count)]


def saving_train(folders: list[Path], steps: int, **options: Any) -> list[Regression]:
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
    saving_train([together_, alone, together_], 5, keep=2)
    shared, single = latest(together_, verify=True), latest(alone, verify=True)
    assert shared is not None
    assert single is not None
    assert (shared.step, shared.world_size) == (4, 2)
    assert (single.step, single.world_size) == (4, 1)
    assert [each.step for each in checkpoints(together_)] == [4, 2]
    assert np.array_equal(shared.tree()["model"], single.tree()["model"])
    assert not list(together_.glob(".here-*"))


FORGETFUL = """
import json, pathlib
import numpy as np
import potluck

(backend,) = potluck.SimulatedBackend.create_group(1)
state = potluck.TrainingState(model=np.zeros(4))
trainer = potluck.ElasticTrainer(
    potluck.DistributedContext(backend),
    state,
    lambda mean: None,
    checkpoints="saved",
    save_every=1,
)
trainer.start()
trainer.step(np.ones(4))
print(json.dumps(len(list(pathlib.Path("saved").glob(".here-*")))))
"""


def test_a_program_that_never_closes_its_training_leaves_no_mark(tmp_path: Path) -> None:
    """Its checkpoint is there, and nothing else."""
    assert ask(FORGETFUL, cwd=tmp_path) == 1
    (saved,) = (tmp_path / "saved").iterdir()
    assert saved.name.startswith("step-")


@pytest.mark.usefixtures("resuming")
@pytest.mark.parametrize("number", [1, 2, 4])
def test_any_number_of_members_goes_on_from_the_last_complete_one(
    tmp_path: Path, number: int
) -> None:
    """Saved by three who shared a folder; a save that was cut off counts nothing."""
    first = saving_train([tmp_path] * 3, 7)
    for path in tmp_path.glob("step-*6-*/part-00001*.json"):
        path.unlink()  # as if one had been killed while it saved step 6
    runs = saving_train([tmp_path] * number, 4)
    assert [run.trainer.step_count for run in runs] == [4] * number
    again = saving_train([tmp_path] * number, 9)
    assert {run.trainer.step_count for run in again} == {9}
    assert len({run.fingerprint for run in again}) == 1
    assert first[0].loss > again[0].loss


@pytest.mark.usefixtures("resuming")
def test_who_has_nothing_gets_the_state_of_those_who_have(tmp_path: Path) -> None:
    """One machine lost its disk: it goes on with the others."""
    folders = [tmp_path / "a", tmp_path / "b"]
    saving_train(folders, 4)
    runs = saving_train([folders[0], tmp_path / "new"], 4)
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
    assert "no complete checkpoint" in caplog.text


def test_without_being_asked_it_begins_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Checkpoints that lie in the folder are not loaded, and the log says so."""
    saving_train([tmp_path], 4)
    assert not caplog.text
    runs = saving_train([tmp_path], 1)
    assert runs[0].trainer.step_count == 1
    assert "has a checkpoint of step 4, which is not loaded" in caplog.text
    wreck(max(tmp_path.glob("step-*4-*")), "data")  # it is mentioned without being read
    caplog.clear()
    assert Saving(tmp_path, 2, 3).found() is None
    assert "has a checkpoint of step 4, which is not loaded" in caplog.text


def test_a_folder_that_cannot_be_written_does_not_end_the_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What went wrong is said; training goes on."""
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        runs = saving_train([tmp_path / "file" / "folder"], 5)
    assert runs[0].trainer.step_count == 5
    assert "writes no checkpoints" in caplog.text
    assert "The last checkpoint here failed" in caplog.text


def test_a_disk_that_was_full_for_a_while_ends_nothing(tmp_path: Path) -> None:
    """The next checkpoint is saved as if nothing had been."""
    tree = {"model": np.arange(4.0)}
    saving = Saving(tmp_path / "file", 1, 3)
    (tmp_path / "file").write_text("in the way")
    failed = saving.save(tree, None, StepHistory(Position("f" * 32, 1, 1)))
    assert failed is not None
    assert failed.sleep_until(None)
    (tmp_path / "file").unlink()
    saving.save(tree, None, StepHistory(Position("f" * 32, 1, 2)))
    saving.close()
    found = latest(tmp_path / "file")
    assert found is not None
    assert found.step == 2


def test_a_disk_that_hangs_does_not_hold_up_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The next save is left out, and the log says why; the one under way is finished later."""
    monkeypatch.setattr(checkpoint, "ENDING", 0.05)
    write, is_well = Folder.write, threading.Event()

    def hang(folder: Folder, name: str, parts: Any) -> None:
        assert is_well.wait(PATIENCE)
        write(folder, name, parts)

    monkeypatch.setattr(Folder, "write", hang)
    saving = Saving(tmp_path, 1, 3)
    tree = {"model": np.arange(4.0)}
    first = saving.save(tree, None, StepHistory(Position("f" * 32, 1, 1)))
    assert first is not None
    assert saving.save(tree, None, StepHistory(Position("f" * 32, 1, 2))) is None
    assert caplog.text.count("The last checkpoint here failed") == 1
    is_well.set()
    assert first.sleep_until(None)
    assert saving.save(tree, None, StepHistory(Position("f" * 32, 1, 3))) is not None
    eventually(lambda: [each.step for each in checkpoints(tmp_path)] == [3, 1])
    saving.close()


def test_marks_of_those_who_were_killed_are_removed_after_a_day(tmp_path: Path) -> None:
    """Those of others that may be at work stay."""
    now = time.time()
    for name, age in (("old", 86_400 + 600), ("young", 86_400 - 600)):
        path = tmp_path / f".here-{name}"
        path.touch()
        os.utime(path, (now - age, now - age))
    saving = Saving(tmp_path, 1, 3)
    saving.mark()
    saving.meet([saving.token])
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".here-young", f".here-{saving.token}"}
    saving.close()


def test_what_fails_last_is_said_when_the_training_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody saves after that, who could say it."""
    (tmp_path / "file").write_text("in the way")
    saving = Saving(tmp_path / "file", 1, 3)
    saving.save({"model": np.arange(4.0)}, None, StepHistory(Position("f" * 32, 1, 1)))
    saving.close()
    assert caplog.text.count("The last checkpoint here failed") == 1


def test_every_step_can_be_saved(tmp_path: Path) -> None:
    """From the first on; or every third, or none."""
    with DistributedContext(SimulatedBackend.create_group(1)[0]) as alone:
        names = [path.name[:17] for path in train(alone, tmp_path, 3)]
    assert names == [f"step-00000000000{step}" for step in (1, 2, 3)]
    for every, due in ((3, [3, 6]), (0, [])):
        saving = Saving(tmp_path, every, 3)
        assert [step for step in range(8) if saving.is_due(step)] == due


@pytest.mark.usefixtures("resuming")
def test_a_checkpoint_of_another_training_is_named(tmp_path: Path) -> None:
    """Which one it is, and what does not fit."""
    saving_train([tmp_path], 2)
    (alone,) = members(1)
    other = TrainingState(model=np.zeros(3), optimizer=np.zeros(3), sampler=np.zeros(1))
    with alone, pytest.raises(ValueError, match=r"step-0.* belongs to another training: model"):
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
