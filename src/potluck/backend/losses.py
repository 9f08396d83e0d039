"""Losing a peer: what was seen, in words."""

from __future__ import annotations

from potluck.backend.reader import PeerEnded
from potluck.errors import UNREACHABLE, MalformedFrame, PeerLost

__all__ = ["Interrupted", "LostByAnother", "SaidGoodbye", "peer_lost"]


class SaidGoodbye(ConnectionError):
    """The peer closed its backend."""


class Interrupted(ConnectionError):
    """This side was stopped in the middle of a frame."""


class LostByAnother(ConnectionError):
    """Another rank saw it go and told us."""


def peer_lost(rank: int, name: str, reason: Exception) -> PeerLost:
    """The error for a peer that is gone."""
    return PeerLost(
        f"Rank {rank} ({name}) is gone",
        rank=rank,
        host=name,
        cause=_explain(reason),
        hint=f"Look at the output of rank {rank}.",
    )


def _explain(reason: Exception) -> str:
    if isinstance(reason, SaidGoodbye):
        return "it closed its backend"
    if isinstance(reason, Interrupted):
        return "this side was interrupted in the middle of a frame"
    if isinstance(reason, LostByAnother):
        return "another rank lost its connection to it"
    if isinstance(reason, MalformedFrame):
        return f"it sent what is no valid frame ({reason})"
    if isinstance(reason, PeerEnded | ConnectionResetError | BrokenPipeError):
        return "its process ended without closing (it crashed or was killed)"
    # A neighbour that is gone shows as unreachable, one behind a router as silent.
    if isinstance(reason, TimeoutError) or getattr(reason, "errno", None) in UNREACHABLE:
        return "it no longer answers (asleep, switched off or unplugged)"
    return str(reason)
