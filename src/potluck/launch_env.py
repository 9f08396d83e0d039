"""Configuration that comes from outside: which rank a launcher says we are.

Knows the variables of ``torchrun``, Open MPI, MPICH and Slurm.  Arguments always win over the
environment, so this is read only where a caller asks for it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from potluck.errors import Aborted, BackendUnavailable, DistributedError, PeerLost

DEFAULT_MASTER_PORT = 29500
"""Where rank 0 listens when the launcher does not say; what PyTorch users expect."""

MAX_PORT = 65535
MAX_DIGITS = 9
"""Longer numbers are mistakes: no rank, size or port comes near."""

AGENT_STORE_PORTS = 4
"""Ports tried beside the one that torchrun's own store occupies."""

_LAUNCHERS = (
    ("torchrun or the environment", "RANK", "WORLD_SIZE"),
    ("Open MPI", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MPICH or Intel MPI", "PMI_RANK", "PMI_SIZE"),
    ("Slurm", "SLURM_PROCID", "SLURM_NTASKS"),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """What a launcher told this process."""

    rank: int
    world_size: int
    masters: tuple[str, ...]
    """Addresses at which rank 0 may be; it takes the first that is free."""
    launcher: str


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read rank, world size and rank 0's address from a launcher's variables.

    >>> env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.5", "MASTER_PORT": "29500"}
    >>> read_launch(env).masters
    ('10.0.0.5:29500',)
    """
    for launcher, rank_name, size_name in _LAUNCHERS:
        if rank_name in environ and size_name in environ:
            rank, size = _number(environ, rank_name), _number(environ, size_name)
            return Launch(rank, size, _masters(environ, size), launcher)
    half = sorted({"RANK", "WORLD_SIZE"} & environ.keys())
    raise BackendUnavailable(
        f"Of RANK and WORLD_SIZE only {half[0]} is set"
        if half
        else "RANK and WORLD_SIZE are not set",
        hint="Start it with torchrun, mpirun or srun, "
        "or set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.",
    )


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ[name].strip()
    if not text.isascii() or not text.isdecimal() or len(text) > MAX_DIGITS:
        raise BackendUnavailable(f"{name} must be a non-negative integer, got {text!r}")
    return int(text)


def _masters(environ: Mapping[str, str], world_size: int) -> tuple[str, ...]:
    host = environ.get("MASTER_ADDR", "").strip() or _host_from_launcher(environ, world_size)
    given = "MASTER_PORT" in environ
    port = _number(environ, "MASTER_PORT") if given else _port_of_job(environ)
    if not 0 < port <= MAX_PORT:
        raise BackendUnavailable(f"MASTER_PORT must be between 1 and {MAX_PORT}, got {port}")
    if environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true":
        # torchrun's agent already listens on that very port, for its own store.
        ports = range(port + 1, port + 1 + AGENT_STORE_PORTS)
    else:
        ports = range(port, port + 1)
    bracketed = f"[{host.strip('[]')}]" if ":" in host else host
    return tuple(
        f"{bracketed}:{number if number <= MAX_PORT else number - 1000}" for number in ports
    )


def _host_from_launcher(environ: Mapping[str, str], world_size: int) -> str:
    for name in ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"):
        if name in environ and _number(environ, name) == world_size:
            return "127.0.0.1"  # all ranks are on this machine
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if environ.get(name):
            return first_host(environ[name])
    raise BackendUnavailable(
        "MASTER_ADDR is not set",
        hint="Set MASTER_ADDR to the address of the machine that runs rank 0.",
    )


def _port_of_job(environ: Mapping[str, str]) -> int:
    """A port of its own for each Slurm job, so that two jobs on one machine do not meet."""
    job = environ.get("SLURM_JOB_ID", "")
    # Below 32768: from there on Linux takes ports for outgoing connections.
    return 20000 + int(job[-MAX_DIGITS:]) % 12000 if job.isdecimal() else DEFAULT_MASTER_PORT


def first_host(nodelist: str) -> str:
    """The first host of Slurm's compressed notation.

    >>> first_host("gpu[007-012,020],cpu1"), first_host("desk,laptop")
    ('gpu007', 'desk')
    """
    match = re.match(r"(?:[^,\[\]]|\[\w[^\[\]]*\])+(?=,|$)", nodelist)
    if match is None:
        raise BackendUnavailable(f"{nodelist!r} is not a list of hosts as Slurm writes it")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])  # of every range its first number


# --------------------------------------------------------------------------------------------------
# The last words of a script that `potluck run` has started: how its launcher learns why it failed.
#
# The launcher names a file in the environment.  A script that ends by an exception leaves a summary
# there.  Its traceback is printed as ever, unless it only tells that another rank is lost: then the
# launcher learns the cause from that rank's machine, and shows the traceback only if none is told.

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
        if isinstance(error, KeyboardInterrupt):
            _end_at_once_next_time()
        is_second_hand = tells_of_another(error)
        with contextlib.suppress(Exception):  # its own error matters more than what is said of it
            _write(Path(file), error, is_second_hand=is_second_hand)
            if is_second_hand or isinstance(error, KeyboardInterrupt):
                return
        before(kind, error, trace)

    sys.excepthook = told


def _end_at_once_next_time() -> None:
    """A script that ends by Ctrl-C leaves its group, which may take seconds; a second one ends it.

    Without this Python would show a traceback from wherever it is by then.
    """
    with contextlib.suppress(ValueError):  # not on the main thread
        signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))


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


def _in_short(error: BaseException) -> str:
    """What an error says, for one line of another machine: without advice, cut between words.

    >>> _in_short(ValueError("bad batch.")), len(_in_short(ValueError("bad batch. " * 40))) <= MOST
    ('bad batch', True)
    """
    text = _first_line(error)
    if isinstance(error, DistributedError):
        text = f"{error.message}: {error.cause}" if error.cause else error.message
    text = (text.splitlines() or [""])[0].strip()
    if len(text) > MOST:
        text = text[: MOST - 1].rpartition(" ")[0] or text[: MOST - 1]
        return f"{text.rstrip(' .,:;')} …"
    return text.rstrip(" .,:;")


def _write(file: Path, error: BaseException, *, is_second_hand: bool) -> None:
    story = "".join(traceback.format_exception(error))
    words = {
        "kind": type(error).__name__[:MOST],
        "message": _in_short(error),
        "where": _place_of(error),
        "is_second_hand": is_second_hand,
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
