"""The shared words: a matrix of links that all ranks read alike."""

import pytest

from potluck._types import LinkMatrix
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
