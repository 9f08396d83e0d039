"""AutoDiscoveryBackend: the node that finds its cluster by itself, as a backend."""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import operator
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import msgspec

from potluck import _time
from potluck._time import read_timeout
from potluck._types import Branch, Seconds
from potluck.backend.base import WORLD, Backend
from potluck.backend.operation import DONE
from potluck.cluster.cluster import Cluster
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.cluster.node import ClusterNode
from potluck.cluster.views import InOneView, Posted
from potluck.errors import Disconnected, DistributedError, Timeout
from potluck.logs import get_logger, speak_up
from potluck.membership.messages import Ancestry, Count
from potluck.trace.dump import install
from potluck.trace.recorder import attach

if TYPE_CHECKING:
    from collections.abc import (  # type: ignore[attr-defined]
        Buffer,
        Callable,
        Iterator,
        Mapping,
        Sequence,
    )

    from potluck._types import NodeId, ProcessId, View
    from potluck.backend.base import PeerStream
    from potluck.backend.operation import Operation
    from potluck.cluster.events import ClusterEvent, ViewChange
    from potluck.cluster.metrics_endpoint import MetricsEndpoint
    from potluck.cluster.observer import Wanted, Window
    from potluck.cluster.topology import SharedTopology
    from potluck.cluster.views import Stage
    from potluck.identity.namespace import NetworkNamespace
    from potluck.membership.events import ElectionState
    from potluck.membership.health import HealthSummary
    from potluck.metrics.registry import DistributedMetrics
    from potluck.net.transport import Poller


_live: weakref.WeakSet[AutoDiscoveryBackend] = weakref.WeakSet()


class AutoDiscoveryBackend(InOneView):
    """A node that finds the others of its namespace and job, and stays with them.

    Returns at once; calls wait until there is a cluster.  Rank and world size are those of the view
    that holds at the moment.  :func:`potluck.join` is the usual way to get one.

    >>> from potluck import AutoDiscoveryConfig, DistributedContext
    >>> alone = AutoDiscoveryConfig(job="doctest-auto", multicast=False, solo_delay=0.0)
    >>> with DistributedContext(AutoDiscoveryBackend(alone)) as cluster:
    ...     cluster.barrier(), cluster.world_size
    (None, 1)
    """

    context_type = Cluster
    """What :class:`DistributedContext` becomes on top of it."""

    def __init__(self, config: AutoDiscoveryConfig | None = None) -> None:
        self.config = config or AutoDiscoveryConfig()
        self._node = ClusterNode(self.config)
        self.stages = self._stages = self._node.stages
        self._endpoint = self._serve_metrics()
        attach(self, self._node.flight.recorder)
        install()
        self.dashboard_url: str | None = None
        """Where what happens is shown, if it is; with the token, where it takes one."""
        _live.add(self)

    def open_window(self, wanted: Wanted) -> Window:
        """Show what happens in a browser until this node leaves."""
        from potluck.cluster.observer import Window, errand_for

        namespace = self._node.port.members.security.namespace
        window = Window(errand_for(wanted, self.config, namespace, self.port))
        self.on_close(window.close)
        return window

    # -- who is here ---------------------------------------------------------------------------

    @property
    def job(self) -> str:
        """What this node works on."""
        return self._node.job

    @property
    def port(self) -> int:
        """Where this node listens."""
        return self._node.port.port

    @property
    def process(self) -> ProcessId:
        """Which start of which node this is."""
        return self._node.card.process

    @property
    def peer_id(self) -> NodeId:
        """This machine's id."""
        return self._node.card.node

    @property
    def peer_count(self) -> int:
        """How many others are in the view."""
        stage = self.stages.latest
        return 0 if stage is None else stage.world_size - 1

    @property
    def view(self) -> View | None:
        """The view that holds now; None before the first."""
        stage = self.stages.latest
        return None if stage is None else stage.view

    @property
    def leader(self) -> ProcessId | None:
        """Rank 0 of the view."""
        view = self.view
        return None if view is None else view.leader

    @property
    def election(self) -> ElectionState:
        """Who leads, in which term and why, and what this process does in it."""
        control = self._node.control
        return control.ask(lambda: control.core.election.state)

    @property
    def health(self) -> HealthSummary:
        """How the others are, with reasons."""
        control = self._node.control
        return control.ask(lambda: control.core.health.summary(_time.now()))

    @property
    def metrics(self) -> DistributedMetrics | None:
        """What this node has counted, unless it was told not to."""
        return self._node.metrics if self.config.metrics else None

    def count_in(self, metrics: DistributedMetrics) -> None:
        """Count there from now on; what this node has counted of the cluster so far comes along."""
        self._node.count_in(metrics)

    def _serve_metrics(self) -> MetricsEndpoint | None:
        address = self.config.metrics_address
        if address is None:
            return None
        from potluck.cluster.metrics_endpoint import MetricsEndpoint

        host, port = address
        try:
            return MetricsEndpoint(self._node.fresh_metrics, port, host)
        except BaseException:
            self._node.close()
            raise

    @property
    def metrics_url(self) -> str | None:
        """Where metrics can be read, if they can."""
        return None if self._endpoint is None else self._endpoint.url

    @property
    def topology(self) -> SharedTopology:
        """Machines and measured links, with what is known now."""
        return self._node.topographer.draw(self.stages.latest)

    def wait_for_peers(self, count: int, timeout: Seconds | None = None) -> View:
        """Wait until at least ``count`` others are in the view and connected."""
        goal = f"{count + 1} node{'s' * (count > 0)}"
        stage = self.stages.wait_for(
            lambda each: each.world_size > count, self._limit(timeout), goal
        )
        self.stages.accept()
        return stage.view

    def wait_until_active(self, timeout: Seconds | None = None) -> View:
        """Wait while the cluster is paused or changing; calls do so by themselves."""
        return self.wait_for_peers(0, timeout)

    def on_view_change(self, callback: Callable[[ViewChange], None]) -> Callable[[], None]:
        """Have ``callback`` called after every change, on a thread of its own.

        What this returns ends that.
        """
        return self._node.bulletin.subscribe(callback)

    def events(self) -> list[ClusterEvent]:
        """What has happened, oldest first; the last few hundred events."""
        return self._node.bulletin.events

    def step_down(self) -> None:
        """Hand rank 0 to the next member, if it is ours."""
        self._node.control.post(self._node.control.step_down)

    def continue_without_missing(self) -> None:
        """Do not wait for members that are missing; nothing happens while the cluster works.

        Those who are here continue as a new branch of the job.  If the missing machines turn out
        to have been at work meanwhile, their work counts and that of this side is discarded.
        """
        self._node.control.post(self._node.control.continue_without_missing)

    def left_out(
        self, awaited: Mapping[ProcessId, str]
    ) -> tuple[dict[ProcessId, str], tuple[ProcessId, ...], bool]:
        """Who was left out and may be alive, who has ended, and whether to continue without them.

        ``awaited`` are some that others have told of.
        """
        core = self._node.control.core
        return *core.left_out(awaited), core.is_insisting

    def note_awaited(self, awaited: Mapping[ProcessId, str]) -> None:
        """Tell people who ask that the training waits for these: one of them may have its state."""
        control, found = self._node.control, dict(awaited)

        def note() -> None:
            before, now = control.awaited, _time.now()
            control.awaited = {
                who: (name, before[who][1] if who in before else now) for who, name in found.items()
            }

        control.post(note)

    def note_progress(self, samples: int, origin: tuple[Branch, ...] = ()) -> None:
        """Say how many training samples are committed in this node's state.

        ``origin`` is the ancestry of a loaded checkpoint, at its end the checkpoint's own lineage
        and epoch: a lineage that was founded without a parent counts as its child.  When two
        clusters of one job meet, ancestry and then samples decide which one stays.
        """
        control, count = self._node.control, operator.index(samples)  # a plain int: it travels
        plain = count, [list(each) for each in origin]  # a Branch itself would not be checked
        try:
            count, branches = msgspec.convert(plain, tuple[Count, Ancestry])
        except msgspec.ValidationError as error:
            msg = f"note_progress({samples!r}, origin={origin!r}) is out of bounds: {error}"
            raise ValueError(msg) from None

        def note() -> None:
            control.core.samples, control.core.origin = count, branches

        control.post(note)

    def note_event(self, event: object, level: int = logging.INFO) -> None:
        """Keep an event in :meth:`events`; its text is ``str(event)``, and nothing is logged."""
        self._node.control.post(lambda: self._node.bulletin.keep(event, level))

    # -- bytes ---------------------------------------------------------------------------------

    def post_send(self, data: Buffer, dst: int, *, tag: int = 0, group: int = WORLD) -> Operation:
        """Start sending in the present view."""
        return self._post(lambda below: below.post_send(data, dst, tag=tag, group=group))

    def post_recv_into(
        self, into: Buffer, src: int, *, tag: int = 0, group: int = WORLD, at_most: bool = False
    ) -> Operation:
        """Start receiving in the present view."""
        return self._post(
            lambda below: below.post_recv_into(into, src, tag=tag, group=group, at_most=at_most)
        )

    def _post(self, start: Callable[[Backend], Operation]) -> Operation:
        """Start something in the present view; on its own it ends with what the view ends with."""
        pinned = self._stages.pinned
        if pinned is not None:  # the outer call waits for it, and says how it ended
            return start(_connected(pinned))
        with self._stages.visit(self.timeout) as stage:
            operation = start(_connected(stage))
        return operation if operation is DONE else Posted(operation, stage, self._stages)

    def has_message(self, src: int, *, tag: int = 0, group: int = WORLD) -> bool:
        """Whether a message waits for a receive in the present view."""
        with self._stages.visit(self.timeout) as stage:
            return _connected(stage).has_message(src, tag=tag, group=group)

    def post_barrier(
        self, *, group: int = WORLD, members: Sequence[int] | None = None
    ) -> Operation:
        """Arrive at a barrier of the present view."""
        return self._post(lambda below: below.post_barrier(group=group, members=members))

    def progress(self, timeout: float | None = 0) -> None:
        """Move bytes for every operation under way."""
        stage = self._stages.current
        if stage is not None and stage.backend is not None and not stage.stopped.is_set():
            with contextlib.suppress(Disconnected):  # operations say it
                stage.backend.progress(timeout)

    def open_stream(
        self, rank: int, purpose: str, deadline: float, look: Callable[[], None]
    ) -> PeerStream:
        """A connection of its own to a member of the present view."""
        remaining = max(0.0, deadline - time.monotonic())
        with self._stages.visit(None if remaining == math.inf else remaining) as stage:
            return _connected(stage).open_stream(rank, purpose, deadline, look)

    def abandon_streams(self, is_over: Callable[[str], bool]) -> None:
        """Close connections that nobody here will ask for again."""
        stage = self._stages.current
        if stage is not None and stage.backend is not None:
            stage.backend.abandon_streams(is_over)

    def make_poller(self) -> Poller:
        """A poller for such connections."""
        with self._stages.visit(self.timeout) as stage:
            return _connected(stage).make_poller()

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a member is gone, if it is."""
        stage = self._stages.current
        if stage is None or stage.backend is None:
            return self._stages.failure
        return stage.ending or stage.backend.loss_of(rank)

    def peer_name(self, rank: int) -> str:
        """Where a member is, for people."""
        stage = self._stages.current
        backend = None if stage is None else stage.backend
        return f"rank {rank}" if backend is None else backend.peer_name(rank)

    @property
    def is_closed(self) -> bool:
        """Whether this node has left."""
        return self._node.is_closed

    def close(self) -> None:
        """Leave: the others continue without this node at once.  May be called twice."""
        self._prepare_to_close()
        if self._endpoint is not None:
            self._endpoint.close()
        self._node.close()


def _connected(stage: Stage) -> Backend:
    assert stage.backend is not None  # who is let into a stage finds it built
    return stage.backend


@atexit.register
def _close_all() -> None:
    """A process that ends without closing still says goodbye."""
    for backend in list(_live):
        with contextlib.suppress(Exception):
            backend.close()


# --------------------------------------------------------------------------------------------------
# ``potluck.join()``: the one call that finds the others and returns when there are enough.

logger = get_logger("potluck.cluster")

SILENCE = 15.0
"""Seconds after which somebody who waits without end is told for what, once."""


def join(
    min_nodes: int | None = None,
    *,
    job: str | None = None,
    namespace: NetworkNamespace | str | None = None,
    peers: Sequence[str] = (),
    timeout: Seconds | None = None,
    dashboard: Wanted = False,
    **options: Any,
) -> Cluster:
    """Find the other nodes of this namespace and job, and return when there are enough.

    Nodes on the same network find each other; ``peers`` are addresses to try as well, where that is
    not possible.  Waits for ``min_nodes`` nodes, this one included, for at most ``timeout``
    seconds.  With ``dashboard`` (True, a port, or an address) a browser shows what happens, at
    :attr:`Cluster.dashboard_url`.  Further options are those of :class:`AutoDiscoveryConfig`.

    A thread is one node of a job: if it joins the same job again, as a notebook cell that is run
    twice does, its earlier cluster is closed first.

    >>> with join(job="doctest", multicast=False, solo_delay=0.0, timeout=30) as cluster:
    ...     cluster.rank, cluster.world_size, cluster.all_reduce(2.5)
    (0, 1, 2.5)
    """
    speak_up()
    timeout = read_timeout(timeout)
    config = AutoDiscoveryConfig(
        min_nodes=min_nodes, job=job, namespace=namespace, peers=peers, **options
    )
    _close_earlier(config)
    backend = AutoDiscoveryBackend(config)
    try:
        window = None if dashboard is False else backend.open_window(dashboard)
        if timeout is None:
            with _telling():
                backend.wait_for_peers(config.wanted_nodes - 1, SILENCE)
        backend.wait_for_peers(config.wanted_nodes - 1, timeout)
        backend.dashboard_url = None if window is None else window.wait()
    except BaseException:
        backend.close()
        raise
    _joined.backends = [*_earlier(), backend]
    return Cluster(backend)


class _Joined(threading.local):
    """The nodes that ``join`` made for each thread."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self.backends: list[AutoDiscoveryBackend] = []


_joined = _Joined()


def _earlier() -> list[AutoDiscoveryBackend]:
    """The open ones of this thread; a forked child has none."""
    if _joined.process != os.getpid():
        _joined.process, _joined.backends = os.getpid(), []
    return [backend for backend in _joined.backends if not backend.is_closed]


def _close_earlier(config: AutoDiscoveryConfig) -> None:
    """Leave the job before joining it again: two nodes of one thread would wait for each other."""
    for backend in _earlier():
        if _place(backend.config) == _place(config):
            logger.warning(
                'join() was called again for the job "%s": the earlier cluster of this thread is '
                "closed",
                backend.job,
            )
            backend.close()


def _place(config: AutoDiscoveryConfig) -> tuple[object, ...]:
    """What must differ for two nodes of one thread to have nothing to do with each other."""
    return config.job_name, config.namespace


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Say what has not happened yet, and go on."""
    try:
        yield
    except Timeout as error:
        logger.warning("Still waiting. %s", error)
