"""The vigil: why an operation does not go on, found out while waiting, and told to everybody.

Whoever finds a reason tells all other ranks and leaves; they find the notice, or the end of a
stream, and raise the same error.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck.backend.losses import peer_lost
from potluck.errors import (
    Aborted,
    CollectiveMismatch,
    Disconnected,
    DistributedError,
    MalformedFrame,
    PeerLost,
    Timeout,
)
from potluck.runtime.fingerprint import Fingerprint, describe_mismatch
from potluck.runtime.notices import Notice, Notices, Word

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.runtime.channel import Disagreement

__all__ = ["Vigil"]

EXPLAIN_FOR = 1.0
"""Seconds to wait for the reason after a stream has ended."""

PAUSE = 0.005
"""Seconds between two looks for it."""


class Vigil:
    """Watches over the operations of one group."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._notices = Notices(backend)
        self._aborted: DistributedError | None = None
        self._told: set[int] = set()
        self._waiting: dict[int, Notice] = {}
        self._ending: tuple[int, Notice] | None = None
        self.epoch = 0
        self._operation = 0
        self._fingerprint = Fingerprint(*(0,) * 9)
        self._deadline: float | None = None
        self._begun = 0.0
        self._others = [rank for rank in range(backend.world_size) if rank != backend.rank]

    def begin(self, operation: int, fingerprint: Fingerprint, deadline: float | None) -> None:
        """Watch over another operation."""
        self._operation, self._fingerprint = operation, fingerprint
        self._deadline = deadline
        self._begun = 0.0
        if self._told:
            self._told.clear()
        if self._aborted is not None:
            raise self._aborted
        if self._ending is not None:
            self._check_ending()

    # -- while waiting ---------------------------------------------------------------------------

    def look(self, awaited: Sequence[int]) -> None:
        """Raise if something ends the operation."""
        if self._aborted is not None:
            raise self._aborted
        self._begun = self._begun or time.monotonic()
        self._read_notices()
        self._check_ending()
        self._compare()
        news = [rank for rank in awaited if rank not in self._told]
        if news:
            self._told.update(news)
            self._notices.tell(news, self._notice(Word.WAITING))
        for rank in awaited:
            loss = self._backend.loss_of(rank)
            if loss is not None:
                raise copy.copy(loss)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise self._late(awaited)

    def _notice(self, word: Word, culprit: int = -1, text: str = "") -> Notice:
        packed = self._fingerprint.pack()
        return Notice(word, self.epoch, self._operation, culprit, packed, text)

    def _late(self, awaited: Sequence[int]) -> Timeout:
        names = ", ".join(f"rank {rank} ({self._backend.peer_name(rank)})" for rank in awaited)
        return Timeout(
            f"{self._fingerprint} was not done in time",
            seconds=time.monotonic() - self._begun,
            missing=awaited,
            rank=awaited[0] if awaited else None,
            cause=f"nothing came from {names}" if names else "the other ranks do not read",
            hint="Look at what those ranks do instead.",
        )

    def _read_notices(self) -> None:
        for rank, notice in self._notices.collect():
            if notice.epoch != self.epoch:
                continue  # of an epoch that is over, or that we have yet to learn about
            if notice.word is Word.WAITING:
                self._waiting[rank] = notice
            elif self._ending is None or notice.operation < self._ending[1].operation:
                self._ending = (rank, notice)

    def _check_ending(self) -> None:
        """Raise if a rank has left in this operation, or before it.

        Somebody who left later has done its part in this one, which may well end without it.
        """
        if self._ending is not None and self._ending[1].operation <= self._operation:
            raise self._told_by(*self._ending)

    def _compare(self) -> None:
        """Raise if a rank waits for us in another operation of the same number."""
        for rank, notice in self._waiting.items():
            if notice.operation == self._operation:
                theirs = Fingerprint.unpack(notice.fingerprint)
                if theirs != self._fingerprint:
                    raise self._mismatch(rank, theirs)

    # -- reasons -----------------------------------------------------------------------------------

    def disagree(self, found: Disagreement) -> DistributedError:
        """The error for a first frame that does not fit."""
        if found.operation == self._operation:
            return self._mismatch(found.peer, found.fingerprint)
        return CollectiveMismatch(
            "Ranks are not in the same operation",
            rank=found.peer,
            expected=self._operation,
            got=found.operation,
            cause=f"rank {self._backend.rank} is in number {self._operation} "
            f"({self._fingerprint}), rank {found.peer} in number {found.operation} "
            f"({found.fingerprint})",
            hint="All ranks must make the same calls in the same order.",
        )

    def _mismatch(self, rank: int, theirs: Fingerprint) -> CollectiveMismatch:
        mine = self._fingerprint
        return CollectiveMismatch(
            "Ranks disagree about an operation",
            rank=rank,
            expected=str(mine),
            got=str(theirs),
            cause=describe_mismatch(
                (self._backend.rank, mine), (rank, theirs), self._backend.peer_name
            ),
            hint="All ranks must make the same calls in the same order.",
        )

    def explain(self, rank: int, error: Exception) -> DistributedError:
        """Why the stream of a rank has ended: a notice or its loss says more than the end."""
        end = time.monotonic() + EXPLAIN_FOR
        while time.monotonic() < end and not isinstance(error, MalformedFrame):
            self._read_notices()
            if self._ending is not None:
                return self._told_by(*self._ending)
            loss = self._backend.loss_of(rank)
            if loss is not None:
                return copy.copy(loss)
            time.sleep(PAUSE)
        return peer_lost(rank, self._backend.peer_name(rank), error)

    def _told_by(self, rank: int, notice: Notice) -> DistributedError:
        """What another rank has found, as an error of ours."""
        culprit = notice.culprit if notice.culprit >= 0 else rank
        known = culprit != self._backend.rank and culprit < self._backend.world_size
        host = self._backend.peer_name(culprit) if known else None
        match notice.word:
            case Word.LOST:
                return PeerLost(notice.text, rank=culprit, host=host)
            case Word.MISMATCH:
                return CollectiveMismatch(notice.text, rank=culprit, host=host)
            case Word.LATE:
                missing = (culprit,) if notice.culprit >= 0 else ()
                text = f"Rank {rank} gave up: {notice.text}"
                return Timeout(text, seconds=0.0, missing=missing, rank=culprit)
            case Word.ABORTED:
                return Aborted(notice.text, rank=culprit, host=host)
        return Aborted(f"Rank {rank} failed: {notice.text}", rank=rank, host=host)

    # -- endings -----------------------------------------------------------------------------------

    def abort(self, error: DistributedError) -> None:
        """End the operation under way, from any thread; its own wakes up and looks."""
        self._aborted = error

    def leave(self, reason: str) -> None:
        """Let all others know that this rank takes part in no further operation."""
        self._operation += 1
        me = self._backend.rank
        self.tell(Aborted(f"Rank {me} ended the operation: {reason}", rank=me))

    def tell(self, error: BaseException) -> None:
        """Let all others know why this rank leaves the operation."""
        words: list[tuple[type[BaseException], Word]] = [
            (CollectiveMismatch, Word.MISMATCH),
            (Disconnected, Word.LOST),
            (Timeout, Word.LATE),
            (Aborted, Word.ABORTED),
        ]
        word = next((word for kind, word in words if isinstance(error, kind)), Word.FAILED)
        culprit = getattr(error, "rank", None)
        text = str(error) or type(error).__name__
        self._notices.tell(
            self._others, self._notice(word, -1 if culprit is None else culprit, text)
        )

    def renew(self) -> None:
        """Start the next epoch."""
        self.epoch += 1
        self._operation = 0
        self._waiting.clear()
        self._ending = None
        self._aborted = None

    def close(self) -> None:
        """Stop listening to notices."""
        self._notices.close()
