"""Who a node is: an Ed25519 key that never leaves its machine.

The node's id is a hash of the public key, so whoever proves the key proves the id, and no register
of names is needed.  The key lies in ``~/.potluck/node_keypair`` as a raw 32-byte seed, mode 0600,
and is made on first use; processes that start at the same moment all end up with the same one.
What tells these processes apart is their incarnation, see :mod:`potluck.net.incarnation`.
"""

from __future__ import annotations

import base64
import hashlib
import os
import secrets
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import (
    Ed25519PrivateKey,
    Ed25519PublicKey,
)
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
)

from potluck.errors import IoError
from potluck.net.names import short_name
from potluck.net.private_files import (
    KEY_SIZE,
    create_private,
    ensure_private_directory,
    potluck_home,
    read_key,
)
from potluck.vocabulary import NodeId

__all__ = ["NODE_ID_SIZE", "NodeIdentity", "node_id"]

KEY_FILE = "node_keypair"
NODE_ID_SIZE = 32  # characters of base32: 160 bits, out of reach for a second key with the same id

_ADVICE = (
    "Restore it from a backup, or delete it: this machine then gets a new identity "
    "and has to be paired again."
)


def node_id(public_key: bytes) -> NodeId:
    """The id that belongs to a raw Ed25519 public key."""
    digest = hashlib.sha256(b"potluck node id v1\0" + public_key).digest()
    return NodeId(base64.b32encode(digest[:20]).decode().lower())


class NodeIdentity:
    """The key of this node and everything that follows from it.

    >>> me, other = NodeIdentity.ephemeral(), NodeIdentity.ephemeral()
    >>> signature = me.sign(b"I bring the soup")
    >>> NodeIdentity.verify(me.public_key, signature, b"I bring the soup")
    True
    >>> NodeIdentity.verify(other.public_key, signature, b"I bring the soup")
    False
    """

    def __init__(self, seed: bytes) -> None:
        if len(seed) != KEY_SIZE:
            msg = f"An Ed25519 seed has {KEY_SIZE} bytes, not {len(seed)}"
            raise ValueError(msg)
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public_key: bytes = self._key.public_key().public_bytes_raw()
        self.id: NodeId = node_id(self.public_key)

    @classmethod
    def load_or_generate(cls, path: str | os.PathLike[str] | None = None) -> NodeIdentity:
        """The identity kept in ``path`` (default ``~/.potluck/node_keypair``), made if missing.

        Raises :class:`UnsafeFile` if others may read it and :class:`DamagedFile` if it is not a
        key; both say what to do.
        """
        file = Path(path).expanduser() if path is not None else potluck_home() / KEY_FILE
        ensure_private_directory(file.parent)
        seed = read_key(file, advice=_ADVICE)
        if seed is None:
            # Whoever comes second discards its own and reads what the first has made.
            create_private(file, secrets.token_bytes(KEY_SIZE))
            seed = read_key(file, advice=_ADVICE)
        if seed is None:
            raise IoError(f"{file} vanished while it was being read", hint="Start once more.")
        return cls(seed)

    @classmethod
    def ephemeral(cls) -> NodeIdentity:
        """A new identity that is kept nowhere, for tests and short-lived observers."""
        return cls(secrets.token_bytes(KEY_SIZE))

    @property
    def short_name(self) -> str:
        """A name for people, such as ``calm-otter``; two nodes may share one."""
        return short_name(self.id)

    def sign(self, message: bytes, *, purpose: str = "message") -> bytes:
        """64 bytes that only this node can make; valid for this ``purpose`` alone."""
        return self._key.sign(_framed(message, purpose))

    @staticmethod
    def verify(
        public_key: bytes, signature: bytes, message: bytes, *, purpose: str = "message"
    ) -> bool:
        """Whether the owner of ``public_key`` signed the message for this purpose.

        Everything may come from a stranger; what is not even a key or a signature is False.
        """
        try:
            key = Ed25519PublicKey.from_public_bytes(public_key)
            key.verify(signature, _framed(message, purpose))
        except (InvalidSignature, ValueError):
            return False
        return True

    def private_key_pem(self, password: bytes) -> bytes:
        """The private key encrypted with ``password``, the form in which ``ssl`` can load it."""
        return self._key.private_bytes(
            Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password)
        )

    def __eq__(self, other: object) -> bool:
        """Whether both are the same key."""
        if not isinstance(other, NodeIdentity):
            return NotImplemented
        return self.public_key == other.public_key

    def __hash__(self) -> int:
        return hash(self.public_key)

    def __repr__(self) -> str:
        """Name and id; the key is never shown."""
        return f"NodeIdentity({self.short_name}, {self.id})"


def _framed(message: bytes, purpose: str) -> bytes:
    """What is really signed.

    The same key also signs TLS handshakes (64 spaces, then text), so our signatures begin with
    words of our own; and a signature for one purpose must never pass for another.
    """
    label = purpose.encode()
    return b"potluck signature v1\0" + len(label).to_bytes(2, "big") + label + message
