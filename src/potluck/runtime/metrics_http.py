"""The little of HTTP that an endpoint for metrics speaks: a request in, an answer out."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from potluck.runtime.metrics_exposition import CONTENT_TYPE

__all__ = ["MAX_REQUEST", "answer"]

MAX_REQUEST = 8192
"""Bytes of a request, all its headers included."""

_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    421: "Misdirected Request",
    431: "Request Header Fields Too Large",
}


def answer(request: bytes, page: Callable[[], bytes], *, local: bool) -> bytes:
    r"""What to say to a request, whatever it is; ``local`` if only this machine can ask.

    >>> answer(b"GET /other HTTP/1.1\r\n\r\n", bytes, local=True).splitlines()[0]
    b'HTTP/1.1 404 Not Found'
    """
    head, complete, _ = request.partition(b"\r\n\r\n")
    if not complete:
        return _answer(431, "The request is too long.")
    first, *lines = head.split(b"\r\n")
    words = first.split(b" ")
    if len(words) != 3 or not words[2].startswith(b"HTTP/1."):  # noqa: PLR2004 - method, path, version
        return _answer(400, "This is no request of HTTP/1.")
    method, path, _ = words
    if local and not all(map(_names_this_machine, _headers(lines, b"host"))):
        # A page in somebody's browser that has made its name stand for this machine.
        return _answer(421, "Metrics do not go by that name. Use the address.")
    if method not in {b"GET", b"HEAD"}:
        return _answer(405, "Metrics can only be read.", "Allow: GET, HEAD\r\n")
    if path.partition(b"?")[0] != b"/metrics":
        return _answer(404, "Metrics are at /metrics.", head_only=method == b"HEAD")
    return _answer(200, page(), kind=CONTENT_TYPE, head_only=method == b"HEAD")


def _answer(
    status: int,
    body: str | bytes,
    headers: str = "",
    *,
    kind: str = "text/plain; charset=utf-8",
    head_only: bool = False,
) -> bytes:
    content = body if isinstance(body, bytes) else f"{body}\n".encode()
    head = (
        f"HTTP/1.1 {status} {_REASONS[status]}\r\n"
        f"Content-Type: {kind}\r\n"
        f"Content-Length: {len(content)}\r\n"
        f"{headers}"
        "Cache-Control: no-store\r\n"
        "X-Content-Type-Options: nosniff\r\n"
        "Connection: close\r\n\r\n"
    )
    return head.encode() + (b"" if head_only else content)


def _headers(lines: list[bytes], name: bytes) -> list[str]:
    """What all the headers of this name say."""
    pairs = [line.partition(b":") for line in lines]
    return [
        value.strip().decode("latin-1") for key, _, value in pairs if key.strip().lower() == name
    ]


def _names_this_machine(host: str) -> bool:
    """Whether a name cannot have been made up by somebody else; none is as good."""
    is_bracketed = host.startswith("[") and "]" in host
    name = host[1:].partition("]")[0] if is_bracketed else host.partition(":")[0]
    if name in {"", "localhost"}:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
