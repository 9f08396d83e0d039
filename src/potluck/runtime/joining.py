"""``potluck.join()``: the one call that finds the others and returns when there are enough."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from potluck.errors import Timeout
from potluck.logs import get_logger, speak_up
from potluck.runtime.auto_config import AutoDiscoveryConfig
from potluck.runtime.cluster import Cluster
from potluck.runtime.limits import read_timeout
from potluck.vocabulary import Seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from potluck.net.namespace import NetworkNamespace
    from potluck.runtime.auto import AutoDiscoveryBackend
    from potluck.runtime.observing_window import Wanted

__all__ = ["join"]

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
    from potluck.runtime.auto import AutoDiscoveryBackend

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
