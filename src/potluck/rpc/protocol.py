"""The protocol of remote calls: messages, frames, limits, failures and queues.

Pure: no clock, thread or connection.  Times are numbers that the caller passes in.  In this order:
requests and responses as bytes; frames, and the pieces of long messages; budgets of messages in
progress; how a rank is addressed; failures as facts and as errors; what has arrived in part, what
waits to be sent, and a queue that is fair between peers.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import msgspec

from potluck._decode import Lines, decode_msgpack, printable
from potluck._types import NodeId, ProcessId
from potluck._version import UPGRADE
from potluck.net.frames import PIECE
from potluck.rpc.errors import (
    RpcBusy,
    RpcCancelled,
    RpcError,
    RpcFunctionNotFound,
    RpcInternal,
    RpcInvalidMessage,
    RpcNoConnection,
    RpcRemoteError,
    RpcTimeout,
    RpcTooLarge,
    near_names,
)

# --------------------------------------------------------------------------------------------------
# Requests and responses as bytes.
#
# All integers are little-endian; lengths are in bytes, text is UTF-8::
#
#     request    01 │ id: 8 │ length: 4 │ function name │ length: 4 │ payload
#     response   02 │ id: 8 │ 00        │ length: 4     │ payload
#                02 │ id: 8 │ 01        │ length: 4     │ error message
#
# Bytes after the last field are ignored by readers of these two formats: a response with an error
# carries a :class:`CallFailure` there.

MAX_RPC_MSG_SIZE = 1 << 30
"""The default limit of a message in bytes: 1 GiB."""

BytesLike = bytes | bytearray | memoryview

REQUEST, RESPONSE = 0x01, 0x02

_START = struct.Struct("<BQI")
_LENGTH = struct.Struct("<I")
_ANSWER = struct.Struct("<BQBI")
_ID_END = 9  # bytes of tag and id

REQUEST_OVERHEAD = _START.size + _LENGTH.size
"""Bytes of a request in addition to its name and payload."""

RESPONSE_OVERHEAD = _ANSWER.size
"""Bytes of a response in addition to its payload."""


def request_head(request_id: int, name: bytes, size: int) -> bytes:
    """A request without its payload."""
    return _START.pack(REQUEST, request_id, len(name)) + name + _LENGTH.pack(size)


def response_head(request_id: int, size: int, *, is_error: bool = False) -> bytes:
    """A response without its payload.

    >>> response_head(7, 3).hex(" ")
    '02 07 00 00 00 00 00 00 00 00 03 00 00 00'
    """
    return _ANSWER.pack(RESPONSE, request_id, is_error, size)


@dataclass(frozen=True, slots=True)
class RpcRequest:
    """A request as it is sent.

    >>> RpcRequest(42, "add", b"12").serialize().hex(" ")
    '01 2a 00 00 00 00 00 00 00 03 00 00 00 61 64 64 02 00 00 00 31 32'
    """

    request_id: int
    function_name: str
    payload: BytesLike

    def serialize(self) -> bytes:
        """As bytes."""
        head = request_head(self.request_id, self.function_name.encode(), len(self.payload))
        return head + self.payload

    @classmethod
    def deserialize(cls, data: BytesLike) -> RpcRequest:
        """Read bytes of an untrusted peer; the payload is a part of ``data``."""
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
    """A response as it is sent."""

    request_id: int
    payload: BytesLike = b""
    error: str | None = None
    facts: BytesLike = b""
    """What follows an error message; never sent with a payload."""

    def serialize(self) -> bytes:
        """As bytes."""
        if self.error is None:
            return response_head(self.request_id, len(self.payload)) + self.payload
        words = self.error.encode(errors="replace")
        return response_head(self.request_id, len(words), is_error=True) + words + self.facts

    @classmethod
    def deserialize(cls, data: BytesLike) -> RpcResponse:
        """Read bytes of an untrusted peer; the payload is a part of ``data``."""
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


# --------------------------------------------------------------------------------------------------
# Frames of the connection between two agents: a message is one frame, or several pieces.
#
# A large message is sent in pieces, and the pieces of several messages alternate, so that none
# delays another by more than one piece.  The first piece has the total length, which is checked
# before anything is allocated.  All integers are little-endian::
#
#     offset 0     1     2        4        8       16      20
#            ┌─────┬─────┬────────┬────────┬───────┬───────┬──────────┐
#            │kind │flags│  zero  │ length │ number│ total │ patience │  length bytes …
#            └─────┴─────┴────────┴────────┴───────┴───────┴──────────┘

SHORT = 32 << 10
"""Bytes up to which a message is sent in one frame, before longer ones."""

MAX_PATIENCE = (1 << 32) - 1
"""Milliseconds: the longest timeout that a frame can carry, 49 days."""

_LAYOUT = struct.Struct("<BBHIQII")
HEADER_SIZE = _LAYOUT.size

_HELLO = struct.Struct("<8sIIQI")
_MAGIC = b"PLrpc\x00\x00\x02"  # a change of what follows raises OLDEST_PROTOCOL
HELLO_SIZE = _HELLO.size


class FrameKind(IntEnum):
    """The kind of a frame."""

    HELLO = 1
    """The first frame of either side: the limits that it sets the other."""
    REQUEST = 2
    RESPONSE = 3
    CANCEL = 4
    """The caller no longer waits for the answer to this call; it is answered anyway."""
    GOODBYE = 5
    """The agent of the sender closes; this is its last frame."""


class FrameFlag(IntEnum):
    """The flags of a frame."""

    MORE = 1
    """Further pieces of this message follow."""
    LATER = 2
    """This is not the first piece."""
    TYPED = 4
    """The payload holds encoded values, not bytes from the caller."""
    NESTED = 8
    """The call was made by a function that answers another call."""


KNOWN_MARKS = FrameFlag.MORE | FrameFlag.LATER | FrameFlag.TYPED | FrameFlag.NESTED


class RpcFrame(NamedTuple):
    """A decoded header."""

    kind: FrameKind
    marks: int
    length: int
    number: int
    total: int
    """Bytes of the whole message."""
    patience: int
    """Milliseconds the caller is willing to wait."""


def pack_frame(
    kind: int, number: int, length: int, *, marks: int = 0, total: int = 0, patience: int = 0
) -> bytes:
    """A header; a message in one piece has the same length and total.

    >>> pack_frame(FrameKind.CANCEL, 5, 0).hex(" ")
    '04 00 00 00 00 00 00 00 05 00 00 00 00 00 00 00 00 00 00 00 00 00 00 00'
    """
    return _LAYOUT.pack(kind, marks, 0, length, number, total or length, patience)


_REQUEST = struct.Struct("<BBHIQIIBQI")
_RESPONSE = struct.Struct("<BBHIQIIBQBI")


def short_request(number: int, name: bytes, payload: BytesLike, marks: int, patience: int) -> bytes:
    """A whole request in one frame, made in as few steps as possible: most requests are short."""
    total = REQUEST_OVERHEAD + len(name) + len(payload)
    head = _REQUEST.pack(2, marks, 0, total, number, total, patience, 1, number, len(name))
    return b"".join((head, name, len(payload).to_bytes(4, "little"), payload))


def short_response(number: int, payload: BytesLike, marks: int) -> bytes:
    """A whole response with a value in one frame."""
    total = RESPONSE_OVERHEAD + len(payload)
    head = _RESPONSE.pack(3, marks, 0, total, number, total, 0, 2, number, 0, len(payload))
    return head + payload


_KINDS = {int(kind): kind for kind in FrameKind}
_EMPTY = frozenset({FrameKind.CANCEL, FrameKind.GOODBYE})


def read_frame(data: bytes | bytearray | memoryview, offset: int, limit: int) -> RpcFrame:
    """Read and check the header at ``offset``; ``limit`` is for the whole message."""
    code, marks, zero, length, number, total, patience = _LAYOUT.unpack_from(data, offset)
    kind = _KINDS.get(code)
    if kind is None or zero or marks & ~KNOWN_MARKS:
        raise RpcInvalidMessage(f"no frame begins with {bytes(data[offset : offset + 4]).hex()}")
    if total > limit:
        raise RpcTooLarge(total, limit)
    if length > PIECE or length > total:
        raise RpcInvalidMessage(f"a piece of {length} bytes of a message of {total}")
    is_part = marks & (FrameFlag.MORE | FrameFlag.LATER)
    if kind is FrameKind.HELLO or kind in _EMPTY:
        expected = 0 if kind in _EMPTY else HELLO_SIZE
        if is_part or length != expected or total != expected:
            raise RpcInvalidMessage(f"a {kind.name} frame of {length} bytes")
    elif (not is_part and length != total) or not length:
        raise RpcInvalidMessage(f"a whole message of {length} bytes where {total} were announced")
    return RpcFrame(kind, marks, length, number, total, patience)


class RpcHello(NamedTuple):
    """The limits that an agent sets each of its peers."""

    calls: int
    """Calls that may be unanswered at a time."""
    window: int
    """Bytes of messages that may be in progress at a time; a single message may be larger."""
    max_message: int
    """Bytes of one message."""
    generation: int = 1
    """The number of agents that its rank has made on this group, including this one."""

    def pack(self) -> bytes:
        """As bytes."""
        return _HELLO.pack(_MAGIC, self.calls, self.max_message, self.window, self.generation)

    @classmethod
    def unpack(cls, data: bytes | bytearray | memoryview) -> RpcHello:
        """From the bytes of a peer.

        >>> RpcHello.unpack(RpcHello(8, 1 << 20, 1 << 30).pack())
        RpcHello(calls=8, window=1048576, max_message=1073741824, generation=1)
        """
        magic, calls, max_message, window, generation = _HELLO.unpack(data)
        if magic != _MAGIC:
            raise RpcInvalidMessage(
                "the other side speaks another protocol",
                hint=f"If its version of Potluck differs, upgrade the older one: {UPGRADE}",
            )
        if not calls:
            raise RpcInvalidMessage("the other side allows no call at all")
        return cls(calls, window, max_message, generation)


# --------------------------------------------------------------------------------------------------
# Limits of messages in progress, and of the time that functions take; how a rank is addressed.

MAX_NAME = 1024
"""Bytes of a function's name."""

LEAST = 4
"""Characters of the shortest prefix of an id."""

MANY = 8
"""Machines that an error names to a caller that looks for another one."""


UNLIMITED = (1 << 63) - 1


class Budget:
    """How many messages, and how many bytes of them, may be in progress at a time.

    Short messages share a number of bytes, long ones share the same number again, and one message
    that is larger than that may be in progress beside them.  So no message waits for a longer one.

    >>> budget = Budget(100_000)
    >>> budget.add(1 << 30); budget.admits(1 << 30), budget.admits(100_000), budget.admits(1)
    (False, True, True)
    >>> budget = Budget(100, messages=2)
    >>> budget.admits(500); budget.add(500); budget.admits(1); budget.add(1); budget.admits(1)
    True
    True
    False
    """

    __slots__ = ("_larger", "_long", "_messages", "_nbytes", "_short", "_short_up_to", "messages")

    def __init__(self, nbytes: int, messages: int = UNLIMITED) -> None:
        self._nbytes = nbytes
        self._messages = messages
        self._short_up_to = min(SHORT, nbytes)  # no longer message counts as short
        self._short = 0
        self._long = 0
        self._larger = 0
        self.messages = 0
        """Messages in progress."""

    @property
    def nbytes(self) -> int:
        """Bytes in progress, without a message that is larger than the limit."""
        return self._short + self._long

    def admits(self, size: int) -> bool:
        """Whether one more message may begin."""
        if self.messages >= self._messages:
            return False
        if size <= self._short_up_to:
            return size + self._short <= self._nbytes
        return not self._larger if size > self._nbytes else size + self._long <= self._nbytes

    def is_larger(self, size: int) -> bool:
        """Whether a message is over the limit, so that only one such message may be in progress."""
        return size > self._nbytes

    def add(self, size: int) -> None:
        """Count a message that begins."""
        self.messages += 1
        if size <= self._short_up_to:
            self._short += size
        elif size > self._nbytes:
            self._larger += 1
        else:
            self._long += size

    def remove(self, size: int) -> None:
        """Count a message that has ended."""
        self.messages -= 1
        if size <= self._short_up_to:
            self._short -= size
        elif size > self._nbytes:
            self._larger -= 1
        else:
            self._long -= size


class HandlerPace:
    """Whether a function is quick enough to run on the thread that reads requests.

    Several quick runs in a row are needed.  One slow run, which a busy machine may cause, does not
    change the result; two do.
    """

    __slots__ = ("_trust",)

    QUICK = 300e-6
    """Seconds: passing a call to another thread takes a tenth of this."""
    ENOUGH, MOST, PRICE = 3, 8, 4

    def __init__(self) -> None:
        self._trust = 0

    def observe(self, seconds: float) -> None:
        """Count a run of this duration."""
        if seconds <= self.QUICK:
            self._trust = min(self.MOST, self._trust + 1)
        else:
            self._trust = max(0, self._trust - self.PRICE)

    @property
    def is_quick(self) -> bool:
        """Whether recent runs were quick."""
        return self._trust >= self.ENOUGH


class StallDetector:
    """Detects that every worker has waited for a call of its own for some time.

    A nested call then may never get a worker: what the workers wait for may wait for it.
    """

    def __init__(self, workers: int, after: float) -> None:
        self._workers = workers
        self._after = after
        self._waiting = 0
        self._since = math.inf

    def begin_waiting(self, now: float) -> None:
        """Count a worker that begins to wait for a call."""
        self._waiting += 1
        if self._waiting >= self._workers:
            self._since = now

    def end_waiting(self) -> None:
        """Count a worker that got its answer."""
        self._waiting -= 1
        self._since = math.inf

    def is_stalled(self, now: float) -> bool:
        """Whether all workers have waited for at least the configured time."""
        return now - self._since >= self._after


def milliseconds(seconds: float) -> int:
    """Seconds as the milliseconds of a frame, at least one.

    >>> milliseconds(0.25), milliseconds(1e-9), milliseconds(float("inf")) == MAX_PATIENCE
    (250, 1, True)
    """
    return max(1, int(min(seconds * 1000, MAX_PATIENCE)))


def reply_by(arrived: float, patience: int) -> float:
    """The time by which a call must be refused for the caller to get the reason.

    A little before the caller's timeout.
    """
    seconds = patience / 1000
    return arrived + seconds - min(seconds / 10, 0.1)


def name_in_bytes(name: str) -> bytes:
    """The name of a function as bytes; raises for a name that cannot be sent.

    >>> name_in_bytes("add")
    b'add'
    """
    if not isinstance(name, str):
        msg = f"The name of a function must be a str, got {name!r}"
        raise TypeError(msg)
    try:
        encoded = name.encode()
    except UnicodeEncodeError:
        msg = f"The name {name[:MAX_NAME]!r} has characters that cannot be sent"
        raise ValueError(msg) from None
    if not 0 < len(encoded) <= MAX_NAME:
        msg = f"The name of a function must have 1 to {MAX_NAME} bytes, got {len(encoded)}"
        raise ValueError(msg)
    return encoded


class RankAddress(NamedTuple):
    """The machine and the process of a rank."""

    name: str
    """Its machine, and perhaps an address: ``attic at 10.0.0.3:4040``."""
    node: str = ""
    """The id of that machine; empty if it is not known."""
    start: int | None = None
    """The incarnation of the process; None if that is not known."""


def find_rank(wanted: str, ranks: Mapping[int, RankAddress]) -> int:
    """The rank on a machine, by the name of the machine or a prefix of an id.

    >>> ranks = {0: RankAddress("kitchen", "c0ffee00"), 1: RankAddress("attic", "badcab1e", 7)}
    >>> find_rank("attic", ranks), find_rank("c0ff", ranks), find_rank("badcab/7", ranks)
    (1, 0, 1)
    """
    short = {rank: each.name.partition(" at ")[0] for rank, each in ranks.items()}
    found = [rank for rank, each in ranks.items() if wanted in (each.name, short[rank])]
    found = found or [rank for rank, each in ranks.items() if _is_meant(wanted, each)]
    if len(found) == 1:
        return found[0]
    if found:
        numbers = ", ".join(map(str, found))
        names = ", ".join(dict.fromkeys(ranks[rank].name for rank in found))
        raise RpcNoConnection(
            wanted,
            cause=f"it matches several ranks: {numbers} ({names})",
            hint="Address one by its number, or by the id of its process.",
        )
    near = near_names(wanted, sorted(set(short.values())))
    here = ", ".join(sorted(set(short.values()))[:MANY])
    raise RpcNoConnection(
        wanted,
        cause="no rank runs there",
        hint=f"Did you mean {' or '.join(near)}?" if near else f"The machines here: {here}.",
    )


def _is_meant(wanted: str, there: RankAddress) -> bool:
    node, slash, start = wanted.partition("/")
    if len(node) < LEAST or not there.node.startswith(node):
        return False
    if not slash or there.start is None:
        return not slash
    shown = str(ProcessId(NodeId(there.node), there.start)).partition("/")[2]
    return start in (str(there.start), shown)


# --------------------------------------------------------------------------------------------------
# Why a call has no value: as a part of the response, and as an error.

Reason = Literal["missing", "raised", "large", "busy", "late", "cancelled", "invalid", "internal"]

TEXT = 64 << 10
"""The most characters of a text; of a longer traceback the end is kept."""

ROOM = (TEXT, 8 << 10, 1 << 10, 128, 0)
"""Lengths to which texts are cut, one after the other, until a reply fits its caller's limit."""


Text = Annotated[str, msgspec.Meta(max_length=TEXT)]
Trace = Annotated[Lines, msgspec.Meta(max_length=TEXT)]


class CallFailure(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Why a call has no value; the reason decides which other fields are used."""

    reason: Reason
    words: Text = ""
    name: Text = ""
    near: Annotated[list[Text], msgspec.Meta(max_length=16)] = []
    traceback: Trace = ""
    size: int = 0
    limit: int = 0
    seconds: float = 0.0


def reply_with(request_id: int, failure: CallFailure, rank: int, limit: int | None = None) -> bytes:
    """The response of ``rank``: an error message, followed by the failure.

    It has at most ``limit`` bytes, if that is enough for the shortest response.
    """
    reply = b""
    for text in ROOM:
        reply = _reply_with(request_id, _cut(failure, text), rank)
        if limit is None or len(reply) <= limit:
            break
    return reply


def _cut(failure: CallFailure, text: int) -> CallFailure:
    """The failure with texts of at most ``text`` characters, in valid UTF-8."""
    trace = failure.traceback
    return msgspec.structs.replace(
        failure,
        words=_plain(failure.words[:text]),
        name=_plain(failure.name[:text]),
        near=[each for each in failure.near if len(each) <= text],
        traceback=_plain(trace[max(0, len(trace) - text) :]),
    )


def _plain(text: str) -> str:
    """The text with lone surrogates, which file names may have, written as escapes."""
    return text.encode(errors="backslashreplace").decode()


def _reply_with(request_id: int, failure: CallFailure, rank: int) -> bytes:
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
    """The error for a response of ``rank``, also one without a :class:`CallFailure`."""
    words = printable(response.error or "")[:TEXT]
    try:
        failure = decode_msgpack(response.facts, CallFailure)
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


# --------------------------------------------------------------------------------------------------
# Messages that arrive in pieces, and the memory for them.


class PartialMessage:
    """A message of which some bytes may be missing."""

    __slots__ = ("filled", "first", "view")

    def __init__(self, first: RpcFrame, view: memoryview) -> None:
        self.first = first
        self.view = view
        self.filled = 0


class Assembly:
    """The incomplete messages of one peer, within a :class:`Budget`."""

    def __init__(
        self,
        allowed: int,
        allocate: Callable[[int], memoryview] = lambda size: memoryview(bytearray(size)),
        *,
        least: int = 0,
    ) -> None:
        """``least`` is the smallest size of a message in pieces: a peer cannot begin millions."""
        self._allowed = allowed
        self._budget = Budget(allowed)
        self._least = least
        self._allocate = allocate
        self._parts: dict[tuple[int, int], PartialMessage] = {}

    def __len__(self) -> int:
        """How many there are."""
        return len(self._parts)

    def has(self, kind: int, number: int) -> bool:
        """Whether a message has begun and is incomplete."""
        return (kind, number) in self._parts

    def accept(self, frame: RpcFrame) -> PartialMessage:
        """The message that a piece belongs to; the caller appends the bytes.

        Memory is allocated only within the budget, and no piece may exceed the announced total.
        """
        key = (frame.kind, frame.number)
        whole = self._parts.get(key)
        if frame.marks & FrameFlag.LATER:
            if whole is None or whole.first.total != frame.total:
                raise RpcInvalidMessage(f"a piece of message {frame.number}, which did not begin")
        else:
            if frame.total < self._least:
                raise RpcInvalidMessage(f"a message of only {frame.total} bytes in pieces")
            if whole is not None:
                raise RpcInvalidMessage(f"message {frame.number} begins twice")
            if not self._budget.admits(frame.total):
                raise RpcInvalidMessage(f"more than {self._allowed} bytes in progress at a time")
            whole = self._parts[key] = PartialMessage(frame, self._allocate(frame.total))
            self._budget.add(frame.total)
        end = whole.filled + frame.length
        if end > frame.total or (end == frame.total) == bool(frame.marks & FrameFlag.MORE):
            raise RpcInvalidMessage(f"message {frame.number} does not end where it should")
        return whole

    def finish(self, whole: PartialMessage) -> None:
        """Remove a message that is complete."""
        del self._parts[whole.first.kind, whole.first.number]
        self._budget.remove(whole.first.total)


# --------------------------------------------------------------------------------------------------
# Messages that wait to be sent to one peer, and their order.
#
# Short messages are sent first, many at a time.  After each batch follows one piece of a long
# message, the long ones in rotation.  So a large array delays a small call by one piece, and small
# calls never stop an array.

BATCH = 64
"""The most short messages, and so buffers, of one batch; the kernel accepts 1,024."""


class _Long:
    """A long message of which some pieces may have been sent."""

    __slots__ = ("is_owed", "key", "marks", "parts", "patience", "sent", "total")

    def __init__(self, key: tuple[int, int], parts: list[memoryview], total: int) -> None:
        self.key = key
        self.parts = parts
        self.total = total
        self.sent = 0
        self.marks = 0
        self.patience = 0
        self.is_owed = False

    def next_piece(self, size: int) -> list[BytesLike]:
        """The next frame."""
        length = min(size, self.total - self.sent)
        marks = self.marks | (FrameFlag.LATER if self.sent else 0)
        self.sent += length
        if self.sent < self.total:
            marks |= FrameFlag.MORE
        kind, number = self.key
        frame: list[BytesLike] = [
            pack_frame(kind, number, length, marks=marks, total=self.total, patience=self.patience)
        ]
        while length:
            part = self.parts[0]
            if len(part) <= length:
                frame.append(self.parts.pop(0))
                length -= len(part)
            else:
                frame.append(part[:length])
                self.parts[0] = part[length:]
                length = 0
        return frame


class CallOutbox:
    """The messages to one peer."""

    def __init__(self, piece: int = PIECE) -> None:
        self._piece = piece
        self._short: deque[bytes] = deque()
        self._begun: deque[_Long] = deque()
        self._later: deque[_Long] = deque()
        self._budget = Budget(PIECE)
        self._longs_turn = False
        self.owed = 0
        """Bytes of answers and of all short messages that wait; one large answer is not counted."""
        self._large_answers = 0

    def allow(self, window: int) -> None:
        """Set the bytes of long messages that may be in progress, before anything is added."""
        self._budget = Budget(window)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not (self._short or self._begun or self._later)

    def add_short(self, frame: bytes) -> None:
        """Add a whole frame."""
        self._short.append(frame)
        self.owed += len(frame)

    def add_long(
        self,
        kind: int,
        number: int,
        parts: list[memoryview],
        *,
        marks: int = 0,
        patience: int = 0,
    ) -> None:
        """Add a message to be sent in pieces; its parts must not change until it has been sent."""
        parts = [part for part in parts if len(part)]
        message = _Long((kind, number), parts, sum(map(len, parts)))
        message.marks, message.patience = marks, patience
        if kind == FrameKind.RESPONSE:
            message.is_owed = True
            if self._budget.is_larger(message.total):
                message.is_owed = self._large_answers > 0
                self._large_answers += 1
        self._later.append(message)
        self.owed += message.total if message.is_owed else 0

    def withdraw(self, kind: int, number: int) -> bool:
        """Remove a long message if nothing of it has been sent; whether it was removed."""
        for message in self._later:
            if message.key == (kind, number):
                self._later.remove(message)
                self._count_sent(message, message.total)
                return True
        return False

    def take(self) -> list[BytesLike]:
        """The buffers to send next; empty if nothing waits."""
        if self._short and not (self._longs_turn and (self._begun or self._later)):
            return self._take_batch()
        self._longs_turn = False
        self._begin_more()
        if not self._begun:
            return []
        message = self._begun.popleft()
        before = message.sent
        frame = message.next_piece(self._piece)
        self._count_sent(message, message.sent - before)
        if message.sent < message.total:
            self._begun.append(message)
        else:
            self._budget.remove(message.total)
            if message.key[0] == FrameKind.RESPONSE and self._budget.is_larger(message.total):
                self._large_answers -= 1
        return frame

    def _count_sent(self, message: _Long, count: int) -> None:
        self.owed -= count if message.is_owed else 0

    def _take_batch(self) -> list[BytesLike]:
        batch: list[BytesLike] = []
        size = 0
        while self._short and len(batch) < BATCH and size < self._piece:
            frame = self._short.popleft()
            size += len(frame)
            batch.append(frame)
        self.owed -= size
        self._longs_turn = True
        return batch

    def _begin_more(self) -> None:
        """Begin long messages within the budget; one over the limit delays only others like it."""
        if not self._later:
            return
        passed: list[_Long] = []
        while self._later:
            message = self._later[0]
            if self._budget.admits(message.total):
                self._budget.add(message.total)
                self._begun.append(self._later.popleft())
            elif self._budget.is_larger(message.total):
                passed.append(self._later.popleft())
            else:
                break
        self._later.extendleft(reversed(passed))


# --------------------------------------------------------------------------------------------------
# A queue that is fair between peers.

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Items of several peers, taken from each peer in turn.

    >>> queue = FairQueue()
    >>> for peer, item in ((1, "a"), (1, "b"), (2, "c")): queue.add(peer, item)
    >>> queue.take(), queue.take(), queue.take(), queue.take()
    ('a', 'c', 'b', None)
    """

    def __init__(self) -> None:
        self._turns: deque[Hashable] = deque()
        self._waiting: dict[Hashable, deque[Item]] = {}
        self._count = 0

    def __len__(self) -> int:
        """The number of items that wait."""
        return self._count

    def add(self, peer: Hashable, item: Item) -> None:
        """Add an item after the others of its peer."""
        line = self._waiting.get(peer)
        if line is None:
            line = self._waiting[peer] = deque()
            self._turns.append(peer)
        line.append(item)
        self._count += 1

    def take(self, may: Callable[[Any], bool] = lambda _: True) -> Item | None:
        """The next item of a peer for which ``may`` is true; None if there is none."""
        for _ in range(len(self._turns)):
            peer = self._turns.popleft()
            if not may(peer):
                self._turns.append(peer)
                continue
            line = self._waiting[peer]
            item = line.popleft()
            self._count -= 1
            if line:
                self._turns.append(peer)
            else:
                del self._waiting[peer]
            return item
        return None

    def take_out(self, unwanted: Callable[[Item], bool]) -> list[Item]:
        """Remove and return the items for which ``unwanted`` is true."""
        found: list[Item] = []
        for peer in list(self._turns):
            line = self._waiting[peer]
            out = [item for item in line if unwanted(item)]
            if not out:
                continue
            found += out
            rest = deque(item for item in line if not unwanted(item))
            if rest:
                self._waiting[peer] = rest
            else:
                del self._waiting[peer]
                self._turns.remove(peer)
        self._count -= len(found)
        return found
