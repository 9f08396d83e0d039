"""Python's own values survive the way through bytes; nothing else does."""

import contextlib
import datetime as dt
import decimal
import enum
import math
import uuid
from collections import OrderedDict, namedtuple
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame, _values
from potluck._decode import MAX_DEPTH
from potluck._values import decode, encode
from support.identifiers import shown

ZONES = st.none() | st.timedeltas(
    min_value=dt.timedelta(hours=-23), max_value=dt.timedelta(hours=23)
).map(lambda delta: dt.timezone(dt.timedelta(seconds=delta // dt.timedelta(seconds=1))))
HASHABLE = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(1 << 300), max_value=1 << 300)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.datetimes(timezones=ZONES)
    | st.dates()
    | st.times(timezones=ZONES)
    | st.timedeltas()
    | st.decimals(allow_nan=False)
    | st.uuids()
)
KEYS = st.recursive(
    HASHABLE, lambda inner: st.lists(inner).map(tuple) | st.frozensets(inner), max_leaves=5
)
VALUES = st.recursive(
    KEYS | st.binary().map(bytearray),
    lambda inner: (
        st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner) | st.sets(KEYS)
    ),
    max_leaves=20,
)


def shape_of(value: Any) -> Any:
    """The types of a value and of what is in it."""
    if isinstance(value, dict):
        return dict, [(shape_of(key), shape_of(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape_of(each) for each in value]
    return type(value)


@given(VALUES)
def test_every_value_comes_back_as_it_was(value: Any) -> None:
    """Equal, of the same types, with dicts in the same order."""
    back = decode(encode(value))
    assert back == value
    assert shape_of(back) == shape_of(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.0])
def test_unusual_floats_come_back(value: float) -> None:
    """Bit by bit, NaN included."""
    assert np.float64(decode(encode(value))).tobytes() == np.float64(value).tobytes()


@pytest.mark.parametrize("size", [63, 64, 65, 4096])
def test_integers_have_any_size(size: int) -> None:
    """On both sides of every limit of the format."""
    for value in ((1 << size) - 1, 1 << size, -(1 << size), -(1 << size) - 1):
        assert decode(encode(value)) == value


class Colour(enum.IntEnum):
    """A number with a name."""

    RED = 1


class Note(msgspec.Struct):
    """A message of msgspec, which it would write down as a dict."""

    text: str = ""


Point = namedtuple("Point", "x y")  # noqa: PYI024 - the very thing that must not be lost


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Colour.RED,
        Note(),
        Point(1, 2),
        OrderedDict(a=1),
        np.float64(1.5),
        np.zeros(2),
        {"deep": [1, {2: lambda: None}]},
        {(1, Colour.RED): 0},
        range(3),
        ValueError("no"),
        memoryview(b"12"),
        Colour,
        ...,
    ],
    ids=shown,
)
def test_other_types_are_refused_by_name(value: Any) -> None:
    """Also where a lenient encoder would let them pass as something else."""
    with pytest.raises(TypeError, match="cannot be sent as an object"):
        encode(value)


def test_arrays_are_pointed_to_the_other_door() -> None:
    """The sentence says how arrays travel."""
    with pytest.raises(TypeError, match="all_gather or broadcast"):
        encode([np.zeros(2)])


def test_text_that_is_no_unicode_is_refused() -> None:
    """Half of a surrogate pair cannot be encoded."""
    with pytest.raises(ValueError, match="cannot be encoded"):
        encode("\ud800")


def test_a_small_value_with_endless_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty lists of the same list twice are 2^60 lists, and no machine could write them."""
    monkeypatch.setattr(_values, "MAX_CONTAINERS", 10_000)
    value: list[Any] = [1]
    for _ in range(60):
        value = [value, value]
    with pytest.raises(ValueError, match="more than 10,000 containers"):
        encode(value)
    assert len(decode(encode([[]] * 9_999))) == 9_999


def test_depth_has_a_limit() -> None:
    """A list that holds itself is an error, not the end of the process."""
    deep: list[Any] = []
    for _ in range(MAX_DEPTH - 1):
        deep = [deep]
    assert decode(encode(deep)) == deep
    with pytest.raises(ValueError, match="nested"):
        encode([deep])
    deep.append(deep)
    with pytest.raises(ValueError, match="nested"):
        encode(deep)


@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_value_or_an_error(data: bytes) -> None:
    """Nothing but our own error leaves the decoder."""
    try:
        value = decode(data)
    except MalformedFrame:
        return
    assert decode(encode(value)) == value or value != value  # noqa: PLR0124 - NaN


RAW = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 30) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=12,
)


@given(RAW)
def test_what_no_sender_writes_is_a_value_or_an_error(raw: Any) -> None:
    """Well-formed MessagePack with wrong contents does no harm either."""
    with contextlib.suppress(MalformedFrame):
        decode(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize(
    "raw",
    [
        {},
        [],
        ["list", 1],
        [99],
        [2, [0]],  # a set of a list
        [4, 1],  # a dict with a key and no value
        [16, "text"],
        [16],
        [19, ["no date", 0]],
        [19, ["2026-01-01", 7]],
        [22, [10**12, 0, 0]],
        [23, "much"],
        [24, b"short"],
        [True, 1],
    ],
    ids=shown,
)
def test_malformed_parts_are_refused(raw: Any) -> None:
    """Each wrong in its own way."""
    with pytest.raises(MalformedFrame):
        decode(msgspec.msgpack.encode(raw))


def test_a_bomb_of_nesting_is_refused() -> None:
    """Deeper than any sender writes, whatever the parser thinks of it."""
    for depth in (MAX_DEPTH + 1, 100_000):
        with pytest.raises(MalformedFrame):
            decode(b"\x92\x00" * depth + b"\xc0")


def test_simple_types_are_listed_once() -> None:
    """A few by hand, so that a change of the format is noticed."""
    identity = uuid.UUID(int=7)
    assert encode([1, "a"]) == bytes.fromhex("93 00 01 a1 61")
    assert decode(encode((identity, decimal.Decimal("1.50")))) == (
        identity,
        decimal.Decimal("1.50"),
    )
