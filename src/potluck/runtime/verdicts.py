"""Verdicts: what ended an operation, as errors for people."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.errors import Aborted, CollectiveMismatch, DistributedError, PeerLost, Timeout
from potluck.runtime.fingerprint import Fingerprint, describe_mismatch
from potluck.runtime.notices import FOR_EVER, Notice, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

    from potluck.backend.base import Backend
    from potluck.runtime.channel import Disagreement

__all__ = ["failed", "late", "mismatch", "not_together", "told_by", "unmade"]


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
        cause=f"rank {backend.rank} is in number {operation} ({mine}), "
        f"rank {found.peer} in number {found.operation} ({found.fingerprint})",
        hint="All ranks must make the same calls in the same order.",
    )


def late(
    backend: Backend, about: Fingerprint, seconds: float, missing: Sequence[int], cause: str | None
) -> Timeout:
    """The time is up."""
    names = ", ".join(f"rank {rank} ({backend.peer_name(rank)})" for rank in missing)
    nothing = f"nothing came from {names}" if names else "the other ranks do not read"
    return Timeout(
        f"{about} was not done in time",
        seconds=seconds,
        missing=missing,
        rank=missing[0] if missing else None,
        cause=cause or nothing,
        hint="Look at what those ranks do instead.",
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
        hint="Every member makes the same subgroups in the same order, or gives each a name.",
    )


def told_by(backend: Backend, rank: int, notice: Notice) -> DistributedError:
    """What another rank has found, as an error of ours."""
    culprit = notice.culprit if notice.culprit >= 0 else rank
    known = culprit != backend.rank and culprit < backend.world_size
    host = backend.peer_name(culprit) if known else None
    match notice.word:
        case Word.LOST:
            return PeerLost(notice.text, rank=culprit, host=host)
        case Word.MISMATCH | Word.DISAGREED:
            heard = CollectiveMismatch(notice.text, rank=culprit, host=host)
            heard.is_heard = True
            return heard
        case Word.LATE:
            missing = (culprit,) if notice.culprit >= 0 else ()
            is_relayed = " gave up: " in notice.text  # by somebody who had heard of it as well
            text = notice.text if is_relayed else f"Rank {rank} gave up: {notice.text}"
            return Timeout(text, seconds=0.0, missing=missing, rank=culprit)
        case Word.ABORTED:
            aborted = Aborted(notice.text, rank=culprit, host=host)
            aborted.is_final = notice.last_call >= FOR_EVER - 1
            aborted.teller = rank if notice.culprit == rank else None
            return aborted
        case Word.MALFORMED:
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
