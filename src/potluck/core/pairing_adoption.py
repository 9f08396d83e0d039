"""What a machine does with the namespace it has when it is offered another.

Every machine starts with a private namespace that it made silently on first use.  While nobody
else is in it, it means nothing to its owner, and joining replaces it without a word.  Leaving a
circle that has members, or one that somebody made on purpose, is a person's decision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["Adoption", "AlreadyMember", "Ask", "Belonging", "Replace", "decide_adoption"]


@dataclass(frozen=True, slots=True)
class Belonging:
    """What matters of a namespace for this decision."""

    name: str
    circle: bytes
    """The circle's id; it stays the same when the secret changes."""
    commitment: bytes
    """The hash that stands for the current secret."""
    others: int = 0
    """How many machines besides this one are in it."""
    unused: bool = False
    """Whether it was made silently and nobody has joined it."""


@dataclass(frozen=True, slots=True)
class Replace:
    """Store the offered namespace in place of the current one."""

    reason: str


@dataclass(frozen=True, slots=True)
class Ask:
    """Let the person choose; ``reason`` is the question."""

    reason: str


@dataclass(frozen=True, slots=True)
class AlreadyMember:
    """Nothing to store but the newer roster."""

    reason: str


Adoption: TypeAlias = Replace | Ask | AlreadyMember


def decide_adoption(current: Belonging | None, offered: Belonging) -> Adoption:
    """Whether joining ``offered`` needs a question."""
    if current is None:
        return Replace(f'This machine had no namespace; it joins "{offered.name}".')
    if current.circle == offered.circle:
        if current.commitment == offered.commitment:
            return AlreadyMember(f'This machine is in "{offered.name}" already.')
        return Replace(f'"{offered.name}" has a new secret; this machine gets it.')
    if current.unused:
        return Replace(f'The private namespace gives way to "{offered.name}"; it was unused.')
    company = {0: "alone", 1: "with one other machine"}.get(
        current.others, f"with {current.others} other machines"
    )
    return Ask(f'This machine is in "{current.name}" {company}. Join "{offered.name}" instead?')
