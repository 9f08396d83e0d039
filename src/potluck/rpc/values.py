"""Values in calls: Python's plain ones, dataclasses and arrays; the bytes of arrays are not copied.

What travels is a length, a description in MessagePack, and behind it the arrays and what is long of
type bytes, each at a multiple of 64 bytes, counted from where the message begins: ``lead`` bytes
before the values.  Nothing that arrives can run code: an object is only made of a dataclass that
this side has named, through its constructor.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import math
import mmap
import struct
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from potluck import _values
from potluck._decode import MAX_DEPTH, KeyCheck, decode_plain, reason_of
from potluck.arrays.adapters import lend
from potluck.arrays.base import Access
from potluck.collective.program import octets_of
from potluck.errors import MalformedFrame
from potluck.rpc.errors import RpcInvalidMessage
from potluck.rpc.protocol import RESPONSE_OVERHEAD, SHORT

Kind = TypeVar("Kind", bound=type)

ALIGNMENT = 64
"""Bytes: what the widest instructions of a processor like best."""

MAPPED = 1 << 20
"""Bytes from which on memory is mapped on its own."""

STEP = 2 << 20
"""Bytes that are copied at a time: well below a millisecond; a large page has as many."""

_PRIVATE: int | None = getattr(mmap, "MAP_PRIVATE", 0) | getattr(mmap, "MAP_ANONYMOUS", 0) or None

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

LIST, TUPLE, SET, FROZENSET, DICT, ARRAY, OBJECT, OTHER, BYTES = range(9)
_CODES: dict[type, int] = {list: LIST, tuple: TUPLE, set: SET, frozenset: FROZENSET}
_MAKERS: dict[int, Callable[[list[Any]], Any]] = {
    LIST: list,
    TUPLE: tuple,
    SET: lambda parts: set(dict.fromkeys(parts)),
    FROZENSET: lambda parts: frozenset(dict.fromkeys(parts)),
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
        if kind is bytes and len(value) > SHORT:
            arrays.append(memoryview(value))
            return [BYTES, len(value)]
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
            return [OTHER, _values.encode(value)]
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
        if code == BYTES:
            return arrays.next_bytes(*parts)
        if code == OTHER:
            (packed,) = parts
            return _values.decode(packed, keys)
        name = parts.pop(0) if code == OBJECT else ""
        built = [self._rebuild(each, arrays, keys, depth + 1) for each in parts]
        if code in {SET, FROZENSET}:
            keys.check(built, is_set=True)
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
        memory = self._take(math.prod(shape) * dtype.itemsize)
        if not memory:
            return np.empty(shape, dtype)
        array = np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)
        # What came in a short message cannot be written to; that of a long one is as it should be.
        return array if array.flags.writeable and array.flags.aligned else array.copy()

    def next_bytes(self, size: int) -> bytes:
        """The next ones are bytes."""
        if type(size) is not int or size < 0:
            raise RpcInvalidMessage(f"{size!r} bytes")
        return taken_bytes(self._take(size))

    def _take(self, size: int) -> memoryview:
        start = self._at + -(self._lead + self._at) % ALIGNMENT
        end = start + size
        if end > len(self._view):
            raise RpcInvalidMessage("values too short for their arrays")
        self._at = end
        return self._view[start:end]


def aligned_memory(size: int) -> memoryview:
    """Memory with any content (a bytearray would be filled with zeros) at a multiple of 64.

    Much of it is mapped on its own: its pages come when they are written to, can be given back one
    after the other, and go without holding up other threads.
    """
    if size >= MAPPED and _PRIVATE is not None:
        mapped = mmap.mmap(-1, size, flags=_PRIVATE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without them
                mapped.madvise(mmap.MADV_HUGEPAGE)
        return memoryview(mapped)
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return octets_of(memory)[start : start + size]


def joined(parts: Sequence[Any], lead: int) -> memoryview:
    """Packed values in one piece of memory, where their arrays are at multiples of 64."""
    memory = aligned_memory(lead + sum(map(len, parts)))[lead:]
    at = 0
    for part in parts:
        for slice_ in _slices(part):
            memory[at : at + len(slice_)] = slice_
            at += len(slice_)
    return memory


def joined_bytes(parts: Sequence[Any]) -> bytes:
    """The same as bytes; one part that is bytes already is not copied."""
    if sum(map(len, parts)) <= STEP:
        return b"".join(parts)
    if len(parts) == 1 and type(parts[0]) is bytes:
        return parts[0]
    whole = io.BytesIO()  # which hands out what it has without a copy
    for part in parts:
        for slice_ in _slices(part):
            whole.write(slice_)
    return whole.getvalue()


def taken_bytes(data: bytes | memoryview) -> bytes:
    """What came in, as bytes; the memory it came in is given back meanwhile.

    So there are never two copies of all of it.  A copy in one go would hold up all threads.
    """
    if type(data) is bytes:
        return data
    view = memoryview(data)
    source = view.obj
    if len(view) <= STEP or not isinstance(source, mmap.mmap) or not hasattr(source, "madvise"):
        return joined_bytes([view])
    start = _address(view) - _address(memoryview(source))
    whole = io.BytesIO()
    given = -(-start // STEP) * STEP  # all of the pages before belong to others, or are back
    for slice_ in _slices(view):
        whole.write(slice_)
        done = (start + whole.tell()) // STEP * STEP
        if done > given:
            source.madvise(mmap.MADV_DONTNEED, given, done - given)
            given = done
    return whole.getvalue()


def _slices(part: Any) -> Iterator[memoryview]:
    """So small that copying one holds up nobody: a copy does not let other threads run."""
    view = memoryview(part)
    for at in range(0, len(view), STEP):
        yield view[at : at + STEP]


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


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
