"""Files that are there whole or not at all: written beside, forced to disk, then renamed."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TypeAlias

from potluck.errors import IoError

__all__ = ["TEMPORARY", "fsync_folder", "read_limited", "remove", "write_whole"]

Bytes: TypeAlias = "bytes | bytearray | memoryview"

TEMPORARY = ".writing-"
"""How names begin of files that are not whole yet."""


def write_whole(path: Path, parts: Iterable[Bytes]) -> None:
    """Write a file so that a crash at any instant leaves the old one, or none, or the new one."""
    beside = path.with_name(f"{TEMPORARY}{path.name}")
    try:
        with beside.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        fsync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise IoError(
            f"{path} could not be written",
            cause=error.strerror or str(error),
            hint="Earlier checkpoints are untouched; free some space or choose another folder.",
        ) from error


def fsync_folder(folder: Path) -> None:
    """Force names to disk; Windows does that by itself and has no call for it."""
    if sys.platform == "win32":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_limited(path: Path, limit: int) -> bytes:
    """The content of a file that has at most so many bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise IoError(f"{path} has {size} bytes; at most {limit} are plausible")
        return path.read_bytes()
    except IoError:
        raise
    except OSError as error:
        raise IoError(f"{path} could not be read", cause=error.strerror or str(error)) from error


def remove(folder: Path, names: Iterable[str]) -> None:
    """Delete files, and their folder if nothing else is in it; what is gone already is no fault."""
    for name in names:
        (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        folder.rmdir()
