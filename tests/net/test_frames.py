"""Frame headers: every legal one comes back, everything else is refused before it costs a byte."""

from __future__ import annotations

import re
import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck._version import Build
from potluck.errors import MalformedFrame
from potluck.net.frames import (
    HEADER_SIZE,
    LAYOUT,
    MAX_CONTROL,
    MAX_PIECE,
    OPENING,
    FrameType,
    Header,
    build_of,
    decode,
    encode,
    encode_opening,
)

MAX_EAGER = 1 << 15
LIMITS = dict.fromkeys(FrameType, MAX_CONTROL) | {
    FrameType.DATA: MAX_PIECE,
    FrameType.COLLECTIVE: MAX_PIECE,
    FrameType.EAGER: MAX_EAGER,
}
u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@st.composite
def headers(draw: st.DrawFn) -> Header:
    """Any header that may be sent."""
    kind = draw(st.sampled_from(FrameType))
    length = draw(st.integers(0, LIMITS[kind]))
    return Header(kind, draw(u64), draw(u32), draw(u32), draw(u64), draw(u32), length)


def packed(header: Header) -> bytes:
    """A header as bytes."""
    fields = header._asdict()
    return encode(fields.pop("kind"), **fields)


@given(headers(), st.binary(max_size=64), st.sampled_from([bytes, bytearray, memoryview]))
def test_every_header_comes_back(header: Header, before: bytes, holder: type) -> None:
    """Wherever in whatever buffer it lies, and whatever follows."""
    data = packed(header)
    assert len(data) == HEADER_SIZE
    assert decode(holder(before + data + b"payload"), len(before), MAX_EAGER) == header


def test_the_layout_is_the_one_in_the_picture() -> None:
    """Little-endian, at fixed places: other versions and other languages rely on it."""
    data = encode(FrameType.DATA, group=1, epoch=2, tag=3, operation=4, piece=5, length=6)
    assert HEADER_SIZE == 36
    assert data[:2] == b"PL"
    assert data[2:4] == bytes([LAYOUT, 20])
    assert struct.unpack_from("<Q", data, 4) == (1,)
    assert struct.unpack_from("<II", data, 12) == (2, 3)
    assert struct.unpack_from("<Q", data, 20) == (4,)
    assert struct.unpack_from("<II", data, 28) == (5, 6)


def test_the_numbers_of_the_kinds_stay() -> None:
    """They are on the wire; a new kind gets a new number."""
    assert {kind.name: int(kind) for kind in FrameType} == {
        "HELLO": 1,
        "WELCOME": 2,
        "REFUSAL": 3,
        "ROSTER": 4,
        "EAGER": 16,
        "OFFER": 17,
        "GRANT": 18,
        "DISCARD": 19,
        "DATA": 20,
        "WITHDRAW": 21,
        "CREDIT": 22,
        "TOKEN": 32,
        "ARRIVED": 33,
        "BROKEN": 34,
        "GOODBYE": 48,
        "COLLECTIVE": 64,
        "CONTROL": 80,
    }


headlike = st.tuples(st.just(b"PL\x01"), st.binary(min_size=33, max_size=33)).map(b"".join)


@given(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE) | headlike)
@example(bytes(HEADER_SIZE))
@example(b"\xff" * HEADER_SIZE)
def test_any_bytes_are_a_legal_header_or_malformed(data: bytes) -> None:
    """No other error, and no field that a header could not have."""
    try:
        header = decode(data, 0, MAX_EAGER)
    except MalformedFrame:
        return
    assert header.length <= LIMITS[header.kind]
    layout = data[2:3] if header.kind in OPENING else bytes([LAYOUT])
    assert packed(header) == data[:2] + bytes([LAYOUT]) + data[3:]
    assert data[2:3] == layout


@given(headers(), st.integers(0, 4 * 8 - 1))
def test_one_flipped_bit_in_magic_version_or_kind_is_noticed(header: Header, bit: int) -> None:
    """Or it names another legal kind; it is never the same header."""
    damaged = bytearray(packed(header))
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        decoded = decode(damaged, 0, MAX_EAGER)
    except MalformedFrame:
        return
    is_layout = bit // 8 == 2  # which does not matter where every version is understood
    assert decoded.kind != header.kind or (is_layout and header.kind in OPENING)


@pytest.mark.parametrize("kind", FrameType)
def test_every_kind_has_its_limit(kind: FrameType) -> None:
    """The largest length passes, one byte more does not, nor does the largest number."""
    limit = LIMITS[kind]
    assert decode(encode(kind, length=limit), 0, MAX_EAGER).length == limit
    for length in (limit + 1, 2**32 - 1):
        with pytest.raises(MalformedFrame, match=f"{kind.name} frame of {length} bytes") as caught:
            decode(encode(kind, length=length), 0, MAX_EAGER)
        assert (caught.value.expected, caught.value.got) == (limit, length)


def test_a_stranger_of_another_protocol_is_told_apart() -> None:
    """The error shows what came, and guesses right."""
    with pytest.raises(MalformedFrame, match="Something other than Potluck") as caught:
        decode(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n   ", 0, MAX_EAGER)
    assert caught.value.got == b"GE"


def test_an_unknown_kind_is_named() -> None:
    """By its number: it has no name here."""
    data = bytearray(encode(FrameType.GRANT))
    data[3] = 99
    with pytest.raises(MalformedFrame, match="Frame kind 99 is not known"):
        decode(data, 0, MAX_EAGER)


others = st.integers(0, 255).filter(lambda layout: layout != LAYOUT)


@given(others, st.sampled_from(sorted(OPENING)))
def test_what_opens_a_connection_is_read_in_every_layout(layout: int, kind: FrameType) -> None:
    """So two builds that cannot work together can say so."""
    data = bytearray(encode_opening(kind, piece=0, length=9, build=Build("3.2.1", 8, 7)))
    data[2] = layout
    header = decode(data, 0, MAX_EAGER)
    assert (header.kind, header.length, build_of(header)) == (kind, 9, Build("3.2.1", 8, 7))


@given(others, st.sampled_from(sorted(set(FrameType) - OPENING)))
def test_other_frames_of_another_layout_are_refused(layout: int, kind: FrameType) -> None:
    """Their other fields may mean something else."""
    data = bytearray(encode(kind))
    data[2] = layout
    with pytest.raises(MalformedFrame, match="layout") as caught:
        decode(data, 0, MAX_EAGER)
    assert (caught.value.expected, caught.value.got) == (LAYOUT, layout)


@given(headers())
def test_any_header_says_something_about_a_build(header: Header) -> None:
    """Whatever a stranger sends: a range that is one, and a version made of three numbers."""
    build = build_of(header)
    assert 1 <= build.oldest <= build.protocol
    assert build.potluck == "" or re.fullmatch(r"\d+\.\d+\.\d+", build.potluck)
