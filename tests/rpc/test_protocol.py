"""How many calls at a time, for how long, where they run, and to whom."""

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import (
    DistributedError,
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
    Timeout,
)
from potluck._types import NodeId, ProcessId
from potluck.net.frames import PIECE
from potluck.rpc.errors import RpcNoConnection as ErrorsRpcNoConnection
from potluck.rpc.errors import near_names
from potluck.rpc.protocol import (
    BATCH,
    HEADER_SIZE,
    HELLO_SIZE,
    MAX_RPC_MSG_SIZE,
    SHORT,
    TEXT,
    Assembly,
    Budget,
    CallFailure,
    CallOutbox,
    FairQueue,
    FrameFlag,
    FrameKind,
    HandlerPace,
    RankAddress,
    Reason,
    RpcFrame,
    RpcHello,
    RpcRequest,
    RpcResponse,
    StallDetector,
    error_of,
    find_rank,
    milliseconds,
    name_in_bytes,
    pack_frame,
    read_frame,
    reply_by,
    reply_with,
    request_head,
    short_request,
    short_response,
)


def test_a_window_bounds_calls_and_bytes() -> None:
    """And lets a single message of any size through."""
    window = Budget(100, messages=2)
    window.add(60)
    assert window.admits(40)
    assert not window.admits(41)
    window.add(40)
    assert not window.admits(0)
    window.remove(60)
    window.remove(40)
    assert (window.messages, window.nbytes) == (0, 0)
    assert window.admits(1 << 40)


def test_the_longest_short_message_does_not_wait_for_long_ones() -> None:
    """They have bytes of their own; one byte more is a long message."""
    window = Budget(2 * SHORT)
    window.add(2 * SHORT)
    assert window.admits(SHORT)
    assert not window.admits(SHORT + 1)
    window.add(SHORT)
    assert window.nbytes == 3 * SHORT
    window.remove(2 * SHORT)
    assert window.admits(2 * SHORT)
    window.remove(SHORT)
    assert (window.nbytes, window.messages) == (0, 0)


def test_long_messages_have_a_budget_beside_the_short_ones() -> None:
    """What has ended makes room again, of either kind."""
    window = Budget(100_000, messages=10)
    window.add(100_000)
    assert not window.admits(90_000)
    assert window.admits(10)
    window.add(10)
    window.remove(100_000)
    assert window.admits(90_000)
    window.add(1 << 30)
    assert window.admits(90_000)
    assert not window.admits(1 << 30)
    window.remove(1 << 30)
    assert window.admits(1 << 30)


def test_a_function_earns_trust_by_quick_runs() -> None:
    """One slow run after many quick ones is forgiven, two are not."""
    pace = HandlerPace()
    assert not pace.is_quick
    for _ in range(20):
        pace.observe(1e-6)
    assert pace.is_quick
    pace.observe(1.0)
    assert pace.is_quick
    pace.observe(1.0)
    pace.observe(1.0)
    assert not pace.is_quick
    for _ in range(HandlerPace.ENOUGH):
        pace.observe(1e-6)
    assert pace.is_quick


def test_all_workers_waiting_for_long_is_a_stall() -> None:
    """Not if one of them works, nor if one got its answer meanwhile."""
    stall = StallDetector(workers=2, after=0.5)
    stall.begin_waiting(10.0)
    assert not stall.is_stalled(20.0)
    stall.begin_waiting(20.0)
    assert not stall.is_stalled(20.4)
    assert stall.is_stalled(20.5)
    stall.end_waiting()
    assert not stall.is_stalled(30.0)
    stall.begin_waiting(30.0)
    assert not stall.is_stalled(30.1)
    assert stall.is_stalled(30.5)


def test_a_reason_arrives_before_the_caller_gives_up() -> None:
    """A tenth earlier, or a tenth of a second."""
    assert reply_by(5.0, milliseconds(0.5)) == pytest.approx(5.45)
    assert reply_by(5.0, milliseconds(60)) == pytest.approx(64.9)


def test_a_node_is_found_by_its_name() -> None:
    """In short or in full; several ranks on one machine need a number."""
    names = ["kitchen at 10.0.0.2:1", "attic at 10.0.0.3:1", "attic at 10.0.0.3:2"]
    ranks = {rank: RankAddress(name) for rank, name in enumerate(names)}
    assert find_rank("kitchen", ranks) == 0
    assert find_rank("attic at 10.0.0.3:2", ranks) == 2
    with pytest.raises(RpcNoConnection, match=r"several ranks: 1, 2 \(attic at 10.0.0.3:1, attic"):
        find_rank("attic", ranks)
    with pytest.raises(RpcNoConnection, match=r"'kitchn': no rank .*\. Did you mean kitchen\?"):
        find_rank("kitchn", ranks)
    with pytest.raises(RpcNoConnection, match=r"The machines here: attic, kitchen\.$"):
        find_rank("zzz", ranks)


def test_a_node_is_found_by_its_id_or_the_beginning_of_it() -> None:
    """A process by the id of its node and its start; too few characters stand for nobody."""
    ranks = {
        0: RankAddress("kitchen", "a" * 32, 7),
        1: RankAddress("attic", "a" * 31 + "b", 7),
        2: RankAddress("attic", "b" * 32, 7),
        3: RankAddress("attic", "b" * 32, 71),
        4: RankAddress("shed"),
        5: RankAddress("cellar", "c" * 32, 1_731_700_004_711),
        6: RankAddress("cellar", "c" * 32),
    }
    assert find_rank("cccccccc/1731700004711", ranks) == 5
    assert find_rank(str(ProcessId(NodeId("c" * 32), 1_731_700_004_711)), ranks) == 5
    assert find_rank("a" * 32, ranks) == 0
    assert find_rank("a" * 31 + "b", ranks) == 1
    assert find_rank("bbbb/71", ranks) == 3
    assert find_rank("b" * 32 + "/7", ranks) == 2
    with pytest.raises(RpcNoConnection, match=r"several ranks: 0, 1 \(kitchen, attic\)"):
        find_rank("aaaaaaaa/7", ranks)
    for stranger in ("aaa", "bbbb/8", "bbbb/", ""):
        with pytest.raises(RpcNoConnection, match="no rank runs there"):
            find_rank(stranger, ranks)


def test_a_name_that_cannot_be_sent_is_refused() -> None:
    """Before anything is sent, and in words."""
    assert name_in_bytes("süß") == b"s\xc3\xbc\xc3\x9f"
    for name, words in (
        ("", "1 to 1024 bytes, got 0"),
        ("x" * 1025, "1 to 1024 bytes, got 1025"),
        ("\ud800", "cannot be sent"),
    ):
        with pytest.raises(ValueError, match=words):
            name_in_bytes(name)
    with pytest.raises(TypeError, match="must be a str, got 5"):
        name_in_bytes(5)  # type: ignore[arg-type]


# --------------------------------------------------------------------------------------------------
# No memory is taken for what is not allowed, and no piece goes where it does not belong.


def piece(number: int, length: int, total: int, marks: int = 0) -> RpcFrame:
    """The header of a piece."""
    return RpcFrame(FrameKind.REQUEST, marks, length, number, total, 0)


def begun(total: int = 10) -> Assembly:
    """Five bytes of message 1 are here."""
    assembly = Assembly(100)
    whole = assembly.accept(piece(1, 5, total, FrameFlag.MORE))
    whole.filled += 5
    return assembly


BAD = {
    "it did not begin": piece(2, 5, 10, FrameFlag.LATER),
    "it announced another length": piece(1, 5, 11, FrameFlag.LATER),
    "it begins twice": piece(1, 5, 10, FrameFlag.MORE),
    "it goes beyond its end": piece(1, 6, 10, FrameFlag.LATER),
    "it ends too soon": piece(1, 4, 10, FrameFlag.LATER),
    "it should have ended": piece(1, 5, 10, FrameFlag.LATER | FrameFlag.MORE),
    "it is too much beside another": piece(2, 5, 91, FrameFlag.MORE),
}


@pytest.mark.parametrize("frame", BAD.values(), ids=BAD)
def test_a_piece_that_does_not_belong_is_refused(frame: RpcFrame) -> None:
    """Whoever sends it does not keep to the protocol."""
    with pytest.raises(RpcInvalidMessage):
        begun().accept(frame)


def test_the_last_piece_completes_it() -> None:
    """And what it had taken is free again."""
    assembly = begun()
    whole = assembly.accept(piece(1, 5, 10, FrameFlag.LATER))
    assert whole.filled == 5
    assert assembly.has(FrameKind.REQUEST, 1)
    assembly.finish(whole)
    assert not assembly.has(FrameKind.REQUEST, 1)
    assert (len(assembly), assembly._budget.nbytes) == (0, 0)


def test_a_short_message_is_not_cut() -> None:
    """Else a peer could begin any number of messages of two bytes, each with memory of its own."""
    assembly = Assembly(100, least=11)
    with pytest.raises(RpcInvalidMessage, match="a message of only 10 bytes in pieces"):
        assembly.accept(piece(1, 5, 10, FrameFlag.MORE))
    assert len(assembly) == 0
    assert assembly.accept(piece(1, 5, 11, FrameFlag.MORE)).filled == 0


# --------------------------------------------------------------------------------------------------
# Requests and responses are the bytes that the origin wrote, byte by byte.


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


# --------------------------------------------------------------------------------------------------
# Why a call has no value arrives as the error that says so.

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
    reply = RpcResponse.deserialize(reply_with(3, CallFailure(reason, words="why"), rank=2))
    error = error_of(reply, rank=2)
    assert type(error) is KINDS[reason]
    assert error.rank == 2
    assert isinstance(error, DistributedError)


def test_a_reply_has_the_words_of_the_origin() -> None:
    """For somebody who reads nothing else."""
    missing = RpcResponse.deserialize(reply_with(3, CallFailure("missing", name="ad"), rank=2))
    assert missing.error == "function 'ad' not registered on rank 2"
    raised = CallFailure("raised", name="ValueError", words="no such step")
    assert RpcResponse.deserialize(reply_with(3, raised, 0)).error == "ValueError: no such step"


def test_words_alone_are_an_error_too() -> None:
    """Of somebody who sends nothing else."""
    error = error_of(RpcResponse(3, error="no such step"), rank=4)
    assert isinstance(error, RpcRemoteError)
    assert error.remote_message == "no such step"


def test_what_a_function_raised_keeps_type_message_and_traceback() -> None:
    """Of a long text, the end."""
    failure = CallFailure("raised", name="KeyError", words="'x'", traceback="a" * TEXT + "line 3")
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
    assert ErrorsRpcNoConnection(1).recoverable
    lost = ErrorsRpcNoConnection(1, host="attic", cause="it is gone")
    assert str(lost) == "no connection to rank 1 (attic): it is gone"
    assert near_names("ech", ["echo", "add"]) == ["echo"]


@pytest.mark.parametrize("limit", [512, 3000, 40_000, 1 << 20])
def test_a_reply_is_no_larger_than_its_caller_takes(limit: int) -> None:
    """It loses words rather than the connection, and is still the same error."""
    long = "x" * 100_000
    raised = CallFailure("raised", name="KeyError", words=long, traceback=long + "line 3")
    reply = reply_with(1, raised, 0, limit)
    assert limit / 100 < len(reply) <= limit
    error = error_of(RpcResponse.deserialize(reply), 0)
    assert isinstance(error, RpcRemoteError)
    missing = reply_with(1, CallFailure("missing", name=long, near=[long]), 0, limit)
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


# --------------------------------------------------------------------------------------------------
# Everybody gets a turn.


def test_a_peer_with_many_calls_does_not_hold_up_one_with_few() -> None:
    """They alternate."""
    queue: FairQueue[str] = FairQueue()
    for number in range(5):
        queue.add(1, f"a{number}")
    queue.add(2, "b0")
    assert [queue.take() for _ in range(7)] == ["a0", "b0", "a1", "a2", "a3", "a4", None]


def test_whoever_may_not_keeps_its_place() -> None:
    """The others go on, and it is not forgotten."""
    queue: FairQueue[str] = FairQueue()
    queue.add(1, "a")
    queue.add(2, "b")
    assert queue.take(lambda peer: peer == 2) == "b"
    assert queue.take(lambda peer: peer == 2) is None
    assert len(queue) == 1
    assert queue.take() == "a"


def test_items_can_be_taken_out_wherever_they_stand() -> None:
    """The order of the rest stays."""
    queue: FairQueue[int] = FairQueue()
    for item in range(10):
        queue.add(item % 3, item)
    assert sorted(queue.take_out(lambda item: item % 3 == 0 or item == 4)) == [0, 3, 4, 6, 9]
    assert [queue.take() for _ in range(6)] == [1, 2, 7, 5, 8, None]
    assert len(queue) == 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers())))
def test_nothing_is_lost_and_each_peer_keeps_its_order(items: list[tuple[int, int]]) -> None:
    """Whatever is put in comes out once, a peer's items in their order."""
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for item in items:
        queue.add(item[0], item)
    out = [queue.take() for _ in items]
    for peer in range(4):
        of_peer = [item for item in items if item[0] == peer]
        assert [item for item in out if item is not None and item[0] == peer] == of_peer


# --------------------------------------------------------------------------------------------------
# Frames say what follows, and what they say is checked before anything is allocated.

LIMIT = 1 << 20


def test_a_header_byte_by_byte() -> None:
    """Kind, flags, zero, length, number, total, patience; little-endian."""
    header = pack_frame(
        FrameKind.REQUEST, 0x0A0B, 5, marks=FrameFlag.MORE | FrameFlag.TYPED, total=9, patience=300
    )
    assert header.hex(" ") == (
        "02 05 00 00 05 00 00 00 0b 0a 00 00 00 00 00 00 09 00 00 00 2c 01 00 00"
    )
    assert len(header) == HEADER_SIZE
    frame = read_frame(b"xx" + header, 2, LIMIT)
    assert frame == (FrameKind.REQUEST, 5, 5, 0x0A0B, 9, 300)
    assert read_frame(pack_frame(FrameKind.GOODBYE, 0, 0), 0, LIMIT).kind is FrameKind.GOODBYE


FRAMES_BAD = {
    "an unknown kind": pack_frame(77, 0, 1),
    "an unknown mark": pack_frame(FrameKind.REQUEST, 0, 1, marks=64),
    "something where zero must be": b"\x02\0\x01\0" + pack_frame(FrameKind.REQUEST, 0, 1)[4:],
    "a piece over the limit": pack_frame(
        FrameKind.REQUEST, 1, PIECE + 1, marks=FrameFlag.MORE, total=PIECE + 2
    ),
    "more than the whole": pack_frame(FrameKind.REQUEST, 1, 6, marks=FrameFlag.MORE, total=5),
    "less than the whole without a mark": pack_frame(FrameKind.RESPONSE, 1, 4, total=5),
    "nothing at all": pack_frame(FrameKind.RESPONSE, 1, 0),
    "an empty piece": pack_frame(FrameKind.REQUEST, 1, 0, marks=FrameFlag.MORE, total=5),
    "a cancel with a body": pack_frame(FrameKind.CANCEL, 1, 3),
    "a hello of another size": pack_frame(FrameKind.HELLO, 1, HELLO_SIZE + 1),
    "half a hello": pack_frame(FrameKind.HELLO, 1, HELLO_SIZE, marks=FrameFlag.LATER),
    "a goodbye that announces more": pack_frame(FrameKind.GOODBYE, 1, 0, total=3),
}


@pytest.mark.parametrize("header", FRAMES_BAD.values(), ids=FRAMES_BAD)
def test_a_header_that_cannot_be_is_refused(header: bytes) -> None:
    """Whoever writes it does not keep to the protocol."""
    with pytest.raises(RpcInvalidMessage):
        read_frame(header, 0, LIMIT)


def test_a_message_over_the_limit_is_refused() -> None:
    """By its first piece, however small that is."""
    with pytest.raises(RpcTooLarge, match=r"size 1048577 exceeds maximum allowed size 1048576"):
        read_frame(
            pack_frame(FrameKind.REQUEST, 1, 1, marks=FrameFlag.MORE, total=LIMIT + 1), 0, LIMIT
        )


@given(st.binary(min_size=HEADER_SIZE, max_size=HEADER_SIZE))
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    """Nothing else is ever raised, and no length passes that is over the limit."""
    try:
        frame = read_frame(data, 0, LIMIT)
    except RpcInvalidMessage:
        return
    assert frame.length <= frame.total <= LIMIT


@given(st.integers(0, 2**64 - 1), st.binary(max_size=9), st.binary(), st.integers(0, 2**32 - 1))
def test_the_short_way_writes_the_same_bytes(
    number: int, name: bytes, payload: bytes, patience: int
) -> None:
    """As header and message do one after the other."""
    body = request_head(number, name, len(payload)) + payload
    header = pack_frame(
        FrameKind.REQUEST, number, len(body), marks=FrameFlag.TYPED, patience=patience
    )
    assert short_request(number, name, payload, FrameFlag.TYPED, patience) == header + body
    body = RpcResponse(number, payload).serialize()
    header = pack_frame(FrameKind.RESPONSE, number, len(body), marks=FrameFlag.NESTED)
    assert short_response(number, payload, FrameFlag.NESTED) == header + body


def test_a_hello_says_what_is_allowed() -> None:
    """And which protocol it is; somebody else's is refused, and one that allows nothing."""
    hello = RpcHello(16, 1 << 40, 1 << 30)
    assert RpcHello.unpack(hello.pack()) == hello
    assert len(hello.pack()) == HELLO_SIZE
    with pytest.raises(RpcInvalidMessage, match="another protocol"):
        RpcHello.unpack(b"other" + hello.pack()[5:])
    with pytest.raises(RpcInvalidMessage, match="no call at all"):
        RpcHello.unpack(hello._replace(calls=0).pack())


# --------------------------------------------------------------------------------------------------
# Short messages pass long ones, and long ones come through all the same.

KIND = FrameKind.REQUEST


def add_long(outbox: CallOutbox, number: int, size: int) -> None:
    """A message of that many bytes."""
    outbox.add_long(KIND, number, [memoryview(bytes([number]) * size)])


def numbers(outbox: CallOutbox, count: int) -> list[int]:
    """The numbers of the next long messages of which a piece is taken."""
    return [read_frame(outbox.take()[0], 0, 1 << 20).number for _ in range(count)]


def test_short_messages_pass_a_long_one() -> None:
    """All of them at once, after at most one piece."""
    outbox = CallOutbox(piece=10)
    add_long(outbox, 1, 25)
    outbox.add_short(b"short one")
    outbox.add_short(b"short two")
    assert outbox.take() == [b"short one", b"short two"]
    assert numbers(outbox, 1) == [1]
    outbox.add_short(b"short three")
    assert outbox.take() == [b"short three"]


def test_short_messages_never_stop_a_long_one() -> None:
    """After each batch comes a piece."""
    outbox = CallOutbox(piece=10)
    add_long(outbox, 1, 25)
    pieces = 0
    for _ in range(6):
        outbox.add_short(b"again")
        pieces += len(outbox.take()[0]) == HEADER_SIZE
    assert pieces == 3


def test_a_batch_is_bounded() -> None:
    """In messages and in bytes."""
    outbox = CallOutbox(piece=1000)
    for _ in range(2 * BATCH):
        outbox.add_short(b"x")
    assert len(outbox.take()) == BATCH
    for _ in range(2):
        outbox.add_short(b"y" * 1000)
    outbox.take()
    assert outbox.take() == [b"y" * 1000]


def test_long_messages_take_turns_as_far_as_allowed() -> None:
    """What is allowed at a time begins; the next begins when there is room for it."""
    outbox = CallOutbox(piece=10)
    outbox.allow(45)
    for number in (1, 2, 3):
        add_long(outbox, number, 20)
    assert numbers(outbox, 6) == [1, 2, 1, 2, 3, 3]
    assert outbox.take() == []


def test_a_message_over_everything_allowed_goes_alone() -> None:
    """It would never go otherwise."""
    outbox = CallOutbox(piece=10)
    outbox.allow(5)
    add_long(outbox, 1, 20)
    add_long(outbox, 2, 20)
    assert numbers(outbox, 4) == [1, 1, 2, 2]


def test_a_message_that_has_not_begun_can_be_withdrawn() -> None:
    """One that has begun cannot."""
    outbox = CallOutbox(piece=10)
    add_long(outbox, 1, 20)
    add_long(outbox, 2, 20)
    outbox.take()
    assert not outbox.withdraw(KIND, 1)
    assert not outbox.withdraw(KIND, 7)
    outbox.allow(0)
    add_long(outbox, 3, 20)
    add_long(outbox, 4, 20)
    assert outbox.withdraw(KIND, 4)
    assert outbox.withdraw(KIND, 3)


def test_what_the_other_side_has_to_fetch_is_counted() -> None:
    """Short messages and answers, down to nothing; a call of ours is not owed."""
    outbox = CallOutbox(piece=10)
    assert outbox.is_empty
    add_long(outbox, 1, 25)
    outbox.add_short(b"short")
    outbox.add_long(FrameKind.RESPONSE, 2, [memoryview(bytes(20))])
    assert outbox.owed == 25
    while outbox.take():
        pass
    assert outbox.owed == 0
    assert outbox.is_empty


def test_one_large_answer_is_not_owed_and_the_next_ones_are() -> None:
    """A peer may be slow to fetch one; with more than that it takes without end."""
    outbox = CallOutbox(piece=10)
    outbox.allow(15)
    for number in (1, 2):
        outbox.add_long(FrameKind.RESPONSE, number, [memoryview(bytes(20))])
    assert outbox.owed == 20
    assert numbers(outbox, 4) == [1, 1, 2, 2]
    assert outbox.owed == 0
    outbox.add_long(FrameKind.RESPONSE, 3, [memoryview(bytes(20))])
    assert outbox.owed == 0
    outbox.add_long(FrameKind.RESPONSE, 4, [memoryview(bytes(12))])
    assert outbox.owed == 12


@given(
    st.lists(st.lists(st.binary(max_size=30), min_size=1), max_size=6),
    st.integers(1, 40),
    st.integers(1, 200),
)
def test_what_is_cut_is_put_together_again(
    messages: list[list[bytes]], piece: int, allowed: int
) -> None:
    """Whatever the parts and pieces; the other side never holds more than it allows."""
    outbox, assembly = CallOutbox(piece), Assembly(allowed)
    outbox.allow(allowed)
    expected = {number: b"".join(parts) for number, parts in enumerate(messages) if any(parts)}
    for number, parts in enumerate(messages):
        if any(parts):
            outbox.add_long(KIND, number, [memoryview(part) for part in parts], patience=9)
    found = {}
    while frame := outbox.take():
        header = read_frame(frame[0], 0, 1 << 20)
        body = b"".join(frame[1:])
        assert len(frame[0]) == HEADER_SIZE
        assert len(body) == header.length <= piece
        whole = assembly.accept(header)
        whole.view[whole.filled : whole.filled + len(body)] = body
        whole.filled += len(body)
        large = [len(each) for each in expected.values() if len(each) > allowed]
        held = sum(len(each.view) for each in assembly._parts.values())
        assert held <= allowed + max(large, default=0)
        if not header.marks & FrameFlag.MORE:
            assembly.finish(whole)
            found[header.number] = bytes(whole.view)
    assert found == expected
    assert (len(assembly), assembly._budget.nbytes) == (0, 0)
