"""Values travel as they are, arrays without copies, and nothing that arrives can do harm."""

import contextlib
import datetime as dt
import decimal
import gc
import weakref
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from potluck import RpcInvalidMessage
from potluck.rpc.values import ALIGNMENT, ValueCodec, joined
from support.agents import agents


@dataclass
class Point:
    """A dataclass of the tests."""

    x: int
    y: Any = None
    norm: float = field(default=0.0, init=False)


def again(value: Any, values: ValueCodec | None = None) -> Any:
    """A value after its travel."""
    values = values or ValueCodec()
    return values.unpack(b"".join(values.pack(value)))


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.complex_numbers(allow_nan=False)
    | st.dates()
    | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text("ab"), inner),
    max_leaves=20,
)


@given(PLAIN)
def test_plain_values_come_back_as_they_were(value: Any) -> None:
    """Of the same types."""
    assert again(value) == value
    assert type(again(value)) is type(value)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint64", "float16", "float32", "complex128", ml_dtypes.bfloat16]
)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (1, 0, 5)])
def test_arrays_come_back_as_they_were(dtype: Any, shape: tuple[int, ...]) -> None:
    """Of any type and shape."""
    array = np.ones(shape, dtype)
    back = again({"a": [array, 5]})["a"][0]
    assert back.dtype == array.dtype
    assert back.shape == shape
    np.testing.assert_array_equal(back, array)


def test_the_bytes_of_arrays_are_not_copied() -> None:
    """What is sent is the array's own memory, what arrives a view of what came in."""
    values = ValueCodec()
    array = np.arange(1000.0)
    parts = values.pack([1, array, array])
    assert np.shares_memory(np.frombuffer(parts[2], np.uint8), array)
    data = bytearray(b"".join(parts))
    first, second = values.unpack(memoryview(data))[1:]
    assert np.shares_memory(first, np.frombuffer(data, np.uint8))
    assert not np.shares_memory(first, second)
    offset = len(parts[0]) + len(parts[1])
    assert offset % ALIGNMENT == 0
    first[0] = 7.0  # it belongs to whoever got it


def test_tensors_and_strided_arrays_arrive_as_arrays() -> None:
    """In their order."""
    np.testing.assert_array_equal(again(torch.arange(6).reshape(2, 3)), [[0, 1, 2], [3, 4, 5]])
    np.testing.assert_array_equal(again(np.arange(10)[::3]), [0, 3, 6, 9])
    assert again(np.float32(2.5)) == 2.5


def test_dataclasses_need_to_be_named() -> None:
    """By whoever sends them, by an annotation, or by hand."""
    values = ValueCodec()
    data = b"".join(values.pack([Point(1, (2, np.ones(2)))]))
    back = values.unpack(data)[0]
    assert (back.x, back.y[0]) == (1, 2)
    with pytest.raises(RpcInvalidMessage, match=r"'Point' is not shared here.*agent\.share"):
        ValueCodec().unpack(data)
    by_hand, by_annotation = ValueCodec(), ValueCodec()
    assert by_hand.share(Point) is Point

    def function(points: list[Point] | None) -> None:
        """Take points."""

    by_annotation.learn_from(function)
    for other in (by_hand, by_annotation):
        assert other.unpack(data)[0].x == 1


def test_only_dataclasses_can_be_shared_and_one_of_a_name() -> None:
    """Or one would be taken for the other."""
    values = ValueCodec()
    with pytest.raises(TypeError, match="needs a dataclass"):
        values.share(int)
    values.share(Point)
    other: Any = dataclass(type("Point", (), {"__annotations__": {"x": int}}))
    with pytest.raises(ValueError, match="Another dataclass is already shared as Point"):
        values.share(other)
    values.learn_from(len)  # annotations may be missing, or anything


def test_a_dataclass_of_another_version_is_refused() -> None:
    """Its fields differ."""
    there, here = ValueCodec(), ValueCodec()
    here.share(Point)
    other: Any = dataclass(type("Point", (), {"__annotations__": {"x": int, "z": int}}))
    data = b"".join(there.pack(other(1, 2)))
    with pytest.raises(RpcInvalidMessage, match="Point has different fields on the other side"):
        here.unpack(data)


@pytest.mark.parametrize(
    "value", [object(), np.array(["text"]), np.array([None]), np.zeros(2, "i4,f4"), print]
)
def test_other_things_do_not_travel(value: Any) -> None:
    """And that is noticed before anything is sent."""
    with pytest.raises(TypeError):
        ValueCodec().pack(value)


def test_what_holds_itself_does_not_travel() -> None:
    """It would have no end."""
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested more than 64 deep"):
        ValueCodec().pack(endless)


def crafted(description: Any, rest: bytes = b"") -> bytes:
    """What somebody may send who does not use this package."""
    text = msgspec.msgpack.encode(description)
    return len(text).to_bytes(4, "little") + text + rest


HOSTILE = {
    "nothing": b"",
    "a length without a description": b"\xff\xff\xff\x7f",
    "no MessagePack": b"\x01\0\0\0\xc1",
    "an unknown kind": crafted([99, 1]),
    "a kind that is no number": crafted([[1], 1]),
    "an empty list": crafted([]),
    "half a pair": crafted([4, "key"]),
    "a dict of lists as keys": crafted([4, [0], 1]),
    "a set of lists": crafted([2, [0]]),
    "an array of objects": crafted([5, "O", [1]], bytes(64)),
    "an array of nothing": crafted([5, "V0", [1]], bytes(64)),
    "an array of pairs": crafted([5, "i4,i4", [1]], bytes(64)),
    "an array of an unknown type": crafted([5, "float7", [1]], bytes(64)),
    "an array whose type is no text": crafted([5, 7, [1]], bytes(64)),
    "an array without a shape": crafted([5, "f4"]),
    "an array larger than what came": crafted([5, "f4", [1 << 40]], bytes(64)),
    "an array of negative size": crafted([5, "f4", [-1, -1]], bytes(64)),
    "an array of too many dimensions": crafted([5, "f4", [1] * 50], bytes(64)),
    "an unknown dataclass": crafted([6, "Secret"]),
    "a dataclass without a name": crafted([6]),
    "an odd object": crafted([7, b"\xc1"]),
    "an object that is no bytes": crafted([7, 5]),
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_what_nobody_can_have_sent_is_refused(data: bytes) -> None:
    """With the one error for it."""
    with pytest.raises(RpcInvalidMessage):
        ValueCodec().unpack(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_refused(data: bytes) -> None:
    """Nothing else is ever raised."""
    for message in (data, len(data).to_bytes(4, "little") + data):
        with contextlib.suppress(RpcInvalidMessage):
            ValueCodec().unpack(message)


def test_arguments_are_a_tuple_and_names() -> None:
    """Other values are no arguments."""
    values = ValueCodec()
    data = b"".join(values.pack_arguments((1, "a"), {"b": dt.date(2026, 1, 2)}))
    assert values.unpack_arguments(data) == ((1, "a"), {"b": dt.date(2026, 1, 2)})
    wrongs: list[Any] = [5, ((), {}, 1), ([], {}), ((), {1: decimal.Decimal(2)})]
    for wrong in wrongs:
        with pytest.raises(RpcInvalidMessage, match="the values are not arguments"):
            values.unpack_arguments(b"".join(values.pack(wrong)))


@pytest.mark.parametrize("count", [3, 1000, 100_000])
@pytest.mark.parametrize("dst", [0, 1])
def test_arrays_arrive_ready_for_use(count: int, dst: int) -> None:
    """Large or small, from another rank or our own: they can be changed, and computing is fast."""
    with agents() as group:
        for agent in group:

            @agent.expose
            def double(array: np.ndarray) -> np.ndarray:
                assert array.flags.aligned
                array += array
                return array

        given = np.arange(count, dtype=np.float64)
        found = group[0].call(dst, "double", given)
        np.testing.assert_array_equal(found, np.arange(count) * 2)
        np.testing.assert_array_equal(given, np.arange(count))
        assert found.flags.aligned
        assert found.flags.writeable


def test_large_arrays_lie_where_processors_like_them() -> None:
    """At multiples of 64 bytes, without a copy of what came in."""
    with agents() as (caller, server):
        server.expose(lambda array: array.ctypes.data % 64, name="place")
        server.expose(np.ones, name="ones")
        assert caller.call(1, "place", np.ones(100_000)) == 0
        assert caller.call(1, "ones", 100_000).ctypes.data % 64 == 0


@pytest.mark.parametrize("value", [object(), range(3), np.array([None]), np.array(["a"])])
def test_what_cannot_travel_is_refused_with_a_list_of_what_can(value: object) -> None:
    """Before anything is sent."""
    with pytest.raises(TypeError, match=r"cannot be sent in a call: .*dataclasses and arrays"):
        ValueCodec().pack(value)


def test_arrays_are_released_with_the_message_and_not_by_the_garbage_collector() -> None:
    """Packing and unpacking leave no cycles behind, which would keep large arrays in memory."""
    codec, array = ValueCodec(), np.ones(1 << 16)
    seen = weakref.ref(array)
    gc.disable()
    try:
        data = joined(codec.pack([array]), 0)
        (copy,) = codec.unpack(data)
        copied = weakref.ref(copy)
        del array, copy
        assert seen() is None
        assert copied() is None
    finally:
        gc.enable()
