"""Why a call has no value arrives as the error that says so."""

import pytest

from potluck import (
    DistributedError,
    RpcBusy,
    RpcCancelled,
    RpcError,
    RpcFunctionNotFound,
    RpcInternal,
    RpcInvalidMessage,
    RpcRemoteError,
    RpcTimeout,
    RpcTooLarge,
    Timeout,
)
from potluck.core.calls_encoding import RpcResponse
from potluck.core.calls_errors import RpcNoConnection, near_names
from potluck.core.calls_failures import TEXT, Failure, Reason, error_of, reply_with

KINDS: dict[Reason, type[RpcError]] = {
    "missing": RpcFunctionNotFound,
    "raised": RpcRemoteError,
    "large": RpcTooLarge,
    "busy": RpcBusy,
    "late": RpcTimeout,
    "cancelled": RpcCancelled,
    "invalid": RpcInvalidMessage,
    "internal": RpcInternal,
}


@pytest.mark.parametrize("reason", KINDS)
def test_every_reason_has_its_error(reason: Reason) -> None:
    """Which names the rank."""
    reply = RpcResponse.deserialize(reply_with(3, Failure(reason, words="why"), rank=2))
    error = error_of(reply, rank=2)
    assert type(error) is KINDS[reason]
    assert error.rank == 2
    assert isinstance(error, DistributedError)


def test_a_reply_has_the_words_of_the_origin() -> None:
    """For somebody who reads nothing else."""
    missing = RpcResponse.deserialize(reply_with(3, Failure("missing", name="ad"), rank=2))
    assert missing.error == "function 'ad' not registered on rank 2"
    raised = Failure("raised", name="ValueError", words="no such step")
    assert RpcResponse.deserialize(reply_with(3, raised, 0)).error == "ValueError: no such step"


def test_words_alone_are_an_error_too() -> None:
    """Of somebody who sends nothing else."""
    error = error_of(RpcResponse(3, error="no such step"), rank=4)
    assert isinstance(error, RpcRemoteError)
    assert error.remote_message == "no such step"


def test_what_a_function_raised_keeps_type_message_and_traceback() -> None:
    """Of a long text, the end."""
    failure = Failure("raised", name="KeyError", words="'x'", traceback="a" * TEXT + "line 3")
    error = error_of(RpcResponse.deserialize(reply_with(1, failure, 0)), 0)
    assert isinstance(error, RpcRemoteError)
    assert (error.remote_type, error.remote_message) == ("KeyError", "'x'")
    assert error.remote_traceback.endswith("line 3")
    assert len(error.remote_traceback) == TEXT


def test_the_errors_say_what_to_do() -> None:
    """In the words of the origin, and more."""
    assert str(RpcFunctionNotFound("f", rank=1)).startswith("RPC function not found: f")
    assert str(RpcInternal("odd")) == "RPC internal error: odd"
    late = RpcTimeout("rank 1 did not answer", seconds=2.0)
    assert str(late) == "RPC timeout: rank 1 did not answer"
    assert isinstance(late, Timeout | TimeoutError)
    assert late.recoverable
    assert RpcNoConnection(1).recoverable
    assert near_names("ech", ["echo", "add"]) == ["echo"]
