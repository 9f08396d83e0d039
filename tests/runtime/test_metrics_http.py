"""HTTP for metrics: a question in, an answer out, whatever the question is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck.runtime.metrics_http import MAX_REQUEST, answer

PAGE = b"potluck_up 1\n"


def status_of(request: bytes, *, local: bool = True) -> int:
    """The number in the first line of the answer."""
    return int(answer(request, lambda: PAGE, local=local).split(b" ", 2)[1])


def test_the_page_is_given() -> None:
    """With its length and type, and nothing that a browser would guess or keep."""
    said = answer(
        b"GET /metrics?x=1 HTTP/1.1\r\nHost: localhost:9464\r\n\r\n", lambda: PAGE, local=True
    )
    head, _, body = said.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert body == PAGE
    for line in (b"Content-Length: 13", b"text/plain; version=0.0.4", b"nosniff", b"no-store"):
        assert line in head


def test_whoever_asks_for_the_head_gets_the_head() -> None:
    """The length is that of the page."""
    said = answer(b"HEAD /metrics HTTP/1.0\r\n\r\n", lambda: PAGE, local=True)
    assert said.endswith(b"\r\n\r\n")
    assert b"Content-Length: 13" in said


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET / HTTP/1.1", 404),
        (b"GET /metrics/../etc/passwd HTTP/1.1", 404),
        (b"POST /metrics HTTP/1.1", 405),
        (b"GET /metrics", 400),
        (b"GET /metrics HTTP/2", 400),
        (b"", 400),
    ],
)
def test_other_questions_are_declined(request_line: bytes, status: int) -> None:
    """In the words of HTTP."""
    assert status_of(request_line + b"\r\n\r\n") == status


def test_an_endless_question_is_too_long() -> None:
    """Nobody reads on for ever."""
    assert status_of(b"GET /metrics HTTP/1.1\r\nX: " + b"x" * MAX_REQUEST) == 431


@pytest.mark.parametrize(
    ("host", "status"),
    [
        (b"127.0.0.1:9464", 200),
        (b"localhost", 200),
        (b"[::1]:9464", 200),
        (b"", 200),
        (b"evil.example", 421),
        (b"192.168.1.5", 421),
        (b"[nonsense", 421),
        (b"localhost\r\nHost: evil.example", 421),
    ],
)
def test_a_page_in_a_browser_cannot_make_a_name_stand_for_this_machine(
    host: bytes, status: int
) -> None:
    """Where only this machine can ask; where others may, they come by any name."""
    request = b"GET /metrics HTTP/1.1\r\nHost: " + host + b"\r\n\r\n"
    assert status_of(request) == status
    assert status_of(request, local=False) == 200


@given(st.binary(max_size=200))
def test_whatever_comes_there_is_an_answer(request: bytes) -> None:
    """And never an error of ours."""
    assert status_of(request) in {200, 400, 404, 405, 421, 431}
