"""The guard: who may look at the dashboard, and what a browser may do with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from potluck.apps.dashboard.guard import SAFE_HEADERS, Policy
from potluck.apps.dashboard.server import Dashboard
from support.web import ask, dashboard

TOKEN = "a-token-that-nobody-guesses"  # noqa: S105 - of the tests


@pytest.fixture(scope="module")
def served() -> Iterator[Dashboard]:
    """A dashboard of this machine."""
    with dashboard() as found:
        yield found


@pytest.fixture(scope="module")
def locked() -> Iterator[Dashboard]:
    """One that asks for a token."""
    with dashboard(token=TOKEN) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "headers", "method", "status"),
    [
        ("/", {}, "GET", 200),
        ("/static/app.js", {}, "GET", 200),
        ("/api/picture", {}, "HEAD", 200),
        ("/nowhere", {}, "GET", 404),
        ("/", {}, "POST", 405),
        ("/", {"host": "evil.example"}, "GET", 421),
        ("/api/picture", {"Sec-Fetch-Site": "cross-site"}, "GET", 403),
    ],
)
def test_every_answer_is_safe(
    served: Dashboard, path: str, headers: dict[str, str], method: str, status: int
) -> None:
    """Also a refusal; and nothing invites other sites."""
    answer = ask(served.port, path, headers, method)
    assert answer.status == status
    assert {name: answer.headers[name] for name in SAFE_HEADERS} == SAFE_HEADERS
    assert "unsafe" not in answer.headers["content-security-policy"]
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert "server" not in answer.headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("127.0.0.1:{port}", 200),
        ("[::1]:{port}", 200),
        ("192.0.2.7:{port}", 200),  # a literal address is nobody's to rebind
        ("evil.example:{port}", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost:1", 421),
        ("", 421),
    ],
)
def test_only_names_of_this_machine_are_answered(served: Dashboard, host: str, status: int) -> None:
    """A page whose own name was made to lead here (DNS rebinding) learns nothing."""
    answer = ask(served.port, "/api/picture", {"host": host.format(port=served.port)})
    assert answer.status == status
    if status != 200:
        assert b"namespace" not in answer.body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "BREW"])
def test_nothing_can_be_changed(served: Dashboard, method: str) -> None:
    """Every way of writing is refused, on every path."""
    for path in ("/", "/api/picture", "/api/events", "/static/app.js"):
        answer = ask(served.port, path, method=method)
        assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD")


def test_other_sites_cannot_ask_but_may_link(served: Dashboard) -> None:
    """A script elsewhere must not use up the seats; a person who follows a link is welcome."""
    stranger = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}
    assert ask(served.port, "/api/events", stranger).status == 403
    visitor = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert ask(served.port, "/", visitor).status == 200


def test_without_the_token_nothing_is_shown(locked: Dashboard) -> None:
    """Neither the page nor its data, whatever else is brought."""
    for headers in (
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        {"Cookie": f"potluck_{locked.port}={TOKEN}"},
        {"Cookie": "; ; =;\x80"},
    ):
        for path in ("/", "/api/picture", "/api/events", "/static/app.js", "/?token=wrong"):
            answer = ask(locked.port, path, headers)
            assert answer.status == 401
            assert answer.headers["www-authenticate"].startswith("Bearer")


def test_the_token_is_used_once_and_then_a_cookie(
    locked: Dashboard, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves the address at once, and is in no log."""
    with caplog.at_level(logging.DEBUG):
        assert locked.url == f"http://127.0.0.1:{locked.port}/?token={TOKEN}"
        answer = ask(locked.port, f"/?token={TOKEN}")
        assert (answer.status, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        assert TOKEN not in cookie
        assert ask(locked.port, "/", {"Cookie": cookie.partition(";")[0]}).status == 200
        assert ask(locked.port, "/api/news", {"Authorization": f"Bearer {TOKEN}"}).json() == []
    assert TOKEN not in caplog.text


def test_a_policy_without_a_token_admits_no_query() -> None:
    """Where no token is asked for, one in the address means nothing; an endless one neither."""
    assert not Policy(1, frozenset()).is_token(b"token=")
    assert not Policy(1, frozenset(), TOKEN).is_token(b"token=" + b"x" * 9000)
    assert Policy(1, frozenset(), TOKEN).is_token(f"a=b&token={TOKEN}".encode())
