"""The members of a view connect: all at once, so that nobody waits for others' handshakes."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
import time
from typing import TYPE_CHECKING, cast

from potluck.backend.extension import MESSAGES
from potluck.backend.introduction import Declined
from potluck.core.handshake import list_ranks
from potluck.errors import (
    BackendUnavailable,
    ChannelClosed,
    DistributedError,
    NoConnection,
    from_os_error,
)
from potluck.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from potluck.backend.lanes import OpenLane
    from potluck.backend.streams import Switchboard
    from potluck.messages import Peer

__all__ = ["Gathering"]

logger = get_logger(__name__)

AT_ONCE = 8
"""Members that are dialled at the same time, each by a thread that ends when all are there.

More would only compete for the processor: a handshake computes more than it waits.
"""

PARTING = 1.0
"""Seconds for those threads to notice that they are not wanted any more."""


class _Late(Exception):
    """The deadline has passed."""


class Gathering:
    """Dials those below and awaits those above; the lanes of both meet on the switchboard."""

    def __init__(
        self,
        rank: int,
        peers: Sequence[Peer],
        switchboard: Switchboard,
        dial: Callable[[int, Callable[[], None]], OpenLane],
    ) -> None:
        """``dial`` gets a rank and what to ask while it tries; it gives up before our deadline."""
        self._rank = rank
        self._peers = peers
        self._switchboard = switchboard
        self._dial = dial
        self._lower: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._failures: dict[int, DistributedError] = {}
        self._is_over = False

    def gather(
        self, deadline: float, look: Callable[[], None], interrupt: Callable[[], None]
    ) -> dict[int, OpenLane]:
        """The lanes of all other members.

        ``interrupt`` wakes whoever is in the middle of opening one, if it comes to no good end.
        """
        others = [rank for rank in range(len(self._peers)) if rank != self._rank]
        threads = self._start_dialling()
        try:
            looking = self._looking(deadline, look)
            lanes = self._switchboard.take_all(others, MESSAGES, looking, _is_open)
        except BaseException as error:
            self._is_over = True
            missing = self._switchboard.absent(others, MESSAGES)
            interrupt()
            _join(threads)
            if isinstance(error, _Late):
                raise self._incomplete(missing or others) from None
            raise
        _join(threads)
        return cast("dict[int, OpenLane]", lanes)

    def _looking(self, deadline: float, look: Callable[[], None]) -> Callable[[], None]:
        def look_around() -> None:
            look()
            for error in list(self._failures.values()):
                if isinstance(error, Declined):  # time does not change it
                    raise error
            if time.monotonic() >= deadline:
                raise _Late

        return look_around

    # -- those below -----------------------------------------------------------------------------

    def _start_dialling(self) -> list[threading.Thread]:
        for rank in range(self._rank):
            self._lower.put(rank)
        threads: list[threading.Thread] = []
        for _ in range(min(self._rank, AT_ONCE)):
            thread = threading.Thread(target=self._work, name="potluck-view", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the system gives no more threads
                if not threads:
                    raise BackendUnavailable(
                        "This machine has no thread left to connect with", cause=str(error)
                    ) from error
                break  # then a few dial everybody
            threads.append(thread)
        return threads

    def _work(self) -> None:
        """Dial one after the other of those whom no other thread has taken on."""
        with contextlib.suppress(queue.Empty):
            while not self._is_over:
                rank = self._lower.get_nowait()
                try:
                    lane = self._dial(rank, self._check)
                except DistributedError as error:
                    self._failures[rank] = error
                except OSError as error:
                    self._failures[rank] = from_os_error(f"Rank {rank} was not reached", error)
                except Exception as error:  # a fault of ours must not look like theirs
                    logger.exception("could not dial rank %d", rank)
                    self._failures[rank] = NoConnection(
                        f"Rank {rank} was not reached", rank=rank, cause=repr(error)
                    )
                else:
                    unwanted = self._switchboard.put(rank, MESSAGES, lane)
                    if unwanted is not None:
                        cast("OpenLane", unwanted).sock.close()

    def _check(self) -> None:
        if self._is_over:
            raise ChannelClosed("Nobody waits for this connection any more")

    # -- who is missing --------------------------------------------------------------------------

    def _incomplete(self, missing: Sequence[int]) -> NoConnection:
        known = [self._failures.get(rank) for rank in missing]
        if len(known) == 1 and isinstance(known[0], NoConnection):
            return known[0]
        reasons = (
            f"rank {rank} on {self._peers[rank].name} {_reason(error)}"
            for rank, error in zip(missing, known, strict=True)
        )
        return NoConnection(
            f"Rank {self._rank} could not connect with {list_ranks(missing)} of this view",
            rank=missing[0],
            host=self._peers[missing[0]].name,
            cause="; ".join(reasons),
            hint="Check that these machines reach each other and that no firewall is between.",
        )


def _is_open(lane: object) -> bool:
    """Whether the other end has not closed a lane meanwhile; one that it has is closed here too."""
    sock = cast("OpenLane", lane).sock
    try:
        limit = sock.gettimeout()
        sock.setblocking(False)
        try:
            is_over = sock.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            is_over = False
        sock.settimeout(limit)
    except OSError:  # it was reset
        is_over = True
    if is_over:
        sock.close()
    return not is_over


def _reason(error: DistributedError | None) -> str:
    return f"was not reached ({error.cause or error.message})" if error else "did not connect"


def _join(threads: Sequence[threading.Thread]) -> None:
    end = time.monotonic() + PARTING
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
