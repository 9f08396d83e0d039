"""Dumps without a call: when a signal asks for them, and when a program ends by an error.

Only where ``POTLUCK_TRACE_DIR`` is set, as ``potluck run`` does: a library leaves the signals and
the last words of a program alone.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType, TracebackType

from potluck.errors import DistributedError
from potluck.runtime.last_words import tells_of_another
from potluck.runtime.recorder_files import FOLDER_VARIABLE, dump, dump_soon_again
from potluck.runtime.recorder_logs import live_recorders

__all__ = ["install"]

_installed = threading.Event()


def install() -> None:
    """Listen for the signal, and for the error that ends the program.  May be called often."""
    if not os.environ.get(FOLDER_VARIABLE):
        return
    _listen()
    if not _installed.is_set():
        _installed.set()
        before = sys.excepthook

        def told(
            kind: type[BaseException], error: BaseException, trace: TracebackType | None
        ) -> None:
            if isinstance(error, Exception):
                _write_last_words(error)
            before(kind, error, trace)

        sys.excepthook = told


def _listen() -> None:
    """On SIGUSR2 write dumps and go on; a program's own handler stays."""
    number = getattr(signal, "SIGUSR2", None)  # not on Windows
    if number is None or threading.current_thread() is not threading.main_thread():
        return
    # `potluck run` lets its scripts begin with this signal ignored: until now nobody could answer.
    free = {signal.SIG_DFL, signal.SIG_IGN} if os.environ.get("POTLUCK_RUN") else {signal.SIG_DFL}
    if signal.getsignal(number) in free:
        signal.signal(number, _dump_all)


def _dump_all(number: int, _frame: FrameType | None) -> None:
    reason = f"somebody asked for it with {signal.Signals(number).name}"
    for recorder in live_recorders():
        with contextlib.suppress(DistributedError, OSError):
            path = dump(recorder, reason=reason)
            sys.stderr.write(f"potluck: what rank {recorder.rank} has done is in {path}\n")


def _write_last_words(error: Exception) -> None:
    """The program ends: keep what came before, unless its error has said where that is.

    Where it only tells of another rank, that rank's machine has more to show.
    """
    if isinstance(error, DistributedError) and error.trace is not None:
        return
    for recorder in live_recorders():
        path = dump_soon_again(recorder, f"the program ended by {type(error).__name__}: {error}")
        if path is not None and not tells_of_another(error):
            sys.stderr.write(
                f"potluck: what rank {recorder.rank} did before is in {path}; "
                "`potluck trace` shows it\n"
            )
