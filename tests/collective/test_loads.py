"""Loads: the busiest rank bounds the time of all."""

from potluck.collective.costs import Costs, Network
from potluck.collective.loads import Load
from potluck.vocabulary import LinkMatrix


def test_the_busiest_of_all_bounds_the_time() -> None:
    """Its way out, its way in, or its processor."""
    costs = Costs(Network(LinkMatrix((10**9, 1), (1, 10**9), ((0, 1), (1, 0)))))
    idle = ([0, 0], [0, 0], [0, 0], [0, 0])
    assert Load(*idle).bound(costs) == 0
    assert Load([0, 5], *idle[1:]).bound(costs) == 5_000_000_000
    assert Load(idle[0], [5, 0], *idle[2:]).bound(costs) == 5_000_000_000
    assert Load(*idle[:2], [3, 0], idle[3]).bound(costs) == 3 * costs.host.piece
    assert Load(*idle[:3], [0, 4_000_000]).bound(costs) == 1_000_000
