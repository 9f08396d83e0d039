"""Lifted: a backend that lends its messages to the collectives of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from potluck.backend.base import WORLD, Backend
from potluck.backend.engines.plain import carry
from potluck.collective.config import CollectiveConfig
from potluck.runtime.distributed import DistributedBackend
from potluck.runtime.group import Group
from potluck.runtime.overriding import OVERRIDABLE, overridden
from potluck.runtime.recorder_logs import log_of
from potluck.runtime.requests import Place
from potluck.vocabulary import in_seconds

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable, Sequence  # type: ignore[attr-defined]

    from potluck.backend.operation import Operation
    from potluck.backend.streams import PeerStream
    from potluck.errors import DistributedError
    from potluck.net.transport import Poller
    from potluck.runtime.recorder import Log
    from potluck.vocabulary import NodeId
else:
    Buffer: TypeAlias = object

__all__ = ["Lifted"]


class Lifted(DistributedBackend):
    """Everything a backend does, and collectives on top."""

    def __init__(self, backend: Backend, config: CollectiveConfig | None = None) -> None:
        if not isinstance(backend, Backend):
            msg = f"A context stands on a potluck.Backend, not on a {type(backend).__name__}"
            raise TypeError(msg)
        if config is not None and not isinstance(config, CollectiveConfig):
            msg = f"config= takes a CollectiveConfig, not a {type(config).__name__}"
            raise TypeError(msg)
        self._backend = carry(backend)
        if config is None and isinstance(backend, DistributedBackend):
            self._group = backend.group
        else:
            self._group = Group.of(backend, config)
            if config is not None and self._group.config != config:
                msg = "This backend's collectives already run with another configuration"
                raise ValueError(msg)
        self._here = Place(backend.rank, backend.world_size)
        self._respect_overrides()

    def _respect_overrides(self) -> None:
        """Call what the backend has written anew, instead of the library's own."""
        for name in OVERRIDABLE:
            own = overridden(self._backend, name, lambda: self._metrics)
            if own is not None:
                vars(self)[name] = own

    def __repr__(self) -> str:
        """Who this is, for people."""
        where = f"rank {self.rank} of {self.world_size} on {type(self.innermost).__name__}"
        return f"<{type(self).__name__}, {where}>"

    @property
    def backend(self) -> Backend:
        """The backend this stands on."""
        return self._backend

    @property
    def timeout(self) -> float | None:
        """Seconds after which a blocking call without a timeout of its own gives up."""
        return self._backend.timeout

    @timeout.setter
    def timeout(self, seconds: float | None) -> None:
        self._backend.timeout = in_seconds(seconds)

    @property
    def innermost(self) -> Backend:
        """The backend below all that stand on another."""
        below = self._backend
        return below.innermost if isinstance(below, Lifted) else below

    @property
    def group(self) -> Group:
        """Who runs the collectives."""
        return self._group

    @property
    def rank(self) -> int:
        """This process's place in the group, from 0."""
        return self._here.rank

    @property
    def world_size(self) -> int:
        """How many ranks the group has."""
        return self._here.world_size

    @property
    def _place(self) -> Place:
        return self._here

    @property
    def _messages(self) -> Log:
        return log_of(self._backend)

    def post_send(self, data: Buffer, dst: int, *, tag: int = 0, group: int = WORLD) -> Operation:
        """Start sending; ``data`` must not change until the operation is done."""
        return self._backend.post_send(data, dst, tag=tag, group=group)

    def post_recv_into(
        self, into: Buffer, src: int, *, tag: int = 0, group: int = WORLD, at_most: bool = False
    ) -> Operation:
        """Start receiving."""
        return self._backend.post_recv_into(into, src, tag=tag, group=group, at_most=at_most)

    def has_message(self, src: int, *, tag: int = 0, group: int = WORLD) -> bool:
        """Whether a message waits for a receive."""
        return self._backend.has_message(src, tag=tag, group=group)

    def post_barrier(
        self, *, group: int = WORLD, members: Sequence[int] | None = None
    ) -> Operation:
        """Arrive at a barrier of ``members`` (all ranks unless given)."""
        return self._backend.post_barrier(group=group, members=members)

    def progress(self, timeout: float | None = 0) -> None:
        """Move bytes for every operation under way."""
        self._backend.progress(timeout)

    def open_stream(
        self, rank: int, purpose: str, deadline: float, look: Callable[[], None]
    ) -> PeerStream:
        """A connection to a rank for one purpose; both ranks must ask for it."""
        return self._backend.open_stream(rank, purpose, deadline, look)

    def abandon_streams(self, is_over: Callable[[str], bool]) -> None:
        """Close connections that nobody here will ask for again."""
        self._backend.abandon_streams(is_over)

    def make_poller(self) -> Poller:
        """A poller for such connections."""
        return self._backend.make_poller()

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a rank is gone, if it is."""
        return self._backend.loss_of(rank)

    def peer_name(self, rank: int) -> str:
        """Where a rank is, for people."""
        return self._backend.peer_name(rank)

    def node_of(self, rank: int) -> NodeId | None:
        """The machine a rank is on."""
        return self._backend.node_of(rank)

    def as_nccl_backend(self) -> Backend | None:
        """The backend below that runs on NCCL, if one does."""
        return self._backend.as_nccl_backend()

    def on_close(self, action: Callable[[], None]) -> None:
        """Have something done before the backend closes."""
        self._backend.on_close(action)

    def forget(self, action: Callable[[], None]) -> None:
        """What was to be done at the end has been done already."""
        self._backend.forget(action)

    def abort(self, reason: str = "aborted by the caller") -> None:
        """End every collective under way with an error, from any thread."""
        self._group.abort(reason)

    def close(self) -> None:
        """Leave the group: peers waiting for this rank are told at once.  May be called twice."""
        self._group.close(self._backend.close)
