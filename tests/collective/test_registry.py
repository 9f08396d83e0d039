"""Every collective that an algorithm offers is right, for every number of ranks up to 64."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.collective import registry, verify
from potluck.collective.machine import Limits
from potluck.collective.task import Collective, Layout
from potluck.errors import UnsupportedOperation
from support.collectives import OFFERS, ROOTED, check, dice, layouts, task

TO_THE_LAST_ROOT = (*range(1, 10), 16, 17, 33, 64)


def lengths(size: int) -> int:
    """Nothing, one element, fewer than ranks, an odd number, several for each: in turn."""
    return (0, 1, size - 1, 2 * size + 1, 5 * size - 3)[size % 5]


def roots_of(name: str, size: int) -> Sequence[int]:
    """Every rank; in large worlds only some, where a schedule has as many steps as pairs."""
    return range(size) if name != "direct" or size < 10 else (0, size // 2, size - 1)


@pytest.mark.parametrize(("name", "collective"), OFFERS, ids=str)
def test_it_is_right_for_every_world_size(name: str, collective: Collective) -> None:
    """From 1 to 64 ranks, also for empty vectors and for those shorter than the world."""
    for size in range(1, 65):
        work = task(collective, size, lengths(size), root=size // 3)
        check(registry.schedule(name, work, Layout.plain(size, piece=7)))


@pytest.mark.parametrize(("name", "collective"), ROOTED, ids=str)
def test_it_is_right_for_every_root(name: str, collective: Collective) -> None:
    """Whoever the root is, in small worlds, in large ones, and around powers of two."""
    for size in TO_THE_LAST_ROOT:
        for root in roots_of(name, size):
            check(registry.schedule(name, task(collective, size, size + 1, root)))


@pytest.mark.parametrize(("name", "collective"), OFFERS, ids=str)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 11])
def test_it_is_proved_right_with_the_least_room(
    name: str, collective: Collective, size: int
) -> None:
    """Streams of one element and the prescribed staging suffice; in place as well as beside."""
    work = task(collective, size, 2 * size + 1, root=size - 1)
    layout = Layout.plain(size, piece=2, arity=3)
    verify.prove(registry.schedule(name, work, layout), limits=Limits(piece=2))


@given(st.data())
@settings(max_examples=150)
def test_it_is_right_however_things_interleave(data: st.DataObject) -> None:
    """Any layout, any sizes of pieces and streams, any order of events."""
    name, collective = data.draw(st.sampled_from(OFFERS))
    size = data.draw(st.integers(1, 9))
    root = data.draw(st.integers(0, size - 1))
    layout = data.draw(layouts(size))
    work = task(collective, size, data.draw(st.integers(0, 40)), root)
    longer = data.draw(st.integers(0, 5))
    limits = Limits(layout.piece + longer, capacity=data.draw(st.integers(1, 12)))
    seed = data.draw(st.integers(0, 2**32))
    schedule = registry.schedule(name, work, layout)
    verify.prove(schedule, limits=limits, dice=dice(seed))


@pytest.mark.soak
@pytest.mark.parametrize(("name", "collective"), OFFERS, ids=str)
def test_it_is_proved_right_for_every_world_size_and_root(
    name: str, collective: Collective
) -> None:
    """The proof with the least room, for all worlds up to 64 and all roots."""
    for size in range(1, 65):
        for root in roots_of(name, size) if collective.has_root else (0,):
            work = task(collective, size, size + 3, root)
            layout = Layout.plain(size, piece=1)
            verify.prove(registry.schedule(name, work, layout), limits=Limits(piece=1))


def test_every_collective_is_offered_by_somebody() -> None:
    """There is nothing that can be asked for and not be done."""
    assert {collective for _, collective in OFFERS} == set(Collective)
    for collective in Collective:
        assert registry.offering(collective)


def test_an_unknown_algorithm_is_refused() -> None:
    """The error lists those that exist."""
    with pytest.raises(UnsupportedOperation, match=r"'star'.*direct, doubling, ring, tree"):
        registry.find("star")
