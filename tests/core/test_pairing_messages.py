"""Pairing messages: typed and bounded, and nothing a stranger sends gets further."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.core.pairing_messages import (
    PUBLIC_LIMIT,
    SEALED_LIMIT,
    Accept,
    Admitted,
    Confirm,
    Decline,
    Hello,
    Message,
    Offer,
    Refusal,
    Refused,
    Reply,
    Sealed,
    Secret,
    decode,
    decode_secret,
    encode,
)
from potluck.errors import MalformedFrame
from potluck.vocabulary import NodeId

ID = NodeId("a" * 32)
PUBLIC: list[Message] = [
    Hello(1, 7, ID, "laptop", bytes(33)),
    Reply(ID, "desktop", bytes(33)),
    Confirm(bytes(32)),
    Sealed(b"box"),
    Refused(Refusal.BUSY),
]
SECRET: list[Secret] = [
    Offer("home", bytes(32), b"roster", bytes(32), bytes(64)),
    Accept(ID, bytes(32), bytes(64)),
    Decline(),
    Admitted(b"roster"),
]


def kind(message: object) -> str:
    """For the names of the cases."""
    return type(message).__name__


@pytest.mark.parametrize("message", PUBLIC, ids=kind)
def test_public_messages_survive_the_trip(message: Message) -> None:
    """What was encoded is what is decoded, and it is small."""
    assert decode(encode(message), 512) == message


@pytest.mark.parametrize("message", SECRET, ids=kind)
def test_sealed_messages_survive_the_trip(message: Secret) -> None:
    """What was encoded is what is decoded."""
    assert decode_secret(encode(message)) == message


@pytest.mark.parametrize("message", SECRET, ids=kind)
def test_what_belongs_under_a_seal_is_refused_outside(message: Secret) -> None:
    """And the other way round."""
    with pytest.raises(MalformedFrame, match="does not speak"):
        decode(encode(message), PUBLIC_LIMIT)
    with pytest.raises(MalformedFrame, match="does not speak"):
        decode_secret(encode(Confirm(bytes(32))))


def test_the_size_is_checked_before_anything_is_decoded() -> None:
    """A message one byte too long is not looked at."""
    box = encode(Sealed(bytes(SEALED_LIMIT)))
    with pytest.raises(MalformedFrame, match="at most 65536"):
        decode(box, SEALED_LIMIT)
    with pytest.raises(MalformedFrame, match="at most 4096"):
        decode(bytes(PUBLIC_LIMIT + 1), PUBLIC_LIMIT)


@pytest.mark.parametrize(
    "message",
    [
        Hello(1, -1, ID, "laptop", bytes(33)),
        Hello(1, 7, NodeId("A" * 32), "laptop", bytes(33)),
        Hello(1, 7, ID, "laptop", bytes(32)),
        Hello(1, 7, ID, "x" * 65, bytes(33)),
        Hello(1, 7, ID, "", bytes(33)),
        Reply(ID, "\x1b[31mred", bytes(33)),
        Reply(ID, " spaced ", bytes(33)),
        Confirm(bytes(31)),
    ],
    ids=repr,
)
def test_fields_out_of_bounds_are_refused(message: Message) -> None:
    """Ids, names, shares and proofs have one form."""
    with pytest.raises(MalformedFrame):
        decode(encode(message), PUBLIC_LIMIT)


def test_unknown_fields_and_words_are_refused() -> None:
    """There is one way to say each thing."""
    for extra in ({"kind": "confirm", "proof": bytes(32), "x": 1}, {"kind": "refused", "why": "x"}):
        with pytest.raises(MalformedFrame, match="does not speak"):
            decode(msgspec.msgpack.encode(extra), PUBLIC_LIMIT)


def test_an_offer_does_not_show_its_secret() -> None:
    """Its text is fit for a log."""
    assert repr(SECRET[0]) == "Offer(namespace='home')"


@given(st.binary(max_size=300))
def test_any_bytes_are_a_message_or_a_malformed_frame(data: bytes) -> None:
    """No other error escapes."""
    with contextlib.suppress(MalformedFrame):
        decode(data, PUBLIC_LIMIT)
    with contextlib.suppress(MalformedFrame):
        decode_secret(data)


def test_deeply_nested_bytes_are_refused_without_harm() -> None:
    """A thousand arrays inside each other do not exhaust the stack."""
    nested = b"\x82\xa4kind\xa7confirm\xa5proof" + b"\x91" * 3000 + b"\xc0"
    with pytest.raises(MalformedFrame):
        decode(nested, PUBLIC_LIMIT)
    with pytest.raises(MalformedFrame):
        decode(b"\x81\xa1x" + b"\x91" * 3000 + b"\xc0", PUBLIC_LIMIT)
