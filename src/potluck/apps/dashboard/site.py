"""The site: the page, its files, the picture as data, and the stream of what changes.

The files are read once at the start, so no request reaches the file system.
"""

from __future__ import annotations

import asyncio
import hashlib
from importlib.resources import files

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from potluck.apps.dashboard.broadcast import Broadcast, TooManyViewers, Viewer
from potluck.apps.dashboard.guard import Guard, Policy

__all__ = ["build_site"]

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
