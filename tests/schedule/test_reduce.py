"""Reductions: every operation on every type is defined, or refused with a reason."""

import functools
import warnings

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from potluck.errors import UnsupportedOperation
from potluck.schedule.reduce import BFLOAT16, DTYPES, Array, Dtype, ReduceOp, Reducer, quiet

INTEGERS = [dtype for dtype in DTYPES if dtype.kind in "iu"]
FLOATS = [np.dtype("f2"), BFLOAT16, np.dtype("f4"), np.dtype("f8")]
COMPLEX = [np.dtype("c8"), np.dtype("c16")]
BOOL = np.dtype("?")
LOGICAL = {ReduceOp.AND, ReduceOp.OR}
BITWISE = {ReduceOp.BIT_AND, ReduceOp.BIT_OR, ReduceOp.BIT_XOR}
ORDERED = {ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX}


def reduced(op: ReduceOp, dtype: Dtype, *rows: object) -> Array:
    """The rows, one for each rank, reduced."""
    reducer = Reducer.of(op, dtype)
    operands = [np.array(row).astype(dtype) for row in rows]
    partial, out = np.empty(len(operands[0]), reducer.wide), np.empty(len(operands[0]), dtype)
    with quiet():
        reducer.fold(operands, partial)
        reducer.finish(partial, out, world_size=len(rows))
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", ReduceOp)
def test_what_makes_sense_is_allowed_and_nothing_else(op: ReduceOp, dtype: Dtype) -> None:
    """The table of the module, type by type."""
    if dtype in INTEGERS or dtype == BOOL:
        allowed = ORDERED | BITWISE | LOGICAL
    elif dtype in FLOATS:
        allowed = ORDERED | {ReduceOp.MEAN}
    else:
        allowed = {ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MEAN}
    if op in allowed:
        assert reduced(op, dtype, [1, 0], [1, 1]).dtype == dtype
    else:
        with pytest.raises(UnsupportedOperation, match=rf"{op.value} is not defined.*\."):
            Reducer.of(op, dtype)


@pytest.mark.parametrize("dtype", ["S4", "O", "f4,f4", "datetime64[s]", ">f4", "g"])
def test_other_types_are_refused(dtype: str) -> None:
    """Text, objects, records, dates, foreign byte orders, types that differ between machines."""
    with pytest.raises(UnsupportedOperation, match="cannot be reduced"):
        Reducer.of(ReduceOp.SUM, dtype)


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_integers_behave_as_in_c(dtype: Dtype) -> None:
    """Sums and products wrap around, without a warning; logic gives 0 or 1."""
    bounds = np.iinfo(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        total = reduced(ReduceOp.SUM, dtype, np.array([bounds.max, 5], dtype), [1, 6])
    assert total.tolist() == [bounds.min, 11]
    assert reduced(ReduceOp.PRODUCT, dtype, [3, 0], [7, 9]).tolist() == [21, 0]
    assert reduced(ReduceOp.MIN, dtype, [3, 8], [7, 2]).tolist() == [3, 2]
    assert reduced(ReduceOp.MAX, dtype, [3, 8], [7, 2]).tolist() == [7, 8]
    assert reduced(ReduceOp.BIT_AND, dtype, [12, 5], [10, 4]).tolist() == [8, 4]
    assert reduced(ReduceOp.BIT_OR, dtype, [12, 5], [10, 4]).tolist() == [14, 5]
    assert reduced(ReduceOp.BIT_XOR, dtype, [12, 5], [10, 4]).tolist() == [6, 1]
    assert reduced(ReduceOp.AND, dtype, [12, 5, 0], [10, 0, 0]).tolist() == [1, 0, 0]
    assert reduced(ReduceOp.OR, dtype, [12, 5, 0], [10, 0, 0]).tolist() == [1, 1, 0]


def test_truth_values_are_any_or_all() -> None:
    """Sum and max are "or", product and min are "and"."""
    rows = ([True, True, False, False], [True, False, True, False])
    for op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.OR, ReduceOp.BIT_OR):
        assert reduced(op, BOOL, *rows).tolist() == [True, True, True, False]
    for op in (ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.AND, ReduceOp.BIT_AND):
        assert reduced(op, BOOL, *rows).tolist() == [True, False, False, False]
    assert reduced(ReduceOp.BIT_XOR, BOOL, *rows).tolist() == [False, True, True, False]


@pytest.mark.parametrize("dtype", [*FLOATS, *COMPLEX], ids=str)
def test_a_mean_is_divided_once(dtype: Dtype) -> None:
    """By the number of ranks, at the end."""
    assert reduced(ReduceOp.MEAN, dtype, [1, 3], [2, 5], [6, 7]).tolist() == [3, 5]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_nan_wins_and_infinity_stays(dtype: Dtype) -> None:
    """In every operation, silently."""
    for op in ORDERED | {ReduceOp.MEAN}:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = reduced(op, dtype, [np.nan, 1, np.inf], [1, np.nan, np.inf])
        assert np.isnan(result[:2]).all()
        assert np.isinf(result[2])
    assert np.isnan(reduced(ReduceOp.SUM, dtype, [np.inf], [-np.inf]))[0]


@pytest.mark.parametrize(("dtype", "whole"), [("f2", 2048), (ml_dtypes.bfloat16, 256)])
def test_16_bit_floats_are_accumulated_in_32(dtype: str, whole: int) -> None:
    """Ones that a 16-bit sum would swallow one by one are counted, and rounded at the end."""
    rows = [[whole], *[[1]] * 8]
    kind = np.dtype(dtype)
    assert reduced(ReduceOp.SUM, kind, *rows).astype("f8").tolist() == [whole + 8]
    one_by_one = functools.reduce(np.add, [np.array(row).astype(kind) for row in rows])
    assert one_by_one.astype("f8").tolist() == [whole]
    assert Reducer.of(ReduceOp.SUM, kind).is_wide
    assert not Reducer.of(ReduceOp.MAX, kind).is_wide  # exact as it is


@given(
    hnp.arrays("f4", st.tuples(st.integers(1, 6), st.integers(0, 9))),
    st.sampled_from(["f2", "bfloat16", "f4", "f8", "c8"]),
    st.sampled_from([ReduceOp.SUM, ReduceOp.MEAN, ReduceOp.PRODUCT]),
)
def test_a_fold_goes_from_left_to_right(rows: Array, name: str, op: ReduceOp) -> None:
    """The same bits as numpy gives, operand by operand, in the type of the accumulator."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    reducer = Reducer.of(op, dtype)
    with quiet():
        operands = [row.astype(dtype) for row in rows]
        wide = [row.astype(reducer.wide) for row in operands]
        apply = np.multiply if op is ReduceOp.PRODUCT else np.add
        right = functools.reduce(apply, wide)
        if op is ReduceOp.MEAN:
            right = right / len(rows)
        result = reduced(op, dtype, *operands)
        # As complex numbers, for which numpy knows that NaN is like NaN.
        np.testing.assert_array_equal(result.astype("c16"), right.astype(dtype).astype("c16"))


@given(st.integers(2, 6), st.data())
def test_a_fold_may_end_in_the_memory_of_an_operand(size: int, data: st.DataObject) -> None:
    """As in place, where the result replaces the own operand, wherever that is in the order."""
    own_at = data.draw(st.integers(0, size - 1))
    reducer = Reducer.of(ReduceOp.SUM, "f8")
    rows = np.random.default_rng(size).normal(size=(size, 5))
    right = functools.reduce(np.add, rows)
    operands = [row.copy() for row in rows]
    reducer.fold(operands, operands[own_at], own_at=own_at)
    assert operands[own_at].tobytes() == right.tobytes()


def test_wide_partial_values_are_never_narrowed_on_the_way() -> None:
    """Wherever the own operand is: 16-bit memory holds no partial value."""
    operands = [np.array([value], "f2") for value in (2048, 1, 1, 1, 1)]
    out = np.empty(1, "f4")
    Reducer.of(ReduceOp.SUM, "f2").fold(operands, out, own_at=4)
    assert out.tolist() == [2052]
    assert operands[0].tolist() == [2048]


def test_one_operand_is_copied() -> None:
    """Alone in the world, the sum is the vector."""
    assert reduced(ReduceOp.SUM, np.dtype("f4"), [1, 2]).tolist() == [1, 2]


def test_a_result_can_replace_its_partial_value() -> None:
    """In the same memory, if the types agree; otherwise the partial value is used up."""
    total = np.array([4.0, 8.0])
    Reducer.of(ReduceOp.MEAN, "f8").finish(total, total, world_size=4)
    assert total.tolist() == [1, 2]
    Reducer.of(ReduceOp.SUM, "f8").finish(total, total, world_size=4)
    assert total.tolist() == [1, 2]
    out = np.empty(2, "f2")
    Reducer.of(ReduceOp.MEAN, "f2").finish(np.array([4, 8], "f4"), out, world_size=4)
    assert out.tolist() == [1, 2]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_a_mean_of_integers_is_rounded_towards_zero_where_that_is_asked_for(dtype: Dtype) -> None:
    """As C divides; also by more ranks than the type can count, and with all digits of 64 bits."""
    reducer = Reducer.of(ReduceOp.MEAN, dtype, truncate=True)
    top = int(np.iinfo(dtype).max)
    values = [7, top, 0, *((-7, -8, -top) if dtype.kind == "i" else ())]
    for world_size in (1, 3, 300):
        total = np.array(values * 5000, dtype)
        reducer.finish(total, total, world_size=world_size)
        right = [abs(value) // world_size * (1 if value > 0 else -1) for value in values]
        assert total.tolist() == right * 5000


def test_rounding_makes_no_mean_of_truth() -> None:
    """And floats need none."""
    with pytest.raises(UnsupportedOperation):
        Reducer.of(ReduceOp.MEAN, BOOL, truncate=True)
    assert Reducer.of(ReduceOp.MEAN, "f4", truncate=True) == Reducer.of(ReduceOp.MEAN, "f4")


@pytest.mark.parametrize("name", ["median", "", "ReduceOp.median", 7])
def test_a_reduction_that_does_not_exist_is_refused_with_those_that_do(name: object) -> None:
    """The error lists all of them."""
    with pytest.raises(ValueError, match=r"sum, mean, .*bit_xor, and, or") as refusal:
        ReduceOp.named(name)  # type: ignore[arg-type]
    assert repr(name) in str(refusal.value)
