"""Writing the flight recorder down: on demand, and by itself when something has gone wrong.

A dump appears whole or not at all, is private to its user, and is never the reason for another
failure: what cannot be written is said in the log, and the error at hand stays what it was.
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

from potluck._process import ForkSafeLock, call_in_children
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
from potluck.trace.recorder import VERSION, Header, encode, live_recorders
from potluck.wire_messages import software_version

if TYPE_CHECKING:
    from potluck.trace.recorder import Recorder


logger = get_logger("potluck.trace")

FOLDER_VARIABLE = "POTLUCK_TRACE_DIR"
"""Where dumps go; set to nothing, none are written by themselves."""

SUFFIX = ".trace.jsonl"

KEPT = 32
"""Dumps that stay in the folder; older ones make room."""

PAUSE = 1.0
"""Seconds within which one dump serves all errors of a rank: many may come of one cause."""

_WORTH_IT = (PeerLost, CollectiveMismatch, Timeout, MalformedFrame)
"""What a dump helps to explain; that a view changes in good order needs no explanation."""

_writing = ForkSafeLock()


def trace_folder() -> Path | None:
    """Where dumps go that nobody gave a path; None if there shall be none."""
    given = os.environ.get(FOLDER_VARIABLE)
    if given is None:
        return potluck_home() / "traces"
    return Path(given).expanduser().absolute() if given else None


def dump(recorder: Recorder, path: str | os.PathLike[str] | None = None, *, reason: str) -> Path:
    """Write what a rank has done to a file, and say which; raises if that cannot be done."""
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


_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)


def content_of(recorder: Recorder, reason: str) -> bytes:
    """The bytes of a dump made now."""
    monotonic, wall = time.monotonic(), time.time()
    host = socket.gethostname()[:255]
    header = Header(
        potluck_trace=VERSION,
        monotonic=monotonic,
        wall=wall,
        potluck=software_version(),
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
    with contextlib.suppress(DistributedError):  # a node that has ended says nothing of its peers
        header = recorder.describe(header)
    return encode(header, recorder.records(wall - monotonic))


def mention(recorder: Recorder, error: BaseException) -> None:
    """If it helps with an error, write the dump and add a note to the error that says where it is.

    The text of the error stays as it is: on all ranks it is the same, and the place is not.
    Done at most once for an error, for a rank of a cluster or where ``POTLUCK_TRACE_DIR`` is set.
    """
    if not isinstance(error, _WORTH_IT) or error.trace is not None:
        return
    if not (recorder.is_automatic or os.environ.get(FOLDER_VARIABLE)):
        return
    path = dump_soon_again(recorder, str(error))
    if path is not None:
        error.trace = str(path)
        error.add_note(f"What came before is in {path}; `potluck trace` shows it.")


_last: dict[int, tuple[float, Path]] = {}
"""When each recorder was written last, and where."""
call_in_children(_last.clear)


def dump_soon_again(recorder: Recorder, reason: str) -> Path | None:
    """Write a dump unless there is one of this moment; None if there can be none."""
    with _writing:
        at, path = _last.get(id(recorder), (-PAUSE, None))
        if path is not None and time.monotonic() - at < PAUSE and path.exists():
            return path
        try:
            if trace_folder() is None:
                return None
            path = dump(recorder, reason=reason)
        except (DistributedError, OSError) as failure:
            logger.warning("What came before an error could not be kept: %s", failure)
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
    """The same for all processes that share one steady clock: those of one start of one machine.

    Containers may have a clock of their own.
    """
    with contextlib.suppress(OSError):
        facts = [Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")]
        with contextlib.suppress(OSError):  # an old kernel
            facts.append(str(Path("/proc/self/ns/time").readlink()))
        return hashlib.blake2b("\0".join(facts).encode(), digest_size=8).hexdigest()
    return ""


# --------------------------------------------------------------------------------------------------
# Dumps without a call: when a signal asks for them, and when a program ends by an error.
#
# Only where ``POTLUCK_TRACE_DIR`` is set, as ``potluck run`` does: a library leaves the signals and
# the last words of a program alone.

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
