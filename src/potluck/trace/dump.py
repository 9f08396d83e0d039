"""Dumps of the flight recorder: on request, and automatically after an error.

A dump is written atomically, is readable by its user only, and never causes another failure: if it
cannot be written, a warning is logged, and the original error is raised.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from potluck import _platform
from potluck._platform import call_in_children
from potluck._process import ForkSafeLock
from potluck._version import __version__
from potluck.errors import (
    CollectiveMismatch,
    DistributedError,
    MalformedFrame,
    PeerLost,
    Timeout,
    from_os_error,
)
from potluck.identity.private_files import potluck_home
from potluck.launch_env import tells_of_another
from potluck.logs import get_logger
from potluck.trace.recorder import VERSION, DumpHeader, encode, live_recorders

if TYPE_CHECKING:
    from potluck.trace.recorder import Recorder


logger = get_logger("potluck.trace")

FOLDER_VARIABLE = "POTLUCK_TRACE_DIR"
"""The folder for dumps; if it is empty, none are written automatically."""

SUFFIX = ".trace.jsonl"

KEPT = 32
"""Dumps that are kept in the folder; older ones are removed."""

PAUSE = 1.0
"""Seconds within which one dump serves all errors of a rank: one cause may have many."""

_WORTH_IT = (PeerLost, CollectiveMismatch, Timeout, MalformedFrame)
"""Errors that a dump helps to explain; an orderly change of the view needs none."""

_writing = ForkSafeLock()


def trace_folder() -> Path | None:
    """The folder for dumps without a path; None if automatic dumps are off."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given is None:
        return potluck_home() / "traces"
    return Path(given).expanduser().absolute() if given else None


def dump(recorder: Recorder, path: str | os.PathLike[str] | None = None, *, reason: str) -> Path:
    """Write a dump and return its path; raises if it cannot be written."""
    target = _new_path(recorder) if path is None else Path(path).expanduser().absolute()
    content = content_of(recorder, reason)
    temporary = target.with_name(f".{target.name[:200]}.{secrets.token_hex(4)}.new")
    try:
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            with open(os.open(temporary, _FLAGS, 0o600), "wb") as file:  # noqa: PTH123
                file.write(content)
            temporary.replace(target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        hint = "Give another path, or set POTLUCK_TRACE_DIR to a folder that you may write to."
        raise from_os_error(f"{target} could not be written", error, hint=hint) from error
    if path is None:
        _prune(target.parent)
    return target


_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _platform.BINARY


def content_of(recorder: Recorder, reason: str) -> bytes:
    """The bytes of a dump made now."""
    monotonic, wall = time.monotonic(), time.time()
    host = socket.gethostname()[:255]
    header = DumpHeader(
        potluck_trace=VERSION,
        monotonic=monotonic,
        wall=wall,
        potluck=__version__,
        process=f"{host}/{os.getpid()}/{id(recorder):x}"[-255:],
        machine=_steady_clock(),
        name=host,
        host=host,
        pid=os.getpid(),
        rank=recorder.rank,
        world_size=recorder.world_size,
        capacity=recorder.capacity,
        is_full=recorder.is_full,
        reason=reason[:4000],
    )
    with contextlib.suppress(DistributedError):  # a node that has ended does not know its peers
        header = recorder.describe(header)
    return encode(header, recorder.records(wall - monotonic))


def mention(recorder: Recorder, error: BaseException) -> None:
    """Write a dump if it helps to explain an error, and add a note with its path to the error.

    The text of the error is the same on all ranks, so the path is not a part of it.  Done at most
    once for an error, on a rank of a cluster or if ``POTLUCK_TRACE_DIR`` is set.
    """
    if not isinstance(error, _WORTH_IT) or error.trace is not None:
        return
    if not (recorder.is_automatic or os.environ.get(FOLDER_VARIABLE)):
        return
    path = dump_soon_again(recorder, str(error))
    if path is not None:
        error.trace = str(path)
        error.add_note(f"The trace of this process is in {path}; `potluck trace` shows it.")


_last: dict[int, tuple[float, Path]] = {}
"""When each recorder was written last, and the path."""
call_in_children(_last.clear)


def dump_soon_again(recorder: Recorder, reason: str) -> Path | None:
    """Write a dump unless there is a recent one; None if dumps are off or cannot be written."""
    with _writing:
        at, path = _last.get(id(recorder), (-PAUSE, None))
        if path is not None and time.monotonic() - at < PAUSE and path.exists():
            return path
        try:
            if trace_folder() is None:
                return None
            path = dump(recorder, reason=reason)
        except (DistributedError, OSError) as failure:
            logger.warning("The trace could not be written: %s", failure)
            return None
        if len(_last) >= KEPT:
            _last.clear()
        _last[id(recorder)] = time.monotonic(), path
        return path


def _new_path(recorder: Recorder) -> Path:
    folder = trace_folder() or potluck_home() / "traces"
    moment = time.strftime("%Y%m%dT%H%M%S")
    host = re.sub(r"[^A-Za-z0-9_-]+", "-", socket.gethostname())[:40] or "host"
    rank = f"-rank{recorder.rank}" if recorder.rank >= 0 else ""
    return folder / f"{moment}-{host}-{os.getpid()}{rank}-{secrets.token_hex(2)}{SUFFIX}"


def _prune(folder: Path) -> None:
    """Remove the oldest dumps; their names begin with the time."""
    with contextlib.suppress(OSError):
        for old in sorted(folder.glob(f"*{SUFFIX}"))[:-KEPT]:
            old.unlink(missing_ok=True)


def _steady_clock() -> str:
    """An id of the monotonic clock, shared by all processes since the start of a machine.

    Containers may have their own clock.
    """
    with contextlib.suppress(OSError):
        facts = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")]
        with contextlib.suppress(OSError):  # an old kernel
            facts.append(str(Path("/proc/self/ns/time").readlink()))
        return hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()
    return ""


# --------------------------------------------------------------------------------------------------
# Dumps on a signal, and when an error ends the program.
#
# Only if ``POTLUCK_TRACE_DIR`` is set, as ``potluck run`` does: a library must not change the
# signals and the exception hook of a program.

_installed = threading.Event()


def install() -> None:
    """Handle the signal, and the error that ends the program.  May be called more than once."""
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
    """Write dumps on SIGUSR2; a handler of the program stays."""
    number = _platform.SIGUSR2
    if number is None or threading.current_thread() is not threading.main_thread():
        return
    # `potluck run` starts its scripts with this signal ignored, until there is this handler.
    free = {signal.SIG_DFL, signal.SIG_IGN} if os.environ.get("POTLUCK_RUN") else {signal.SIG_DFL}
    if signal.getsignal(number) in free:
        signal.signal(number, _dump_all)


def _dump_all(number: int, _frame: FrameType | None) -> None:
    reason = f"it was requested with {signal.Signals(number).name}"
    for recorder in live_recorders():
        with contextlib.suppress(DistributedError, OSError):
            path = dump(recorder, reason=reason)
            sys.stderr.write(f"potluck: the trace of rank {recorder.rank} is in {path}\n")


def _write_last_words(error: Exception) -> None:
    """Write dumps when an error ends the program, unless the error already has one.

    The path is not printed for an error that another rank caused: that machine has more to show.
    """
    if isinstance(error, DistributedError) and error.trace is not None:
        return
    for recorder in live_recorders():
        path = dump_soon_again(recorder, f"the program ended by {type(error).__name__}: {error}")
        if path is not None and not tells_of_another(error):
            sys.stderr.write(
                f"potluck: the trace of rank {recorder.rank} is in {path}; "
                "`potluck trace` shows it\n"
            )
