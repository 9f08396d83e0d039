"""What a check says: the cause, what it is seen by, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Finding", "Severity"]


class Severity(enum.Enum):
    """How bad it is."""

    PROBLEM = "problem"  # nodes that should meet do not
    NOTE = "note"  # may be as it should be; good to know


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be, in words for a person."""

    check: str
    """Which check says so, in one word; stable, for programs."""
    cause: str
    """What is wrong: one sentence."""
    evidence: tuple[str, ...]
    """What was seen: sentences, at least one."""
    fix: str
    """What to do next."""
    severity: Severity = Severity.PROBLEM
