"""Requests and responses as bytes.

All integers are little-endian; lengths are in bytes, text is UTF-8::

    request    01 │ id: 8 │ length: 4 │ function name │ length: 4 │ payload
    response   02 │ id: 8 │ 00        │ length: 4     │ payload
               02 │ id: 8 │ 01        │ length: 4     │ what went wrong, in words

What follows the last field is not looked at: a reply that says what went wrong carries its facts
there, for those who know how to read them.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from potluck.core.calls_errors import RpcInvalidMessage

__all__ = [
    "MAX_RPC_MSG_SIZE",
    "REQUEST_OVERHEAD",
    "RESPONSE_OVERHEAD",
    "Octets",
    "RpcRequest",
    "RpcResponse",
    "request_head",
    "response_head",
]

MAX_RPC_MSG_SIZE = 1 << 30
"""Bytes of a message at most, unless an agent is told otherwise: 1 GiB."""

Octets = bytes | bytearray | memoryview

REQUEST, RESPONSE = 0x01, 0x02

_START = struct.Struct("<BQI")
_LENGTH = struct.Struct("<I")
_ANSWER = struct.Struct("<BQBI")
_ID_END = 9  # bytes of tag and id

REQUEST_OVERHEAD = _START.size + _LENGTH.size
"""Bytes of a request beside its name and payload."""

RESPONSE_OVERHEAD = _ANSWER.size
"""Bytes of a response beside its payload."""


def request_head(request_id: int, name: bytes, size: int) -> bytes:
    """All of a request but its payload."""
    return _START.pack(REQUEST, request_id, len(name)) + name + _LENGTH.pack(size)


def response_head(request_id: int, size: int, *, is_error: bool = False) -> bytes:
    """All of a response but its payload.

    >>> response_head(7, 3).hex(" ")
    '02 07 00 00 00 00 00 00 00 00 03 00 00 00'
    """
    return _ANSWER.pack(RESPONSE, request_id, is_error, size)


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """A call as it travels.

    >>> RpcRequest(42, "add", b"12").serialize().hex(" ")
    '01 2a 00 00 00 00 00 00 00 03 00 00 00 61 64 64 02 00 00 00 31 32'
    """

    request_id: int
    function_name: str
    payload: Octets

    def serialize(self) -> bytes:
        """As bytes."""
        head = request_head(self.request_id, self.function_name.encode(), len(self.payload))
        return head + self.payload

    @classmethod
    def deserialize(cls, data: Octets) -> RpcRequest:
        """From bytes, which may come from anybody; the payload is a part of ``data``."""
        if not data or data[0] != REQUEST:
            raise RpcInvalidMessage("expected request tag 0x01")
        size = len(data)
        if size < _ID_END:
            raise RpcInvalidMessage("request too short for request_id")
        if size < _START.size:
            raise RpcInvalidMessage("request too short for name length")
        _, request_id, name_length = _START.unpack_from(data)
        end = _START.size + name_length
        if size < end:
            raise RpcInvalidMessage("request too short for function name")
        try:
            name = str(data[_START.size : end], "utf-8")
        except UnicodeDecodeError as error:
            raise RpcInvalidMessage(f"invalid UTF-8 in function name: {error}") from None
        start = end + _LENGTH.size
        if size < start:
            raise RpcInvalidMessage("request too short for payload length")
        (length,) = _LENGTH.unpack_from(data, end)
        if size < start + length:
            raise RpcInvalidMessage("request too short for payload")
        return cls(request_id, name, data[start : start + length])


@dataclass(frozen=True, slots=True)
class RpcResponse:
    """An answer as it travels."""

    request_id: int
    payload: Octets = b""
    error: str | None = None
    facts: Octets = b""
    """What follows the words of an error; never sent with a payload."""

    def serialize(self) -> bytes:
        """As bytes."""
        if self.error is None:
            return response_head(self.request_id, len(self.payload)) + self.payload
        words = self.error.encode(errors="replace")
        return response_head(self.request_id, len(words), is_error=True) + words + self.facts

    @classmethod
    def deserialize(cls, data: Octets) -> RpcResponse:
        """From bytes, which may come from anybody; the payload is a part of ``data``."""
        if not data or data[0] != RESPONSE:
            raise RpcInvalidMessage("expected response tag 0x02")
        size = len(data)
        if size < _ID_END:
            raise RpcInvalidMessage("response too short for request_id")
        if size < _ID_END + 1:
            raise RpcInvalidMessage("response too short for error flag")
        if size < _ANSWER.size:
            raise RpcInvalidMessage("response too short for payload/error length")
        _, request_id, is_error, length = _ANSWER.unpack_from(data)
        end = _ANSWER.size + length
        if size < end:
            raise RpcInvalidMessage("response too short for payload/error data")
        body = data[_ANSWER.size : end]
        if is_error != 1:
            return cls(request_id, body)
        try:
            words = str(body, "utf-8")
        except UnicodeDecodeError as error:
            raise RpcInvalidMessage(f"invalid UTF-8 in error message: {error}") from None
        return cls(request_id, b"", words, data[end:])
