"""DashboardConfig: this machine alone by default, and never further without a token."""

from __future__ import annotations

import itertools
import logging
import re
import socket
import time
from collections.abc import Iterator
from importlib.resources import files

import pytest

from potluck.apps.dashboard import server
from potluck.apps.dashboard.server import SAFE_HEADERS, Dashboard, DashboardConfig, Policy
from potluck.apps.dashboard.state import MAX_VIEWERS
from potluck.errors import BackendUnavailable, IoError
from support.threads import eventually
from support.web import Stream, ask, connect, dashboard


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.3.2.1", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("192.0.2.2", False),
        ("desk.local", False),
        ("", False),
    ],
)
def test_whoever_can_reach_it_from_elsewhere_needs_a_token(host: str, is_local: bool) -> None:
    """It is made unless one is given, long enough and never the same."""
    config = DashboardConfig(host=host)
    assert config.is_local is is_local
    tokens = {config.chosen_token(), config.chosen_token()}
    if is_local:
        assert tokens == {None}
    else:
        assert len(tokens) == 2
        assert all(token is not None and len(token) >= 32 for token in tokens)


def test_a_token_can_be_set_and_is_then_asked_for_everywhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that can be guessed is refused with words."""
    monkeypatch.setenv("POTLUCK_DASHBOARD_TOKEN", "sixteen-and-more-characters")
    assert DashboardConfig().chosen_token() == "sixteen-and-more-characters"
    monkeypatch.setenv("POTLUCK_DASHBOARD_TOKEN", "short")
    with pytest.raises(BackendUnavailable, match="at least 16 characters"):
        DashboardConfig().chosen_token()


def test_a_port_in_use_is_named() -> None:
    """With what to do; unless a port was asked for, another one is taken."""
    with dashboard() as first:
        with pytest.raises(IoError, match=f"port {first.port}.*--port"):
            dashboard(port=first.port)
        with pytest.raises(IoError, match=r"cannot listen on 192\.0\.2\.77: .*--host"):
            dashboard(port=None, host="192.0.2.77")
        with dashboard(port=None) as second, dashboard(port=None) as third:
            assert second.port != third.port


# --------------------------------------------------------------------------------------------------
# The guard: who may look at the dashboard, and what a browser may do with it.

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


# --------------------------------------------------------------------------------------------------
# The web server: slow, silent and greedy clients cost it nothing but their own connection.

REQUEST = b"GET /api/events HTTP/1.1\r\nHost: localhost\r\n\r\n"


def is_cut_off(sock: socket.socket) -> bool:
    """Whether the other side has ended the connection, after whatever it has sent."""
    try:
        while sock.recv(1 << 16):
            pass
    except ConnectionResetError:
        return True
    return True


def test_a_page_that_does_not_read_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others see what is new; it is cut off in the end, and what waits for it is bounded."""
    monkeypatch.setattr(server, "READ_WITHIN", 0.5)
    large = b'"%s"' % (b"x" * (1 << 20))
    with dashboard() as served:
        broadcast = served._broadcast
        stalled = connect(served.port, room=4096)
        stalled.sendall(REQUEST)
        eventually(lambda: broadcast.viewers == 1)
        with Stream(served.port) as stream:
            stream.next("whole")
            slowest = 0.0
            for number in range(1, 9):
                began = time.monotonic()
                broadcast.show(large, large)
                broadcast.tell(number, b"%d" % number)
                slowest = max(slowest, time.monotonic() - began)
                while stream.next("news")[2] != number:
                    pass
            assert slowest < 0.5  # whoever tells something never waits for a page
            eventually(lambda: broadcast.viewers == 1)  # the one that reads
        assert is_cut_off(stalled)
        stalled.close()


def test_more_pages_than_there_are_seats_are_told_to_come_back() -> None:
    """A page that closes makes room at once."""
    with dashboard() as served:
        streams = [Stream(served.port) for _ in range(MAX_VIEWERS)]
        try:
            refused = ask(served.port, "/api/events")
            assert (refused.status, refused.headers["retry-after"]) == (503, "10")
            assert ask(served.port, "/api/picture").status == 200
            streams.pop().close()
            eventually(lambda: served._broadcast.viewers < MAX_VIEWERS)
            with Stream(served.port) as stream:
                assert stream.response.status == 200
        finally:
            for stream in streams:
                stream.close()


def test_who_connects_and_asks_nothing_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also who asks a letter at a time, or without end."""
    monkeypatch.setattr(server, "ASK_WITHIN", 0.3)
    with dashboard() as served:
        silent, slow, endless = (connect(served.port) for _ in range(3))
        slow.sendall(b"GET / HT")
        endless.sendall(b"GET / HTTP/1.1\r\nHost: " + b"x" * (server.MAX_HEAD + 1))
        for sock in (silent, slow, endless):
            assert is_cut_off(sock)
            sock.close()
        assert ask(served.port).status == 200


def test_many_who_ask_nothing_keep_nobody_out() -> None:
    """Who was silent for longest gives way to a newcomer; a page that is being served stays."""
    with dashboard() as served, Stream(served.port) as stream:
        stream.next("whole")
        silent = [connect(served.port) for _ in range(2 * server.MAX_CONNECTIONS)]
        try:
            for _ in range(3):
                assert ask(served.port).status == 200
            assert is_cut_off(silent[0])
            served._broadcast.tell(1, b"1")
            assert stream.next("news")[2] == 1
        finally:
            for sock in silent:
                sock.close()


def test_who_asks_only_for_the_head_of_the_stream_gets_just_that() -> None:
    """And takes no seat."""
    with dashboard() as served:
        answer = ask(served.port, "/api/events", method="HEAD")
        assert answer.headers["content-type"] == "text/event-stream"
        eventually(lambda: served._broadcast.viewers == 0)


def test_the_end_of_the_dashboard_ends_its_streams() -> None:
    """A page learns at once that nothing more will come, and closing twice does no harm."""
    served = dashboard()
    with Stream(served.port) as stream:
        stream.next("whole")
        began = time.monotonic()
        served.close()
        served.close()
        assert time.monotonic() - began < 5
        while stream.response.readline():
            pass  # what was sent before; then the end


def test_the_addresses_that_are_shown_can_be_reached() -> None:
    """On all of this machine's, each with the token."""
    with dashboard(host="0.0.0.0") as served:
        parts = [url.removeprefix("http://").partition("/?token=") for url in served.urls]
        places, tokens = [part[0] for part in parts], {part[2] for part in parts}
        assert f"127.0.0.1:{served.port}" in places
        assert all(place.endswith(f":{served.port}") for place in places)
        (token,) = tokens
        assert len(token) >= 32
        assert ask(served.port, f"/?token={token}").status == 303
        assert ask(served.port).status == 401


# --------------------------------------------------------------------------------------------------
# The site: a page that needs nothing from outside, and can be read by everybody.

STATIC = {
    each.name: each.read_text(encoding="utf-8")
    for each in files("potluck.apps.dashboard").joinpath("static").iterdir()
}
SCRIPTS = {name: text for name, text in STATIC.items() if name.endswith(".js")}


def test_every_file_the_page_needs_is_served(served: Dashboard) -> None:
    """With its type; what a browser has already is not sent again."""
    named = set(re.findall(r'(?:href|src)="(/static/[^"]+)"', STATIC["index.html"]))
    named |= {
        f"/static/{name}"
        for text in SCRIPTS.values()
        for name in re.findall(r'from "\./([^"]+)"', text)
    }
    assert named == {f"/static/{name}" for name in STATIC if name != "index.html"}
    for path in named:
        answer = ask(served.port, path)
        assert answer.status == 200
        assert answer.text == STATIC[path.removeprefix("/static/")]
        again = ask(served.port, path, {"If-None-Match": answer.headers["etag"]})
        assert (again.status, again.body) == (304, b"")
    assert ask(served.port, "/static/app.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "path",
    ["/static/../server.py", "/static/%2e%2e/server.py", "/static/", "/static/x.js", "/etc/passwd"],
)
def test_nothing_else_is_served(served: Dashboard, path: str) -> None:
    """Requests never reach the file system."""
    assert ask(served.port, path).status == 404


def test_nothing_comes_from_outside() -> None:
    """No address in any file but the name of SVG's vocabulary, which nobody asks for."""
    for name, text in STATIC.items():
        addresses = set(re.findall(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}[^\s\"']*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}, name


def test_no_text_becomes_markup() -> None:
    """Neither by a property that parses nor by code from text; no styles or scripts in the page."""
    for name, text in SCRIPTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write", text), name
        assert not re.search(r"\beval\(|new Function|setTimeout\(\s*[\"'`]", text), name
    page = STATIC["index.html"]
    assert not re.search(r"<style|style=|\son[a-z]+=|<script(?![^>]*src=)", page)


def test_the_page_has_landmarks_and_names() -> None:
    """Every section is named by its heading, and the graph has a table beside it."""
    page = STATIC["index.html"]
    for tag in ("<header", "<main", "<nav", "<footer", 'lang="en"', 'class="skip"'):
        assert tag in page
    named = re.findall(r'<section[^>]*aria-labelledby="([^"]+)"', page)
    assert len(named) == page.count("<section")
    assert all(f'id="{each}"' in page for each in named)
    assert 'role="log" aria-live="polite"' in page
    assert '<table id="links">' in page


# --- contrast, by the rule of WCAG 2 ---


def luminance(colour: str) -> float:
    """Of ``#rrggbb``, from 0 to 1."""
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """From 1 to 21."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("is_dark", [False, True], ids=["light", "dark"])
def test_texts_can_be_read_on_every_surface(is_dark: bool) -> None:
    """A contrast of at least 4.5 for words, and of 3 for lines that carry a meaning."""
    blocks = re.findall(r":root \{(.*?)\}", STATIC["style.css"], flags=re.DOTALL)
    assert len(blocks) == 2
    colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6});", blocks[is_dark]))
    words = ["ink", "quiet", "accent", "ok", "warn", "bad"]
    for word, surface in itertools.product(words, ["page", "surface"]):
        assert contrast(colours[word], colours[surface]) >= 4.5, (word, surface)
    for word in ("ok", "warn", "bad"):
        assert contrast(colours[word], colours[f"{word}-soft"]) >= 4.5, word
        assert contrast(colours["ink"], colours[f"{word}-soft"]) >= 4.5, word
    assert contrast(colours["quiet"], colours["sunken"]) >= 4.5
    for number in range(8):
        assert contrast(colours[f"tone-{number}"], colours["surface"]) >= 3
