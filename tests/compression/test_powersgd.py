"""PowerSGD: low rank, warm start, the same bits everywhere."""

import contextlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from potluck import MalformedFrame
from potluck.compression import powersgd
from potluck.compression.base import CompressionContext
from potluck.compression.powersgd import PowerSGD
from support.gradients import normal, relative_error


def low_rank(
    rows: int, columns: int, rank: int
) -> "np.ndarray[tuple[int, ...], np.dtype[np.float32]]":
    """A matrix of a rank."""
    return normal(rows * rank).reshape(rows, rank) @ normal(columns * rank, 1).reshape(
        rank, columns
    )


def test_a_matrix_of_that_rank_is_found_at_once() -> None:
    """One step of power iteration spans it."""
    matrix = low_rank(60, 40, 3)
    method = PowerSGD(3)
    found = method.decode(method.encode(matrix.reshape(-1), CompressionContext((60, 40))), 2400)
    assert relative_error(found.reshape(60, 40), matrix) < 1e-4


def test_a_warm_start_gets_better_from_step_to_step() -> None:
    """The same gradient again is approximated as well as its rank allows."""
    matrix = low_rank(60, 40, 4) + 0.3 * normal(2400).reshape(60, 40)
    method, turn, errors = PowerSGD(4), CompressionContext((60, 40)), []
    for _ in range(6):
        found = method.decode(method.encode(matrix.reshape(-1), turn), 2400)
        errors.append(relative_error(found.reshape(60, 40), matrix))
    singular = np.linalg.svd(matrix, compute_uv=False)
    best = float(np.linalg.norm(singular[4:]) / np.linalg.norm(singular))
    assert errors[-1] < errors[0]
    assert errors[-1] < 1.01 * best


def test_a_step_without_a_gradient_is_no_trap() -> None:
    """Zeros, or fewer directions than the rank, leave room for what comes later."""
    later = low_rank(60, 40, 3)
    for first in (np.zeros((60, 40), np.float32), low_rank(60, 40, 1)):
        method, turn = PowerSGD(3), CompressionContext((60, 40))
        method.encode(first.reshape(-1), turn)
        turn.seed = 5
        found = method.decode(method.encode(later.reshape(-1), turn), 2400)
        assert relative_error(found.reshape(60, 40), later) < 1e-3


def test_columns_become_orthonormal() -> None:
    """Those that depend on others become zero instead of noise."""
    matrix = normal(300).reshape(100, 3)
    matrix[:, 2] = matrix[:, 0] - matrix[:, 1]
    found = powersgd.orthonormal(matrix)
    np.testing.assert_allclose(found.T @ found, np.diag([1, 1, 0]), atol=1e-6)


def test_a_scalar_product_is_that_of_numpy() -> None:
    """In another order of additions."""
    for size in (0, 1, 2, 7, 1000):
        first, second = normal(size).astype(np.float64), normal(size, 1).astype(np.float64)
        np.testing.assert_allclose(powersgd.dot(first, second), first @ second, atol=1e-9)


def test_a_product_is_made_in_blocks() -> None:
    """Of any height; taken away again, hardly anything is left."""
    for rows, columns in ((1, 1), (7, 70_000), (3000, 50), (2, 1)):
        p, q = normal(2 * rows).reshape(rows, 2), normal(2 * columns, 1).reshape(columns, 2)
        found = powersgd.product(p, q)
        np.testing.assert_allclose(found, p @ q.T, atol=1e-5)
        powersgd.take_away(found, p, q)
        assert not found.any()


def test_what_would_not_become_smaller_stays() -> None:
    """Vectors and small matrices, bit by bit."""
    for shape in ((50,), (4, 4), ()):
        values = normal(int(np.prod(shape)))
        method = PowerSGD(4)
        assert (
            method.decode(method.encode(values, CompressionContext(shape)), values.size) == values
        ).all()


def test_what_is_no_number_is_not_hidden() -> None:
    """One NaN in the matrix shows in the result."""
    matrix = normal(2400)
    matrix[77] = np.nan
    method = PowerSGD(4)
    with np.errstate(invalid="ignore"):
        assert np.isnan(
            method.decode(method.encode(matrix, CompressionContext((60, 40))), 2400)
        ).any()


@given(st.binary(max_size=120), st.integers(0, 60))
def test_any_bytes_are_unpacked_or_refused(data: bytes, total: int) -> None:
    """Fuzzing."""
    with np.errstate(all="ignore"), contextlib.suppress(MalformedFrame):
        assert powersgd.unpack(np.frombuffer(data, np.uint8), total).size == total
