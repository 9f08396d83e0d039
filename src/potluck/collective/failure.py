"""Failures: why an operation cannot continue, detected while waiting and sent to every rank.

A rank that detects a failure tells all other ranks and leaves the operation; they receive the
notice, or the end of a stream, and raise the same error.

Calls are counted from a group's beginning, on all ranks alike.  A failure ends all calls up to a
number, which is part of every notice; the largest that a rank has received is its *epoch*.  So
ranks that fail at the same time for different reasons end up in the same epoch.  A rank that had
completed all those calls before it learned of the failure fails its next call: no rank misses the
failure of another.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from potluck.backend.mesh import peer_lost
from potluck.backend.sub import SubBackend
from potluck.backend.sub import unmade as sub_unmade
from potluck.collective.fingerprint import (
    FOR_EVER,
    Fingerprint,
    MismatchVote,
    Notice,
    NoticeKind,
    Notices,
    beliefs_of,
    count_instances,
    describe_mismatch,
    has_notice,
    tell_outside,
)
from potluck.collective.pump import SLICE
from potluck.errors import (
    Aborted,
    CollectiveMismatch,
    Disconnected,
    DistributedError,
    MalformedFrame,
    PeerLost,
    Timeout,
)

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.collective.channel import Disagreement


# --------------------------------------------------------------------------------------------------
# Verdicts: what ended an operation, as errors for people.


def mismatch(
    backend: Backend, mine: Fingerprint, rank: int, theirs: Fingerprint
) -> CollectiveMismatch:
    """Another rank takes this operation for something else."""
    return CollectiveMismatch(
        "Ranks disagree about an operation",
        rank=rank,
        expected=str(mine),
        got=str(theirs),
        cause=describe_mismatch((backend.rank, mine), (rank, theirs), backend.peer_name),
        hint="All ranks must make the same calls in the same order.",
    )


def not_together(
    backend: Backend, operation: int, mine: Fingerprint, found: Disagreement
) -> CollectiveMismatch:
    """Another rank is in another operation."""
    return CollectiveMismatch(
        "Ranks are not in the same operation",
        rank=found.peer,
        expected=operation,
        got=found.operation,
        cause=f"rank {backend.rank} is in operation {operation} ({mine}), "
        f"rank {found.peer} in operation {found.operation} ({found.fingerprint})",
        hint="All ranks must make the same calls in the same order.",
    )


def late(
    backend: Backend, about: Fingerprint, seconds: float, missing: Sequence[int], cause: str | None
) -> Timeout:
    """The time is up."""
    names = ", ".join(f"rank {rank} ({backend.peer_name(rank)})" for rank in missing)
    nothing = f"nothing was received from {names}" if names else "the other ranks are not reading"
    return Timeout(
        f"{about} timed out after {round(seconds, 2):g} s",
        seconds=seconds,
        missing=missing,
        rank=missing[0] if missing else None,
        cause=cause or nothing,
        hint="Check what those ranks are doing.",
    )


def unmade(parent: Backend, rank: int, members: Sequence[int], count: int) -> CollectiveMismatch:
    """Another rank waits in a subgroup that this one has not made."""
    times = "once" if count == 1 else f"{count} times"
    return CollectiveMismatch(
        f"Rank {rank} waits in subgroup number {count + 1} of ranks {list(members)}, "
        f"which rank {parent.rank} has made only {times}",
        rank=rank,
        expected=count,
        got=count + 1,
        hint="All members must make the same subgroups in the same order, or name each of them.",
    )


def told_by(backend: Backend, rank: int, notice: Notice) -> DistributedError:
    """What another rank has found, as an error of ours."""
    culprit = notice.culprit if notice.culprit >= 0 else rank
    known = culprit != backend.rank and culprit < backend.world_size
    host = backend.peer_name(culprit) if known else None
    match notice.word:
        case NoticeKind.LOST:
            return PeerLost(notice.text, rank=culprit, host=host)
        case NoticeKind.MISMATCH | NoticeKind.DISAGREED:
            heard = CollectiveMismatch(notice.text, rank=culprit, host=host)
            heard.is_heard = True
            return heard
        case NoticeKind.LATE:
            missing = (culprit,) if notice.culprit >= 0 else ()
            is_relayed = " gave up: " in notice.text  # by somebody who had heard of it as well
            text = notice.text if is_relayed else f"Rank {rank} gave up: {notice.text}"
            return Timeout(text, seconds=0.0, missing=missing, rank=culprit)
        case NoticeKind.ABORTED:
            aborted = Aborted(notice.text, rank=culprit, host=host)
            aborted.is_final = notice.last_call >= FOR_EVER - 1
            aborted.teller = rank if notice.culprit == rank else None
            return aborted
        case NoticeKind.MALFORMED:
            # Hearsay: in a cluster membership decides, which the rank that saw it has told.
            aborted = Aborted(f"Rank {rank} failed: {notice.text}", rank=culprit, host=host)
            aborted.is_final = True
            return aborted
    aborted = Aborted(f"Rank {rank} failed: {notice.text}", rank=rank, host=host)
    aborted.teller = rank
    return aborted


def failed(backend: Backend, error: BaseException) -> Aborted:
    """What another error than ours means for calls that it ends as well."""
    reason = str(error) or type(error).__name__
    return Aborted(f"Rank {backend.rank} failed: {reason}", rank=backend.rank)


# --------------------------------------------------------------------------------------------------

EXPLAIN_FOR = 1.0
"""Seconds to wait for the reason after a stream has ended."""

ROLL_CALL = 1.0
"""Seconds of an operation, or half of what it has, after which one asks who is there at all."""

PAUSE = 0.005
"""Seconds between two looks for it."""


class FailureMonitor:
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
        """Why calls up to a number shall end, until the thread that runs one notices the abort."""
        self._told: set[int] = set()
        self._waiting: dict[int, Notice] = {}
        self._ending: tuple[int, Notice] | None = None
        self._furthest: tuple[int, Notice] | None = None
        self.call = 0
        """The one that had its turn last."""
        self.asked = 0.0
        """When it was made."""
        self.slept: dict[int, float] | None = None
        """Seconds that operations have slept for each rank, if that is counted."""
        self.waited: dict[int, float] = {}
        """For whom that call has waited, and for how many seconds, if it was long."""
        self._unmade: dict[int, float] = {}
        """Since when others wait for us in subgroups that we have not made."""
        self.asks_around = False
        """Whether to find out after a disagreement what most ranks believe."""
        self._ballot: MismatchVote | None = None
        self._disagreed: dict[int, Notice] = {}  # what ranks told last of a disagreement
        self._operation = 0
        self._fingerprint = self._earlier = Fingerprint(*(0,) * len(Fingerprint._fields))
        self._deadline: float | None = None
        self._is_still = False

    @property
    def description(self) -> str:
        """The operation under way, as a person would have written it."""
        return str(self._fingerprint)

    def admit(self, call: int, asked: float) -> None:
        """A call gets its turn; raise if it has been ended before."""
        if call <= self.epoch:
            raise copy.copy(self._verdict)
        if self.waited and call != self.call:
            self.waited = {}
        self.call, self.asked = call, asked

    def begin(self, operation: int, fingerprint: Fingerprint, deadline: float | None) -> None:
        """Watch over another operation."""
        self._operation, self._earlier = operation, self._fingerprint
        self._fingerprint = fingerprint
        self._deadline = deadline
        if self._told:
            self._told.clear()
            self._is_still = False
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
        self._check_unmade(awaited)
        self._tell_where_we_are(awaited)
        self._is_still = True
        for rank in awaited:
            self.waited[rank] = self.waited.get(rank, 0.0) + SLICE
            loss = self._backend.loss_of(rank)
            if loss is not None:
                raise copy.copy(loss)
        if self._deadline is not None and time.monotonic() >= self._deadline:
            raise self.late(awaited)

    def _tell_where_we_are(self, awaited: Sequence[int]) -> None:
        """Those whom we wait for; after a while all, who then say whether they are here."""
        asking = [
            rank
            for rank, notice in self._waiting.items()
            if notice.word is NoticeKind.ASKING and notice.operation == self._operation
        ]
        news = [rank for rank in (*awaited, *asking) if rank not in self._told]
        if news:
            self._told.update(news)
            self._notices.tell({*news}, self._notice(NoticeKind.WAITING))
        me, deadline = self._backend.rank, self._deadline
        if deadline is None or me in self._told:  # as a mark: all have been asked
            return
        if time.monotonic() >= min(self.asked + ROLL_CALL, (self.asked + deadline) / 2):
            self._told.update(self._others, (me,))
            self._notices.tell(self._others, self._notice(NoticeKind.ASKING))

    def check(self, awaited: Sequence[int]) -> None:
        """The same while bytes move, so often that it must cost nothing."""
        if self.aborted is not None:
            raise copy.copy(self.aborted[0])
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._read_notices()
            self._check_ending()
            if self._is_still:  # what moves now is the others' giving up
                raise self.late(awaited)
            raise self.late((), "its data was still being transferred")
        self._is_still = False

    def _notice(self, word: NoticeKind, culprit: int = -1, text: str = "", last: int = 0) -> Notice:
        packed, earlier = self._fingerprint.pack(), self._earlier.pack()
        return Notice(word, self.epoch, self._operation, culprit, packed, text, last, earlier)

    def late(self, awaited: Sequence[int], cause: str | None = None) -> Timeout:
        """The error at the deadline; it names who is not there, if we know it."""
        here = {
            rank for rank, notice in self._waiting.items() if notice.operation >= self._operation
        }
        missing = [rank for rank in awaited if rank not in here]
        if not missing and (awaited or cause is None):  # they wait for somebody else themselves
            missing = [rank for rank in self._others if rank not in here]
            cause = None if missing else cause
        seconds = time.monotonic() - self.asked
        missing = missing or list(awaited)
        return late(self._backend, self._fingerprint, seconds, missing, cause)

    def _read_notices(self) -> None:
        for rank, notice in self._notices.collect():
            if notice.word in {NoticeKind.MISMATCH, NoticeKind.DISAGREED}:
                self._disagreed[rank] = notice
                if self._ballot is not None:
                    self._ballot.hear(rank, notice)
            if notice.word in {NoticeKind.WAITING, NoticeKind.ASKING}:
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

        A rank that left later has done its part in this one, which may well end without it.
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

    def _check_unmade(self, awaited: Sequence[int]) -> None:
        """Raise if a rank we wait for waits for us in a subgroup that we have not made."""
        below = self._backend
        parent = below.parent if isinstance(below, SubBackend) else below
        parent = parent.innermost
        for members, count, identity in sub_unmade(parent):
            for rank in awaited:
                there = below.to_global(rank) if isinstance(below, SubBackend) else rank
                if rank in self._waiting or there not in members:
                    continue
                if not has_notice(parent, there, identity):
                    continue
                now = time.monotonic()
                if now < self._unmade.setdefault(identity, now) + EXPLAIN_FOR / 2:
                    continue  # another thread may be about to make it
                error = unmade(parent, there, members, count)
                tell_outside(
                    parent,
                    there,
                    identity,
                    Notice(NoticeKind.MISMATCH, 0, 0, text=str(error), last_call=1),
                )
                raise error

    # -- reasons -----------------------------------------------------------------------------------

    def disagree(self, found: Disagreement) -> DistributedError:
        """The error for a first frame that does not fit."""
        if found.operation == self._operation:
            return self._mismatch(found.peer, found.fingerprint)
        self._open_ballot().show(found.peer, found.fingerprint.pack())
        return not_together(self._backend, self._operation, self._fingerprint, found)

    def _mismatch(self, rank: int, theirs: Fingerprint) -> CollectiveMismatch:
        self._open_ballot().show(rank, theirs.pack())
        return mismatch(self._backend, self._fingerprint, rank, theirs)

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
        return told_by(self._backend, rank, notice)

    # -- who is the odd one out ------------------------------------------------------------------

    def _open_ballot(self) -> MismatchVote:
        """The ballot on the operation under way."""
        mine = beliefs_of(self._operation, self._fingerprint.pack(), self._earlier.pack())
        ballot = MismatchVote(self._backend.world_size, self.epoch, self._operation, mine)
        for rank, notice in self._disagreed.items():
            ballot.hear(rank, notice)
        self._ballot = ballot
        return ballot

    def ask_around(self, error: BaseException) -> None:
        """After a disagreement that all ranks have heard of: wait for what they believe.

        Ends when it is clear what most believe, and at the latest when the operation would have.
        """
        ballot, self._ballot = self._ballot, None
        if ballot is None or not self.asks_around or not isinstance(error, CollectiveMismatch):
            return
        error.ballot = self._ballot = ballot
        if isinstance(self._verdict, CollectiveMismatch):
            self._verdict.ballot = ballot
        settled = None
        while self.aborted is None:
            self._read_notices()
            silent = [rank for rank in self._others if rank not in ballot.told]
            silent = [rank for rank in silent if self._backend.loss_of(rank) is None]
            now = time.monotonic()
            if ballot.is_decided(silent) or (self._deadline is not None and now > self._deadline):
                break
            settled = now if settled is None and ballot.has_most else settled
            if settled is not None and now > settled + EXPLAIN_FOR:
                break  # another rank has seen who it is, or there is none
            time.sleep(PAUSE)
        self._ballot = None
        later = {rank: each for rank, each in self._disagreed.items() if each.epoch > ballot.epoch}
        self._disagreed = later

    # -- endings -----------------------------------------------------------------------------------

    def abort(self, error: DistributedError, last_call: int) -> None:
        """End calls up to a number, from any thread; a thread that runs one wakes up and checks."""
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
        verdict = error if isinstance(error, DistributedError) else failed(self._backend, error)
        if self.aborted is not None and self.aborted[1] > last_call:
            verdict, last_call = self.aborted
        if self._furthest is not None and self._furthest[1].last_call > last_call:
            verdict, last_call = self._told_by(*self._furthest), self._furthest[1].last_call
        if isinstance(error, CollectiveMismatch) and error.is_heard:
            self._open_ballot()
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
        is_heard = isinstance(error, CollectiveMismatch) and error.is_heard
        words: list[tuple[type[BaseException], NoticeKind]] = [
            (CollectiveMismatch, NoticeKind.DISAGREED if is_heard else NoticeKind.MISMATCH),
            (Disconnected, NoticeKind.LOST),
            (Timeout, NoticeKind.LATE),
            (Aborted, NoticeKind.ABORTED),
        ]
        if isinstance(error, MalformedFrame) and error.rank is not None:
            words.append((MalformedFrame, NoticeKind.MALFORMED))
        word = next((word for kind, word in words if isinstance(error, kind)), NoticeKind.FAILED)
        culprit = error.rank if isinstance(error, DistributedError) else None
        text = str(error) or type(error).__name__
        notice = self._notice(word, -1 if culprit is None else culprit, text, last_call)
        self._notices.tell(self._others, notice)

    def close(self) -> None:
        """Stop listening to notices."""
        self._notices.close()
