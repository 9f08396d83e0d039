"""Where the ranks of a backend are, for those who address them by name."""

from __future__ import annotations

import contextlib
import socket
from typing import TYPE_CHECKING

from potluck.core.calls import Whereabouts
from potluck.errors import DistributedError

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.vocabulary import View

__all__ = ["name_of", "places_of"]


def name_of(backend: Backend, rank: int) -> str | None:
    """Where a rank is, for people; None if it is not known, as of ourselves."""
    with contextlib.suppress(DistributedError, KeyError, OSError):
        return backend.peer_name(rank)
    return None


def places_of(backend: Backend) -> dict[int, Whereabouts]:
    """Name and id of every rank, our own included."""
    view: View | None = getattr(backend, "view", None)
    places = {}
    for rank in range(backend.world_size):
        name = name_of(backend, rank) or socket.gethostname()
        if view is None:
            places[rank] = Whereabouts(name, backend.node_of(rank) or "")
        else:
            places[rank] = Whereabouts(name, *view.members[rank])
    return places
