"""A node's mail: orders come in by one pipe, news go out by another, neither holds up the training.

News are written by a thread of their own: whoever tells something, the control thread of the node
included, never waits for the demo to read it.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import Self

from potluck.apps.cli.demo_messages import Finish, News, Order, decode_order, encode_line
from potluck.closing import Closing

__all__ = ["Mail"]

CLOSING = 5.0
"""Seconds for the last news to be read."""


class Mail(Closing):
    """Orders and news of one node; a context manager."""

    def __init__(self, orders: int, news: int) -> None:
        self._from, self._to = orders, news
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._news: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._finish = threading.Event()
        self._writer = threading.Thread(target=self._write, name="demo-news", daemon=True)

    def __enter__(self) -> Self:
        """Begin to listen."""
        threading.Thread(target=self._listen, name="demo-orders", daemon=True).start()
        self._writer.start()
        return self

    def close(self) -> None:
        """Have all news written."""
        self._news.put(None)
        self._writer.join(CLOSING)

    @property
    def may_finish(self) -> bool:
        """Whether the demo has said that nothing more will happen."""
        return self._finish.is_set()

    def next_order(self, timeout: float) -> Order:
        """The next order that is to be waited for; raises ``queue.Empty``."""
        return self._orders.get(timeout=timeout) if timeout else self._orders.get_nowait()

    def tell(self, news: News) -> None:
        """Write a line to the demo; at once, from any thread."""
        self._news.put(news)

    def _listen(self) -> None:
        try:
            # No buffer: its lock, held by a thread that reads, would upset a process that ends.
            with open(self._from, "rb", buffering=0, closefd=False) as pipe:
                for line in pipe:
                    order = decode_order(line)
                    if isinstance(order, Finish):
                        self._finish.set()
                    else:
                        self._orders.put(order)
        finally:
            # Without the demo there is no reason to go on, whatever the training does now.
            os._exit(1)

    def _write(self) -> None:
        with open(self._to, "wb", buffering=0, closefd=False) as pipe:
            while (news := self._news.get()) is not None:
                try:
                    pipe.write(encode_line(news))
                except OSError:
                    return  # the demo has gone, and so do we in a moment
