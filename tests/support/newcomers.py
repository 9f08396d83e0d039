"""Ranks that come to a group that forms, while others are at its door too."""

from __future__ import annotations

import contextlib
import socket
import time

from support.place import Place
from support.ranks import Rank, Ranks, start_together
from support.threads import PATIENCE, eventually
from support.victims import logging_to_stderr


def meet(place: Place, namespace: str | None = None) -> float:
    """Take part in a group that forms; how long that took from the first hello on."""
    place.wait_for_start()
    before = time.monotonic()
    with logging_to_stderr(), place.join(namespace=namespace) as backend:
        taken = time.monotonic() - before
        backend.barrier(PATIENCE)
        return taken


def dial(master: str) -> socket.socket:
    """Connect like a rank."""
    host, port = master.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=PATIENCE)


def start_rank_0(ranks: Ranks, master: str, world_size: int, namespace: str | None = None) -> Rank:
    """A rank 0 that is known to listen."""
    (zero,) = ranks.start(meet, world_size, namespace, ranks=[0], master=master)
    start_together([zero])
    eventually(lambda: is_open(master))
    return zero


def is_open(master: str) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(ConnectionRefusedError):
        dial(master).close()
        return True
    return False
