"""How operations of a view end: one error, made from what membership has decided and nothing else.

Every member of the next view makes it from the same commit, so type, text and fields are the same
on all of them.  What a process saw itself (a broken connection, a silence) does not count.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

from potluck.core.cluster_messages import Cause, CauseCode, Commit
from potluck.errors import (
    BackendUnavailable,
    DistributedError,
    LeftOut,
    NoQuorum,
    PeerLost,
    ViewChanged,
)
from potluck.vocabulary import ProcessId, View

__all__ = [
    "after_skipping",
    "belongs_to_parent",
    "ended_for_good",
    "ending",
    "is_orderly",
    "no_quorum",
    "out_of_view",
]

_CALL_AGAIN = "Call again: the operation runs among the members of the new view."


def ending(view: View, commits: Sequence[Commit], me: ProcessId) -> DistributedError:
    """The error of operations of ``view``; ``commits`` followed it, oldest first.

    Only the first of them counts.  If it is not the one right after ``view``, the error says so.
    """
    commit = commits[0]
    if commit.proposal.into:
        return _merged(view, commit)
    members = commit.proposal.members
    if me not in members:
        return _left_out(view, commit, me)
    gone = [who for who in view.members if who not in members]
    if gone:
        return _lost(view, commit, gone)
    return _changed(view, commit)


def is_orderly(view: View, commits: Sequence[Commit]) -> bool:
    """Whether what all ranks are in the middle of may be finished: no member was lost."""
    commit = commits[0]
    causes = _causes(commit)
    gone = [who for who in view.members if who not in commit.proposal.members]
    return all(who in causes and causes[who].code is CauseCode.LEFT for who in gone)


def _lost(view: View, commit: Commit, gone: Sequence[ProcessId]) -> PeerLost:
    causes = _causes(commit)
    names = [f"{view.rank_of(who)} ({_where(who, causes.get(who))})" for who in gone]
    first = gone[0]
    known = causes.get(first)
    if len(gone) == 1:
        is_removed = known is not None and known.code is CauseCode.MISBEHAVED
        what = "was removed" if is_removed else "is gone"
        message, cause = f"Rank {names[0]} {what}", _why(known)
    else:
        message = f"Ranks {', '.join(names[:-1])} and {names[-1]} are gone"
        cause = "; ".join(f"rank {view.rank_of(who)}: {_why(causes.get(who))}" for who in gone)
    return PeerLost(
        message,
        rank=view.rank_of(first),
        node=first.node,
        host=(known.name if known is not None else "") or None,
        cause=cause + _skipped(view, commit),
        hint="The others continue without it: call again, and the operation runs among them."
        if len(gone) == 1
        else "The others continue without them: call again, and the operation runs among them.",
    )


def _changed(view: View, commit: Commit) -> ViewChanged:
    is_same = set(view.members) == set(commit.proposal.members)
    what = "continue in a new view" if is_same else "have changed"
    return ViewChanged(
        f"The members of the cluster {what}",
        cause=(commit.proposal.reason or f"view {commit.epoch} was agreed")
        + _skipped(view, commit),
        hint=_CALL_AGAIN,
    )


def _left_out(view: View, commit: Commit, me: ProcessId) -> LeftOut:
    cause = _causes(commit).get(me)
    why = _why(cause) if cause is not None else commit.proposal.reason
    return LeftOut(
        f"This process was left out of view {commit.epoch} of its cluster",
        rank=view.rank_of(me),
        node=me.node,
        host=(cause.name if cause is not None else "") or None,
        cause=(why or "the others could not reach it") + _skipped(view, commit),
        hint="It waits to be let in again; a call waits for that, up to its timeout.",
    )


def _merged(view: View, commit: Commit) -> ViewChanged:
    proposal = commit.proposal
    return ViewChanged(
        f"This cluster has merged into cluster {proposal.into[:8]}",
        cause=(proposal.reason or f"view {commit.epoch} was its last") + _skipped(view, commit),
        hint="Work since the two separated is replaced by the state of that cluster; "
        "the next call runs there.",
    )


def after_skipping(error: DistributedError, count: int) -> DistributedError:
    """The error for a program that was not told of this many views before; its own copy."""
    error = copy.copy(error)
    if count:
        views = f"{count} earlier view{'s' * (count > 1)}"
        error.cause = f"{error.cause or 'the view is over'} (the end of {views} was not reported)"
    return error


def out_of_view(reason: str) -> ViewChanged:
    """This process has given up its view without a commit that says so."""
    return ViewChanged(
        "This process is not in a view of its cluster any more",
        cause=reason,
        hint="It joins again by itself; a call waits for that, up to its timeout.",
    )


def no_quorum(
    message: str, seconds: float, view: View, missing: Sequence[Cause], reason: str
) -> NoQuorum:
    """A call waited in vain for the view that follows, or for this one to hold again."""
    names = [
        f"rank {view.rank_of(each.who)} ({_where(each.who, each)}, not heard for "
        f"{each.silent_for:.1f} s)"
        for each in missing
    ]
    ranks = [rank for each in missing if (rank := view.rank_of(each.who)) is not None]
    first = missing[0] if missing else None
    return NoQuorum(
        f"{message}; missing: {', '.join(names)}" if names else message,
        seconds=seconds,
        missing=ranks,
        rank=ranks[0] if ranks else None,
        node=None if first is None else first.who.node,
        host=None if first is None else first.name or None,
        cause=reason or None,
        hint="Bring them back, or continue without them: `potluck continue`. "
        "`potluck doctor` says why a machine cannot be reached.",
    )


def ended_for_good(reason: str) -> DistributedError:
    """Nothing runs here any more."""
    return BackendUnavailable(
        "This node has left its cluster",
        cause=reason,
        hint="Join anew: potluck.join().",
    )


def belongs_to_parent(pid: int) -> DistributedError:
    """For a forked child."""
    return BackendUnavailable(
        f"This cluster belongs to the parent process (pid {pid})",
        hint="Join anew in the child process if it has to take part.",
    )


def _causes(commit: Commit) -> dict[ProcessId, Cause]:
    return {cause.who: cause for cause in commit.proposal.causes}


def _where(who: ProcessId, cause: Cause | None) -> str:
    """What people call a member, and its address."""
    name = cause.name if cause is not None else ""
    host = cause.host if cause is not None else ""
    return f"{name or who} at {host}" if host else name or str(who)


def _why(cause: Cause | None) -> str:
    if cause is None:
        return "it is not in the new view"
    return cause.reason or _WORDS[cause.code]


def _skipped(view: View, commit: Commit) -> str:
    """For a process that was out of contact: what followed its view it has not learnt."""
    if commit.lineage != view.lineage:
        return ""  # the first view of a child lineage
    first, last = view.epoch + 1, commit.epoch - 1
    if first > last:
        return ""
    views = f"view {first}" if first == last else f"views {first} to {last}"
    return f" (this process missed {views})"


_WORDS = {
    CauseCode.ENDED: "its process has ended",
    CauseCode.LEFT: "it left",
    CauseCode.SILENT: "nothing was heard from it",
    CauseCode.UNREACHABLE: "some members could not reach it",
    CauseCode.MISBEHAVED: "it sent what no correct process sends",
}
