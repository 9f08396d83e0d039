"""Requests and responses are the bytes that the origin wrote, byte by byte."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import RpcInvalidMessage
from potluck.core.calls_encoding import MAX_RPC_MSG_SIZE, RpcRequest, RpcResponse


def test_max_message_size_constant() -> None:
    """One gibibyte."""
    assert MAX_RPC_MSG_SIZE == 1 << 30


def test_rpc_request_roundtrip() -> None:
    """A request comes back as it was."""
    request = RpcRequest.deserialize(RpcRequest(42, "add", bytes([1, 2, 3])).serialize())
    assert (request.request_id, request.function_name) == (42, "add")
    assert request.payload == bytes([1, 2, 3])


def test_rpc_response_roundtrip_ok() -> None:
    """A response with a value comes back as it was."""
    response = RpcResponse.deserialize(RpcResponse(7, bytes([4, 5, 6])).serialize())
    assert (response.request_id, response.payload, response.error) == (7, bytes([4, 5, 6]), None)


def test_rpc_response_roundtrip_error() -> None:
    """A response that says what went wrong comes back as it was."""
    response = RpcResponse.deserialize(RpcResponse(99, error="something went wrong").serialize())
    assert (response.request_id, response.error) == (99, "something went wrong")
    assert response.payload == b""


def test_a_request_byte_by_byte() -> None:
    """Tag, id, length and name, length and payload; little-endian."""
    assert RpcRequest(0x0102030405060708, "add", b"\xaa\xbb\xcc").serialize() == bytes(
        [
            *(0x01, 0x08, 0x07, 0x06, 0x05, 0x04, 0x03, 0x02, 0x01),
            *(0x03, 0x00, 0x00, 0x00, 0x61, 0x64, 0x64),
            *(0x03, 0x00, 0x00, 0x00, 0xAA, 0xBB, 0xCC),
        ]
    )


def test_a_response_byte_by_byte() -> None:
    """Tag, id, the flag 00, length and payload."""
    assert RpcResponse(7, b"\x04\x05\x06").serialize() == bytes(
        [0x02, 7, 0, 0, 0, 0, 0, 0, 0, 0x00, 3, 0, 0, 0, 4, 5, 6]
    )


def test_an_error_byte_by_byte() -> None:
    """Tag, id, the flag 01, length and words; what follows is for those who can read it."""
    expected = bytes([0x02, 9, 0, 0, 0, 0, 0, 0, 0, 0x01, 2, 0, 0, 0]) + b"no"
    assert RpcResponse(9, error="no").serialize() == expected
    assert RpcResponse(9, error="no", facts=b"xyz").serialize() == expected + b"xyz"
    assert RpcResponse.deserialize(expected + b"xyz").facts == b"xyz"


SHORT_REQUESTS = [
    (b"", "expected request tag 0x01"),
    (b"\x02", "expected request tag 0x01"),
    (b"\x01" + bytes(7), "request too short for request_id"),
    (b"\x01" + bytes(11), "request too short for name length"),
    (b"\x01" + bytes(8) + b"\x03\0\0\0ab", "request too short for function name"),
    (b"\x01" + bytes(8) + b"\x01\0\0\0\xff", "invalid UTF-8 in function name"),
    (b"\x01" + bytes(8) + b"\x01\0\0\0a\0\0\0", "request too short for payload length"),
    (b"\x01" + bytes(8) + b"\x01\0\0\0a\x02\0\0\0x", "request too short for payload"),
]


@pytest.mark.parametrize(("data", "reason"), SHORT_REQUESTS)
def test_bytes_that_are_no_request_are_refused(data: bytes, reason: str) -> None:
    """With the sentence of the origin."""
    with pytest.raises(RpcInvalidMessage, match=f"invalid RPC message: {reason}"):
        RpcRequest.deserialize(data)


SHORT_RESPONSES = [
    (b"", "expected response tag 0x02"),
    (b"\x01", "expected response tag 0x02"),
    (b"\x02" + bytes(7), "response too short for request_id"),
    (b"\x02" + bytes(8), "response too short for error flag"),
    (b"\x02" + bytes(12), "response too short for payload/error length"),
    (b"\x02" + bytes(9) + b"\x02\0\0\0x", "response too short for payload/error data"),
    (b"\x02" + bytes(8) + b"\x01\x01\0\0\0\xff", "invalid UTF-8 in error message"),
]


@pytest.mark.parametrize(("data", "reason"), SHORT_RESPONSES)
def test_bytes_that_are_no_response_are_refused(data: bytes, reason: str) -> None:
    """With the sentence of the origin."""
    with pytest.raises(RpcInvalidMessage, match=f"invalid RPC message: {reason}"):
        RpcResponse.deserialize(data)


@given(st.binary())
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    """Nothing else is ever raised, and what is understood is written the same way."""
    for kind in (RpcRequest, RpcResponse):
        try:
            message = kind.deserialize(data)
        except RpcInvalidMessage:
            continue
        assert data.startswith(message.serialize()[:9])


@given(st.integers(0, 2**64 - 1), st.text(), st.binary())
def test_every_request_comes_back(number: int, name: str, payload: bytes) -> None:
    """Whatever its name and payload."""
    try:
        data = RpcRequest(number, name, payload).serialize()
    except UnicodeEncodeError:
        return
    assert RpcRequest.deserialize(data) == RpcRequest(number, name, payload)
