"""What a simulated process needs of the world around it, as an interface."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from potluck.core import cluster_effects as effects
from potluck.testing.clock import VirtualClock
from potluck.vocabulary import ProcessId

__all__ = ["Surroundings"]

Process_contra = TypeVar("Process_contra", contravariant=True)


class Surroundings(Protocol[Process_contra]):
    """What a process needs of the world around it."""

    clock: VirtualClock

    def draw(self) -> float:
        """A number between 0 and 1, by lot."""

    def sends(self, process: Process_contra, to: ProcessId, message: Any) -> None:
        """A message that is no heartbeat is about to leave."""

    def receives(self, process: Process_contra, message: Any) -> None:
        """A process takes in a commit, or something that was relayed."""

    def wants(self, process: Process_contra, effect: effects.Probe | effects.Meet) -> None:
        """The core asks for a probe or an acquaintance."""

    def counts(self, process: Process_contra, sent: int) -> None:
        """A process has sent this many messages within a second."""

    def lost_lane(self, process: Process_contra, peer: ProcessId) -> None:
        """A lane of the process has ended."""

    def tells(self, process: Process_contra, effect: effects.Effect) -> None:
        """The core has decided something that is neither a message nor a probe."""

    def changed(self, process: Process_contra) -> None:
        """The view or the state of the core has changed."""

    def restless(self, process: Process_contra) -> None:
        """The core was woken, and wants to be woken again at once."""
