"""The dashboard as a whole: a watcher, a site, and a web server on a thread of its own."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import hmac
import ipaddress
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from potluck._decode import decode_json
from potluck._platform import REUSES_ADDRESSES
from potluck._process import Closing
from potluck.apps.dashboard.state import Broadcast, TooManyViewers, Viewer, Watcher
from potluck.cluster.config import AutoDiscoveryConfig
from potluck.cluster.observer import DashboardReply, DashboardRequest, find_web_server
from potluck.errors import BackendUnavailable, DistributedError, IoError, describe
from potluck.net.addresses import usable_hosts

# --------------------------------------------------------------------------------------------------
# The guard at the door of the dashboard: who may look, and what a browser may do with the page.
#
# Everything is read-only.  On this machine anybody may look; from elsewhere only who has the token.
# A page of another site can neither read the dashboard nor pretend to be it: the name in the
# request must be one of this machine's (a foreign name that leads here is DNS rebinding), requests
# that other sites start are refused, and no header invites them.

SAFE_HEADERS = {
    "content-security-policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
"""On every answer.  Trusted types: a browser refuses to make markup of a text."""

METHODS = ("GET", "HEAD")
OWN_SITE = frozenset({"same-origin", "none"})
MOST_QUERY = 512
"""Bytes of a query in which a token is looked for."""


@dataclass(frozen=True, slots=True)
class Policy:
    """Who may look."""

    port: int
    names: frozenset[str]
    """Names of this machine, in lower case; its addresses need not be listed."""
    token: str | None = None
    """What who looks must have; None where everybody may."""

    def is_our_name(self, host: str) -> bool:
        """Whether a request that calls us so is meant for us.

        >>> policy = Policy(8585, frozenset({"desk"}))
        >>> [policy.is_our_name(each) for each in ("localhost:8585", "[::1]:8585", "evil.example")]
        [True, True, False]
        """
        name, port = _split(host)
        if port not in {"", str(self.port)}:
            return False
        return name in self.names or name == "localhost" or _is_address(name)

    @property
    def cookie(self) -> str:
        """The name of our cookie: browsers do not tell ports apart."""
        return f"potluck_{self.port}"

    @property
    def pass_value(self) -> str:
        """What the cookie holds: as good as the token here, and of no use to learn it."""
        key = (self.token or "").encode()
        return hmac.new(key, b"potluck dashboard cookie", hashlib.sha256).hexdigest()

    def admits(self, headers: Headers) -> bool:
        """Whether a request has brought the token, or the cookie that stands for it."""
        if self.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and same(given.strip(), self.token):
            return True
        return same(_cookie(headers, self.cookie), self.pass_value)

    def is_token(self, query: bytes) -> bool:
        """Whether a query brings the token."""
        if self.token is None or len(query) > MOST_QUERY:
            return False
        given = parse_qs(query.decode("ascii", "replace")).get("token", [""])
        return same(given[0], self.token)


def same(given: str, expected: str) -> bool:
    """Whether two texts are the same, in a time that does not tell where they differ."""
    return hmac.compare_digest(
        hashlib.sha256(given.encode()).digest(), hashlib.sha256(expected.encode()).digest()
    )


class Guard:
    """Stands before the site."""

    def __init__(self, app: ASGIApp, policy: Policy) -> None:
        self._app = app
        self._policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it."""
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SAFE_HEADERS.items():
                    headers[name] = value
                headers.setdefault("cache-control", "no-store")
            await send(message)

        answer = self._objection(scope) or self._app
        await answer(scope, receive, send_safely)

    def _objection(self, scope: Scope) -> Response | None:
        policy, headers = self._policy, Headers(scope=scope)
        hosts = headers.getlist("host")
        if len(hosts) != 1 or not policy.is_our_name(hosts[0]):
            return _refuse(421, "Unknown Host header. Open the dashboard by its IP address.")
        if scope["method"] not in METHODS:
            return _refuse(405, "The dashboard can only be looked at.", {"allow": "GET, HEAD"})
        is_visit = headers.get("sec-fetch-mode") == "navigate"
        if headers.get("sec-fetch-site", "none") not in OWN_SITE and not is_visit:
            return _refuse(403, "Another site asked for this; the dashboard answers its own page.")
        if policy.token is None:
            return None
        if policy.is_token(scope["query_string"]):
            return self._welcome()
        if not policy.admits(headers):
            words = "Who looks from elsewhere needs the token: open the address that was printed."
            return _refuse(401, words, {"www-authenticate": 'Bearer realm="potluck dashboard"'})
        return None

    def _welcome(self) -> Response:
        """Remove the token from the address, where histories and logs would keep it."""
        answer = RedirectResponse("/", 303)
        answer.set_cookie(
            self._policy.cookie, self._policy.pass_value, httponly=True, samesite="lax"
        )
        return answer


def _refuse(code: int, words: str, headers: dict[str, str] | None = None) -> Response:
    return PlainTextResponse(f"{words}\n", code, headers)


def _split(host: str) -> tuple[str, str]:
    """Name and port of a Host header; the port may be missing."""
    if host.startswith("["):
        name, _, port = host[1:].partition("]")
        return name.lower(), port.removeprefix(":")
    name, _, port = host.partition(":")
    return name.lower().removesuffix("."), port


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _cookie(headers: Headers, name: str) -> str:
    try:
        found = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return found[name].value if name in found else ""


def names_of_machine(hostname: str, others: Iterable[str] = ()) -> frozenset[str]:
    """What this machine may be called in a browser.

    >>> sorted(names_of_machine("Desk"))
    ['desk', 'desk.local']
    """
    first = hostname.lower().removesuffix(".")
    return frozenset(
        {first, f"{first.partition('.')[0]}.local", *(each.lower() for each in others)}
    )


# --------------------------------------------------------------------------------------------------
# The site: the page, its files, the picture as data, and the stream of what changes.
#
# The files are read once at the start, so no request reaches the file system.

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

MOST_MARK = 64
"""Characters of what a page says it has seen."""


def build_site(broadcast: Broadcast, policy: Policy) -> ASGIApp:
    """Everything that can be asked for, behind the guard."""
    shelf = _read_files()
    events = Events(broadcast)

    async def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        found = shelf.get(name)
        if found is None:
            return PlainTextResponse("There is no such file.\n", 404)
        content, mark = found
        headers = {"etag": mark, "cache-control": "no-cache"}
        if request.headers.get("if-none-match") == mark:
            return Response(status_code=304, headers=headers)
        kind = KINDS["." + name.rpartition(".")[2]]
        return Response(content, media_type=kind, headers=headers)

    async def picture(request: Request) -> Response:  # noqa: ARG001 - how starlette calls
        return Response(broadcast.picture, media_type="application/json")

    async def news(request: Request) -> Response:  # noqa: ARG001
        return Response(broadcast.news, media_type="application/json")

    site = Starlette(
        routes=[
            Route("/", page),
            Route("/static/{name}", page),
            Route("/api/picture", picture),
            Route("/api/news", news),
            Route("/api/events", events),
        ]
    )
    return Guard(site, policy)


def _read_files() -> dict[str, tuple[bytes, str]]:
    shelf = {}
    for each in files("potluck.apps.dashboard").joinpath("static").iterdir():
        if "." + each.name.rpartition(".")[2] in KINDS:
            content = each.read_bytes()
            shelf[each.name] = content, f'"{hashlib.sha256(content).hexdigest()[:16]}"'
    return shelf


class Events:
    """The stream: tells each page what it has not seen, until it goes."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one page, for as long as it looks."""
        request = Request(scope)
        try:
            viewer = self._broadcast.admit()
        except TooManyViewers:
            words = "As many pages look at this dashboard as it serves. Close one of them.\n"
            refusal = PlainTextResponse(words, 503, {"retry-after": "10"})
            await refusal(scope, receive, send)
            return
        try:
            mark = request.headers.get("last-event-id", "")[:MOST_MARK]
            await _stream(viewer, mark, receive, send, is_head=request.method == "HEAD")
        finally:
            viewer.leave()


async def _stream(
    viewer: Viewer, mark: str, receive: Receive, send: Send, *, is_head: bool
) -> None:
    headers = [(b"content-type", b"text/event-stream"), (b"x-accel-buffering", b"no")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    if is_head:
        await send({"type": "http.response.body", "body": b""})
        return
    listening = asyncio.ensure_future(_until_gone(receive))
    listening.add_done_callback(lambda _: viewer.leave())
    try:
        async for message in viewer.messages(mark):
            # Waits while the page does not read; what is new meanwhile waits for it once.
            await send({"type": "http.response.body", "body": message, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    finally:
        listening.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# --------------------------------------------------------------------------------------------------
# DashboardConfig: where the dashboard is served, and to whom; needs no web server to be read.

DEFAULT_PORT = 8585
USUAL_PORTS = 10
"""Ports that are tried from the default one on, unless one is asked for."""

SHORTEST_TOKEN = 16
"""Characters of a token that the user chose."""


@dataclass(frozen=True, kw_only=True)
class DashboardConfig:
    """Where the dashboard is served, and to whom."""

    host: str = "127.0.0.1"
    """The address to listen on; anything but this machine's own needs a token."""
    port: int | None = None
    """Unless given, the first free one from 8585 on; 0 for any."""
    token: str | None = None
    """What who looks must bring; ``POTLUCK_DASHBOARD_TOKEN``, or one is made where it is needed."""
    names: Sequence[str] = ()
    """Further names by which browsers may call this machine."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def chosen_token(self) -> str | None:
        """The token that is asked for; None where everybody may look."""
        token = self.token or os.environ.get("POTLUCK_DASHBOARD_TOKEN", "")
        if token and len(token) < SHORTEST_TOKEN:
            raise BackendUnavailable(
                f"A dashboard's token has at least {SHORTEST_TOKEN} characters",
                hint="Without POTLUCK_DASHBOARD_TOKEN one is made where it is needed.",
            )
        if token:
            return token
        return None if self.is_local else secrets.token_urlsafe(24)


# --------------------------------------------------------------------------------------------------

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
    """Serves the dashboard of a group until it is closed; a context manager."""

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


class TimeLimitedProtocol(H11Protocol):
    """HTTP whose patience has an end: with who does not ask, and with who does not read."""

    _hurry: asyncio.TimerHandle | None = None
    _stall: asyncio.TimerHandle | None = None
    _idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A browser has connected: it has to ask something."""
        super().connection_made(transport)
        self._idle_since = self.loop.time()
        self._hurry = self.loop.call_later(ASK_WITHIN, self._give_up_unless_asked)
        self._make_room()

    def _make_room(self) -> None:
        """Have fewer than the most, this one included."""
        made = [each for each in self.connections if isinstance(each, TimeLimitedProtocol)]
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
            http=TimeLimitedProtocol,
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
        cause=None if trouble is None else describe(trouble),
        hint="Choose another with --port, or --port 0 for any that is free."
        if is_about_port
        else "Name an address of this machine with --host; 0.0.0.0 means all of them.",
    )


def _bind(host: str, port: int) -> socket.socket:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    try:
        if REUSES_ADDRESSES:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(MAX_CONNECTIONS)
    except BaseException:
        sock.close()
        raise
    return sock


# --------------------------------------------------------------------------------------------------
# Opening a dashboard; says what to install where its web server is missing.


def open_dashboard(
    observing: AutoDiscoveryConfig, config: DashboardConfig, *, job: str | None = None
) -> Dashboard:
    """Serve the dashboard of a group, or of one job of it."""
    find_web_server()

    return Dashboard(observing, config, job=job)


# --------------------------------------------------------------------------------------------------
# The dashboard's own process: told on standard input what to show, and over when that ends.

LONGEST_REQUEST = 1 << 18
"""Bytes of what the parent asks for."""


def main() -> None:
    """Show what is asked for until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides when it is over
    try:
        request = decode_json(sys.stdin.buffer.readline(LONGEST_REQUEST), DashboardRequest)
        observing = AutoDiscoveryConfig(
            job=request.job,
            namespace=request.resolve(),
            peers=request.peers,
            interfaces=request.interfaces,
            virtual=request.virtual,
            multicast=request.multicast,
            known=request.known,
        )
        place = DashboardConfig(host=request.host, port=request.port)
        served = open_dashboard(observing, place, job=request.job)
    except (DistributedError, msgspec.DecodeError, OSError, ValueError) as error:
        _answer(DashboardReply(trouble=str(error)[:1000]))
        return
    with served:
        _answer(DashboardReply(url=served.url))
        while os.read(sys.stdin.fileno(), 4096):
            pass  # until the pipe ends


def _answer(reply: DashboardReply) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
