"""The demo's sum over a ring: right, equal on all ranks, and ended by the loss of any of them."""

from collections.abc import Iterator

import numpy as np
import pytest

from potluck import PeerLost, SimulatedBackend
from potluck.apps.cli.demo_model import Array
from potluck.apps.cli.demo_ring import Ring, Traffic
from support.threads import Background, eventually, together


class Circle:
    """All ranks of a simulated group, each with its ring."""

    def __init__(self, world: int) -> None:
        self.backends = SimulatedBackend.create_group(world)
        self.traffic = [Traffic() for _ in range(world)]
        self.rings = list(map(Ring, self.backends, self.traffic))

    def add_up(self, arrays: list[Array]) -> None:
        """Let all ranks take part at once."""
        together(
            *(
                lambda ring=ring, array=array: ring.add_up(array)
                for ring, array in zip(self.rings, arrays, strict=True)
            )
        )

    def close(self) -> None:
        """Close every rank."""
        for backend in self.backends:
            backend.close()


@pytest.fixture(params=[1, 2, 3, 5])
def circle(request: pytest.FixtureRequest) -> Iterator[Circle]:
    """Groups of several sizes."""
    circle = Circle(request.param)
    yield circle
    circle.close()


@pytest.mark.parametrize("length", [1, 7, 1000])
def test_everybody_gets_the_sum_bit_for_bit(circle: Circle, length: int) -> None:
    """Also when the array cannot be cut evenly, or has fewer numbers than there are ranks."""
    source = np.random.default_rng(length)
    arrays: list[Array] = [source.normal(size=length).astype(np.float32) for _ in circle.rings]
    expected = np.sum(arrays, axis=0, dtype=np.float64)
    circle.add_up(arrays)
    assert len({array.tobytes() for array in arrays}) == 1
    np.testing.assert_allclose(arrays[0], expected, rtol=1e-4, atol=1e-5)


def test_traffic_is_counted(circle: Circle) -> None:
    """Each rank sends 2(n-1) parts, together 2(n-1)/n of the array."""
    world = len(circle.rings)
    circle.add_up([np.ones(world * 10, np.float32) for _ in circle.rings])
    parts = 2 * (world - 1)
    assert {(it.messages, it.sent) for it in circle.traffic} == {(parts, parts * 40)}


def test_one_rank_shares_its_array(circle: Circle) -> None:
    """Whoever has the latest state hands it to all others."""
    source = len(circle.rings) - 1
    arrays: list[Array] = [np.full(50, rank, np.float32) for rank in range(len(circle.rings))]
    together(
        *(
            lambda ring=ring, array=array: ring.share(array, source)
            for ring, array in zip(circle.rings, arrays, strict=True)
        )
    )
    assert all((array == source).all() for array in arrays)


@pytest.mark.parametrize("lost", [0, 2, 3])
def test_every_rank_notices_a_loss_itself(lost: int) -> None:
    """Also those that are no neighbours of the lost rank, while nobody else leaves."""
    circle = Circle(5)
    try:
        running = {
            rank: Background(lambda ring=ring: ring.add_up(np.ones(100, np.float32)))  # type: ignore[misc]
            for rank, ring in enumerate(circle.rings)
            if rank != lost
        }
        circle.backends[lost].lose()
        for action in running.values():
            eventually(lambda action=action: action.ended)  # type: ignore[misc]
            with pytest.raises(PeerLost) as caught:
                action.result()
            assert caught.value.rank == lost
    finally:
        circle.close()
