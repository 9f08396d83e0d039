"""What the demo and its nodes tell each other: orders to a node, news from it, one JSON line each.

Times are seconds on the machine's monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from potluck._decode import Reader, json_reader

# --- orders ---


class Setup(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Order: this is who you are and what is done; the first one."""

    name: str
    secret: str
    """Of the namespace, in hexadecimal digits: never in an argument or a variable."""
    nodes: int
    seed: int
    steps: int
    """After so many steps training may end."""
    pace: float
    """Seconds that a step takes at least, so that people can watch."""
    multicast: bool = True
    peers: list[str] = []
    """Addresses to try, where multicast does not work."""


class Meet(msgspec.Struct, frozen=True, tag=True):
    """Order: nobody is found here; these are the addresses of all nodes."""

    peers: list[str]


class Finish(msgspec.Struct, frozen=True, tag=True):
    """Order: nothing more will happen; end after the last step."""


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Order: it is over."""


# --- news ---


class Listening(msgspec.Struct, frozen=True, tag=True):
    """News: I can be reached."""

    process: str
    port: int


class Unfound(msgspec.Struct, frozen=True, tag=True):
    """News: the others cannot be found, and why."""

    text: str


class Begun(msgspec.Struct, frozen=True, tag=True):
    """News: I am in a view and have the state."""

    epoch: int
    step: int
    """Steps that were behind the others when I came."""
    received: int
    """Bytes of the state that came from others."""
    syncing: float
    """Seconds that getting the state took."""
    at: float


class LinkLine(msgspec.Struct, frozen=True):
    """A peer as a node sees it."""

    process: str
    status: str
    reason: str
    round_trip: float | None = None


class Progress(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """News: training goes on."""

    run: str
    step: int
    loss: float
    """The mean loss over the batch of all nodes."""
    epoch: int
    rank: int
    share: int
    """Samples of the last batch that were this node's."""
    averaged: int
    """Bytes of the arrays that went through collectives so far."""
    rate: float = 0.0
    """Bytes per second at which gradients are averaged, waiting for the others included."""
    speed: float
    """Steps per second, since the last news."""
    up: int = 0
    down: int = 0
    """Bytes per second that this node can send and receive, as collectives saw it; or 0."""
    is_limit: bool = False
    """Whether the link allows no more; within one machine nothing is measured, nor a limit."""
    links: list[LinkLine] = []


class Happened(msgspec.Struct, frozen=True, tag=True):
    """News: an event of the cluster, in its own words."""

    kind: str
    sentence: str
    about: str
    """The process it is about, or nothing."""
    epoch: int
    """The view it brought, or 0."""
    at: float


class Committed(msgspec.Struct, frozen=True, tag=True):
    """News: the first step of a view is committed."""

    step: int
    epoch: int
    members: int
    at: float


class Finished(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """News: a run is done."""

    run: str
    step: int
    loss: float
    """Over all points, with the parameters at the end."""
    wobble: float
    """How far apart the losses of the last batches were."""
    accuracy: float
    """On points that were not trained on."""
    fingerprint: str
    samples: float
    """How many have counted, all epochs together, by the sampler's account."""
    weight: float
    """The same by adding up steps, for a node that was there from the first one; else 0."""
    averaged: int
    seconds: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """News: something went wrong that no demo expects."""

    text: str
    trace: str = ""


Order: TypeAlias = Setup | Meet | Finish | Leave
News: TypeAlias = Listening | Unfound | Begun | Progress | Happened | Committed | Finished | Failed

_orders: Reader[Order] = json_reader(Order)
_news: Reader[News] = json_reader(News)


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

    >>> decode_news(b'{"type":"Listening","process":"abc/1","port":52416}').port
    52416
    """
    return _news.decode(line)
