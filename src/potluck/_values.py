"""Python's own values as bytes, and back: MessagePack in which every container says what it is.

Only values of exactly the types listed here travel, and come back as they were; nothing that
arrives can run code or make an object of another type.
"""

from __future__ import annotations

import datetime as dt
import decimal
import uuid
from collections.abc import Callable
from typing import Any

import msgspec

from potluck._decode import MAX_DEPTH, KeyCheck, decode_plain, reason_of
from potluck.errors import MalformedFrame

_PLAIN = frozenset({type(None), bool, float, str, bytes})
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

# Types that become one plain value, and how they come back from it.
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
    try:
        return msgspec.msgpack.encode(_flatten(value, 0))
    except (UnicodeEncodeError, OverflowError) as error:
        msg = f"A value cannot be written down: {error}"
        raise ValueError(msg) from None


def _flatten(value: Any, depth: int) -> Any:
    kind = type(value)
    if kind in _PLAIN or (kind is int and _SMALLEST <= value <= _LARGEST):
        return value
    if depth >= MAX_DEPTH:
        msg = f"Containers are nested more than {MAX_DEPTH} deep, or hold themselves"
        raise ValueError(msg)
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *(_flatten(each, depth + 1) for each in value)]
    if kind is dict:
        items = (_flatten(each, depth + 1) for item in value.items() for each in item)
        return [DICT, *items]
    if kind in _SIMPLE:
        code, forth, _, _ = _SIMPLE[kind]
        return [code, forth(value)]
    hint = "; send arrays with all_gather or broadcast" if hasattr(value, "__array__") else ""
    msg = (
        f"A {kind.__module__}.{kind.__qualname__} cannot travel as an object: only None, numbers, "
        f"str, bytes, dates and times, lists, tuples, dicts and sets can{hint}"
    )
    raise TypeError(msg)


def decode(data: bytes | bytearray | memoryview, keys: KeyCheck | None = None) -> Any:
    """The value that was encoded; raises :class:`MalformedFrame` for anything else.

    ``keys`` is the check of the message that it is a part of.
    """
    try:
        return _rebuild(decode_plain(data), keys or KeyCheck())
    except MalformedFrame:
        raise
    except _WRONG as error:
        raise MalformedFrame("An object cannot be understood", cause=reason_of(error)) from None


_WRONG = (msgspec.DecodeError, ValueError, TypeError, IndexError, RecursionError, ArithmeticError)


def _rebuild(value: Any, keys: KeyCheck, depth: int = 0) -> Any:
    if type(value) in _PLAIN or type(value) is int:
        return value
    if type(value) is not list or not value or type(value[0]) is not int or depth >= MAX_DEPTH:
        raise MalformedFrame("An object has a part that no sender writes")
    code, *parts = value
    if code in _BACK:
        kind, back = _BACK[code]
        (part,) = parts
        if type(part) is not kind:
            raise MalformedFrame(f"An object has a part of kind {code} that no sender writes")
        return back(part)
    built = [_rebuild(each, keys, depth + 1) for each in parts]
    if code == DICT:
        keys.check(built[::2])
        return dict(zip(built[::2], built[1::2], strict=True))
    if code not in _MAKERS:
        raise MalformedFrame(f"An object has a part of the unknown kind {code}")
    if code in {SET, FROZENSET}:
        keys.check(built, is_set=True)
    return _MAKERS[code](built)
