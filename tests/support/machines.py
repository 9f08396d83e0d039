"""Machines with names and keys, for decisions that are tested without real cryptography.

A toy signature is a hash that only the verifier here can recompute; it is as deterministic as
Ed25519 and a hundred times faster.  Tests that need the real thing use the node identity.
"""

from __future__ import annotations

import base64
import hashlib
import random
from collections.abc import Callable

from potluck._types import NodeId
from potluck.trust.roster_records import Card, Signer, Verifier

_secrets: dict[bytes, bytes] = {}


def entropy(seed: int) -> Callable[[int], bytes]:
    """Bytes that repeat with the seed."""
    return random.Random(seed).randbytes


def toy_node_id(public_key: bytes) -> NodeId:
    """An id of the right form."""
    return NodeId(base64.b32encode(hashlib.sha256(public_key).digest()[:20]).decode().lower())


def machine(name: str, key: str | None = None) -> Signer:
    """A machine; the same name (or key) gives the same key."""
    secret = hashlib.sha256((key or name).encode()).digest()
    public_key = hashlib.sha256(b"public" + secret).digest()
    _secrets[public_key] = secret
    card = Card(toy_node_id(public_key), public_key, name)
    return Signer(card, lambda message: hashlib.sha512(secret + message).digest())


def _verify(public_key: bytes, signature: bytes, message: bytes) -> bool:
    secret = _secrets.get(public_key)
    return secret is not None and hashlib.sha512(secret + message).digest() == signature


TOY_VERIFIER = Verifier(toy_node_id, _verify)
