"""State sync: a newcomer gets the state, and a replica that has come apart is put right.

All members take part.  They compare hashes of chunks, and each receiver gets the chunks that differ
from several members at once.  What has arrived stays here if the view changes in the middle: the
next try sends only what is still missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated

import msgspec
import numpy as np

from potluck.core.cluster_bounds import Message, Sentence, clip
from potluck.errors import MalformedFrame
from potluck.logs import get_logger
from potluck.metrics import DistributedMetrics
from potluck.net.names import machine_name
from potluck.runtime.distributed import DistributedBackend
from potluck.runtime.objects import MAX_OBJECT_BYTES
from potluck.training import trees
from potluck.training.counting import count_sync
from potluck.training.peer_messages import broadcast, gather, malformed
from potluck.training.state import TrainingState
from potluck.training.state_chunks import (
    CHUNK,
    DIGEST,
    Chunks,
    Layout,
    chunk_digest,
    size_of,
    sizes,
    state_digest,
)

__all__ = ["StateSync", "SyncReport"]

logger = get_logger(__name__)

ROUND = 32
"""Chunks that a receiver gets in one exchange: 32 MiB of memory on either side."""

GROWTH = 16
"""How many times larger than this member's own a state may be that others send.

Optimisers allocate what they keep at their first step, so a newcomer has less than the others.
"""

LEAST = 64 << 20
"""Bytes of a state that are plausible whatever is here."""

_PLAN_LEAST = 1 << 20  # the same of a plan

REPLICA, PLAN, WISHES = "the hash of its state", "the layout of its state", "its wishes"
STATE, FIT = "its state", "what it made of the state"
"""What the messages are called in errors."""

Wishes = list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)]]


class Replica(Message, frozen=True):
    """What a member has."""

    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST, max_length=DIGEST)]
    platform: Annotated[str, msgspec.Meta(max_length=255)]
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""


class Plan(Message, frozen=True):
    """The state that all members get."""

    layout: Layout
    digests: bytes
    """Of its chunks, one after the other."""

    def checked(self, rank: int, chosen: bytes, limit: int) -> list[bytes]:
        """The hashes of the chunks; the sender of the plan is named if it does not add up.

        It is bound to the hash that was chosen, so its sender cannot describe another state.
        """
        marks = self.digests
        try:
            self.layout.check(limit)
        except MalformedFrame as error:
            raise malformed(rank, PLAN, str(error)) from None
        if len(marks) != DIGEST * -(-self.layout.nbytes // CHUNK):
            raise malformed(rank, PLAN, f"{len(marks)} bytes of hashes do not fit its size")
        digests = [marks[at : at + DIGEST] for at in range(0, len(marks), DIGEST)]
        if state_digest(self.layout, digests) != chosen:
            raise malformed(rank, PLAN, "it is not the state that was announced")
        return digests


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What a sync has done."""

    receivers: tuple[int, ...]
    """Ranks that lacked something."""
    servers: tuple[int, ...]
    """Ranks that had everything."""
    nbytes: int
    """Bytes that this rank has received."""
    whole: int
    """Bytes of the state."""


class StateSync:
    """Brings the state of some members to all; keeps what has arrived from one try to the next."""

    def __init__(self, state: TrainingState, metrics: DistributedMetrics | None = None) -> None:
        self._state = state
        self._metrics = metrics
        self._arrived: dict[bytes, bytes] = {}

    def run(
        self,
        group: DistributedBackend,
        sources: Sequence[int],
        platform: str,
        trained: Sequence[int] = (),
    ) -> SyncReport:
        """Give all members the state of ``sources``; all of them call this, with the same ones.

        Where sources differ, the state of most of them counts, else that of the first.  If most of
        those that have ``trained`` before cannot use it, its sender is to blame, and all of them
        have the state that they had.
        """
        return count_sync(self._metrics, lambda: self._run(group, sources, platform, trained))

    def _run(
        self,
        group: DistributedBackend,
        sources: Sequence[int],
        platform: str,
        trained: Sequence[int],
    ) -> SyncReport:
        mine = Chunks(self._state.capture())
        replica = Replica(mine.digest, platform[:255], machine_name())
        told = gather(group, replica, Replica, REPLICA)
        everyone = [(each.digest, each.platform) for each in told]
        chosen = _reference([(rank, everyone[rank]) for rank in sources])
        servers = [rank for rank, (digest, _) in enumerate(everyone) if digest == chosen]
        receivers = [rank for rank in range(len(everyone)) if rank not in servers]
        if group.rank in servers:
            self._arrived.clear()  # what came before the others agreed is of no use now
        if not receivers:
            return SyncReport((), tuple(servers), 0, mine.nbytes)
        _name_the_diverged(sources, told, servers)
        own = Plan(mine.layout, b"".join(mine.digests))
        plan = broadcast(
            group,
            own if group.rank == servers[0] else None,
            Plan,
            PLAN,
            servers[0],
            limit=min(MAX_OBJECT_BYTES, GROWTH * _weight(own) + _PLAN_LEAST),
        )
        layout = plan.layout
        digests = plan.checked(servers[0], chosen, max(LEAST, GROWTH * mine.nbytes))
        needed = self._needed(mine, layout, digests) if group.rank in receivers else []
        room = 16 * len(digests) + 64
        wishes = gather(group, needed, Wishes, WISHES, limit=room)
        _check_wishes(wishes, receivers, len(digests))
        received, wrong = self._exchange(group, mine, wishes, (servers, layout, digests))
        problem: Exception | None = None
        if group.rank in receivers and wrong is None:
            problem = self._assemble(mine, layout, digests)
        refusals = gather(group, clip(ascii(problem)) if problem else "", Sentence, FIT)
        refusing = [rank for rank in trained if refusals[rank]]
        if 2 * len(refusing) > len(trained):
            why = f"most members cannot use it: {refusals[refusing[0]]}"
            raise malformed(servers[0], STATE, why)
        if wrong is not None:
            raise wrong
        if problem is not None:
            raise problem
        return SyncReport(tuple(receivers), tuple(servers), received, layout.nbytes)

    def _needed(self, mine: Chunks, layout: Layout, digests: list[bytes]) -> list[int]:
        # What came of an older state is of no use, and as large as that.
        self._arrived = {each: self._arrived[each] for each in digests if each in self._arrived}
        have = set(self._arrived)
        if mine.layout.arrays == layout.arrays:
            have.update(
                theirs for theirs, own in zip(digests, mine.digests, strict=True) if theirs == own
            )
        return [number for number, digest in enumerate(digests) if digest not in have]

    def _exchange(
        self,
        group: DistributedBackend,
        mine: Chunks,
        wishes: list[list[int]],
        plan: tuple[list[int], Layout, list[bytes]],
    ) -> tuple[int, MalformedFrame | None]:
        """Rounds in which servers send chunks to those who wish for them.

        Bytes received, and what is wrong with a part; all rounds take place, or others would wait.
        """
        servers, layout, digests = plan
        ranks, total = range(len(wishes)), layout.nbytes
        received, wrong = 0, None
        for start in range(0, max(map(len, wishes)), ROUND):
            # Each chunk of a receiver comes from another server, so that all of them send.
            parcels = [
                [
                    [n for n in wishes[to][start : start + ROUND] if _server(servers, n, to) == who]
                    for to in ranks
                ]
                for who in ranks
            ]
            outgoing = b"".join(mine.read(n) for to in ranks for n in parcels[group.rank][to])
            counts = [[sizes(numbers, total) for numbers in row] for row in parcels]
            data = group.all_to_all(np.frombuffer(outgoing, np.uint8), counts=counts).tobytes()
            received += len(data)
            place = 0
            for who in ranks:
                for number in parcels[who][group.rank]:
                    chunk = data[place : place + size_of(number, total)]
                    place += len(chunk)
                    if chunk_digest(chunk) != digests[number]:
                        wrong = MalformedFrame(
                            f"Rank {who} sent a part of the state that is not what it announced",
                            rank=who,
                            cause="its memory may be faulty, or its state changed meanwhile",
                        )
                    else:
                        self._arrived[digests[number]] = chunk
        return received, wrong

    def _assemble(self, mine: Chunks, layout: Layout, digests: list[bytes]) -> Exception | None:
        """Use what has arrived; if that fails, why, and the state is what it was."""
        stream = bytearray(layout.nbytes)
        is_alike = mine.layout.arrays == layout.arrays
        for number, digest in enumerate(digests):
            chunk = self._arrived.get(digest)
            if chunk is None and is_alike and mine.digests[number] == digest:
                chunk = mine.read(number)
            if chunk is None:  # the same content elsewhere in our own state
                chunk = mine.read(mine.digests.index(digest))
            stream[number * CHUNK : number * CHUNK + len(chunk)] = chunk
        self._arrived.clear()
        before = bytearray().join(mine.read(number) for number in range(len(mine.digests)))
        try:
            self._state.restore(trees.read(layout.shape, layout.parts(stream)))
        except Exception as error:  # noqa: BLE001 - whatever the user's own functions make of it
            self._state.restore(trees.read(mine.layout.shape, mine.layout.parts(before)))
            return error
        return None


def _server(servers: list[int], number: int, receiver: int) -> int:
    return servers[(number + receiver) % len(servers)]


def _reference(states: list[tuple[int, tuple[bytes, str]]]) -> bytes:
    """What most sources have; where that is no majority, what the first one has."""
    votes = Counter(digest for _, (digest, _) in states)
    first = states[0][1][0]
    digest, count = votes.most_common(1)[0]
    return digest if count > len(states) // 2 else first


def _name_the_diverged(sources: Sequence[int], told: Sequence[Replica], servers: list[int]) -> None:
    """Equal machines compute equal bits: where they do not, somebody should know."""
    platform = told[servers[0]].platform
    for rank in sources:
        if rank not in servers and told[rank].platform == platform:
            logger.warning(
                "%s (rank %d) has another state than the others, though it is of the same kind "
                "(%s): it is replaced. Faulty memory, or code that is not the same, may be why.",
                told[rank].name,
                rank,
                platform,
            )


def _weight(plan: Plan) -> int:
    """About how many bytes a plan takes, written down."""
    rows = sum(len(name) + 10 * len(sides) + 32 for name, _, sides in plan.layout.arrays)
    return len(plan.layout.shape) + len(plan.digests) + rows


def _check_wishes(wishes: list[list[int]], receivers: Sequence[int], chunks: int) -> None:
    for rank, wish in enumerate(wishes):
        if wish and rank not in receivers:
            raise malformed(rank, WISHES, "it has everything")
        if any(after <= before for before, after in pairwise(wish)):
            raise malformed(rank, WISHES, "they are not in order")
        if wish and wish[-1] >= chunks:
            raise malformed(rank, WISHES, f"part {wish[-1]} of {chunks}")
