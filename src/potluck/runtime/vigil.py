"""The vigil: why an operation does not go on, found out while waiting, and told to everybody.

Whoever finds a reason tells all other ranks and leaves; they find the notice, or the end of a
stream, and raise the same error.

Calls are counted from a group's beginning, on all ranks alike.  A failure ends all calls up to a
number, which every notice tells; the largest that a rank has heard of names its *epoch*.  So ranks
that fail at the same time for different reasons end up in the same one.  Whoever had done all
those calls before it heard of the failure fails the next one: nobody misses a failure of another.
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
from potluck.runtime.notices import FOR_EVER, Notice, Notices, Word, count_instances

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
        self.instance = count_instances(backend)
        """How many groups were made before in the place of this one."""
        self._notices = Notices(backend, self.instance)
        self._others = [rank for rank in range(backend.world_size) if rank != backend.rank]
        self.epoch = 0
        """Up to which call, counted from the group's beginning, all have ended."""
        self._verdict: DistributedError = Aborted("Nothing has happened yet")
        self.aborted: tuple[DistributedError, int] | None = None
        """Why calls up to a number shall end, while an abort waits for somebody to look."""
        self._told: set[int] = set()
        self._waiting: dict[int, Notice] = {}
        self._ending: tuple[int, Notice] | None = None
        self._furthest: tuple[int, Notice] | None = None
        self.call = 0
        """The one that had its turn last."""
        self.asked = 0.0
        """When it was made."""
        self._operation = 0
        self._fingerprint = Fingerprint(*(0,) * len(Fingerprint._fields))
        self._deadline: float | None = None

    def admit(self, call: int, asked: float) -> None:
        """A call gets its turn; raise if somebody has ended it before."""
        if call <= self.epoch:
            raise copy.copy(self._verdict)
        self.call, self.asked = call, asked

    def begin(self, operation: int, fingerprint: Fingerprint, deadline: float | None) -> None:
        """Watch over another operation."""
        self._operation, self._fingerprint = operation, fingerprint
        self._deadline = deadline
        if self._told:
            self._told.clear()
        if self.aborted is not None:
            raise copy.copy(self.aborted[0])
        if self._ending is not None:
            self._check_ending()

    def catch_up(self) -> None:
        """Raise if a rank has left while this one did something else.

        What it sent before may be all that the operation needs, which would then end well here
        and badly there.
        """
        self._read_notices()
        self._check_ending()

    # -- while waiting ---------------------------------------------------------------------------

    def look(self, awaited: Sequence[int]) -> None:
        """Raise if something ends the operation."""
        if self.aborted is not None:
            raise copy.copy(self.aborted[0])
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
            raise self.late(awaited)

    def check(self) -> None:
        """The same while bytes move, so often that it must cost nothing."""
        if self.aborted is not None:
            raise copy.copy(self.aborted[0])
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise self.late((), "its bytes were still on their way")

    def _notice(self, word: Word, culprit: int = -1, text: str = "", last: int = 0) -> Notice:
        packed = self._fingerprint.pack()
        return Notice(word, self.epoch, self._operation, culprit, packed, text, last)

    def late(self, awaited: Sequence[int], cause: str | None = None) -> Timeout:
        """The error at the deadline."""
        names = ", ".join(f"rank {rank} ({self._backend.peer_name(rank)})" for rank in awaited)
        nothing = f"nothing came from {names}" if names else "the other ranks do not read"
        return Timeout(
            f"{self._fingerprint} was not done in time",
            seconds=time.monotonic() - self.asked,
            missing=awaited,
            rank=awaited[0] if awaited else None,
            cause=cause or nothing,
            hint="Look at what those ranks do instead.",
        )

    def _read_notices(self) -> None:
        for rank, notice in self._notices.collect():
            if notice.word is Word.WAITING:
                if notice.epoch == self.epoch:
                    self._waiting[rank] = notice
            elif notice.last_call > self.epoch:
                self._hear(rank, notice)

    def _hear(self, rank: int, notice: Notice) -> None:
        """A rank has ended calls that we have not."""
        if notice.last_call == FOR_EVER:  # which is true of that rank alone
            notice = notice._replace(last_call=FOR_EVER - 1)
        if self._furthest is None or notice.last_call > self._furthest[1].last_call:
            self._furthest = (rank, notice)
        if notice.epoch < self.epoch:
            notice = notice._replace(operation=0)  # it never came to ours
        elif notice.epoch > self.epoch and self._ending is not None:
            return  # it came there after what we know already
        if self._ending is None or notice.operation < self._ending[1].operation:
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

    def abort(self, error: DistributedError, last_call: int) -> None:
        """End calls up to a number, from any thread; whoever runs one wakes up and looks."""
        if self.aborted is None or last_call >= self.aborted[1]:
            self.aborted = (error, last_call)

    def leave(self, last_call: int) -> None:
        """End calls up to a number because of an abort that found no operation under way.

        The last operation is over here, and may well end on other ranks.
        """
        assert self.aborted is not None
        self._operation += 1
        self.conclude(self.aborted[0], last_call)

    def conclude(self, error: BaseException, last_call: int) -> None:
        """Calls up to a number have ended with an error: tell the others, begin the next epoch."""
        verdict = error if isinstance(error, DistributedError) else _failed(self._backend, error)
        if self.aborted is not None and self.aborted[1] > last_call:
            verdict, last_call = self.aborted
        if self._furthest is not None and self._furthest[1].last_call > last_call:
            verdict, last_call = self._told_by(*self._furthest), self._furthest[1].last_call
        try:
            self._tell(error, last_call)
        finally:  # also after Ctrl-C
            self._advance(last_call, verdict)

    def _advance(self, last_call: int, verdict: DistributedError) -> None:
        self.epoch, self._verdict = last_call, verdict
        if self.aborted is not None and self.aborted[1] <= last_call:
            self.aborted = None
        self._operation = 0
        self._waiting.clear()
        self._ending = self._furthest = None

    def _tell(self, error: BaseException, last_call: int) -> None:
        words: list[tuple[type[BaseException], Word]] = [
            (CollectiveMismatch, Word.MISMATCH),
            (Disconnected, Word.LOST),
            (Timeout, Word.LATE),
            (Aborted, Word.ABORTED),
        ]
        word = next((word for kind, word in words if isinstance(error, kind)), Word.FAILED)
        culprit = getattr(error, "rank", None)
        text = str(error) or type(error).__name__
        notice = self._notice(word, -1 if culprit is None else culprit, text, last_call)
        self._notices.tell(self._others, notice)

    def close(self) -> None:
        """Stop listening to notices."""
        self._notices.close()


def _failed(backend: Backend, error: BaseException) -> Aborted:
    """What another error than ours means for calls that it ends as well."""
    reason = str(error) or type(error).__name__
    return Aborted(f"Rank {backend.rank} failed: {reason}", rank=backend.rank)
