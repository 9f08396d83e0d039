"""The web server: slow, silent and greedy clients cost it nothing but their own connection."""

from __future__ import annotations

import socket
import time

import pytest

from potluck.apps.dashboard import server
from potluck.apps.dashboard.broadcast import MAX_VIEWERS
from support.threads import eventually
from support.web import Stream, ask, connect, dashboard

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
