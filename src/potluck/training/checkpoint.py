"""Checkpoints: saved beside the training, whole or not at all, by any number of ranks.

Each rank writes its part of the arrays into one folder per step and then its manifest; when the
last manifest is there the checkpoint is complete.  No rank waits for another, and a crash at any
instant leaves the earlier ones as they were.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from potluck.arrays.base import Array
from potluck.backend.base import read_view
from potluck.closing import Closing
from potluck.core.histories import History, Position
from potluck.logs import get_logger
from potluck.runtime.control_errands import Errands
from potluck.runtime.work import Work
from potluck.training import trees
from potluck.training.checkpoint_files import TEMPORARY, fsync_folder, remove, write_whole
from potluck.training.checkpoint_format import Entry, dtype_of, encode_header, name_of
from potluck.training.checkpoint_manifest import (
    BLOCK,
    Manifest,
    Piece,
    digest,
    own_name,
    part_name,
)
from potluck.training.checkpoint_reading import Checkpoint, checkpoints, part_of

__all__ = ["Checkpoint", "Checkpointer", "latest"]

logger = get_logger(__name__)

ENDING = 600.0
"""Seconds that closing waits for a save under way."""


def latest(folder: str | os.PathLike[str], *, verify: bool = False) -> Checkpoint | None:
    """The latest complete checkpoint in a folder, or None.

    With ``verify`` everything is read once, and damaged ones are passed over.
    """
    return next(checkpoints(Path(folder), verify=verify), None)


@dataclass(frozen=True, slots=True)
class _Job:
    """A part that is to be written: a copy, so that training can go on."""

    folder: Path
    manifest: Manifest
    arrays: list[Array]


class Checkpointer(Closing):
    """Saves into one folder, on a thread of its own.

    ``keep`` complete checkpoints stay, older ones are removed.  Several ranks that share a folder
    each write their part; unless told otherwise there is one, which writes everything.

    >>> import tempfile, numpy
    >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
    ...     work = checkpointer.save({"weights": numpy.ones(3)}, step=7, wait=True)
    ...     print(checkpointer.latest())
    <Checkpoint of step 7, written by 1 ranks>
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        rank: int = 0,
        world_size: int = 1,
        keep: int = 3,
    ) -> None:
        if not 0 <= rank < world_size or keep < 1:
            msg = f"Rank {rank} of {world_size} that keeps {keep} checkpoints makes no sense"
            raise ValueError(msg)
        self.folder = Path(folder)
        self.rank, self.world_size, self.keep = rank, world_size, keep
        self._errands = Errands(at_once=1)
        self._work: Work[Path] | None = None
        self.last_nbytes = 0
        """Bytes of this rank's part of what was saved last."""

    def save(
        self,
        tree: Any,
        step: int,
        *,
        lineage: str = "",
        epoch: int = 0,
        history: History | None = None,
        own: Any = None,
        wait: bool = False,
    ) -> Work[Path]:
        """Save a tree of arrays and plain values as the state after ``step``.

        Returns when this rank's part has been copied; the files are written meanwhile.  One save is
        under way at a time: the next waits for it, and raises what went wrong with it, once.
        ``own`` is a tree that this rank alone has.  ``history`` says which steps the state consists
        of, so that ancestry decides when it meets another; :class:`~potluck.ElasticTrainer` gives
        it.
        """
        before = self._work
        if before is not None:
            try:
                before.wait(ENDING)
            finally:
                if before.done:
                    self._work = None  # a disk that was full for a while ends nothing
        if history is None:
            history = History(Position(lineage, epoch, step), samples=step)
        job = self._prepare(tree, own, (lineage, epoch, step), history)
        self.last_nbytes = job.manifest.size
        work: Work[Path] = Work(lambda: f"Saving step {step}")
        self._work = work

        def run() -> None:
            try:
                work.succeed(self._write(job))
            except Exception as error:  # noqa: BLE001 - raised where the work is waited for
                work.fail(error)

        self._errands.run(run)
        if wait:
            work.wait(ENDING)
        return work

    def wait(self, timeout: float | None = ENDING) -> None:
        """Wait for the save under way; raises what went wrong with it."""
        if self._work is not None:
            self._work.wait(timeout)

    def latest(self, *, verify: bool = False) -> Checkpoint | None:
        """The latest complete checkpoint in the folder, or None."""
        return latest(self.folder, verify=verify)

    def close(self) -> None:
        """Wait for the save under way and end the thread; raises what went wrong with it."""
        try:
            self.wait()
        finally:
            self._errands.close(1.0)

    # -- writing -------------------------------------------------------------------------------

    def _prepare(
        self, tree: Any, own: Any, position: tuple[str, int, int], history: History
    ) -> _Job:
        shape, arrays = trees.written(tree)
        own_shape, own_arrays = trees.written(own)
        chosen = [
            (name, arrays[name], (place, self.rank, self.world_size))
            for place, name in enumerate(sorted(arrays))
        ]
        chosen += [
            (own_name(self.rank, name), own_arrays[name], (0, 0, 1)) for name in sorted(own_arrays)
        ]
        pieces: list[Piece] = []
        copies: list[Array] = []
        offset = 0
        for name, array, (place, rank, ranks) in chosen:
            whole = tuple(int(side) for side in array.shape)
            flat = trees.flat_array(array)
            start, stop = part_of(flat.size, place, rank, ranks)
            if stop == start and (flat.size or place % ranks != rank):
                continue
            copies.append(flat[start:stop].copy())
            pieces.append(Piece(name, name_of(flat.dtype), whole, start, stop, offset))
            offset += copies[-1].nbytes
        lineage, epoch, step = position
        manifest = Manifest(
            checkpoint=f"{lineage}/{epoch}/{step}",
            lineage=lineage,
            epoch=epoch,
            step=step,
            rank=self.rank,
            world_size=self.world_size,
            begins=0,  # known when the header is
            size=offset,
            checksums=(),
            pieces=tuple(pieces),
            shape=shape,
            own=own_shape,
            ancestry=history.ancestry,
            samples=history.samples,
            trail=history.trail,
        )
        name = f"step-{step:012d}-{epoch:06d}-{_short(lineage)}-of-{self.world_size}"
        return _Job(self.folder / name, manifest, copies)

    def _write(self, job: _Job) -> Path:
        job.folder.mkdir(parents=True, exist_ok=True)
        fsync_folder(self.folder)
        name = part_name(self.rank, self.world_size)
        # A manifest of an earlier try would vouch for a file that is being replaced.
        (job.folder / f"{name}.json").unlink(missing_ok=True)
        header = encode_header(_entries(job.manifest.pieces), _facts(job.manifest))
        checksums: list[str] = []
        blocks = _blocks(job.arrays, checksums)
        write_whole(job.folder / f"{name}.safetensors", _chain(header, blocks))
        manifest = msgspec.structs.replace(
            job.manifest, begins=len(header), checksums=tuple(checksums)
        )
        write_whole(job.folder / f"{name}.json", [manifest.encode()])
        try:
            self._tidy(job.manifest.lineage)
        except OSError as error:  # others who share the folder tidy too; what was saved is there
            logger.debug("Old checkpoints in %s stay for now: %s", self.folder, error)
        return job.folder

    def _tidy(self, lineage: str) -> None:
        """Remove this rank's parts of old checkpoints, and what crashes have left.

        What an earlier training has left in the folder never crowds out what this one saves.
        """
        complete = list(checkpoints(self.folder))
        own = [each.folder.name for each in complete if each.lineage == lineage]
        names = [each.folder.name for each in complete]
        kept = {*names[: self.keep], *own[: self.keep]}
        for path in self.folder.glob("step-*"):
            # Nobody still writes what is older than a complete one: each rank saves in order.
            newest = own if f"-{_short(lineage)}-of-" in path.name else names
            if newest and path.name not in kept and path.name < newest[0]:
                remove(path, self._leftovers(path))

    def _leftovers(self, path: Path) -> list[str]:
        """This rank's files; those of another number of ranks are rank 0's to remove."""
        if path.name.endswith(f"-of-{self.world_size}"):
            name = part_name(self.rank, self.world_size)
            files = [f"{name}.json", f"{name}.safetensors"]
            return [*files, *(f"{TEMPORARY}{file}" for file in files)]
        # The manifests first: what a crash in between leaves is not complete.
        return sorted(each.name for each in path.iterdir()) if self.rank == 0 else []


def _short(lineage: str) -> str:
    # It may come from another member, or from a file: never a way out of the folder.
    return (lineage if lineage.isalnum() else digest(lineage.encode()))[:8] if lineage else "start"


def _entries(pieces: tuple[Piece, ...]) -> dict[str, Entry]:
    entries = {}
    for piece, after in itertools.zip_longest(pieces, pieces[1:]):
        count = piece.stop - piece.start
        whole = count == math.prod(piece.shape)
        size = count * dtype_of(piece.dtype).itemsize
        assert after is None or after.offset == piece.offset + size
        shape = piece.shape if whole else (count,)
        entries[piece.name] = Entry(piece.dtype, shape, piece.offset, piece.offset + size)
    return entries


def _facts(manifest: Manifest) -> dict[str, str]:
    return {
        "format": "potluck",
        "step": str(manifest.step),
        "part": f"{manifest.rank} of {manifest.world_size}",
    }


def _blocks(arrays: list[Array], checksums: list[str]) -> Iterator[bytes]:
    """The bytes of arrays one after the other in blocks, whose checksums are noted."""
    waiting = bytearray()
    for array in arrays:
        octets = read_view(array.view(np.uint8))
        place = 0
        while place < len(octets):
            room = BLOCK - len(waiting)
            waiting += octets[place : place + room]
            place += room
            if len(waiting) == BLOCK:
                checksums.append(digest(waiting))
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        checksums.append(digest(waiting))
        yield bytes(waiting)


def _chain(header: bytes, blocks: Iterator[bytes]) -> Iterator[bytes]:
    yield header
    yield from blocks
