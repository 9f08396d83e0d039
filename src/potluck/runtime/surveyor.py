"""The surveyor: runs large operations, and sees to it that the plans fit the links."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from potluck.collective.strategies import Strategy
from potluck.collective.task import Collective, Task
from potluck.runtime.call import Call, Purpose
from potluck.runtime.survey import FAST, Experience, agree, have_changed

if TYPE_CHECKING:
    from potluck.collective.reduce import Array
    from potluck.runtime.plans import Plans
    from potluck.runtime.session import Session

__all__ = ["LARGE", "Surveyor"]

PACE = 2
"""How many times its link's rate a stream may send: a short queue, and room for a wrong figure."""

LARGE = 1 << 15
"""Bytes from which an operation is worth a survey."""


class Surveyor:
    """Of one group, in one epoch.

    All it does follows from what the ranks have in common: calls, and what they told each other.
    """

    def __init__(self, plans: Plans, rank: int, world_size: int) -> None:
        self._plans = plans
        self._rank = rank
        self._world_size = world_size
        self._experience = Experience()

    def run(self, call: Call, session: Session, deadline: float | None) -> None:
        """Do a large call; before the first, and when things have changed, look at the links."""
        if self._is_worthwhile(call, session, deadline):
            self._survey(call, session, deadline)
        start = time.monotonic()
        session.run(call, self._plans.compiled(call), deadline)
        self._experience.note(call.task, time.monotonic() - start)

    def _is_worthwhile(self, call: Call, session: Session, deadline: float | None) -> bool:
        if not self._plans.is_surveyed:
            return True
        if not self._experience.is_due:
            return False
        change = np.array([self._experience.change(call.task)])
        return have_changed(self._gather(change, call, session, deadline))

    def _survey(self, call: Call, session: Session, deadline: float | None) -> None:
        size = self._world_size
        seen = session.survey(self._plans.compiled(call).fingerprint, deadline)
        rows = self._gather(seen.reshape(-1), call, session, deadline)
        links = agree(rows.reshape(size, 2, size))
        self._plans.learn(links, call, self._experience.operations)
        up = links.up[self._rank]
        if up < FAST:
            session.pace(PACE * up)
        self._experience = Experience()

    def _gather(self, mine: Array, before: Call, session: Session, deadline: float | None) -> Array:
        """What all ranks have to say before a call, in their order."""
        size = self._world_size
        target = np.zeros(size * mine.size, np.int64)
        task = Task.blocks(Collective.ALL_GATHER, (mine.size,) * size)
        call = Call(
            task, mine, target, strategy=Strategy("doubling"), purpose=Purpose.AGREE_ON_LINKS
        )
        # Under the name of the call: whoever is in another one is told of what the user wrote.
        about = self._plans.compiled(before).fingerprint._replace(purpose=Purpose.AGREE_ON_LINKS)
        compiled = replace(self._plans.compiled(call), fingerprint=about, packed=about.pack())
        session.run(call, compiled, deadline)
        return target
