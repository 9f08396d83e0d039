"""Why a call has no value arrives as the error that says so."""

import traceback

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
    lost = RpcNoConnection(1, host="attic", cause="it is gone")
    assert str(lost) == "no connection to rank 1 (attic): it is gone"
    assert near_names("ech", ["echo", "add"]) == ["echo"]


@pytest.mark.parametrize("limit", [512, 3000, 40_000, 1 << 20])
def test_a_reply_is_no_larger_than_its_caller_takes(limit: int) -> None:
    """It loses words rather than the connection, and is still the same error."""
    long = "x" * 100_000
    raised = Failure("raised", name="KeyError", words=long, traceback=long + "line 3")
    reply = reply_with(1, raised, 0, limit)
    assert limit / 100 < len(reply) <= limit
    error = error_of(RpcResponse.deserialize(reply), 0)
    assert isinstance(error, RpcRemoteError)
    missing = reply_with(1, Failure("missing", name=long, near=[long]), 0, limit)
    assert len(missing) <= limit
    assert type(error_of(RpcResponse.deserialize(missing), 0)) is RpcFunctionNotFound
    shortest = RpcResponse.deserialize(reply_with(1, raised, 0, 1))  # of a caller who takes nothing
    assert type(error_of(shortest, 0)) is RpcRemoteError


def test_a_name_that_nobody_can_mean_costs_nothing() -> None:
    """Comparing it with others would take memory for every character."""
    assert near_names("e" * 10_000_000, ["echo"]) == []
    assert near_names("echo", ["e" * 10_000_000, "ech"]) == ["ech"]
    error = RpcFunctionNotFound("e\n" * 1000, rank=1)
    assert error.name == "e\n" * 1000
    assert len(str(error)) < 1500
    assert "\n" not in str(error)


def test_the_traceback_of_the_other_side_is_shown() -> None:
    """Below our own, when nobody catches the error; each line says whose it is."""
    error = RpcRemoteError("KeyError", "'x'", "Traceback:\n  line 3\n", rank=2)
    assert "On rank 2:\n[2] Traceback:\n[2]   line 3" in "".join(traceback.format_exception(error))
