"""The value codec: Python's plain values as MessagePack in which every container says its type.

Only values of exactly the types listed here can be sent, and they arrive with the same types.
Nothing that arrives can run code or make an object of another type.  Remote calls use the same
codec, and pass a function for what they add: arrays, dataclasses and long bytes.
"""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from potluck._decode import MAX_DEPTH, KeyCheck, decode_plain, reason_of
from potluck.errors import MalformedFrame

MAX_CONTAINERS = 1 << 22
"""Lists, tuples, dicts, sets and objects in one value: more than that is a few seconds of work, and
a small value can hold itself so often that its copy would not fit into any memory."""

PLAIN = frozenset({type(None), bool, float, str, bytes})
"""Types that MessagePack has."""

_SMALLEST, _LARGEST = -(1 << 63), (1 << 64) - 1
"""The integers that MessagePack has."""

LIST, TUPLE, SET, FROZENSET, DICT = range(5)
_SEQUENCES: dict[type, int] = {list: LIST, tuple: TUPLE, set: SET, frozenset: FROZENSET}
_MAKERS: dict[int, Callable[[list[Any]], Any]] = {
    LIST: list,
    TUPLE: tuple,
    SET: lambda parts: set(dict.fromkeys(parts)),
    FROZENSET: lambda parts: frozenset(dict.fromkeys(parts)),
}

# Types that become one plain value: code, how to write them, the plain type, how to read them.
_Simple = tuple[int, Callable[[Any], Any], type, Callable[[Any], Any]]
_SIMPLE: dict[type, _Simple] = {
    int: (
        16,
        lambda value: value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True),
        bytes,
        lambda data: int.from_bytes(data, "little", signed=True),
    ),
    bytearray: (17, bytes, bytes, bytearray),
    complex: (18, lambda value: [value.real, value.imag], list, lambda both: complex(*both)),
    dt.datetime: (
        19,
        lambda value: [value.isoformat(), value.fold],
        list,
        lambda both: dt.datetime.fromisoformat(both[0]).replace(fold=both[1]),
    ),
    dt.date: (20, dt.date.isoformat, str, dt.date.fromisoformat),
    dt.time: (
        21,
        lambda value: [value.isoformat(), value.fold],
        list,
        lambda both: dt.time.fromisoformat(both[0]).replace(fold=both[1]),
    ),
    dt.timedelta: (
        22,
        lambda value: [value.days, value.seconds, value.microseconds],
        list,
        lambda parts: dt.timedelta(*parts),
    ),
    decimal.Decimal: (23, str, str, decimal.Decimal),
    uuid.UUID: (24, lambda value: value.bytes, bytes, lambda data: uuid.UUID(bytes=data)),
}
_BACK = {code: (kind, back) for code, _, kind, back in _SIMPLE.values()}


def encode(value: Any) -> bytes:
    """A value as bytes; raises ``TypeError`` for what is not one of Python's plain types.

    >>> decode(encode({"step": 7, "seen": {1, 2}, "at": (0.5, None)}))
    {'step': 7, 'seen': {1, 2}, 'at': (0.5, None)}
    """
    flat = Flattening(_flatten_simple).flatten(value)
    try:
        return msgspec.msgpack.encode(flat)
    except (UnicodeEncodeError, OverflowError) as error:
        msg = f"A value cannot be encoded: {error}"
        raise ValueError(msg) from None


class Flattening:
    """Turns one value into nested lists, in which the first item of each list is a code.

    What is not plain and not a container is left to ``other``, which gets the value, its depth and
    this object: a closure over this object would be a cycle, which keeps arrays until the next
    garbage collection.
    """

    __slots__ = ("_containers", "_other", "_plain")

    def __init__(
        self, other: Callable[[Any, int, Flattening], Any], plain: frozenset[type] = PLAIN
    ) -> None:
        self._other = other
        self._plain = plain
        self._containers = 0

    def flatten(self, value: Any, depth: int = 0) -> Any:
        """The value, or a list that begins with a code."""
        kind = type(value)
        if kind in self._plain or (kind is int and _SMALLEST <= value <= _LARGEST):
            return value
        if kind is bytes:  # not among the plain types of a remote call
            return self._other(value, depth, self)
        self._containers += 1
        if depth >= MAX_DEPTH or self._containers > MAX_CONTAINERS:
            raise self._refusal(depth)
        if kind in _SEQUENCES:
            return [_SEQUENCES[kind], *[self.flatten(each, depth + 1) for each in value]]
        if kind is dict:
            return [DICT, *self.flatten_items(value.items(), depth)]
        return self._other(value, depth, self)

    def flatten_items(self, items: Iterable[tuple[Any, Any]], depth: int) -> list[Any]:
        """The keys and values of a container, one after the other."""
        return [self.flatten(each, depth + 1) for item in items for each in item]

    def _refusal(self, depth: int) -> ValueError:
        if depth >= MAX_DEPTH:
            return ValueError(
                f"Containers are nested more than {MAX_DEPTH} deep, or contain themselves"
            )
        return ValueError(
            f"A value has more than {MAX_CONTAINERS:,} containers (lists, tuples, dicts, sets and "
            "objects), counted as often as they occur. Send large data as arrays"
        )


def _flatten_simple(value: Any, _depth: int, _flattening: Flattening) -> list[Any]:
    kind = type(value)
    if kind in _SIMPLE:
        code, forth, _plain, _back = _SIMPLE[kind]
        return [code, forth(value)]
    hint = "; send arrays with all_gather or broadcast" if hasattr(value, "__array__") else ""
    msg = (
        f"A {kind.__module__}.{kind.__qualname__} cannot be sent as an object: only None, numbers, "
        f"str, bytes, dates and times, lists, tuples, dicts and sets can{hint}"
    )
    raise TypeError(msg)


def decode(data: bytes | bytearray | memoryview, keys: KeyCheck | None = None) -> Any:
    """The value that was encoded; raises :class:`MalformedFrame` for anything else.

    ``keys`` is the check of the message that it is a part of.
    """
    try:
        return Rebuilding(keys or KeyCheck()).rebuild(decode_plain(data))
    except MalformedFrame:
        raise
    except WRONG as error:
        raise MalformedFrame("An object cannot be understood", cause=reason_of(error)) from None


WRONG = (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError, ArithmeticError)
"""What rebuilding a value raises when no sender can have written it."""


def _unknown(code: int, _parts: list[Any], _depth: int, _rebuilding: Rebuilding) -> Any:
    raise MalformedFrame(f"An object has a part of the unknown kind {code}")


class Rebuilding:
    """Turns nested lists back into a value; codes that it does not know are left to ``other``."""

    __slots__ = ("_other", "keys")

    def __init__(
        self,
        keys: KeyCheck,
        other: Callable[[int, list[Any], int, Rebuilding], Any] = _unknown,
    ) -> None:
        self.keys = keys
        self._other = other

    def rebuild(self, value: Any, depth: int = 0) -> Any:
        """The value that was flattened."""
        if type(value) in PLAIN or type(value) is int:
            return value
        if type(value) is not list or not value or type(value[0]) is not int or depth >= MAX_DEPTH:
            raise MalformedFrame("An object has a part that no sender writes")
        code, *parts = value
        if code == DICT:
            return self.rebuild_items(parts, depth)
        if code in _MAKERS:
            built = [self.rebuild(each, depth + 1) for each in parts]
            if code in {SET, FROZENSET}:
                self.keys.check(built, is_set=True)
            return _MAKERS[code](built)
        if code in _BACK:
            kind, back = _BACK[code]
            (part,) = parts
            if type(part) is not kind:
                raise MalformedFrame(f"An object has a part of kind {code} that no sender writes")
            return back(part)
        return self._other(code, parts, depth, self)

    def rebuild_items(self, parts: list[Any], depth: int) -> dict[Any, Any]:
        """A dict from its keys and values, one after the other."""
        built = [self.rebuild(each, depth + 1) for each in parts]
        self.keys.check(built[::2])
        return dict(zip(built[::2], built[1::2], strict=True))
