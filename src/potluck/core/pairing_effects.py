"""What the two pairing machines ask their driver to do, and the sentences people read.

Effects are carried out in the order they are given: a :class:`Paired` comes before the message
that tells the other side, so that what was agreed is on disk before anybody relies on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from potluck.core.cards import Card, clean_name
from potluck.core.pairing_messages import ROSTER_LIMIT, Refusal

__all__ = [
    "ANSWER_SECONDS",
    "BAD_SHARES",
    "CODE_SECONDS",
    "DECISION_SECONDS",
    "MAX_LINKS",
    "SENTENCES",
    "STEP_SECONDS",
    "TRIES",
    "Effect",
    "Ended",
    "HangUp",
    "Namespace",
    "Offered",
    "Paired",
    "RefuseError",
    "Send",
    "TryFailed",
]

TRIES = 3  # exchanges in which the host sent its share
BAD_SHARES = 64  # shares that are none, each of which takes milliseconds to find out
CODE_SECONDS = 300.0  # how long a code lives
STEP_SECONDS = 5.0  # for a machine to send its next message; one takes 20 ms of arithmetic
ANSWER_SECONDS = 120.0  # for a person to read the offer and answer
DECISION_SECONDS = 110.0  # the guest gives up first, so that it can still say so
MAX_LINKS = 8  # connections at a time that may wait for their turn

_SECRET_SIZE = 32  # bytes


@dataclass(frozen=True, slots=True)
class Namespace:
    """What a pairing hands over: a circle's name, its secret, and its roster as bytes."""

    name: str
    secret: bytes = field(repr=False)
    roster: bytes = field(repr=False)

    def __post_init__(self) -> None:
        if self.name != clean_name(self.name):
            msg = f"{self.name!r} cannot be shown as the name of a namespace"
            raise ValueError(msg)
        if len(self.secret) != _SECRET_SIZE:
            msg = f"A namespace's secret has {_SECRET_SIZE} bytes, not {len(self.secret)}"
            raise ValueError(msg)
        if len(self.roster) > ROSTER_LIMIT:
            msg = f"A roster of {len(self.roster)} bytes is too large; {ROSTER_LIMIT} are allowed"
            raise ValueError(msg)


@dataclass(frozen=True, slots=True)
class Send:
    """Send these bytes as one message (the guest has only link 0)."""

    message: bytes = field(repr=False)
    link: int = 0


@dataclass(frozen=True, slots=True)
class HangUp:
    """Close the connection once what was sent is out."""

    reason: str
    link: int = 0


@dataclass(frozen=True, slots=True)
class TryFailed:
    """A try of the code is used up; tell the person at the host."""

    reason: str
    tries_left: int


@dataclass(frozen=True, slots=True)
class Offered:
    """The guest holds a proved offer: decide, then call ``accept`` or ``decline``."""

    peer: Card
    namespace: Namespace


@dataclass(frozen=True, slots=True)
class Paired:
    """Done.  Store the namespace (its roster has both machines), then go on."""

    peer: Card
    namespace: Namespace
    reason: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Nothing comes of it.  ``retry``: the same code may be tried again without asking anybody."""

    reason: str
    retry: bool = False


Effect: TypeAlias = Send | HangUp | TryFailed | Offered | Paired | Ended


class RefuseError(Exception):
    """Ends an exchange: ``why`` goes to the other side, the text to the person here."""

    def __init__(self, why: Refusal, reason: str) -> None:
        super().__init__(reason)
        self.why = why


# What a refusal means to the side that receives it.
SENTENCES = MappingProxyType(
    {
        Refusal.BUSY: "The other machine is pairing with somebody else right now.",
        Refusal.CODE_DEAD: "The code is no longer valid; run `potluck pair` there for a new one.",
        Refusal.MALFORMED: "The other machine could not read our message; "
        "install the same version of potluck on both.",
        Refusal.SAME_MACHINE: "Both ends of this pairing are the same machine.",
        Refusal.TOO_SLOW: "The other machine waited too long for us and gave up.",
        Refusal.VERSION: "The other machine speaks another version of the pairing protocol; "
        "install the same version of potluck on both.",
        Refusal.WRONG_CODE: "The other machine did not accept the code; read it once more, "
        "or run `potluck pair` there for a new one.",
        Refusal.WRONG_IDENTITY: "The other machine could not check our identity.",
        Refusal.WRONG_SLOT: "The machine that answered shows another code; check the number.",
    }
)
