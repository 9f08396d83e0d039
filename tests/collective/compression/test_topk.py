"""top-k: exact for few values, by a sample for many."""

import numpy as np
import pytest
from hypothesis import given

from potluck.collective.compression.base import Floats
from potluck.collective.compression.topk import EXACT, RUN, SAMPLED, count_for, top_k
from support.gradients import normal, vectors


@given(values=vectors(finite=False))
def test_no_value_left_behind_is_larger_than_one_kept(values: Floats) -> None:
    """NaN counts as the largest; zeros are not worth a place."""
    kept = top_k(values, 0.2)
    sizes = np.where(np.isnan(values), np.inf, np.abs(values))
    left = np.delete(sizes, kept.indices)
    assert kept.indices.size == min(count_for(values.size, 0.2), np.count_nonzero(sizes))
    assert not left.size or not kept.indices.size or left.max() <= sizes[kept.indices].min()
    assert kept.values.tobytes() == values[kept.indices].tobytes()


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.1])
def test_a_sample_finds_about_as_many_and_nearly_the_same(ratio: float) -> None:
    """Never more than asked, at least nine in ten, and all of them truly large."""
    values = normal(40 * EXACT)
    wanted = count_for(values.size, ratio)
    found = top_k(values, ratio)
    assert 0.9 * wanted <= found.indices.size <= wanted
    border = np.partition(np.abs(values), values.size - wanted)[values.size - wanted]
    assert np.abs(found.values).min() >= 0.9 * border


@pytest.mark.parametrize("shape", ["zeros", "one", "steps", "tail"])
def test_odd_distributions_are_sorted_out_exactly(shape: str) -> None:
    """Where a sample says nothing about the whole."""
    values = np.zeros(3 * EXACT, np.float32)
    match shape:
        case "one":
            values[12345] = -2.0
        case "steps":
            values[:] = 1.0
        case "tail":
            values[-100:] = 5.0
    found = top_k(values, 0.01)
    most = count_for(values.size, 0.01)
    assert found.indices.size == min(most, np.count_nonzero(values))
    assert (np.abs(found.values) == np.abs(values).max()).all()


def test_layers_of_different_size_are_no_trap() -> None:
    """Where large values lie together, as in a bucket of several tensors, or ascend."""
    for values in (
        np.concatenate([normal(EXACT) * np.float32(10.0**-power) for power in range(6)]),
        np.arange(5 * EXACT, dtype=np.float32),
        -np.arange(5 * EXACT, dtype=np.float32)[::-1].copy(),
    ):
        wanted = count_for(values.size, 0.01)
        found = top_k(values, 0.01)
        border = np.partition(np.abs(values), values.size - wanted)[values.size - wanted]
        assert 0.9 * wanted <= found.indices.size <= wanted
        assert np.abs(found.values).min() >= border


def test_a_sample_that_misleads_is_not_believed() -> None:
    """All of it lies among the largest values: so all are sorted out."""
    seed, total = 3, 4 * EXACT
    raw = np.random.PCG64(seed).random_raw(SAMPLED // RUN)
    values = normal(total)
    runs = values.reshape(-1, RUN)
    runs[(raw % np.uint64(len(runs))).astype(np.int64)] *= 1000
    found = top_k(values, 0.5, seed)
    assert found.indices.size == total // 2


def test_what_is_no_number_is_always_kept() -> None:
    """In a large tensor too."""
    values = normal(3 * EXACT)
    values[[77, 150_000]] = [np.nan, np.inf]
    assert {77, 150_000} <= set(top_k(values, 0.01).indices.tolist())


def test_the_same_seed_finds_the_same() -> None:
    """There is no other chance in it."""
    values = normal(3 * EXACT)
    assert (top_k(values, 0.01, 5).indices == top_k(values, 0.01, 5).indices).all()
