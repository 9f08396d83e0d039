"""The collectives of one view: what ends them is what membership decided, the same on all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from potluck.runtime.executor import left
from potluck.runtime.group import Group

if TYPE_CHECKING:
    from potluck.backend.base import Backend
    from potluck.collective.config import CollectiveConfig
    from potluck.runtime.call import Call
    from potluck.runtime.cluster_stage import Stage
    from potluck.runtime.job import Turn

__all__ = ["ViewGroup"]


class ViewGroup(Group):
    """Runs collectives among the members of a view, until that is over."""

    def __init__(self, backend: Backend, stage: Stage, config: CollectiveConfig | None) -> None:
        super().__init__(backend, config)
        self._stage = stage
        vars(backend)["_collectives"] = self  # whoever asks for the backend's group gets this one

    def _execute(self, call: Call, turn: Turn) -> None:
        """A connection that broke is a symptom; membership decides what the operation ends with."""
        _, asked, deadline = turn
        seconds = 0.0 if deadline is None else deadline - asked
        self._stage.check(deadline, seconds)
        try:
            super()._execute(call, turn)
        except BaseException as error:
            verdict = self._stage.verdict_on(error, deadline, seconds)
            if verdict is None or (type(verdict), verdict.args) == (type(error), error.args):
                raise
            raise verdict from error

    def abort(self, reason: str = "aborted") -> None:
        """End the operation under way, and those that were started, on all ranks.

        One that waits for the next view ends as well, on this rank.
        """
        super().abort(reason)
        self._stage.abort(left(self.rank, reason))
