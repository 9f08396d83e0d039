"""DistributedBackend: a backend that also has collectives."""

from __future__ import annotations

from potluck.runtime.objects import Objects
from potluck.runtime.reducing import Reducing
from potluck.runtime.transfers import Transfers

__all__ = ["DistributedBackend"]


class DistributedBackend(Reducing, Objects, Transfers):
    """The interface of everything that has collectives.

    A backend that derives from this has them all at once: they run on the messages that it moves.
    :class:`DistributedContext` lifts any other backend to this interface.

    Every collective is called by all ranks, in the same order.  It waits for its result, unless
    ``async_op=True`` is passed: then it returns a :class:`Work` at once, and the arrays belong to
    that until it is done.  Those of objects always wait.

    >>> from potluck import DistributedContext, SimulatedBackend
    >>> with DistributedContext(SimulatedBackend.create_group(1)[0]) as context:
    ...     isinstance(context, DistributedBackend), context.all_reduce(2.0, "mean")
    (True, 2.0)
    """
