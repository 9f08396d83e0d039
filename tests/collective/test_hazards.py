"""Hazards: what reads waits for what writes, what writes waits for what reads or wrote."""

from hypothesis import given
from hypothesis import strategies as st

from potluck.collective.hazards import Hazards

touches = st.tuples(st.integers(-5, 20), st.integers(1, 9), st.booleans(), st.booleans())


@given(st.lists(touches, max_size=12))
def test_every_conflict_of_every_cell_is_found(steps: list[tuple[int, int, bool, bool]]) -> None:
    """The intervals say what following each cell by itself says, and nothing else."""
    hazards = Hazards()
    writer: dict[int, int] = {}
    readers: dict[int, set[int]] = {}
    for index, (start, length, reads, writes) in enumerate(steps):
        cells = range(start, start + length)
        found = hazards.step(index, start, start + length, reads=reads, writes=writes)
        written = {writer[cell] for cell in cells if cell in writer}
        read = {one for cell in cells for one in readers.get(cell, set())}
        assert found[0] == (tuple(sorted(written)) if reads else ())
        assert found[1] == (tuple(sorted(written | read)) if writes else ())
        for cell in cells:
            if writes:
                writer[cell], readers[cell] = index, set()
            elif reads:
                readers.setdefault(cell, set()).add(index)


def test_reading_hinders_no_reader() -> None:
    """Any number of steps may send the same cells."""
    hazards = Hazards()
    assert hazards.step(0, 0, 4, reads=True, writes=False) == ((), ())
    assert hazards.step(1, 0, 4, reads=True, writes=False) == ((), ())
    assert hazards.step(2, 2, 3, reads=True, writes=True) == ((), (0, 1))
