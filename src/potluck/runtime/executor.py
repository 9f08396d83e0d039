"""The executor of a group: does one call after the other, by plans, over a session's streams.

One thread at a time uses it, except for :meth:`Executor.abort`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.errors import Aborted
from potluck.runtime.engine import done_by_engine
from potluck.runtime.memory import Pool
from potluck.runtime.plans import Plans
from potluck.runtime.session import Session, abandon_streams
from potluck.runtime.surveyor import LARGE, Surveyor
from potluck.runtime.vigil import Vigil

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.collective.config import CollectiveConfig
    from potluck.errors import DistributedError
    from potluck.runtime.call import Call, Routine
    from potluck.runtime.job import Turn

__all__ = ["Executor"]


class Executor:
    """Of one rank in one group."""

    def __init__(self, backend: Backend, config: CollectiveConfig | None) -> None:
        self.plans = Plans(backend.rank, backend.world_size, config)
        self.rank = backend.rank
        self._backend = backend
        self.vigil = Vigil(backend)
        self._pool = Pool()
        self._session: Session | None = None
        self._surveyor = Surveyor(self.plans, backend.rank, backend.world_size)

    def execute(self, call: Call, turn: Turn) -> None:
        """Do a call whose turn it is."""
        if call.routine is not None:
            self._follow(call.routine, turn)
            return
        number, asked, deadline = turn
        compiled = self.plans.compiled(call)  # what cannot be done is refused before it begins
        self.vigil.admit(number, asked)
        try:
            if self._backend.has_engine and done_by_engine(self._backend, call, deadline):
                return
            if self._session is None:
                self._session = Session(self._backend, self.vigil, self._pool)
            if compiled.nbytes < LARGE or self._backend.world_size == 1:
                self._session.run(call, compiled, deadline)
            else:
                self._surveyor.run(call, self._session, deadline)
        except BaseException as error:
            self._fail(error, number)
            raise

    def _follow(self, routine: Routine, turn: Turn) -> None:
        """Do several calls in one turn; what goes wrong between them ends it on all ranks."""
        number, asked, _ = turn
        self.vigil.admit(number, asked)
        try:
            routine(lambda call: self.execute(call, turn))
        except BaseException as error:
            if self.vigil.epoch < number:  # the others do not know it yet
                self._fail(error, number)
            raise

    def give_up(self, number: int, error: BaseException) -> None:
        """Somebody made the call of this number and did not wait for its turn."""
        self.vigil.admit(number, 0.0)
        self._fail(error, number)
        raise error

    def _fail(self, error: BaseException, number: int) -> None:
        """Tell the others, close all streams, go on with the next epoch."""
        session, self._session = self._session, None
        try:
            self.vigil.conclude(error, number)
        finally:  # also after Ctrl-C: nothing may go on over streams that hold half an operation
            if session is not None:
                session.close()
            self._begin_epoch()
        self.vigil.ask_around(error)

    def _begin_epoch(self) -> None:
        abandon_streams(self._backend, self.vigil)
        self.plans.forget()
        self._surveyor = Surveyor(self.plans, self._backend.rank, self._backend.world_size)

    def abort(self, error: DistributedError, last_call: int) -> None:
        """End calls up to a number, from any thread; whoever runs one wakes up and looks."""
        self.vigil.abort(error, last_call)
        session = self._session
        if session is not None:
            session.wake()

    def leave(self, last_call: int) -> None:
        """End calls between two operations: whoever is still in the last one is not disturbed."""
        session, self._session = self._session, None
        try:
            self.vigil.leave(last_call)
        finally:
            if session is not None:
                session.finish()
            self._begin_epoch()

    def close(self) -> None:
        """Listen to the others no more."""
        self.vigil.close()


def left(rank: int, reason: str) -> Aborted:
    """The error for calls that a rank has ended."""
    return Aborted(f"Rank {rank} ended the operation: {reason}", rank=rank)
