"""CollectiveConfig: which strategies a group uses, for callers who want a say in it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from potluck.collective.strategies import AllReduceStrategy, BroadcastStrategy, ReduceStrategy
from potluck.errors import InvalidWorldSize

__all__ = ["CollectiveConfig"]

FEW = 16
"""Up to so many ranks connections between all of them cost little."""


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """Which strategies a group uses; left alone, the planner decides from measured links.

    *Local* strategies hold among the ranks of one node, *global* ones among nodes; where there is
    no global one, the local one holds everywhere.

    >>> config = CollectiveConfig.multi_node(num_nodes=4)
    >>> config.select_all_reduce(4096, world_size=4), config.select_all_reduce(1 << 24, 4)
    (AllReduceStrategy.tree(2), AllReduceStrategy.DIRECT)
    """

    num_devices: int = 1
    """Ranks on each node."""
    local_all_reduce: AllReduceStrategy = AllReduceStrategy.AUTO
    local_reduce: ReduceStrategy = ReduceStrategy.AUTO
    local_broadcast: BroadcastStrategy = BroadcastStrategy.AUTO
    num_nodes: int | None = None
    """Nodes, if there are several."""
    global_all_reduce: AllReduceStrategy | None = None
    global_reduce: ReduceStrategy | None = None
    global_broadcast: BroadcastStrategy | None = None
    tree_threshold_bytes: int = 1 << 20
    """Below this latency counts more than bandwidth: while no link is measured, use a tree."""
    tree_arity: int = 2
    """Children of a node, for trees that do not say."""
    timeout: float = 60.0
    """Seconds until a collective gives up."""

    @classmethod
    def single_node(cls, num_devices: int = 1) -> CollectiveConfig:
        """All ranks on one machine."""
        return cls(num_devices=num_devices).validate()

    @classmethod
    def multi_node(cls, num_nodes: int, num_devices: int = 1) -> CollectiveConfig:
        """Several machines with equally many ranks each."""
        return cls(
            num_devices=num_devices,
            num_nodes=num_nodes,
            global_all_reduce=AllReduceStrategy.AUTO,
            global_reduce=ReduceStrategy.AUTO,
            global_broadcast=BroadcastStrategy.AUTO,
        ).validate()

    def validate(self) -> CollectiveConfig:
        """Raise if this makes no sense; itself otherwise."""
        if self.num_devices < 1:
            raise InvalidWorldSize(self.num_devices)
        if self.num_nodes is None:
            for field in fields(self):
                if field.name.startswith("global_") and getattr(self, field.name) is not None:
                    msg = f"{field.name} needs num_nodes: without nodes nothing is global"
                    raise ValueError(msg)
        elif self.num_nodes < 1:
            raise InvalidWorldSize(self.num_nodes)
        if self.tree_threshold_bytes < 0 or self.tree_arity < 1 or not self.timeout > 0:
            msg = (
                "tree_threshold_bytes must be zero or more, tree_arity at least 1 and timeout "
                f"above zero, not {self.tree_threshold_bytes}, {self.tree_arity}, {self.timeout}"
            )
            raise ValueError(msg)
        return self

    def select_all_reduce(self, nbytes: int, world_size: int) -> AllReduceStrategy:
        """The strategy for a vector of so many bytes, as long as nothing is known of the links.

        What the caller asked for comes first.  The planner takes over once links are measured.
        """
        chosen = self.local_all_reduce
        if world_size > self.num_devices and self.global_all_reduce is not None:
            chosen = self.global_all_reduce
        if not chosen.is_auto:
            return self._complete(chosen)
        if nbytes < self.tree_threshold_bytes:
            return AllReduceStrategy.tree(self.tree_arity)
        return AllReduceStrategy.DIRECT if world_size <= FEW else AllReduceStrategy.RING

    def _complete(self, strategy: AllReduceStrategy) -> AllReduceStrategy:
        is_open = strategy == AllReduceStrategy.TREE
        return AllReduceStrategy.tree(self.tree_arity) if is_open else strategy
