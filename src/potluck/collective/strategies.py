"""Strategies: how a caller names the algorithm it wants, or leaves the choice to the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

__all__ = ["AllReduceStrategy", "BroadcastStrategy", "ReduceStrategy", "Strategy"]


@dataclass(frozen=True, slots=True)
class Strategy:
    """An algorithm by name; none means that the planner chooses."""

    algorithm: str | None = None
    arity: int | None = None
    """Of a tree; none leaves it to the configuration."""

    @classmethod
    def tree(cls, arity: int = 2) -> Self:
        """A tree in which every node has ``arity`` children; 1 makes it a chain.

        >>> AllReduceStrategy.tree(arity=4)
        AllReduceStrategy.tree(4)
        """
        if arity < 1:
            msg = f"A node of a tree has at least one child, not {arity}"
            raise ValueError(msg)
        return cls("tree", arity)

    @classmethod
    def named(cls, text: str) -> Self:
        """The strategy that a text names: ``ring``, ``tree``, ``tree:4`` and so on.

        >>> BroadcastStrategy.named("tree:4")
        BroadcastStrategy.tree(4)
        """
        name, colon, arity = text.strip().lower().partition(":")
        if name == "tree" and arity.isdecimal():
            return cls.tree(int(arity))
        found = getattr(cls, name.upper(), None)
        if colon or not isinstance(found, cls):
            names = (each for each in dir(cls) if isinstance(getattr(cls, each), cls))
            msg = f"{text!r} is no {cls.__name__}; there are {', '.join(names).lower()}, tree:ARITY"
            raise ValueError(msg)
        return found

    @property
    def is_auto(self) -> bool:
        """Whether the choice is left to the planner."""
        return self.algorithm is None

    def __repr__(self) -> str:
        """The expression that makes it."""
        if self.arity is not None:
            return f"{type(self).__name__}.tree({self.arity})"
        kind = type(self)
        for name in dir(kind):
            if getattr(kind, name) == self:
                return f"{kind.__name__}.{name}"
        return f"{kind.__name__}({self.algorithm!r})"


class AllReduceStrategy(Strategy):
    """How an all-reduce is done.

    >>> AllReduceStrategy.AUTO.is_auto, AllReduceStrategy.RING.algorithm
    (True, 'ring')
    """

    __slots__ = ()
    AUTO: ClassVar[AllReduceStrategy]
    RING: ClassVar[AllReduceStrategy]
    TREE: ClassVar[AllReduceStrategy]
    CENTRALIZED: ClassVar[AllReduceStrategy]
    DIRECT: ClassVar[AllReduceStrategy]
    DOUBLING: ClassVar[AllReduceStrategy]


class ReduceStrategy(Strategy):
    """How a reduction to one rank is done.

    >>> ReduceStrategy.named("ring") is ReduceStrategy.RING
    True
    """

    __slots__ = ()
    AUTO: ClassVar[ReduceStrategy]
    RING: ClassVar[ReduceStrategy]
    TREE: ClassVar[ReduceStrategy]
    CENTRALIZED: ClassVar[ReduceStrategy]
    DIRECT: ClassVar[ReduceStrategy]


class BroadcastStrategy(Strategy):
    """How a broadcast is done.

    >>> BroadcastStrategy.named("tree") is BroadcastStrategy.TREE
    True
    """

    __slots__ = ()
    AUTO: ClassVar[BroadcastStrategy]
    RING: ClassVar[BroadcastStrategy]
    TREE: ClassVar[BroadcastStrategy]
    CENTRALIZED: ClassVar[BroadcastStrategy]
    DIRECT: ClassVar[BroadcastStrategy]


for _kind in (AllReduceStrategy, ReduceStrategy, BroadcastStrategy):
    _kind.AUTO = _kind()
    _kind.RING = _kind("ring")
    _kind.TREE = _kind("tree")
    _kind.CENTRALIZED = _kind("central")
    _kind.DIRECT = _kind("direct")
AllReduceStrategy.DOUBLING = AllReduceStrategy("doubling")
