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
from potluck.training.checkpoint import Checkpoint, Checkpointer, latest

__all__ = ["FOLDER", "RESUME", "Saving", "own_part", "restore_own"]

logger = get_logger(__name__)

RESUME = "POTLUCK_RESUME"
"""Set, and not to 0: go on from the last good checkpoint."""
FOLDER = "POTLUCK_CHECKPOINTS"
"""The folder for those who name none."""

_MARK = ".here-"
_DAY = 86_400.0  # seconds after which the mark of a process that was killed is removed


class Saving:
    """Where and how often this member saves."""

    def __init__(self, folder: str | os.PathLike[str] | None, every: int, keep: int) -> None:
        named = os.environ.get(FOLDER) if folder is None else folder
        self.folder = None if not named else Path(named)
        self.every, self.keep = every, keep
        self.token = uuid.uuid4().hex
        """What this member's mark is called; nothing without a folder."""
        if self.folder is None:
            self.token = ""
        self._sharers = 0, 1  # this member's place among those who share the folder
        self._checkpointer: Checkpointer | None = None
        self._farewell: Callable[[], None] | None = None

    def found(self) -> Checkpoint | None:
        """The checkpoint to go on from, if the user wants that and there is one."""
        if os.environ.get(RESUME, "0") in ("", "0"):
            there = None if self.folder is None else latest(self.folder)
            if there is not None:
                logger.warning(
                    "%s has a checkpoint of step %d, which is not loaded; resuming later goes on "
                    "from the latest step there. Begin another training in another folder.",
                    self.folder,
                    there.step,
                )
            return None
        if self.folder is None:
            logger.warning(
                "There is nothing to resume from: name a folder, by checkpoints= or "
                "`potluck run --resume --checkpoints FOLDER`"
            )
            return None
        checkpoint = latest(self.folder, verify=True)
        if checkpoint is None:
            logger.warning("No complete checkpoint is in %s: this begins anew", self.folder)
        return checkpoint

    # -- who shares the folder -------------------------------------------------------------------

    def mark(self) -> None:
        """Before meeting the others."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / f"{_MARK}{self.token}").touch()
        except OSError as error:
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
