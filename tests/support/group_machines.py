"""Machines with homes of their own, whose processes meet over real sockets."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from potluck import TcpBackend
from potluck.identity.namespace import NetworkNamespace
from potluck.identity.node import NodeIdentity
from potluck.net.secure_socket import Security
from potluck.trust.membership_store import TrustStore
from support.homes import Home
from support.place import Place
from support.ranks import Program, Rank, Ranks, new_master, start_together
from support.threads import PATIENCE


def members_of(home: Home, name: str = "home") -> TrustStore:
    """What a process of that machine knows of who belongs."""
    identity = NodeIdentity.load_or_generate(home.path / "node_keypair")
    return TrustStore(Security(home.namespace(name), identity))


def impostor(folder: Path, victim: Home, name: str = "fresh") -> Home:
    """A machine with a key of its own and a copy of somebody's secret; nobody brought it in."""
    fresh = Home(folder, name)
    namespace = victim.namespace()
    NetworkNamespace("home", namespace.secret, namespace.previous, home=fresh.path).save()
    return fresh


def change_secret(desk: Home, *others: Home) -> None:
    """A rotation by all of these machines, of which only the desk has the secret so far."""
    desk.membership().propose(lambda roster, secret: roster.rotate(desk.me, secret))
    for other in others:
        other.join_records_of(desk)
        (pending,) = other.membership().roster.pending
        other.membership().sign(pending.name)
        desk.join_records_of(other)
    assert desk.membership().has_secret


def start_on(
    ranks: Ranks, program: Program, homes: list[Home], master: str = "", first: int = 0
) -> list[Rank]:
    """Run a program as one rank on each machine, from rank ``first`` on, all at once."""
    return start_all(ranks, [(program, home) for home in homes], master, first)


def start_all(
    ranks: Ranks,
    parts: list[tuple[Program, Home]],
    master: str = "",
    first: int = 0,
    size: int | None = None,
) -> list[Rank]:
    """The same with a program of its own for each; others may come later, up to ``size``."""
    master, size = master or new_master(), size or max(2, len(parts))
    processes = [ranks.take() for _ in parts]
    for rank, ((program, home), process) in enumerate(zip(parts, processes, strict=True), first):
        process.begin(program, rank, size, master, str(home.path))
    start_together(processes)
    return processes


def gather(ranks: Ranks, *homes: Home) -> None:
    """A group of all these machines forms."""
    started = start_on(ranks, meet, list(homes))
    assert [process.value() for process in started] == [len(homes)] * len(homes)


def leave(processes: list[Rank]) -> None:
    """Let a group that stays come to its end."""
    for process in processes:
        process.tell("leave")
    for process in processes:
        process.value()


@contextlib.contextmanager
def on(place: Place, home: str, timeout: float = PATIENCE) -> Iterator[TcpBackend]:
    """Become part of a group as a process of the machine that has this home."""
    place.wait_for_start()
    with mock.patch.dict(os.environ, {"POTLUCK_HOME": home}):
        backend = place.join(timeout=timeout)
    with backend:
        yield backend


def meet(place: Place, home: str) -> int:
    """Take part in a group that forms; how many ranks it has."""
    with on(place, home) as backend:
        backend.barrier(PATIENCE)
        return backend.world_size


def meet_soon(place: Place, home: str) -> int:
    """The same by somebody who does not wait long for the others."""
    with on(place, home, timeout=2) as backend:
        backend.barrier(PATIENCE)
        return backend.world_size


def stay(place: Place, home: str) -> None:
    """Be in a group until told to leave."""
    with on(place, home) as backend:
        place.say("joined", port=backend._port.port)
        place.hear("leave")
        backend.barrier(PATIENCE)


def soon() -> float:
    """A deadline."""
    return time.monotonic() + PATIENCE
