"""Who is who, for decisions: a machine's card, and the two doors to its signatures.

A core never touches a private key.  Whoever drives it passes in a :class:`Signer` (this machine)
and a :class:`Verifier` (everybody else); both are thin covers of the node identity's functions.
The types of wire fields that several messages share are here too, each with its bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec

from potluck.decoding import Exact
from potluck.vocabulary import NodeId

__all__ = [
    "Card",
    "Digest",
    "PublicKey",
    "Signature",
    "Signer",
    "Verifier",
    "WireId",
    "WireName",
    "clean_name",
]

NAME_LIMIT = 64  # characters, as long as a host name's label may be

WireId = Annotated[NodeId, msgspec.Meta(pattern="^[a-z2-7]{32}$")]  # 160 bits in base32
WireName = Annotated[Exact, msgspec.Meta(min_length=1, max_length=NAME_LIMIT)]
PublicKey = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # Ed25519, raw
Signature = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]  # Ed25519
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]  # SHA-256


class Card(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A machine as it introduces itself."""

    node_id: WireId
    public_key: PublicKey
    name: WireName


@dataclass(frozen=True, slots=True)
class Signer:
    """This machine: its card and the function that signs with its key."""

    card: Card
    sign: Callable[[bytes], bytes] = field(repr=False)

    @property
    def node_id(self) -> NodeId:
        """The id of this machine."""
        return self.card.node_id


@dataclass(frozen=True, slots=True)
class Verifier:
    """How to check what others claim."""

    node_id_of: Callable[[bytes], NodeId]
    """The id that belongs to a public key."""
    verify: Callable[[bytes, bytes, bytes], bool]
    """Whether (public key, signature, message) belong together."""

    def owns(self, card: Card, signature: bytes, message: bytes) -> bool:
        """Whether the card's id is that of its key, and this key signed the message."""
        return self.node_id_of(card.public_key) == card.node_id and self.verify(
            card.public_key, signature, message
        )


def clean_name(text: str) -> str:
    r"""A display name fit for anybody's terminal: no control or invisible characters, bounded.

    A machine cleans its own name before sending it; a received name that is not clean is refused.

    >>> clean_name("Anna's \x1b[31mlaptop")
    "Anna's [31mlaptop"
    """
    words = "".join(c for c in text if c.isprintable()).split()
    return " ".join(words)[:NAME_LIMIT].strip() or "unnamed"
