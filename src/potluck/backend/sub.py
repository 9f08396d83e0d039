"""SubBackend: some ranks of a backend, as a group of their own.

Ranks are renumbered from 0 in ascending order.  The group's traffic carries an identity of its own,
so overlapping subgroups and the parent can be used at the same time.
"""

from __future__ import annotations

import hashlib
import weakref
from typing import TYPE_CHECKING

from potluck._process import ForkSafeLock
from potluck.backend.adapters.base import carry
from potluck.backend.base import NOTICES, RPC, WORLD, Backend, check_whole
from potluck.errors import InvalidRank, InvalidWorldSize

if TYPE_CHECKING:
    from collections.abc import (  # type: ignore[attr-defined]
        Buffer,
        Callable,
        Iterable,
        Sequence,
    )

    from potluck._types import NodeId
    from potluck.backend.base import PeerStream
    from potluck.backend.operation import Operation
    from potluck.errors import DistributedError
    from potluck.net.transport import Poller


_lock = ForkSafeLock()
_created: weakref.WeakKeyDictionary[Backend, dict[tuple[int, ...], int]] = (
    weakref.WeakKeyDictionary()
)


class SubBackend(Backend):
    """A view of a backend restricted to ``members`` (ranks of the parent).

    Every member creates the subgroup, and subgroups of the same members in the same order, so that
    all agree which is which; or each is given a ``name``, and the order does not matter.  With
    ``in_order`` the ranks of the subgroup are numbered as ``members`` lists them.

    >>> from potluck import SimulatedBackend
    >>> parent = SimulatedBackend.create_group(4)[3]
    >>> sub = SubBackend(parent, [3, 1, 3])
    >>> sub.members, sub.rank, sub.to_global(0), sub.to_local(2)
    ((1, 3), 1, 1, None)
    """

    def __init__(
        self,
        parent: Backend,
        members: Iterable[int],
        *,
        name: str | None = None,
        in_order: bool = False,
    ) -> None:
        listed = dict.fromkeys(check_whole(member, "rank") for member in members)
        ordered = tuple(listed if in_order else sorted(listed))
        if not ordered:
            raise InvalidWorldSize(0, hint="A subgroup needs at least one member.")
        for member in ordered:
            if not 0 <= member < parent.world_size:
                raise InvalidRank(
                    member,
                    parent.world_size,
                    message=f"A subgroup cannot have rank {member}: "
                    f"the group has ranks 0 to {parent.world_size - 1}",
                )
        if parent.rank not in ordered:
            raise InvalidRank(
                parent.rank,
                len(ordered),
                message=f"Rank {parent.rank} is not in the subgroup of ranks {list(ordered)}",
                hint="Only the members of a subgroup make it; the other ranks must skip the call.",
            )
        self.name = name
        """What it is called; None if only the order tells it from others of the same members."""
        self._parent = carry(parent)
        self._members = ordered
        self._rank = ordered.index(parent.rank)
        self._group = _identity(parent, ordered, name)
        self._closed = False
        self.timeout = parent.timeout

    @property
    def rank(self) -> int:
        """This process's place in the subgroup."""
        return self._rank

    @property
    def world_size(self) -> int:
        """How many members there are."""
        return len(self._members)

    @property
    def members(self) -> tuple[int, ...]:
        """The parent's ranks in this subgroup; the index is the rank here."""
        return self._members

    @property
    def parent(self) -> Backend:
        """The backend this is a part of."""
        return self._parent

    @property
    def identity(self) -> int:
        """The number that its traffic carries; the same on all members."""
        return self._group

    def to_global(self, local: int) -> int:
        """The parent's rank of a member; raises for a rank that is not here."""
        return self._members[self._check_rank(local)]

    def to_local(self, global_: int) -> int | None:
        """The rank here of one of the parent's ranks, or None for a stranger."""
        return self._members.index(global_) if global_ in self._members else None

    def post_send(self, data: Buffer, dst: int, *, tag: int = 0, group: int = WORLD) -> Operation:
        """Start sending to a member."""
        return self._parent.post_send(data, self.to_global(dst), tag=tag, group=self._scope(group))

    def post_recv_into(
        self, into: Buffer, src: int, *, tag: int = 0, group: int = WORLD, at_most: bool = False
    ) -> Operation:
        """Start receiving from a member."""
        return self._parent.post_recv_into(
            into, self.to_global(src), tag=tag, group=self._scope(group), at_most=at_most
        )

    def has_message(self, src: int, *, tag: int = 0, group: int = WORLD) -> bool:
        """Whether a message from a member waits for a receive."""
        return self._parent.has_message(self.to_global(src), tag=tag, group=self._scope(group))

    def post_barrier(
        self, *, group: int = WORLD, members: Sequence[int] | None = None
    ) -> Operation:
        """Arrive at a barrier of the members."""
        chosen = self._members if members is None else [self.to_global(m) for m in members]
        return self._parent.post_barrier(group=self._scope(group), members=chosen)

    def progress(self, timeout: float | None = 0) -> None:
        """Make progress."""
        self._parent.progress(timeout)

    def open_stream(
        self, rank: int, purpose: str, deadline: float, look: Callable[[], None]
    ) -> PeerStream:
        """A connection to a member for one purpose of this subgroup."""
        purpose = f"{purpose}/{self._group:x}"
        return self._parent.open_stream(self.to_global(rank), purpose, deadline, look)

    def abandon_streams(self, is_over: Callable[[str], bool]) -> None:
        """Close what members have opened for purposes of this subgroup that are over."""
        ending = f"/{self._group:x}"
        self._parent.abandon_streams(
            lambda purpose: purpose.endswith(ending) and is_over(purpose.removesuffix(ending))
        )

    def make_poller(self) -> Poller:
        """A poller of the parent."""
        return self._parent.make_poller()

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a member is gone, if it is."""
        return self._parent.loss_of(self.to_global(rank))

    def peer_name(self, rank: int) -> str:
        """Where a member is, for people."""
        return self._parent.peer_name(self.to_global(rank))

    def node_of(self, rank: int) -> NodeId | None:
        """The machine a member is on."""
        return self._parent.node_of(self.to_global(rank))

    def on_close(self, action: Callable[[], None]) -> None:
        """Have something done before this subgroup or its parent closes."""
        super().on_close(action)
        self._parent.on_close(self.close)

    def close(self) -> None:
        """End what stands on it; the parent stays open."""
        self._prepare_to_close()
        self._parent.forget(self.close)

    def _scope(self, group: int) -> int:
        """The parent's number for a group of ours; a subgroup of ours has one already."""
        return self._group ^ group if group in (WORLD, NOTICES, RPC) else group


def _identity(parent: Backend, members: tuple[int, ...], name: str | None) -> int:
    """A number all members compute alike and no other group has (64 bits of a hash)."""
    parent = parent.innermost  # a context is not another world
    if name is None:
        with _lock:
            counts = _created.setdefault(parent, {})
            counts[members] = counts.get(members, 0) + 1
            name = f"#{counts[members]}"
    return _number(parent, members, name)


def unmade(parent: Backend) -> list[tuple[tuple[int, ...], int, int]]:
    """Of each set of members: who, how many subgroups this rank has made, the next one's number.

    Those that have names are left out: their order does not matter.
    """
    with _lock:
        counts = dict(_created.get(parent, {}))
    return [
        (members, count, _number(parent, members, f"#{count + 1}"))
        for members, count in counts.items()
    ]


def _number(parent: Backend, members: tuple[int, ...], name: str) -> int:
    outer = parent._group if isinstance(parent, SubBackend) else WORLD  # noqa: SLF001
    text = f"{outer}/{','.join(map(str, members))}/{name}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") or 1
