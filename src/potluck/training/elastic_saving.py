"""Saving: checkpoints of an elastic training, and going on from them.

Members may have a folder each, or share one, all or some of them; nobody has to say which.  Each
leaves a mark in its folder before it meets the others and looks whose marks are there: those share
it, and each of them writes a part.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from potluck.collective.compression.compressor import GradientCompressor
from potluck.core.histories import History
from potluck.errors import DistributedError, Timeout
from potluck.logs import get_logger
from potluck.runtime.work import Work
from potluck.training.checkpoint import Checkpoint, Checkpointer, find_latest
from potluck.training.checkpoint_files import Folder
from potluck.training.checkpoint_reading import Damaged

__all__ = ["FOLDER", "FRESH_START", "RESUME", "Saving", "own_part", "restore_own"]

logger = get_logger(__name__)

RESUME = "POTLUCK_RESUME"
"""Set, and not to 0: go on from the last good checkpoint."""
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

    def found(self) -> Checkpoint | None:
        """The checkpoint to go on from, if the user wants that and there is one.

        Raises :class:`~potluck.IoError` if there are some and all are damaged, unless a fresh start
        was asked for.
        """
        if not _is_set(RESUME):
            self._mention_what_is_there()
            return None
        if self.folder is None:
            logger.warning(
                "There is nothing to resume from: name a folder, by checkpoints= or "
                "`potluck run --resume --checkpoints FOLDER`"
            )
            return None
        checkpoint, self.damaged = find_latest(
            self.folder, verify=True, fresh_start=self.fresh_start
        )
        for each in self.damaged:
            logger.warning("%s", each)
        if checkpoint is None:
            logger.warning("No complete checkpoint is in %s: this begins anew", self.folder)
        return checkpoint

    def _mention_what_is_there(self) -> None:
        if self.folder is None:
            return
        there, _ = find_latest(self.folder, verify=False, fresh_start=True)
        if there is not None:
            logger.warning(
                "%s has a checkpoint of step %d, which is not loaded; resuming later goes on "
                "from the latest step there. Begin another training in another folder.",
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
        except (OSError, DistributedError) as error:
            logger.warning("No checkpoints here: %s", error)

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

    def save(self, tree: Any, own: Any, history: History) -> Work[Path] | None:
        """Save meanwhile; what goes wrong is said, and training goes on."""
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
        if self.folder is not None:
            with contextlib.suppress(OSError):
                (self.folder / f"{_MARK}{self.token}").unlink(missing_ok=True)

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
