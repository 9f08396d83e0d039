"""The collectives of one view: what ends them is what the cluster says, the same on all ranks."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

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
        """A connection that broke is a symptom; the cluster knows which member is gone, and why."""
        ending = self._stage.ending
        if ending is not None:
            raise copy.copy(ending)
        try:
            super()._execute(call, turn)
        except BaseException as error:
            verdict = self._stage.verdict_on(error)
            if verdict is None or (type(verdict), verdict.args) == (type(error), error.args):
                raise
            raise verdict from error
