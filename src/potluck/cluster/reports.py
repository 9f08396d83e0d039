"""Reports: what a process tells an observer that asks; also how launchers compare notes.

Typed and bounded, like everything that travels.  The sentences are those of the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from potluck._version import Build
from potluck.membership.topology import Battery, ConnectionProfile, Medium
from potluck.wire_messages import pack, unpack

# --------------------------------------------------------------------------------------------------
# Journals: what a process tells an observer beyond how it is now.
#
# What has happened since the observer asked last, the views it was in, what it measured of its
# links, and what it has counted.  Typed and bounded: one journal fits one control message.

MAX_EVENTS = 64
"""Events in one journal; who has missed more asks again."""

MAX_EPOCHS = 32
"""Views in one journal: the latest."""

MAX_RANKS = 128
"""Members of which a journal speaks; of a larger view the first ones."""

MAX_NUMBERS = 256
"""Figures in one journal."""

MAX_BYTES = 60_000
"""Bytes of a journal: a control message has room for a few more."""

EPOCH_BYTES, FIGURE_BYTES = 20_000, 16_000
"""Of these, what views and figures may take; events have the rest."""
Figure = Annotated[float, msgspec.Meta(ge=-1e300, le=1e300)]  # neither NaN nor infinity


LineKind = TypeVar("LineKind")


class EventLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that happened, as the log of that process says it."""

    number: Count
    """Counts the events of one process, from 1."""
    time: Seconds
    """Seconds since 1970, by the clock of its machine."""
    text: Sentence
    level: Line = "info"


class EpochLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """A view that this process entered."""

    epoch: Count
    time: Seconds
    members: Annotated[list[Line], msgspec.Meta(max_length=MAX_RANKS)]
    """The processes, as node and incarnation with a slash between them, in rank order."""
    reason: Sentence = ""
    lineage: Line = ""


class Journal(msgspec.Struct, frozen=True, omit_defaults=True, tag="journal", kw_only=True):
    """What one process knows that is of interest to who looks on for longer."""

    node: Line
    incarnation: Count
    events: Annotated[list[EventLine], msgspec.Meta(max_length=MAX_EVENTS)] = []
    """Those with a higher number than was asked for, oldest first."""
    epochs: Annotated[list[EpochLine], msgspec.Meta(max_length=MAX_EPOCHS)] = []
    up: Count = 0
    """Bytes per second that it can send, as collectives saw it; 0 if they did not."""
    down: Count = 0
    latency: Annotated[list[Count], msgspec.Meta(max_length=MAX_RANKS)] = []
    """Nanoseconds of a short message to each rank of its view; 0 where it was not measured."""
    figures: Annotated[dict[Line, Figure], msgspec.Meta(max_length=MAX_NUMBERS)] = {}
    """What it has counted, by name."""

    @property
    def key(self) -> tuple[str, int]:
        """Which process it is about."""
        return self.node, self.incarnation


def bounded(journal: Journal) -> Journal:
    """The same, short enough to be sent: the latest views, and the first events.

    Later events are asked for next.  Each part has room of its own, so none crowds out another.
    """
    epochs = _fitting(journal.epochs[::-1], EPOCH_BYTES)[::-1]
    figures = journal.figures if _size(journal.figures) <= FIGURE_BYTES else {}
    rest = msgspec.structs.replace(journal, events=[], epochs=epochs, figures=figures)
    events = _fitting(journal.events, MAX_BYTES - len(pack(rest)))
    return msgspec.structs.replace(rest, events=events)


def _fitting(lines: Sequence[LineKind], room: int) -> list[LineKind]:
    """As many of the first lines as there is room for."""
    kept = []
    for line in lines:
        room -= _size(line)
        if room < 0:
            break
        kept.append(line)
    return kept


def _size(part: object) -> int:
    return len(msgspec.msgpack.encode(part))


# --------------------------------------------------------------------------------------------------

MAX_LINES = 128
"""Members and links that one report lists; of a larger cluster the first ones."""

_SENTENCE = 300  # characters of a reason that are told

Line = Annotated[str, msgspec.Meta(max_length=255)]
Sentence = Annotated[str, msgspec.Meta(max_length=1024)]
Count = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class StatusRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag="ask"):
    """Tell me how you are."""

    news_after: Count = -1
    """With a number from 0 on: and what happened after the event of this number."""


class ContinueRequest(msgspec.Struct, frozen=True, omit_defaults=True, tag="continue"):
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


class LinkLine(msgspec.Struct, frozen=True, array_like=True):
    """The link to a peer as the map of the one who reports has it; zero means: not measured."""

    latency: Count = 0
    """Nanoseconds of a short message, one way."""
    jitter: Count = 0
    loss: Share = 0.0
    timed: Seconds = 0.0
    """Seconds since latency and jitter were measured."""
    timed_by: Line = ""
    up: Count = 0
    """Bytes per second to the peer."""
    down: Count = 0
    rated: Seconds = 0.0
    """Seconds since the rates were measured."""
    rated_by: Line = ""
    is_local: bool = False
    """Both are on one machine."""
    interface: Line = ""
    """By which interface of the one who reports."""

    @classmethod
    def of(cls, link: ConnectionProfile, now: float) -> LinkLine:
        """A link of a map, at a moment of its clock."""
        is_rated = bool(link.up or link.down)
        return cls(
            latency=link.latency,
            jitter=link.jitter,
            loss=min(1.0, link.loss),
            timed=max(0.0, now - link.measured_at) if link.latency else 0.0,
            timed_by=link.measured_by.value if link.latency else "",
            up=link.up,
            down=link.down,
            rated=max(0.0, now - link.rated_at) if is_rated else 0.0,
            rated_by=link.rated_by.value if is_rated else "",
            is_local=link.is_local,
            interface=link.interface[:255],
        )


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
    link: LinkLine | None = None


class StatusReport(msgspec.Struct, frozen=True, omit_defaults=True, tag="report", kw_only=True):
    """How a process is, in its own words."""

    node: Line
    incarnation: Count
    name: Line = ""
    host: Line = ""
    port: Count = 0
    pid: Count = 0
    version: Line = ""
    protocol: Count = 0
    oldest: Count = 0
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
    medium: Medium | None = None
    """What connects its machine to the others; None where that is not known."""
    battery: Battery | None = None
    """Of its machine; None where there is none."""

    @property
    def build(self) -> Build | None:
        """What it runs; None if it does not say."""
        return Build.announced(self.version, max(self.protocol, bool(self.version)), self.oldest)

    @property
    def key(self) -> tuple[str, int]:
        """Which process it is about."""
        return self.node, self.incarnation


Said: TypeAlias = StatusRequest | StatusReport | Journal | ContinueRequest


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
