"""Reading typed values from JSON and MessagePack, safely from any thread.

msgspec works out how to read a type when it first meets it, and a second thread that meets the same
type meanwhile crashes the process.  So all readers are made here, one at a time, and kept.
"""

from __future__ import annotations

from typing import Any, TypeAlias, TypeVar

import msgspec

from potluck.forking import ForkSafeLock

__all__ = ["decode_json", "decode_msgpack", "json_decoder", "msgpack_decoder"]

T = TypeVar("T")
Octets: TypeAlias = bytes | bytearray | memoryview

_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}
_making = ForkSafeLock()


def decode_json(data: Octets | str, kind: type[T]) -> T:
    """The value of this type that a text holds; raises ``msgspec.DecodeError`` as msgspec does.

    >>> decode_json('{"desk": "10.0.0.1"}', dict[str, str])
    {'desk': '10.0.0.1'}
    """
    value: T = json_decoder(kind).decode(data)
    return value


def decode_msgpack(data: Octets, kind: type[T]) -> T:
    """The same of MessagePack."""
    value: T = msgpack_decoder(kind).decode(data)
    return value


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """What reads this type, or one of several; made when it is first asked for."""
    known = _json.get(kind)
    if known is None:
        with _making:
            known = _json.setdefault(kind, msgspec.json.Decoder(kind))
    return known


def msgpack_decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    """The same for MessagePack."""
    known = _msgpack.get(kind)
    if known is None:
        with _making:
            known = _msgpack.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return known
