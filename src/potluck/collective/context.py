"""DistributedContext: any backend, with collectives, and counted if wanted."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar

from potluck._types import Seconds, in_seconds, settle_seconds
from potluck.backend.adapters.base import carry
from potluck.backend.base import WORLD, Backend, check_whole
from potluck.backend.simulated import SimulatedBackend
from potluck.backend.sub import SubBackend
from potluck.backend.tcp import TcpBackend
from potluck.collective.call import CallSite, Op, StrategyName, Work
from potluck.collective.collectives import Compression, DistributedBackend
from potluck.collective.group import Group
from potluck.errors import InvalidRank, InvalidWorldSize
from potluck.metrics.registry import DistributedMetrics, MetricsSnapshot
from potluck.net.addresses import MAX_PORT, Address, parse_address
from potluck.schedule.planner import CollectiveConfig
from potluck.trace.recorder import log_of, recorder_of

if TYPE_CHECKING:
    from collections.abc import Buffer, Iterable  # type: ignore[attr-defined]
    from os import PathLike
    from pathlib import Path
    from typing import Self

    from potluck._types import NodeId
    from potluck.backend.base import PeerStream
    from potluck.backend.operation import Operation
    from potluck.errors import DistributedError
    from potluck.identity.namespace import NetworkNamespace
    from potluck.metrics.instruments import OperationMetrics
    from potluck.net.transport import Poller
    from potluck.trace.recorder import GroupLog


# --------------------------------------------------------------------------------------------------
# Collectives that a user's backend has written anew: a context on it calls these.

OVERRIDABLE = ("all_reduce", "barrier")
"""What a backend of the origin defines itself; everything else stands on messages."""

_DEFAULTS: tuple[object, ...] = (None, False, "sum")


def overridden(
    backend: Backend, name: str, metrics: Callable[[], DistributedMetrics | None]
) -> Callable[..., Any] | None:
    """The backend's own method, counted where that is wanted; None if it is the library's."""
    if name not in vars(backend):
        home = next((each for each in type(backend).__mro__ if name in vars(each)), None)
        if home is None or home.__module__.partition(".")[0] == "potluck":
            return None
    method = getattr(backend, name)

    @functools.wraps(method)
    def call(*arguments: Any, async_op: bool = False, **options: Any) -> Any:
        arguments, options = _fitting(method, arguments, options)
        run = functools.partial(_run, name, method, arguments, options, metrics())
        return _start(name, run) if async_op else run()

    return call


def _run(
    name: str,
    method: Callable[..., Any],
    arguments: tuple[Any, ...],
    options: dict[str, Any],
    metrics: DistributedMetrics | None,
) -> Any:
    given = next(iter((*arguments, *options.values())), None) if name == "all_reduce" else None
    began, failure = monotonic(), ""
    try:
        result = method(*arguments, **options)
    except BaseException as error:
        failure = type(error).__name__
        raise
    else:
        return given if result is None else result  # in place, as the origin does it
    finally:
        if metrics is not None:
            entry: OperationMetrics = getattr(metrics, name)
            entry.note(monotonic() - began, _size(given), failure)


def _fitting(
    method: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as the method takes them: what only repeats a default may be left out."""
    try:
        inspect.signature(method).bind(*arguments, **options)
    except TypeError:
        options = {key: each for key, each in options.items() if not _is_default(each)}
        arguments = tuple(each for each in arguments if not _is_default(each))
    except ValueError:  # it has no signature that Python knows
        pass
    return arguments, options


def _is_default(value: object) -> bool:
    return value is None or (isinstance(value, bool | str) and value in _DEFAULTS)


def _start(name: str, run: Callable[[], Any]) -> Work[Any]:
    work: Work[Any] = Work(lambda: name)

    def follow() -> None:
        try:
            work.succeed(run())
        except BaseException as error:  # noqa: BLE001 - who waits raises it
            work.fail(error)

    threading.Thread(target=follow, name=f"potluck-{name}", daemon=True).start()
    return work


def _size(array: Any) -> int:
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        return int(array.nbytes)
    with contextlib.suppress(TypeError):
        return memoryview(array).nbytes
    return 0


# --------------------------------------------------------------------------------------------------
# Lifted: a backend that lends its messages to the collectives of another.


class Lifted(DistributedBackend):
    """Everything a backend does, and collectives on top."""

    def __init__(self, backend: Backend, config: CollectiveConfig | None = None) -> None:
        if not isinstance(backend, Backend):
            msg = f"backend must be a potluck.Backend, got {type(backend).__name__}"
            raise TypeError(msg)
        if config is not None and not isinstance(config, CollectiveConfig):
            msg = f"config must be a CollectiveConfig, got {type(config).__name__}"
            raise TypeError(msg)
        if config is not None:
            config.check_world_size(backend.world_size)
        self._backend = carry(backend)
        if config is None and isinstance(backend, DistributedBackend):
            self._group = backend.group
        else:
            self._group = Group.of(backend, config)
            if config is not None and self._group.config != config:
                msg = "The collectives of this backend already use another configuration"
                raise ValueError(msg)
        self._here = CallSite(backend.rank, backend.world_size)
        self._respect_overrides()

    def _respect_overrides(self) -> None:
        """Call what the backend has written anew, instead of the library's own."""
        for name in OVERRIDABLE:
            own = overridden(self._backend, name, lambda: self._metrics)
            if own is not None:
                setattr(self, name, own)

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
    def _place(self) -> CallSite:
        return self._here

    @property
    def _messages(self) -> GroupLog:
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
        """Close connections that are not needed here any more."""
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


# --------------------------------------------------------------------------------------------------
# Whom operations wait for: a group sleeps, and metrics learn because of whom.


def watch_waiting(
    group: Group, metrics: DistributedMetrics, labels: Mapping[int, str]
) -> dict[int, float]:
    """Have a group count how long it sleeps because of each rank, in these metrics as well.

    A rank without a label, as everybody outside of a cluster, is called by its number.
    """
    backend, peers = group.backend, metrics.peers
    named = {}
    for rank in range(group.world_size):
        if rank != group.rank:
            number = backend.to_global(rank) if isinstance(backend, SubBackend) else rank
            named[rank] = labels.get(number) or peers.label(number, f"rank {number}")
    return peers.watch(named, group.count_waiting())


# --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class GroupPresence:
    """Observers see a group of fixed ranks: its contexts count, and say where."""

    metrics: Callable[[], DistributedMetrics]
    told: Callable[[Group, DistributedMetrics], None]


_attended: dict[Backend, GroupPresence] = {}


def attend_to(backend: Backend, attention: GroupPresence) -> None:
    """Contexts on this backend count in these metrics, until it closes."""

    def forget() -> None:
        _attended.pop(backend, None)

    _attended[backend] = attention
    backend.on_close(forget)


class DistributedContext(Lifted):
    """A handle on a group: collectives, messages and who we are in it.

    Takes any :class:`Backend`; ``config`` says how collectives shall run, for those who want a say
    in it.  Closing the context closes the backend.

    >>> from potluck import SimulatedBackend
    >>> with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
    ...     context.all_reduce(2.5), context.is_master
    (2.5, True)
    """

    def __new__(cls, backend: Backend, config: CollectiveConfig | None = None) -> Self:
        """Of the kind that fits the backend: on one whose ranks change, a :class:`Cluster`."""
        del config
        fitting = backend.context_type if isinstance(backend, Backend) else None
        return super().__new__(cls if fitting is None or not issubclass(fitting, cls) else fitting)

    def __init__(self, backend: Backend, config: CollectiveConfig | None = None) -> None:
        super().__init__(backend, config)
        self._slept: dict[int, float] | None = None
        self._subgroups: dict[DistributedContext, None] = {}
        self._whole: DistributedContext | None = None
        attention = _attended.get(self.innermost)
        if self._metrics is None and attention is not None:
            self._count_in(attention.metrics())

    @classmethod
    def with_metrics(
        cls,
        backend: Backend,
        metrics: DistributedMetrics | None = None,
        config: CollectiveConfig | None = None,
    ) -> Self:
        """A context that counts, in ``metrics`` if that is given."""
        context = cls(backend, config)
        context._count_in(metrics or context._metrics or DistributedMetrics())
        return context

    @property
    def is_master(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def metrics(self) -> DistributedMetrics | None:
        """Where this context counts, if it does."""
        return self._metrics

    def metrics_snapshot(self) -> MetricsSnapshot | None:
        """What has been counted so far; None for a context without metrics."""
        return None if self._metrics is None else self._metrics.snapshot()

    def _count_in(self, metrics: DistributedMetrics | None) -> None:
        """Count there; by which names others are waited for is up to who they are."""
        if self._metrics is not None and self._slept is not None:
            self._metrics.peers.release(self._slept)
        self._metrics = metrics
        if metrics is not None:
            attention = _attended.get(self.innermost)
            if attention is not None:
                attention.told(self._group, metrics)
            self._slept = watch_waiting(self._group, metrics, self._peer_labels())

    def _peer_labels(self) -> dict[int, str]:
        """What the other ranks are called in metrics, where that is not by their number."""
        return {}

    def dump_trace(self, path: str | PathLike[str] | None = None) -> Path:
        """Write down the last operations of this rank, and what is under way; returns where.

        Without a path that is ``POTLUCK_TRACE_DIR``, or ``traces`` in Potluck's own folder.
        ``potluck trace`` puts the dumps of all ranks together.
        """
        from potluck.trace.dump import dump

        return dump(recorder_of(self), path, reason="the program asked for it")

    def subgroup(self, members: Iterable[int], *, name: str | None = None) -> DistributedContext:
        """Some ranks as a group of their own; every member calls this, as for ``SubBackend``.

        It ends with this context, or by itself when it is closed.
        """
        from potluck.backend.sub import SubBackend

        # Of the backend below: subgroups of the same parent are counted to tell them apart.
        context = DistributedContext(SubBackend(self.innermost, members, name=name))
        context._count_in(self._metrics)
        context._whole = self
        self._subgroups[context] = None
        return context

    def close(self) -> None:
        """Leave the group, and its subgroups: peers waiting for this rank are told at once."""
        for subgroup in list(self._subgroups):
            subgroup.close()
        if self._metrics is not None and self._slept is not None:
            self._metrics.peers.release(self._slept)
        super().close()
        if self._whole is not None:
            self._whole._subgroups.pop(self, None)  # noqa: SLF001 - another of our kind


# --------------------------------------------------------------------------------------------------
# Collectives as functions, on any backend: ``all_reduce(backend, array)``.
#
# They block.  For asynchronous work, metrics and objects make a :class:`DistributedContext` of the
# backend; both may be used side by side.

A = TypeVar("A")


def _lifted(backend: Backend) -> DistributedBackend:
    return backend if isinstance(backend, DistributedBackend) else Lifted(backend)


def all_reduce(
    backend: Backend,
    array: A,
    op: Op = "sum",
    *,
    out: A | None = None,
    dtype: Any = None,
    strategy: StrategyName = None,
    compression: Compression = None,
    timeout: Seconds | None = None,
) -> A:
    """Give every rank the reduction of all ranks' arrays, in place or in ``out``.

    >>> from potluck import SimulatedBackend
    >>> backend, = SimulatedBackend.create_group(1)
    >>> buffer = bytearray(8)
    >>> all_reduce(backend, buffer, dtype="float32") is buffer
    True
    >>> backend.close()
    """
    return _lifted(backend).all_reduce(
        array,
        op,
        out=out,
        dtype=dtype,
        strategy=strategy,
        compression=compression,
        timeout=timeout,
    )


allreduce = all_reduce
"""The name that some know it by."""


def reduce(
    backend: Backend,
    array: A,
    root: int = 0,
    op: Op = "sum",
    *,
    out: A | None = None,
    dtype: Any = None,
    strategy: StrategyName = None,
    timeout: Seconds | None = None,
) -> A | None:
    """Give one rank the reduction of all ranks' arrays; the others get None.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return reduce(backend, np.array([backend.rank + 1]))
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [array([3]), None]
    """
    return _lifted(backend).reduce(
        array, root, op, out=out, dtype=dtype, strategy=strategy, timeout=timeout
    )


def reduce_scatter(
    backend: Backend,
    array: A,
    op: Op = "sum",
    *,
    counts: Sequence[int] | None = None,
    out: A | None = None,
    dtype: Any = None,
    timeout: Seconds | None = None,
) -> A:
    """Reduce all ranks' arrays and give each rank its own rows of the result.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return reduce_scatter(backend, np.array([1, 2])).tolist()
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [[2], [4]]
    """
    return _lifted(backend).reduce_scatter(
        array, op, counts=counts, out=out, dtype=dtype, timeout=timeout
    )


def broadcast(
    backend: Backend,
    array: A,
    root: int = 0,
    *,
    strategy: StrategyName = None,
    timeout: Seconds | None = None,
) -> A:
    """Give every rank the array of one, in place.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return broadcast(backend, np.array([backend.rank + 7])).tolist()
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [[7], [7]]
    """
    return _lifted(backend).broadcast(array, root, strategy=strategy, timeout=timeout)


def all_gather(
    backend: Backend,
    array: A,
    *,
    counts: Sequence[int] | Literal["ask"] | None = None,
    out: A | None = None,
    timeout: Seconds | None = None,
) -> A:
    """Give every rank all ranks' arrays, one after the other along the first dimension.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return all_gather(backend, np.array([backend.rank])).tolist()
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [[0, 1], [0, 1]]
    """
    return _lifted(backend).all_gather(array, counts=counts, out=out, timeout=timeout)


def gather(
    backend: Backend,
    array: A,
    root: int = 0,
    *,
    counts: Sequence[int] | Literal["ask"] | None = None,
    out: A | None = None,
    timeout: Seconds | None = None,
) -> A | None:
    """Give one rank all ranks' arrays, one after the other; the others get None.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return gather(backend, np.array([backend.rank]))
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [array([0, 1]), None]
    """
    return _lifted(backend).gather(array, root, counts=counts, out=out, timeout=timeout)


def scatter(
    backend: Backend,
    array: A | None = None,
    root: int = 0,
    *,
    counts: Sequence[int] | None = None,
    out: A | None = None,
    timeout: Seconds | None = None,
) -> A:
    """Give each rank its rows of one rank's array; the others pass ``out``.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         rows = np.array([3, 4]) if backend.rank == 0 else None
    ...         return scatter(backend, rows, out=np.zeros(1, int)).tolist()
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [[3], [4]]
    """
    return _lifted(backend).scatter(array, root, counts=counts, out=out, timeout=timeout)


def all_to_all(
    backend: Backend,
    array: A,
    *,
    send_counts: Sequence[int] | None = None,
    counts: Sequence[Sequence[int]] | None = None,
    out: A | None = None,
    timeout: Seconds | None = None,
) -> A:
    """Give each rank its rows of every rank's array, one after the other in rank order.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return all_to_all(backend, np.arange(2) + 10 * backend.rank).tolist()
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [[0, 10], [1, 11]]
    """
    return _lifted(backend).all_to_all(
        array, send_counts=send_counts, counts=counts, out=out, timeout=timeout
    )


def barrier(backend: Backend, *, timeout: Seconds | None = None) -> None:
    """Return when every rank has called this.

    >>> from concurrent.futures import ThreadPoolExecutor
    >>> import numpy as np
    >>> from potluck import SimulatedBackend
    >>> def run(backend):
    ...     with backend:
    ...         return barrier(backend, timeout=10)
    >>> with ThreadPoolExecutor(2) as ranks:
    ...     print(list(ranks.map(run, SimulatedBackend.create_group(2))))
    [None, None]
    """
    _lifted(backend).barrier(timeout)


# --------------------------------------------------------------------------------------------------
# RingBackend: a group written down by hand, with collectives.


class RingBackend(Lifted):
    """One rank of a group whose addresses everybody knows.

    Every rank listens at its own address, and the others connect to it there.  An address that is
    not this machine's, or that differs between the lists of two ranks, raises an error that names
    the entry.  The name is that of its
    ancestor; whether a ring is what suits the links is found out, unless ``collectives`` says so:
    ``CollectiveConfig(local_all_reduce=AllReduceStrategy.RING)``.

    >>> import socket
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> from potluck import DistributedConfig
    >>> doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    >>> addresses = [f"127.0.0.1:{door.getsockname()[1]}" for door in doors]  # usually known
    >>> for door in doors: door.close()
    >>> def run(rank):  # in reality, each on a machine of its own
    ...     with RingBackend(DistributedConfig(addresses, rank)) as ring:
    ...         return ring.all_reduce(ring.rank + 1.0)
    >>> with ThreadPoolExecutor(2) as machines:
    ...     list(machines.map(run, range(2)))
    [3.0, 3.0]
    """

    def __init__(
        self, config: DistributedConfig, collectives: CollectiveConfig | None = None
    ) -> None:
        self._config = config.validate()
        backend = _connect(config)
        try:
            super().__init__(backend, collectives)
        except BaseException:
            backend.close()
            raise

    @property
    def config(self) -> DistributedConfig:
        """Who takes part."""
        return self._config


def _connect(config: DistributedConfig) -> Backend:
    if config.world_size == 1:
        return SimulatedBackend(0, 1)  # nobody to connect to
    addresses = [str(address) for address in config.addresses]
    return TcpBackend(
        config.rank,
        config.world_size,
        addresses[0],
        timeout=config.timeout,
        namespace=config.namespace,
        peers=addresses,
    )


# --------------------------------------------------------------------------------------------------
# DistributedConfig: who takes part, for groups that are written down by hand.

DEFAULT_PORT = 52416
"""Where a rank listens unless its address says otherwise."""


Peer: TypeAlias = str | tuple[str, int]


@dataclass(frozen=True)
class DistributedConfig:
    """All ranks' addresses, and which of them we are.  A wrong one raises at once.

    >>> config = DistributedConfig(["192.168.1.10", ("192.168.1.11", 4000)], rank=1)
    >>> config.world_size, [str(address) for address in config.addresses]
    (2, ['192.168.1.10:52416', '192.168.1.11:4000'])
    """

    peers: Sequence[Peer]
    """``host``, ``host:port`` or ``(host, port)`` of every rank, ours included, in rank order.

    The same list on every rank."""
    rank: int
    timeout: float = 30.0
    """Seconds within which all ranks must have started."""
    namespace: NetworkNamespace | str | None = None
    """Whose members may connect; unless given, the namespace this machine uses."""

    def __post_init__(self) -> None:
        """Refuse what could not work."""
        settle_seconds(self)
        self.validate()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.peers)

    @property
    def addresses(self) -> list[Address]:
        """Where each rank listens."""
        return [_read(rank, peer) for rank, peer in enumerate(self.peers)]

    def validate(self) -> DistributedConfig:
        """Raise if this makes no sense; itself otherwise."""
        if isinstance(self.peers, str) or not isinstance(self.peers, Sequence):
            msg = f"peers must be a list of addresses, one for each rank, got {self.peers!r}"
            raise TypeError(msg)
        if not self.peers:
            raise InvalidWorldSize(
                0, hint="peers must list the address of every rank, including this one."
            )
        if not 0 <= check_whole(self.rank, "rank") < self.world_size:
            raise InvalidRank(self.rank, self.world_size)
        seen: dict[Address, int] = {}
        for rank, address in enumerate(self.addresses):
            if address.port == 0:
                msg = f"peers[{rank}] must have a fixed port, not 0"
                raise ValueError(msg)
            if seen.setdefault(address, rank) != rank:
                msg = f"peers[{seen[address]}] and peers[{rank}] cannot both be {address}"
                raise ValueError(msg)
        if not self.timeout > 0:
            msg = f"timeout must be more than zero seconds, got {self.timeout}"
            raise ValueError(msg)
        return self


def _read(rank: int, peer: object) -> Address:
    """One entry of the list; an error names it."""
    try:
        if isinstance(peer, str):
            return parse_address(peer, DEFAULT_PORT)
        if isinstance(peer, tuple | list) and len(peer) == 2:  # noqa: PLR2004 - host and port
            host, port = peer
            if isinstance(host, str) and 0 <= check_whole(port, "port") <= MAX_PORT:
                bare = host.strip("[]")
                return parse_address(f"[{bare}]:{port}" if ":" in bare else f"{bare}:{port}")
    except (TypeError, ValueError) as error:
        msg = f"peers[{rank}]: {error}"
        raise type(error)(msg) from None
    msg = f"peers[{rank}] must be 'host', 'host:port' or ('host', port), got {peer!r}"
    raise (ValueError if isinstance(peer, tuple | list) else TypeError)(msg)
