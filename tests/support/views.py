"""Ports of several processes within this one, and the views that they make."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest

from potluck import DistributedContext
from potluck._types import View
from potluck.backend.port import NodePort
from potluck.backend.stream_backend import ViewBackend
from potluck.errors import ChannelClosed
from potluck.identity.namespace import NetworkNamespace, SecurityWarning
from potluck.identity.node import NodeIdentity
from potluck.net.secure_socket import Security
from potluck.wire_messages import RankEndpoint
from support.threads import PATIENCE, together

LINEAGE = "5" * 32


def soon(seconds: float = PATIENCE) -> float:
    """A deadline that is far enough."""
    return time.monotonic() + seconds


def peer_of(port: NodePort, *hosts: str) -> RankEndpoint:
    """Where a port is; on loopback unless told otherwise."""
    return RankEndpoint(list(hosts) or ["127.0.0.1"], port.port, f"desk-{port.slot}")


def view_of(*ports: NodePort, epoch: int = 1) -> View:
    """A view of these, in this order."""
    return View(LINEAGE, epoch, tuple(port.process for port in ports))


class Neighbourhood:
    """Ports of one namespace, each a machine of its own; all is closed in the end."""

    def __init__(self, *, encrypted: bool = True) -> None:
        self.stack = contextlib.ExitStack()
        if encrypted:
            self.namespace = NetworkNamespace.generate("lab")
        else:
            with pytest.warns(SecurityWarning):
                self.namespace = NetworkNamespace.insecure()

    def machine(self, host: str = "") -> NodePort:
        """The port of a process on a machine that is new here."""
        return self.port(Security(self.namespace, NodeIdentity.ephemeral()), host)

    def port(self, security: Security | None = None, host: str = "") -> NodePort:
        """A port; without a key of its own it is that of this machine."""
        security = security or Security(self.namespace)
        return self.stack.enter_context(NodePort(security=security, host=host))

    def open(
        self, view: View, ports: Sequence[NodePort], look: Callable[[], None] = lambda: None
    ) -> list[ViewBackend]:
        """The mesh of a view, all members at once."""
        peers = [peer_of(port) for port in ports]
        backends = together(
            *(
                lambda port=port: ViewBackend(
                    port, view, port.process, peers, deadline=soon(), look=look
                )
                for port in ports
            )
        )
        for backend in backends:
            self.stack.callback(backend.close)
        for backend in backends:  # before that, so that nobody waits for the others
            self.stack.callback(backend.abort, ChannelClosed("The test is over"))
        return backends


@contextlib.contextmanager
def neighbourhood(*, encrypted: bool = True) -> Iterator[Neighbourhood]:
    """For the length of a test."""
    here = Neighbourhood(encrypted=encrypted)
    with here.stack:
        yield here


def sums(backends: Sequence[ViewBackend], length: int = 1000) -> list[float]:
    """What every rank gets when each adds its rank plus one."""

    def run(backend: ViewBackend) -> float:
        values = np.full(length, backend.rank + 1, np.float32)
        DistributedContext.with_metrics(backend).all_reduce(values, timeout=PATIENCE)
        assert (values == values[0]).all()
        return float(values[0])

    return together(*(lambda backend=backend: run(backend) for backend in backends))


@contextlib.contextmanager
def black_hole(host: str, port: int) -> Iterator[None]:
    """An address at which nothing ever answers: its queue of connections is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((host, port))
        listener.listen(0)
        for _ in range(8):  # the kernel takes a few more than it was told
            sock = stack.enter_context(socket.socket())
            sock.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                sock.connect((host, port))
        yield
