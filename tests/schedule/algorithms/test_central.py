"""Centralised: one rank does all the work."""

from potluck.schedule.algorithms.central import CENTRAL
from potluck.schedule.task import AlgorithmSettings, Collective, Task


def test_the_first_of_the_order_is_the_centre() -> None:
    """Everybody talks to it and to nobody else."""
    task = Task.whole(Collective.ALL_REDUCE, 4, 8)
    schedule = CENTRAL.schedule(task, AlgorithmSettings((2, 0, 1, 3), (1,) * 4))
    peers = [{*program.incoming, *program.outgoing} for program in schedule.programs]
    assert peers == [{2}, {2}, {0, 1, 3}, {2}]


def test_with_a_root_the_root_is_the_centre() -> None:
    """Whatever the order says."""
    for collective in (Collective.REDUCE, Collective.BROADCAST):
        schedule = CENTRAL.schedule(Task.whole(collective, 3, 8, root=1))
        assert [{*each.incoming, *each.outgoing} for each in schedule.programs] == [
            {1},
            {0, 2},
            {1},
        ]
