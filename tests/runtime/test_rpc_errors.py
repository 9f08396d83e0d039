"""What goes wrong with a call is told in words, and how agents begin and end."""

import contextlib
from collections.abc import Callable

import pytest

from potluck import (
    InvalidRank,
    RpcAgent,
    RpcConfig,
    RpcFunctionNotFound,
    RpcInvalidMessage,
    RpcNoConnection,
    RpcRemoteError,
    RpcTimeout,
    RpcTooLarge,
    SimulatedBackend,
    TcpRpcBackend,
    Timeout,
)
from potluck.core.calls_encoding import RpcRequest, RpcResponse
from support.agents import Hold, agents
from support.threads import PATIENCE, Background, eventually


def echo(payload: bytes) -> bytes:
    """What came in."""
    return payload


# --- errors ---


def test_a_missing_function_is_named_with_its_neighbours() -> None:
    """Somebody mistyped it."""
    with agents() as (caller, server):
        server.register("gradient", echo)
        with pytest.raises(RpcFunctionNotFound, match="Did you mean 'gradient'") as caught:
            caller.rpc_sync(1, "gradent")
        assert caught.value.near == ("gradient",)
        assert caught.value.rank == 1


def test_what_a_function_raises_is_told_with_its_traceback() -> None:
    """And the next call finds everything in order."""
    with agents() as (caller, server):
        server.register("echo", echo)

        @server.register("fail")
        def fail(payload: bytes) -> bytes:
            raise KeyError(payload.decode())

        with pytest.raises(RpcRemoteError, match="remote RPC error: KeyError on rank 1") as caught:
            caller.rpc_sync(1, "fail", b"soup")
        assert caught.value.remote_type == "KeyError"
        assert caught.value.remote_message == "'soup'"
        assert "in fail" in caught.value.remote_traceback
        assert caller.rpc_sync(1, "echo", b"on") == b"on"


def test_a_function_of_bytes_must_return_bytes() -> None:
    """The caller is told what it returned."""
    with agents() as (caller, server):
        server.register("odd", lambda _: "text")
        with pytest.raises(RpcRemoteError, match="must return bytes, not str"):
            caller.rpc_sync(1, "odd")


def test_a_rank_that_does_not_exist_is_refused() -> None:
    """At once."""
    with agents() as (caller, _):
        with pytest.raises(InvalidRank):
            caller.rpc_sync(7, "echo")
        with pytest.raises(ValueError, match="timeout"):
            caller.rpc_sync(1, "echo", timeout=-1)


def test_a_backend_has_one_agent_at_a_time() -> None:
    """The next may come after it."""
    with SimulatedBackend.create_group(1)[0] as backend:
        with RpcAgent(backend), pytest.raises(ValueError, match="an agent already"):
            RpcAgent(backend)
        with RpcAgent(backend) as agent:
            agent.register("echo", echo)
            assert agent.rpc_sync(0, "echo", b"x") == b"x"
        with pytest.raises(RpcNoConnection, match="closed"):
            agent.rpc_sync(0, "echo", b"x")
        agent.close()
    with pytest.raises(TypeError, match=r"stands on a potluck\.Backend"):
        RpcAgent("backend")  # type: ignore[arg-type]


def test_the_agent_ends_with_its_backend() -> None:
    """Whoever calls it learns so at once."""
    left, right = SimulatedBackend.create_group(2)
    with left, RpcAgent(left) as caller:
        server = RpcAgent(right)
        server.register("echo", echo)
        assert caller.rpc_sync(1, "echo", b"x") == b"x"
        right.close()
        assert server.is_closed
        eventually(lambda: caller._office.peers[1].connection is None)
        with pytest.raises(RpcNoConnection, match="no connection to rank 1"):
            caller.rpc_sync(1, "echo", b"x")


def test_an_agent_may_come_back() -> None:
    """A new one on the same backend takes over its calls."""
    left, right = SimulatedBackend.create_group(2)
    with left, right, RpcAgent(left) as caller:
        for word in (b"first", b"second"):
            with RpcAgent(right) as server:
                server.register("word", lambda _, word=word: word)
                assert caller.rpc_sync(1, "word", timeout=PATIENCE, idempotent=True) == word
            eventually(lambda: caller._office.peers[1].connection is None)


def test_limits_that_cannot_work_are_refused() -> None:
    """When they are given."""
    with pytest.raises(ValueError, match="workers must be more than 0"):
        RpcConfig(workers=0)
    with pytest.raises(ValueError, match="max_message can be"):
        RpcConfig(max_message=1 << 33)
    with pytest.raises(ValueError, match="max_message can be"):
        RpcConfig(max_message=100)
    with pytest.raises(ValueError, match="at most"):
        RpcConfig(calls=1 << 32)
    with pytest.raises(TypeError, match="A value for octets is a whole number"):
        RpcConfig(octets=1e6)  # type: ignore[arg-type]


# --- requests that came as messages ---


def test_a_request_in_a_message_is_answered_with_two() -> None:
    """Eight bytes of length, then the response; also when there is no such function."""
    left, right = SimulatedBackend.create_group(2)
    with left, right, RpcAgent(right, RpcConfig(max_message=1000)) as server:
        server.register("shout", lambda payload: payload.upper())
        server.register("pour", lambda payload: payload * 1000)
        mail = TcpRpcBackend(left)

        def ask(number: int, name: str) -> bytes:
            server.handle_request(0, RpcRequest(number, name, b"soup").serialize())
            length = bytearray(8)
            mail.recv(length, 1, timeout=PATIENCE)
            reply = bytearray(int.from_bytes(length, "little"))
            mail.recv(reply, 1, timeout=PATIENCE)
            return bytes(reply)

        assert ask(5, "shout") == bytes([2, 5, 0, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0]) + b"SOUP"
        reply = RpcResponse.deserialize(ask(6, "whisper"))
        assert reply.request_id == 6
        assert reply.error == "function 'whisper' not registered on rank 1"
        reply = RpcResponse.deserialize(ask(7, "pour"))
        assert reply.error == "RPC response size 4014 exceeds maximum 1000"
        with pytest.raises(RpcInvalidMessage, match="expected request tag 0x01"):
            server.handle_request(0, b"no request")


def test_a_function_knows_its_caller_and_the_time_that_is_left() -> None:
    """Outside of one there is nothing to know."""
    with agents(3) as group:
        seen = []

        @group[2].register("look")
        def look(_: bytes) -> bytes:
            call = RpcAgent.current_call()
            assert call is not None
            seen.append((call.source, 0 < call.remaining <= 5, call.cancelled))
            return b""

        group[1].rpc_sync(2, "look", timeout=5)
        assert seen == [(1, True, False)]
        assert RpcAgent.current_call() is None


def test_calls_to_oneself_have_deadlines_and_limits_too() -> None:
    """And can be cancelled, and fail, like all others."""
    with agents(1, max_message=1000) as (agent,):
        hold = Hold()
        agent.register("hold", hold)
        agent.register("give", lambda payload: bytes(int(payload)))
        with pytest.raises(RpcTimeout):
            agent.rpc_sync(0, "hold", timeout=0.05)
        future = agent.rpc_async(0, "hold")
        eventually(lambda: hold.running == 2)
        assert future.cancel()
        eventually(lambda: all(call.cancelled for call in hold.calls))
        with pytest.raises(RpcTooLarge, match="RPC response size 2000"):
            agent.rpc_sync(0, "give", b"2000")
        with pytest.raises(RpcFunctionNotFound):
            agent.rpc_sync(0, "nobody")
        with pytest.raises(RpcRemoteError, match="ValueError"):
            agent.rpc_sync(0, "give", b"much")
        left_over = agent.rpc_async(0, "hold")
        eventually(lambda: hold.running == 3)
        hold.go.set()
        assert left_over.wait(PATIENCE) == b""


def test_long_words_of_an_error_arrive() -> None:
    """In as many pieces as it takes, up to a limit."""
    with agents() as (caller, server):

        @server.register("rant")
        def rant(payload: bytes) -> bytes:
            raise ValueError("no! " * 50_000)

        with pytest.raises(RpcRemoteError) as caught:
            caller.rpc_sync(1, "rant")
        assert len(caught.value.remote_message) == 64 << 10


def test_closing_fails_what_is_under_way() -> None:
    """With a reason, here and there."""
    left, right = SimulatedBackend.create_group(2)
    hold = Hold()
    with left, right, RpcAgent(right) as server:
        server.register("hold", hold)
        caller = RpcAgent(left)
        future = caller.rpc_async(1, "hold")
        eventually(lambda: hold.running == 1)
        caller.close()
        with pytest.raises(RpcNoConnection, match="the agent of this rank was closed"):
            future.wait(PATIENCE)
        eventually(lambda: all(call.cancelled for call in hold.calls))
        hold.go.set()


# --- whatever a function does ---


class Mute(Exception):
    """One that cannot say what it is."""

    def __str__(self) -> str:
        raise SystemExit(1)


class OddText(str):
    """Text that cannot be cut."""

    __slots__ = ()
    __getitem__ = None  # type: ignore[assignment]


class Odd(Exception):
    """One whose text is of another kind, and whose class has no plain name."""

    def __str__(self) -> str:
        return OddText("odd")


Odd.__qualname__ = "O\ud800dd"


def doubled(depth: int) -> Exception:
    """A group that stands for two errors to the power of its depth."""
    error: Exception = ValueError("one")
    for _ in range(depth):
        error = ExceptionGroup("two", [error, error])
    return error


def recurse() -> None:
    """For ever."""
    recurse()


class Explosive:
    """A result that cannot be looked at."""

    @property
    def __array__(self) -> None:
        raise MemoryError


@pytest.mark.parametrize(
    "raised",
    [
        ValueError("a file called \udcff"),
        ValueError("x" * 10_000_000),
        SystemExit(3),
        KeyboardInterrupt(),
        GeneratorExit(),
        MemoryError(),
        BaseException("base"),
        Mute(),
        Odd(),
        RpcInvalidMessage("one of its own"),
        ExceptionGroup("several", [ValueError("\ud800"), Mute()]),
        doubled(60),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_function_raises_its_caller_is_told(raised: BaseException) -> None:
    """By workers, by the thread that reads, and by the rank itself; all of them go on."""
    with agents(workers=1) as (caller, server):

        def fail(_: bytes) -> bytes:
            raise raised

        for agent in (caller, server):
            agent.register("echo", echo)
            agent.register("fail", fail)
        for rank in [1] * 8 + [0]:  # first on a worker, then where it was read
            with pytest.raises(RpcRemoteError) as caught:
                caller.rpc_sync(rank, "fail", timeout=PATIENCE)
            str(caught.value).encode()
        assert caller.rpc_sync(1, "echo", b"on", timeout=PATIENCE) == b"on"


@pytest.mark.parametrize(
    "function",
    [recurse, Explosive, object, lambda: {"a": [object()]}, lambda: "\ud800", lambda: 1 << 70],
)
def test_whatever_a_function_returns_its_caller_gets_an_answer(
    function: Callable[[], object],
) -> None:
    """A value, or an error."""
    with agents(workers=1) as (caller, server):
        server.expose(function, name="odd")
        server.register("echo", echo)
        for _ in range(5):
            with contextlib.suppress(RpcRemoteError):
                caller.call_async(1, "odd").wait(PATIENCE)
        assert caller.rpc_sync(1, "echo", b"on", timeout=PATIENCE) == b"on"


# --- several who wait ---


def test_all_threads_that_wait_for_a_call_get_its_value() -> None:
    """The same one; also of a long answer, which is turned into a value once."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        payload = bytes(range(256)) * (20 << 10)
        future = caller.rpc_async(1, "hold", payload, timeout=PATIENCE)
        waiting = [Background(lambda: future.wait(PATIENCE)) for _ in range(12)]
        eventually(lambda: hold.running == 1)
        hold.go.set()
        assert all(each.result() == payload for each in waiting)


def test_looking_at_a_call_again_and_again_leaves_nothing_behind() -> None:
    """Neither waiting for a moment nor asking for its result."""
    with agents() as (caller, server):
        hold = Hold()
        server.register("hold", hold)
        for rank in (0, 1):
            caller.register("hold", hold)
            future = caller.rpc_async(rank, "hold", timeout=PATIENCE)
            for _ in range(100):
                for ask in (future.wait, future.result, future.exception):
                    with pytest.raises(Timeout, match="not done yet"):
                        ask(0.0001)
            assert future._sleepers == ()
            hold.go.set()
            assert future.result(PATIENCE) == b""
            hold.go.clear()
