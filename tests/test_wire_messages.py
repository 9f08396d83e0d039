"""Messages on the wire: they come back as they were sent, or not at all."""

from __future__ import annotations

import math
import tracemalloc

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from potluck.errors import MalformedFrame
from potluck.net.frames import MAX_CONTROL
from potluck.trust.roster import MAX_BYTES
from potluck.wire_messages import (
    ControlReply,
    ControlRequest,
    Hello,
    Introduction,
    Join,
    OpenReply,
    OpenRequest,
    RankEndpoint,
    Sync,
    Table,
    Told,
    pack,
    unpack,
)

texts = st.text(st.characters().filter(str.isprintable), max_size=255)
ranks = st.integers(0, 2**31 - 1)
sessions = st.binary(min_size=16, max_size=16)
peers = st.builds(
    RankEndpoint, hosts=st.lists(texts, max_size=16), port=st.integers(1, 65535), name=texts
)
tags = st.text("abc", max_size=32)
counts = st.integers(0, (1 << 62) - 1)
introductions = st.builds(
    Introduction, st.binary(max_size=32), tags, tags, slot=counts, incarnation=counts
)
joins = st.builds(
    Join,
    rank=ranks,
    world_size=ranks,
    peer=peers,
    patience=st.floats(0, math.inf),
    introduction=introductions,
)
lanes = st.builds(
    OpenRequest, session=sessions, rank=ranks, to=ranks, purpose=texts, introduction=introductions
)
syncs = st.builds(Sync, introduction=introductions)
cards = st.binary(max_size=100)
controls = st.builds(ControlRequest, job=texts, card=cards, introduction=introductions) | st.builds(
    ControlReply, job=texts, card=cards, introduction=introductions
)
tables = st.builds(Table, session=sessions, peers=st.lists(peers, max_size=4))
messages = st.one_of(joins, lanes, tables, syncs, controls, st.builds(OpenReply, rank=ranks))
KINDS: list[type[msgspec.Struct]] = [
    Join,
    Table,
    OpenRequest,
    OpenReply,
    Sync,
    ControlRequest,
    ControlReply,
]

HERE = RankEndpoint(hosts=["10.0.0.5"], port=29500, name="desk")
SESSION = bytes(16)


@given(messages)
def test_a_message_comes_back_as_it_was_sent(message: msgspec.Struct) -> None:
    """Every legal message survives the wire unchanged."""
    assert unpack(pack(message), type(message)) == message


@given(messages)
def test_a_message_is_not_taken_for_another(message: msgspec.Struct) -> None:
    """The kind travels with it: a Lane where a Join is due is malformed, not misread."""
    for kind in KINDS:
        if not isinstance(message, kind):
            with pytest.raises(MalformedFrame):
                unpack(pack(message), kind)


@given(joins | lanes)
def test_either_of_two_kinds_can_be_awaited(message: msgspec.Struct) -> None:
    """A listener takes those who join and those who connect."""
    assert unpack(pack(message), Join | OpenRequest) == message  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (Join(rank=-1, world_size=2, peer=HERE), Join),
        (Join(rank=2**31, world_size=2, peer=HERE), Join),
        (Join(rank=1, world_size=-2, peer=HERE), Join),
        (Join(rank=1, world_size=2, peer=HERE, patience=-1.0), Join),
        (Join(rank=1, world_size=2, peer=HERE, patience=math.nan), Join),
        (Join(rank=1, world_size=2, peer=RankEndpoint(["h"] * 17, 29500, "desk")), Join),
        (Join(rank=1, world_size=2, peer=RankEndpoint(["h" * 256], 29500, "desk")), Join),
        (Join(rank=1, world_size=2, peer=RankEndpoint(["h"], 0, "desk")), Join),
        (Join(rank=1, world_size=2, peer=RankEndpoint(["h"], 65536, "desk")), Join),
        (Join(rank=1, world_size=2, peer=RankEndpoint(["h"], 29500, "d" * 256)), Join),
        (Table(session=bytes(15), peers=[]), Table),
        (Table(session=bytes(17), peers=[]), Table),
        (OpenRequest(session=b"", rank=1, to=0), OpenRequest),
        (OpenRequest(session=SESSION, rank=1, to=2**31), OpenRequest),
        (OpenRequest(session=SESSION, rank=1, to=0, purpose="p" * 256), OpenRequest),
        (OpenReply(rank=-1), OpenReply),
        (ControlRequest(job="j" * 256), ControlRequest),
        (ControlRequest(job="", card=bytes((16 << 10) + 1)), ControlRequest),
        (ControlReply(job="", card=bytes((16 << 10) + 1)), ControlReply),
    ],
)
def test_a_value_out_of_bounds_is_refused(
    message: msgspec.Struct, kind: type[msgspec.Struct]
) -> None:
    """Ranks, ports, sessions, names and lists have limits, checked while decoding."""
    with pytest.raises(MalformedFrame, match="cannot be understood"):
        unpack(pack(message), kind)


def test_what_is_missing_or_too_much_is_refused() -> None:
    """Half a message, a message with something behind it, and a field of another type."""
    whole = pack(OpenReply(rank=3))
    for data in (b"", whole[:-1], whole + b"\0", whole.replace(b"\x03", b"\xa1x")):
        with pytest.raises(MalformedFrame):
            unpack(data, OpenReply)


def test_an_unknown_field_is_ignored() -> None:
    """A later release may say more."""
    data = msgspec.msgpack.encode({"type": "opened", "rank": 3, "colour": ["red"]})
    assert unpack(data, OpenReply) == OpenReply(rank=3)


def nested(opening: bytes) -> bytes:
    """A hello whose unknown field opens as many brackets as one frame can hold."""
    start = b"\x82\xa4type\xa4join\xa4evil"
    return start + opening * (MAX_CONTROL - len(start))


@given(st.lists(st.integers(0, 16), max_size=60), st.sampled_from([1, 100, 1 << 15]))
def test_a_table_is_sent_in_parts_that_fit_a_frame(counts: list[int], limit: int) -> None:
    """However many ranks there are, and however many addresses each has."""
    peers = [
        RankEndpoint(hosts=["\U0001f372" * 255] * count, port=1, name="node") for count in counts
    ]
    parts = list(Table(bytes(16), peers).parts(limit))
    assert [peer for part in parts for peer in part.peers] == peers
    assert all(len(pack(part)) <= MAX_CONTROL for part in parts)
    assert all(part.peers for part in parts) or not peers


@pytest.mark.parametrize("opening", [b"\x91", b"\x81", b"\xdc\x00\x01", b"\xc1"])
def test_depth_exhausts_nothing(opening: bytes) -> None:
    """Brackets within brackets are malformed, not a stack overflow."""
    with pytest.raises(MalformedFrame):
        unpack(nested(opening)[:MAX_CONTROL], Join)


@pytest.mark.parametrize(
    "data",
    [
        b"\x82\xa4type\xa5table\xa5peers\xdd\xff\xff\xff\xff",  # a list of 2**32 - 1
        b"\x82\xa4type\xa5table\xa5peers\xdd\x07\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\xa4type\xa5table",  # a map
        b"\x82\xa4type\xa5table\xa7session\xc6\xff\xff\xff\xff",  # bytes
        b"\x81\xa4type\xdb\xff\xff\xff\xff",  # text
    ],
)
def test_a_promised_size_allocates_nothing(data: bytes) -> None:
    """Four bytes that announce four billion cost nothing until those have come."""
    tracemalloc.start()
    try:
        with pytest.raises(MalformedFrame):
            unpack(data, Table)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


mutated = st.builds(
    lambda message, cut, insert, keep: (
        (data := pack(message))[: cut % len(data)] + insert + data[cut % len(data) + keep :]
    ),
    messages,
    st.integers(0, 10_000),
    st.binary(max_size=8),
    st.integers(0, 8),
)
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | texts
    | st.binary(max_size=32),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(texts | st.integers(0, 9), inner, max_size=4)
    ),
)
plausible = st.builds(
    msgspec.msgpack.encode,
    st.dictionaries(
        st.sampled_from(
            ["type", "rank", "world_size", "peer", "patience", "session", "peers", "to"]
        ),
        st.sampled_from(["join", "table", "lane", "opened"]) | values,
    ),
)


@given(data=st.binary(max_size=256) | mutated | plausible, kind=st.sampled_from(KINDS))
@example(data=nested(b"\x91"), kind=Join)
@example(data=b"\x82\xa4type\xa6opened\xa4rank\xa1\xff", kind=OpenReply)
def test_hostile_bytes_are_malformed_or_a_legal_message(
    data: bytes, kind: type[msgspec.Struct]
) -> None:
    """Nothing that comes from outside raises anything else, or slips past the bounds."""
    try:
        message = unpack(data, kind)
    except MalformedFrame:
        return
    assert unpack(pack(message), kind) == message


@given(joins | lanes | syncs)
def test_a_hello_is_understood_without_knowing_its_kind(message: msgspec.Struct) -> None:
    """Whoever is called learns from the hello what it is for."""
    assert unpack(pack(message), Hello) == message  # type: ignore[arg-type]


def test_the_longest_roster_fits_into_one_frame() -> None:
    """With the secret; and one byte more is refused before anything is read from it."""
    longest = Told(bytes(MAX_BYTES), bytes(32))
    assert len(pack(longest)) < MAX_CONTROL
    assert unpack(pack(longest), Told) == longest
    for told in (Told(bytes(MAX_BYTES + 1)), Told(secret=bytes(33))):
        with pytest.raises(MalformedFrame):
            unpack(pack(told), Told)
