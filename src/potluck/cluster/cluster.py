"""The cluster: a node that finds the others (:func:`join`), and the handle that programs use."""

from __future__ import annotations

import atexit
import contextlib
import copy
import logging
import math
import operator
import os
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from potluck import _time
from potluck._time import read_timeout
from potluck._types import Branch, Seconds, View
from potluck.backend.base import WORLD, Backend
from potluck.backend.operation import DONE
from potluck.backend.sub import SubBackend
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.cluster.node import ClusterNode
from potluck.cluster.topology import ViewLinks, measure_links
from potluck.cluster.views import InOneView, ViewMessageErrors, ViewOperation, explain
from potluck.collective.collectives import CallScope
from potluck.collective.context import DistributedContext
from potluck.collective.executor import LinkMemory
from potluck.errors import Disconnected, DistributedError, Timeout
from potluck.logs import get_logger, speak_up
from potluck.membership.messages import Ancestry, Count
from potluck.trace.dump import install
from potluck.trace.recorder import attach

if TYPE_CHECKING:
    from collections.abc import (  # type: ignore[attr-defined]
        Buffer,
        Callable,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )
    from types import TracebackType

    from potluck._types import NodeId, ProcessId
    from potluck.backend.base import PeerStream
    from potluck.backend.operation import Operation
    from potluck.cluster.events import ClusterEvent, ViewChange
    from potluck.cluster.metrics_endpoint import MetricsEndpoint
    from potluck.cluster.observer import DashboardProcess, Wanted
    from potluck.cluster.topology import SharedTopology
    from potluck.cluster.views import ViewSession, ViewSessions
    from potluck.collective.call import CallSite, Work
    from potluck.identity.namespace import NetworkNamespace
    from potluck.membership.events import ElectionState
    from potluck.membership.health import HealthSummary
    from potluck.metrics.registry import DistributedMetrics
    from potluck.net.transport import Poller
    from potluck.schedule.planner import CollectiveConfig


Result = TypeVar("Result")

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

    @property
    def context_type(self) -> type[Cluster]:
        """What :class:`DistributedContext` becomes on top of it."""
        return Cluster

    def __init__(self, config: AutoDiscoveryConfig | None = None) -> None:
        self.config = config or AutoDiscoveryConfig()
        self._node = ClusterNode(self.config)
        self.sessions: ViewSessions = self._node.sessions
        self._sessions = self.sessions
        self._endpoint = self._serve_metrics()
        attach(self, self._node.flight.recorder)
        install()
        self.dashboard_url: str | None = None
        """Where what happens is shown, if it is; with the token, where it takes one."""
        _live.add(self)

    def open_window(self, wanted: Wanted) -> DashboardProcess:
        """Show what happens in a browser until this node leaves."""
        from potluck.cluster.observer import DashboardProcess, request_for

        namespace = self._node.port.members.security.namespace
        window = DashboardProcess(request_for(wanted, self.config, namespace, self.port))
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
    def is_unpaired(self) -> bool:
        """Whether no other machine may take part; False where a passphrase decides who may."""
        roster = self._node.port.members.roster
        return roster is not None and len(roster.members) == 1

    @property
    def peer_count(self) -> int:
        """How many others are in the view."""
        session = self.sessions.latest
        return 0 if session is None else session.world_size - 1

    @property
    def view(self) -> View | None:
        """The view that holds now; None before the first."""
        session = self.sessions.latest
        return None if session is None else session.view

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

    def call_metrics(self) -> DistributedMetrics | None:
        """The same."""
        return self.metrics

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
        return self._node.topology_tracker.draw()

    @property
    def map(self) -> SharedTopology:
        """The same, without asking what is new."""
        return self._node.topology_tracker.shared

    def wait_for_peers(self, count: int, timeout: Seconds | None = None) -> View:
        """Wait until at least ``count`` others are in the view and connected."""
        goal = f"{count + 1} node{'s' * (count > 0)}"
        session = self.sessions.wait_for(
            lambda each: each.world_size > count, self._limit(timeout), goal
        )
        self.sessions.accept()
        return session.view

    def wait_until_active(self, timeout: Seconds | None = None) -> View:
        """Wait while the cluster is paused or changing; calls do so by themselves."""
        return self.wait_for_peers(0, timeout)

    def on_view_change(self, callback: Callable[[ViewChange], None]) -> Callable[[], None]:
        """Have ``callback`` called after every change, on a thread of its own.

        What this returns ends that.
        """
        return self._node.event_log.subscribe(callback)

    def events(self) -> list[ClusterEvent]:
        """What has happened, oldest first; the last few hundred events."""
        return self._node.event_log.events

    def step_down(self) -> None:
        """Hand rank 0 to the next member, if it is ours."""
        self._node.control.post(self._node.control.step_down)

    def continue_without_missing(self) -> None:
        """Do not wait for members that are missing; nothing happens while the cluster works.

        Those who are here continue as a new branch of the job.  If the missing machines are at
        work when the two sides meet, their work counts and that of this side is discarded.  If they
        wait too, they join this side, and steps that only they have are discarded.
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

    @property
    def is_constant(self) -> bool:
        """Whether this member was in every view since the founding, so that it missed no step."""
        return self._node.control.core.is_constant

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
        self._node.control.post(lambda: self._node.event_log.keep(event, level))

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
        pinned = self._sessions.pinned
        if pinned is not None:  # the outer call waits for it, and says how it ended
            return start(_connected(pinned))
        with self._sessions.visit(self.timeout) as session:
            operation = start(_connected(session))
        return operation if operation is DONE else ViewOperation(operation, session, self._sessions)

    def has_message(self, src: int, *, tag: int = 0, group: int = WORLD) -> bool:
        """Whether a message waits for a receive in the present view."""
        with self._sessions.visit(self.timeout) as session:
            return _connected(session).has_message(src, tag=tag, group=group)

    def post_barrier(
        self, *, group: int = WORLD, members: Sequence[int] | None = None
    ) -> Operation:
        """Arrive at a barrier of the present view."""
        return self._post(lambda below: below.post_barrier(group=group, members=members))

    def progress(self, timeout: float | None = 0) -> None:
        """Move bytes for every operation under way."""
        session = self._sessions.current
        if session is not None and session.backend is not None and not session.stopped.is_set():
            with contextlib.suppress(Disconnected):  # operations say it
                session.backend.progress(timeout)

    def open_stream(
        self, rank: int, purpose: str, deadline: float, look: Callable[[], None]
    ) -> PeerStream:
        """A connection of its own to a member of the present view."""
        remaining = max(0.0, deadline - time.monotonic())
        with self._sessions.visit(None if remaining == math.inf else remaining) as session:
            return _connected(session).open_stream(rank, purpose, deadline, look)

    def abandon_streams(self, is_over: Callable[[str], bool]) -> None:
        """Close connections that no thread here will ask for again."""
        session = self._sessions.current
        if session is not None and session.backend is not None:
            session.backend.abandon_streams(is_over)

    def make_poller(self) -> Poller:
        """A poller for such connections."""
        with self._sessions.visit(self.timeout) as session:
            return _connected(session).make_poller()

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a member is gone, if it is."""
        session = self._sessions.current
        if session is None or session.backend is None:
            return self._sessions.failure
        return session.ending or session.backend.loss_of(rank)

    def peer_name(self, rank: int) -> str:
        """Where a member is, for people."""
        session = self._sessions.current
        backend = None if session is None else session.backend
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


def _connected(session: ViewSession) -> Backend:
    assert session.backend is not None  # who is let into a session finds it built
    return session.backend


@atexit.register
def _close_all() -> None:
    """A process that ends without closing still leaves in order."""
    for backend in list(_live):
        with contextlib.suppress(Exception, KeyboardInterrupt):  # a person cannot wait
            backend.close()


# --------------------------------------------------------------------------------------------------
# What :func:`join` returns.


class Cluster(InOneView, DistributedContext):
    """A cluster, as :func:`potluck.join` returns it.

    Everything a :class:`DistributedContext` can do, in the view that holds at the moment of the
    call.  When a machine is lost or comes, what runs raises :class:`~potluck.PeerLost` or
    :class:`~potluck.ViewChanged`, on all ranks; a rank that is between two calls learns it from its
    next one.  The call after that runs among those who are there then.

    >>> from potluck import join
    >>> with join(job="doctest-cluster", multicast=False, solo_delay=0.0) as cluster:
    ...     cluster.is_master, cluster.all_reduce(1.5)
    (True, 1.5)
    """

    _backend: AutoDiscoveryBackend

    def __init__(self, backend: Backend, config: CollectiveConfig | None = None) -> None:
        if not isinstance(backend, AutoDiscoveryBackend):
            msg = f"A cluster needs an AutoDiscoveryBackend, got a {type(backend).__name__}"
            raise TypeError(msg)
        if config is not None:
            msg = "Configure a cluster's collectives with AutoDiscoveryConfig(collectives=...)"
            raise ValueError(msg)
        self._backend = backend
        self._sessions = backend.sessions
        self._metrics = backend.metrics
        self._slept = None
        self._subgroups = {}
        self._whole = None
        self._respect_overrides()

    def __repr__(self) -> str:
        """Who this is, for people."""
        session = self._sessions.latest
        where = (
            "not in a view yet"
            if session is None
            else f"rank {session.rank} of {session.world_size}"
        )
        return f"<{type(self).__name__}, {where}>"

    # -- who is here ---------------------------------------------------------------------------

    @property
    def view(self) -> View | None:
        """The view that holds now: lineage, epoch and members; None before the first."""
        return self._backend.view

    @property
    def leader(self) -> ProcessId | None:
        """Rank 0."""
        return self._backend.leader

    @property
    def election(self) -> ElectionState:
        """Who leads, in which term and why, and what this process does in it."""
        return self._backend.election

    @property
    def process(self) -> ProcessId:
        """Who we are, whatever our rank."""
        return self._backend.process

    @property
    def health(self) -> HealthSummary:
        """How the others are, with reasons."""
        return self._backend.health

    @property
    def topology(self) -> SharedTopology:
        """The machines and the links between them, with what is known now."""
        return self._backend.topology

    @property
    def metrics_url(self) -> str | None:
        """Where metrics can be read over HTTP; None unless ``metrics_port`` was given."""
        return self._backend.metrics_url

    def measure_links(self) -> SharedTopology:
        """Probe the links between all members, for about a second each; all ranks call this.

        Collectives measure what they need by themselves; this is for people who want to know.
        """
        topology = self.topology
        measure_links(self._backend, topology, self.wait_until_active())
        return topology

    def wait_for_peers(self, count: int, timeout: Seconds | None = None) -> View:
        """Wait until at least ``count`` others are in the view."""
        return self._backend.wait_for_peers(count, timeout)

    def wait_until_active(self, timeout: Seconds | None = None) -> View:
        """Wait while the cluster is paused or changing; calls do so by themselves."""
        return self._backend.wait_until_active(timeout)

    def on_view_change(self, callback: Callable[[ViewChange], None]) -> Callable[[], None]:
        """Have ``callback`` called after every change of the view, on a thread of its own.

        What this returns ends that.
        """
        return self._backend.on_view_change(callback)

    def events(self) -> list[ClusterEvent]:
        """What has happened, oldest first; the last few hundred events."""
        return self._backend.events()

    def continue_without_missing(self) -> None:
        """Do not wait for members that are missing; returns at once, from any thread.

        Call this only if you know that they are switched off.  Those who are here continue as a
        new branch of the job; nothing happens while the cluster works.  If the missing machines
        are at work when the two sides meet, their work counts, and that of this side is discarded.
        If they wait too, they join this side, and steps that only they have are discarded.
        ``potluck continue`` does the same from a terminal.
        """
        self._backend.continue_without_missing()

    def note_progress(self, samples: int, origin: tuple[Branch, ...] = ()) -> None:
        """Say how many training samples are committed in this process's state.

        ``origin`` is the ancestry of a loaded checkpoint, at its end the checkpoint's own lineage
        and epoch.  When two clusters of one job meet, ancestry and then samples decide which one
        stays.  :class:`~potluck.ElasticTrainer` calls this; programs with a training loop of their
        own may.  Raises ``ValueError`` for a negative number.
        """
        self._backend.note_progress(samples, origin)

    def note_event(self, event: object, level: int = logging.INFO) -> None:
        """Keep an event of the program in :meth:`events`; its text is ``str(event)``."""
        self._backend.note_event(event, level)

    @property
    def dashboard_url(self) -> str | None:
        """Where ``join(dashboard=...)`` shows what happens; None if it was not asked to."""
        return self._backend.dashboard_url

    # -- calls ---------------------------------------------------------------------------------

    def subgroup(self, members: Iterable[int], *, name: str | None = None) -> DistributedContext:
        """Some ranks of the present view as a group of their own, for as long as the view lasts.

        Afterwards it raises what the view ended with; make another.
        """
        with self._sessions.visit(self.timeout) as session:
            assert session.backend is not None
            part = SubBackend(session.backend, members, name=name)
            view = session.view
            chosen = tuple(view.members[part.to_global(rank)] for rank in range(part.world_size))
            links = ViewLinks(self._backend.map, View(view.lineage, view.epoch, chosen))
            part.services.put(LinkMemory, links.memory)
            context = _Part(part)
        context.session, context.sessions = session, self._sessions
        context._count_in(self._metrics)  # noqa: SLF001 - of our own kind
        context._whole = self  # noqa: SLF001
        self._subgroups[context] = None
        return context

    def _count_in(self, metrics: DistributedMetrics | None) -> None:
        self._metrics = metrics  # for whom a view waits is counted by the node
        if metrics is not None:
            self._backend.count_in(metrics)

    def abort(self, reason: str = "aborted by the caller") -> None:
        """End every collective under way with an error, from any thread."""
        session = self._sessions.latest
        if session is not None and session.group is not None:
            session.group.abort(reason)

    def close(self) -> None:
        """Leave the cluster: the others are told at once."""
        self._backend.close()
        for subgroup in list(self._subgroups):
            subgroup.close()


class _SubgroupCall(CallScope):
    """A call of a subgroup: what fails because the view is over raises what membership decided."""

    __slots__ = ("_deadline", "_part", "_seconds")

    def __init__(self, part: _Part, name: str, timeout: float | None) -> None:
        super().__init__(part.metrics, name)
        self._part = part
        self._seconds = timeout or 0.0
        self._deadline = None if timeout is None else time.monotonic() + timeout

    def __enter__(self) -> object:
        self._part.session.check(self._deadline, self._seconds)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            return
        super().__exit__(kind, error, trace)
        decision = self._part.session.decided_error(error, self._deadline, self._seconds)
        if decision is not None:
            raise decision from error

    @property
    def message_errors(self) -> ViewMessageErrors:
        """Messages of this call end with what membership decided."""
        return ViewMessageErrors(self._part.session, self._part.sessions)


class _Part(DistributedContext):
    """A subgroup of one view."""

    session: ViewSession
    sessions: ViewSessions

    def _peer_labels(self) -> dict[int, str]:
        return dict(self.session.labels)

    @property
    def _place(self) -> CallSite:
        if self.session.ending is not None:
            raise copy.copy(self.session.ending)
        return super()._place

    def _scope(self, name: str, timeout: Seconds | None) -> CallScope:
        return _SubgroupCall(self, name, read_timeout(self._limit(timeout)))

    def _follow(self, work: Work[Result], timeout: Seconds | None) -> Work[Result]:
        explain(work, self.session, self.sessions, read_timeout(self._limit(timeout)))
        return work


# --------------------------------------------------------------------------------------------------
# ``potluck.join()``: the one call that finds the others and returns when there are enough.

logger = get_logger("potluck.cluster")

SILENCE = 15.0
"""Seconds after which a caller that waits without end is told for what, once."""


UNPAIRED_AFTER = 2.0
"""Seconds after which a script on a machine that is not paired hears that."""

UNPAIRED = "Waiting for %s machines, but this machine is not paired with any other%s."
HOW_TO_PAIR = (
    ". To pair them, run `potluck pair` here, and the command that it shows on the other machine"
)


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
        others = config.wanted_nodes - 1
        with _mentioning_pairing(backend, config.wanted_nodes):
            if timeout is None:
                with _telling():
                    backend.wait_for_peers(others, SILENCE)
            backend.wait_for_peers(others, timeout)
        backend.dashboard_url = None if window is None else window.wait()
    except BaseException:
        backend.close()
        raise
    _joined.backends = [*_earlier(), backend]
    return Cluster(backend)


@contextlib.contextmanager
def _mentioning_pairing(backend: AutoDiscoveryBackend, nodes: int) -> Iterator[None]:
    """Where others are wanted and this machine is not paired: say so before a person wonders.

    Processes of this machine need no pairing: a moment for those that are started by hand.
    """
    is_local = not (backend.config.multicast or backend.config.peers)
    if nodes < 2 or is_local or not backend.is_unpaired:  # noqa: PLR2004
        yield
        return
    is_launched = "POTLUCK_RUN" in os.environ  # `potluck run` has said how to pair
    is_only = is_launched and os.environ.get("LOCAL_WORLD_SIZE") == "1"
    advice = "" if is_launched else HOW_TO_PAIR
    timer = threading.Timer(
        0.0 if is_only else UNPAIRED_AFTER, logger.warning, (UNPAIRED, nodes, advice)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


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
    """Say what has not happened yet, and continue."""
    try:
        yield
    except Timeout as error:
        logger.warning("Still waiting. %s", error)
