"""How much one rank may make another keep, and how soon it helps; the same on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ANNOUNCE_AFTER", "COURTESY_AFTER", "MAX_OFFERS", "MESSAGE_COST", "Limits"]

MESSAGE_COST = 256
"""Bytes of credit a message costs besides its own: what keeping an empty one takes in memory."""

COURTESY_AFTER = 0.05
"""Seconds a send waits for its go-ahead before it helps its peers to get on."""

ANNOUNCE_AFTER = 0.1
"""Seconds after which a barrier tells the others that we are there; sooner if it has no more."""

MAX_OFFERS = 4096
"""Offers one peer may have open; further ones wait on the sender's side."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of memory, in bytes.

    >>> Limits().eager
    1048576
    """

    eager: int = 1 << 20
    """Largest message sent without asking: above it, one round trip hardly shows."""
    credit: int = 4 << 20
    """What one peer may make us keep unasked."""
    courtesy: int = 128 << 20
    """What we take in from all peers together to break a deadlock of senders."""
