"""What is raised when a cluster breaks a rule, and names for processes and views in its words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from potluck.testing.process import SimulatedProcess
from potluck.vocabulary import ProcessId, View

__all__ = ["Names", "Violation"]


class Violation(AssertionError):
    """A cluster did what no cluster may do."""


class Names:
    """Processes and views in words."""

    def __init__(self, places: Mapping[str, SimulatedProcess]) -> None:
        self._places = places

    def who(self, process: ProcessId) -> str:
        """The name of a process, with the number of its start."""
        for place in self._places.values():
            if process in place.past:
                return f"{place.name}/{process.incarnation}"
        return str(process)

    def all(self, processes: Iterable[ProcessId]) -> str:
        """Several names."""
        return "{" + " ".join(map(self.who, processes)) + "}"

    def view(self, view: View | None) -> str:
        """A view: lineage, epoch, and who is in."""
        if view is None:
            return "no view"
        return f"view {view.lineage[:8]}.{view.epoch} {self.all(view.members)}"
