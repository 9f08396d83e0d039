"""The systems that ``rpc.py`` compares, each as a client and a server that echo and take arrays.

Every one is used as its documentation shows, in clear, except the one whose name says otherwise.
Those that are not installed are left out.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from potluck import NetworkNamespace, RpcAgent, TcpBackend

PATIENCE = 60  # seconds
IN_FLIGHT = 64

Array = npt.NDArray[np.float32]


class Client(Protocol):
    """One way to call the other process."""

    def echo(self, payload: bytes) -> bytes:
        """Call and wait."""

    def flood(self, payload: bytes, count: int) -> None:
        """So many calls, with :data:`IN_FLIGHT` of them under way at any time."""

    def take(self, array: Array) -> None:
        """Send an array; return when the other side has it."""


def _flood(start: Callable[[], Any], wait: Callable[[Any], Any], count: int) -> None:
    under_way: deque[Any] = deque()
    for _ in range(count):
        if len(under_way) >= IN_FLIGHT:
            wait(under_way.popleft())
        under_way.append(start())
    while under_way:
        wait(under_way.popleft())


def _is_missing(module: str) -> bool:
    try:
        importlib.import_module(module)
    except ImportError:
        return True
    return False


# --- Potluck ---


class Potluck:
    """An agent."""

    def __init__(self, agent: RpcAgent) -> None:
        self._agent = agent

    def echo(self, payload: bytes) -> bytes:
        """Call and wait."""
        return self._agent.rpc_sync(1, "echo", payload)

    def flood(self, payload: bytes, count: int) -> None:
        """Many calls."""
        agent = self._agent
        _flood(lambda: agent.rpc_async(1, "echo", payload), lambda future: future.wait(), count)

    def take(self, array: Array) -> None:
        """Send an array."""
        assert self._agent.call(1, "take", array) == array.size

    def begin_taking(self, size: int) -> Callable[[], bool]:
        """Start to send an array of so many bytes; tells whether the other side has it."""
        future = self._agent.call_async(1, "take", np.ones(size, np.uint8))

        def is_taken() -> bool:
            return future.done and future.result() == size

        return is_taken


@contextlib.contextmanager
def potluck(rank: int, address: str, *, sealed: bool = False) -> Iterator[Client]:
    """Two ranks with an agent each."""
    namespace = None if sealed else NetworkNamespace.insecure()
    with (
        TcpBackend(rank, 2, address, timeout=PATIENCE, namespace=namespace) as backend,
        RpcAgent(backend) as agent,
    ):
        agent.register("echo", lambda payload: payload)
        agent.expose(lambda array: int(array.size), name="take")
        backend.barrier(PATIENCE)
        yield Potluck(agent)
        backend.barrier(PATIENCE)


@contextlib.contextmanager
def potluck_sealed(rank: int, address: str) -> Iterator[Client]:
    """The same, encrypted and authenticated."""
    with potluck(rank, address, sealed=True) as client:
        yield client


# --- torch.distributed.rpc ---


def torch_echo(payload: bytes) -> bytes:
    """Run by the other process."""
    return payload


def torch_take(tensor: Any) -> int:
    """Run by the other process."""
    return int(tensor.numel())


class Torch:
    """TensorPipe."""

    def __init__(self) -> None:
        self._rpc: Any = importlib.import_module("torch.distributed.rpc")
        self._torch: Any = importlib.import_module("torch")

    def echo(self, payload: bytes) -> bytes:
        """Call and wait."""
        answer: bytes = self._rpc.rpc_sync("rank1", torch_echo, (payload,))
        return answer

    def flood(self, payload: bytes, count: int) -> None:
        """Many calls."""
        start = self._rpc.rpc_async
        _flood(lambda: start("rank1", torch_echo, (payload,)), lambda future: future.wait(), count)

    def take(self, array: Array) -> None:
        """Send a tensor."""
        tensor = self._torch.from_numpy(array)
        assert self._rpc.rpc_sync("rank1", torch_take, (tensor,)) == array.size


@contextlib.contextmanager
def torch_rpc(rank: int, address: str) -> Iterator[Client]:
    """Two workers."""
    host, port = address.rsplit(":", 1)
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port)
    rpc: Any = importlib.import_module("torch.distributed.rpc")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2)
    client = Torch()
    yield client
    rpc.shutdown()


# --- gRPC ---


class Grpc:
    """A channel; bytes go through as they are."""

    def __init__(self, channel: Any) -> None:
        self._echo = channel.unary_unary("/bench/echo")
        self._take = channel.unary_unary("/bench/take")

    def echo(self, payload: bytes) -> bytes:
        """Call and wait."""
        answer: bytes = self._echo(payload, timeout=PATIENCE)
        return answer

    def flood(self, payload: bytes, count: int) -> None:
        """Many calls."""
        start = self._echo.future
        _flood(lambda: start(payload), lambda future: future.result(), count)

    def take(self, array: Array) -> None:
        """Send an array; gRPC takes bytes only."""
        assert int(self._take(array.tobytes(), timeout=PATIENCE)) == array.size


@contextlib.contextmanager
def grpc_rpc(rank: int, address: str) -> Iterator[Client | None]:
    """A server with a pool of threads, and a channel to it."""
    grpc: Any = importlib.import_module("grpc")
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
    ]
    if rank == 0:
        with grpc.insecure_channel(address, options=options) as channel:
            grpc.channel_ready_future(channel).result(PATIENCE)
            yield Grpc(channel)
        return
    futures: Any = importlib.import_module("concurrent.futures")
    server = grpc.server(futures.ThreadPoolExecutor(16), options=options)
    handler = grpc.unary_unary_rpc_method_handler
    calls = {
        "echo": handler(lambda request, _: request),
        "take": handler(lambda request, _: b"%d" % np.frombuffer(request, np.float32).size),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench", calls),))
    server.add_insecure_port(address)
    server.start()
    yield None
    server.stop(0).wait()


# --- ZeroMQ ---


class Zmq:
    """A DEALER socket; the order of answers is that of the calls."""

    def __init__(self, sock: Any) -> None:
        self._sock = sock

    def echo(self, payload: bytes) -> bytes:
        """Call and wait."""
        self._sock.send(payload)
        answer: bytes = self._sock.recv()
        return answer

    def flood(self, payload: bytes, count: int) -> None:
        """Many calls."""
        _flood(lambda: self._sock.send(payload), lambda _: self._sock.recv(), count)

    def take(self, array: Array) -> None:
        """Send an array without a copy."""
        self._sock.send(array, copy=False)
        assert int(self._sock.recv()) == array.size


@contextlib.contextmanager
def zeromq(rank: int, address: str) -> Iterator[Client | None]:
    """A ROUTER on a thread of its own, and a DEALER."""
    zmq: Any = importlib.import_module("zmq")
    context = zmq.Context()
    if rank == 0:
        sock = context.socket(zmq.DEALER)
        sock.connect(f"tcp://{address}")
        yield Zmq(sock)
        sock.send(b"end")
        sock.close()
        context.term()
        return
    sock = context.socket(zmq.ROUTER)
    sock.bind(f"tcp://{address}")

    def serve() -> None:
        while True:
            who, frame = sock.recv_multipart(copy=False)
            if frame.buffer == b"end":
                break
            size = len(frame.buffer)
            answer = frame if size < 1 << 20 else b"%d" % np.frombuffer(frame, np.float32).size
            sock.send_multipart([who, answer], copy=size < 1 << 20)
        sock.close()

    thread = threading.Thread(target=serve)
    thread.start()
    yield None
    thread.join(PATIENCE)
    context.term()


SYSTEMS: dict[str, Callable[[int, str], Any]] = {
    "potluck": potluck,
    "potluck, TLS": potluck_sealed,
    "torch": torch_rpc,
    "gRPC": grpc_rpc,
    "ZeroMQ": zeromq,
}
NEEDS = {"torch": "torch", "gRPC": "grpc", "ZeroMQ": "zmq"}


def available() -> list[str]:
    """The systems that are installed here."""
    return [name for name in SYSTEMS if name not in NEEDS or not _is_missing(NEEDS[name])]
