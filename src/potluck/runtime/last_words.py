"""The last words of a script that `potluck run` has started: how its launcher learns why it failed.

The launcher names a file in the environment.  A script that ends by an exception leaves a summary
there.  Its traceback is printed as ever, unless it only tells that another rank is lost: then the
launcher learns the cause from that rank's machine, and shows the traceback only if none is told.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from types import TracebackType

from potluck.errors import Aborted, PeerLost

__all__ = ["FILE", "PARENT", "install", "is_second_hand", "tells_of_another"]

FILE, PARENT = "POTLUCK_LAST_WORDS", "POTLUCK_LAUNCHER_PID"
"""Names of the variables: where to write, and whose children alone do so."""

MOST = 200
"""Characters of an error's message that are told to other machines."""

MOST_TRACEBACK = 32_000
"""Characters of a traceback that are kept; of a longer one, its end."""

_SECOND_HAND = re.compile(
    r"(?:^|running the callback: )(?:potluck\.[\w.]+\.)?(?:PeerLost|ViewChanged|LeftOut|Aborted)\b"
    r"|\bRank \d+ .*\bis gone\b|\bConnection closed by peer\b|\bConnection reset by peer\b"
)
"""Ends of tracebacks that tell of another rank's failure, also by way of a future of PyTorch."""


def is_second_hand(traceback: str) -> bool:
    """Whether a traceback only tells that another rank has failed.

    >>> is_second_hand("potluck.errors.PeerLost: Rank 2 (desk) is gone: it was killed")
    True
    """
    last = traceback.rpartition("\n")[2]
    return _SECOND_HAND.search(last) is not None


def install() -> None:
    """Leave last words if this process ends by an exception.

    Only in the process that the launcher has started itself: those that the script starts inherit
    the environment as well.
    """
    file = os.environ.get(FILE, "")
    if not file or os.environ.get(PARENT, "") != str(os.getppid()):
        return
    before, writer = sys.excepthook, os.getpid()

    def told(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != writer:  # a child that was forked ends by an exception of its own
            before(kind, error, trace)
            return
        is_hearsay = tells_of_another(error)
        with contextlib.suppress(Exception):  # its own error matters more than what is said of it
            _write(Path(file), error, is_hearsay=is_hearsay)
            if is_hearsay or isinstance(error, KeyboardInterrupt):
                return
        before(kind, error, trace)

    sys.excepthook = told


def tells_of_another(error: BaseException) -> bool:
    """Whether an error only tells that another rank has failed, also by way of PyTorch.

    >>> tells_of_another(RuntimeError("Connection closed by peer")), tells_of_another(KeyError(1))
    (True, False)
    """
    if isinstance(error, PeerLost | Aborted):
        return True
    return is_second_hand(f"{type(error).__name__}: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _write(file: Path, error: BaseException, *, is_hearsay: bool) -> None:
    story = "".join(traceback.format_exception(error))
    words = {
        "kind": type(error).__name__[:MOST],
        "message": _first_line(error)[:MOST],
        "where": _place_of(error),
        "is_second_hand": is_hearsay,
        "traceback": story[-MOST_TRACEBACK:],
    }
    unfinished = file.with_suffix(".tmp")
    unfinished.write_text(json.dumps(words), encoding="utf-8")
    unfinished.replace(file)


def _place_of(error: BaseException) -> str:
    """The line of the user's own code that is nearest to the error, as ``train.py:40``."""
    frames = traceback.extract_tb(error.__traceback__)
    paths = sysconfig.get_paths()
    others = [paths["stdlib"], paths["platstdlib"], paths["purelib"], paths["platlib"]]
    others = [*others, str(Path(__file__).parent.parent), "<"]
    own = [each for each in frames if not each.filename.startswith(tuple(others))]
    for frame in [*frames[-1:], *own][-1:]:
        return f"{Path(frame.filename).name[:MOST]}:{frame.lineno}"
    return ""
