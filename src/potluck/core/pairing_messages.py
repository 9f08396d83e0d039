"""What the two sides of a pairing say to each other: typed, bounded, and decoded only when small.

::

    guest → host   Hello      version, slot, who I am, my SPAKE2 share
    host → guest   Reply      who I am, my SPAKE2 share                     (this costs a try)
    guest → host   Confirm    proof that I know the code
    host → guest   Confirm    the same, only after the guest's was right
    host → guest   Sealed(Offer)      the namespace, and proof that my id is mine
    guest → host   Sealed(Accept)     proof that my id is mine              (or Sealed(Decline))
    host → guest   Sealed(Admitted)   the roster with the guest on it
    either way     Refused    why not, as a word from a fixed list

Public messages have at most 4 KiB, sealed ones 64 KiB.  A refusal carries no free text: before the
code is proved anybody may have sent it, and a stranger writes nothing on our terminal.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, TypeAlias

import msgspec

from potluck.core.cards import Digest, PublicKey, Signature, WireId, WireName, clean_name
from potluck.decoding import msgpack_reader
from potluck.errors import MalformedFrame

__all__ = [
    "PUBLIC_LIMIT",
    "ROSTER_LIMIT",
    "SEALED_LIMIT",
    "VERSION",
    "Accept",
    "Admitted",
    "Confirm",
    "Decline",
    "Hello",
    "Message",
    "Offer",
    "Refusal",
    "Refused",
    "Reply",
    "Sealed",
    "Secret",
    "decode",
    "decode_secret",
    "encode",
]

VERSION = 1
PUBLIC_LIMIT = 4 << 10  # bytes of a message before the code is proved; the largest has about 400
SEALED_LIMIT = 64 << 10  # bytes of a message afterwards
ROSTER_LIMIT = 60 << 10  # bytes; leaves room for the rest of an offer and the seal

_Share = Annotated[bytes, msgspec.Meta(min_length=33, max_length=33)]  # side and Ed25519 point
_Slot = Annotated[int, msgspec.Meta(ge=0, le=0xFFFF)]
_Roster = Annotated[bytes, msgspec.Meta(max_length=ROSTER_LIMIT)]


class Refusal(StrEnum):
    """Why a side ends the exchange."""

    BUSY = "busy"
    CODE_DEAD = "code-dead"
    MALFORMED = "malformed"
    SAME_MACHINE = "same-machine"
    TOO_SLOW = "too-slow"
    VERSION = "version"
    WRONG_CODE = "wrong-code"
    WRONG_IDENTITY = "wrong-identity"
    WRONG_SLOT = "wrong-slot"


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    pass


class Hello(_Message, tag="hello", frozen=True):
    """The guest's first message."""

    version: int
    slot: _Slot
    node_id: WireId
    name: WireName
    share: _Share


class Reply(_Message, tag="reply", frozen=True):
    """The host's half of the key exchange."""

    node_id: WireId
    name: WireName
    share: _Share


class Confirm(_Message, tag="confirm", frozen=True):
    """A MAC over the whole exchange under the key that only the code gives."""

    proof: Digest


class Sealed(_Message, tag="sealed", frozen=True):
    """An encrypted message."""

    box: bytes


class Refused(_Message, tag="refused", frozen=True):
    """The sender ends the exchange."""

    why: Refusal


class Offer(_Message, tag="offer", frozen=True):
    """The namespace; ``signature`` proves that the host's id is the host's."""

    namespace: WireName
    secret: Digest
    roster: _Roster
    public_key: PublicKey
    signature: Signature

    def __repr__(self) -> str:
        return f"Offer(namespace={self.namespace!r})"  # the secret stays out of logs


class Accept(_Message, tag="accept", frozen=True):
    """The guest joins; ``signature`` proves that its id is its own."""

    node_id: WireId
    public_key: PublicKey
    signature: Signature


class Decline(_Message, tag="decline", frozen=True):
    """The person at the guest said no."""


class Admitted(_Message, tag="admitted", frozen=True):
    """The host has written the guest down."""

    roster: _Roster


Message: TypeAlias = Hello | Reply | Confirm | Sealed | Refused
Secret: TypeAlias = Offer | Accept | Decline | Admitted

# msgspec reports text that is not UTF-8 with Python's own UnicodeDecodeError, a ValueError.
_NOT_OURS = (msgspec.MsgspecError, ValueError, RecursionError)

_encode = msgspec.msgpack.Encoder().encode
_decode_message: Callable[[bytes], Message] = msgpack_reader(Message).decode
_decode_secret: Callable[[bytes], Secret] = msgpack_reader(Secret).decode


def encode(message: Message | Secret) -> bytes:
    """The message as bytes."""
    return _encode(message)


def decode(data: bytes, limit: int) -> Message:
    """The message in ``data``; its size is checked first.  Raises :class:`MalformedFrame`."""
    if len(data) > limit:
        raise MalformedFrame(
            f"A pairing message of {len(data)} bytes came where at most {limit} are allowed",
            expected=limit,
            got=len(data),
        )
    try:
        message = _decode_message(data)
    except _NOT_OURS as error:
        raise _not_ours() from error
    if isinstance(message, Hello | Reply) and message.name != clean_name(message.name):
        raise MalformedFrame("A machine sent a name that cannot be shown")
    return message


def decode_secret(data: bytes) -> Secret:
    """The message that was sealed; its size was checked with the seal."""
    try:
        return _decode_secret(data)
    except _NOT_OURS as error:
        raise _not_ours() from error


def _not_ours() -> MalformedFrame:
    # The decoder's own words are left out: they quote what a stranger sent.
    return MalformedFrame(
        "The other side does not speak our pairing protocol",
        hint="Install the same version of potluck on both machines.",
    )
