"""A group of machines: a name and a 256-bit secret.

A machine with the secret can become a member, so it never leaves a machine except through pairing,
is kept in a file of mode 0600, and is never used itself: every use has its own key, derived from it
by purpose.  The discovery tag is such a key; it shows which group a machine belongs to and reveals
nothing else.  The name is only a label, and the salt of a passphrase: members of one group may call
it differently.
"""

from __future__ import annotations

import base64
import enum
import functools
import hashlib
import hmac
import math
import os
import re
import secrets
import shutil
import unicodedata
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.hazmat.primitives.kdf.scrypt import Scrypt

from potluck.errors import DistributedError, UnsupportedOperation, from_os_error
from potluck.identity.node import KNOWN_DIGITS, LITTLE_WORDS
from potluck.identity.private_files import (
    KEY_SIZE,
    DamagedFile,
    check_home,
    create_private,
    ensure_private_directory,
    exclusive_lock,
    potluck_home,
    read_key,
    read_private,
    replace_private,
)
from potluck.logs import get_logger

# --------------------------------------------------------------------------------------------------
# Where the secrets of namespaces are kept on this machine, and which one is meant.
#
# ::
#
#     ~/.potluck/namespaces/home/secret     32 bytes
#                               /previous   the secrets before it, newest first, 32 bytes each
#                               /used       exists unless this is a private, unused namespace
#                               /passphrase exists if the secret was made from a passphrase
#                               /roster     who belongs to it (written by others)
#                               /proposed   secrets this machine has proposed (written by others)

DEFAULT_NAME = "home"
MAX_PREVIOUS = 8  # rotations an absentee may miss and still find its way back

_NAME = re.compile(r"[a-z0-9]([a-z0-9._-]{0,30}[a-z0-9])?")
# Windows keeps these for devices, in every directory and with any extension.
_DEVICES = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?")
_ADVICE = "Restore it from a backup, or leave the group and pair this machine again: potluck unpair"


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
    """Whether it was made from a passphrase, so that every machine with it is a member."""

    def __repr__(self) -> str:
        """Without the secrets."""
        return f"Secrets(…, {len(self.previous)} previous)"


def checked_name(name: str) -> str:
    """The name in lower case, fit to be a directory on every system."""
    name = name.strip().lower() if name.isascii() else name  # U+212A would become a "k"
    if not _NAME.fullmatch(name) or _DEVICES.fullmatch(name):
        raise InvalidNamespaceName(
            f"{name[:64]!r} is not a valid group name",
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
            f"This machine is in several groups: {', '.join(candidates)}",
            hint="Choose one with --namespace or POTLUCK_NAMESPACE.",
        )
    return candidates[0]


class NamespaceFiles:
    """The files of one namespace."""

    def __init__(self, home: Path, name: str) -> None:
        check_home(home)
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
                        f"This machine is already in another group named {self.name!r}",
                        got=self.name,
                        hint="Choose another name for the new one, or leave the other one first: "
                        f"potluck unpair --namespace {self.name}",
                    )
                self._remove()  # with its roster, which says nothing about the new group
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
        """Rename first: no process sees half a namespace."""
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


# --------------------------------------------------------------------------------------------------
# From a passphrase to the secret of a namespace, if it is worth it.
#
# Whoever listens to discovery, or connects once, holds a value computed from the secret and can try
# passphrases against it at leisure.  Two things stand in the way: every try costs 128 MiB and half
# a second (scrypt), and a passphrase worth less than 64 bits is refused.
#
# The worth is estimated by zxcvbn, which knows words, names, dates, patterns of keyboards,
# repetitions and the passwords that people use.  It takes the words of a passphrase for independent
# of each other.  Those of a quotation or a line of a song are not: a text with as many small words
# as a sentence has is worth no more than a place in a long list of sentences.

MIN_BITS = 64
_CONSIDERED = 100  # characters; what follows adds nothing to the estimate, which takes n**2 steps
_AGAIN = 3.0  # bits: that something said before is said again
_CHOSEN = 2.0  # bits: that a character occurs at all
_SENTENCE = 36.0  # bits: all lines of all books and songs are fewer than 2**36
_SMALL_WORD = 250  # the rank of a word in use; half of all that is said is made of these
_SENTENCES_HAVE = 0.3  # of their words, at least; lists for passphrases hardly have any
_LONGEST_WORD = 20  # letters
_BITS_OF_LETTER = 3.0  # in a sentence; letters drawn by chance are worth 4.7
_KNOWN_FROM = 8  # digits
_SEPARATORS = re.compile(r"[\s\-_.,;:!?'\"]+")


class WeakPassphrase(DistributedError, ValueError):
    """A passphrase that could be guessed; ``got`` has its worth in bits."""

    def __init__(self, bits: float) -> None:
        super().__init__(
            f"This passphrase is worth about {bits:.0f} bits and could be guessed; "
            f"a group needs {MIN_BITS}, because any machine on the network can try without limit",
            expected=MIN_BITS,
            got=bits,
            hint="Use six or more random words that make no sentence, or 24 random characters. "
            "Or do without one: `potluck pair` joins two machines with a short one-time code.",
        )


def normalise(passphrase: str) -> str:
    """One spelling for what looks the same: composed characters, single spaces, trimmed."""
    return " ".join(unicodedata.normalize("NFKC", passphrase).split())


def stretch(passphrase: str, salt: bytes) -> bytes:
    """32 bytes that take 128 MiB and about half a second to compute; the same everywhere.

    n = 2**17, r = 8 is the strongest of the commonly advised settings that a board with 1 GiB of
    memory can still run.  It adds about 17 bits to the attacker's bill, on top of the 64.
    """
    kdf = Scrypt(salt=salt, length=32, n=2**17, r=8, p=1)
    return kdf.derive(normalise(passphrase).encode())


def estimate_bits(passphrase: str) -> float:
    """How many bits a passphrase has for an attacker that knows how people choose them.

    >>> estimate_bits("Pa55word123") < 20 < 64 < estimate_bits("k9Fw2-xQv7r-Zp4Lm-t8Bc")
    True
    """
    from zxcvbn import zxcvbn  # large lists of words, so only when a passphrase is checked

    text = normalise(passphrase)[:_CONSIDERED]
    words = [word for word in _SEPARATORS.split(text) if word]
    if not words:
        return 0.0
    # Between words a separator is no secret; in what was drawn by chance it is.
    compact = "".join(words) if all(map(str.isalpha, words)) else text.replace(" ", "")
    estimates = [zxcvbn(each, max_length=_CONSIDERED) for each in {text, compact}]
    return min(
        *(math.log2(each["guesses"]) for each in estimates),
        *(_sum_of_pieces(each["sequence"]) for each in estimates),
        _as_sentence(words),
        _as_sentence(_parted(compact)),
        _as_digits(compact),
        _variety_bound(text),
    )


def _bits(piece: dict[str, Any]) -> float:
    return math.log2(max(1, piece["guesses"]))


def _sum_of_pieces(sequence: list[dict[str, Any]]) -> float:
    """What the pieces are worth one by one; zxcvbn adds bits for their unknown number."""
    seen: set[str] = set()
    bits = 0.0
    for piece in sequence:
        token = piece["token"].lower()
        bits += _AGAIN if token in seen else _bits(piece)
        seen.add(token)
    return bits


def _as_sentence(words: list[str]) -> float:
    """What a text is worth whose words follow from each other, and what is not a word beside."""
    from zxcvbn import zxcvbn
    from zxcvbn.matching import RANKED_DICTIONARIES

    ranks = RANKED_DICTIONARIES["english_wikipedia"], RANKED_DICTIONARIES["us_tv_and_film"]
    plain = [word.lower() for word in words if word.isalpha()]
    small = [
        word
        for word in plain
        if word in LITTLE_WORDS or any(r.get(word, _SMALL_WORD) < _SMALL_WORD for r in ranks)
    ]
    if len(plain) < 4 or len(small) < _SENTENCES_HAVE * len(plain):  # noqa: PLR2004 - words
        return math.inf
    others = "".join(word for word in words if not word.isalpha())
    return _SENTENCE + (math.log2(zxcvbn(others)["guesses"]) if others else 0.0)


def _parted(text: str) -> list[str]:
    """The words of a sentence without spaces; none if words hardly say its letters any shorter."""
    from zxcvbn.matching import RANKED_DICTIONARIES

    text = text.lower()
    if not text.isalpha():
        return []
    ranks = RANKED_DICTIONARIES["english_wikipedia"], RANKED_DICTIONARIES["us_tv_and_film"]
    best: list[tuple[float, list[str]]] = [(0.0, [])]
    for end in range(1, len(text) + 1):
        options = [(math.inf, [""])]
        for start in range(max(0, end - _LONGEST_WORD), end):
            word = text[start:end]
            rank = min(each.get(word, math.inf) for each in ranks)
            if rank < math.inf and (len(word) > 1 or word in "ai"):
                bits, before = best[start]
                options.append((bits + math.log2(rank + 1), [*before, word]))
        best.append(min(options))
    bits, words = best[-1]
    return words if bits < _BITS_OF_LETTER * len(text) else []


def _as_digits(text: str) -> float:
    """Few bits for digits that people know by heart, else no bound."""
    digits = "".join(letter for letter in text if letter.isdecimal())
    is_known = any(digits[:_KNOWN_FROM] in known for known in KNOWN_DIGITS)
    is_all = len(digits) >= _KNOWN_FROM and len(text) - len(digits) <= 2  # noqa: PLR2004 - 3.14
    return _AGAIN * _KNOWN_FROM if is_known and is_all else math.inf


def _variety_bound(text: str) -> float:
    """Few different characters carry little, however they are arranged."""
    variety = len(set(text.lower()))
    return len(text) * math.log2(variety) + _CHOSEN * variety


# --------------------------------------------------------------------------------------------------

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
    """Name and secret of one group.  Equal are those with the same secret, whatever their names.

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
            raise InvalidNamespaceName(f"The group name {name!r} is reserved", got=name)
        object.__setattr__(self, "name", name)

    @classmethod
    def load_or_create(
        cls, name: str | None = None, *, home: Path | None = None
    ) -> NetworkNamespace:
        """The namespace ``name``, else ``POTLUCK_NAMESPACE``, else the one this machine uses.

        What is not kept here yet is created: a private namespace with this machine alone in it.
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
                f"This machine is not in a group named {name!r}",
                got=name,
                hint=f"Its groups: {names}. Join another one with `potluck pair`.",
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
        """The namespace of all machines that use this name and this passphrase.

        Every machine with the passphrase is a member; there is no roster, and a machine can be
        excluded only by choosing another passphrase.
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
        """Encrypted, but with a public secret: any machine on this network may join."""
        warnings.warn(
            "This group is open: any machine on this network can join it and read its data. "
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
            "NOTHING IS ENCRYPTED OR AUTHENTICATED: any machine on this network can read and "
            "change all data. Leave out the insecure namespace to be protected."
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
        """The same group under a new secret; the present one becomes a previous one."""
        self._require_own_secret("rotated")
        if self.protection is Protection.PASSPHRASE:
            raise UnsupportedOperation(
                f'The secret of "{self.name}" is its passphrase, which cannot be rotated',
                hint="Choose another passphrase, and give it to every machine that stays.",
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
        """Whether it was created silently and has one member, so that pairing may replace it."""
        kept = self._files.maybe_read()
        return kept is not None and self.has_secret(kept.current) and not self._files.is_used

    def mark_used(self) -> None:
        """Keep it from being replaced silently; to be called when a second member is met."""
        if self.is_unused:
            self._files.mark_used(self.secret)

    def save(self, *, replace: bool = False) -> None:
        """Keep it on this machine.

        One of the same name is replaced if it is unused, if this is the same group under a newer
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
            message = f"The {self.protection.value} group has no secret of its own to be {verb}"
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
