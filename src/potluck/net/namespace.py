"""A circle of machines: a name and a 256-bit secret.

Whoever has the secret can become a member, so it never leaves a machine except through pairing, is
kept in a file of mode 0600, and is never used itself: every use has its own key, derived from it by
purpose.  The discovery tag is such a key; it shows which circle somebody belongs to and gives
nothing else away.  The name is only a label, and the salt of a passphrase: members of one circle
may call it differently.
"""

from __future__ import annotations

import base64
import enum
import functools
import hashlib
import hmac
import os
import secrets
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from potluck.errors import UnsupportedOperation
from potluck.logs import get_logger
from potluck.net.namespace_files import (
    DEFAULT_NAME,
    MAX_PREVIOUS,
    InvalidNamespaceName,
    NamespaceFiles,
    Secrets,
    UnknownNamespace,
    checked_name,
    stored_names,
    usual_name,
)
from potluck.net.passphrase import MIN_BITS, WeakPassphrase, estimate_bits, stretch
from potluck.net.private_files import KEY_SIZE, potluck_home

__all__ = ["NetworkNamespace", "Protection", "SecurityWarning"]

_logger = get_logger(__name__)


class SecurityWarning(UserWarning):
    """Something was asked for that lets others in or lets them read along.

    >>> import warnings
    >>> with warnings.catch_warnings():
    ...     warnings.simplefilter("ignore", SecurityWarning)
    ...     NetworkNamespace.insecure().is_encrypted
    False
    """


class Protection(enum.Enum):
    """What keeps strangers out."""

    SECRET = "secret"  # noqa: S105  members have it, nobody else; a roster says who they are
    PASSPHRASE = "passphrase"  # noqa: S105  whoever knows it is a member; there is no roster
    OPEN = "open"  # encrypted, but everybody knows the secret
    INSECURE = "insecure"  # plain TCP

    @property
    def has_own_secret(self) -> bool:
        """Whether the secret is known to members alone."""
        return self in {Protection.SECRET, Protection.PASSPHRASE}


_RESERVED = {Protection.OPEN.value, Protection.INSECURE.value}


@dataclass(frozen=True, eq=False, repr=False)
class NetworkNamespace:
    """Name and secret of one circle.  Equal are those with the same secret, whatever their names.

    >>> lab = NetworkNamespace.generate("lab")
    >>> lab == NetworkNamespace("attic", lab.secret), lab == NetworkNamespace.generate("lab")
    (True, False)
    """

    name: str
    secret: bytes
    previous: tuple[bytes, ...] = ()
    """Earlier secrets, newest first; by them absentees are recognised, never admitted."""
    protection: Protection = Protection.SECRET
    home: Path = field(default_factory=potluck_home)
    """Below which directory it is kept, or would be."""

    def __post_init__(self) -> None:
        for secret in (self.secret, *self.previous):
            if len(secret) != KEY_SIZE:
                msg = f"The secret of a namespace has {KEY_SIZE} bytes, not {len(secret)}"
                raise ValueError(msg)
        name = checked_name(self.name)
        if self.protection.has_own_secret and name in _RESERVED:
            raise InvalidNamespaceName(
                f"The name {name!r} is reserved for the namespace that is {name}", got=name
            )
        object.__setattr__(self, "name", name)

    @classmethod
    def load_or_create(
        cls, name: str | None = None, *, home: Path | None = None
    ) -> NetworkNamespace:
        """The namespace ``name``, else ``POTLUCK_NAMESPACE``, else the one this machine uses.

        What is not kept here yet is created: a private namespace, alone in it until somebody pairs.
        The names ``open`` and ``insecure`` mean :meth:`open` and :meth:`insecure`.
        """
        home = home or potluck_home()
        name = name or os.environ.get("POTLUCK_NAMESPACE") or usual_name(home)
        match name.strip().lower():
            case Protection.OPEN.value:
                return cls.open()
            case Protection.INSECURE.value:
                return cls.insecure()
        files = NamespaceFiles(home, name)
        if files.maybe_read() is None:
            files.create(secrets.token_bytes(KEY_SIZE))
        return cls.load(name, home=home)

    @classmethod
    def load(cls, name: str, *, home: Path | None = None) -> NetworkNamespace:
        """The namespace kept here under this name; :class:`UnknownNamespace` if there is none."""
        home = home or potluck_home()
        known = NamespaceFiles(home, name).maybe_read()
        if known is None:
            names = ", ".join(stored_names(home)) or "none"
            raise UnknownNamespace(
                f"This machine knows no namespace {name!r}",
                got=name,
                hint=f"Those it knows: {names}. Join another one with `potluck pair`.",
            )
        protection = Protection.PASSPHRASE if known.is_passphrase else Protection.SECRET
        return cls(name, known.current, known.previous, protection, home)

    @classmethod
    def generate(cls, name: str = DEFAULT_NAME, *, home: Path | None = None) -> NetworkNamespace:
        """A new namespace with a random secret, not kept anywhere before :meth:`save`."""
        return cls(name, secrets.token_bytes(KEY_SIZE), home=home or potluck_home())

    @classmethod
    def from_passphrase(
        cls, name: str, passphrase: str, *, home: Path | None = None
    ) -> NetworkNamespace:
        """The namespace that everybody gets who gives this name and this passphrase.

        Whoever knows the passphrase is a member; there is no roster, and nobody can be revoked
        but by agreeing on another passphrase.
        Takes about half a second, so that guessing is expensive.  A passphrase that is easily
        guessed all the same raises :class:`WeakPassphrase`.
        """
        bits = estimate_bits(passphrase)
        if bits < MIN_BITS:
            raise WeakPassphrase(bits)
        name = checked_name(name)
        secret = stretch(passphrase, b"potluck namespace v1\0" + name.encode())
        home = home or potluck_home()
        return cls(name, secret, protection=Protection.PASSPHRASE, home=home)

    @classmethod
    def open(cls) -> NetworkNamespace:
        """Encrypted, but with a secret that everybody knows: all on this network may join."""
        warnings.warn(
            "This namespace is open: everybody on this network can join, read and take part. "
            "Use it only where you trust every device.",
            SecurityWarning,
            stacklevel=2,
        )
        secret = hashlib.sha256(b"potluck open namespace v1").digest()
        return cls("open", secret, protection=Protection.OPEN)

    @classmethod
    def insecure(cls) -> NetworkNamespace:
        """Plain TCP: no encryption, no identities.  For measurements, and networks of one cable."""
        message = (
            "NOTHING IS ENCRYPTED OR AUTHENTICATED: everybody on this network can read and change "
            "all data. Leave out the insecure namespace to be protected."
        )
        _logger.warning(message)
        warnings.warn(message, SecurityWarning, stacklevel=2)
        return cls("insecure", bytes(KEY_SIZE), protection=Protection.INSECURE)

    @classmethod
    def stored(cls, *, home: Path | None = None) -> list[str]:
        """The names of all namespaces kept on this machine."""
        return stored_names(home or potluck_home())

    @property
    def is_encrypted(self) -> bool:
        """False for plain TCP only."""
        return self.protection is not Protection.INSECURE

    def subkey(self, purpose: str, length: int = 32) -> bytes:
        """A key for one purpose, from which neither the secret nor another key can be computed."""
        if not self.is_encrypted:
            raise UnsupportedOperation("The insecure namespace has no keys: it is plain TCP")
        return _subkey(self.secret, purpose, length)

    @property
    def discovery_tag(self) -> str:
        """What members show to find each other: 26 letters and digits that reveal nothing."""
        return _tag(self.secret)

    @property
    def old_tags(self) -> tuple[str, ...]:
        """The tags of earlier secrets, newest first, under which absentees still search."""
        return tuple(_tag(secret) for secret in self.previous)

    def has_secret(self, secret: bytes) -> bool:
        """Whether this is the secret, found out in constant time."""
        return hmac.compare_digest(self.secret, secret)

    def rotated(self, secret: bytes | None = None) -> NetworkNamespace:
        """The same circle under a new secret; the present one becomes a previous one."""
        self._require_own_secret("rotated")
        if self.protection is Protection.PASSPHRASE:
            raise UnsupportedOperation(
                f'The secret of "{self.name}" is its passphrase, which cannot be rotated',
                hint="Agree on another passphrase, and give it to every machine that stays.",
            )
        previous = (self.secret, *self.previous)[:MAX_PREVIOUS]
        return replace(self, secret=secret or secrets.token_bytes(KEY_SIZE), previous=previous)

    @property
    def directory(self) -> Path:
        """Where this namespace is kept, or would be."""
        return self._files.directory

    @property
    def roster_path(self) -> Path:
        """Where the list of members belongs."""
        return self._files.roster

    @property
    def is_kept(self) -> bool:
        """Whether this machine keeps it, be it under a later secret by now."""
        kept = self._files.maybe_read()
        return (
            self.protection.has_own_secret
            and kept is not None
            and any(self.has_secret(secret) for secret in (kept.current, *kept.previous))
        )

    @property
    def is_unused(self) -> bool:
        """Whether it was created silently and nobody has joined, so that pairing may replace it."""
        kept = self._files.maybe_read()
        return kept is not None and self.has_secret(kept.current) and not self._files.is_used

    def mark_used(self) -> None:
        """Keep it from being replaced silently; to be called when a second member is met."""
        if self.is_unused:
            self._files.mark_used(self.secret)

    def save(self, *, replace: bool = False) -> None:
        """Keep it on this machine.

        One of the same name makes way if it is unused, if this is the same circle under a newer
        secret, or if ``replace`` says so; otherwise :class:`NamespaceExists` is raised.
        """
        self._require_own_secret("saved")
        is_passphrase = self.protection is Protection.PASSPHRASE
        kept = Secrets(self.secret, self.previous, is_passphrase)
        self._files.write(kept, replace=replace)

    def delete(self) -> None:
        """Forget it, roster included; nothing happens if it is not kept here."""
        self._require_own_secret("deleted")
        self._files.delete()

    @property
    def _files(self) -> NamespaceFiles:
        return NamespaceFiles(self.home, self.name)

    def _require_own_secret(self, verb: str) -> None:
        if not self.protection.has_own_secret:
            message = f"The {self.protection.value} namespace has no secret of its own to be {verb}"
            raise UnsupportedOperation(message)

    def __eq__(self, other: object) -> bool:
        """The same protection and, compared in constant time, the same secret."""
        if not isinstance(other, NetworkNamespace):
            return NotImplemented
        return self.protection is other.protection and self.has_secret(other.secret)

    def __hash__(self) -> int:
        return hash(self.discovery_tag)

    def __repr__(self) -> str:
        """The public parts only."""
        return f"NetworkNamespace({self.name!r}, {self.protection.value}, {self.discovery_tag})"


def _subkey(secret: bytes, purpose: str, length: int) -> bytes:
    info = b"potluck v1 " + purpose.encode()
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=info).derive(secret)


@functools.lru_cache(maxsize=32)  # every caller names one
def _tag(secret: bytes) -> str:
    """16 bytes are too many to hit by chance; base32 fits every discovery record."""
    tag = _subkey(secret, "discovery tag", 16)
    return base64.b32encode(tag).decode().rstrip("=").lower()
