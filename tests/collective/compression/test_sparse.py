"""Sparse values: as bytes and as sums."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame
from potluck.collective.compression.sparse import Sparse
from potluck.collective.compression.topk import top_k
from support.gradients import normal


def test_values_come_back_at_their_places() -> None:
    """Bit by bit."""
    sparse = top_k(normal(5000), 0.1)
    found = Sparse.unpack(sparse.pack(), 5000)
    assert (found.indices == sparse.indices).all()
    assert found.values.tobytes() == sparse.values.tobytes()
    assert (found.dense()[found.indices] == found.values).all()


def test_they_add_up() -> None:
    """Like the vectors they stand for."""
    first, second = top_k(normal(500, seed=1), 0.1), top_k(normal(500, seed=2), 0.1)
    total = np.zeros(500, np.float32)
    first.add_to(total)
    second.add_to(total)
    assert (total == first.dense() + second.dense()).all()


def test_a_count_that_does_not_fit_is_refused() -> None:
    """Before anything is allocated for it."""
    data = top_k(normal(500), 0.1).pack()
    data[:8].view(np.uint64)[0] = 1 << 60
    with pytest.raises(MalformedFrame, match="of 500 values"):
        Sparse.unpack(data, 500)


@given(st.binary(max_size=120), st.integers(0, 300))
def test_any_bytes_are_unpacked_or_refused(data: bytes, total: int) -> None:
    """Fuzzing."""
    try:
        found = Sparse.unpack(np.frombuffer(data, np.uint8), total)
    except MalformedFrame:
        return
    assert found.dense().size == total


@given(st.data())
def test_a_changed_byte_is_noticed_or_harmless(data: st.DataObject) -> None:
    """Bytes that were once right are the better attack."""
    packed = top_k(normal(300), 0.2).pack()
    place = data.draw(st.integers(0, packed.size - 1))
    packed[place] ^= data.draw(st.integers(1, 255))
    try:
        found = Sparse.unpack(packed, 300)
    except MalformedFrame:
        return
    assert found.indices.size == found.values.size <= 300
    assert not found.indices.size or found.indices[-1] < 300


def test_a_coding_that_is_not_known_is_refused() -> None:
    """There are three."""
    data = top_k(normal(500), 0.1).pack()
    data[16] = 3
    with pytest.raises(MalformedFrame, match="not known: 3"):
        Sparse.unpack(data, 500)
