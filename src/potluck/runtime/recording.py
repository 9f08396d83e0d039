"""What a group has its flight recorder take down: every call, for the price of a tuple."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from potluck.runtime.recorder import Entry, Failure, Label, Lane
from potluck.runtime.recorder_files import mention
from potluck.runtime.recorder_hooks import install as install_hooks
from potluck.runtime.recorder_logs import log_of

if TYPE_CHECKING:
    from types import TracebackType

    from potluck.backend.base import Backend
    from potluck.runtime.call import Call
    from potluck.runtime.recorder import Log
    from potluck.runtime.vigil import Vigil

__all__ = ["MessageNote", "Recording"]


class MessageNote:
    """A send or receive, from its beginning to its end; around it, what goes wrong is kept too."""

    __slots__ = ("_began", "_log", "_nbytes", "_number", "_way")

    def __init__(self, log: Log, what: str, peer: int, tag: int, nbytes: int) -> None:
        self._way = way = (what, peer, tag)
        counts = log.counts
        self._number = counts[way] = counts.get(way, 0) + 1
        self._log, self._nbytes = log, nbytes
        self._began = time.monotonic()
        log.recorder.open[id(self)] = self

    def end(self, error: BaseException | None) -> None:
        """It is over; only the first end counts."""
        log = self._log
        if log.recorder.open.pop(id(self), None) is None:
            return
        failure = None if error is None else Failure.of(error)
        log.append(self._entry(time.monotonic(), failure))
        if error is not None:
            mention(log.recorder, error)

    def under_way(self) -> Entry:
        """As it is now."""
        return self._entry(0.0, None)

    def _entry(self, ended: float, failure: Failure | None) -> Entry:
        way, number, label = self._way, self._number, self._log.messages
        return (way[0], self._began, ended, number, self._nbytes, 0, label, failure, way)

    def __enter__(self) -> None:
        """It has begun already."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """It is over."""
        self.end(error)


class Recording:
    """The half of a group that remembers."""

    _vigil: Vigil
    _runner: int
    _failed_call = 0
    _epoch = 0
    """Up to which call the last failure had ended them, when it was taken down."""

    def _open_log(self, backend: Backend) -> None:
        self._log: Log = log_of(backend)
        self._append = self._log.append
        label, instance = self._log.collectives, self._vigil.instance
        if instance:  # another group of the same ranks was before
            name = f"{label.group} ({instance + 1})"[-255:]
            label = Label(Lane.COLLECTIVES, name, label.view, label.rank, label.members)
        self._label = label
        self._log.recorder.watch(self)
        install_hooks()

    def _record(self, call: Call, number: int, began: float) -> None:
        """A call is done; here every nanosecond counts."""
        vigil = self._vigil
        self._append(
            (
                call.task,
                began,
                time.monotonic(),
                number,
                call.target.itemsize,
                vigil.epoch,
                self._label,
                None,
                vigil.waited or None,
            )
        )

    def _record_failure(self, call: Call, number: int, began: float, error: BaseException) -> None:
        """A call has failed: keep that, and write down what came before if it helps."""
        vigil, now = self._vigil, time.monotonic()
        failure = Failure.of(error)
        # The failure has begun another epoch already; this call was in the one before.
        epoch = vigil.epoch if vigil.epoch < number else self._epoch
        self._failed_call, self._epoch = number, min(vigil.epoch, number)
        entry = (call.task, began, now, number, call.target.itemsize, epoch)
        self._append((*entry, self._label, failure, vigil.waited or None))
        mention(self._log.recorder, error)

    def under_way(self) -> Entry | None:
        """The call that runs now, as far as it is known."""
        vigil = self._vigil
        if not self._runner or vigil.call in (0, self._failed_call):
            return None
        what = vigil.description.partition("(")[0]
        waited = dict(vigil.waited) or None
        return (what, vigil.asked, 0.0, vigil.call, 0, vigil.epoch, self._label, None, waited)
