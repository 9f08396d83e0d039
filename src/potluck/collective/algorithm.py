"""What an algorithm is: a name, and a builder for each collective that it offers.

One file per algorithm declares one :class:`Algorithm`; ``registry`` lists them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from potluck.collective.schedule import Maker, Schedule
from potluck.collective.task import Collective, Layout, Task
from potluck.errors import UnsupportedOperation

__all__ = ["Algorithm", "Builder"]

Builder: TypeAlias = Callable[[Task, Layout], Maker]
"""Does once what all ranks share, and returns what makes the program of each rank."""


@dataclass(frozen=True)
class Algorithm:
    """One way to move arrays."""

    name: str
    idea: str
    """How it works, for a sentence that begins with its name."""
    offers: Mapping[Collective, Builder] = field(repr=False)

    def schedule(self, task: Task, layout: Layout | None = None) -> Schedule:
        """The schedule of a task; without a layout, the plain one."""
        layout = layout or Layout.plain(task.world_size)
        if len(layout.order) != task.world_size:
            msg = f"The layout is for {len(layout.order)} ranks, the task for {task.world_size}"
            raise ValueError(msg)
        builder = self.offers.get(task.collective)
        if builder is None:
            raise UnsupportedOperation(
                f"The algorithm {self.name} offers no {task.collective.value}",
                hint=f"It offers {', '.join(sorted(each.value for each in self.offers))}.",
            )
        return Schedule(task, layout, self.name, builder(task, layout))
