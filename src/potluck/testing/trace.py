"""Messages and processes in few words, for the trace of a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any

import msgspec

from potluck.core.cluster_cards import ProcessCard
from potluck.vocabulary import ProcessId

__all__ = ["in_short"]

Naming = Callable[[ProcessId], str]

_LINEAGE_DIGITS = 8


def in_short(thing: Any, who: Naming) -> str:
    """A message, or a field of one, with names instead of ids and without what is empty."""
    if isinstance(thing, ProcessId):
        return who(thing)
    if isinstance(thing, ProcessCard):
        return who(thing.process)
    if isinstance(thing, msgspec.Struct):
        fields = ((name, getattr(thing, name)) for name in thing.__struct_fields__)
        said = [_field(name, value, who) for name, value in fields if value not in ("", (), None)]
        return f"{type(thing).__name__}({', '.join(said)})"
    if isinstance(thing, tuple):
        return "{" + " ".join(in_short(item, who) for item in thing) + "}"
    if isinstance(thing, Enum):
        return thing.name.lower()
    return str(thing)


def _field(name: str, value: Any, who: Naming) -> str:
    if name in {"lineage", "into"}:
        return f"{name}={value[:_LINEAGE_DIGITS]}"
    if isinstance(value, bool):
        return name if value else f"not {name}"
    return f"{name}={in_short(value, who)}"
