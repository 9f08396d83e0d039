"""TrainingState: everything that has to follow a member, declared once."""

from __future__ import annotations

import hashlib
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np

from potluck.arrays import trees
from potluck.arrays.adapters import as_buffer
from potluck.arrays.base import Access, Array, is_type_name, read_dtype
from potluck.backend.base import read_view
from potluck.collective.collectives import MAX_OBJECT_BYTES, DistributedBackend
from potluck.errors import MalformedFrame
from potluck.identity.node import machine_name
from potluck.logs import get_logger
from potluck.membership.messages import MembershipMessage, Sentence, clip
from potluck.metrics.registry import DistributedMetrics
from potluck.training.peer_messages import broadcast, gather, malformed


@runtime_checkable
class Stateful(Protocol):
    """Models and optimisers of PyTorch, samplers, schedulers."""

    def state_dict(self) -> Any: ...  # noqa: D102
    def load_state_dict(self, state: Any, /) -> Any: ...  # noqa: D102


class TrainingState:
    """The named parts of a training's state.

    A part is an object with ``state_dict()`` and ``load_state_dict()``, a pair of functions that
    get and set it, a random generator of numpy, or a tree of arrays that are changed in place.

    >>> weights = {"w": np.zeros(2)}
    >>> state = TrainingState(model=weights)
    >>> saved = state.capture()
    >>> weights["w"][:] = 7
    >>> state.restore({"model": {"w": np.ones(2)}})
    >>> weights["w"].tolist()
    [1.0, 1.0]
    """

    def __init__(self, **parts: Any) -> None:
        if not parts:
            msg = "A state needs at least one part, such as model=..."
            raise ValueError(msg)
        self._parts = {name: _part(name, part) for name, part in parts.items()}

    def with_part(self, name: str, part: Any) -> TrainingState:
        """This state and one more part; itself if it has a part of that name."""
        if name in self._parts:
            return self
        made = TrainingState(**{name: part})
        made._parts = {**self._parts, **made._parts}
        return made

    @property
    def names(self) -> list[str]:
        """What the parts are called."""
        return list(self._parts)

    def capture(self) -> dict[str, Any]:
        """A tree of all parts, which shows their own memory where that is possible."""
        return {name: get() for name, (get, _) in self._parts.items()}

    def restore(self, tree: Mapping[str, Any]) -> None:
        """Put other values into all parts."""
        if set(tree) != set(self._parts):
            msg = (
                f"This state has the parts {', '.join(sorted(self._parts))}, "
                f"but the other one has {', '.join(sorted(map(str, tree)))}"
            )
            raise ValueError(msg)
        for name, (_, put) in self._parts.items():
            put(tree[name])


_Access = tuple[Callable[[], Any], Callable[[Any], Any]]


def _part(name: str, part: Any) -> _Access:
    if isinstance(part, np.random.Generator):
        generator = part.bit_generator

        def put(state: Any) -> None:
            generator.state = state

        return lambda: generator.state, put
    if isinstance(part, Stateful):
        return part.state_dict, part.load_state_dict
    if isinstance(part, tuple) and len(part) == 2 and all(map(_is_function, part)):  # noqa: PLR2004
        return part
    if trees.leaves_of(part):
        _check_writable(name, part)
        return lambda: part, lambda tree: _fill(name, part, tree)
    msg = (
        f"{name}: a {type(part).__name__} cannot be part of a training state: pass something with "
        "state_dict() and load_state_dict(), a pair (get, set), or a tree of arrays"
    )
    raise TypeError(msg)


def _is_function(thing: Any) -> bool:
    return callable(thing) and not isinstance(thing, Stateful)  # modules of PyTorch can be called


def _check_writable(name: str, part: Any) -> None:
    for path, array in trees.leaves_of(part):
        try:
            as_buffer(array, Access.WRITE)
        except (TypeError, ValueError) as error:
            msg = (
                f"{name}.{path} cannot be changed in place: pass a pair (get, set) of functions "
                f"instead of the arrays. {error}"
            )
            raise TypeError(msg) from error


def _fill(name: str, part: Any, tree: Any) -> None:
    """Write into the arrays that the user holds."""
    mine, theirs = trees.leaves_of(part), dict(trees.leaves_of(tree))
    if {path for path, _ in mine} != set(theirs):
        msg = f"{name}: the other state has different arrays"
        raise ValueError(msg)
    for path, array in mine:
        buffer = as_buffer(array, Access.WRITE)
        new = trees.flat_array(theirs[path])
        if new.dtype != buffer.flat.dtype or new.size != buffer.flat.size:
            msg = (
                f"{name}.{path}: {buffer.flat.size} values of {buffer.flat.dtype} here, "
                f"{new.size} of {new.dtype} in the other state"
            )
            raise ValueError(msg)
        np.copyto(buffer.flat, new)
        buffer.commit()


# --------------------------------------------------------------------------------------------------
# A state as one stream of bytes in chunks, each with its hash.

CHUNK = 1 << 20
"""Bytes that are compared and sent as one."""

MAX_STATE = 1 << 40
"""Bytes of a state; what claims to be larger is a mistake."""

DIGEST = 16
"""Bytes of a hash."""

_DIMENSIONS = 64  # of an array; numpy and PyTorch have no more
_LARGEST_ITEM = 1 << 10  # bytes of one element

Side = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
"""Elements of an array along one dimension."""


def chunk_digest(data: bytes | bytearray | memoryview) -> bytes:
    """The hash of a chunk."""
    return hashlib.blake2b(data, digest_size=DIGEST).digest()


def state_digest(layout: StateLayout, digests: Sequence[bytes]) -> bytes:
    """The hash of a state, from its layout and the hashes of its chunks."""
    return chunk_digest(b"".join([chunk_digest(repr(layout).encode()), *digests]))


def _check_dtype(name: str, kind: str) -> None:
    if not is_type_name(kind):
        raise MalformedFrame(f"The array {name[:100]!r} has elements of the type {kind[:40]!r}")
    try:
        dtype = read_dtype(kind)
    except (TypeError, ValueError, SyntaxError) as error:
        raise MalformedFrame(f"The array {name[:100]!r} has no known type: {error}") from None
    is_plain = dtype.subdtype is None and dtype.names is None and dtype.itemsize <= _LARGEST_ITEM
    if str(dtype) != kind or not is_plain:
        raise MalformedFrame(f"The array {name[:100]!r} has elements of the type {kind[:40]!r}")


class StateLayout(NamedTuple):
    """Which arrays make up the stream, in this order, and the tree they belong to."""

    shape: bytes
    arrays: tuple[tuple[str, str, tuple[Side, ...]], ...]
    """Name, type and shape."""

    def check(self, limit: int = MAX_STATE) -> None:
        """Raise :class:`~potluck.MalformedFrame` unless it adds up; nothing is allocated before.

        ``limit`` is in bytes.
        """
        for name, kind, sides in self.arrays:
            _check_dtype(name, kind)
            if len(sides) > _DIMENSIONS:
                raise MalformedFrame(f"The array {name[:100]!r} has {len(sides)} dimensions")
        names = [name for name, _, _ in self.arrays]
        if names != sorted(set(names)):
            raise MalformedFrame("The arrays of a state are not in order, or one is there twice")
        if self.nbytes > limit:
            raise MalformedFrame(
                f"A state of {self.nbytes} bytes, more than the limit of {limit}",
                expected=limit,
                got=self.nbytes,
            )
        trees.check(self.shape, names)

    @property
    def nbytes(self) -> int:
        """Bytes of the stream."""
        return sum(math.prod(sides) * np.dtype(kind).itemsize for _, kind, sides in self.arrays)

    def parts(self, stream: bytearray) -> dict[str, Array]:
        """The arrays that a stream holds; they share its memory."""
        arrays, place = {}, 0
        for name, kind, sides in self.arrays:
            dtype, count = np.dtype(kind), math.prod(sides)
            size = count * dtype.itemsize
            raw = np.frombuffer(stream, np.uint8, size, place) if size else np.empty(0, "u1")
            if place % dtype.alignment:
                raw = raw.copy()
            arrays[name] = raw.view(dtype).reshape(sides)
            place += size
        return arrays


class Chunks:
    """The chunks of a state that is here."""

    def __init__(self, tree: Any) -> None:
        shape, arrays = trees.written(tree)
        flats: Mapping[str, Array] = {name: trees.flat_array(arrays[name]) for name in arrays}
        rows = [
            (name, str(flats[name].dtype), tuple(int(side) for side in arrays[name].shape))
            for name in sorted(arrays)
        ]
        self.layout = StateLayout(shape, tuple(rows))
        self._views: list[memoryview] = [
            read_view(flats[name].view(np.uint8)) for name, _, _ in rows
        ]
        self.nbytes = sum(map(len, self._views))
        count = -(-self.nbytes // CHUNK)
        self.digests = [chunk_digest(self.read(number)) for number in range(count)]

    @property
    def digest(self) -> bytes:
        """The hash of everything: tree, types, shapes and values."""
        return state_digest(self.layout, self.digests)

    def read(self, number: int) -> bytes:
        """One chunk."""
        start, stop = number * CHUNK, min(self.nbytes, (number + 1) * CHUNK)
        pieces, place = [], 0
        for view in self._views:
            low, high = max(start - place, 0), min(stop - place, len(view))
            if low < high:
                pieces.append(view[low:high])
            place += len(view)
            if place >= stop:
                break
        return b"".join(pieces)


def size_of(number: int, nbytes: int) -> int:
    """Bytes of one chunk of a stream.

    >>> size_of(1, CHUNK + 5)
    5
    """
    return min(CHUNK, nbytes - number * CHUNK)


def sizes(numbers: Sequence[int], nbytes: int) -> int:
    """Bytes of several."""
    return sum(size_of(number, nbytes) for number in numbers)


# --------------------------------------------------------------------------------------------------
# State sync: a newcomer gets the state, and a replica that has come apart is put right.
#
# All members take part.  They compare hashes of chunks, and each receiver gets the chunks that
# differ from several members at once.  What has arrived stays here if the view changes in the
# middle: the next try sends only what is still missing.

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


class Replica(MembershipMessage, frozen=True):
    """What a member has."""

    digest: Annotated[bytes, msgspec.Meta(min_length=DIGEST, max_length=DIGEST)]
    platform: Annotated[str, msgspec.Meta(max_length=255)]
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""


class SyncPlan(MembershipMessage, frozen=True):
    """The state that all members get."""

    layout: StateLayout
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
        began = time.perf_counter()
        report = self._run(group, sources, platform, trained)
        if self._metrics is not None:
            self._metrics.state.syncs.note(time.perf_counter() - began, report.nbytes)
        return report

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
        own = SyncPlan(mine.layout, b"".join(mine.digests))
        plan = broadcast(
            group,
            own if group.rank == servers[0] else None,
            SyncPlan,
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

    def _needed(self, mine: Chunks, layout: StateLayout, digests: list[bytes]) -> list[int]:
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
        plan: tuple[list[int], StateLayout, list[bytes]],
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

    def _assemble(
        self, mine: Chunks, layout: StateLayout, digests: list[bytes]
    ) -> Exception | None:
        """Use what has arrived; if that fails, why, and the state is what it was."""
        stream = bytearray()
        is_alike = mine.layout.arrays == layout.arrays
        for number, digest in enumerate(digests):
            chunk = self._arrived.get(digest)
            if chunk is None and is_alike and mine.digests[number] == digest:
                chunk = mine.read(number)
            if chunk is None:  # the same content elsewhere in our own state
                chunk = mine.read(mine.digests.index(digest))
            stream += chunk
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
    """What most sources have; where that is not a majority, what the first one has."""
    votes = Counter(digest for _, (digest, _) in states)
    first = states[0][1][0]
    digest, count = votes.most_common(1)[0]
    return digest if count > len(states) // 2 else first


def _name_the_diverged(sources: Sequence[int], told: Sequence[Replica], servers: list[int]) -> None:
    """Equal machines compute equal bits: where they do not, warn."""
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


def _weight(plan: SyncPlan) -> int:
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
