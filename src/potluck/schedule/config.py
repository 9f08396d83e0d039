"""CollectiveConfig: which strategies a group uses, for callers who want a say in it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from potluck._types import LinkMatrix, settle_seconds
from potluck.errors import InvalidWorldSize
from potluck.schedule.planner import Planner, refusals
from potluck.schedule.task import (
    AllReduceStrategy,
    BroadcastStrategy,
    Collective,
    ReduceStrategy,
    Strategy,
    Task,
)


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """Which strategies a group uses; left alone, the planner decides from measured links.

    *Local* strategies hold among the ranks of a machine, *global* ones among machines.  Without a
    global one there is one level: the local one holds among all ranks.  Where all ranks are on one
    machine the local one holds, where each is on its own the global one.

    >>> config = CollectiveConfig.multi_node(num_nodes=2, num_devices=3)
    >>> config.machines(6), str(config.select_all_reduce(1 << 24, world_size=6))
    ((0, 0, 0, 3, 3, 3), 'direct/ring')
    """

    num_devices: int = 1
    """Ranks on each node."""
    local_all_reduce: AllReduceStrategy = AllReduceStrategy.AUTO
    local_reduce: ReduceStrategy = ReduceStrategy.AUTO
    local_broadcast: BroadcastStrategy = BroadcastStrategy.AUTO
    num_nodes: int | None = None
    """Nodes, if there are several; the first ``num_devices`` ranks are on the first, and so on.
    Unless given, the ranks find out themselves which of them share a machine."""
    global_all_reduce: AllReduceStrategy | None = None
    global_reduce: ReduceStrategy | None = None
    global_broadcast: BroadcastStrategy | None = None
    tree_threshold_bytes: int | None = None
    """An all-reduce of fewer bytes uses a tree, if its strategy is left open; None leaves that to
    the planner too."""
    tree_arity: int = 2
    """Children of a node, for trees that do not say."""
    two_levels: bool = True
    """Whether the planner may let machines add up first, and send one share each; False leaves
    plans that treat all ranks alike, though in an order that fits machines."""
    measure_links: bool = True
    """Whether links are measured before the first large operation.  Without that, machines are
    known only where ``num_nodes`` says them."""
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
        for name, least in _LEAST.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                _check_number(name, getattr(self, name), least)
        for field in fields(self):
            scope, _, what = field.name.partition("_")
            if what in _KINDS and scope in {"local", "global"}:
                self._check_strategy(field.name, _KINDS[what])
        for name in ("two_levels", "measure_links"):
            if not isinstance(getattr(self, name), bool):
                msg = f"{name} must be True or False, not {getattr(self, name)!r}"
                raise TypeError(msg)
        _check_timeout(self.timeout)
        return self

    def _check_strategy(self, name: str, kind: type[Strategy]) -> None:
        given = getattr(self, name)
        scope, _, what = name.partition("_")
        if scope == "global" and given is None:
            return
        if not isinstance(given, kind):
            known = f"{kind.__name__}, such as {kind.__name__}.AUTO"
            msg = f"{name} must be one of {known}, not {given!r}"
            raise TypeError(msg)
        both = getattr(self, f"global_{what}")
        if given.among is not None and both is not None:
            msg = f"{name} must be of one level, {given!r} has two and global_{what} is set as well"
            raise ValueError(msg)
        if scope == "local" and given.among is None and both is not None:
            if not self.two_levels and not (given.is_auto and both.is_auto):
                msg = f"two_levels must be True beside local_{what} and global_{what}"
                raise ValueError(msg)
            for refusal in refusals(what, given, both):
                raise ValueError(refusal)

    def machines(self, world_size: int) -> tuple[int, ...]:
        """For each rank the lowest rank of its machine, as ``num_nodes`` and ``num_devices`` say.

        Empty if they say nothing, or not of so many ranks: some of a group, or a cluster that has
        lost a machine.
        """
        if (self.num_nodes or 1) * self.num_devices != world_size:
            return ()
        if self.num_nodes is None and self.num_devices == 1:
            return ()
        return tuple(rank - rank % self.num_devices for rank in range(world_size))

    def check_world_size(self, world_size: int) -> None:
        """Raise if the machines that are written down cannot be those of so many ranks."""
        told = (self.num_nodes or 1) * self.num_devices
        if told > 1 and told != world_size:
            raise InvalidWorldSize(
                world_size,
                hint=f"The configuration says {self.num_nodes or 1} nodes with {self.num_devices} "
                f"ranks each, {told} in all. Leave both out, and ranks find their machines.",
            )

    def strategy_of(
        self, collective: Collective, machines: tuple[int, ...], nbytes: int
    ) -> Strategy:
        """What is asked for among ranks on these machines (see :meth:`machines`)."""
        match collective:
            case Collective.ALL_REDUCE:
                chosen = _chosen(self.local_all_reduce, self.global_all_reduce, machines)
                if chosen.is_auto and nbytes < (self.tree_threshold_bytes or 0):
                    chosen = AllReduceStrategy.TREE
            case Collective.REDUCE:
                chosen = _chosen(self.local_reduce, self.global_reduce, machines)
            case Collective.BROADCAST:
                chosen = _chosen(self.local_broadcast, self.global_broadcast, machines)
            case _:
                return Strategy()
        return chosen.with_arity(self.tree_arity)

    def select_all_reduce(
        self, nbytes: int, world_size: int, links: LinkMatrix | None = None
    ) -> AllReduceStrategy:
        """The strategy of a vector of this many bytes of float32: what would really run.

        That depends on the links; without them, on what is assumed until they are measured.  A
        group shows its own as ``group.links``.

        >>> CollectiveConfig(tree_threshold_bytes=1 << 20).select_all_reduce(4096, world_size=4)
        AllReduceStrategy.tree(2)
        >>> CollectiveConfig().select_all_reduce(4096, world_size=4)
        AllReduceStrategy.DOUBLING
        """
        if links is None:
            links = LinkMatrix.uniform(world_size, rate=0, latency=0)
        task = Task.whole(Collective.ALL_REDUCE, world_size, -(-nbytes // 4))
        return Planner(links, config=self).plan(task).strategy


def _chosen(local: Strategy, among: Strategy | None, machines: tuple[int, ...]) -> Strategy:
    several = len(set(machines))
    if among is None or several == 1:
        return local
    if several in {0, len(machines)}:
        return among
    if local.is_auto and among.is_auto:
        return local
    return Strategy.two_level(local, among)


_KINDS: dict[str, type[Strategy]] = {
    "all_reduce": AllReduceStrategy,
    "reduce": ReduceStrategy,
    "broadcast": BroadcastStrategy,
}


_LEAST = {"num_devices": 1, "num_nodes": 1, "tree_threshold_bytes": 0, "tree_arity": 1}
_OPTIONAL = {"num_nodes", "tree_threshold_bytes"}


def _check_timeout(timeout: object) -> None:
    if timeout is None:
        return
    if isinstance(timeout, bool) or not isinstance(timeout, int | float):
        msg = f"timeout must be a number of seconds or None, not {timeout!r}"
        raise TypeError(msg)
    if not timeout > 0:
        msg = f"timeout must be more than zero seconds, not {timeout}"
        raise ValueError(msg)


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
