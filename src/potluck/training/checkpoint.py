"""Checkpoints: saved beside the training, whole or not at all, by any number of ranks.

Each rank writes its part of the arrays into one folder per step and then its manifest; when the
last manifest is there the checkpoint is complete.  No rank waits for another, and a crash at any
instant leaves the earlier ones as they were.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from potluck._process import Closing
from potluck._types import Seconds
from potluck._version import NewerFile
from potluck.arrays import trees
from potluck.arrays.base import Array
from potluck.backend.base import read_view
from potluck.cluster.connections import DialPool
from potluck.collective.call import Work
from potluck.compression.compressor import GradientCompressor
from potluck.errors import DistributedError, IoError, Timeout
from potluck.logs import get_logger
from potluck.metrics.instruments import OperationMetrics
from potluck.metrics.registry import DistributedMetrics
from potluck.training.checkpoint_files import (
    BLOCK,
    TEMPORARY,
    Checkpoint,
    Damaged,
    Folder,
    Manifest,
    Piece,
    Search,
    check_format,
    digest,
    header_of,
    name_of,
    own_name,
    part_name,
    part_of,
)
from potluck.training.steps import Position, StepHistory

logger = get_logger(__name__)

ENDING = 600.0
"""Seconds that closing waits for a save under way."""


def latest(
    folder: str | os.PathLike[str], *, verify: bool = False, fresh_start: bool = False
) -> Checkpoint | None:
    """The latest complete checkpoint in a folder, or None if there is none.

    Damaged ones are passed over, and the log says which and what is wrong with them; with
    ``verify`` everything is read once to find them.  If all are damaged this raises
    :class:`~potluck.IoError`; with ``fresh_start`` it returns None then.
    """
    checkpoint, damaged = find_latest(folder, verify=verify, fresh_start=fresh_start)
    for each in damaged:
        logger.warning("%s", each)
    return checkpoint


def find_latest(
    folder: str | os.PathLike[str], *, verify: bool, fresh_start: bool
) -> tuple[Checkpoint | None, list[Damaged]]:
    """The same, with the damaged ones that would have come before it."""
    search = Search(Path(folder))
    checkpoint = search.first(verify=verify)
    if checkpoint is None and search.damaged and not fresh_start:
        raise IoError(
            f"All checkpoints in {folder} are damaged",
            cause="; ".join(f"{each.folder.name}: {each.why}" for each in search.damaged[:8]),
            hint="Restore one from a copy. To begin from the first step instead, ask for it: "
            "fresh_start=True, or potluck run --resume --fresh-start.",
        )
    step = None if checkpoint is None else checkpoint.step
    return checkpoint, [replace(each, resumed=step) for each in search.damaged]


@dataclass(frozen=True, slots=True)
class _Job:
    """A part that is to be written: a copy, so that training can continue."""

    folder: Path
    manifest: Manifest
    arrays: list[Array]


class Checkpointer(Closing):
    """Saves into one folder, on a thread of its own.

    ``keep`` complete checkpoints stay, older ones are removed.  Files are this user's alone; a
    folder that others may change is refused with :class:`~potluck.errors.DistributedError`, and
    what the system refuses raises :class:`~potluck.IoError`.  Several ranks that share a folder
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
            msg = f"Invalid rank {rank}, world_size {world_size} or keep {keep}"
            raise ValueError(msg)
        self.folder = Path(folder)
        self.rank, self.world_size, self.keep = rank, world_size, keep
        self._pool = DialPool(at_once=1)
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
        history: StepHistory | None = None,
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
            history = StepHistory(Position(lineage, epoch, step), samples=step)
        job = self._prepare(tree, own, (lineage, epoch, step), history)
        self.last_nbytes = job.manifest.size
        work: Work[Path] = Work(lambda: f"Saving step {step}")
        self._work = work

        def run() -> None:
            try:
                work.succeed(self._write(job))
            except Exception as error:  # noqa: BLE001 - raised where the work is waited for
                work.fail(error)

        self._pool.run(run)
        if wait:
            work.wait(ENDING)
        return work

    def wait(self, timeout: Seconds | None = ENDING) -> None:
        """Wait for the save under way; raises what went wrong with it."""
        if self._work is not None:
            self._work.wait(timeout)

    def latest(self, *, verify: bool = False, fresh_start: bool = False) -> Checkpoint | None:
        """The latest complete checkpoint in the folder, or None; see :func:`latest`."""
        return latest(self.folder, verify=verify, fresh_start=fresh_start)

    def close(self) -> None:
        """Wait for the save under way and end the thread; raises what went wrong with it."""
        try:
            self.wait()
        finally:
            self._pool.close(1.0)

    # -- writing -------------------------------------------------------------------------------

    def _prepare(
        self, tree: Any, own: Any, position: tuple[str, int, int], history: StepHistory
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
        is_new = not os.path.lexists(self.folder)  # false, and no error, for a name too long
        with Folder.open(self.folder) as whole:
            try:
                with whole.enter(job.folder.name) as folder:
                    self._write_part(folder, job)
            except BaseException:
                whole.remove_folder(job.folder.name)  # nothing, if something is in it
                if is_new:
                    with contextlib.suppress(OSError):
                        self.folder.rmdir()
                raise
            try:
                self._tidy(whole, job.manifest.lineage)
            except OSError as error:  # others who share the folder tidy too; ours is saved
                logger.debug("Old checkpoints in %s could not be removed: %s", self.folder, error)
        return job.folder

    def _write_part(self, folder: Folder, job: _Job) -> None:
        name = part_name(self.rank, self.world_size)
        check_format(job.folder / f"{name}.json")
        # A manifest of an earlier try would vouch for a file that is being replaced.
        if folder.remove(f"{name}.json"):
            folder.sync()
        header = header_of(job.manifest)
        checksums: list[str] = []
        blocks = _blocks(job.arrays, checksums)
        folder.write(f"{name}.safetensors", _chain(header, blocks))
        manifest = msgspec.structs.replace(
            job.manifest, begins=len(header), checksums=tuple(checksums), header=digest(header)
        )
        try:
            folder.write(f"{name}.json", [manifest.encode()])
        except BaseException:  # without it the other file is of no use
            with contextlib.suppress(OSError):
                folder.remove(f"{name}.safetensors")
            raise

    def _tidy(self, whole: Folder, lineage: str) -> None:
        """Remove this rank's parts of old checkpoints, and what crashes have left.

        What an earlier training has left in the folder never crowds out what this one saves.
        """
        search = Search(self.folder)
        complete = list(search.all(verify=False))
        own = [each.folder.name for each in complete if each.lineage == lineage]
        names = [each.folder.name for each in complete]
        kept = {*names[: self.keep], *own[: self.keep]}
        for path in self.folder.glob("step-*"):
            # No rank still writes what is older than a complete one: each rank saves in order.
            newest = own if f"-{_short(lineage)}-of-" in path.name else names
            if not newest or path.name in kept or path.name >= newest[0] or path.is_symlink():
                continue
            if path in search.newer:
                continue
            try:
                with whole.within(path.name) as folder:
                    for name in self._leftovers(path):
                        folder.remove(name)
            except OSError as error:  # another rank removes it too, or it is another user's
                logger.debug("%s could not be removed: %s", path, error)
            whole.remove_folder(path.name)

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


def _blocks(arrays: list[Array], checksums: list[str]) -> Iterator[bytes]:
    """The bytes of arrays one after the other in blocks, whose checksums are noted."""
    waiting = bytearray()
    for array in arrays:
        raw = read_view(array.view(np.uint8))
        place = 0
        while place < len(raw):
            room = BLOCK - len(waiting)
            waiting += raw[place : place + room]
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


# --------------------------------------------------------------------------------------------------
# Saving: checkpoints of an elastic training, and resuming from them.
#
# Members may have a folder each, or share one, all or some of them, without any setting.  Each
# leaves a mark in its folder before it meets the others and looks whose marks are there: those
# share it, and each of them writes a part.

RESUME = "POTLUCK_RESUME"
"""Set, and not to 0: resume from the last good checkpoint."""
FRESH_START = "POTLUCK_FRESH_START"
"""Set, and not to 0: begin anew if all checkpoints are damaged."""
FOLDER = "POTLUCK_CHECKPOINTS"
"""The folder for those who name none."""

_MARK = ".here-"
_DAY = 86_400.0  # seconds after which the mark of a process that was killed is removed


def _is_set(name: str) -> bool:
    return os.environ.get(name, "0") not in ("", "0")


class Saving:
    """Where and how often this member saves."""

    def __init__(
        self,
        folder: str | os.PathLike[str] | None,
        every: int,
        keep: int,
        *,
        fresh_start: bool = False,
    ) -> None:
        named = os.environ.get(FOLDER) if folder is None else folder
        self.folder = None if not named else Path(named)
        self.every, self.keep = every, keep
        self.fresh_start = fresh_start or _is_set(FRESH_START)
        """Whether to begin anew if all checkpoints are damaged."""
        self.damaged: list[Damaged] = []
        """Checkpoints that were passed over when this looked for one to continue from."""
        self.token = uuid.uuid4().hex
        """What this member's mark is called; nothing without a folder."""
        if self.folder is None:
            self.token = ""
        self._sharers = 0, 1  # this member's place among those who share the folder
        self._checkpointer: Checkpointer | None = None
        self._farewell: Callable[[], None] | None = None
        self._unmark: Callable[[], None] | None = None

    def found(self) -> Checkpoint | None:
        """The checkpoint to resume from, if the user wants that and there is one.

        Raises :class:`~potluck.IoError` if there are some and all are damaged, unless a fresh start
        was asked for.
        """
        if not _is_set(RESUME):
            self._mention_what_is_there()
            return None
        if self.folder is None:
            logger.warning(
                "There is nothing to resume from: name a folder with checkpoints= or "
                "`potluck run --resume --checkpoints FOLDER`"
            )
            return None
        checkpoint, self.damaged = find_latest(
            self.folder, verify=True, fresh_start=self.fresh_start
        )
        for each in self.damaged:
            logger.warning("%s", each)
        if checkpoint is None:
            logger.warning(
                "There is no complete checkpoint in %s: training starts from the beginning",
                self.folder,
            )
        return checkpoint

    def _mention_what_is_there(self) -> None:
        if self.folder is None:
            return
        try:
            there, _ = find_latest(self.folder, verify=False, fresh_start=True)
        except NewerFile as error:
            logger.warning("%s Use a new folder for a new training run.", error)
            return
        if there is not None:
            logger.warning(
                "%s has a checkpoint of step %d, which is not loaded; resuming later continues "
                "from the latest step there. Use a new folder for a new training run.",
                self.folder,
                there.step,
            )

    # -- who shares the folder -------------------------------------------------------------------

    def mark(self) -> None:
        """Before meeting the others."""
        if self.folder is None:
            return
        try:
            with Folder.open(self.folder) as folder:
                folder.touch(f"{_MARK}{self.token}")
            if self._unmark is None:  # a program may end without closing
                path = (self.folder / f"{_MARK}{self.token}").absolute()
                self._unmark = functools.partial(_remove, path)
                atexit.register(self._unmark)
        except (OSError, DistributedError) as error:
            logger.warning("This machine writes no checkpoints: %s", error)

    def meet(self, tokens: Sequence[str]) -> None:
        """What the members of a view told: all of them have left their marks."""
        if self.folder is None:
            return
        here = [each for each in tokens if each and _is_marked(self.folder, each)]
        if self.token not in here:
            here = [self.token]
        sharers = here.index(self.token), len(here)
        if sharers != self._sharers:
            self._end()
        self._sharers = sharers
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{_MARK}*"):
                if time.time() - path.stat().st_mtime > _DAY:
                    path.unlink()

    # -- saving --------------------------------------------------------------------------------

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is to be saved."""
        return self.folder is not None and self.every > 0 and step > 0 and step % self.every == 0

    def save(self, tree: Any, own: Any, history: StepHistory) -> Work[Path] | None:
        """Save meanwhile; errors are logged, and training continues."""
        assert self.folder is not None
        if self._checkpointer is None:
            place, count = self._sharers
            self._checkpointer = Checkpointer(
                self.folder, rank=place, world_size=count, keep=self.keep
            )
            # A program may end without closing; what it saved last is to be there.
            self._farewell = functools.partial(_finish, self._checkpointer)
            atexit.register(self._farewell)
        saver = self._checkpointer
        lineage, epoch, step = history.position
        for _ in range(2):
            try:
                return saver.save(
                    tree, step, lineage=lineage, epoch=epoch, history=history, own=own
                )
            except (OSError, DistributedError) as error:  # of the one before
                logger.warning("The last checkpoint here failed: %s", error)
                if isinstance(error, Timeout):
                    break  # it is still being written
        return None

    @property
    def last_nbytes(self) -> int:
        """Bytes that this member saved last."""
        return 0 if self._checkpointer is None else self._checkpointer.last_nbytes

    def close(self) -> None:
        """Wait for what is being written."""
        self._end()
        if self._unmark is not None:
            atexit.unregister(self._unmark)
            self._unmark()
            self._unmark = None

    def _end(self) -> None:
        checkpointer, self._checkpointer = self._checkpointer, None
        if checkpointer is not None and self._farewell is not None:
            atexit.unregister(self._farewell)
            _finish(checkpointer)


def _finish(checkpointer: Checkpointer) -> None:
    try:
        checkpointer.close()
    except (OSError, DistributedError) as error:
        logger.warning("The last checkpoint here failed: %s", error)


def _remove(mark: Path) -> None:
    with contextlib.suppress(OSError):
        mark.unlink(missing_ok=True)


def _is_marked(folder: Path, token: str) -> bool:
    if not token.isalnum():  # never a way out of the folder
        return False
    try:
        return (folder / f"{_MARK}{token}").exists()
    except OSError:  # no folder for this user
        return False


def own_part(compressor: GradientCompressor | None, rank: int) -> Any:
    """What a member alone has: what its compression has left behind."""
    if compressor is None:
        return None
    return {"member": rank, "compression": compressor.state_dict()}


def restore_own(
    checkpoint: Checkpoint, compressor: GradientCompressor, rank: int, world_size: int
) -> None:
    """Take over what members had left behind when this was saved: each goes to one member.

    So nothing counts twice, and where all members' parts are there nothing is lost, whatever their
    number now.
    """
    saved = [checkpoint.own(each) for each in range(checkpoint.world_size)]
    mine = [
        each["compression"]
        for each in saved
        if each is not None and int(each["member"]) % world_size == rank
    ]
    if not mine:
        return
    residuals: dict[str, Any] = {}
    for each in mine:
        for name, array in each["residuals"].items():
            if array.size:  # nothing was left behind where all was sent
                before = residuals.get(name)
                residuals[name] = array if before is None else np.add(before, array)
    compressor.load_state_dict({**mine[0], "residuals": residuals})


def count_save(metrics: DistributedMetrics | None, work: Work[Any], nbytes: int) -> Work[Any]:
    """Count a checkpoint when it is saved, or is not."""
    if metrics is not None:
        saves, began = metrics.state.saves, time.perf_counter()
        work.add_done_callback(lambda: _count(saves, time.perf_counter() - began, work, nbytes))
    return work


def _count(saves: OperationMetrics, seconds: float, work: Work[Any], nbytes: int) -> None:
    error = work.exception()
    saves.note(seconds, nbytes, "" if error is None else type(error).__name__)
