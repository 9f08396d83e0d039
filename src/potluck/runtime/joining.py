"""``potluck.join()``: the one call that finds the others and returns when there are enough."""

from __future__ import annotations

import contextlib
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
    return Cluster(backend)


@contextlib.contextmanager
def _telling() -> Iterator[None]:
    """Say what has not happened yet, and go on."""
    try:
        yield
    except Timeout as error:
        logger.warning("Still waiting. %s", error)
