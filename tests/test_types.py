"""The shared words: a matrix of links that all ranks read alike."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck._types import LinkMatrix
from potluck.errors import InvalidWorldSize, MalformedFrame

rates = st.integers(0, 2**63 - 1)
times = st.integers(0, 2**32 - 1)


@st.composite
def matrices(draw: st.DrawFn) -> LinkMatrix:
    """Any matrix of links."""
    size = draw(st.integers(1, 5))
    row = st.tuples(*[times] * size)
    return LinkMatrix(
        draw(st.tuples(*[rates] * size)),
        draw(st.tuples(*[rates] * size)),
        draw(st.tuples(*[row] * size)),
    )


@given(matrices())
def test_rows_make_the_matrix_again(links: LinkMatrix) -> None:
    """What each rank sends of itself is all there is."""
    rows = [links.row(rank) for rank in range(links.size)]
    assert LinkMatrix.from_rows(rows) == links
    assert {len(row) for row in rows} == {16 + 4 * links.size}


def test_a_row_has_fixed_bytes() -> None:
    """Little-endian: up, down, then the latencies."""
    links = LinkMatrix((1, 0), (2, 0), ((0, 3), (0, 0)))
    assert links.row(0) == bytes.fromhex("0100000000000000 0200000000000000 00000000 03000000")


def test_equal_links_are_made_at_once() -> None:
    """Nobody is far from itself."""
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
    with pytest.raises(InvalidWorldSize):
        LinkMatrix.from_rows([])


def test_a_row_of_another_length_names_its_rank() -> None:
    """It belongs to a group of another size."""
    links = LinkMatrix.uniform(2, rate=5, latency=7)
    with pytest.raises(MalformedFrame, match="20 bytes where 24 are due") as caught:
        LinkMatrix.from_rows([links.row(0), links.row(1)[:-4]])
    assert caught.value.rank == 1
