"""Who may open a connection, by the roster: what both sides decide between hello and answer.

The hello carries the hash of the dialler's roster.  If both sides have the same roster and the
dialler is on it, nothing more is exchanged.  Otherwise each side sends its roster, merges what the
other sends (:mod:`potluck.trust.roster`), and decides by what it knows then.

An earlier secret opens nothing but this exchange, and only for a member: it brings back a machine
that was away, which gets the new secret at the end.  A caller with an earlier secret that is not a
member is not even sent the roster.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from potluck._types import NodeId
from potluck.trust.roster import MergeOutcome, Roster, Taken
from potluck.wire_messages import Introduction, Join, OpenRequest, RankEndpoint

# --------------------------------------------------------------------------------------------------
# Who may join a group: the decisions of rank 0, and of any rank that is dialled.
#
# Pure: connections are numbers here.  A refusal is a sentence for the rank that is refused; the
# others keep waiting.

ANYWHERE = frozenset({"0.0.0.0", "::"})
"""Hosts that stand for every interface: the rank is behind a port mapping."""


@dataclass(frozen=True, slots=True)
class AdmissionRefused:
    """The request is refused; ``sentence`` says why."""

    sentence: str


def list_ranks(ranks: Collection[int]) -> str:
    """A list of ranks for a sentence.

    >>> list_ranks([3]), list_ranks([1, 2])
    ('rank 3', 'ranks 1, 2')
    """
    return f"rank{'s' * (len(ranks) != 1)} {', '.join(map(str, sorted(ranks)))}"


class JoinRequested:
    """Rank 0 gathers the others."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._joined: dict[int, tuple[int, Join]] = {}  # rank -> (connection, what it said)

    def join(self, connection: int, request: Join) -> AdmissionRefused | None:
        """Let a rank join, or say why it is refused."""
        rank, world = request.rank, self.world_size
        if request.world_size != world:
            return AdmissionRefused(
                f"rank {rank} was started for a group of {request.world_size}, "
                f"rank 0 for a group of {world}; start all with the same world size"
            )
        if not 0 < rank < world:
            return AdmissionRefused(
                f"rank {rank} cannot join a group of {world}; ranks 1 to {world - 1} can"
            )
        if rank in self._joined:
            holder = self._joined[rank][1].peer.name
            return AdmissionRefused(
                f"rank {rank} is already here (on {holder}); every process needs a rank of its own"
            )
        for _, other in self._joined.values():
            if request.peer.node and request.peer.node == other.peer.node:
                refused = judge_clone(
                    request.peer.node, other.introduction, request.introduction, other.peer.name
                )
                if refused is not None:
                    return refused
        self._joined[rank] = (connection, request)
        return None

    def leave(self, connection: int) -> int | None:
        """A connection ended before the group was complete; returns the rank that is free again."""
        for rank, (known, _) in self._joined.items():
            if known == connection:
                del self._joined[rank]
                return rank
        return None

    @property
    def missing(self) -> list[int]:
        """Ranks that have not come yet."""
        return [rank for rank in range(1, self.world_size) if rank not in self._joined]

    def waiting(self) -> dict[int, int]:
        """Connection -> rank of those who wait for the rest."""
        return {connection: rank for rank, (connection, _) in self._joined.items()}

    def peers(self, me: RankEndpoint) -> list[RankEndpoint]:
        """Where every rank is; complete groups only."""
        return [me, *(self._joined[rank][1].peer for rank in range(1, self.world_size))]

    def unreachable(self, loopback: Collection[int]) -> AdmissionRefused | None:
        """Refuse a group in which some ranks came through loopback although others are elsewhere.

        ``loopback`` are the connections that came that way; those ranks gave an address that no
        other machine can reach.
        """
        waiting = self.waiting()
        local = [rank for connection, rank in waiting.items() if connection in loopback]
        if not local or len(local) == len(waiting):
            return None
        remote = [rank for connection, rank in waiting.items() if connection not in loopback]
        return AdmissionRefused(
            f"{list_ranks(local)} reached rank 0 through loopback while {list_ranks(remote)} came "
            "from another machine; give every rank the same master address, one that all can reach"
        )


def judge_entry(
    rank: int, told: RankEndpoint, peers: Sequence[tuple[str, int]], me: int = 0
) -> AdmissionRefused | None:
    """Whether a rank listens where the list of peers of rank ``me`` says; any if that is empty."""
    if not 0 < rank < len(peers):
        return None
    host, port = peers[rank]
    if told.port == port and (host in ANYWHERE or host in told.hosts):
        return None
    where = " or ".join(told.hosts) or "an address of its own"
    return AdmissionRefused(
        f"peers[{rank}] is {host}, port {port} on rank {me}, but rank {rank} listens on {where}, "
        f"port {told.port}; give every rank the same list of peers"
    )


def judge_lane(
    hello: OpenRequest, session: bytes, me: int, expected: Collection[int]
) -> AdmissionRefused | None:
    """Whether a connection from another rank may open; ``expected`` are the ranks still to come."""
    if hello.session != session:
        return AdmissionRefused("this connection belongs to another group")
    if hello.to != me:
        return AdmissionRefused(f"this is rank {me}, not rank {hello.to}")
    if hello.rank not in expected:
        return AdmissionRefused(f"rank {hello.rank} is not expected here, or is already connected")
    return None


def judge_node(rank: int, known: str, proved: str) -> AdmissionRefused | None:
    """Whether the node that dials as a rank is the one that joined as that rank."""
    if proved != known:
        return AdmissionRefused(f"another node joined as rank {rank}, not the one that dials now")
    return None


def judge_start(rank: int, known: int, said: int) -> AdmissionRefused | None:
    """Whether the process that dials is the one that joined as a rank: they share a node."""
    if said != known:
        which = "a later" if said < known else "an earlier"
        return AdmissionRefused(
            f"rank {rank} is {which} process on that machine than the one that dials now"
        )
    return None


def judge_table(nodes: Sequence[str], me: int, size: int, proved: Mapping[int, str]) -> str | None:
    """What is wrong with the nodes of all ranks as rank 0 tells them; None if nothing is.

    ``proved`` are those that this rank, ``me``, knows by itself: its own, and that of rank 0.
    """
    if len(nodes) != size:
        return f"Rank 0 sent a table of {len(nodes)} ranks instead of {size}"
    for rank, node in proved.items():
        if nodes[rank] != node:
            return f"Rank 0 named another node for rank {rank} than the one that joined"
    if proved[me] and not all(nodes):
        return "Rank 0 named a rank without a node, so any machine could pose as it"
    return None


def is_clone(one: Introduction, other: Introduction) -> bool:
    """Whether two processes that show the same node id run on different machines.

    A disk that was copied whole has the same machine tag, but not the same boot tag.
    """
    return _differ(one.machine, other.machine) or _differ(one.boot, other.boot)


def judge_clone(
    node: str, known: Introduction, caller: Introduction, where: str
) -> AdmissionRefused | None:
    """Whether the key of a node, which is in use on ``where``, shows up on another machine."""
    if not is_clone(known, caller):
        return None
    return AdmissionRefused(
        f"the node key {node} is used on two machines, {where} and the one that calls: it was "
        "copied, with a home directory or a disk image; delete the file node_keypair on one of the "
        "two, or give it another POTLUCK_HOME, and pair that machine"
    )


def _differ(one: str, other: str) -> bool:
    return bool(one and other) and one != other


# --------------------------------------------------------------------------------------------------

NO_ROSTER = bytes(32)
"""Stands for no roster: the side that is called sends its own in any case."""

_FOLLOWED = frozenset({MergeOutcome.CURRENT, MergeOutcome.MOVED_ON})


@dataclass(frozen=True, slots=True)
class Granted:
    """The caller belongs here; what it asks for is decided elsewhere."""


@dataclass(frozen=True, slots=True)
class RosterExchange:
    """Exchange rosters first."""


def digest(roster: Roster) -> bytes:
    """What stands for a roster in a hello; equal for equal rosters."""
    return hashlib.sha256(b"potluck roster digest v1\0" + roster.to_bytes()).digest()


def judge_hello(
    roster: Roster | None, caller: NodeId, told: bytes, *, is_current: bool
) -> Granted | RosterExchange | AdmissionRefused:
    """What the side that is called does with a hello.

    ``roster`` is ours, None where every machine with the secret belongs; ``told`` is the digest the
    caller sent; ``is_current`` says whether it used the present secret.
    """
    if roster is None:
        return Granted()
    if not roster.is_member(caller) and not (is_current and told):
        return _not_a_member(roster.explain(caller))
    # A caller that keeps no roster has nothing to tell; ours decides.
    if is_current and roster.is_member(caller) and told in {b"", digest(roster)}:
        return Granted()
    return RosterExchange()


def judge_peer(roster: Roster | None, peer: NodeId) -> AdmissionRefused | None:
    """Whether to open a connection with a node, by our own roster."""
    if roster is None or roster.is_member(peer):
        return None
    return _not_a_member(roster.explain(peer))


def judge_sender(taken: Taken, peer: NodeId) -> AdmissionRefused | None:
    """Whether to continue with a node that has sent its roster."""
    if taken.outcome is MergeOutcome.REFUSED:
        return _not_a_member(taken.reason)
    return judge_peer(taken.roster, peer)


def judge_ourselves(taken: Taken) -> AdmissionRefused | None:
    """Whether we can follow the node that has sent its roster."""
    if taken.outcome in _FOLLOWED:
        return None
    where = (
        " `potluck members` there shows the change." if taken.outcome is MergeOutcome.SIGN else ""
    )
    return AdmissionRefused(f"the two machines have different member lists: {taken.reason}{where}")


def _not_a_member(reason: str) -> AdmissionRefused:
    advice = "" if "pair" in reason else " Pair it first: `potluck pair`."
    return AdmissionRefused(f"not a member: {reason}{advice}")
