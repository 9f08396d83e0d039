"""Backend: bytes between ranks.

The backends of this library are non-blocking: they start a send, a receive or a barrier, and make
progress; the blocking calls stand on top of that, once, here.  A backend may also have the blocking
calls alone: then :mod:`potluck.backend.adapters.base` makes the rest of them.  ``group`` keeps the
traffic of subgroups apart from each other and from the whole; ordinary callers never name it.
"""

from __future__ import annotations

import re
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, TypeVar

from potluck._process import Closing
from potluck._types import Seconds, in_seconds
from potluck.errors import InvalidRank, Timeout, UnsupportedOperation

if TYPE_CHECKING:
    from collections.abc import Buffer  # type: ignore[attr-defined]

    import numpy as np
    import numpy.typing as npt

    from potluck._types import NodeId, View
    from potluck.backend.operation import Operation
    from potluck.errors import DistributedError
    from potluck.metrics.registry import DistributedMetrics
    from potluck.net.aead import Decryptor, Encryptor
    from potluck.net.transport import Poller, Stream
    from potluck.schedule.reduce import ReduceOp


Service = TypeVar("Service")

WORLD = 0
"""The group of all ranks of a backend."""

NOTICES = 0x6E6F746963657321
"""The group in which ranks tell each other about their collectives; of each group its own."""

RPC = 0x72656D6F74652121
"""The group of messages for remote calls; of each group its own."""

MAX_TAG = (1 << 32) - 1
"""What fits into a frame's header."""

DEFAULT_TIMEOUT = 1800.0
"""Seconds a blocking call waits unless told otherwise: half an hour, longer than any step."""


class BackendServices:
    """Objects that higher layers keep for one backend: at most one of each class."""

    def __init__(self) -> None:
        self._known: dict[type, Any] = {}

    def get(self, kind: type[Service]) -> Service | None:
        """The object of a class, if there is one."""
        return self._known.get(kind)

    def put(self, kind: type[Service], service: Service) -> None:
        """Keep an object, instead of the previous one of its class."""
        self._known[kind] = service

    def of(self, kind: type[Service], make: Callable[[], Service]) -> Service:
        """The object of a class, made at the first call; all threads get the same one."""
        found: Service | None = self._known.get(kind)
        return self._known.setdefault(kind, make()) if found is None else found


class Backend(Closing, ABC):
    """Moves bytes between the ranks of one group.

    Any number of threads may use a backend at once.  Messages between one pair of ranks with one
    tag arrive in the order they were sent.

    To write one, derive from this class and define ``rank``, ``world_size``, ``send``, ``recv``,
    ``recv_timeout`` and ``barrier``: a :class:`DistributedContext` has every collective on it.

    >>> from potluck import SimulatedBackend
    >>> with SimulatedBackend.create_group(1)[0] as backend:
    ...     backend.send(b"note to self", dst=0)
    ...     inbox = bytearray(12)
    ...     backend.recv(inbox, src=0)
    >>> inbox
    bytearray(b'note to self')
    """

    timeout: float | None = DEFAULT_TIMEOUT
    """Seconds after which a blocking call without a timeout of its own gives up."""

    has_engine = False
    """Whether something below does some collectives itself."""

    services: BackendServices
    """What higher layers keep for this backend."""

    sessions: Any = None
    """The views of a cluster as calls see them, where ranks change; else None."""

    def __new__(cls, *_: Any, **__: Any) -> Self:
        """Add what every backend has, also one whose ``__init__`` does not call this class's."""
        made = super().__new__(cls)
        made.services = BackendServices()
        return made

    @property
    def view(self) -> View | None:
        """The view of a cluster that this backend connects; None outside of a cluster."""
        return None

    @property
    def context_type(self) -> type[Backend] | None:
        """The kind of context that this backend needs; None if any will do."""
        return None

    def call_metrics(self) -> DistributedMetrics | None:
        """Where calls through this backend are counted; None where they are not."""
        return None

    @property
    def innermost(self) -> Backend:
        """The backend below all contexts: this one, unless it is a context."""
        return self

    @property
    @abstractmethod
    def rank(self) -> int:
        """This process's place in the group, from 0."""

    @property
    @abstractmethod
    def world_size(self) -> int:
        """How many ranks the group has."""

    @property
    def is_plain(self) -> bool:
        """Whether this backend has the blocking calls alone, and cannot start messages itself."""
        return type(self).post_send is Backend.post_send

    @property
    def _carrying(self) -> Backend:
        """Who starts the messages of a backend that has the blocking calls alone."""
        found: Backend | None = vars(self).get("_carrier")
        if found is None:
            name = type(self).__name__
            if type(self).send is Backend.send:
                msg = f"{name} defines neither send, recv, recv_timeout and barrier nor post_send"
                raise TypeError(msg)
            raise UnsupportedOperation(
                f"{name} cannot post a message and wait for it later",
                hint=f"Wrap the {name} in a potluck.DistributedContext, which can.",
            )
        return found

    def post_send(self, data: Buffer, dst: int, *, tag: int = 0, group: int = WORLD) -> Operation:
        """Start sending; ``data`` must not change until the operation is done."""
        return self._carrying.post_send(data, dst, tag=tag, group=group)

    def post_recv_into(
        self, into: Buffer, src: int, *, tag: int = 0, group: int = WORLD, at_most: bool = False
    ) -> Operation:
        """Start receiving a message of exactly the size of ``into``.

        With ``at_most`` it may be shorter, and fills the beginning.
        """
        return self._carrying.post_recv_into(into, src, tag=tag, group=group, at_most=at_most)

    def post_barrier(
        self, *, group: int = WORLD, members: Sequence[int] | None = None
    ) -> Operation:
        """Arrive at a barrier of ``members`` (all ranks unless given)."""
        return self._carrying.post_barrier(group=group, members=members)

    def progress(self, timeout: float | None = 0) -> None:
        """Move bytes for every operation under way; wait up to ``timeout`` for some to come."""
        self._carrying.progress(timeout)

    def has_message(self, src: int, *, tag: int = 0, group: int = WORLD) -> bool:
        """Whether a message from rank ``src`` has begun to arrive that no receive has asked for."""
        if not self.is_plain:
            raise UnsupportedOperation(f"{type(self).__name__} cannot check for messages")
        return self._carrying.has_message(src, tag=tag, group=group)

    def open_stream(
        self,
        rank: int,
        purpose: str,
        deadline: float,
        look: Callable[[], None],
    ) -> PeerStream:
        """A connection to a rank for one purpose; both ranks must ask for it.

        ``look`` is called while waiting, and raises when that makes no sense any more.  Unless a
        backend has connections of its own for this, messages carry the stream.
        """
        from potluck.backend.fallback_stream import MessageStream

        del deadline, look
        return PeerStream(MessageStream(self, self._check_rank(rank), purpose))

    def abandon_streams(self, is_over: Callable[[str], bool]) -> None:
        """Close connections that peers have opened for purposes that are no longer needed here."""
        del is_over

    def make_poller(self) -> Poller:
        """A poller for such connections."""
        from potluck.backend.fallback_stream import MessageStreamPoller

        return MessageStreamPoller(self)

    def all_reduce_by_engine(
        self, array: npt.NDArray[np.generic], op: ReduceOp | str, timeout: float | None
    ) -> bool:
        """Combine all ranks' arrays in place, if an engine below can; False if there is none.

        Whether it can depends on the type and the operation alone, so all ranks do the same.
        """
        del array, op, timeout
        return False

    def broadcast_by_engine(
        self, array: npt.NDArray[np.generic], root: int, timeout: float | None
    ) -> bool:
        """Bring the root's array to all ranks, in place, if an engine below can."""
        del array, root, timeout
        return False

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a rank is gone, if it is."""
        carrier: Backend | None = vars(self).get("_carrier")
        return None if carrier is None else carrier.loss_of(rank)

    def as_nccl_backend(self) -> Backend | None:
        """The backend that runs on NCCL: this one, or one that it stands on; None if there is none.

        It tells NCCL from Gloo and every other engine of PyTorch.
        """
        return None

    def peer_name(self, rank: int) -> str:
        """Where a rank is, for people."""
        return f"rank {rank}"

    def node_of(self, rank: int) -> NodeId | None:
        """The machine that a rank has proved to be on; None if that is unknown."""
        del rank
        return None

    def on_close(self, action: Callable[[], None]) -> None:
        """Have something done before this backend closes: what stands on it ends first."""
        self.__dict__.setdefault("_closing_actions", {})[action] = None

    def forget(self, action: Callable[[], None]) -> None:
        """What was to be done at the end has been done already; may be called twice."""
        self.__dict__.get("_closing_actions", {}).pop(action, None)

    def _prepare_to_close(self) -> None:
        for action in list(self.__dict__.pop("_closing_actions", {})):
            action()

    def close(self) -> None:
        """Leave the group: peers waiting for this rank are told at once.  May be called twice."""
        self._prepare_to_close()

    def send(self, data: Buffer, dst: int, *, tag: int = 0, timeout: Seconds | None = None) -> None:
        """Send ``data`` to rank ``dst``; return when the buffer may be changed again."""
        self.post_send(data, dst, tag=tag).finish_within(self._limit(timeout))

    def recv(self, into: Buffer, src: int, *, tag: int = 0, timeout: Seconds | None = None) -> None:
        """Receive a message from rank ``src`` into ``into``, which has its exact size."""
        self.post_recv_into(into, src, tag=tag).finish_within(self._limit(timeout))

    def recv_timeout(self, into: Buffer, src: int, timeout: Seconds, *, tag: int = 0) -> None:
        """Like :meth:`recv`, for at most ``timeout`` seconds.

        A message of which only a part has arrived by then is not lost: the next receive gets it
        whole.
        """
        self.recv(into, src, tag=tag, timeout=timeout)

    def barrier(self, timeout: Seconds | None = None) -> None:
        """Return when every rank has called this.

        After a time-out it may be called again and continues where it stopped.
        """
        self.post_barrier().finish_within(self._limit(timeout))

    def _limit(self, timeout: Seconds | None) -> float | None:
        return in_seconds(self.timeout if timeout is None else timeout)

    def _check_rank(self, rank: int) -> int:
        # Negative numbers would silently address from the end.
        check_whole(rank, "rank")
        if not 0 <= rank < self.world_size:
            raise InvalidRank(rank, self.world_size)
        return rank

    @staticmethod
    def _check_tag(tag: int) -> int:
        check_whole(tag, "tag")
        if not 0 <= tag <= MAX_TAG:
            msg = f"tag must be between 0 and {MAX_TAG}, got {tag}"
            raise ValueError(msg)
        return tag


def check_whole(number: int, name: str) -> int:
    """The number as an int; raise unless it is an integer (those of numpy are accepted).

    >>> check_whole("1", "rank")
    Traceback (most recent call last):
    ...
    TypeError: rank must be an integer, got '1'
    """
    # bool is an int by accident, and so is what compares equal to one.
    if type(number) is not int and (isinstance(number, bool) or not hasattr(number, "__index__")):
        msg = f"{name} must be an integer, got {number!r}"
        raise TypeError(msg)
    return int(number)


def read_view(data: Buffer) -> memoryview:
    """The bytes of an object, without a copy.

    >>> len(read_view(memoryview(b"12345678").cast("d")))
    8
    """
    view = _view(data)
    return memoryview(b"") if view.nbytes == 0 else view.cast("B")


def write_view(into: Buffer) -> memoryview:
    """The bytes of an object that can be written to, without a copy.

    >>> write_view(b"fixed")
    Traceback (most recent call last):
    ...
    TypeError: Cannot receive into bytes: it is read-only. Use a bytearray or an array.
    """
    view = _view(into)
    if view.readonly:
        msg = (
            f"Cannot receive into {type(into).__name__}: it is read-only. "
            "Use a bytearray or an array."
        )
        raise TypeError(msg)
    return memoryview(bytearray()) if view.nbytes == 0 else view.cast("B")


def _view(data: Buffer) -> memoryview:
    try:
        view = memoryview(data)
    except (TypeError, ValueError, BufferError):
        raise _no_buffer(data) from None
    # Addresses of Python objects: they mean nothing elsewhere, and writing them would be fatal.
    if "O" in view.format and "O" in re.sub(":[^:]*:", "", view.format):  # not in a field's name
        raise _no_buffer(data)
    if not view.c_contiguous:
        msg = "The buffer is not contiguous in memory. Make a contiguous copy of it first."
        raise ValueError(msg)
    return view


def _no_buffer(data: object) -> TypeError:
    return TypeError(
        f"{type(data).__name__} has no buffer to send from or receive into. "
        "Pass bytes, a bytearray, a memoryview or a numpy array of numbers "
        "(tensor.numpy() for PyTorch, array.view('u1') for types that numpy does not export)."
    )


# --------------------------------------------------------------------------------------------------
# Streams of their own: connections between two ranks for one purpose beside the messages.

LOOK_EVERY = 0.02
"""Seconds between two looks of a waiting rank at whether its peer is still there."""


@dataclass(frozen=True, slots=True)
class PeerStream:
    """An open connection."""

    stream: Stream
    seal: tuple[Encryptor, Decryptor] | None = None
    """None on a connection in clear."""
    first: bytes = b""
    """What came in before the stream was ours."""


class IncomingStreams:
    """Holds incoming connections, by rank and purpose, until they are asked for."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, str], object] = {}
        self._is_closed = False
        self._changed = threading.Condition()

    def put(self, rank: int, purpose: str, connection: object) -> object | None:
        """Keep a connection; returns one to close: that which it replaces, or itself at the end."""
        with self._changed:
            if self._is_closed:
                return connection
            replaced = self._waiting.pop((rank, purpose), None)
            self._waiting[rank, purpose] = connection
            self._changed.notify_all()
            return replaced

    def count(self, rank: int) -> int:
        """How many connections of a rank wait."""
        with self._changed:
            return sum(1 for known, _ in self._waiting if known == rank)

    def take(self, rank: int, purpose: str, deadline: float, look: Callable[[], None]) -> object:
        """Wait for a connection; ``look`` raises when waiting makes no sense any more."""
        while True:
            with self._changed:
                found = self._waiting.pop((rank, purpose), None)
                if found is not None:
                    return found
                self._changed.wait(LOOK_EVERY)
            look()
            if time.monotonic() >= deadline:
                raise Timeout(
                    f"Timed out waiting for rank {rank} to connect for this operation",
                    seconds=0.0,
                    missing=(rank,),
                )

    def abandon(self, is_over: Callable[[str], bool]) -> list[object]:
        """Take the connections for purposes that are over."""
        with self._changed:
            over = [key for key in self._waiting if is_over(key[1])]
            return [self._waiting.pop(key) for key in over]

    def take_all(
        self,
        ranks: Sequence[int],
        purpose: str,
        look: Callable[[], None],
        is_fit: Callable[[object], bool] = lambda _: True,
    ) -> dict[int, object]:
        """Wait until a connection of each rank is here, and take them all, the latest of each.

        Those that are not fit any more by then are dropped: their ranks may come again.
        """
        while True:
            with self._changed:
                if not self._absent(ranks, purpose):
                    for rank in ranks:
                        if not is_fit(self._waiting[rank, purpose]):
                            del self._waiting[rank, purpose]
                if not self._absent(ranks, purpose):
                    return {rank: self._waiting.pop((rank, purpose)) for rank in ranks}
                self._changed.wait(LOOK_EVERY)
            look()

    def absent(self, ranks: Sequence[int], purpose: str) -> list[int]:
        """Those of whom no such connection waits."""
        with self._changed:
            return self._absent(ranks, purpose)

    def _absent(self, ranks: Sequence[int], purpose: str) -> list[int]:
        return [rank for rank in ranks if (rank, purpose) not in self._waiting]

    def drain(self) -> list[object]:
        """Take everything that waits, and keep nothing from now on."""
        with self._changed:
            self._is_closed = True
            found = list(self._waiting.values())
            self._waiting.clear()
            self._changed.notify_all()
            return found
