"""What happens in a cluster: kept for later questions, and told to registered callbacks."""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from potluck._types import ProcessId, View
from potluck.errors import (
    BackendUnavailable,
    DistributedError,
    LeftOut,
    NoQuorum,
    PeerLost,
    ViewChanged,
)
from potluck.logs import NOTICE, get_logger
from potluck.membership.events import ElectionEvent, ElectionKind, MembershipChange, MembershipEvent
from potluck.membership.health import HealthEvent
from potluck.membership.messages import Cause, CauseCode, Commit, ProcessInfo

logger = get_logger("potluck.cluster")

KEPT = 512
"""Events that are remembered."""

ONCE_WITHIN, RECENT = 60.0, 32
"""Seconds, and events, within which the same failure is not kept again."""

KEPT_VIEWS = 64
"""Changes of the view that are remembered, which events may crowd out."""

MAX_WAITING = 1024
"""Changes that wait for a slow callback; of more, the first are dropped."""

_GRAVE = frozenset(
    {
        MembershipChange.LOST,
        MembershipChange.EXPELLED,
        MembershipChange.REMOVED,
        MembershipChange.PAUSED,
        MembershipChange.REFUSED,
    }
)


@dataclass(frozen=True, slots=True)
class ViewChange:
    """The cluster went from one view to the next.

    >>> from potluck._types import NodeId
    >>> me, you = (ProcessId(NodeId(letter * 32), 1) for letter in "ab")
    >>> alone, both = View("f" * 32, 1, (me,)), View("f" * 32, 2, (me, you))
    >>> change = ViewChange(both, alone, "attic has come")
    >>> change.joined == (you,), str(change)
    (True, 'view 2 with 2 members: attic has come')
    """

    view: View
    previous: View | None
    """The view this node was in before; None if it was in none."""
    reason: str

    @property
    def joined(self) -> tuple[ProcessId, ...]:
        """Who is in now and was not before."""
        before = self.previous.members if self.previous else ()
        return tuple(each for each in self.view.members if each not in before)

    @property
    def left(self) -> tuple[ProcessId, ...]:
        """Who was in before and is not now."""
        before = self.previous.members if self.previous else ()
        return tuple(each for each in before if each not in self.view.members)

    def __str__(self) -> str:
        """One sentence."""
        count = len(self.view.members)
        return f"view {self.view.epoch} with {count} member{'s' * (count != 1)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class ClusterEvent:
    """Something that happened, and when; its text is a sentence.

    >>> print(ClusterEvent("attic has left", time=0.0, number=3))
    attic has left
    """

    event: object
    time: float = field(default_factory=time.time)
    """Seconds since 1970, by the clock of this machine."""
    number: int = 0
    """Counts the events of this process, from 1."""
    level: int = logging.INFO
    """How much it matters, in the numbers of :mod:`logging`."""

    def __str__(self) -> str:
        """The sentence."""
        return str(self.event)


Callback: TypeAlias = Callable[[ViewChange], None]


class EventLog:
    """The events of one node; callbacks run one after the other on a thread of their own."""

    def __init__(self) -> None:
        self._kept: deque[ClusterEvent] = deque(maxlen=KEPT)
        self._count = 0
        self._views: deque[tuple[float, ViewChange]] = deque(maxlen=KEPT_VIEWS)
        self._callbacks: list[Callback] = []
        self._waiting: queue.SimpleQueue[ViewChange | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def post(self, event: object, *, quietly: bool = False) -> None:
        """Keep an event and write it to the log; ``quietly`` what no user needs to look at."""
        level = logging.DEBUG if quietly else _level(event)
        self.keep(event, level)
        logger.log(min(level, _log_level(event)), "%s", event, extra=_fields(event))

    def keep(self, event: object, level: int) -> None:
        """Keep an event that is in the log already."""
        self._count += 1
        self._kept.append(ClusterEvent(event, number=self._count, level=level))

    def keep_once(self, event: object, level: int) -> None:
        """The same, unless the same was kept lately: many calls may fail for one reason."""
        since, words = time.time() - ONCE_WITHIN, str(event)
        if not any(each.time > since and str(each) == words for each in list(self._kept)[-RECENT:]):
            self.keep(event, level)

    def changed(self, change: ViewChange) -> None:
        """Tell the callbacks of another view."""
        self._views.append((time.time(), change))
        if self._thread is not None and self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(change)

    @property
    def events(self) -> list[ClusterEvent]:
        """What has happened, oldest first; the last few hundred."""
        return list(self._kept)

    @property
    def views(self) -> list[tuple[float, ViewChange]]:
        """The last changes of the view and when they came, oldest first."""
        return list(self._views)

    def subscribe(self, callback: Callback) -> Callable[[], None]:
        """Have something called at every change; what this returns ends that."""
        with self._lock:
            self._callbacks.append(callback)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="potluck-events", daemon=True
                )
                self._thread.start()

        def unsubscribe() -> None:
            with self._lock:
                if callback in self._callbacks:
                    self._callbacks.remove(callback)

        return unsubscribe

    def _run(self) -> None:
        while (change := self._waiting.get()) is not None:
            with self._lock:
                callbacks = list(self._callbacks)
            for callback in callbacks:
                try:
                    callback(change)
                except BaseException:  # also sys.exit(): the others are told all the same
                    logger.exception("A callback for view changes failed")

    def close(self, within: float) -> None:
        """Call no callback any more."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            self._waiting.put(None)
            thread.join(within)


def _fields(event: object) -> dict[str, object]:
    """What programs that read the log want to know beside the sentence."""
    match event:
        case HealthEvent(peer=peer, name=name, status=status):
            about = {"peer": name, "member": str(peer)}
            return {"event": "health", "status": status.value, **about}
        case MembershipEvent(change=change, process=process, view=view):
            about = {} if process is None else {"member": str(process)}
            where = {} if view is None else {"epoch": view.epoch}
            return {"event": change.value, **about, **where}
        case ElectionEvent(kind=kind, epoch=epoch, term=term):
            return {"event": kind.value, "epoch": epoch, "term": term}
    return {}


def _level(event: object) -> int:
    if isinstance(event, HealthEvent):
        is_well = event.status.is_operational and event.previous.is_operational
        return logging.INFO if is_well else logging.WARNING
    if isinstance(event, MembershipEvent):
        return logging.WARNING if event.change in _GRAVE else logging.INFO
    if isinstance(event, ElectionEvent):
        return logging.ERROR if event.kind is ElectionKind.SPLIT_BRAIN else logging.INFO
    return logging.INFO


def _log_level(event: object) -> int:
    """How loud it may be in the log: for what concerns machines one line is made from all of it."""
    is_told = isinstance(event, HealthEvent) or (
        isinstance(event, MembershipEvent)
        and event.change not in {MembershipChange.REFUSED, MembershipChange.EXPELLED}
    )
    return logging.INFO if is_told else logging.CRITICAL


# --------------------------------------------------------------------------------------------------
# What people read without asking for more: one line for each event, with names and without ids.

STAYS_AFTER = 2.0
"""Seconds after which it matters that another script has ended: it was not the end of them all."""


class Announcer:
    """Says who left and who came back, and that this machine waits; used by the control thread.

    Under a launcher (``potluck run``) that one says why a script has ended, so this does not.
    """

    def __init__(self, me: ProcessId, *, has_launcher: bool) -> None:
        self._me = me
        self._has_launcher = has_launcher
        self._names: dict[ProcessId, str] = {}  # of the view that holds, or held last
        self._away: set[str] = set()  # nodes that have left a view
        self._is_apart = False  # we wait, or were left out
        self._farewells: dict[str, tuple[float, str]] = {}  # by node: since when, and its name

    def installed(
        self, change: ViewChange, cards: Sequence[ProcessInfo], commits: Sequence[Commit]
    ) -> None:
        """Another view holds."""
        before, self._names = self._names, {each.process: str(each) for each in cards}
        self._come_together()
        here = {each.node for each in change.view.members}
        joined = {each.node for each in change.joined}
        causes = {cause.who: cause for commit in commits for cause in commit.proposal.causes}
        for who in change.left:
            if who.node not in joined:
                self._left(who, before.get(who, ""), causes.get(who), is_here=who.node in here)
        gone = {each.node for each in change.left}
        for node in sorted(joined & (self._away | gone)):
            name = next(name for each, name in self._names.items() if each.node == node)
            _notice("%s came back", name)
        self._away = (self._away | gone) - here
        self._farewells = {node: each for node, each in self._farewells.items() if node not in here}

    def _left(self, who: ProcessId, name: str, cause: Cause | None, *, is_here: bool) -> None:
        name = name or (cause.name if cause is not None else "") or str(who)
        code = None if cause is None else cause.code
        if code is CauseCode.MISBEHAVED or (
            self._has_launcher and code in {CauseCode.LEFT, CauseCode.ENDED}
        ):
            return  # which was said
        if code is CauseCode.LEFT:
            if not is_here:
                self._farewells[who.node] = time.monotonic(), name
            return
        why = "" if code is None else f": {_WORDS[code]}"
        if cause is not None and code is CauseCode.SILENT:
            why += f" for {cause.silent_for:.1f} s"
        logger.warning("%s left%s", f"A worker of {name}" if is_here else name, why)

    def look(self) -> None:
        """Now and then: of those who left in good order, say so if this process stays."""
        for node, (since, name) in list(self._farewells.items()):
            if time.monotonic() >= since + STAYS_AFTER:
                del self._farewells[node]
                _notice("%s left: its script ended", name)

    def noted(self, event: object, missing: Sequence[str], *, has_network: bool) -> None:
        """Something happened; ``missing`` are the names of members that are out of contact."""
        if not isinstance(event, MembershipEvent):
            return
        match event.change:
            case MembershipChange.PAUSED:
                self._is_apart = True
                logger.warning("%s", _paused(event, missing, has_network=has_network))
            case MembershipChange.REMOVED if not self._is_apart:
                self._is_apart = True
                logger.warning("This machine is out of the group and joins it again: %s", event)
            case MembershipChange.RESUMED:
                self._come_together()
            case MembershipChange.LOST if not self._names and not self._has_launcher:
                _notice("%s", event)  # while we wait for the first view

    def _come_together(self) -> None:
        if self._is_apart:
            self._is_apart = False
            others = sorted({name for who, name in self._names.items() if who != self._me})
            _notice("This machine continues %s", f"with {_listed(others)}" if others else "alone")


def _notice(message: str, *words: object) -> None:
    logger.warning(message, *words, extra=NOTICE)


def _paused(event: MembershipEvent, missing: Sequence[str], *, has_network: bool) -> str:
    if not has_network:
        return "Paused: this machine is not connected to a network. It continues when it is."
    if not missing:
        return str(event).capitalize()
    they, one = ("they", "one of them") if len(missing) > 1 else ("it", "it")
    return (
        f"Paused: this machine cannot reach {_listed(missing)}, and {they} may be at work without "
        f"it. It continues when {one} is back."
    )


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


# --------------------------------------------------------------------------------------------------
# How operations of a view end: one error, made from what membership has decided and nothing else.
#
# Every member of the next view makes it from the same commit, so type, text and fields are the same
# on all of them.  What a process saw itself (a broken connection, a silence) does not count.

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
    why = "the others could not reach it" if cause is None else _why(cause)
    return LeftOut(
        f"This process was left out of view {commit.epoch} of its cluster",
        rank=view.rank_of(me),
        node=me.node,
        host=(cause.name if cause is not None else "") or None,
        cause=why + _skipped(view, commit),
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
    names = [_missed(view.rank_of(each.who), each) for each in missing]
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


def _missed(rank: int | None, cause: Cause) -> str:
    """Who is missing, and for how long; one that came later has no rank in the view."""
    facts = f"{_where(cause.who, cause)}, not heard for {cause.silent_for:.1f} s"
    return facts if rank is None else f"rank {rank} ({facts})"


def ended_for_good(reason: str) -> DistributedError:
    """Nothing runs here any more."""
    return BackendUnavailable(
        "This node has left its cluster",
        cause=reason,
        hint="Join again: potluck.join().",
    )


def belongs_to_parent(pid: int) -> DistributedError:
    """For a forked child."""
    return BackendUnavailable(
        f"This cluster belongs to the parent process (pid {pid})",
        hint="Call potluck.join() in the child process if it has to take part.",
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
    CauseCode.SILENT: "it did not respond",
    CauseCode.UNREACHABLE: "some members could not reach it",
    CauseCode.MISBEHAVED: "it sent invalid messages",
}
