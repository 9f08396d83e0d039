"""Why a call has no value: as facts that travel behind the words of a reply, and as an error."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from potluck.core.calls_encoding import RpcResponse
from potluck.core.calls_errors import (
    RpcBusy,
    RpcCancelled,
    RpcError,
    RpcFunctionNotFound,
    RpcInternal,
    RpcInvalidMessage,
    RpcRemoteError,
    RpcTimeout,
    RpcTooLarge,
)
from potluck.decoding import Lines, decode_msgpack, printable

__all__ = ["Failure", "Reason", "error_of", "reply_with"]

Reason = Literal["missing", "raised", "large", "busy", "late", "cancelled", "invalid", "internal"]

TEXT = 64 << 10
"""Characters of a text at most; of a longer traceback the end is kept, where it says most."""

ROOM = (TEXT, 8 << 10, 1 << 10, 128, 0)
"""How much of a text is left, from step to step, if a reply is larger than its caller takes."""


Text = Annotated[str, msgspec.Meta(max_length=TEXT)]
Trace = Annotated[Lines, msgspec.Meta(max_length=TEXT)]


class Failure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The facts; which of them count depends on the reason."""

    reason: Reason
    words: Text = ""
    name: Text = ""
    near: Annotated[list[Text], msgspec.Meta(max_length=16)] = []
    traceback: Trace = ""
    size: int = 0
    limit: int = 0
    seconds: float = 0.0


def reply_with(request_id: int, failure: Failure, rank: int, limit: int | None = None) -> bytes:
    """The reply of ``rank``, with words for those who know only the words.

    It has at most ``limit`` bytes, if its caller takes enough for the shortest reply.
    """
    reply = b""
    for text in ROOM:
        reply = _reply_with(request_id, _cut(failure, text), rank)
        if limit is None or len(reply) <= limit:
            break
    return reply


def _cut(failure: Failure, text: int) -> Failure:
    """The same with texts of so many characters at most, all of which can travel."""
    trace = failure.traceback
    return msgspec.structs.replace(
        failure,
        words=_plain(failure.words[:text]),
        name=_plain(failure.name[:text]),
        near=[each for each in failure.near if len(each) <= text],
        traceback=_plain(trace[max(0, len(trace) - text) :]),
    )


def _plain(text: str) -> str:
    """The same in UTF-8: a lone surrogate, of a file name for example, is written out."""
    return text.encode(errors="backslashreplace").decode()


def _reply_with(request_id: int, failure: Failure, rank: int) -> bytes:
    words = failure.words
    if failure.reason == "missing":
        words = f"function '{failure.name}' not registered on rank {rank}"
    elif failure.reason == "raised":
        words = f"{failure.name}: {failure.words}"
    elif failure.reason == "large":
        words = f"RPC response size {failure.size} exceeds maximum {failure.limit}"
    facts = msgspec.msgpack.encode(failure, order="deterministic")
    return RpcResponse(request_id, error=words, facts=facts).serialize()


def error_of(response: RpcResponse, rank: int) -> RpcError:
    """The error that a reply of ``rank`` stands for; also of one that has words only."""
    words = printable(response.error or "")[:TEXT]
    try:
        failure = decode_msgpack(response.facts, Failure)
    except (msgspec.DecodeError, ValueError):
        return RpcRemoteError("error", words, "", rank=rank)
    match failure.reason:
        case "missing":
            return RpcFunctionNotFound(failure.name, rank=rank, near=failure.near)
        case "raised":
            return RpcRemoteError(failure.name, failure.words, failure.traceback, rank=rank)
        case "large":
            return RpcTooLarge(failure.size, failure.limit, what="response", rank=rank)
        case "busy":
            return RpcBusy(failure.words, rank=rank, hint="Give its agent more workers.")
        case "late":
            return RpcTimeout(failure.words, seconds=failure.seconds, rank=rank)
        case "cancelled":
            return RpcCancelled(failure.words, rank=rank)
        case "invalid":
            return RpcInvalidMessage(failure.words, rank=rank)
        case _:  # "internal"
            return RpcInternal(failure.words, rank=rank)
