"""Values in calls: Python's plain ones, dataclasses and arrays; the bytes of arrays are not copied.

What travels is a length, a description in MessagePack, and behind it the arrays, each at a multiple
of 64 bytes, counted from where the message begins: ``lead`` bytes before the values.  Nothing that
arrives can run code: an object is only made of a dataclass that this side has named, through its
constructor.
"""

from __future__ import annotations

import dataclasses
import math
import struct
import threading
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import ml_dtypes  # noqa: F401 - gives numpy the names bfloat16 and float8_*
import msgspec
import numpy as np

from potluck.arrays.base import Access
from potluck.arrays.lending import lend
from potluck.core.calls_encoding import RESPONSE_OVERHEAD
from potluck.core.calls_errors import RpcInvalidMessage
from potluck.decoding import MAX_DEPTH, KeyCheck, decode_plain, reason_of
from potluck.errors import MalformedFrame
from potluck.runtime import object_codec
from potluck.runtime.memory import octets_of

__all__ = ["Values", "aligned_memory", "joined"]

Kind = TypeVar("Kind", bound=type)

ALIGNMENT = 64
"""Bytes: what the widest instructions of a processor like best."""

MAX_DIMENSIONS = 32
_SHOWN = 80  # characters of a name that a peer made up
_WRONG = (
    msgspec.DecodeError,
    ValueError,
    TypeError,
    IndexError,
    RecursionError,
    OverflowError,
)

_PLAIN = frozenset({type(None), bool, float, str, bytes})
_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1
_LENGTH = struct.Struct("<I")

LIST, TUPLE, SET, FROZENSET, DICT, ARRAY, OBJECT, OTHER = range(8)
_CODES: dict[type, int] = {list: LIST, tuple: TUPLE, set: SET, frozenset: FROZENSET}
_MAKERS: dict[int, Callable[[list[Any]], Any]] = {
    LIST: list,
    TUPLE: tuple,
    SET: set,
    FROZENSET: frozenset,
}
_KINDS = frozenset("biufcV")
"""Kinds of numpy's types that are numbers; ``V`` are those of ml_dtypes."""


class Values:
    """Turns values into bytes and back; knows the dataclasses that may arrive."""

    def __init__(self) -> None:
        self._shared: dict[str, type] = {}
        self._lock = threading.Lock()

    def share(self, kind: Kind) -> Kind:
        """Let objects of a dataclass arrive."""
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            msg = f"{kind!r} is no dataclass"
            raise TypeError(msg)
        name = kind.__qualname__
        with self._lock:
            known = self._shared.get(name)
            if known is not None and known is not kind:
                msg = f"Another dataclass is known as {name}: {known.__module__}.{name}"
                raise ValueError(msg)
            self._shared[name] = kind
        return kind

    def learn_from(self, function: Callable[..., Any]) -> None:
        """Share the dataclasses that a function is annotated with."""
        try:
            hints = typing.get_type_hints(function)
        except Exception:  # noqa: BLE001 - annotations may be anything, and need not resolve
            return
        for hint in hints.values():
            for kind in _kinds_in(hint):
                if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                    self.share(kind)

    # -- out -----------------------------------------------------------------------------------

    def pack_arguments(
        self, arguments: Sequence[Any], options: Mapping[str, Any], lead: int = 0
    ) -> list[Any]:
        """The arguments of a call as buffers."""
        return self.pack((tuple(arguments), dict(options)), lead)

    def pack(self, value: Any, lead: int = 0) -> list[Any]:
        """A value as buffers: a description, and the memory of its arrays."""
        arrays: list[memoryview] = []
        text = msgspec.msgpack.encode(self._flatten(value, arrays, 0))
        head = _LENGTH.pack(len(text)) + text
        if not arrays:
            return [head]
        parts: list[Any] = [head]
        at = lead + len(head)
        for array in arrays:
            gap = -at % ALIGNMENT
            parts += (bytes(gap), array)
            at += gap + len(array)
        return parts

    def _flatten(self, value: Any, arrays: list[memoryview], depth: int) -> Any:
        kind = type(value)
        if kind in _PLAIN or (kind is int and _SMALLEST <= value <= _LARGEST):
            return value
        if depth >= MAX_DEPTH:
            msg = f"Values are nested more than {MAX_DEPTH} deep, or hold themselves"
            raise ValueError(msg)
        if kind in _CODES:
            return [_CODES[kind], *(self._flatten(each, arrays, depth + 1) for each in value)]
        if kind is dict:
            return [DICT, *self._flatten_items(value.items(), arrays, depth)]
        if dataclasses.is_dataclass(kind):
            self.share(kind)  # what we send may come back
            items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(kind) if f.init]
            return [OBJECT, kind.__qualname__, *self._flatten_items(items, arrays, depth)]
        if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
            return _flatten_array(value, arrays)
        try:
            return [OTHER, object_codec.encode(value)]
        except TypeError:
            raise _cannot_travel(f"A {kind.__module__}.{kind.__qualname__}") from None

    def _flatten_items(self, items: Any, arrays: list[memoryview], depth: int) -> list[Any]:
        return [self._flatten(each, arrays, depth + 1) for item in items for each in item]

    # -- in ------------------------------------------------------------------------------------

    def unpack_arguments(
        self, data: bytes | memoryview, lead: int = 0
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call."""
        value = self.unpack(data, lead)
        if (
            type(value) is tuple
            and [type(each) for each in value] == [tuple, dict]
            and all(type(name) is str for name in value[1])
        ):
            return value[0], value[1]
        raise RpcInvalidMessage("these are no arguments")

    def unpack_answer(self, data: bytes | memoryview) -> Any:
        """The value of a response."""
        return self.unpack(data, RESPONSE_OVERHEAD)

    def unpack(self, data: bytes | memoryview, lead: int = 0) -> Any:
        """The value that was packed; arrays are views of ``data``, if that can be written to."""
        view = memoryview(data)
        if len(view) < _LENGTH.size:
            raise RpcInvalidMessage("values too short for their length")
        (length,) = _LENGTH.unpack_from(view)
        end = _LENGTH.size + length
        if len(view) < end:
            raise RpcInvalidMessage("values too short for their description")
        try:
            text = decode_plain(view[_LENGTH.size : end])
            return self._rebuild(text, _Arrays(view, end, lead), KeyCheck(), 0)
        except RpcInvalidMessage:
            raise
        except MalformedFrame as error:
            raise RpcInvalidMessage(str(error)) from None
        except _WRONG as error:
            words = reason_of(error)
            raise RpcInvalidMessage(f"values that nobody can have sent: {words}") from None

    def _rebuild(self, value: Any, arrays: _Arrays, keys: KeyCheck, depth: int) -> Any:
        if type(value) in _PLAIN or type(value) is int:
            return value
        if type(value) is not list or not value or depth >= MAX_DEPTH:
            raise RpcInvalidMessage("a value that no caller writes")
        code, *parts = value
        if type(code) is not int:
            raise RpcInvalidMessage("a value of no kind")
        if code == ARRAY:
            return arrays.next(*parts)
        if code == OTHER:
            (packed,) = parts
            return object_codec.decode(packed, keys)
        name = parts.pop(0) if code == OBJECT else ""
        built = [self._rebuild(each, arrays, keys, depth + 1) for each in parts]
        if code in {SET, FROZENSET}:
            keys.check(built)
        if code in _MAKERS:
            return _MAKERS[code](built)
        if code not in (DICT, OBJECT):
            raise RpcInvalidMessage(f"a value of the unknown kind {code!r}")
        keys.check(built[::2])
        items = dict(zip(built[::2], built[1::2], strict=True))
        return items if code == DICT else self._make(name, items)

    def _make(self, name: str, fields: dict[Any, Any]) -> Any:
        kind = self._shared.get(name)
        if kind is None:
            raise RpcInvalidMessage(
                f"the dataclass {str(name)[:_SHOWN]!r} is not known here",
                hint="Name it with agent.share(...), or in the annotations of the function.",
            )
        wanted = {field.name for field in dataclasses.fields(kind) if field.init}
        if fields.keys() != wanted:
            raise RpcInvalidMessage(f"{name} has other fields on the other side")
        return kind(**fields)


class _Arrays:
    """The arrays behind a description, one after the other."""

    def __init__(self, view: memoryview, at: int, lead: int) -> None:
        self._view = view
        self._at = at
        self._lead = lead

    def next(self, name: str, shape: list[int]) -> Any:
        """The next array."""
        # Only names such as float32: numpy would parse whole descriptions.
        is_name = type(name) is str and name.replace("_", "").isalnum()
        dtype = np.dtype(name if is_name else "O")
        if dtype.kind not in _KINDS or dtype.hasobject or not dtype.itemsize or dtype.fields:
            raise RpcInvalidMessage(f"an array of type {str(name)[:_SHOWN]!r}")
        if len(shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
            raise RpcInvalidMessage(f"an array of shape {str(shape[:MAX_DIMENSIONS])[:_SHOWN]}")
        start = self._at + -(self._lead + self._at) % ALIGNMENT
        end = start + math.prod(shape) * dtype.itemsize
        if end > len(self._view):
            raise RpcInvalidMessage("values too short for their arrays")
        self._at = end
        if start == end:
            return np.empty(shape, dtype)
        array = np.frombuffer(self._view[start:end], np.uint8).view(dtype).reshape(shape)
        # What came in a short message cannot be written to; that of a long one is as it should be.
        return array if array.flags.writeable and array.flags.aligned else array.copy()


def aligned_memory(size: int) -> memoryview:
    """Memory with any content (a bytearray would be filled with zeros) at a multiple of 64."""
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return octets_of(memory)[start : start + size]


def joined(parts: Sequence[Any], lead: int) -> memoryview:
    """Packed values in one piece of memory, where their arrays are at multiples of 64."""
    memory = aligned_memory(lead + sum(map(len, parts)))[lead:]
    at = 0
    for part in parts:
        memory[at : at + len(part)] = part
        at += len(part)
    return memory


def _flatten_array(value: Any, arrays: list[memoryview]) -> list[Any]:
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and (dtype.kind not in _KINDS or dtype.fields):
        raise _cannot_travel(f"An array of type {dtype}")
    lease = lend(value, Access.READ)
    flat = lease.flat
    arrays.append(octets_of(flat))
    return [ARRAY, flat.dtype.name, list(lease.shape)]


def _cannot_travel(what: str) -> TypeError:
    return TypeError(
        f"{what} cannot travel in a call: only None, numbers, str, bytes, dates and times, lists, "
        "tuples, dicts, sets, dataclasses and arrays of numbers can"
    )


def _kinds_in(hint: Any) -> list[Any]:
    return [hint, *(kind for each in typing.get_args(hint) for kind in _kinds_in(each))]
