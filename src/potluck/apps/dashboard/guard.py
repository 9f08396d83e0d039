"""The guard at the door of the dashboard: who may look, and what a browser may do with the page.

Everything is read-only.  On this machine anybody may look; from elsewhere only who has the token.
A page of another site can neither read the dashboard nor pretend to be it: the name in the request
must be one of this machine's (a foreign name that leads here is DNS rebinding), requests that other
sites start are refused, and no header invites them.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["SAFE_HEADERS", "Guard", "Policy"]

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
            return _refuse(421, "This dashboard does not go by that name. Use its address.")
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
        """Go on without the token in the address, where histories and logs would keep it."""
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
