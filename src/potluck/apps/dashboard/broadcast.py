"""The broadcast: one picture for many viewers, as server-sent events.

The watcher's thread leaves the latest picture and the latest news here and goes on; nobody waits
for a viewer.  Each viewer takes what it has not seen when it is ready for it: a slow one skips
pictures, and of the news it misses no more than is kept.  What waits for a viewer is one message.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections import deque
from collections.abc import AsyncIterator
from typing import NamedTuple

__all__ = ["MAX_VIEWERS", "Broadcast", "TooManyViewers", "Viewer"]

MAX_VIEWERS = 16
"""Pages that are open at once."""

KEPT = 400
"""News that a page which comes back can catch up with."""

HEARTBEAT = 5.0
"""Seconds of silence after which something is said, so that a broken connection is noticed."""

RETRY = 1000
"""Milliseconds after which a page that lost its connection tries again."""


MAX_DIGITS = 18
"""Of a number that a page may name."""


class Seen(NamedTuple):
    """What a viewer has seen: the picture of this version, and the news up to this number."""

    version: int
    number: int


class TooManyViewers(Exception):
    """As many look on as may."""


class Broadcast:
    """What is shown now, and what happened; any thread shows, viewers live in an event loop."""

    def __init__(self) -> None:
        self.start = secrets.token_hex(4)
        """Names this start of the dashboard: numbers of another one mean nothing here."""
        self._lock = threading.Lock()
        self._whole = self._light = b"{}"
        self._version = 0
        self._news: deque[tuple[int, bytes]] = deque(maxlen=KEPT)
        self._viewers: dict[Viewer, asyncio.AbstractEventLoop] = {}
        self._is_over = False

    # -- any thread ----------------------------------------------------------------------------

    def show(self, whole: bytes, light: bytes) -> None:
        """The picture has changed; ``light`` is for those who have seen an earlier one."""
        with self._lock:
            self._whole, self._light = whole, light
            self._version += 1
        self._wake()

    def tell(self, number: int, news: bytes) -> None:
        """Something happened."""
        with self._lock:
            self._news.append((number, news))
        self._wake()

    @property
    def last_number(self) -> int:
        """Of the latest news."""
        with self._lock:
            return self._news[-1][0] if self._news else 0

    @property
    def picture(self) -> bytes:
        """The whole picture as it is now."""
        with self._lock:
            return self._whole

    @property
    def news(self) -> bytes:
        """All news that are kept, as one list."""
        with self._lock:
            return b"[" + b",".join(news for _, news in self._news) + b"]"

    def close(self) -> None:
        """Let every viewer go."""
        self._is_over = True
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            viewers = list(self._viewers.items())
        for viewer, loop in viewers:
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                loop.call_soon_threadsafe(viewer.wake)

    # -- in the event loop ---------------------------------------------------------------------

    def admit(self) -> Viewer:
        """One more viewer; raises ``TooManyViewers``."""
        viewer = Viewer(self)
        with self._lock:
            if len(self._viewers) >= MAX_VIEWERS:
                raise TooManyViewers
            self._viewers[viewer] = asyncio.get_running_loop()
        return viewer

    def dismiss(self, viewer: Viewer) -> None:
        """One viewer less."""
        with self._lock:
            self._viewers.pop(viewer, None)

    @property
    def viewers(self) -> int:
        """How many look on."""
        with self._lock:
            return len(self._viewers)

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to see."""
        return self._is_over

    def unseen(self, seen: Seen) -> tuple[bytes, Seen]:
        """What somebody has not seen yet, as events for its page, and what it has seen then."""
        with self._lock:
            version, number = self._version, seen.number
            parts = []
            if seen.version < 0:
                parts.append(
                    b"retry: %d\n" % RETRY + _event("whole", self._mark(number), self._whole)
                )
            elif version != seen.version:
                parts.append(_event("light", self._mark(number), self._light))
            for number, news in [each for each in self._news if each[0] > seen.number]:
                parts.append(_event("news", self._mark(number), news))
        return b"".join(parts), Seen(version, number)

    def _mark(self, number: int) -> str:
        return f"{self.start}.{number}"

    def number_of(self, mark: str) -> int:
        """The news after which a page was cut off, by what it says; 0 if that is not of here."""
        start, _, number = mark.partition(".")
        is_ours = start == self.start and number.isascii() and number.isdecimal()
        return int(number) if is_ours and len(number) < MAX_DIGITS else 0


class Viewer:
    """One page that looks on."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast
        self._woken = asyncio.Event()
        self._is_gone = False

    def wake(self) -> None:
        """There may be something to see; in the event loop."""
        self._woken.set()

    def leave(self) -> None:
        """It looks no more; in the event loop."""
        self._is_gone = True
        self._broadcast.dismiss(self)
        self.wake()

    async def messages(self, mark: str = "") -> AsyncIterator[bytes]:
        """Events, for as long as it looks; ``mark`` is that of the last event it has had before."""
        seen = Seen(-1, self._broadcast.number_of(mark))
        while not self._is_gone and not self._broadcast.is_over:
            self._woken.clear()
            message, seen = self._broadcast.unseen(seen)
            if message:
                yield message
                continue
            try:
                async with asyncio.timeout(HEARTBEAT):
                    await self._woken.wait()
            except TimeoutError:
                yield b": still here\n\n"


def _event(kind: str, mark: str, data: bytes) -> bytes:
    """A server-sent event; JSON has no line breaks."""
    return b"event: %s\nid: %s\ndata: %s\n\n" % (kind.encode(), mark.encode(), data)
