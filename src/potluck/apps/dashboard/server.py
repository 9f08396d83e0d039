"""The dashboard as a whole: a watcher, a site, and a web server on a thread of its own."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from potluck.apps.dashboard.broadcast import Broadcast
from potluck.apps.dashboard.config import DEFAULT_PORT, USUAL_PORTS, DashboardConfig
from potluck.apps.dashboard.guard import Policy, names_of_machine
from potluck.apps.dashboard.site import build_site
from potluck.apps.dashboard.watching import Watcher
from potluck.closing import Closing
from potluck.errors import BackendUnavailable, IoError
from potluck.net.addresses import usable_hosts

if TYPE_CHECKING:
    from potluck.runtime.auto_config import AutoDiscoveryConfig

__all__ = ["Dashboard"]

MAX_CONNECTIONS = 64
"""Of browsers, all pages together.  Who has asked nothing for longest gives way to one more; where
all have, that one is told to come back."""

MAX_HEAD = 16 << 10
"""Bytes of a request, which has no body."""

ASK_WITHIN = 10.0
"""Seconds for a request to arrive, and of silence after an answer."""

READ_WITHIN = 20.0
"""Seconds that a page may take nothing of what is sent to it, before it is cut off."""

PORT_TROUBLES = frozenset({errno.EADDRINUSE, errno.EACCES, errno.EPERM})

START_WITHIN = 10.0
END_WITHIN = 2.0


class Dashboard(Closing):
    """Serves the dashboard of a namespace until it is closed; a context manager."""

    def __init__(
        self,
        observing: AutoDiscoveryConfig,
        config: DashboardConfig | None = None,
        *,
        job: str | None = None,
    ) -> None:
        self.config = config or DashboardConfig()
        self._token = self.config.chosen_token()
        self._sockets = [_listen(self.config)]
        self.port: int = self._sockets[0].getsockname()[1]
        self._broadcast = Broadcast()
        names = names_of_machine(socket.gethostname(), (self.config.host, *self.config.names))
        policy = Policy(self.port, names, self._token)
        self._server = _server(build_site(self._broadcast, policy))
        self._thread = threading.Thread(target=self._serve, name="potluck-dashboard", daemon=True)
        try:
            self._watcher = Watcher(observing, self._broadcast, job=job)
        except BaseException:
            self._sockets[0].close()
            raise
        self._thread.start()
        self._wait_until_started()

    def _serve(self) -> None:
        with asyncio.Runner() as runner:
            runner.run(self._server.serve(self._sockets))

    def _wait_until_started(self) -> None:
        deadline = time.monotonic() + START_WITHIN
        while not self._server.started:
            if time.monotonic() >= deadline or not self._thread.is_alive():
                self.close()
                raise BackendUnavailable("The web server of the dashboard did not start")
            time.sleep(0.01)

    @property
    def namespace(self) -> str:
        """Whose dashboard this is."""
        return self._watcher.observer.namespace.name

    @property
    def urls(self) -> list[str]:
        """Where it is, best first; with the token, so it is for the person who started it."""
        host = self.config.host
        hosts = [host]
        if host in {"", "0.0.0.0", "::"}:
            hosts = [each for each in usable_hosts() if host != "0.0.0.0" or ":" not in each]
            hosts.append("127.0.0.1")
        path = f"/?token={self._token}" if self._token else "/"
        shown = [f"[{each}]" if ":" in each else each for each in hosts if "%" not in each]
        return [f"http://{each}:{self.port}{path}" for each in shown]

    @property
    def url(self) -> str:
        """The best of them."""
        return self.urls[0]

    def close(self) -> None:
        """Serve no more.  May be called twice."""
        self._broadcast.close()
        self._server.should_exit = True
        self._thread.join(END_WITHIN + 2.0)
        for sock in self._sockets:
            sock.close()
        self._watcher.close()


class PatientProtocol(H11Protocol):
    """HTTP whose patience has an end: with who does not ask, and with who does not read."""

    _hurry: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Somebody has connected: it has to ask something."""
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._hurry = self.loop.call_later(ASK_WITHIN, self._give_up_unless_asked)
        self._make_room()

    def _make_room(self) -> None:
        """Have fewer than the most, this one included."""
        made = [each for each in self.connections if isinstance(each, PatientProtocol)]
        open_ones = [each for each in made if not each.transport.is_closing()]
        idle = sorted(
            (each for each in open_ones if each is not self and each.is_idle),
            key=lambda each: each._idle_since,  # noqa: SLF001 - another of our kind
        )
        for each in idle[: max(0, len(open_ones) + 1 - MAX_CONNECTIONS)]:
            each.transport.abort()

    @property
    def is_idle(self) -> bool:
        """Whether nothing was asked, or all that was asked has been answered."""
        return self.cycle is None or self.cycle.response_complete

    def on_response_complete(self) -> None:
        """All is answered: what follows may be asked on this connection as well."""
        super().on_response_complete()
        self._idle_since = self.loop.time()

    def _give_up_unless_asked(self) -> None:
        if self.cycle is None:
            self.transport.abort()

    def pause_writing(self) -> None:
        """It does not read: not for ever."""
        super().pause_writing()
        self._stall = self.loop.call_later(READ_WITHIN, self.transport.abort)

    def resume_writing(self) -> None:
        """It reads again."""
        super().resume_writing()
        self._cancel()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        super().connection_lost(exc)
        self._cancel()
        if self._hurry is not None:
            self._hurry.cancel()

    def _cancel(self) -> None:
        if self._stall is not None:
            self._stall.cancel()


def _server(site: Any) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            site,
            http=PatientProtocol,
            ws="none",
            lifespan="off",
            loop="asyncio",
            log_config=None,
            log_level=logging.CRITICAL,  # a request may hold the token
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=MAX_CONNECTIONS,
            h11_max_incomplete_event_size=MAX_HEAD,
            timeout_keep_alive=int(ASK_WITHIN),
            timeout_graceful_shutdown=int(END_WITHIN),
        )
    )


def _listen(config: DashboardConfig) -> socket.socket:
    """A socket at the port that is wanted, or at a usual one, or at any."""
    wanted = config.port
    usual = (*range(DEFAULT_PORT, DEFAULT_PORT + USUAL_PORTS), 0)
    trouble: OSError | None = None
    for port in usual if wanted is None else (wanted,):
        try:
            return _bind(config.host, port)
        except OSError as error:
            trouble = error
    is_about_port = trouble is not None and trouble.errno in PORT_TROUBLES
    raise IoError(
        f"The dashboard cannot listen on {config.host or 'any address'}"
        + ("" if wanted is None else f", port {wanted}"),
        cause=None if trouble is None else trouble.strerror or str(trouble),
        hint="Choose another with --port, or --port 0 for any that is free."
        if is_about_port
        else "Name an address of this machine with --host; 0.0.0.0 means all of them.",
    )


def _bind(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(MAX_CONNECTIONS)
    except BaseException:
        sock.close()
        raise
    return sock
