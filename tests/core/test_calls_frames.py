"""Frames say what follows, and what they say is checked before anything is allocated."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import RpcInvalidMessage, RpcTooLarge
from potluck.core.calls_encoding import RpcResponse, request_head
from potluck.core.calls_frames import (
    HEADER_SIZE,
    HELLO_SIZE,
    PIECE,
    FrameKind,
    Hello,
    Mark,
    pack_frame,
    read_frame,
    short_request,
    short_response,
)

LIMIT = 1 << 20


def test_a_header_byte_by_byte() -> None:
    """Kind, flags, zero, length, number, total, patience; little-endian."""
    header = pack_frame(
        FrameKind.REQUEST, 0x0A0B, 5, marks=Mark.MORE | Mark.TYPED, total=9, patience=300
    )
    assert header.hex(" ") == (
        "02 05 00 00 05 00 00 00 0b 0a 00 00 00 00 00 00 09 00 00 00 2c 01 00 00"
    )
    assert len(header) == HEADER_SIZE
    frame = read_frame(b"xx" + header, 2, LIMIT)
    assert frame == (FrameKind.REQUEST, 5, 5, 0x0A0B, 9, 300)
    assert read_frame(pack_frame(FrameKind.GOODBYE, 0, 0), 0, LIMIT).kind is FrameKind.GOODBYE


BAD = {
    "an unknown kind": pack_frame(77, 0, 1),
    "an unknown mark": pack_frame(FrameKind.REQUEST, 0, 1, marks=64),
    "something where zero must be": b"\x02\0\x01\0" + pack_frame(FrameKind.REQUEST, 0, 1)[4:],
    "a piece over the limit": pack_frame(
        FrameKind.REQUEST, 1, PIECE + 1, marks=Mark.MORE, total=PIECE + 2
    ),
    "more than the whole": pack_frame(FrameKind.REQUEST, 1, 6, marks=Mark.MORE, total=5),
    "less than the whole without a mark": pack_frame(FrameKind.RESPONSE, 1, 4, total=5),
    "nothing at all": pack_frame(FrameKind.RESPONSE, 1, 0),
    "an empty piece": pack_frame(FrameKind.REQUEST, 1, 0, marks=Mark.MORE, total=5),
    "a cancel with a body": pack_frame(FrameKind.CANCEL, 1, 3),
    "a hello of another size": pack_frame(FrameKind.HELLO, 1, HELLO_SIZE + 1),
    "half a hello": pack_frame(FrameKind.HELLO, 1, HELLO_SIZE, marks=Mark.LATER),
    "a goodbye that announces more": pack_frame(FrameKind.GOODBYE, 1, 0, total=3),
}


@pytest.mark.parametrize("header", BAD.values(), ids=BAD)
def test_a_header_that_cannot_be_is_refused(header: bytes) -> None:
    """Whoever writes it does not keep to the protocol."""
    with pytest.raises(RpcInvalidMessage):
        read_frame(header, 0, LIMIT)


def test_a_message_over_the_limit_is_refused() -> None:
    """By its first piece, however small that is."""
    with pytest.raises(RpcTooLarge, match=r"size 1048577 exceeds maximum allowed size 1048576"):
        read_frame(pack_frame(FrameKind.REQUEST, 1, 1, marks=Mark.MORE, total=LIMIT + 1), 0, LIMIT)


@given(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    """Nothing else is ever raised, and no length passes that is over the limit."""
    try:
        frame = read_frame(data, 0, LIMIT)
    except RpcInvalidMessage:
        return
    assert frame.length <= frame.total <= LIMIT


@given(st.integers(0, 2**64 - 1), st.binary(max_size=9), st.binary(), st.integers(0, 2**32 - 1))
def test_the_short_way_writes_the_same_bytes(
    number: int, name: bytes, payload: bytes, patience: int
) -> None:
    """As header and message do one after the other."""
    body = request_head(number, name, len(payload)) + payload
    header = pack_frame(FrameKind.REQUEST, number, len(body), marks=Mark.TYPED, patience=patience)
    assert short_request(number, name, payload, Mark.TYPED, patience) == header + body
    body = RpcResponse(number, payload).serialize()
    header = pack_frame(FrameKind.RESPONSE, number, len(body), marks=Mark.NESTED)
    assert short_response(number, payload, Mark.NESTED) == header + body


def test_a_hello_says_what_is_allowed() -> None:
    """And which protocol it is; somebody else's is refused, and one that allows nothing."""
    hello = Hello(16, 1 << 40, 1 << 30)
    assert Hello.unpack(hello.pack()) == hello
    assert len(hello.pack()) == HELLO_SIZE
    with pytest.raises(RpcInvalidMessage, match="another protocol"):
        Hello.unpack(b"other" + hello.pack()[5:])
    with pytest.raises(RpcInvalidMessage, match="no call at all"):
        Hello.unpack(hello._replace(calls=0).pack())
