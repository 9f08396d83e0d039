"""Reports: what a process tells an observer that asks; also how launchers compare notes.

Typed and bounded, like everything that travels.  The sentences are those of the log.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, TypeAlias

import msgspec

from potluck.messages import pack, unpack
from potluck.runtime.observing_journal import Journal

__all__ = [
    "MAX_LINES",
    "Ask",
    "Continue",
    "HealthLine",
    "MemberLine",
    "MissingLine",
    "Report",
    "bounded_facts",
    "read_said",
    "sentence",
    "software_version",
    "write",
]

MAX_LINES = 128
"""Members and links that one report lists; of a larger cluster the first ones."""

_SENTENCE = 300  # characters of a reason that are told

Line = Annotated[str, msgspec.Meta(max_length=255)]
Sentence = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]


class Ask(msgspec.Struct, frozen=True, omit_defaults=True, tag="ask"):
    """Tell me how you are."""

    news_after: Count = -1
    """With a number from 0 on: and what happened after the event of this number."""


class Continue(msgspec.Struct, frozen=True, omit_defaults=True, tag="continue"):
    """A person asks: do not wait for the machines that are missing."""

    job: Line


class MissingLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member of the last view that is waited for."""

    node: Line
    incarnation: Count
    name: Line = ""
    silence: Seconds = 0.0
    """Seconds since it was last heard."""


class MemberLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A member of the view, in rank order."""

    node: Line
    incarnation: Count
    name: Line = ""


class HealthLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A peer as the one who reports sees it: the link to it, and how it is."""

    node: Line
    incarnation: Count
    name: Line = ""
    status: Line = ""
    reason: Sentence = ""
    round_trip: Seconds | None = None
    silence: Seconds | None = None
    address: Line = ""


class Report(msgspec.Struct, frozen=True, omit_defaults=True, tag="report", kw_only=True):
    """How a process is, in its own words."""

    node: Line
    incarnation: Count
    name: Line = ""
    host: Line = ""
    port: Count = 0
    pid: Count = 0
    version: Line = ""
    role: Line = "member"
    job: Line = ""
    state: Line = ""
    reason: Sentence = ""
    lineage: Line = ""
    epoch: Count = 0
    rank: Count = -1
    members: Annotated[list[MemberLine], msgspec.Meta(max_length=MAX_LINES)] = []
    peers: Annotated[list[HealthLine], msgspec.Meta(max_length=MAX_LINES)] = []
    missing: Annotated[list[MissingLine], msgspec.Meta(max_length=MAX_LINES)] = []
    """Whom it waits for before it can continue."""
    facts: Annotated[dict[Line, Sentence], msgspec.Meta(max_length=32)] = {}
    """What a launcher compares: script, arguments, versions."""

    @property
    def key(self) -> tuple[str, int]:
        """Which process it is about."""
        return self.node, self.incarnation


Said: TypeAlias = Ask | Report | Journal | Continue


def write(message: Said) -> bytes:
    """As bytes."""
    return pack(message)


def read_said(data: bytes) -> Said:
    """From the bytes of a peer; raises ``MalformedFrame``."""
    said: Said = unpack(data, Said)  # type: ignore[arg-type]
    return said


def sentence(text: str) -> str:
    """A text short enough to be told."""
    return text if len(text) <= _SENTENCE else text[: _SENTENCE - 1] + "…"


def bounded_facts(facts: Mapping[str, str]) -> dict[str, str]:
    """Facts short enough to be told."""
    return {key[:255]: sentence(value) for key, value in list(facts.items())[:32]}


def software_version() -> str:
    """Of this package, which is loaded, or nobody would ask."""
    return str(getattr(sys.modules.get("potluck"), "__version__", ""))
