"""What an agent is told: its limits and its patience."""

from __future__ import annotations

from dataclasses import dataclass

from potluck.backend.base import check_whole
from potluck.core.calls_encoding import MAX_RPC_MSG_SIZE
from potluck.core.calls_frames import Hello
from potluck.vocabulary import settle_seconds

__all__ = ["RpcConfig"]

SMALLEST = 512
"""Bytes: an answer that says what went wrong has room."""

MOST_CALLS, MOST_OCTETS = (1 << 32) - 1, (1 << 64) - 1
"""What the hello of an agent can say."""

LARGEST = (1 << 32) - (1 << 16)
"""Bytes: lengths are 32 bits long, and something stands in front of a payload."""


@dataclass(frozen=True, kw_only=True)
class RpcConfig:
    """Limits of an agent; each bounds the memory that a peer or a caller can make it use.

    >>> RpcConfig(workers=2).max_message == MAX_RPC_MSG_SIZE
    True
    """

    workers: int = 16
    """Functions that run at a time."""
    timeout: float = 60.0
    """Seconds for a call that is given no time of its own."""
    max_message: int = MAX_RPC_MSG_SIZE
    """Bytes of a request or a response."""
    calls: int = 16384
    """Unanswered calls that each peer may have here."""
    octets: int = 64 << 20
    """Bytes of unanswered requests of each peer, and of what waits to be sent to it; a single
    message may have more."""
    backlog: int = 16384
    """Calls to one peer that wait here; whoever wants to make another waits."""

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        settle_seconds(self)
        for name in ("workers", "timeout", "max_message", "calls", "octets", "backlog"):
            if name != "timeout":
                check_whole(getattr(self, name), f"value for {name}")
            if not getattr(self, name) > 0:
                msg = f"{name} must be more than 0, not {getattr(self, name)}"
                raise ValueError(msg)
        if self.calls > MOST_CALLS or self.octets > MOST_OCTETS:
            msg = f"calls can be {MOST_CALLS} and octets {MOST_OCTETS} at most"
            raise ValueError(msg)
        if not SMALLEST <= self.max_message <= LARGEST:
            msg = f"max_message can be {SMALLEST} to {LARGEST}, not {self.max_message}"
            raise ValueError(msg)

    def hello(self, generation: int = 1) -> Hello:
        """What the agent of a generation tells its peers."""
        return Hello(self.calls, self.octets, self.max_message, generation)
