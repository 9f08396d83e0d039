"""Files of checkpoints: private, there whole or not at all, and never written through a link.

A file is written beside its place, forced to disk and then renamed.  Everything that is created or
replaced is reached from a folder that is open and was checked, name by name: what another user
plants in the way is refused, not followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self, TypeAlias

from potluck.errors import DistributedError, IoError
from potluck.net.private_files import UnsafeFile

__all__ = ["TEMPORARY", "Folder", "read_limited", "refusal"]

Bytes: TypeAlias = "bytes | bytearray | memoryview"

TEMPORARY = ".writing-"
"""How names begin of files that are not whole yet."""

_HAS_HANDLES = os.open in os.supports_dir_fd  # Windows has none: names are joined there
_BINARY = getattr(os, "O_BINARY", 0)
_NO_LINKS = getattr(os, "O_NOFOLLOW", 0)
_AS_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | _NO_LINKS
_AS_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINKS | _BINARY

_HINTS = {
    errno.ENOSPC: "The disk is full: free some space.",
    errno.EDQUOT: "The quota is used up: free some space.",
    errno.EROFS: "The disk is read-only: choose another folder.",
    errno.EACCES: "This user may not write there: choose another folder, or change its owner.",
    errno.EPERM: "This user may not write there: choose another folder, or change its owner.",
    errno.ENOENT: "A folder on the way is missing, or a link leads nowhere: choose another folder.",
    errno.ELOOP: "A symbolic link is in the way: remove it.",
    errno.ENAMETOOLONG: "The name of the folder is too long: choose another folder.",
    errno.EISDIR: "A folder is in the way of a file: remove it, or choose another folder.",
    errno.ENOTDIR: "Something that is no folder is in the way: remove it, or choose another one.",
}


@contextlib.contextmanager
def _as_ours(path: Path) -> Iterator[None]:
    """Errors of the operating system become ours."""
    try:
        yield
    except DistributedError:
        raise
    except OSError as error:
        hint = _HINTS.get(error.errno or 0, "Choose another folder.")
        raise IoError(
            f"{path} could not be written",
            cause=error.strerror or str(error),
            hint=f"{hint} Earlier checkpoints are untouched.",
        ) from error


class Folder:
    """An open folder; names are used within it, whatever becomes of the path that led to it.

    It belongs to this user, and nobody else may change what is in it.
    """

    def __init__(self, path: Path, handle: int | None) -> None:
        self.path = path
        self._handle = handle

    @classmethod
    def open(cls, path: Path) -> Folder:
        """Open a folder that a user has named, and make it (0700) if it is missing.

        Links on the way to it are the user's own business; a link of another user is refused.
        """
        path = path.absolute()
        with _as_ours(path):
            if not _HAS_HANDLES:
                path.mkdir(parents=True, exist_ok=True)
                return cls(path, None)
            missing = []
            there = path
            while not os.path.lexists(there):
                missing.append(there.name)
                there = there.parent
            for each in (there, *there.parents):
                _check_link(each, is_last=each == path)
            folder = cls(there, os.open(there, _AS_FOLDER & ~_NO_LINKS))
            for name in reversed(missing):
                with folder:
                    folder = folder.enter(name)
            try:
                folder.check()
            except BaseException:
                folder.close()
                raise
            return folder

    def enter(self, name: str) -> Folder:
        """A folder within this one; made (0700) if it is missing, refused if it is a link."""
        path = self.path / name
        with _as_ours(path):
            with contextlib.suppress(FileExistsError):
                os.mkdir(*self._at(name), mode=0o700, **self._beside())  # noqa: PTH102
                self.sync()
            folder = self.within(name)
            try:
                folder.check()
            except BaseException:
                folder.close()
                raise
            return folder

    def within(self, name: str) -> Folder:
        """A folder within this one that is there, whoever may change it; refused if it is a link.

        To remove what is in it.
        """
        path = self.path / name
        if not _HAS_HANDLES:
            return Folder(path, None)
        try:
            return Folder(path, os.open(name, _AS_FOLDER, dir_fd=self._handle))
        except OSError as error:
            if path.is_symlink():
                raise _unsafe(path, "is a symbolic link", "Remove it.") from error
            raise

    def check(self) -> None:
        """Raise :class:`UnsafeFile` if another user could change what is in it."""
        if self._handle is not None:
            status = os.fstat(self._handle)
            why, fix = refusal(self.path, status)
            if why:
                raise _unsafe(self.path, why, fix)

    def write(self, name: str, parts: Iterable[Bytes]) -> None:
        """Write a file (0600): a crash at any instant leaves the old one, or none, or the new."""
        temporary = f"{TEMPORARY}{name}"
        with _as_ours(self.path / name):
            self.remove(temporary)  # of an earlier try
            handle = os.open(*self._at(temporary), _AS_NEW_FILE, 0o600, **self._beside())
            try:
                with open(handle, "wb") as file:  # noqa: PTH123 - a descriptor
                    file.writelines(parts)
                    file.flush()
                    os.fsync(file.fileno())
                self._rename(temporary, name)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.remove(temporary)
                raise
            self.sync()

    def _rename(self, old: str, new: str) -> None:
        if _HAS_HANDLES:
            os.replace(old, new, src_dir_fd=self._handle, dst_dir_fd=self._handle)
        else:
            (self.path / old).replace(self.path / new)

    def touch(self, name: str) -> None:
        """Make an empty file (0600), or make it new again."""
        with _as_ours(self.path / name):
            flags = _AS_NEW_FILE & ~os.O_EXCL
            handle = os.open(*self._at(name), flags, 0o600, **self._beside())
            try:
                os.utime(handle if os.utime in os.supports_fd else self.path / name)
            finally:
                os.close(handle)

    def remove(self, name: str) -> bool:
        """Delete a file, or a link itself; False if it was gone already."""
        with _as_ours(self.path / name):
            try:
                os.unlink(*self._at(name), **self._beside())
            except FileNotFoundError:
                return False
            return True

    def remove_folder(self, name: str) -> None:
        """Delete a folder within this one, if it is empty."""
        with contextlib.suppress(OSError):
            os.rmdir(*self._at(name), **self._beside())

    def sync(self) -> None:
        """Force names to disk; Windows does that by itself and has no call for it."""
        if self._handle is not None:
            with _as_ours(self.path):
                os.fsync(self._handle)

    def close(self) -> None:
        """Let go of it."""
        handle, self._handle = self._handle, None
        if handle is not None:
            os.close(handle)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _at(self, name: str) -> tuple[Any]:
        return (name,) if _HAS_HANDLES else (self.path / name,)

    def _beside(self) -> dict[str, Any]:
        return {"dir_fd": self._handle} if _HAS_HANDLES else {}


def refusal(path: Path, status: os.stat_result) -> tuple[str, str]:
    """Why nothing is written into a folder, and what to do; two empty texts if something can be.

    It must belong to this user.  Others may look into it, but not change it; a group of which this
    user is the only member is no other.
    """
    user, mode = os.geteuid(), stat.S_IMODE(status.st_mode)
    quoted = shlex.quote(str(path))
    if status.st_uid != user:
        fix = f"Run as that user, choose a folder of your own, or run: sudo chown {user} {quoted}"
        return f"belongs to user {status.st_uid}, but this is user {user}", fix
    if mode & 0o002 and mode & stat.S_ISVTX:
        fix = f"Name a folder within it, such as {quoted}/checkpoints."
        return f"is shared by all users of this machine (mode {mode:04o})", fix
    if mode & 0o002:
        fix = f"Run: chmod go-w {quoted}"
        return f"can be changed by all users of this machine (mode {mode:04o})", fix
    if mode & 0o020 and not _is_own_group(status.st_gid):
        fix = f"Run: chmod g-w {quoted}"
        return f"can be changed by group {status.st_gid} (mode {mode:04o})", fix
    return "", ""


def _is_own_group(number: int) -> bool:
    """Whether a group is this user's alone, as many systems make one for each user."""
    if sys.platform == "win32":
        return True
    import grp
    import pwd

    try:
        me, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(number)
    except KeyError:  # unknown here, as in a container
        return False
    is_mine = number == me.pw_gid and group.gr_name == me.pw_name
    return is_mine and set(group.gr_mem) <= {me.pw_name}


def _check_link(path: Path, *, is_last: bool) -> None:
    """A link in a folder that all users share leads wherever the one who made it wants."""
    status = os.lstat(path)
    if not stat.S_ISLNK(status.st_mode) or status.st_uid in {os.geteuid(), 0}:
        return
    folder = path.parent.stat()
    if is_last or (folder.st_mode & stat.S_IWOTH and folder.st_uid != status.st_uid):
        why = f"is a symbolic link that user {status.st_uid} has made"
        raise _unsafe(path, why, "Remove it, or name another folder.")


def _unsafe(path: Path, why: str, fix: str) -> UnsafeFile:
    return UnsafeFile(f"No checkpoints are written into {path}: it {why}", hint=fix)


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a file that has at most so many bytes."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise IoError(f"{path} is not a file")
        if status.st_size > limit:
            raise IoError(f"{path} has {status.st_size} bytes; at most {limit} are plausible")
        return path.read_bytes()
    except IoError:
        raise
    except OSError as error:
        raise IoError(f"{path} could not be read", cause=error.strerror or str(error)) from error
