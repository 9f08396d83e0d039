"""Values in calls: Python's plain ones, dataclasses and arrays; the bytes of arrays are not copied.

The format is a length, a description in MessagePack (:mod:`potluck._values`), then the arrays and
long bytes, each at a multiple of 64 bytes from the beginning of the message, which is ``lead``
bytes before the values.  Nothing that arrives can run code: objects are only made of dataclasses
that this side has shared, through their constructors.
"""

from __future__ import annotations

import dataclasses
import io
import math
import mmap
import struct
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np

from potluck import _values
from potluck._decode import KeyCheck, decode_plain, reason_of
from potluck._platform import CAN_RETURN_PAGES, mapped_memory, return_pages
from potluck._values import Flattening, Rebuilding
from potluck.arrays.adapters import as_buffer
from potluck.arrays.base import Access, is_numeric_name
from potluck.collective.program import bytes_of
from potluck.errors import MalformedFrame
from potluck.rpc.errors import RpcInvalidMessage
from potluck.rpc.protocol import RESPONSE_OVERHEAD, SHORT

Kind = TypeVar("Kind", bound=type)

ALIGNMENT = 64
"""Bytes: the alignment that the widest vector instructions need."""

MAPPED = 1 << 20
"""Bytes from which memory is mapped separately."""

STEP = 2 << 20
"""Bytes that are copied at a time, in well below a millisecond: the size of a huge page."""

MAX_DIMENSIONS = 32
_SHOWN = 80  # characters of a peer's text in an error
_WRONG = (*_values.WRONG, OverflowError)
_SHORT_PLAIN = _values.PLAIN - {bytes}  # bytes may be long
_LENGTH = struct.Struct("<I")

ARRAY, OBJECT, OTHER, BYTES = range(5, 9)
"""Codes beside those of :mod:`potluck._values`."""

_KINDS = frozenset("biufcV")
"""The kinds of numpy dtypes that are numbers; ``V`` are those of ml_dtypes."""


class ValueCodec:
    """Turns values into bytes and back; knows the dataclasses that may arrive."""

    def __init__(self) -> None:
        self._shared: dict[str, type] = {}
        self._lock = threading.Lock()

    def share(self, kind: Kind) -> Kind:
        """Accept objects of a dataclass."""
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            msg = f"share() needs a dataclass, got {kind!r}"
            raise TypeError(msg)
        name = kind.__qualname__
        with self._lock:
            known = self._shared.get(name)
            if known is not None and known is not kind:
                msg = f"Another dataclass is already shared as {name}: {known.__module__}.{name}"
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
        flattening = Flattening(partial(self._flatten, arrays), _SHORT_PLAIN)
        text = msgspec.msgpack.encode(flattening.flatten(value))
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

    def _flatten(
        self, arrays: list[memoryview], value: Any, depth: int, flattening: Flattening
    ) -> Any:
        """What remote calls add to plain values: long bytes, dataclasses and arrays."""
        kind = type(value)
        if kind is bytes:
            if len(value) <= SHORT:
                return value
            arrays.append(memoryview(value))
            return [BYTES, len(value)]
        if dataclasses.is_dataclass(kind):
            self.share(kind)  # what we send may come back
            items = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(kind) if f.init]
            return [OBJECT, kind.__qualname__, *flattening.flatten_items(items, depth)]
        if hasattr(value, "__array__") or hasattr(value, "__dlpack__"):
            return _flatten_array(value, arrays)
        try:
            return [OTHER, _values.encode(value)]
        except TypeError:
            raise _cannot_be_sent(f"A {kind.__module__}.{kind.__qualname__}") from None

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
        raise RpcInvalidMessage("the values are not arguments of a call")

    def unpack_answer(self, data: bytes | memoryview) -> Any:
        """The value of a response."""
        return self.unpack(data, RESPONSE_OVERHEAD)

    def unpack(self, data: bytes | memoryview, lead: int = 0) -> Any:
        """The value that was packed; arrays are views of ``data`` if that is writable."""
        view = memoryview(data)
        if len(view) < _LENGTH.size:
            raise RpcInvalidMessage("values too short for their length")
        (length,) = _LENGTH.unpack_from(view)
        end = _LENGTH.size + length
        if len(view) < end:
            raise RpcInvalidMessage("values too short for their description")
        try:
            text = decode_plain(view[_LENGTH.size : end])
            other = partial(self._rebuild, _Arrays(view, end, lead))
            return Rebuilding(KeyCheck(), other).rebuild(text)
        except RpcInvalidMessage:
            raise
        except MalformedFrame as error:
            raise RpcInvalidMessage(str(error)) from None
        except _WRONG as error:
            words = reason_of(error)
            raise RpcInvalidMessage(f"values that no agent sends: {words}") from None

    def _rebuild(
        self, arrays: _Arrays, code: int, parts: list[Any], depth: int, rebuilding: Rebuilding
    ) -> Any:
        if code == ARRAY:
            return arrays.next(*parts)
        if code == BYTES:
            return arrays.next_bytes(*parts)
        if code == OTHER:
            (packed,) = parts
            return _values.decode(packed, rebuilding.keys)
        if code == OBJECT:
            name, *items = parts
            return self._make(name, rebuilding.rebuild_items(items, depth))
        raise RpcInvalidMessage(f"a value of the unknown kind {code!r}")

    def _make(self, name: str, fields: dict[Any, Any]) -> Any:
        kind = self._shared.get(name)
        if kind is None:
            raise RpcInvalidMessage(
                f"the dataclass {str(name)[:_SHOWN]!r} is not shared here",
                hint="Pass it to agent.share(...), or use it in the annotations of the function.",
            )
        wanted = {field.name for field in dataclasses.fields(kind) if field.init}
        if fields.keys() != wanted:
            raise RpcInvalidMessage(f"{name} has different fields on the other side")
        return kind(**fields)


class _Arrays:
    """The arrays after a description, in order."""

    def __init__(self, view: memoryview, at: int, lead: int) -> None:
        self._view = view
        self._at = at
        self._lead = lead

    def next(self, name: str, shape: list[int]) -> Any:
        """The next array."""
        is_name = type(name) is str and is_numeric_name(name)
        dtype = np.dtype(name if is_name else "O")
        if dtype.kind not in _KINDS or dtype.hasobject or not dtype.itemsize or dtype.fields:
            raise RpcInvalidMessage(f"an array of type {str(name)[:_SHOWN]!r}")
        if len(shape) > MAX_DIMENSIONS or any(type(n) is not int or n < 0 for n in shape):
            raise RpcInvalidMessage(f"an array of shape {str(shape[:MAX_DIMENSIONS])[:_SHOWN]}")
        memory = self._take(math.prod(shape) * dtype.itemsize)
        if not memory:
            return np.empty(shape, dtype)
        array = np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)
        # The memory of a short message is read-only; that of a long one is writable and aligned.
        return array if array.flags.writeable and array.flags.aligned else array.copy()

    def next_bytes(self, size: int) -> bytes:
        """The next bytes."""
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
    """Uninitialised memory, aligned to 64 bytes (a bytearray would be filled with zeros).

    Large memory is mapped separately: its pages are allocated when they are written to, can be
    released one by one, and are freed without blocking other threads.
    """
    mapped = mapped_memory(size) if size >= MAPPED else None
    if mapped is not None:
        return memoryview(mapped)
    memory = np.empty(size + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return bytes_of(memory)[start : start + size]


def joined(parts: Sequence[Any], lead: int) -> memoryview:
    """Packed values as one piece of memory, with aligned arrays."""
    memory = aligned_memory(lead + sum(map(len, parts)))[lead:]
    at = 0
    for part in parts:
        for slice_ in _slices(part):
            memory[at : at + len(slice_)] = slice_
            at += len(slice_)
    return memory


def joined_bytes(parts: Sequence[Any]) -> bytes:
    """The same as bytes; a single part of type bytes is not copied."""
    if sum(map(len, parts)) <= STEP:
        return b"".join(parts)
    if len(parts) == 1 and type(parts[0]) is bytes:
        return parts[0]
    whole = io.BytesIO()  # whose getvalue() does not copy
    for part in parts:
        for slice_ in _slices(part):
            whole.write(slice_)
    return whole.getvalue()


def taken_bytes(data: bytes | memoryview) -> bytes:
    """Received data as bytes; its memory is released while it is copied.

    So there are never two whole copies.  A copy in one step would block all threads.
    """
    if type(data) is bytes:
        return data
    view = memoryview(data)
    source = view.obj
    if len(view) <= STEP or not isinstance(source, mmap.mmap) or not CAN_RETURN_PAGES:
        return joined_bytes([view])
    start = _address(view) - _address(memoryview(source))
    whole = io.BytesIO()
    given = -(-start // STEP) * STEP  # the pages before it are used by others, or released
    for slice_ in _slices(view):
        whole.write(slice_)
        done = (start + whole.tell()) // STEP * STEP
        if done > given:
            return_pages(source, given, done - given)
            given = done
    return whole.getvalue()


def _slices(part: Any) -> Iterator[memoryview]:
    """Pieces that are small enough: a copy does not let other threads run."""
    view = memoryview(part)
    for at in range(0, len(view), STEP):
        yield view[at : at + STEP]


def _address(view: memoryview) -> int:
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _flatten_array(value: Any, arrays: list[memoryview]) -> list[Any]:
    if isinstance(value, np.ndarray | np.generic) and (
        value.dtype.kind not in _KINDS or value.dtype.fields
    ):
        raise _cannot_be_sent(f"An array of type {value.dtype}")
    buffer = as_buffer(value, Access.READ)
    flat = buffer.flat
    arrays.append(bytes_of(flat))
    return [ARRAY, flat.dtype.name, list(buffer.shape)]


def _cannot_be_sent(what: str) -> TypeError:
    return TypeError(
        f"{what} cannot be sent in a call: only None, numbers, str, bytes, dates and times, lists, "
        "tuples, dicts, sets, dataclasses and arrays of numbers can"
    )


def _kinds_in(hint: Any) -> list[Any]:
    return [hint, *(kind for each in typing.get_args(hint) for kind in _kinds_in(each))]
