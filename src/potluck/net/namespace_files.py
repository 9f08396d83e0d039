"""Where the secrets of namespaces are kept on this machine, and which one is meant.

::

    ~/.potluck/namespaces/home/secret     32 bytes
                              /previous   the secrets before it, newest first, 32 bytes each
                              /used       exists unless this is a private namespace nobody joined
                              /passphrase exists if the secret was made from a passphrase
                              /roster     who belongs to it (written by others)
                              /proposed   secrets this machine has proposed (written by others)
"""

from __future__ import annotations

import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from potluck.errors import DistributedError, from_os_error
from potluck.net.private_files import (
    KEY_SIZE,
    DamagedFile,
    create_private,
    ensure_private_directory,
    exclusive_lock,
    read_key,
    read_private,
    replace_private,
)

__all__ = [
    "DEFAULT_NAME",
    "MAX_PREVIOUS",
    "InvalidNamespaceName",
    "NamespaceExists",
    "NamespaceFiles",
    "Secrets",
    "UnknownNamespace",
    "checked_name",
    "stored_names",
    "usual_name",
]

DEFAULT_NAME = "home"
MAX_PREVIOUS = 8  # rotations an absentee may miss and still find its way back

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,30}[a-z0-9])?")
# Windows keeps these for devices, in every directory and with any extension.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
_ADVICE = (
    "Restore it from a backup, or leave the namespace and pair this machine again: potluck unpair"
)


class InvalidNamespaceName(DistributedError, ValueError):
    """A name that could not be the name of a directory everywhere."""


class UnknownNamespace(DistributedError, LookupError):
    """No namespace of that name is kept on this machine, or it is not clear which one is meant."""


class NamespaceExists(DistributedError, ValueError):
    """Another namespace of that name is kept here and in use."""


@dataclass(frozen=True)
class Secrets:
    """The secret of a namespace and those it had before, newest first."""

    current: bytes
    previous: tuple[bytes, ...] = ()
    is_passphrase: bool = False
    """Whether it was made from a passphrase, so that whoever knows that is a member."""

    def __repr__(self) -> str:
        """Nothing anybody could use."""
        return f"Secrets(…, {len(self.previous)} previous)"


def checked_name(name: str) -> str:
    """The name in lower case, fit to be a directory on every system."""
    name = name.strip().lower() if name.isascii() else name  # U+212A would become a "k"
    if not _NAME.fullmatch(name) or _DEVICES.fullmatch(name):
        raise InvalidNamespaceName(
            f"{name[:64]!r} cannot be the name of a namespace",
            got=name,
            hint="Use 1 to 32 letters (a to z), digits, dots, dashes and underscores, "
            "with a letter or a digit at both ends.",
        )
    return name


def stored_names(home: Path) -> list[str]:
    """All namespaces kept in ``home``."""
    found = (path.parent.name for path in (home / "namespaces").glob("*/secret"))
    return sorted(name for name in found if _NAME.fullmatch(name))


def usual_name(home: Path) -> str:
    """The one in use; "home" if that is among several, or if nothing is kept yet."""
    names = stored_names(home)
    candidates = [name for name in names if NamespaceFiles(home, name).is_used] or names
    if not candidates or DEFAULT_NAME in candidates:
        return DEFAULT_NAME
    if len(candidates) > 1:
        raise UnknownNamespace(
            f"This machine belongs to several namespaces: {', '.join(candidates)}",
            hint="Say which one with --namespace or POTLUCK_NAMESPACE.",
        )
    return candidates[0]


class NamespaceFiles:
    """The files of one namespace."""

    def __init__(self, home: Path, name: str) -> None:
        self.home = home
        self.name = checked_name(name)
        self.directory = home / "namespaces" / self.name
        self.roster = self.directory / "roster"

    @property
    def is_used(self) -> bool:
        """Whether it must not be replaced silently."""
        return (self.directory / "used").exists()

    def mark_used(self, secret: bytes) -> None:
        """From now on it is not replaced silently, if it is still the one with this secret."""
        with exclusive_lock(self.home / "lock"):
            present = self.maybe_read()
            if present is not None and present.current == secret:
                self._mark()

    def maybe_read(self) -> Secrets | None:
        """What is kept; None if nothing is."""
        current = read_key(self.directory / "secret", advice=f"{_ADVICE} {self.name}")
        if current is None:
            return None
        joined = read_private(self.directory / "previous", limit=MAX_PREVIOUS * KEY_SIZE + 1) or b""
        if len(joined) % KEY_SIZE:
            raise DamagedFile(
                f"{self.directory / 'previous'} is damaged",
                hint="Delete it: only machines that were absent lately may have to pair again.",
            )
        previous = (joined[at : at + KEY_SIZE] for at in range(0, len(joined), KEY_SIZE))
        return Secrets(current, tuple(previous), (self.directory / "passphrase").exists())

    def create(self, secret: bytes) -> None:
        """Keep a new private namespace, unless one is kept already; of several at once one wins."""
        ensure_private_directory(self.home)
        with exclusive_lock(self.home / "lock"):
            self._make_directory()
            create_private(self.directory / "secret", secret)

    def write(self, new: Secrets, *, replace: bool) -> None:
        """Keep these secrets.

        What is there makes way if it is unused, if ``new`` succeeds it, or if ``replace`` says so.
        """
        ensure_private_directory(self.home)
        with exclusive_lock(self.home / "lock"):
            present = self.maybe_read()
            if present is not None and present.current not in (new.current, *new.previous):
                if self.is_used and not replace:
                    raise NamespaceExists(
                        f"This machine already uses another namespace named {self.name!r}",
                        got=self.name,
                        hint="Keep the new one under another name, or leave the other one first: "
                        f"potluck unpair --namespace {self.name}",
                    )
                self._remove()  # with its roster, which says nothing about the new circle
            self._make_directory()
            # In this order a crash in between loses no tag and lets nothing be replaced silently.
            self._mark()
            if new.is_passphrase:
                create_private(self.directory / "passphrase", b"")
            replace_private(self.directory / "previous", b"".join(new.previous))
            replace_private(self.directory / "secret", new.current)

    def delete(self) -> None:
        """Remove everything, roster included; nothing happens if nothing is kept."""
        if self.directory.exists():
            with exclusive_lock(self.home / "lock"):
                self._remove()

    def _mark(self) -> None:
        create_private(self.directory / "used", b"")

    def _make_directory(self) -> None:
        for path in (self.home, self.directory.parent, self.directory):
            ensure_private_directory(path)

    def _remove(self) -> None:
        """Rename first: nobody sees half a namespace."""
        doomed = self.directory.with_name(f".{self.name}.{secrets.token_hex(8)}.deleted")
        try:
            self.directory.rename(doomed)
            shutil.rmtree(doomed)
        except FileNotFoundError:
            return
        except OSError as error:
            hint = f"Remove it by hand: {self.directory.parent}"
            action = f"{self.directory} could not be removed"
            raise from_os_error(action, error, hint=hint) from error
