"""CollectiveConfig: which strategies a group uses, for callers who want a say in it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from potluck.collective.strategies import (
    AllReduceStrategy,
    BroadcastStrategy,
    ReduceStrategy,
    Strategy,
)
from potluck.errors import InvalidWorldSize
from potluck.vocabulary import settle_seconds

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
    timeout: float | None = None
    """Seconds until a collective gives up; unless given, the limit of the backend."""

    def __post_init__(self) -> None:
        """Refuse what makes no sense."""
        settle_seconds(self)
        self.validate()

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
        for name, least in (("num_devices", 1), ("tree_threshold_bytes", 0), ("tree_arity", 1)):
            _check_number(name, getattr(self, name), least)
        for field in fields(self):
            scope, _, what = field.name.partition("_")
            if what in _KINDS and scope in {"local", "global"}:
                self._check_strategy(field.name, _KINDS[what])
        if self.num_nodes is not None:
            _check_number("num_nodes", self.num_nodes, 1)
        if self.timeout is not None:
            if isinstance(self.timeout, bool) or not isinstance(self.timeout, int | float):
                msg = f"timeout must be a number of seconds or None, not {self.timeout!r}"
                raise TypeError(msg)
            if not self.timeout > 0:
                msg = f"timeout must be more than zero seconds, not {self.timeout}"
                raise ValueError(msg)
        return self

    def _check_strategy(self, name: str, kind: type[Strategy]) -> None:
        given = getattr(self, name)
        if name.startswith("global_"):
            if given is None:
                return
            if self.num_nodes is None:
                msg = f"{name} needs num_nodes: without nodes nothing is global"
                raise ValueError(msg)
        if not isinstance(given, kind):
            known = f"{kind.__name__}, such as {kind.__name__}.AUTO"
            msg = f"{name} must be one of {known}, not {given!r}"
            raise TypeError(msg)

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


_KINDS: dict[str, type[Strategy]] = {
    "all_reduce": AllReduceStrategy,
    "reduce": ReduceStrategy,
    "broadcast": BroadcastStrategy,
}


def _check_number(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"{name} must be a whole number, not {value!r}"
        raise TypeError(msg)
    if value >= least:
        return
    if name in {"num_devices", "num_nodes"}:
        raise InvalidWorldSize(value, hint=f"{name} must be {least} or more.")
    msg = f"{name} must be {least} or more, not {value}"
    raise ValueError(msg)
