"""HybridBackend: messages over one backend, large sums by the engine of another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.backend.base import WORLD, Backend
from potluck.errors import InvalidRank, InvalidWorldSize

if TYPE_CHECKING:
    from collections.abc import Buffer, Callable, Sequence  # type: ignore[attr-defined]

    import numpy as np
    import numpy.typing as npt

    from potluck._types import NodeId
    from potluck.backend.base import PeerStream
    from potluck.backend.operation import Operation
    from potluck.errors import DistributedError
    from potluck.net.transport import Poller
    from potluck.schedule.reduce import ReduceOp


class HybridBackend(Backend):
    """One rank in two worlds of the same ranks.

    ``messages`` carries messages, barriers, remote calls and everything compressed; ``engine``,
    such as a :class:`TorchBackend` over NCCL, does what it can do itself.  Closing closes both.

    >>> from potluck import SimulatedBackend
    >>> messages, engine = SimulatedBackend.create_group(1) + SimulatedBackend.create_group(1)
    >>> with HybridBackend(messages, engine) as both:
    ...     both.rank, both.world_size
    (0, 1)
    """

    has_engine = True

    def __init__(self, messages: Backend, engine: Backend) -> None:
        if messages.world_size != engine.world_size:
            raise InvalidWorldSize(
                engine.world_size,
                minimum=messages.world_size,
                hint=f"The engine must have the same {messages.world_size} ranks as the messages.",
            )
        if messages.rank != engine.rank:
            raise InvalidRank(
                engine.rank,
                messages.world_size,
                hint=f"This process has rank {messages.rank} for messages: use the same rank.",
            )
        self.messages = messages
        self.engine = engine

    @property
    def rank(self) -> int:
        """This process's place, from 0."""
        return self.messages.rank

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.messages.world_size

    def post_send(self, data: Buffer, dst: int, *, tag: int = 0, group: int = WORLD) -> Operation:
        """Start sending."""
        return self.messages.post_send(data, dst, tag=tag, group=group)

    def post_recv_into(
        self, into: Buffer, src: int, *, tag: int = 0, group: int = WORLD, at_most: bool = False
    ) -> Operation:
        """Start receiving."""
        return self.messages.post_recv_into(into, src, tag=tag, group=group, at_most=at_most)

    def post_barrier(
        self, *, group: int = WORLD, members: Sequence[int] | None = None
    ) -> Operation:
        """Arrive at a barrier."""
        return self.messages.post_barrier(group=group, members=members)

    def progress(self, timeout: float | None = 0) -> None:
        """Move bytes of messages."""
        self.messages.progress(timeout)

    def has_message(self, src: int, *, tag: int = 0, group: int = WORLD) -> bool:
        """Whether a message waits for a receive."""
        return self.messages.has_message(src, tag=tag, group=group)

    def open_stream(
        self, rank: int, purpose: str, deadline: float, look: Callable[[], None]
    ) -> PeerStream:
        """A connection for messages."""
        return self.messages.open_stream(rank, purpose, deadline, look)

    def abandon_streams(self, is_over: Callable[[str], bool]) -> None:
        """Close connections that are not needed here any more."""
        self.messages.abandon_streams(is_over)

    def make_poller(self) -> Poller:
        """A poller for such connections."""
        return self.messages.make_poller()

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a rank is gone, if it is."""
        return self.messages.loss_of(rank)

    def peer_name(self, rank: int) -> str:
        """Where a rank is, for people."""
        return self.messages.peer_name(rank)

    def node_of(self, rank: int) -> NodeId | None:
        """The machine a rank is on."""
        return self.messages.node_of(rank)

    def all_reduce_by_engine(
        self, array: npt.NDArray[np.generic], op: ReduceOp | str, timeout: float | None
    ) -> bool:
        """Add up by the engine."""
        return self.engine.all_reduce_by_engine(array, op, timeout)

    def broadcast_by_engine(
        self, array: npt.NDArray[np.generic], root: int, timeout: float | None
    ) -> bool:
        """Bring the root's values to all ranks by the engine."""
        return self.engine.broadcast_by_engine(array, root, timeout)

    def as_nccl_backend(self) -> Backend | None:
        """The engine, or the backend for messages, if that runs on NCCL."""
        return self.engine.as_nccl_backend() or self.messages.as_nccl_backend()

    def close(self) -> None:
        """Leave both."""
        self._prepare_to_close()
        self.messages.close()
        self.engine.close()
