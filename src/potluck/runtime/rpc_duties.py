"""What the parts of an agent expect of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.core.calls_frames import Hello
    from potluck.runtime.rpc_calls import Incoming
    from potluck.runtime.rpc_config import RpcConfig
    from potluck.runtime.rpc_connection import Connection

__all__ = ["Generations", "Office", "Outlook", "Staff"]


class Generations:
    """The agents that the ranks of a group have made one after the other, as one rank knows them.

    The first agent of every rank is of generation 1, the next one of generation 2.  Agents of one
    generation belong together: a call of one waits for its peer of the same generation, or of a
    newer one.
    """

    def __init__(self) -> None:
        self.latest = 0
        """Of this rank."""
        self._staying: dict[int, int] = {}

    @classmethod
    def of(cls, backend: Backend) -> Generations:
        """Those of a group, for all agents that this rank makes on it."""
        known: Generations = vars(backend).setdefault("_rpc_generations", cls())
        return known

    def note_staying(self, rank: int, generation: int) -> None:
        """A rank keeps its agent, although others have made new ones."""
        self._staying[rank] = generation

    def is_staying(self, rank: int, generation: int) -> bool:
        """Whether that is known of the agent of a rank."""
        return self._staying.get(rank) == generation


class Outlook(NamedTuple):
    """What becomes of calls whose connection has ended."""

    is_back_soon: bool
    """Whether the process may be called again, so that calls that may be repeated wait."""
    cause: str | None = None
    """Why it has ended, if that is known better than from the connection itself."""
    hint: str | None = None


class Office(Protocol):
    """What a peer needs of its agent."""

    rank: int
    config: RpcConfig
    hello: Hello
    """What peers are told of the agent, its generation included."""
    generations: Generations

    def serve(self, call: Incoming) -> None:
        """Have a call answered."""

    def forget(self, call: Incoming) -> None:
        """Nobody waits for a call any more: answer it now if it has not begun."""

    def watch(self, connection: Connection) -> None:
        """Read a new connection from now on."""

    def rouse(self) -> None:
        """Look at calls with a deadline from time to time, also at those that wait here."""

    def lost(self, rank: int) -> Outlook:
        """A connection has ended: what that means for calls to its rank."""

    def outlook(self, rank: int) -> Outlook:
        """What is known about the rank of a connection that has ended."""

    def name_of(self, rank: int) -> str | None:
        """Where a rank is, for people."""

    def sweep(self, count: int) -> None:
        """So many calls that wait for workers have lost their callers."""

    def orphaned(self, calls: list[Incoming]) -> None:
        """Nobody waits for these calls any more, and they need no answer."""

    def wait_inside(self, wait: Callable[[], None]) -> None:
        """Wait for a call on the thread of a worker."""

    @property
    def may_block(self) -> bool:
        """Whether this thread may wait: others depend on the agent's own."""


class Staff(Protocol):
    """What the loop needs of its agent."""

    def connection_of(self, rank: int) -> Connection | None:
        """The connection to a rank, if there is one."""

    def lose(self, connection: Connection, reason: Exception) -> None:
        """A connection is over."""

    def answer(self, call: Incoming, *, cork: bool) -> None:
        """Run a quick function; ``cork`` holds its answer back until :meth:`Connection.flush`."""

    def hand_over(self, call: Incoming) -> None:
        """Leave a call to the workers."""

    def tick(self, now: float) -> bool:
        """Look at deadlines; whether anything is under way."""
