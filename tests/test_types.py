"""The shared words: a matrix of links that all ranks read alike."""

import pytest

from potluck._types import LinkMatrix, sharing_air
from potluck.errors import InvalidWorldSize


def test_equal_links_are_made_at_once() -> None:
    """A rank has no latency to itself."""
    links = LinkMatrix.uniform(3, rate=5, latency=7)
    assert links.latency == ((0, 7, 7), (7, 0, 7), (7, 7, 0))
    assert links.up == links.down == (5, 5, 5)


@pytest.mark.parametrize(
    ("up", "down", "latency"),
    [
        ((1,), (1, 1), ((0,),)),
        ((1,), (1,), ()),
        ((1, 1), (1, 1), ((0, 1), (1,))),
        ((-1,), (1,), ((0,),)),
        ((1,), (1 << 63,), ((0,),)),
        ((1,), (1,), ((1 << 32,),)),
        ((1,), (1,), ((-1,),)),
    ],
)
def test_what_is_no_matrix_is_refused(
    up: tuple[int, ...], down: tuple[int, ...], latency: tuple[tuple[int, ...], ...]
) -> None:
    """Wrong shapes, negative numbers, numbers that do not fit."""
    with pytest.raises(ValueError, match=r"as many rates|must fit"):
        LinkMatrix(up, down, latency)


def test_nobody_has_no_links() -> None:
    """A group has at least one rank."""
    with pytest.raises(InvalidWorldSize):
        LinkMatrix((), (), ())


def test_radios_are_told_for_all_ranks_or_for_none() -> None:
    """Numbers that are not negative."""
    matrix = LinkMatrix((1, 1), (1, 1), ((0, 1), (1, 0)), air=(0, 3))
    assert matrix.air == (0, 3)
    for wrong in ((1,), (0, -1)):
        with pytest.raises(ValueError, match="2 ranks need as many numbers of radios"):
            LinkMatrix((1, 1), (1, 1), ((0, 1), (1, 0)), air=wrong)


@pytest.mark.parametrize(
    ("told", "air"),
    [
        ([(0, 0), (0, 5), (0, 5)], (0, 1, 1)),
        ([(1, 5), (2, 5)], (1, 2)),
        ([(1, 5), (0, 5), (0, 6)], (1, 1, 2)),
        ([(1, 5), (2, 5), (0, 5)], (1, 1, 1)),
        ([(0, 0)], ()),
    ],
    ids=["network", "cells", "unknown cell", "a bridge between cells", "cables"],
)
def test_who_shares_a_radio_is_found_by_cell_and_network(
    told: list[tuple[int, int]], air: tuple[int, ...]
) -> None:
    """The access point decides; who does not know it is with those of its network."""
    assert sharing_air(told) == air
