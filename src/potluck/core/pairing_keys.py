"""The cryptography of pairing: SPAKE2, and everything derived from its key.

SPAKE2 turns the short code into a strong key that an eavesdropper cannot search for, and gives a
machine in the middle one guess for each exchange.  The asymmetric form is used, guest as side A
and host as side B, because the roles differ anyway: a reflected share then fails at once.

The key is bound to the *transcript*, the exact bytes of hello and reply (version, slot, both ids,
both names, both shares): two sides that saw different bytes derive different keys.  Keys differ by
direction and purpose, and sealed messages are numbered, so nothing can be replayed or reflected.
Every function is pure; chance is passed in as ``entropy``.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from potluck.core.pairing_code import PairingCode
from potluck.errors import MalformedFrame

__all__ = ["Box", "Role", "Session", "ShareMaker"]

_LABEL = b"potluck pairing v1 "
_KEY = 32  # bytes of every key and MAC


class Role(StrEnum):
    """The two sides."""

    GUEST = "guest"
    HOST = "host"

    @property
    def other(self) -> Role:
        """Whom this side talks to."""
        return Role.HOST if self is Role.GUEST else Role.GUEST


class ShareMaker:
    """One SPAKE2 run: makes our share and turns the other's into a session.  Used once."""

    def __init__(self, role: Role, code: PairingCode, entropy: Callable[[int], bytes]) -> None:
        import spake2  # type: ignore[import-untyped]  # 0.1 s, so only when somebody pairs

        side = spake2.SPAKE2_A if role is Role.GUEST else spake2.SPAKE2_B
        self._role = role
        self._run: Any = side(
            code.password, idA=_LABEL + b"guest", idB=_LABEL + b"host", entropy_f=entropy
        )
        self.share: bytes = self._run.start()

    def finish(self, share: bytes, hello: bytes, reply: bytes) -> Session:
        """The session with whoever sent ``share``; raises MalformedFrame if it is none."""
        import spake2
        from spake2.ed25519_basic import NotOnCurve  # type: ignore[import-untyped]

        try:
            key: bytes = self._run.finish(share)
        except (spake2.SPAKEError, NotOnCurve, ValueError) as error:
            raise MalformedFrame(
                "The other side's share of the key is not a valid one", cause=str(error) or None
            ) from error
        return Session(self._role, key, _transcript(hello, reply))


@dataclass(frozen=True)
class Session:
    """What one side can do once both shares are exchanged."""

    role: Role
    key: bytes = field(repr=False)
    transcript: bytes = field(repr=False)

    def proof(self, role: Role) -> bytes:
        """The MAC by which ``role`` proves that it knows the code."""
        return hmac.digest(self._derive(f"confirm {role}"), self.transcript, "sha256")

    def is_proof_of_other(self, proof: bytes) -> bool:
        """Whether the other side knows the code."""
        return hmac.compare_digest(proof, self.proof(self.role.other))

    def identity_statement(self, role: Role) -> bytes:
        """What ``role`` signs with its node key: good for this one exchange and this role."""
        return _LABEL + f"identity {role} ".encode() + self._derive("identity")

    def outbox(self) -> Box:
        """Seals what we send."""
        return self._box(self.role)

    def inbox(self) -> Box:
        """Opens what the other sends."""
        return self._box(self.role.other)

    def _box(self, sender: Role) -> Box:
        return Box(self._derive(f"seal {sender}"), self.transcript)

    def _derive(self, purpose: str) -> bytes:
        # HKDF with one block: extract with the transcript as salt, expand with the purpose.
        strong = hmac.digest(self.transcript, self.key, "sha256")
        return hmac.digest(strong, _LABEL + purpose.encode() + b"\x01", "sha256")[:_KEY]


class Box:
    """Numbered AES-256-GCM in one direction; a key used for a handful of messages."""

    def __init__(self, key: bytes, transcript: bytes) -> None:
        self._cipher = AESGCM(key)
        self._transcript = transcript
        self._count = 0

    def seal(self, message: bytes) -> bytes:
        """The message, readable only by the other side and only in this place of the sequence."""
        return self._cipher.encrypt(self._nonce(), message, self._transcript)

    def open(self, box: bytes) -> bytes:
        """The message in ``box``; raises MalformedFrame if a bit or its place is wrong."""
        try:
            return self._cipher.decrypt(self._nonce(), box, self._transcript)
        except (InvalidTag, ValueError) as error:  # ValueError: shorter than a tag
            raise MalformedFrame("A sealed pairing message was damaged or out of order") from error

    def _nonce(self) -> bytes:
        # The number advances even if opening fails; a broken sequence is never resumed.
        self._count += 1
        return self._count.to_bytes(12, "big")


def _transcript(hello: bytes, reply: bytes) -> bytes:
    # Each part is preceded by its length, so that no bytes can move from one to the other.
    parts = b"".join(len(part).to_bytes(4, "big") + part for part in (hello, reply))
    return hashlib.sha256(_LABEL + parts).digest()
