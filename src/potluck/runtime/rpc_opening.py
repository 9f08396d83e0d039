"""Connections of an agent: opened as soon as both agents are there, and again after a loss.

Of two ranks the higher dials, as for every stream.  One thread does all of it, and ends when there
is nothing to open.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from potluck.errors import ChannelClosed, DistributedError

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.runtime.rpc_peer import Peer

__all__ = ["Opener"]

PURPOSE = "rpc"

DIAL = 1.0
"""Seconds for one attempt: one that hangs holds up the other ranks' connections."""

FIRST_PAUSE, LONGEST_PAUSE = 0.02, 1.0
"""Seconds between two rounds; each is twice as long as the last."""

LONGEST_LISTENING = 0.25
"""The same when nobody is to be dialled: looking costs little, and somebody may wait to call."""


class Opener:
    """Opens what is missing."""

    def __init__(self, backend: Backend, give_up: Callable[[int], None]) -> None:
        self._backend = backend
        self._give_up = give_up
        self._missing: dict[int, Peer] = {}
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def want(self, peer: Peer) -> None:
        """Open a connection to a rank."""
        with self._changed:
            if self._closed:
                return
            self._missing[peer.rank] = peer
            self._changed.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="potluck-rpc-open", daemon=True
                )
                self._thread.start()

    def loss_of(self, rank: int) -> DistributedError | None:
        """Why a rank will not be back, if so."""
        with contextlib.suppress(DistributedError):
            self._backend.progress(0)  # or nobody may have noticed yet
        return self._backend.loss_of(rank)

    def close(self, deadline: float) -> None:
        """Open nothing more."""
        with self._changed:
            self._closed = True
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        pause, known = FIRST_PAUSE, -1
        while True:
            with self._changed:
                if self._closed or not self._missing:
                    self._thread = None
                    return
                round_ = sorted(self._missing.values(), key=lambda peer: peer.rank)
            for peer in round_:
                self._try(peer)
            dials = any(peer.rank < self._backend.rank for peer in round_)
            longest = LONGEST_PAUSE if dials else LONGEST_LISTENING
            pause = FIRST_PAUSE if len(round_) != known else min(2 * pause, longest)
            known = len(round_)
            with self._changed:
                if self._missing and not self._closed:
                    self._changed.wait(pause)

    def _try(self, peer: Peer) -> None:
        def look() -> None:
            if self._closed:
                raise ChannelClosed("the agent was closed")

        dials = peer.rank < self._backend.rank
        deadline = time.monotonic() + DIAL if dials else 0.0
        try:
            opened = self._backend.open_stream(peer.rank, PURPOSE, deadline, look)
        except (DistributedError, OSError):
            if self.loss_of(peer.rank) is not None and not self._closed:
                with self._changed:
                    self._missing.pop(peer.rank, None)
                self._give_up(peer.rank)
            return
        with self._changed:
            self._missing.pop(peer.rank, None)
        peer.connect(opened)
