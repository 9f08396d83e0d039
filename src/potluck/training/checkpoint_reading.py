"""Checkpoint: a complete one on disk, from which any number of ranks read what they need."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from potluck.arrays.base import Array
from potluck.core.histories import History, Position, ranked
from potluck.errors import DistributedError, IoError, MalformedFrame
from potluck.logs import get_logger
from potluck.training import trees
from potluck.training.checkpoint_files import read_limited
from potluck.training.checkpoint_format import dtype_of
from potluck.training.checkpoint_manifest import (
    BLOCK,
    MAX_MANIFEST,
    Manifest,
    Piece,
    digest,
    header_of,
    is_own,
    own_name,
    part_name,
)

__all__ = ["Checkpoint", "Damaged", "Search", "Shard", "checkpoints", "part_of"]

logger = get_logger(__name__)


class Shard(NamedTuple):
    """One rank's elements of an array."""

    array: Array
    """Flat, unless it is the whole array."""
    start: int
    stop: int
    shape: tuple[int, ...]
    """Of the whole array."""


_EARLIER = "Use an earlier checkpoint: latest(folder, verify=True) finds it."

_LONGEST = 32  # characters of a lineage's id that members accept

SMALLEST_PART = 256
"""Elements for each rank below which an array is not divided: one rank has all of it."""


def part_of(size: int, place: int, rank: int, world_size: int) -> tuple[int, int]:
    """Which elements of an array a rank keeps; ``place`` is the array's among all.

    >>> part_of(1000, 0, 1, 2), part_of(10, 0, 1, 2), part_of(10, 1, 1, 2)
    ((500, 1000), (0, 0), (0, 10))
    """
    if size < SMALLEST_PART * world_size:
        return (0, size) if place % world_size == rank else (0, 0)
    return size * rank // world_size, size * (rank + 1) // world_size


class Checkpoint:
    """A complete checkpoint.  Nothing is read before it is asked for; what is read is checked.

    Raises :class:`~potluck.IoError` if a part is missing or damaged.

    >>> import tempfile, numpy
    >>> from potluck import Checkpointer
    >>> with tempfile.TemporaryDirectory() as folder, Checkpointer(folder) as checkpointer:
    ...     work = checkpointer.save({"weights": numpy.arange(4)}, step=7, wait=True)
    ...     Checkpoint(work.wait()).tree()["weights"].tolist()
    [0, 1, 2, 3]
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._manifests = _manifests(folder)
        first = self._manifests[0]
        self.lineage, self.epoch, self.step = first.lineage, first.epoch, first.step
        self.history = _history(first)
        """Which steps and samples the state consists of, and where its lineage comes from."""
        self.world_size = first.world_size
        """How many ranks have written it."""
        self._last: tuple[tuple[int, int], bytes] = (-1, -1), b""
        self._pieces: dict[str, list[tuple[Manifest, Piece]]] = {}
        for manifest in self._manifests:
            for piece in manifest.pieces:
                self._pieces.setdefault(piece.name, []).append((manifest, piece))
        for name in self._pieces:
            self._check_whole(name)

    def __repr__(self) -> str:
        """What it is, for people."""
        return f"<Checkpoint of step {self.step}, written by {self.world_size} ranks>"

    @property
    def names(self) -> list[str]:
        """The arrays in it that belong to all ranks."""
        return sorted(name for name in self._pieces if not is_own(name))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of an array."""
        return self._piece(name).shape

    def read(self, name: str, start: int = 0, stop: int | None = None) -> Array:
        """Elements of an array, flat; only the blocks of the files that hold them are read."""
        piece = self._piece(name)
        end = math.prod(piece.shape) if stop is None else stop
        made = np.empty(max(0, end - start), dtype_of(piece.dtype))
        octets = made.view(np.uint8)
        for manifest, each in self._pieces[name]:
            low, high = max(start, each.start), min(end, each.stop)
            if low >= high:
                continue
            width = made.itemsize
            begin = each.offset + (low - each.start) * width
            place = (low - start) * width
            for data in self._blocks(manifest, begin, begin + (high - low) * width):
                octets[place : place + len(data)] = np.frombuffer(data, np.uint8)
                place += len(data)
        return made

    def arrays(self) -> dict[str, Array]:
        """All arrays, whole."""
        return {name: self.read(name).reshape(self.shape_of(name)) for name in self.names}

    def tree(self) -> Any:
        """What was saved, whole."""
        return self._tree(self._manifests[0].shape, self.arrays())

    def _tree(self, shape: bytes, arrays: dict[str, Array]) -> Any:
        try:
            return trees.read(shape, arrays)
        except MalformedFrame as error:
            raise IoError(f"{self.folder} is damaged", cause=str(error), hint=_EARLIER) from error

    def own(self, rank: int) -> Any:
        """What one of the ranks that wrote this saved as its own, or None."""
        manifest = self._manifests[rank]
        prefix = own_name(rank, "")
        arrays = {
            name.removeprefix(prefix): self.read(name).reshape(self.shape_of(name))
            for name in self._pieces
            if name.startswith(prefix)
        }
        return self._tree(manifest.own, arrays) if manifest.own else None

    def shard(self, rank: int, world_size: int) -> dict[str, Shard]:
        """What a rank of another number of ranks keeps; nothing else is read."""
        shards = {}
        for place, name in enumerate(self.names):
            shape = self.shape_of(name)
            start, stop = part_of(math.prod(shape), place, rank, world_size)
            if stop > start or (place % world_size == rank and not math.prod(shape)):
                array = self.read(name, start, stop)
                whole = stop - start == math.prod(shape)
                shards[name] = Shard(array.reshape(shape) if whole else array, start, stop, shape)
        return shards

    def verify(self) -> None:
        """Read every file once; raises if a byte differs from what was written, or the length.

        That includes the manifests, and the header of each part.
        """
        if _manifests(self.folder) != self._manifests:
            raise IoError(f"{self.folder} has changed since it was opened")
        self._last = (-1, -1), b""
        for manifest in self._manifests:
            self._check_header(manifest)
            for _ in self._blocks(manifest, 0, manifest.size):
                pass

    def _check_header(self, manifest: Manifest) -> None:
        path = self._part(manifest)
        try:
            with path.open("rb") as file:
                header = file.read(manifest.begins)
        except OSError as error:
            raise _unreadable(path, error) from error
        # Earlier versions kept no checksum of it; they made it from what the manifest says.
        expected = manifest.header or digest(header_of(manifest))
        if digest(header) != expected:
            raise IoError(
                f"{path} is damaged",
                cause="its header has another checksum than when it was written",
                hint=_EARLIER,
            )

    # -- files ---------------------------------------------------------------------------------

    def _piece(self, name: str) -> Piece:
        if name not in self._pieces:
            raise KeyError(f"No array {name!r} is in this checkpoint; {', '.join(self.names)} are")
        return self._pieces[name][0][1]

    def _blocks(self, manifest: Manifest, start: int, stop: int) -> Iterator[bytes]:
        """Checked bytes of a part's data, block by block."""
        path = self._part(manifest)
        try:
            with path.open("rb") as file:
                for number in range(start // BLOCK, -(-stop // BLOCK)):
                    data = self._block(file, path, manifest, number)
                    low, high = max(start - number * BLOCK, 0), min(stop - number * BLOCK, BLOCK)
                    yield data[low:high]
        except IoError:
            raise
        except OSError as error:
            raise _unreadable(path, error) from error

    def _part(self, manifest: Manifest) -> Path:
        return self.folder / f"{part_name(manifest.rank, manifest.world_size)}.safetensors"

    def _block(self, file: BinaryIO, path: Path, manifest: Manifest, number: int) -> bytes:
        if self._last[0] == (manifest.rank, number):
            return self._last[1]  # many small arrays lie in one block
        file.seek(manifest.begins + number * BLOCK)
        data = file.read(min(BLOCK, manifest.size - number * BLOCK))
        if digest(data) != manifest.checksums[number]:
            raise IoError(
                f"{path} is damaged",
                cause=f"block {number} of it has another checksum than when it was written",
                hint=_EARLIER,
            )
        self._last = (manifest.rank, number), data
        return data

    def _check_whole(self, name: str) -> None:
        covered = 0
        kinds = {(piece.dtype, piece.shape) for _, piece in self._pieces[name]}
        for _, piece in sorted(self._pieces[name], key=lambda pair: pair[1].start):
            covered = piece.stop if piece.start == covered else -1
        if len(kinds) > 1 or covered != math.prod(self._piece(name).shape):
            raise IoError(f"The parts of {name[:100]!r} in {self.folder} do not fit together")


def _history(manifest: Manifest) -> History:
    lineage = manifest.lineage
    if len(lineage) > _LONGEST:  # other members would refuse it
        lineage = digest(lineage.encode())
    position = Position(lineage, manifest.epoch, manifest.step)
    # Earlier versions wrote no samples; a step has at least one.
    return History(position, manifest.ancestry, manifest.samples or manifest.step, manifest.trail)


class Incomplete(IoError):
    """Not all ranks have written their part."""


def _unreadable(path: Path, error: OSError) -> IoError:
    return IoError(f"{path} could not be read", cause=error.strerror or str(error))


def _manifests(folder: Path) -> list[Manifest]:
    found = [folder / name for name in _names(folder) if fnmatch(name, "part-*-of-*.json")]
    if not found:
        raise Incomplete(f"There is no complete checkpoint in {folder}")
    first = _manifest(found[0])
    manifests = []
    for rank in range(first.world_size):
        name = part_name(rank, first.world_size)
        manifest = _manifest(folder / f"{name}.json")
        if manifest.checkpoint != first.checkpoint or manifest.rank != rank:
            raise IoError(f"The parts in {folder} belong to different checkpoints")
        path = folder / f"{name}.safetensors"
        expected = manifest.begins + manifest.size
        if (size := _size(path)) != expected:
            what = "is missing" if size < 0 else f"has {size} bytes"
            if not (folder / f"{name}.json").exists():  # it is being removed, or written anew
                raise Incomplete(f"{path} {what}")
            raise IoError(f"{path} {what}, and not the {expected} bytes that were written")
        manifests.append(manifest)
    return manifests


def _manifest(path: Path) -> Manifest:
    try:
        return Manifest.decode(read_limited(path, MAX_MANIFEST))
    except IoError as error:
        if not path.exists():
            raise Incomplete(f"{path} is missing: its rank has not saved its part") from None
        error.message = f"{path.name}: {error.message}"
        raise


def _names(folder: Path) -> list[str]:
    """What is in a folder, which may be missing; one that cannot be read is not an empty one."""
    try:
        return sorted(each.name for each in folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):  # who saves there is told why it cannot be
        return []
    except OSError as error:
        raise IoError(
            f"{folder} could not be read",
            cause=error.strerror or str(error),
            hint="Run as the user to whom it belongs, or name another folder.",
        ) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else -1
    except OSError:  # another process removes it right now
        return -1


@dataclass(frozen=True, slots=True)
class Damaged:
    """A checkpoint that cannot be used.

    >>> str(Damaged(Path("saved/step-7"), "part-0.json has no manifest", resumed=6))
    'The checkpoint saved/step-7 is damaged: part-0.json has no manifest. Step 6 is used instead.'
    """

    folder: Path
    why: str
    resumed: int | None = None
    """The step of the checkpoint that is used instead, if there is one."""

    def __str__(self) -> str:
        """One sentence for people, and what follows from it."""
        then = "There is no other one."
        if self.resumed is not None:
            then = f"Step {self.resumed} is used instead."
        return f"The checkpoint {self.folder} is damaged: {self.why.rstrip('.')}. {then}"


class Search:
    """The complete checkpoints in a folder, the one to continue from first, and damaged ones.

    Lineages come in the order of :func:`potluck.core.histories.best`, and of each the latest step
    first: the work of a side that lost a merge comes after that of the side that won.
    """

    def __init__(self, folder: Path) -> None:
        self._found: list[Checkpoint] = []
        self.damaged: list[Damaged] = []
        """What was passed over so far; not what another rank still writes."""
        for path in reversed([folder / name for name in _names(folder) if name[:5] == "step-"]):
            try:
                self._found.append(Checkpoint(path))
            except Incomplete as error:
                logger.info("Not complete: %s", error)
            except (DistributedError, OSError, ValueError, KeyError) as error:
                self.damaged.append(Damaged(path, str(error)))
        order = ranked(each.history for each in self._found)
        self._found.sort(key=lambda each: _place(each, order))

    def first(self, *, verify: bool) -> Checkpoint | None:
        """The one to continue from, if there is one; ``damaged`` then has those before it."""
        unreadable = list(self.damaged)
        found = next(self.all(verify=verify), None)
        if found is not None:
            # Where an unreadable one belongs is not known but by its name, which begins with steps.
            older = [each for each in unreadable if each.folder.name < found.folder.name]
            self.damaged = [each for each in self.damaged if each not in older]
        return found

    def all(self, *, verify: bool) -> Iterator[Checkpoint]:
        """All of them."""
        for checkpoint in self._found:
            try:
                if verify:
                    checkpoint.verify()
            except (DistributedError, OSError) as error:
                self.damaged.append(Damaged(checkpoint.folder, str(error)))
            else:
                yield checkpoint


def checkpoints(folder: Path, *, verify: bool = False) -> Iterator[Checkpoint]:
    """Complete checkpoints in a folder, the one to continue from first; others are passed over."""
    return Search(folder).all(verify=verify)


def _place(checkpoint: Checkpoint, order: list[str]) -> tuple[int, int, int]:
    lineage, epoch, step = checkpoint.history.position
    return order.index(lineage), -epoch, -step
