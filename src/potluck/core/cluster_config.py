"""How a cluster forms and decides: one frozen record, the same on all its members."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from potluck.core.cluster_bounds import MAX_MEMBERS
from potluck.core.election_events import ElectionConfig
from potluck.core.health_config import HealthConfig

__all__ = ["ClusterConfig"]


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """How a cluster forms and decides.  Times in seconds."""

    min_nodes: int = 1
    """With fewer processes no cluster is founded.  It says nothing about later losses."""
    quorum: Literal["majority", "any"] = "majority"
    """With "any", those who are cut off from the quorum go on by themselves, as a new lineage."""
    solo_delay: float = 1.0
    """How long a process that meets nobody looks around before it founds a cluster of one."""
    health: HealthConfig = field(default_factory=HealthConfig)
    election: ElectionConfig = field(default_factory=ElectionConfig)

    def __post_init__(self) -> None:
        """Refuse what could not work."""
        if type(self.min_nodes) is not int:
            msg = f"min_nodes is a whole number of nodes, not {self.min_nodes!r}"
            raise TypeError(msg)
        if not 1 <= self.min_nodes <= MAX_MEMBERS:
            msg = (
                f"A cluster has at least one node and at most {MAX_MEMBERS}; "
                f"got min_nodes={self.min_nodes}"
            )
            raise ValueError(msg)
        if self.quorum not in {"majority", "any"}:
            msg = f'quorum is "majority" or "any"; got {self.quorum!r}'
            raise ValueError(msg)
        if not 0 <= self.solo_delay < float("inf"):
            msg = f"solo_delay is a number of seconds; got {self.solo_delay}"
            raise ValueError(msg)
