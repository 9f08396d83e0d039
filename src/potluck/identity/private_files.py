"""Files that belong to this user alone, and locks between the processes of one machine.

Everything Potluck keeps lies in one directory, ``~/.potluck`` (``POTLUCK_HOME`` moves it).  The
rules of this file: no process ever sees a private file half-written, because its content is forced
to the disk under a temporary name and only then linked or renamed into place; and nothing is read
from a file that others could have read or written, because such a secret is not one.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from potluck._platform import BINARY, IS_WINDOWS, lock_file, unlock_file, user_id
from potluck._process import track
from potluck._version import HOME_FORMAT, NewerFile, __version__
from potluck.errors import DistributedError, IoError, Timeout, from_os_error

KEY_SIZE = 32  # bytes: an Ed25519 seed, the secret of a namespace
LOCK_PATIENCE = 10.0  # seconds; a holder needs milliseconds, unless it is stopped or its disk hangs
_LOCK_POLL = 0.01  # seconds

_MOVE_HINT = "Set POTLUCK_HOME to a directory on a local disk that you may write to."


class UnsafeFile(DistributedError, PermissionError):
    """Other users of this machine may read or change a file that must be private."""


class DamagedFile(DistributedError, ValueError):
    """A file of Potluck does not hold what it must hold."""


def potluck_home() -> Path:
    """Where everything is kept: ``POTLUCK_HOME``, or ``~/.potluck``."""
    given = os.environ.get("POTLUCK_HOME")
    try:
        return (Path(given).expanduser() if given else Path.home() / ".potluck").absolute()
    except RuntimeError as error:  # a container may run as a user without a home
        message = "This user has no home directory"
        raise IoError(message, cause=str(error), hint=_MOVE_HINT) from None


def ensure_private_directory(path: Path) -> Path:
    """Create the directory (0700), or check that no other user may put files into it.

    Others may list a directory that existed before: every file in it is private by itself.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.stat()
    except OSError as error:
        action = f"The directory {path} could not be created"
        raise from_os_error(action, error, hint=_MOVE_HINT) from error
    _check(path, status, forbidden=0o022, fix="chmod 700")
    return path


FORMAT_FILE = "format"
"""In the home: which format its files have, and which version of Potluck wrote it; none is 1."""


def check_home(home: Path) -> None:
    """Raise :class:`NewerFile` if a later version has changed how files are kept there.

    It is asked before keys, secrets or member lists are read or written.
    """
    said = read_private(home / FORMAT_FILE, limit=64)
    number, _, potluck = (b"1" if said is None else said).partition(b" ")
    found = int(number) if number.strip().isdigit() else HOME_FORMAT + 1
    if found > HOME_FORMAT:
        written = potluck.decode(errors="replace").strip()
        raise NewerFile(home, found, HOME_FORMAT, written)
    if found < HOME_FORMAT and home.exists():
        replace_private(home / FORMAT_FILE, f"{HOME_FORMAT} {__version__}\n".encode())


def read_private(path: Path, *, limit: int) -> bytes | None:
    """At most ``limit`` bytes of a private file; None when there is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | BINARY)
    except FileNotFoundError:
        return None
    except OSError as error:
        hint = f"Check its owner: ls -l {shlex.quote(str(path))}"
        raise from_os_error(f"{path} could not be opened", error, hint=hint) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeFile(f"{path} is not a regular file", hint="Move it out of the way.")
        _check(path, status, forbidden=0o077, fix="chmod 600")
        return os.read(descriptor, limit)  # complete: the file is regular and small
    finally:
        os.close(descriptor)


def read_key(path: Path, *, advice: str) -> bytes | None:
    """The 32 secret bytes in ``path``, None if there are none; ``advice`` says how to replace them.

    Zeros are refused too: they are what some file systems leave behind after a power cut, and
    everybody whom that befell would share the same key.
    """
    key = read_private(path, limit=KEY_SIZE + 1)
    if key is None:
        return None
    if len(key) != KEY_SIZE:
        size = f"{len(key)}" if len(key) < KEY_SIZE else "more"
        message = f"{path} is damaged: it must have {KEY_SIZE} bytes and has {size}"
        raise DamagedFile(message, expected=KEY_SIZE, got=len(key), hint=advice)
    if not any(key):
        raise DamagedFile(f"{path} is damaged: it contains only zeros", hint=advice)
    return key


def create_private(path: Path, content: bytes) -> bool:
    """Create the file unless it exists, also if others try at the same time; whether we did."""
    with _temporary(path, content) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            with exclusive_lock(path.with_name(".create-lock")):
                if path.exists():
                    return False
                temporary.replace(path)
    _sync_directory(path.parent)
    return True


def replace_private(path: Path, content: bytes) -> None:
    """Write the file anew; a reader, or a crash, sees all of the old content or all of the new."""
    with _temporary(path, content) as temporary:
        temporary.replace(path)
    _sync_directory(path.parent)


class HeldLock:
    """A lock between processes; it ends with :meth:`release`, at the latest with this process."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        track(self)

    def release(self) -> None:
        """Let others have it, even if a forked child still holds a copy of the descriptor."""
        if self._descriptor >= 0:
            unlock_file(self._descriptor)
        self.close()

    def close(self) -> None:
        """Only forget it; in a forked child this leaves the parent's lock in force."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def maybe_lock(path: Path) -> HeldLock | None:
    """Take the lock that ``path`` stands for; None if another process or thread holds it."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | BINARY, 0o600)
    except OSError as error:
        raise from_os_error(f"{path} could not be opened", error, hint=_MOVE_HINT) from error
    try:
        taken = lock_file(descriptor)
    except OSError as error:
        os.close(descriptor)
        action = f"{path} could not be locked"
        raise from_os_error(action, error, hint=_MOVE_HINT) from error
    if not taken:
        os.close(descriptor)
        return None
    return HeldLock(descriptor)


@contextlib.contextmanager
def exclusive_lock(path: Path, *, patience: float = LOCK_PATIENCE) -> Iterator[None]:
    """Hold the lock that ``path`` stands for, waiting for it up to ``patience`` seconds."""
    deadline = time.monotonic() + patience
    while (held := maybe_lock(path)) is None:
        if time.monotonic() >= deadline:
            raise Timeout(
                f"Another process has kept {path} locked for {patience:g} s",
                seconds=patience,
                hint="A Potluck process of yours may be suspended (Ctrl-Z): resume it or end it.",
            )
        time.sleep(_LOCK_POLL)
    try:
        yield
    finally:
        held.release()


def _check(path: Path, status: os.stat_result, *, forbidden: int, fix: str) -> None:
    user = user_id()
    if user is None:  # on Windows the access lists of the profile protect the files
        return
    quoted = shlex.quote(str(path))
    if status.st_uid != user:
        raise UnsafeFile(
            f"{path} belongs to user {status.st_uid}, but this is user {user}",
            expected=user,
            got=status.st_uid,
            # Root must not take it over: its owner could not start any more.
            hint=f"Run: sudo chown {user} {quoted}"
            if user
            else "Run it without sudo, or set POTLUCK_HOME to a directory of root's own.",
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & forbidden:
        kind, verb = ("directory", "change") if stat.S_ISDIR(status.st_mode) else ("file", "read")
        raise UnsafeFile(
            f"Other users of this machine may {verb} the {kind} {path} (mode {mode:04o})",
            expected=mode & ~forbidden,
            got=mode,
            hint=f"Run: {fix} {quoted}",
        )


@contextlib.contextmanager
def _temporary(path: Path, content: bytes) -> Iterator[Path]:
    """A complete, synced, private file beside ``path``, gone at the end unless it was renamed."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | BINARY
    try:
        try:
            with open(os.open(temporary, flags, 0o600), "wb") as file:  # noqa: PTH123
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            yield temporary
        finally:
            temporary.unlink(missing_ok=True)
    except DistributedError:
        raise
    except OSError as error:
        raise from_os_error(f"{path} could not be written", error, hint=_MOVE_HINT) from error


def _sync_directory(path: Path) -> None:
    """Make the new name survive a power cut."""
    if IS_WINDOWS:  # which does that by itself and has no call for it
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
