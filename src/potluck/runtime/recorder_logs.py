"""Who records where: one recorder for each rank, one log for each of its groups."""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import TYPE_CHECKING

from potluck.backend.sub import SubBackend
from potluck.errors import BackendUnavailable
from potluck.forking import ForkSafeLock, call_in_children
from potluck.runtime.recorder import CAPACITY, Label, Lane, Log, Recorder

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.vocabulary import View

__all__ = ["LENGTH_VARIABLE", "attach", "live_recorders", "log_of", "make_recorder", "recorder_of"]

LENGTH_VARIABLE = "POTLUCK_TRACE_LENGTH"

LEAST, MOST = 16, 1 << 20
"""Operations that can be kept; a million take about 200 MB."""

REMEMBERED = 4
"""Recorders that are kept although their backends are gone: what went wrong may be told later."""

_live: weakref.WeakSet[Recorder] = weakref.WeakSet()
_latest: deque[Recorder] = deque(maxlen=REMEMBERED)
_finding = ForkSafeLock()  # a signal's handler may look while we do


def make_recorder() -> Recorder:
    """A recorder of the length that the environment asks for."""
    text = os.environ.get(LENGTH_VARIABLE, "") or str(CAPACITY)
    if not (text.isascii() and text.isdecimal() and LEAST <= int(text[:9]) <= MOST):
        raise BackendUnavailable(
            f"{LENGTH_VARIABLE} must be a number from {LEAST} to {MOST}",
            got=text,
            cause=f"it is {text[:40]!r}",
            hint=f"Unset it, or give the number of operations to keep, such as {CAPACITY}.",
        )
    recorder = Recorder(int(text))
    with _finding:
        _live.add(recorder)
        _latest.append(recorder)
    return recorder


def live_recorders() -> list[Recorder]:
    """Those of this process that have something to tell."""
    with _finding:
        return sorted(_live, key=lambda each: each.rank)


def attach(backend: Backend, recorder: Recorder) -> None:
    """Have what runs on a backend recorded there."""
    vars(backend)["_recorder"] = recorder


def log_of(backend: Backend) -> Log:
    """The log of the group that a backend is: always the same one."""
    found = vars(backend).get("_log")
    if found is None:
        found = vars(backend).setdefault("_log", _make_log(backend))  # atomic: the first counts
    assert isinstance(found, Log)
    return found


def _make_log(backend: Backend) -> Log:
    below: Backend = getattr(backend, "innermost", backend)
    group, inner = "world", below
    members: tuple[int, ...] = ()
    while isinstance(inner, SubBackend):
        if inner is below:
            group = inner.name or f"subgroup {inner.identity:x}"
        above = inner.members
        members = tuple(above[rank] for rank in members) if members else above
        inner = getattr(inner.parent, "innermost", inner.parent)
    recorder = recorder_of(inner)
    view: View | None = getattr(inner, "view", None)
    name = "" if view is None else f"{view.lineage}/{view.epoch}"
    recorder.rank, recorder.world_size = inner.rank, inner.world_size
    return Log(recorder, Label(Lane.COLLECTIVES, group[:255], name, inner.rank, members))


def recorder_of(backend: Backend) -> Recorder:
    """The recorder of the rank that a backend is, or is a part of."""
    backend = getattr(backend, "innermost", backend)
    while isinstance(backend, SubBackend):
        backend = getattr(backend.parent, "innermost", backend.parent)
    recorder = vars(backend).get("_recorder")
    if recorder is None:
        recorder = vars(backend).setdefault("_recorder", make_recorder())
    assert isinstance(recorder, Recorder)
    return recorder


def become_forked() -> None:
    """In a forked child: another thread of the parent may have held the lock."""
    _live.clear()
    _latest.clear()


call_in_children(become_forked)
