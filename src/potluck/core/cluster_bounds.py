"""What the messages of a cluster are made of: bounds, and the types that keep them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from potluck.core.ancestry import MAX_BRANCHES, Branch
from potluck.vocabulary import ProcessId

__all__ = [
    "MAX_CONTACTS",
    "MAX_MEMBERS",
    "MAX_MESSAGE",
    "Ancestry",
    "Count",
    "Label",
    "Lineage",
    "Mark",
    "Marks",
    "Members",
    "Message",
    "Seconds",
    "Sentence",
    "Term",
    "clip",
]

MAX_MEMBERS = 256
"""Members of a view at most."""

MAX_CONTACTS = 512
"""Processes that a process is connected to at one time, at most."""

MAX_MESSAGE = 60 << 10
"""Bytes of an encoded message at most."""

SENTENCE_LIMIT = 1000  # characters

Lineage = Annotated[str, msgspec.Meta(max_length=32)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
Term = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
Mark = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Marks = Annotated[tuple[Mark, ...], msgspec.Meta(max_length=MAX_CONTACTS)]
Sentence = Annotated[str, msgspec.Meta(max_length=SENTENCE_LIMIT)]
Label = Annotated[str, msgspec.Meta(max_length=255)]
Seconds = Annotated[float, msgspec.Meta(ge=0, lt=1e9)]
Ancestry = Annotated[tuple[Branch, ...], msgspec.Meta(max_length=MAX_BRANCHES)]
Members = Annotated[tuple[ProcessId, ...], msgspec.Meta(max_length=MAX_MEMBERS)]


class Message(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Positional on the wire: heartbeats are frequent."""


def clip(sentence: str, limit: int = SENTENCE_LIMIT) -> str:
    """A sentence short enough to travel."""
    return sentence if len(sentence) <= limit else sentence[: limit - 1] + "…"
