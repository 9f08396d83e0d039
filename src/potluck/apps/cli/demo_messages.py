"""What the demo's processes tell each other: orders to a rank, news from it, one JSON line each."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

__all__ = [
    "Failed",
    "Finished",
    "Form",
    "Leave",
    "Lost",
    "Meeting",
    "News",
    "Order",
    "Progress",
    "decode_news",
    "decode_order",
    "encode_line",
]


class Form(msgspec.Struct, frozen=True, tag=True):
    """Order: form a group and train in it."""

    rank: int
    world_size: int
    master: str | None = None
    """Where rank 0 listens; None for rank 0 itself, which chooses a port and tells."""
    source: int = 0
    """The rank whose state everybody takes over."""
    step: int = 0
    """How many steps that state has seen."""
    seconds: float | None = None
    """How long to train; None is until somebody is lost."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Order: it is over."""


class Meeting(msgspec.Struct, frozen=True, tag=True):
    """News of rank 0: the others find me here."""

    master: str


class Progress(msgspec.Struct, frozen=True, tag=True):
    """News: training goes on."""

    step: int
    loss: float
    """The mean loss over all ranks' points."""
    own_loss: float
    """The mean loss over this rank's points."""
    sent: int
    """Bytes sent since the process began."""
    messages: int
    """Messages sent since the process began."""
    message_rate: float
    """Messages sent per second, since the last news."""
    byte_rate: float
    """Bytes sent per second, since the last news."""


class Lost(msgspec.Struct, frozen=True, tag=True):
    """News: a peer is gone."""

    rank: int
    text: str
    """The error as a user sees it."""
    at: float
    """When it was raised, on the machine's monotonic clock."""
    step: int
    """Steps this rank has applied."""


class Finished(msgspec.Struct, frozen=True, tag=True):
    """News: training is done."""

    step: int
    loss: float
    accuracy: float
    fingerprint: str
    """A hash of the parameters: equal only if every bit is."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """News: something went wrong that no demo expects."""

    text: str


Order: TypeAlias = Form | Leave
News: TypeAlias = Meeting | Progress | Lost | Finished | Failed

_orders: msgspec.json.Decoder[Order] = msgspec.json.Decoder(Order)
_news: msgspec.json.Decoder[News] = msgspec.json.Decoder(News)


def encode_line(message: Order | News) -> bytes:
    r"""A message as a line.

    >>> encode_line(Leave())
    b'{"type":"Leave"}\n'
    """
    return msgspec.json.encode(message) + b"\n"


def decode_order(line: bytes) -> Order:
    """The order in a line.

    >>> decode_order(b'{"type":"Leave"}')
    Leave()
    """
    return _orders.decode(line)


def decode_news(line: bytes) -> News:
    """The news in a line.

    >>> decode_news(b'{"type":"Meeting","master":"127.0.0.1:29500"}').master
    '127.0.0.1:29500'
    """
    return _news.decode(line)
